"""Timelines as a Chrome trace (the Trace Event Format, JSON object form), which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfmodel.timeline import Timeline

DECIMALS = 3
"""Of a microsecond: the format's own resolution is a nanosecond."""


def chrome_trace(timelines: Mapping[str, Timeline], about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A trace with one process for each timeline and one thread for each of its streams.

    Operations are complete events (`X`) with their interval, kind and whether they lie on the critical path; what waits
    for an operation of another stream is joined to it by a flow (`s`, `f`).

    Args:
        timelines: Name of the process -> timeline.
        about: What the trace's own metadata say, plain JSON values.
    """
    events: list[dict[str, Any]] = []
    flow = 0
    for pid, (name, timeline) in enumerate(timelines.items(), 1):
        tids = {stream: tid for tid, stream in enumerate(timeline.streams, 1)}
        events.append(_metadata("process_name", pid, 0, name=name))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for stream, tid in tids.items():
            events.append(_metadata("thread_name", pid, tid, name=stream))
            events.append(_metadata("thread_sort_index", pid, tid, sort_index=tid))
        critical = set(timeline.critical_path)
        for i, op in enumerate(timeline.ops):
            start, end = round(timeline.starts[i], DECIMALS), round(timeline.ends[i], DECIMALS)
            place = {"pid": pid, "tid": tids[op.stream]}
            shown = {"low_us": round(op.low_us, DECIMALS), "high_us": round(op.high_us, DECIMALS), "critical": i in critical}
            events.append(
                {
                    "name": op.name, "cat": op.kind, "ph": "X", "ts": start, "dur": round(end - start, DECIMALS), **place,
                    "args": {**op.details, **shown},
                }
            )  # fmt: skip
            for j in timeline.waits[i]:
                source = timeline.ops[j]
                if source.stream != op.stream:
                    flow += 1
                    # A flow hangs on the slice that encloses its time stamp: inside the source, not at its very end.
                    leaves = round(timeline.ends[j] - min(source.us / 2, 10**-DECIMALS), DECIMALS)
                    wait = {"name": "waits for", "cat": "dependency", "id": flow, "pid": pid}
                    events.append({**wait, "ph": "s", "ts": leaves, "tid": tids[source.stream]})
                    events.append({**wait, "ph": "f", "bp": "e", "ts": start, "tid": tids[op.stream]})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}


def _metadata(what: str, pid: int, tid: int, **values: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": values}

"""The trace against the rules of the Trace Event Format, as Perfetto's JSON importer reads it."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.timeline import COMPUTE, Op, schedule
from perfmodel.trace import chrome_trace


def check_format(trace: dict) -> None:
    """What an importer needs: known phases and their fields, nested slices, flows that begin and end inside slices."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] in ("ms", "ns")
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    events = trace["traceEvents"]
    slices, starts, finishes, named = {}, {}, {}, set()
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        if event["ph"] == "M":
            key = {"process_name": "name", "thread_name": "name"}.get(event["name"], "sort_index")
            assert set(event["args"]) == {key}
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["cat"], str)
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"], event["name"]))
        else:
            assert event["ph"] in ("s", "f") and event["cat"]
            key = (event["pid"], event["id"])
            side = starts if event["ph"] == "s" else finishes
            assert key not in side
            side[key] = event
            if event["ph"] == "f":
                assert event["bp"] == "e"
    assert set(slices) <= named
    for some in slices.values():
        some.sort()
        assert all(first[1] <= second[0] + 1e-9 * (1 + second[0]) for first, second in zip(some, some[1:], strict=False))
    assert set(starts) == set(finishes)
    for key, event in starts.items():
        end = finishes[key]
        assert event["ts"] <= end["ts"] and (event["pid"], event["tid"]) != (end["pid"], end["tid"])
        for at in (event, end):
            own = slices[at["pid"], at["tid"]]
            assert any(start - 1e-6 <= at["ts"] <= stop + 1e-6 for start, stop, _ in own)


def test_by_hand():
    ops = [
        Op("a", COMPUTE, 10.0004, 9, 11, kind="gemm", details={"kernel": "torch/bf16"}),
        Op("x", "network", 4.0, 3, 5, ("a",), kind="all_to_all"),
        Op("b", COMPUTE, 6.0, 6, 6, ("x",)),
    ]
    trace = chrome_trace({"bf16": schedule(ops), "decision": schedule(ops[:1])}, {"model": "m"})
    check_format(trace)
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["ts"], e["dur"], e["pid"], e["tid"]) for e in shown] == [
        ("a", "gemm", 0.0, 10.0, 1, 1), ("x", "all_to_all", 10.0, 4.0, 1, 2), ("b", "compute", 14.0, 6.0, 1, 1),
        ("a", "gemm", 0.0, 10.0, 2, 1),
    ]  # fmt: skip
    assert shown[0]["args"] == {"kernel": "torch/bf16", "low_us": 9, "high_us": 11, "critical": True}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {(1, 1): COMPUTE, (1, 2): "network", (2, 1): COMPUTE}
    assert [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"] == ["bf16", "decision"]
    flows = [(e["ph"], e["id"], e["ts"], e["tid"]) for e in trace["traceEvents"] if e["ph"] in "sf"]
    assert flows == [("s", 1, 9.999, 1), ("f", 1, 10.0, 2), ("s", 2, 13.999, 2), ("f", 2, 14.0, 1)]
    assert trace["otherData"] == {"model": "m"}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), count=st.integers(0, 40))
def test_any_timeline_makes_a_sound_trace(seed, count):
    generator = np.random.default_rng(seed)
    ops = []
    for i in range(count):
        us = float(generator.choice([0.0, 0.0004, 3.0, generator.uniform(0, 100)]))
        after = tuple(str(j) for j in generator.choice(i, size=min(i, 2), replace=False)) if i else ()
        ops.append(Op(str(i), str(generator.choice([COMPUTE, "nvlink", "network"])), us, us, us, after))
    timeline = schedule(ops)
    trace = chrome_trace({"step": timeline})
    check_format(trace)
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in shown] == [op.name for op in ops]
    crossing = sum(timeline.ops[j].stream != op.stream for op, waits in zip(ops, timeline.waits, strict=True) for j in waits)
    assert sum(event["ph"] == "s" for event in trace["traceEvents"]) == crossing

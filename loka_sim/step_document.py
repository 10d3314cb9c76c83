"""A step's timeline and communication as documents hold them: summaries in a what-if's, all of it in `loka-sim step`'s."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import loka_sim
from loka_sim.communication import Communication, describe
from loka_sim.files import write_bytes_atomic
from loka_sim.report.words import hardware as written
from loka_sim.step_plan import BF16, DECISION
from perfmodel.timeline import COMPUTE, Timeline
from perfmodel.trace import chrome_trace

if TYPE_CHECKING:
    from loka_sim.whatif import WhatIf

SCHEMA_VERSION = 1
KIND = "loka-sim/step"
TABLE = "table"
LABELS = {TABLE: "the dispatch table", DECISION: "loka-sim's decision", BF16: "bf16"}
_DENSE_WORDS = {
    "ddp": "all-reduces of dense gradients",
    "fsdp": "gathers and reduce-scatters of dense parameters",
    "hsdp": "gathers, reduce-scatters and all-reduces of dense parameters",
}


def summary(timeline: Timeline) -> dict[str, Any]:
    """A timeline's total with its interval, what communication costs, streams and critical path."""
    low, high = timeline.interval()
    total = timeline.total_us
    return {
        "step_us": total,
        "step_low_us": low,
        "step_high_us": high,
        "exposed_us": timeline.exposed_us,
        "slowed_us": timeline.slowed_us,
        "operations": len(timeline.ops),
        "streams": {
            name: {"busy_us": timeline.busy_us(name), "share": timeline.busy_us(name) / total if total else 0.0}
            for name in timeline.streams
        },
        "kinds_us": timeline.sum_us(),
        "critical_us": timeline.sum_us(only=timeline.critical_path),
    }


def communication_document(answer: WhatIf) -> dict[str, Any] | None:
    """What a what-if's document says of communication; None for one GPU."""
    found = answer.communication
    if found is None:
        return None
    parallel = found.parallel
    result = {
        "gpus": parallel.gpus,
        "hosts": parallel.hosts,
        "cluster": describe(parallel.cluster),
        "dense": parallel.dense,
        "exchange": parallel.exchange,
        "all_to_all_bytes": found.embedding_bytes,
        "all_reduce_bytes": found.dense_bytes,
        "all_to_all_us": found.exchange_us,
        "all_reduce_us": found.dense_us,
        "basis": found.basis,
        "exposed_us": None,
        "slowed_us": None,
        "step_us": None,
        "speedup": None,
        "text": in_words(found),
    }
    if found.missing:
        return result
    decided, bf16_us = summary(answer.timelines[DECISION]), answer.timelines[BF16].total_us
    keys = ("exposed_us", "slowed_us", "step_us", "step_low_us", "step_high_us", "streams", "critical_us")
    figures = {key: decided[key] for key in keys}
    spans = answer.timelines[DECISION].spans(lambda op: str(op.details["phase"]) if op.stream == COMPUTE else op.kind)
    figures["lanes"] = [{"stream": name, "spans": [list(span) for span in some]} for name, some in spans.items()]
    return {**result, **figures, "bf16_step_us": bf16_us, "speedup": bf16_us / decided["step_us"]}


def in_words(found: Communication) -> str:
    """What travels and how long it takes, in words."""
    parallel = found.parallel
    if found.missing:
        return f"No figure for communication between {parallel.gpus:,} GPUs: {found.missing}."
    assert found.exchange_us is not None and found.dense_us is not None
    where = ""
    if parallel.hosts > 1:
        assert parallel.cluster is not None
        where = f" in {parallel.hosts:,} hosts ({parallel.cluster.name}, {parallel.cluster.nic_gbps:g} Gb/s a GPU)"
    compressed = "" if parallel.exchange == "bf16" else f" in {parallel.exchange}"
    basis = ""
    if found.basis == "modelled":
        assert parallel.cluster is not None
        share = f"{parallel.cluster.uncertainty:.0%}"
        basis = f" Across hosts that is a model of the links, not measured: {share} either way is assumed."
    elif found.basis == "extrapolated":
        basis = " That is extrapolated: so many GPUs of one host, or messages so large, were never measured."
    like = f" Inside a host it is as measured on the {written(found.like)}, whose NVLink is the same." if found.like else ""
    return (
        f"Communication between {parallel.gpus:,} GPUs{where}: all-to-alls of embeddings{compressed} "
        f"{found.exchange_us:,.0f} us ({found.embedding_bytes / 2**20:,.1f} MiB a rank each way), "
        f"{_DENSE_WORDS[parallel.dense]} {found.dense_us:,.0f} us ({found.dense_bytes / 2**20:,.1f} MiB).{basis}{like}"
    )


def step_document(answer: WhatIf, table: Timeline | None = None) -> dict[str, Any]:
    """The document of `loka-sim step`: summaries of its steps and what is exchanged (schemas/step.schema.json).

    Args:
        answer: The what-if.
        table: The step under a dispatch table, where one was given (`loka_sim.table_step`).
    """
    from loka_sim.document import command, rounded

    found = answer.communication
    words = command(answer.settings)
    words[1] = "step"
    timelines = {name: summary(made) for name, made in _all(answer, table).items()}
    calls = () if found is None else found.calls
    return rounded(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "loka_sim_version": loka_sim.__version__,
            "command": " ".join(words),
            "model": {"name": answer.spec.name, "fingerprint": answer.spec.fingerprint, "batch": answer.settings.batch},
            "hardware": answer.hardware["name"],
            "gpus": answer.settings.gpus,
            "cluster": None if found is None else describe(found.parallel.cluster),
            "dense": answer.settings.dense,
            "exchange": answer.settings.exchange,
            "missing": None if found is None else found.missing,
            "steps": timelines,
            "speedup": timelines[BF16]["step_us"] / timelines[DECISION]["step_us"],
            "collectives": [
                {
                    **{key: getattr(call.call, key) for key in ("op", "dtype", "ranks", "per_host", "bytes_per_rank", "dim")},
                    "count": calls.count(call), "stream": call.stream, "basis": call.basis,
                    "time_us": call.time.us, "low_us": call.time.low_us, "high_us": call.time.high_us,
                }
                for call in dict.fromkeys(calls)
            ],
            "statements": _statements(answer),
        }
    )  # fmt: skip


def _statements(answer: WhatIf) -> list[dict[str, str]]:
    from loka_sim.statements import statements

    return [{"level": level, "text": said} for level, said in statements(answer)]


def _all(answer: WhatIf, table: Timeline | None) -> dict[str, Timeline]:
    return {**answer.timelines, **({TABLE: table} if table else {})}


def trace(answer: WhatIf, command: str, table: Timeline | None = None) -> dict[str, Any]:
    """All steps as a Chrome trace, see `perfmodel.trace`."""
    about: Mapping[str, Any] = {
        "model": answer.spec.name, "batch": answer.settings.batch, "gpus": answer.settings.gpus,
        "hardware": answer.hardware["name"], "command": command, "loka_sim_version": loka_sim.__version__,
    }  # fmt: skip
    made = _all(answer, table)
    return chrome_trace({label: made[name] for name, label in LABELS.items() if name in made}, about)


def write_trace(answer: WhatIf, path: Path, command: str, table: Timeline | None = None) -> None:
    """Write `trace`, compressed where the name ends in .gz, which Perfetto opens too.

    Raises:
        UserError: the file cannot be written.
    """
    payload = json.dumps(trace(answer, command, table), allow_nan=False, separators=(",", ":")).encode()
    write_bytes_atomic(path, gzip.compress(payload, mtime=0) if path.suffix == ".gz" else payload)

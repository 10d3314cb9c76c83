"""The screen of `loka-sim step`: streams, what a step consists of, what bounds it, what travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loka_sim.cli.output import Style, figure, statements, table, wrap

_LABELS = {"bf16": "bf16", "decision": "loka-sim's decision", "table": "the table"}
_WORDS = {
    "all_to_all": "all-to-all", "all_reduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_gather": "all-gather",
    "gemm": "GEMM", "batched_gemm": "batched GEMM", "row": "reduction of rows", "column": "reduction of columns",
    "both": "reduction both ways", "partials": "sums of parts", "copy": "copies of biases",
}  # fmt: skip
_MOST_CALLS = 10


def step_screen(document: dict[str, Any], style: Style, trace: Path | None = None) -> str:
    """The screen as text, at most 100 columns wide.

    Args:
        document: `step_document`'s.
        style: Colour or none.
        trace: The trace that was written, if any.
    """
    lines = [style(line, "dim") for line in wrap(_subject(document), "", "  ")]
    decided = _shown(document)
    ends = f"[{decided['step_low_us']:,.0f}, {decided['step_high_us']:,.0f}]"
    speedup = document["steps"]["bf16"]["step_us"] / decided["step_us"]
    lines += ["", style(f"step {decided['step_us']:,.0f} us {ends}, {speedup:.2f}x faster than in bf16", "bold"), ""]
    lines += [*_streams(document, style), "", *_kinds(document, style)]
    if document["collectives"]:
        lines += ["", *_calls(document, style)]
    lines += ["", *statements(document, style)]
    if trace is not None:
        lines += ["", f"wrote {trace}: open it in https://ui.perfetto.dev"]
    return "\n".join(lines)


def scaling_screen(document: dict[str, Any], style: Style) -> str:
    """One row for each number of GPUs, at most 100 columns wide.

    Args:
        document: `loka_sim.scaling.scaling_document`'s.
        style: Colour or none.
    """
    model, cluster = document["model"], document["cluster"]
    hosts = "" if cluster is None else f", hosts of {cluster['name']} ({cluster['nic_gbps']:g} Gb/s a GPU)"
    how = f"{document['dense']}, embeddings in {document['exchange']}, batch {model['batch']:,} per GPU"
    lines = [style(line, "dim") for line in wrap(f"{model['name']}, {document['hardware'].upper()}{hosts}, {how}", "", "  ")]
    head_words = (
        "GPUs",
        "step us",
        "90% interval",
        "bf16 us",
        "speedup",
        "comm us",
        "exposed",
        "slowed",
        "efficiency",
        "samples/s",
        "",
    )
    rows: list[tuple[str, ...]] = [head_words]
    for row in document["rows"]:
        if "missing" in row:
            rows.append((f"{row['gpus']:,}", *["-"] * 9, ""))
            continue
        ends = f"[{row['step_low_us']:,.0f}, {row['step_high_us']:,.0f}]"
        us = [f"{row[key]:,.0f}" for key in ("bf16_step_us", "communication_us", "exposed_us", "slowed_us")]
        rows.append(
            (
                f"{row['gpus']:,}", f"{row['step_us']:,.0f}", ends, us[0], f"{row['speedup']:.2f}x", *us[1:],
                f"{row['efficiency']:.0%}", _rate(row["samples_per_s"]), row["basis"] or "",
            )
        )  # fmt: skip
    head, *body = table(rows, "rrrrrrrrrrl", indent=0)
    missing = [f"{row['gpus']:,} GPUs: {row['missing']}." for row in document["rows"] if "missing" in row]
    said = [style(line, "yellow") for text in missing for line in wrap(text, "  ! ", "    ")]
    return "\n".join([*lines, "", style(head, "dim"), *body, "", *said, *statements(document, style)])


def _rate(value: float) -> str:
    """Samples a second, three digits."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{prefix}"
    return f"{value:.3g}"


def _subject(document: dict[str, Any]) -> str:
    model, cluster = document["model"], document["cluster"]
    where = ""
    if document["gpus"] > 1:
        where = f", {document['dense']}, embeddings in {document['exchange']}"
        if cluster is not None and document["gpus"] > cluster["gpus_per_host"]:
            hosts = document["gpus"] // cluster["gpus_per_host"]
            where = f" in {hosts:,} hosts of {cluster['name']} ({cluster['nic_gbps']:g} Gb/s a GPU)" + where
    return f"{model['name']}, {document['gpus']:,} x {document['hardware'].upper()}{where}, batch {model['batch']:,} per GPU"


def _streams(document: dict[str, Any], style: Style) -> list[str]:
    names = list(dict.fromkeys(name for step in document["steps"].values() for name in step["streams"]))
    rows = [("us", *(_LABELS[name] for name in document["steps"]))]
    rows.append(("step", *(f"{step['step_us']:,.0f}" for step in document["steps"].values())))
    for name in names:
        cells = []
        for step in document["steps"].values():
            busy = step["streams"].get(name, {"busy_us": 0.0, "share": 0.0})
            cells.append(f"{busy['busy_us']:,.0f} ({busy['share']:.0%})")
        rows.append((f"{name}, busy", *cells))
    if len(names) > 1:
        for words, key in (("communication, exposed", "exposed_us"), ("kernels slowed by it", "slowed_us")):
            rows.append((words, *(f"{step[key]:,.0f}" for step in document["steps"].values())))
    head, *body = table(rows, "l" + "r" * len(document["steps"]))
    return [style(head, "dim"), *body]


def _shown(document: dict[str, Any]) -> dict[str, Any]:
    """The step that was asked about: the table's where one was given."""
    steps: dict[str, Any] = document["steps"]
    return steps.get("table", steps["decision"])  # type: ignore[no-any-return]


def _kinds(document: dict[str, Any], style: Style) -> list[str]:
    decided = _shown(document)
    rows = [("as the table says" if "table" in document["steps"] else "as decided", "us", "on the critical path")]
    for kind, us in decided["kinds_us"].items():
        rows.append((_WORDS.get(kind, kind), figure(us), f"{decided['critical_us'].get(kind, 0.0) / decided['step_us']:.0%}"))
    head, *body = table(rows, "lrr")
    return [style(head, "dim"), *body]


def _calls(document: dict[str, Any], style: Style) -> list[str]:
    rows = [("collectives of a step", "number", "MiB a rank", "ranks", "stream", "us each", "90% interval", "basis")]
    calls = sorted(document["collectives"], key=lambda call: -call["count"] * call["time_us"])
    for call in calls[:_MOST_CALLS]:
        dtype = "" if call["dtype"] == "bf16" else f" {call['dtype']}"
        size, number = f"{call['bytes_per_rank'] / 2**20:,.1f}", str(call["count"])
        ends = f"[{figure(call['low_us'])}, {figure(call['high_us'])}]"
        what = (f"{_WORDS[call['op']]}{dtype}", number, size, f"{call['ranks']:,}", call["stream"])
        rows.append((*what, figure(call["time_us"]), ends, call["basis"]))
    head, *body = table(rows, "lrrrlrrl")
    rest = calls[_MOST_CALLS:]
    more = [style(f"  and {sum(call['count'] for call in rest)} more", "dim")] if rest else []
    return [style(head, "dim"), *body, *more]

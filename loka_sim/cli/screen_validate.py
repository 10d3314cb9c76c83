"""The screen of a validation: within its tolerances or not, how far off both models are, what refining them changed.

Drawn from the JSON document alone, so that it can say nothing that `--json` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loka_sim.cli.output import Style, figure, shorten, table, wrap
from loka_sim.cli.screen import kernel_word
from loka_sim.report import validation_words as say

_KERNELS, _CHANGES, _OFFENDERS = 8, 4, 3


def validation_screen(document: dict[str, Any], style: Style, out: Path | None = None) -> str:
    """The screen as text, at most 100 columns wide.

    Args:
        document: A validation that fits the validation schema.
        style: Colour or none.
        out: The folder that report and calibration were written into, if any.
    """
    lines = [style(line, "dim") for line in _subject(document)]
    for stage in document["stages"]:
        if stage["complete"] and stage["note"]:
            lines += [style(line, "dim") for line in wrap(_cut(f"{stage['name']}: {stage['note']}", 190), "", "  ")]
    lines += [style(line, "yellow") for text in _lacking(document) for line in wrap(_cut(text, 190), "", "  ")]
    colour = "green" if document["verdict"] else "yellow"
    lines += ["", *(style(line, "bold", colour) for line in wrap(_cut(say.headline(document), 290), "", "  "))]
    for part in (_time, _numerics, _dispatch, _step, _changes, _tolerances):
        some = part(document, style)
        lines += ["", *some] if some else []
    lines += ["", *([f"wrote {out}/"] if out is not None else [])]
    first, *rest = say.next_command(document, out).splitlines()
    return "\n".join([*lines, f"next: {style(first, 'cyan')}", *(style(line, "cyan") for line in rest)])


def _subject(document: dict[str, Any]) -> list[str]:
    settings = document["settings"]
    mods = f", mods {', '.join(settings['mods'])}" if settings["mods"] else ""
    minutes = sum(stage["seconds"] for stage in document["stages"]) / 60
    asked = f"{settings['minutes']:g} minute{'' if settings['minutes'] == 1 else 's'}"
    lines = wrap(
        f"{shorten(settings['model'], 60)}{mods}, batch {settings['batch']:,}, measured for {minutes:,.1f} of {asked}", "", "  "
    )
    return [*lines, *wrap(", ".join(_cut(piece, 90) for piece in say.machine(document)), "", "  ")]


def _lacking(document: dict[str, Any]) -> list[str]:
    """One sentence each: libraries that are not here, stages cut short, parts that were not measured."""
    lines = []
    libraries = say.absent(document)
    if libraries:
        lines.append(f"! not run: {', '.join(libraries)}")
    for stage in document["stages"]:
        if not stage["complete"]:
            lines.append(f"! {stage['name']} cut short" + (f": {stage['note']}" if stage["note"] else ""))
    missing = [label for part, label in say.PARTS.items() if document[part] is None]
    if missing:
        lines.append(f"! not measured: {', '.join(missing)}")
    return lines


def _time(document: dict[str, Any], style: Style) -> list[str]:
    """A row per family of kernels, the model's shapes beside fresh ones."""
    if document["time"] is None or not document["time"]["summary"]:
        return []
    summaries = {(entry["family"], entry["set"]): entry for entry in document["time"]["summary"]}
    families = [family for family in say.FAMILIES if any((family, which) in summaries for which in say.SETS)]
    rows = [["kernel times", *(head for which in say.SETS for head in (f"{which}: n", "MAPE", "p90", "in 90%"))]]
    for family in families:
        rows.append([say.FAMILIES[family]])
        for which in say.SETS:
            entry = summaries.get((family, which))
            cells = [f"{entry['n']:,}", *(_moved(entry, key) for key in ("mape", "p90", "coverage"))] if entry else ["–"] * 4
            rows[-1] += cells
    lines = _table(rows, "lrrrrrrrr", style)
    if any(entry["after"] for entry in summaries.values()):
        text = "→ refined: the model's cross-validated by whole shapes; fresh shapes are never used to refine"
        lines.append(style(f"  {text}", "dim"))
    return [*lines, *_note(document["time"], style)]


def _moved(entry: dict[str, Any], key: str) -> str:
    before = say.share(entry["before"][key])
    return f"{before.removesuffix('%')}→{say.share(entry['after'][key])}" if entry["after"] else before


def _numerics(document: dict[str, Any], style: Style) -> list[str]:
    """A row per kernel that ran on the model's tensors, of its three passes the worst in each column; the others in a line."""
    numerics = document["numerics"]
    if numerics is None or not (numerics["summary"] or numerics["sampled"]):
        return []
    sampled = {entry["kernel"]: entry["bit_equal"] for entry in numerics["sampled"]}
    summaries: dict[str, list[dict[str, Any]]] = {kernel: [] for kernel in sampled}
    for entry in numerics["summary"]:
        summaries.setdefault(entry["kernel"], []).append(entry)
    order = sorted(summaries, key=lambda kernel: -(_worst(max, summaries[kernel], "sqnr_gap_p95_db") or 0.0))
    rows: list[tuple[str, ...]] = [
        ("numerics, worst pass", "bit-equal: sampled", "own", "n", "SQNR off, dB", "p95", "in 0.5 dB", "MERE off")
    ]
    own = [kernel for kernel in order if summaries[kernel]]
    shown, rest = (own or order)[:_KERNELS], (own or order)[_KERNELS:]
    for kernel in shown:
        some = summaries[kernel]
        rows.append((
            shorten(_kernel(kernel), 20), say.share(sampled.get(kernel)), say.share(_worst(min, some, "bit_equal")),
            f"{sum(entry['n'] for entry in some):,}", _db(_worst(max, some, "sqnr_gap_median_db")),
            _db(_worst(max, some, "sqnr_gap_p95_db")), say.share(_worst(min, some, "within_half_db")),
            say.share(_worst(max, some, "mere_gap_median")),
        ))  # fmt: skip
    more = [style(f"  and {len(rest)} more kernels", "dim")] if rest else []
    others = [sampled[kernel] for kernel in order if own and not summaries[kernel]]
    if others:
        equal = sum(share == 1 for share in others)
        more.append(style(f"  sampled alone: {len(others)} more kinds of GEMM, all outputs bit-equal in {equal} of them", "dim"))
    return [*_table(rows, "lrrrrrrr", style), *more, *_note(numerics, style)]


def _worst(worse: Any, entries: Sequence[dict[str, Any]], key: str) -> float | None:
    """The worst value, gaps by their size."""
    return worse((abs(entry[key]) for entry in entries if entry[key] is not None), default=None)


def _dispatch(document: dict[str, Any], style: Style) -> list[str]:
    dispatch = document["dispatch"]
    if dispatch is None or not dispatch["policies"]:
        return []
    head = f"dispatch, {dispatch['sites']:,} of {dispatch['of_sites']:,} sites measured"
    rows: list[tuple[str, ...]] = [(head, "us", "over the best", "against bf16")]
    for policy in dispatch["policies"]:
        regret = policy["against_best"]
        over = "–" if regret is None else f"{'+' if regret > 0 else ''}{say.share(regret)}"
        rows.append((shorten(policy["label"], 50), _us(policy["measured_us"]), over, _ratio(policy["against_bf16"])))
    lines = _table(rows, "lrrr", style)
    for index, policy in enumerate(dispatch["policies"], 1):
        lines[index] = style(lines[index], *(("bold",) if policy["name"] in say.DECISIONS else ()))
    return [*lines, *_note(dispatch, style)]


def _step(document: dict[str, Any], style: Style) -> list[str]:
    step = document["step"]
    if step is None or not step["variants"]:
        return []
    graphs = any(variant.get("graph_ms") for variant in step["variants"])
    head = ("ms", *(("as a graph",) if graphs else ()), "measured", "predicted before", "after")
    rows: list[tuple[str, ...]] = [("forward and backward", *head)]
    for variant in step["variants"]:
        predicted = [_interval(variant[f"predicted_{when}"]) for when in ("before", "after")]
        times = [variant["measured_ms"], *([variant.get("graph_ms")] if graphs else [])]
        shown = ["–" if ms is None else _us(ms, 2) for ms in times]
        rows.append((shorten(variant["label"], 40), *shown, _ratio(variant["speedup"]), *predicted))
    return [*_table(rows, "l" + "r" * len(head), style), *_note(step, style)]


def _changes(document: dict[str, Any], style: Style) -> list[str]:
    lines = []
    before, after = document["whatif"]["before"], document["whatif"]["after"]
    said = f"{_interval(before)}, {before['fp8_passes']:,} FP8 passes"
    if after is not None:
        said += f" → {_interval(after)}, {after['fp8_passes']:,} FP8 passes refined"
    lines += wrap(f"what-if: {said}", "  ", "    ")
    changes = document["dispatch"]["changes"] if document["dispatch"] else []
    if not changes:
        return [*lines, "  no decision changed"] if after is not None and document["dispatch"] else lines
    rows: list[tuple[str, ...]] = [("decided anew", "sites", "pass", "before", "after", "measured us")]
    for change in changes[:_CHANGES]:
        us = f"{_us(change['measured_before_us'])} → {_us(change['measured_after_us'])}"
        kernels = [shorten(_kernel(change[key]), 20) for key in ("before", "after")]
        rows.append((shorten(change["site"], 28), f"{change['sites']:,}", change["pass"], *kernels, us))
    head, *body = _table(rows, "lrlllr", style)
    lines.append(head)
    for row, change in zip(body, changes, strict=False):
        lines += [row, style(_line(change["reason"], "    "), "dim")]
    more = sum(change["sites"] for change in changes[_CHANGES:])
    return [*lines, *([style(f"  and {more:,} more sites", "dim")] if more else [])]


def _tolerances(document: dict[str, Any], style: Style) -> list[str]:
    entries = say.ranked(document["tolerances"])
    if not entries:
        return []
    rows = [("tolerance", "measured", "", "")]
    for entry in entries:
        status = {True: "kept", False: "missed", None: "not measured"}[entry["ok"]]
        rows.append((shorten(entry["label"], 50), say.amount(entry["value"], entry["unit"]), say.limit(entry), status))
    head, *body = _table(rows, "lrll", style)
    lines = [head]
    for row, entry in zip(body, entries, strict=True):
        lines.append(style(row, *{True: (), False: ("yellow",), None: ("dim",)}[entry["ok"]]))
        if entry["ok"] is False:
            lines += [style(_line(offender, "    "), "yellow") for offender in entry["offenders"][:_OFFENDERS]]
            more = len(entry["offenders"]) - _OFFENDERS
            lines += [style(f"    and {more:,} more", "dim")] if more > 0 else []
    return lines


def _table(rows: Sequence[Sequence[str]], align: str, style: Style) -> list[str]:
    head, *body = table(rows, align)
    return [style(head, "dim"), *body]


def _note(part: dict[str, Any], style: Style) -> list[str]:
    return [style(line, "dim") for line in wrap(_cut(part["note"], 180), "  - ", "    ")] if part["note"] else []


def _line(text: str, indent: str) -> str:
    return indent + _cut(text, 100 - len(indent))


def _cut(text: str, width: int) -> str:
    """Text on one line, its end cut where it is too long: a sentence says the main thing first."""
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 1].rstrip()}…"


def _kernel(name: str) -> str:
    """A kernel's name as narrow columns hold it, led by its library where that is not torch: `fbgemm row`."""
    return kernel_word(name) if "/" in name else name


def _us(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "–"
    if value >= 1e7 or 0 < value < 0.05:
        return f"{value:.2g}"
    return figure(value) if digits == 1 else f"{value:,.{digits}f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x" if 0.01 <= value < 1000 else f"{value:.1g}x"


def _db(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.1g}"


def _interval(speedup: dict[str, float] | None) -> str:
    if speedup is None:
        return "–"
    return f"{_ratio(speedup['speedup'])} [{speedup['low']:.2f}, {speedup['high']:.2f}]"

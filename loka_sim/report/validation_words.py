"""A validation in words that its screen and its page share: amounts, tolerances in order, the headline, what to run next."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from loka_sim.report import words

Record = dict[str, Any]

PARTS = {
    "numerics": "numerics",
    "time": "kernel times",
    "dispatch": "dispatch",
    "step": "the whole step",
}
"""What a validation measures, and what to call it."""

SETS = {"model": "the model's own shapes", "fresh": "fresh shapes, never used to refine"}
"""Of which shapes kernel times are."""

FAMILIES = {"gemm": "GEMM", "batched_gemm": "batched GEMM", "quantize": "quantize", "layout": "layout", "pointwise": "pointwise"}


DECISIONS = frozenset({"before", "after", "cross_validated", "decision", "decision_before"})
"""Policies and steps that are decisions of ours; the others are what they are compared with."""


def share(value: float | None) -> str:
    """A share as a percentage: close to 1 with as many digits as tell it from 1, large ones in powers of ten."""
    if value is None:
        return "–"
    if 0.99 < value < 1:
        digits = min(6, max(1, math.ceil(-math.log10(100 * (1 - value)) - 1e-6)))
        # Cut, not rounded: what is not all of it must not read 100%.
        return f"{math.floor(100 * value * 10**digits + 1e-6) / 10**digits:.{digits}f}%"
    return words.percent(value) if abs(value) < 10 else f"{100 * value:.2g}%"


def amount(value: float | None, unit: str) -> str:
    """A tolerance's value or limit with its unit: `5.1%`, `0.71 dB`, `1.05x`."""
    if value is None:
        return "–"
    if unit == "share":
        return share(value)
    if unit == "x":
        return f"{value:.3g}x"
    return f"{value:.3g} {unit}".rstrip()


def limit(entry: Record) -> str:
    """A tolerance's limit and on which side of it a value is good: `at most 8%`.

    The document says whether the value is within, not on which side the limit lies; that follows from both,
    except of a value that was not measured or that stands on its limit.
    """
    text = amount(entry["limit"], entry["unit"])
    if entry["ok"] is None or entry["value"] is None or entry["value"] == entry["limit"]:
        return text
    below = entry["value"] < entry["limit"]
    return f"{'at most' if below == entry['ok'] else 'at least'} {text}"


def ranked(tolerances: list[Record]) -> list[Record]:
    """Missed tolerances first, the furthest off before the others; then those not measured; then those closest to a miss."""

    def distance(entry: Record) -> float:
        value, edge = entry["value"], entry["limit"]
        if value is None:
            return 0.0
        if value == edge:
            # Nothing better is asked, as of outputs that must all be equal: no miss is near.
            return math.inf
        return abs(math.log(value / edge)) if value * edge > 0 else math.inf

    def place(entry: Record) -> tuple[int, float]:
        if entry["ok"] is None:
            return 1, 0.0
        return (2, distance(entry)) if entry["ok"] else (0, -distance(entry))

    return sorted(tolerances, key=place)


def headline(document: Record) -> str:
    """The verdict in one sentence, the worst first."""
    tolerances = ranked(document["tolerances"])
    missed = [entry for entry in tolerances if entry["ok"] is False]
    kept = [entry for entry in tolerances if entry["ok"]]
    unmeasured = len(tolerances) - len(missed) - len(kept)
    rest = f"; {unmeasured} not measured" if unmeasured else ""

    def said(entry: Record) -> str:
        return f"{entry['label']} {amount(entry['value'], entry['unit'])}, {limit(entry)}"

    if missed:
        more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
        return f"Outside tolerances: {said(missed[0])}{more} ({len(kept)} of {len(missed) + len(kept)} kept{rest})"
    if not kept:
        return "No verdict: nothing was measured that has a tolerance"
    if not document["verdict"]:
        return f"Not validated: {unmeasured} of {len(tolerances)} tolerances not measured; {len(kept)} kept"
    which = "the one tolerance" if len(kept) == 1 else f"all {len(kept)} tolerances"
    which += " measured" if rest else ""
    return f"Within {which}{rest}; closest: {said(kept[0])}"


def machine(document: Record) -> list[str]:
    """The machine in pieces, as far as its fingerprint tells: name, driver, clocks, power, versions."""
    known = document["machine"]
    pieces = [str(known["gpu"])]
    for key, before, after in (
        ("driver", "driver ", ""), ("sm_mhz", "SM ", " MHz"), ("power_w", "", " W"), ("temperature_c", "", " °C"),
        ("torch", "torch ", ""), ("cuda", "CUDA ", ""), ("triton", "triton ", ""),
    ):  # fmt: skip
        value = known.get(key)
        if value is not None:
            text = f"{value:,.0f}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
            pieces.append(f"{before}{text.partition('+')[0]}{after}")
    return pieces


def absent(document: Record) -> list[str]:
    """Libraries whose kernels were not run, each with the reason: without the mend, which stands behind a semicolon."""
    return [
        f"{entry['library']} ({entry['reason'].partition(';')[0]})" if entry["reason"] else entry["library"]
        for entry in document["libraries"]
        if not entry["available"]
    ]


def next_command(document: Record, out: Path | None) -> str:
    """What to run next: the what-if with the calibration that was saved, or the validation again so that it saves one.

    A long command stands on several lines that a shell reads as one.
    """
    settings = document["settings"]
    if out is None:
        parts = [*document["command"], "--out", "DIR"]
    else:
        parts = ["loka-sim", "whatif", settings["model"], "--batch", str(settings["batch"])]
        parts += ["--mods", ",".join(settings["mods"])] if settings["mods"] else []
        parts += ["--calibration", str(out)]
    lines = [""]
    for part in map(shlex.quote, parts):
        if lines[-1] and len(lines[-1]) + len(part) > 88:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    return "\n".join(lines)

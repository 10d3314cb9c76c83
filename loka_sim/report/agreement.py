"""Predicted against measured values as a page draws them: points, axes, the identity line and the band around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from loka_sim.report import words
from loka_sim.report.scale import Scale, log_around

Record = dict[str, Any]

BAND = 1.1
"""Kernel times: how far from the measured time the band around the identity line reaches, as a factor."""


def points(rows: Iterable[tuple[str, float, float, str]], x: Scale, y: Scale) -> list[Record]:
    """Marks of (kind, x, y, tip); y runs upward."""
    return [{"kind": kind, "x": x.at(a), "y": round(100 - y.at(b), 3), "tip": tip} for kind, a, b, tip in rows]


def panel(
    title: str, marks: list[Record], x: Scale, y: Scale, label: tuple[Callable[[float], str], Callable[[float], str]]
) -> Record:
    """One plot of marks, with its axes' ticks in words."""
    return {
        "title": title,
        "points": marks,
        "x_ticks": [(x.at(value), label[0](value)) for value in x.ticks(5)],
        "y_ticks": [(round(100 - y.at(value), 3), label[1](value)) for value in y.ticks(6)],
    }


def diagonal(scale: Scale, reach: float) -> Record:
    """Identity line and band of two like axes; `reach` is the band's half height in percent of the axis."""
    s = round(min(reach, 100.0), 3)
    r = round(100 - s, 3)
    return {"line": (0, 100, 100, 0), "band": f"0,100 0,{r} {r},0 100,0 100,{s} {s},100", "low": scale.low, "high": scale.high}


def of_times(scale: Scale) -> Record:
    """Predicted over measured times on this scale, without panels yet."""
    names = {"x": "measured, µs (log)", "y": "predicted, µs (log)"}
    return {**names, **diagonal(scale, 100 * math.log(BAND) / math.log(scale.high / scale.low)), "panels": []}


def fresh(held_out: Record | None, kernels: set[str]) -> Record | None:
    """Times of GEMMs that the time model's fit never saw: a panel of those in bf16 and one of those in FP8; None without any.

    Args:
        held_out: What a what-if says of the time model's accuracy.
        kernels: Which to draw.
    """
    drawn = {name: times for name, times in (held_out or {}).get("fresh", {}).items() if name in kernels and times["measured_us"]}
    if not drawn:
        return None
    scale = log_around(value for times in drawn.values() for values in times.values() for value in values)
    row = of_times(scale)
    for title, in_bf16 in (("bf16", True), ("FP8", False)):
        pairs = [
            (name, measured, predicted)
            for name, times in sorted(drawn.items())
            if ("bf16" in name) == in_bf16
            for measured, predicted in zip(times["measured_us"], times["predicted_us"], strict=True)
        ]
        marks = [
            (
                "fresh",
                measured,
                predicted,
                f"{name}\nmeasured {us(measured)} µs\npredicted {us(predicted)} µs, {off(predicted / measured)}",
            )
            for name, measured, predicted in pairs
        ]
        if marks:
            row["panels"].append(panel(title, points(marks, scale, scale), scale, scale, (tick, tick)))
    return row


def us(value: float) -> str:
    """Microseconds in words, also of the shortest and the longest."""
    return f"{value:.3g}" if value < 1 or value >= 1e7 else words.micro(value)


def tick(value: float) -> str:
    """A tick's value in words."""
    return f"{value:,g}" if 1e-4 < value < 1e6 else f"{value:.0e}"


def off(ratio: float) -> str:
    """A ratio as people read errors: `+10%`, `−20%`, `3×`."""
    if ratio > 2 or ratio < 0.1:
        return f"{ratio:.3g}×"
    return "equal" if ratio == 1 else f"{100 * (ratio - 1):+.3g}%".replace("-", "−")

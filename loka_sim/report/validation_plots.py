"""Where everything stands on a validation's plots, in percent of their width and height."""

from __future__ import annotations

import math
from typing import Any

from loka_sim.report import agreement, words
from loka_sim.report import validation_words as say
from loka_sim.report.scale import Scale, linear_around, log_around

Record = dict[str, Any]

BAND_DB = 0.5
"""SQNR: how far from the measured one the band around the identity line reaches, in dB."""


def _shape(row: Record) -> str:
    groups = f", {row['groups']:,} groups" if row.get("groups", 1) > 1 else ""
    return f"{row['m']:,} × {row['n']:,} × {row['k']:,}{groups}"


def times(rows: list[Record]) -> list[Record]:
    """Predicted against measured times, before and after refinement on the same axes, and the error against the size.

    Returns:
        Rows of panels, each with its axes' names: the first of times, the second of errors. Empty without rows.
    """
    if not rows:
        return []
    stages = [("before", "before refinement")]
    if any(row["after_us"] is not None for row in rows):
        stages.append(("after", "after refinement"))
    drawn = {key: [row for row in rows if row[f"{key}_us"] is not None] for key, _ in stages}
    both = [value for key, _ in stages for row in drawn[key] for value in (row["measured_us"], row[f"{key}_us"])]
    us = log_around(both)
    size = log_around(_size(row) for row in rows)
    ratio = log_around([1.3, 1 / 1.3, *(row[f"{key}_us"] / row["measured_us"] for key, _ in stages for row in drawn[key])])
    top, bottom = (round(100 - ratio.at(value), 3) for value in (agreement.BAND, 1 / agreement.BAND))
    level = round(100 - ratio.at(1.0), 3)
    against = agreement.of_times(us)
    off: Record = {
        "x": "M × N × K × groups (log)",
        "y": "predicted over measured (log)",
        "line": (0, level, 100, level),
        "band": f"0,{top} 100,{top} 100,{bottom} 0,{bottom}",
        "panels": [],
    }
    for key, title in stages:
        # Fresh shapes, which tell more, lie on top.
        ordered = sorted(drawn[key], key=lambda row: row["set"] == "fresh")
        tips = [_time_tip(row, key) for row in ordered]
        pairs = [(row["set"], row["measured_us"], row[f"{key}_us"], tip) for row, tip in zip(ordered, tips, strict=True)]
        against["panels"].append(
            agreement.panel(title, agreement.points(pairs, us, us), us, us, (agreement.tick, agreement.tick))
        )
        pairs = [
            (row["set"], _size(row), row[f"{key}_us"] / row["measured_us"], tip) for row, tip in zip(ordered, tips, strict=True)
        ]
        off["panels"].append(
            agreement.panel(title, agreement.points(pairs, size, ratio), size, ratio, (words.count, agreement.off))
        )
    return [against, off]


def _size(row: Record) -> float:
    return float(math.prod(max(row[key], 1) for key in ("m", "n", "k", "groups")))


def _time_tip(row: Record, key: str) -> str:
    low, high = row[f"{key}_low_us"], row[f"{key}_high_us"]
    interval = "" if low is None or high is None else f" ({agreement.us(low)} to {agreement.us(high)})"
    eager = "" if row["eager_us"] is None else f"; eager call {agreement.us(row['eager_us'])} µs"
    return (
        f"{row['kernel']}\n{_shape(row)}, {say.SETS[row['set']]}\n"
        f"measured {agreement.us(row['measured_us'])} µs{eager}\n"
        f"predicted {agreement.us(row[f'{key}_us'])} µs{interval}, {agreement.off(row[f'{key}_us'] / row['measured_us'])}"
    )


def errors(tensors: list[Record]) -> list[Record]:
    """The SQNR of the model's own tensors: the emulator's and the prediction against the measured one.

    Returns:
        One row of panels, or none where no tensor has an SQNR.
    """
    panels = (("emulated_sqnr_db", "emulated"), ("predicted_sqnr_db", "predicted from statistics"))
    drawn = {key: [row for row in tensors if row[key] is not None and row["measured_sqnr_db"] is not None] for key, _ in panels}
    values = [row[which] for key, _ in panels for row in drawn[key] for which in (key, "measured_sqnr_db")]
    if not values:
        return []
    db = linear_around(values)

    def points(key: str) -> list[Record]:
        rows = [(row["pass"], row["measured_sqnr_db"], row[key], _error_tip(row, key)) for row in drawn[key]]
        return agreement.points(rows, db, db)

    return [
        {
            "x": "measured SQNR, dB",
            "y": "emulated or predicted, dB",
            **agreement.diagonal(db, 100 * BAND_DB / (db.high - db.low)),
            "panels": [
                agreement.panel(title, points(key), db, db, (agreement.tick, agreement.tick))
                for key, title in panels
                if drawn[key]
            ],
        }
    ]


def _error_tip(row: Record, key: str) -> str:
    mere = ""
    if row["measured_mere"] is not None and row["predicted_mere"] is not None:
        mere = f"\nMERE {words.percent(row['measured_mere'])}, predicted {words.percent(row['predicted_mere'])}"
    return (
        f"{row['site']}, {words.PASSES[row['pass']]}\n{row['kernel']}, {_shape(row)}\n"
        f"SQNR {row['measured_sqnr_db']:.2f} dB, {key.partition('_')[0]} {row[key]:.2f} dB\n"
        f"{say.share(row['bit_equal'])} of {row['outputs']:,} outputs equal to the emulator's{mere}"
    )


def policies(entries: list[Record]) -> list[Record]:
    """Every policy's measured time over the best measured, as a bar."""
    known = [entry["against_best"] for entry in entries if entry["against_best"] is not None]
    scale = Scale(0.0, 1.04 * max([*known, 1e-3]))
    return [
        {
            "label": entry["label"],
            "decision": entry["name"] in say.DECISIONS,
            "width": None if entry["against_best"] is None else scale.at(entry["against_best"]),
            "regret": say.share(entry["against_best"]),
            "us": "–" if entry["measured_us"] is None else agreement.us(entry["measured_us"]),
            "speedup": words.ratio(entry["against_bf16"]),
            "tone": "flat" if entry["against_bf16"] is None else "good" if entry["against_bf16"] > 1 else "bad",
        }
        for entry in entries
    ]


def speedups(variants: list[Record]) -> Record | None:
    """The step's measured speedup against its prediction's interval, before and after; None where there is nothing to compare."""
    shown = [
        variant
        for variant in variants
        if variant["name"] != "bf16" and (variant["speedup"] or variant["predicted_before"] or variant["predicted_after"])
    ]
    if not shown:
        return None
    edges = [variant["speedup"] for variant in shown if variant["speedup"]]
    for variant in shown:
        for key in ("predicted_before", "predicted_after"):
            edges += variant[key].values() if variant[key] else []
    scale = linear_around([1.0, *edges])

    def interval(predicted: Record | None) -> Record | None:
        if predicted is None:
            return None
        low, high = (scale.at(predicted[key]) for key in ("low", "high"))
        said = f"{words.ratio(predicted['speedup'])} ({words.ratio(predicted['low'])} to {words.ratio(predicted['high'])})"
        return {"low": low, "width": round(high - low, 3), "at": scale.at(predicted["speedup"]), "said": said}

    return {
        "rows": [
            {
                "label": variant["label"],
                "decision": variant["name"] in say.DECISIONS,
                "ms": "" if variant["measured_ms"] is None else f"{variant['measured_ms']:,.2f} ms",
                "speedup": words.ratio(variant["speedup"]),
                "measured": scale.at(variant["speedup"]) if variant["speedup"] else None,
                "before": interval(variant["predicted_before"]),
                "after": interval(variant["predicted_after"]),
            }
            for variant in shown
        ],
        "one": scale.at(1.0),
        "ticks": [(scale.at(tick), words.ratio(tick)) for tick in scale.ticks(5)],
    }

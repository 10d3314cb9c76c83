"""A validation document as its page shows it: what was missed first, plots, then the tables that they are drawn from.

The template only lays out; each figure here comes from the document.
"""

from __future__ import annotations

from pathlib import Path

from loka_sim.report import render_validation, words
from loka_sim.report import validation_plots as plots
from loka_sim.report import validation_words as say
from loka_sim.report.validation_plots import Record

__all__ = ["page", "render_validation"]


def page(document: Record) -> Record:
    """Everything that the template needs, of a document that fits the validation schema."""
    return {
        "document": document,
        "facts": _facts(document),
        "verdict": _verdict(document),
        "time": _time(document["time"]),
        "numerics": _numerics(document["numerics"]),
        "dispatch": _dispatch(document["dispatch"]),
        "step": _step(document["step"]),
        "whatif": [(label, *_answer(document["whatif"][key])) for key, label in _WHEN if document["whatif"][key]],
        "machine": [(key.replace("_", " "), _value(value)) for key, value in document["machine"].items()],
        "stages": _stages(document),
        "again": say.next_command(document, None).removesuffix(" --out DIR"),
        "next": say.next_command(document, Path("DIR")),
    }


_WHEN = (("before", "with the shipped models"), ("after", "with the refined models"))


def _facts(document: Record) -> list[tuple[str, str]]:
    settings = document["settings"]
    return [
        ("machine", document["machine"]["gpu"]),
        ("predictions", words.hardware(settings["hardware"])),
        ("batch", f"{settings['batch']:,}"),
        ("mods", ", ".join(settings["mods"]) or "none"),
        ("statistics", settings["statistics"] or "the model's own"),
        ("measured", f"{sum(stage['seconds'] for stage in document['stages']) / 60:,.1f} of {settings['minutes']:g} min"),
        ("policy", f"{words.ratio(settings['min_speedup'])}, MERE below {words.percent(settings['max_mere'])}"),
    ]


def _verdict(document: Record) -> Record:
    missed = any(entry["ok"] is False for entry in document["tolerances"])
    judged = any(entry["ok"] is not None for entry in document["tolerances"])
    tones = {True: ("fast", "kept"), False: ("unsafe", "missed"), None: ("illegal", "not measured")}
    return {
        "word": "Outside" if missed else "Within" if judged and document["verdict"] else "Open",
        "good": judged and document["verdict"] and not missed,
        "text": say.headline(document),
        "missing": [label for part, label in say.PARTS.items() if document[part] is None],
        "tolerances": [
            {
                "label": entry["label"],
                "value": say.amount(entry["value"], entry["unit"]),
                "limit": say.limit(entry),
                "tone": tones[entry["ok"]][0],
                "said": tones[entry["ok"]][1],
                "offenders": entry["offenders"],
            }
            for entry in say.ranked(document["tolerances"])
        ],
    }


def _time(time: Record | None) -> Record | None:
    if time is None:
        return None
    keys = ("mape", "median", "p90", "worst", "coverage")
    return {
        "plots": plots.times(time["rows"]),
        "rows": len(time["rows"]),
        "summary": [
            {
                "set": say.SETS[entry["set"]],
                "family": say.FAMILIES[entry["family"]],
                "n": f"{entry['n']:,}",
                "cells": [
                    (say.share(entry["before"][key]), say.share(entry["after"][key]) if entry["after"] else None) for key in keys
                ],
            }
            for entry in time["summary"]
        ],
        "offenders": [
            {
                "kernel": entry["kernel"],
                "shape": f"{entry['m']:,} × {entry['n']:,} × {entry['k']:,}"
                + (f", {entry['groups']:,} groups" if entry["groups"] > 1 else ""),
                "measured": words.micro(entry["measured_us"]),
                "predicted": words.micro(entry["predicted_us"]),
                "error": say.share(entry["error"]),
            }
            for entry in time["offenders"]
        ],
        "note": time["note"],
    }


def _numerics(numerics: Record | None) -> Record | None:
    if numerics is None:
        return None
    return {
        "plots": plots.errors(numerics["tensors"]),
        "tensors": len(numerics["tensors"]),
        "summary": [
            (
                entry["kernel"], words.PASSES[entry["pass"]], f"{entry['n']:,}", say.share(entry["bit_equal"]),
                _db(entry["sqnr_gap_median_db"]), _db(entry["sqnr_gap_p95_db"]), say.share(entry["within_half_db"]),
                say.share(entry["mere_gap_median"]),
            )
            for entry in numerics["summary"]
        ],
        "sampled": [
            (entry["kernel"], *(f"{entry[key]:,}" for key in ("gemms", "outputs", "unequal")), say.share(entry["bit_equal"]))
            for entry in numerics["sampled"]
        ],
        "unequal": any(entry["unequal"] for entry in numerics["sampled"]),
        "sampled_said": _sampled(numerics["sampled"]),
        "note": numerics["note"],
    }  # fmt: skip


def _sampled(entries: list[Record]) -> str:
    """What was compared on sampled distributions, in a sentence."""
    unequal, outputs = (sum(entry[key] for entry in entries) for key in ("unequal", "outputs"))
    kinds = f"{len(entries)} kind{'' if len(entries) == 1 else 's'} of GEMM on sampled distributions"
    return f"{kinds}: {f'{unequal:,} of ' if unequal else 'none of '}{outputs:,} outputs differ from the emulator's"


def _db(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"


def _dispatch(dispatch: Record | None) -> Record | None:
    if dispatch is None:
        return None
    return {
        "sites": f"{dispatch['sites']:,} of {words.plural(dispatch['of_sites'], 'site')}",
        "passes": words.plural(dispatch["passes"], "pass"),
        "policies": plots.policies(dispatch["policies"]),
        "changes": [
            {
                "site": change["site"],
                "sites": words.plural(change["sites"], "site") if change["sites"] > 1 else "",
                "pass": words.PASSES[change["pass"]],
                "from": change["before"],
                "to": change["after"],
                "from_fp8": "fp8" in change["before"],
                "to_fp8": "fp8" in change["after"],
                "measured": [words.micro(change[f"measured_{when}_us"]) for when in ("before", "after")],
                "reason": change["reason"],
            }
            for change in dispatch["changes"]
        ],
        "note": dispatch["note"],
    }


def _step(step: Record | None) -> Record | None:
    if step is None:
        return None
    # What is compared: steps as launched, or where the host is the bound as CUDA graphs.
    measured = "graph_ms" if step.get("graphs") else "measured_ms"
    variants = [{**variant, "measured_ms": variant[measured]} for variant in step["variants"]]
    bf16 = next((variant["measured_ms"] for variant in variants if variant["name"] == "bf16"), None)
    return {
        "speedups": plots.speedups(variants),
        "measured_bf16": None if bf16 is None else f"{bf16:,.2f} ms",
        "predicted_bf16": None if step["predicted_bf16_ms"] is None else f"{step['predicted_bf16_ms']:,.2f} ms",
        "note": step["note"],
    }


def _answer(answer: Record) -> tuple[str, str, str, str]:
    interval = f"{words.ratio(answer['low'])} to {words.ratio(answer['high'])}"
    return words.micro(answer["step_us"]), words.ratio(answer["speedup"]), interval, f"{answer['fp8_passes']:,}"


def _value(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.10g}" if isinstance(value, float) else str(value)


def _stages(document: Record) -> list[Record]:
    total = sum(stage["seconds"] for stage in document["stages"]) or 1.0
    return [
        {
            "name": stage["name"],
            "seconds": f"{stage['seconds']:,.0f} s",
            "width": round(100 * stage["seconds"] / total, 3),
            "complete": stage["complete"],
            "note": stage["note"],
        }
        for stage in document["stages"]
    ]

"""What a validation found, put into figures, and the tolerances that it must keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.kernels import KERNELS

if TYPE_CHECKING:
    import pandas

FAMILIES = ("gemm", "batched_gemm", "quantize", "layout", "pointwise")
# Limits that the refined models must keep on this machine; what a validation's exit code says. Times are judged on shapes
# that no refinement saw, each family by the mean error of its rows and by how many lie inside their 90% interval.
# A second H200 measures GEMMs 1.8% apart on average, 5% at the 90th percentile: 10% is what a ranking of kernels bears.
MOST_GEMM_MAPE = 0.10
# torch.compile's reductions are another kernel now and then, by 1.25x to 3x on launches of few microseconds.
MOST_QUANTIZE_MAPE = 0.15
# A transposition reduces nothing, and has no such choice: as the GEMMs.
MOST_LAYOUT_MAPE = 0.10
LEAST_COVERAGE = 0.80
# Of fewer rows a true 90% would miss 80% by chance in more than one case of 25, and their mean is one or two launches' luck.
LEAST_ROWS = 20
# Whatever single launches repeat like, what a decision launches in a step must be known to this.
MOST_DECIDED_GAP = 0.05
MOST_REGRET = 0.01
# Of the sites that have a choice, this share must have been measured whole: a few of them are not the model.
LEAST_SITES = 0.5
MOST_SQNR_GAP_DB = 1.0
MOST_SPEEDUP_GAP = 0.05
# Of a step that a compiler fuses as it likes.
MOST_STEP_GAP = 0.10
LIMITS = {
    "gemm": ("GEMM", MOST_GEMM_MAPE),
    "quantize": ("quantization", MOST_QUANTIZE_MAPE),
    "layout": ("transposition", MOST_LAYOUT_MAPE),
}


def time_summary(rows: pandas.DataFrame) -> list[dict[str, Any]]:
    """Accuracy per set of shapes and kernel family, before and after refinement.

    Args:
        rows: Columns set, kernel, measured_us, and before_us, before_low_us, before_high_us, likewise after.
    """
    result = []
    families = rows["kernel"].map(lambda name: KERNELS[name].kind)
    for which in ("model", "fresh"):
        for family in FAMILIES:
            some = rows[(rows["set"] == which) & (families == family)]
            if len(some):
                result.append(
                    {"set": which, "family": family, "n": len(some), **{w: _accuracy(some, w) for w in ("before", "after")}}
                )
    return result


def _accuracy(rows: pandas.DataFrame, when: str) -> dict[str, float]:
    measured = rows["measured_us"].to_numpy(float)
    time, low, high = (rows[f"{when}{end}_us"].to_numpy(float) for end in ("", "_low", "_high"))
    error = np.abs(time / measured - 1)
    return {
        "mape": float(error.mean()), "median": float(np.median(error)), "p90": float(np.quantile(error, 0.9)),
        "worst": float(error.max()), "coverage": float(((measured >= low) & (measured <= high)).mean()),
    }  # fmt: skip


def offenders(rows: pandas.DataFrame, count: int = 10) -> list[dict[str, Any]]:
    """The rows that the refined model is farthest off on, those of sets and times that it did not see."""
    error = (rows["after_us"] / rows["measured_us"] - 1).abs()
    worst: list[dict[Any, Any]] = rows.assign(error=error).nlargest(count, "error").to_dict("records")
    return [
        {
            **{key: row[key] for key in ("kernel", "m", "n", "k", "groups", "measured_us")},
            "predicted_us": row["after_us"], "error": row["after_us"] / row["measured_us"] - 1,
        }
        for row in worst
    ]  # fmt: skip


def worst_rows(rows: Sequence[dict[str, Any]], family: str, count: int = 3) -> list[dict[str, Any]]:
    """The document's rows of a family that the refined model is farthest off on."""
    some = [row for row in rows if KERNELS[row["kernel"]].kind == family]
    some.sort(key=lambda row: -abs(row["after_us"] / row["measured_us"] - 1))
    return [{**row, "predicted_us": row["after_us"]} for row in some[:count]]


def _tolerance(
    name: str, label: str, value: float | None, limit: float, unit: str, most: bool, found: Sequence[str] = ()
) -> dict[str, Any]:
    ok = None if value is None else bool(value <= limit if most else value >= limit)
    return {"name": name, "label": label, "value": value, "limit": limit, "unit": unit, "ok": ok, "offenders": list(found)}


def _named(row: dict[str, Any]) -> str:
    size = " x ".join(str(row[letter]) for letter in "mnk") + (f" x {row['groups']} groups" if row["groups"] > 1 else "")
    return f"{row['kernel']} {size}: {row['predicted_us']:.1f} us predicted, {row['measured_us']:.1f} us measured"


def tolerances(
    numerics: dict[str, Any] | None, time: dict[str, Any] | None, dispatch: dict[str, Any] | None, step: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """What was found against its limit; the value is None where it was not measured."""
    result = []
    for family, (label, limit) in LIMITS.items():
        some = [row for row in time["summary"] if row["family"] == family] if time else []
        count = sum(row["n"] for row in some)
        value = sum(row["n"] * row["after"]["mape"] for row in some) / count if count >= LEAST_ROWS else None
        inside = sum(row["n"] * row["after"]["coverage"] for row in some) / count if count >= LEAST_ROWS else None
        worst = [_named(row) for row in worst_rows(time["rows"], family)] if time else []
        result.append(_tolerance(f"{family}_mape", f"{label} time, mean error", value, limit, "share", True, worst))
        text = f"{label} times inside their 90% interval"
        result.append(_tolerance(f"{family}_coverage", text, inside, LEAST_COVERAGE, "share", False, worst))
    unseen = dispatch["unseen"] if dispatch else None
    gap = abs(unseen["predicted_us"] / unseen["measured_us"] - 1) if unseen and unseen["measured_us"] else None
    found = [] if unseen is None else [f"{unseen['predicted_us']:.0f} us predicted, {unseen['measured_us']:.0f} us measured"]
    label = "decided launches of a step, gap to the prediction"
    result.append(_tolerance("decided_gap", label, gap, MOST_DECIDED_GAP, "share", True, found))
    regret = None
    lost: list[str] = []
    if dispatch and dispatch["policies"] and dispatch["sites"] >= LEAST_SITES * dispatch["of_sites"]:
        by_name = {row["name"]: row for row in dispatch["policies"]}
        regret = by_name["cross_validated"]["against_best"]
        lost = [f"{by_name['cross_validated']['measured_us'] - by_name['best']['measured_us']:.0f} us a step over the best"]
    label = "regret of decisions on shapes not measured before"
    result.append(_tolerance("regret", label, regret, MOST_REGRET, "share", True, lost))
    equal = gap_db = None
    unequal: list[str] = []
    far: list[str] = []
    if numerics:
        outputs = sum(row["outputs"] for row in (*numerics["sampled"], *numerics["tensors"]))
        wrong = sum(row["unequal"] for row in numerics["sampled"])
        wrong += sum(round((1 - row["bit_equal"]) * row["outputs"]) for row in numerics["tensors"])
        equal = 1 - wrong / outputs if outputs else None
        unequal = [row["kernel"] for row in numerics["sampled"] if row["unequal"]]
        unequal += [f"{row['kernel']} in {row['pass']} of {row['site']}" for row in numerics["tensors"] if row["bit_equal"] < 1]
        gaps = sorted(
            ((abs(row["predicted_sqnr_db"] - row["measured_sqnr_db"]), row) for row in numerics["tensors"]),
            key=lambda pair: -pair[0],
        )
        if gaps:
            gap_db = float(np.median([pair[0] for pair in gaps]))
            far = [f"{row['site']} {row['pass']} under {row['kernel']}: {off:.1f} dB off" for off, row in gaps[:3]]
    result.append(_tolerance("bit_equal", "outputs equal to the emulator's", equal, 1.0, "share", False, unequal[:3]))
    label = "SQNR, median gap to the prediction"
    result.append(_tolerance("sqnr_gap", label, gap_db, MOST_SQNR_GAP_DB, "dB", True, far))
    off = None
    # Where the host is the bound, no kernel's time is seen in a step but as a CUDA graph.
    graphs = bool(step and step.get("graphs"))
    step = None if step and step.get("host_bound") and not graphs else step
    if step:
        found_steps = {variant["name"]: variant for variant in step["variants"]}
        for name, when in (("decision", "after"), ("decision_before", "before")):
            if name in found_steps and off is None and found_steps[name]["speedup"] is not None:
                off = abs(found_steps[name]["speedup"] / found_steps[name][f"predicted_{when}"]["speedup"] - 1)
    label = "step's speedup, gap to the prediction"
    result.append(_tolerance("speedup_gap", label, off, MOST_SPEEDUP_GAP, "share", True))
    measured = "graph_ms" if graphs else "measured_ms"
    bf16 = next((v[measured] for v in step["variants"] if v["name"] == "bf16"), None) if step else None
    ms = step["predicted_bf16_ms"] if step else None
    off = abs(ms / bf16 - 1) if bf16 and ms else None
    worst = [f"{ms:.2f} ms predicted, {bf16:.2f} ms measured"] if bf16 and ms else []
    result.append(_tolerance("step_gap", "whole step in bf16, gap to the prediction", off, MOST_STEP_GAP, "share", True, worst))
    return result


def verdict(found: Sequence[dict[str, Any]]) -> bool:
    """Whether everything that was measured keeps its limit, and times were measured at all."""
    measured = {entry["name"] for entry in found if entry["ok"] is not None}
    return "gemm_mape" in measured and all(entry["ok"] is not False for entry in found)

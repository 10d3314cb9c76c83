"""What a validation found, as its document, its report and the new dispatch table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import loka_sim
from loka_sim.calibration import HOST
from loka_sim.dispatch.cost import Time
from loka_sim.files import write_text_atomic
from loka_sim.host_time import called
from loka_sim.validation.request import Request
from loka_sim.validation.runnable import TABLE_ROWS
from loka_sim.whole_step import TABLE_LAUNCHES, between_us, launches_of_step, log_loss, others, table_gradient

if TYPE_CHECKING:
    import pandas

    from loka_sim.whatif import WhatIf

KIND = "loka-sim/validation"
SCHEMA_VERSION = 1
DOCUMENT, REPORT = "validation.json", "report.html"
LABELS = {
    "best": "measured best", "before": "decision before", "after": "decision after",
    "cross_validated": "decision, cross-validated", "decision": "decision, exported",
    "decision_before": "decision before, exported",
    "bf16": "bf16", "naive_tensorwise": "all FP8, tensorwise", "naive_rowwise": "all FP8, rowwise",
    "filter_tensorwise": "torchao filter, tensorwise", "filter_rowwise": "torchao filter, rowwise",
}  # fmt: skip


@dataclass(frozen=True)
class Findings:
    """Whose findings they are.

    Attributes:
        request: What was asked.
        folder: The calibration, and where everything is left.
        before: The what-if by the shipped models.
        after: By the refined ones.
        machine: Fingerprint.
        command: For the record.
        between_s: Seconds of this run that no stage took, so far.
    """

    request: Request
    folder: Path
    before: WhatIf
    after: WhatIf
    machine: dict[str, Any]
    command: list[str]
    between_s: Callable[[], float]


def finish(
    found: Findings,
    numerics: dict[str, Any],
    refinement: Any,
    rows: pandas.DataFrame,
    step: dict[str, Any] | None,
    stages: list[dict[str, Any]],
) -> dict[str, Any]:
    """Write the document, the report and the new dispatch table.

    Args:
        found: Whose.
        numerics: The document's part on numerics.
        refinement: Of the time model; None where nothing was measured.
        rows: All measured rows.
        step: Medians per variant, and a note; None where no step was run.
        stages: The document's stages.

    Returns:
        The document.
    """
    from loka_sim.cli.output import render_json
    from loka_sim.dispatch import table
    from loka_sim.report.validation_view import render_validation
    from loka_sim.validation import judge
    from loka_sim.validation.libraries import libraries
    from loka_sim.validation.times import time_part

    request, folder, after = found.request, found.folder, found.after
    timed = None if refinement is None else time_part(request.hardware, folder, rows, refinement)
    dispatch = None if refinement is None else dispatch_part(found.before, after, refinement, rows)
    # The zoo's tables are cut to fit; a user's own model is run as it is.
    run = step_part(step, found.before, after, sys.maxsize if ":" in request.model else TABLE_ROWS)
    tolerances = judge.tolerances(numerics, timed, dispatch, run)
    rest = {"name": "starting, refining, deciding anew", "seconds": found.between_s(), "complete": True, "note": None}
    document = {
        "schema_version": SCHEMA_VERSION, "kind": KIND, "loka_sim_version": loka_sim.__version__, "command": found.command,
        "settings": request.to_dict(), "machine": found.machine, "libraries": libraries(),
        "stages": [*stages, rest], "numerics": numerics, "time": timed, "dispatch": dispatch, "step": run,
        "whatif": {"before": headline(found.before), "after": headline(after)},
        "tolerances": tolerances, "verdict": judge.verdict(tolerances),
    }  # fmt: skip
    write_text_atomic(folder / table.FILE_NAME, render_json(table.from_whatif(after.to_dict())) + "\n")
    write_text_atomic(folder / REPORT, render_validation(document))
    write_text_atomic(folder / DOCUMENT, render_json(document) + "\n")
    return document


def dispatch_part(before: WhatIf, after: WhatIf, refinement: Any, rows: pandas.DataFrame) -> dict[str, Any]:
    """What decisions cost as measured."""
    from loka_sim.validation.regret import changes, measured_times, policies_of, regrets
    from loka_sim.validation.times import decided_unseen, of_decision, unseen_times

    measured = after.as_run(measured_times(rows[rows["sweep"] == "model"]))
    times = after.as_run(unseen_times(after, refinement))
    unseen = decided_unseen(after, times)
    policies = policies_of({"before": before, "after": after})
    # What is accurate is known better by now: the best is among that, and what was taken before may be none of it.
    found = regrets(after, measured, {**policies, "cross_validated": unseen})
    order = ["best", "before", "cross_validated", "after", *list(policies)[2:]]
    by_name = {row["name"]: row for row in found.rows(LABELS)}
    note = "cross-validated: every site decided by times predicted without its own shapes; after: by those measured"
    if by_name and by_name["before"]["against_best"] < 0:
        note += "; before takes kernels that are too inaccurate by the refined errors"
    return {
        "sites": found.sites, "of_sites": found.of_sites, "passes": found.passes,
        "policies": [by_name[name] for name in order if name in by_name],
        "unseen": of_decision(unseen, times, measured), "changes": changes(before, after, measured), "note": note,
    }  # fmt: skip


def step_part(step: dict[str, Any] | None, before: WhatIf, after: WhatIf, rows: int = TABLE_ROWS) -> dict[str, Any] | None:
    """Measured steps beside those predicted; a decision's is what torchao can run of it, predicted as that.

    `decision` is the refined one; `decision_before` the one that was taken before anything was measured, where it runs otherwise.
    Where the host is the bound, steps are compared as CUDA graphs.

    Args:
        step: Medians as launched kernel by kernel, and as graphs where they were made; how fast the host was; and a note.
        before: The what-if by the shipped models.
        after: By the refined ones.
        rows: Most rows of an embedding table as it was run.
    """
    if not step or "bf16" not in step["medians"]:
        return None
    losses = {"decision": given_up(after), "decision_before": given_up(before)}
    answers = {"before": before, "after": after}
    beside = {when: _around_us(answer, rows) for when, answer in answers.items()}
    predicted = {when: _speedups(answer, beside[when]) for when, answer in answers.items()}
    host_step_us, tables = step.get(HOST), TABLE_LAUNCHES * len(after.spec.tables)
    calls_us = called(launches_of_step(after.spec, after.others) + tables, host_step_us or after.host_step_us).us
    whole = after.steps[0].whole
    bound = whole is not None and calls_us > whole.us
    graphs = step.get("graphs") or {}
    of_graphs = bound and "bf16" in graphs
    seen = {name: found["p50_ms"] for name, found in (graphs if of_graphs else step["medians"]).items()}
    variants = []
    for name, found in step["medians"].items():
        variant = {
            "name": name, "label": LABELS[name], "measured_ms": found["p50_ms"],
            "graph_ms": graphs[name]["p50_ms"] if name in graphs else None,
            "speedup": seen["bf16"] / seen[name] if name in seen else None,
        }  # fmt: skip
        for when, answer in answers.items():
            # Each model has a decision of its own; where both were run, it says nothing of the other's.
            other = {"before": "decision", "after": "decision_before"}[when]
            if name == other and "decision_before" in step["medians"]:
                variant[f"predicted_{when}"] = None
                continue
            speedup, factor = predicted[when]["decision" if name in losses else name], 1.0
            if name == f"decision{'_before' if when == 'before' else ''}":
                decided = (answer.decision.whole or answer.decision.total).us
                factor = decided / (decided + losses[name][0])
            variant[f"predicted_{when}"] = {
                "speedup": speedup.us * factor, "low": speedup.low_us * factor, "high": speedup.high_us * factor,
            }  # fmt: skip
        variants.append(variant)
    notes = [step["note"]] if step["note"] else []
    ran = next((name for name in losses if name in step["medians"]), "decision")
    lost, passes = losses[ran]
    if passes:
        notes.insert(0, f"torchao runs {passes} passes otherwise than decided, {lost:.0f} us a step slower as predicted")
    if bound:
        said = "; compared are steps as CUDA graphs" if of_graphs else ", without a CUDA graph"
        notes.insert(0, f"the host is the bound: it launches the kernels in some {calls_us:,.0f} us{said}")
    predicted_ms = None if whole is None else (whole.us + beside["after"]) / 1e3
    return {
        "variants": variants, "predicted_bf16_ms": predicted_ms, "host_bound": bound, "graphs": of_graphs,
        HOST: host_step_us, "note": "; ".join(notes) or None,
    }  # fmt: skip


def _around_us(answer: WhatIf, rows: int) -> float:
    """Microseconds of what is run beside the model as specified: a loss, and dense gradients of its embedding tables."""
    from perfmodel import fused

    try:
        model = fused.load(answer.settings.hardware)
    except (FileNotFoundError, ValueError):
        return 0.0
    found = others([*table_gradient(answer.spec.tables, rows), *log_loss()], answer.spec.batch, model)
    return sum(other.time.us for other in found) + (between_us(found, model.in_step) if model.in_step else 0.0)


def _speedups(answer: WhatIf, beside_us: float) -> dict[str, Time]:
    """Predicted speedup of every way of running the model, with so many more microseconds in each."""
    found = {}
    for step in answer.steps:
        if step.whole is None or step.whole_speedup is None:
            found[step.name] = step.speedup
        else:
            us = step.whole.us
            found[step.name] = Time(*((ratio * us + beside_us) / (us + beside_us) for ratio in step.whole_speedup))
    return found


def given_up(answer: WhatIf) -> tuple[float, int]:
    """What the decision loses where torchao runs it, in microseconds a step as predicted, and in how many passes."""
    from loka_sim.dispatch.table import from_whatif
    from loka_sim.dispatch.torchao_plan import plan

    losses = plan(from_whatif(answer.to_dict())).losses
    return sum(loss.gives_up_us for loss in losses), len(losses)


def headline(answer: WhatIf) -> dict[str, Any]:
    """The what-if in five figures."""
    decision = answer.decision
    return {
        "step_us": decision.total.us, "speedup": decision.speedup.us, "low": decision.speedup.low_us,
        "high": decision.speedup.high_us, "fp8_passes": decision.fp8_passes,
    }  # fmt: skip

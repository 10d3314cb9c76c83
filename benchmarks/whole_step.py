"""The predicted whole step beside measured ones, and whether the sign of each speedup is right.

    python benchmarks/whole_step.py                         # of data/h200/step_profiles.json
    python benchmarks/whole_step.py --add profiles/*.json   # takes in what benchmarks/step_profile.py wrote

Forward and backward as measured there: one CUDA graph, tables cut to 10,000 rows, their gradients dense. `kernels` is the
sum of the profiled kernels' durations, `graph` the wall time of the graph; where the GPU had other work beside, the second
is too long, and left out where it plainly is. No kernel of these steps was learned from. Of some the prediction was written
down before they are measured (data/h200/step_predictions.json), and stands last. Then the steps that validations timed as they
are called, without a graph, beside what the host takes to launch them, or the GPU where that is longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loka_sim.dispatch.baselines import BASELINES
from loka_sim.dispatch.candidates import operand_makers
from loka_sim.dispatch.steps import whole
from loka_sim.fp8_step import converted
from loka_sim.validation.runnable import TABLE_ROWS
from loka_sim.whatif import WhatIf, whatif
from loka_sim.whole_step import TABLE_LAUNCHES, by_kind, called_us, others, table_gradient
from perfmodel import fused
from perfmodel.data_folder import data_folder

DISTURBED = 1.25  # a graph that takes so many times its kernels ran beside other work
KEPT = ("model", "batch", "variant", "command", "step_ms", "graph_ms", "kernels_ms", "by_kind_us")


def add(file: Path, profiles: Sequence[Path]) -> None:
    """Take profiles into the file of measured steps; the machine is said once."""
    known = json.loads(file.read_text()) if file.exists() else {"schema_version": 1, "machine": None, "steps": []}
    for path in profiles:
        profile = json.loads(path.read_text())
        known["machine"] = known["machine"] or profile["machine"]
        same = [profile[name] for name in KEPT[:3]]
        known["steps"] = [step for step in known["steps"] if [step[name] for name in KEPT[:3]] != same]
        known["steps"].append({name: profile[name] for name in KEPT})
    known["steps"].sort(key=lambda step: [str(step[name]) for name in KEPT[:3]])
    file.write_text(json.dumps(known, indent=1) + "\n")


def predicted(model: str, batch: int, answers: dict[tuple[str, int], Any]) -> dict[str, tuple[float, float, float]]:
    """Milliseconds of every variant of a model's measured step, with the ends of the 90% interval.

    Args:
        model: As a what-if takes it.
        batch: Samples.
        answers: By model and batch the what-if, and what dense gradients of its tables add by kind; what is not there is added.
    """
    if (model, batch) not in answers:
        answer: WhatIf = whatif(model, batch=batch)
        tables = others(table_gradient(answer.spec.tables, TABLE_ROWS), batch, fused.load())
        answers[model, batch] = answer, by_kind(tables)
    answer, tables = answers[model, batch]
    found = {step.name: whole(step.whole, tables) for step in answer.steps if step.whole is not None}
    return {name: tuple(end / 1e3 for end in total) for name, total in found.items()}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--add", type=Path, nargs="+", default=[])
    parser.add_argument("--steps", type=Path, default=data_folder() / "h200" / "step_profiles.json")
    parser.add_argument("--predictions", type=Path, default=data_folder() / "h200" / "step_predictions.json")
    parser.add_argument("--validations", type=Path, nargs="+", default=[], help="documents of loka-sim validate")
    options = parser.parse_args()
    if options.add:
        add(options.steps, options.add)
    steps = json.loads(options.steps.read_text())["steps"]
    written = json.loads(options.predictions.read_text())["steps"]
    before = {tuple(step[name] for name in KEPT[:3]): step["predicted_ms"] for step in written}
    answers: dict[tuple[str, int], Any] = {}
    errors, walls, signs, blind, covered = [], [], [], [], []
    head = f"{'kernels':>9s}{'graph':>9s}{'predicted':>10s}{'90%':>20s}{'off':>8s}  speedup"
    print(f"{'model':24s}{'batch':>6s}  {'variant':18s}{head}")
    for step in steps:
        found = predicted(step["model"], step["batch"], answers)
        us, low, high = found[step["variant"]]
        measured = step["kernels_ms"]
        errors.append(us / measured - 1)
        if step["graph_ms"] and step["graph_ms"] < DISTURBED * measured:
            walls.append(us / step["graph_ms"] - 1)
        graph = f"{step['graph_ms']:9.3f}" if step["graph_ms"] else f"{'':9s}"
        line = f"{step['model']:24s}{step['batch']:6d}  {step['variant']:18s}{measured:9.3f}{graph}{us:10.3f}"
        line += f"  [{low:7.3f}, {high:7.3f}]{errors[-1]:+8.1%}"
        base = next((s for s in steps if [s[k] for k in KEPT[:3]] == [step["model"], step["batch"], "bf16"]), None)
        if base is not None and base is not step:
            ratios = base["kernels_ms"] / measured, found["bf16"][0] / us
            signs.append((ratios[0] > 1) == (ratios[1] > 1))
            line += f"  {ratios[0]:.3f}x, predicted {ratios[1]:.3f}x" + ("" if signs[-1] else "  WRONG SIGN")
        if (said := before.get(tuple(step[name] for name in KEPT[:3]))) is not None:
            blind.append(said[0] / measured - 1)
            covered.append(said[1] <= measured <= said[2])
            line += f"  said before: {said[0]:.3f} ({blind[-1]:+.1%})"
        print(line)
    kinds = [("kernels", errors), ("graph, where it is not a quarter longer than its kernels", walls)]
    kinds += [("kernels, said before they were measured", blind)] * bool(blind)
    for what, some in kinds:
        sizes = [abs(error) for error in some]
        within = sum(size <= 0.10 for size in sizes)
        print(f"against {what}: mean {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}; {within} of {len(sizes)} within 10%")
    print(f"signs right {sum(signs)} of {len(signs)}")
    if blind:
        print(f"90% intervals said before hold {sum(covered)} of {len(covered)}")
    show_called(options.validations or sorted((data_folder() / "h200" / "validations").glob("*.json")), answers)
    return 0


def show_called(documents: Sequence[Path], answers: dict[tuple[str, int], Any]) -> None:
    """Steps without a CUDA graph, as validations timed them, beside the predicted."""
    errors = []
    print(f"{'as called':24s}{'batch':>6s}  {'variant':18s}{'measured':>9s}{'host':>9s}{'GPU':>9s}{'off':>8s}")
    for path in documents:
        document = json.loads(path.read_text())
        if not document["step"]:
            continue
        model, batch = document["settings"]["model"], document["settings"]["batch"]
        gpu = predicted(model, batch, answers)
        for variant in document["step"]["variants"]:
            if variant["name"] in gpu and not variant["name"].startswith("decision"):
                host = launched(answers[model, batch][0], variant["name"]) / 1e3
                us = gpu[variant["name"]][0]
                errors.append(max(host, us) / variant["measured_ms"] - 1)
                line = f"{model:24s}{batch:6d}  {variant['name']:18s}{variant['measured_ms']:9.3f}{host:9.3f}{us:9.3f}"
                print(f"{line}{errors[-1]:+8.1%}")
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.10 for size in sizes)
    print(
        f"against steps as called: mean {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}; {within} of {len(sizes)} within 10%"
    )


def launched(answer: WhatIf, variant: str) -> float:
    """Microseconds that the host takes to launch a variant's kernels, dense gradients of tables among them."""
    baseline = next(baseline for baseline in BASELINES if baseline.name == variant)
    assignments = [baseline.assignment(site.site, site.shape) for site in answer.sites]
    shapes = [site.shape for site in answer.sites]
    makers = [operand_makers(shape, assignment) for shape, assignment in zip(shapes, assignments, strict=True)]
    found = converted(answer.spec, fused.load().hardware, shapes, assignments, makers)
    gemms = sum(len(site.passes) for site in answer.sites)
    return called_us(answer.others if found is None else found.others, gemms + TABLE_LAUNCHES * len(answer.spec.tables))


if __name__ == "__main__":
    sys.exit(main())

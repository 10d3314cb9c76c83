"""The predicted whole step beside measured ones, and whether the sign of each speedup is right.

    python benchmarks/whole_step.py                         # of data/h200/step_profiles.json
    python benchmarks/whole_step.py --add profiles/*.json   # takes in what benchmarks/step_profile.py wrote

Forward and backward as measured there: one CUDA graph, tables cut to 10,000 rows, their gradients dense. `kernels` is the
sum of the profiled kernels' durations, `graph` the wall time of the graph; where the GPU had other work beside, the second
is too long, and left out where it plainly is. No kernel of these steps was learned from. Of some the prediction was written
down before they were measured (data/h200/step_predictions.json), and stands last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loka_sim.dispatch.steps import whole
from loka_sim.validation.runnable import TABLE_ROWS
from loka_sim.whatif import WhatIf, whatif
from loka_sim.whole_step import by_kind, others, table_gradient
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
    """Milliseconds of every variant of a model's measured step, with the ends of the 90% interval."""
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
        if step["graph_ms"] < DISTURBED * measured:
            walls.append(us / step["graph_ms"] - 1)
        line = f"{step['model']:24s}{step['batch']:6d}  {step['variant']:18s}{measured:9.3f}{step['graph_ms']:9.3f}{us:10.3f}"
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
    for what, some in kinds + [("kernels, said before they were measured", blind)] * bool(blind):
        sizes = [abs(error) for error in some]
        within = sum(size <= 0.10 for size in sizes)
        print(f"against {what}: mean {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}; {within} of {len(sizes)} within 10%")
    print(f"signs right {sum(signs)} of {len(signs)}; 90% intervals said before hold {sum(covered)} of {len(covered)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

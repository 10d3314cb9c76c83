"""The predicted whole step beside measured ones, and whether the sign of each speedup is right.

    python benchmarks/whole_step.py                         # of data/h200/step_profiles.json
    python benchmarks/whole_step.py --add profiles/*.json   # takes in what benchmarks/step_profile.py wrote
    python benchmarks/whole_step.py --hardware h100 --steps FILE --add profiles/*.json   # steps of another GPU, and those alone
    python benchmarks/whole_step.py --predict dlrm-production:4096:bf16 --about "before a change"   # writes it down

Forward and backward as measured there: one CUDA graph, tables cut to 10,000 rows, their gradients dense, a log loss behind the
model. `kernels` is the sum of the profiled kernels' durations, `graph` the wall time of the graph, left out where other work ran
beside. Then sets of predictions that were written down before the
steps were measured (data/h200/step_predictions.json), as they were. Then the steps that validations timed as they are called,
without a graph, beside what the host takes to launch them, or the GPU where that is longer; and the same as it follows from the
bf16 step of the same run, which says how fast the host was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from loka_sim.calibration import HOST
from loka_sim.dispatch.baselines import BASELINES
from loka_sim.dispatch.candidates import operand_makers
from loka_sim.dispatch.cost import Time
from loka_sim.dispatch.steps import RECIPE, whole
from loka_sim.fp8_step import converted
from loka_sim.host_time import called
from loka_sim.resolve import WITH_MODS
from loka_sim.validation.runnable import TABLE_ROWS
from loka_sim.whatif import WhatIf, whatif
from loka_sim.whole_step import TABLE_LAUNCHES, between_us, by_kind, launches_of_step, log_loss, others, table_gradient
from perfmodel import fused
from perfmodel.data_folder import data_folder
from perfmodel.fit_in_step import architecture
from perfmodel.hardware import DEFAULT, available

KEPT = ("model", "batch", "variant", "command", "step_ms", "graph_ms", "kernels_ms", "by_kind_us")


def add(file: Path, profiles: Sequence[Path]) -> None:
    """Take profiles into the file of measured steps; the machine is said once."""
    known = json.loads(file.read_text()) if file.exists() else {"schema_version": 1, "machine": None, "steps": []}
    for path in profiles:
        profile = json.loads(path.read_text())
        known["machine"] = known["machine"] or profile["machine"]
        same = [profile[name] for name in KEPT[:3]]
        known["steps"] = [step for step in known["steps"] if [step[name] for name in KEPT[:3]] != same]
        host = {name: profile[name] for name in ("host", "tensors", "compiled_in_s") if name in profile}
        known["steps"].append({**{name: profile[name] for name in KEPT}, "shared": False, **host})
    known["steps"].sort(key=lambda step: [str(step[name]) for name in KEPT[:3]])
    file.write_text(json.dumps(known, indent=1) + "\n")


class Predicted(NamedTuple):
    """A step as predicted, in milliseconds with the ends of the 90% interval."""

    kernels_ms: tuple[float, float, float]
    graph_ms: tuple[float, float, float]


def is_modified(model: str) -> bool:
    """Whether a step's model has all Mods, as `benchmarks/step_profile.py` names it."""
    return model.endswith(WITH_MODS)


def plain(model: str) -> str:
    """A step's model without the Mods in its name."""
    return model.removesuffix(WITH_MODS)


def around(answer: WhatIf) -> tuple[dict[str, Time], float]:
    """What the loss and dense gradients of a model's tables add to a step: by kind, and microseconds of gaps between kernels."""
    times = fused.load(answer.settings.hardware)
    more = others([*table_gradient(answer.spec.tables, TABLE_ROWS), *log_loss()], answer.spec.batch, times)
    return by_kind(more), between_us(more, times.in_step) if times.in_step else 0.0


def both(model: str, batch: int, answers: dict[tuple[str, int], Any], hardware: str = DEFAULT) -> dict[str, Predicted]:
    """Every variant of a model's measured step: the sum of its kernels, and its CUDA graph.

    Args:
        model: As a what-if takes it.
        batch: Samples.
        answers: By model and batch the what-if, and what `around` says; what is not there is added.
        hardware: Whose times to predict by.
    """
    if (model, batch) not in answers:
        mods = "all" if is_modified(model) else ()
        answer: WhatIf = whatif(plain(model), batch=batch, hardware=hardware, mods=mods)
        answers[model, batch] = answer, *around(answer)
    answer, beside, gap_us = answers[model, batch]
    result = {}
    for step in answer.steps:
        if step.whole is not None:
            total = whole(step.whole, beside)
            graph = tuple((end + gap_us) / 1e3 for end in total)
            result[step.name] = Predicted(tuple(end - (step.gaps_us + gap_us) / 1e3 for end in graph), graph)
    return result


def predicted(model: str, batch: int, answers: dict[tuple[str, int], Any]) -> dict[str, tuple[float, float, float]]:
    """Milliseconds that the kernels of every variant take together, with the ends of the 90% interval; see `both`."""
    return {name: found.kernels_ms for name, found in both(model, batch, answers).items()}


def predict(file: Path, about: str, wanted: Sequence[str]) -> None:
    """Write down what is predicted of steps, as one set more."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    known = json.loads(file.read_text())
    answers: dict[tuple[str, int], Any] = {}
    steps = []
    for text in wanted:
        model, batch, variant = text.rsplit(":", 2)
        found = both(model, int(batch), answers)[variant]
        entry = {"model": model, "batch": int(batch), "variant": variant}
        every = {**found._asdict(), "called_ms": as_called(answers[model, int(batch)][0], variant, found.graph_ms)}
        steps.append({**entry, **{name: [round(end, 4) for end in ends] for name, ends in every.items()}})
    known["sets"].append({"about": about, "predicted": now, "commit": commit, "steps": steps})
    file.write_text(json.dumps(known, indent=1) + "\n")


def judge(what: str, ratios: Sequence[float], inside: Sequence[bool]) -> None:
    """Print how far predictions are off, and how many intervals hold what was measured."""
    if not ratios:
        return
    sizes = [abs(ratio - 1) for ratio in ratios]
    within = sum(size <= 0.10 for size in sizes)
    words = f"mean {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}; {within} of {len(sizes)} within 10%"
    print(f"{what}: {words}; {sum(inside)} of {len(inside)} inside their 90% intervals")


def holds(ends: Sequence[float], measured: float) -> bool:
    """Whether an interval holds what was measured."""
    return ends[1] <= measured <= ends[2]


def outside(ends: Sequence[float], measured: float) -> float:
    """How far what was measured is off, in parts of the interval's side: above 1 it lies outside."""
    return abs(measured - ends[0]) / abs(ends[2 if measured > ends[0] else 1] - ends[0])


def wide_enough(kinds: Sequence[str], parts: Sequence[float]) -> float:
    """How many times as wide intervals would hold 90% of the steps, where every kind of model counts as much as another."""
    steps = Counter(kinds)
    total = 0.0
    for kind, part in sorted(zip(kinds, parts, strict=True), key=lambda pair: pair[1]):
        total += 1 / (steps[kind] * len(steps))
        if total >= 0.9:
            return part
    return float("inf")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--add", type=Path, nargs="+", default=[])
    parser.add_argument("--predict", nargs="+", metavar="MODEL:BATCH:VARIANT", default=[])
    parser.add_argument("--about", default="", help="of a set of predictions")
    parser.add_argument("--hardware", default=DEFAULT, choices=available(), help=f"whose times (default: {DEFAULT})")
    parser.add_argument("--steps", type=Path, help="measured on that hardware (default: its step_profiles.json)")
    parser.add_argument("--predictions", type=Path, default=data_folder() / "h200" / "step_predictions.json")
    parser.add_argument("--validations", type=Path, nargs="+", default=[], help="documents of loka-sim validate")
    options = parser.parse_args()
    if options.predict:
        predict(options.predictions, options.about, options.predict)
        return 0
    measured = options.steps or data_folder() / options.hardware / "step_profiles.json"
    if options.add:
        add(measured, options.add)
    steps = json.loads(measured.read_text())["steps"]
    answers: dict[tuple[str, int], Any] = {}
    show_steps(steps, answers, options.hardware)
    if options.hardware != DEFAULT:
        return 0
    sets = json.loads(options.predictions.read_text())["sets"]
    for number, some in enumerate(sets):
        show_said(number, some, steps)
    show_called(options.validations or sorted((data_folder() / "h200" / "validations").glob("*.json")), answers)
    show_hosts(json.loads((data_folder() / "h200" / "host_steps.json").read_text())["steps"], answers)
    return 0


def show_steps(steps: Sequence[dict[str, Any]], answers: dict[tuple[str, int], Any], hardware: str = DEFAULT) -> None:
    """Every step measured on a hardware beside what is predicted of it now."""
    head = f"{'kernels':>9s}{'predicted':>10s}{'90%':>20s}{'off':>8s}{'graph':>9s}{'predicted':>10s}{'off':>8s}  speedup"
    print(f"{'model':24s}{'batch':>6s}  {'variant':18s}{head}")
    ratios, inside, walls, held, signs, sure = [], [], [], [], [], []
    parts: dict[bool, list[tuple[str, float]]] = {False: [], True: []}  # of steps that were not learned from, and that were
    learned = seen_steps(hardware)
    for step in steps:
        found = both(step["model"], step["batch"], answers, hardware)
        (us, low, high), graph = found[step["variant"]]
        measured = step["kernels_ms"]
        ratios.append(us / measured)
        inside.append(low <= measured <= high)
        known = tuple(step[name] for name in KEPT[:3]) in learned
        parts[known].append((architecture(step["model"]), outside((us, low, high), measured)))
        line = f"{step['model'].rpartition('.')[2]:24s}{step['batch']:6d}  {step['variant']:18s}{measured:9.3f}{us:10.3f}"
        line += f"  [{low:7.3f}, {high:7.3f}]{us / measured - 1:+8.1%}"
        if step["graph_ms"] and not step["shared"]:
            walls.append(graph[0] / step["graph_ms"])
            held.append(holds(graph, step["graph_ms"]))
            line += f"{step['graph_ms']:9.3f}{graph[0]:10.3f}{walls[-1] - 1:+8.1%}"
        else:
            line += " " * 27
        base = next((s for s in steps if [s[k] for k in KEPT[:3]] == [step["model"], step["batch"], "bf16"]), None)
        if base is not None and base is not step:
            speedups = base["kernels_ms"] / measured, found["bf16"].kernels_ms[0] / us
            signs.append((speedups[0] > 1) == (speedups[1] > 1))
            answer = answers[step["model"], step["batch"]][0]
            said = next(known.whole_speedup for known in answer.steps if known.name == step["variant"])
            sure.append(said.low_us <= speedups[0] <= said.high_us)
            line += f"  {speedups[0]:.3f}x, predicted {speedups[1]:.3f}x [{said.low_us:.2f}, {said.high_us:.2f}]"
            line += "" if signs[-1] else "  WRONG SIGN"
        print(line + by_mods(step, steps, answers, hardware))
    judge("against kernels", ratios, inside)
    judge("against the graph, of steps that had a GPU to themselves", walls, held)
    for known, some in parts.items():
        if some:
            which, wide = "learned from" if known else "not learned from", wide_enough(*zip(*some, strict=True))
            print(f"steps {which}, every kind of model alike: intervals {wide:.2f} times as wide hold 90%")
    print(f"signs of speedups right {sum(signs)} of {len(signs)}; {sum(sure)} of {len(sure)} inside their 90% intervals")


def seen_steps(hardware: str) -> set[tuple[Any, ...]]:
    """Steps whose kernels were learned from (`perfmodel.fit_in_step`)."""
    file = data_folder() / hardware / "step_kernels.parquet"
    return set(pd.read_parquet(file, columns=list(KEPT[:3])).itertuples(index=False, name=None)) if file.exists() else set()


def by_mods(
    step: dict[str, Any], steps: Sequence[dict[str, Any]], answers: dict[tuple[str, int], Any], hardware: str = DEFAULT
) -> str:
    """What Mods make of a step, measured and predicted; nothing of a step without them, or that was not measured without."""
    same = [plain(step["model"]), step["batch"], step["variant"]]
    without = next((other for other in steps if [other[name] for name in KEPT[:3]] == same), None)
    if without is None or without is step:
        return ""
    found, base = (both(each["model"], each["batch"], answers, hardware)[each["variant"]] for each in (step, without))
    measured, predicted = without["kernels_ms"] / step["kernels_ms"], base.kernels_ms[0] / found.kernels_ms[0]
    line = f"  by Mods {measured:.3f}x, predicted {predicted:.3f}x"
    if step["graph_ms"] and without["graph_ms"]:
        graphs = without["graph_ms"] / step["graph_ms"], base.graph_ms[0] / found.graph_ms[0]
        line += f", graphs {graphs[0]:.3f}x and {graphs[1]:.3f}x"
    return line


def show_said(number: int, some: dict[str, Any], steps: Sequence[dict[str, Any]]) -> None:
    """What was said before steps were measured, as it was said: totals, and the speedup's sign."""
    known = {tuple(step[name] for name in KEPT[:3]): step for step in steps}
    pairs = [(entry, known.get(tuple(entry[name] for name in KEPT[:3]))) for entry in some["steps"]]
    pairs = [(entry, step) for entry, step in pairs if step]
    print(f"said before, {some['predicted']}, {some['about']}: {len(pairs)} of {len(some['steps'])} measured since")
    for name in ("kernels_ms", "graph_ms"):
        # The first set said what kernels take together; a graph's time is held to that, too.
        judged = [(entry.get(name, entry["kernels_ms"]), step[name]) for entry, step in pairs if step[name]]
        ratios, inside = [ends[0] / measured for ends, measured in judged], [holds(ends, measured) for ends, measured in judged]
        judge(f"  against {name[:-3]}", ratios, inside)
    judged = [(entry["called_ms"], step["step_ms"]) for entry, step in pairs if "called_ms" in entry]
    if judged:
        judge("  as called", [ends[0] / measured for ends, measured in judged], [holds(*pair) for pair in judged])
    said_ms = {tuple(entry[name] for name in KEPT[:3]): entry["kernels_ms"][0] for entry in some["steps"]}
    signs = []
    for key, ms in said_ms.items():
        base = (*key[:2], "bf16")
        if key != base and key in known and base in known and base in said_ms:
            signs.append((known[base]["kernels_ms"] > known[key]["kernels_ms"]) == (said_ms[base] > ms))
    if signs:
        print(f"  signs right {sum(signs)} of {len(signs)}")


def show_called(documents: Sequence[Path], answers: dict[tuple[str, int], Any]) -> None:
    """Steps without a CUDA graph, as validations timed them, beside the predicted."""
    errors, inside, relative = [], [], []
    print(f"{'as called':24s}{'batch':>6s}  {'variant':18s}{'measured':>9s}{'predicted':>10s}{'off':>8s}  given bf16's")
    for path in documents:
        document = json.loads(path.read_text())
        if not document["step"]:
            continue
        model, batch = document["settings"]["model"], document["settings"]["batch"]
        gpu = {name: found.graph_ms for name, found in both(model, batch, answers).items()}
        pace = 1.0
        for variant in document["step"]["variants"]:
            name, measured = variant["name"], variant["measured_ms"]
            if name in gpu and not name.startswith("decision"):
                ends = as_called(answers[model, batch][0], name, gpu[name], document["step"].get(HOST))
                errors.append(ends[0] / measured)
                inside.append(holds(ends, measured))
                line = f"{model:24s}{batch:6d}  {name:18s}{measured:9.3f}{ends[0]:10.3f}{errors[-1] - 1:+8.1%}"
                if name == "bf16":
                    pace = measured / ends[0]
                else:
                    relative.append(pace * ends[0] / measured)
                    line += f"{relative[-1] - 1:+8.1%}"
                print(line)
    judge("against steps as called", errors, inside)
    sizes = [abs(ratio - 1) for ratio in relative]
    print(f"given the bf16 step of the same run: mean {statistics.mean(sizes):.1%}, worst {max(sizes):.1%} of {len(sizes)}")


def show_hosts(steps: Sequence[dict[str, Any]], answers: dict[tuple[str, int], Any]) -> None:
    """Steps as called beside the step that tells how fast the host was meanwhile: of each, its visits' medians."""
    errors, inside = [], []
    for step in steps:
        model, batch, name = step["model"], step["batch"], step["variant"]
        graph_ms = both(model, batch, answers)[name].graph_ms
        eager, measured = (statistics.median(visit[what][1] for visit in step["visits"]) for what in ("eager", "step"))
        ends = as_called(answers[model, batch][0], name, graph_ms, eager)
        errors.append(1e3 * ends[0] / measured)
        inside.append(holds(ends, measured / 1e3))
        print(f"{model[-24:]:24s}{batch:6d}  {name:18s}{measured / 1e3:9.3f}{ends[0]:10.3f}{errors[-1] - 1:+8.1%}")
    judge("against steps as called, given how fast the host was (the line was found with these)", errors, inside)


def as_called(answer: WhatIf, variant: str, graph_ms: Sequence[float], host_step_us: float | None = None) -> tuple[float, ...]:
    """Milliseconds of a step that the host launches kernel by kernel, with the ends of the 90% interval.

    Args:
        answer: The what-if.
        variant: Way of running it.
        graph_ms: What the GPU takes, where that is longer.
        host_step_us: How fast the host was, see `hil.host.step_us`.
    """
    found = answer.converted
    if variant != "decision":
        baseline = next(baseline for baseline in BASELINES if baseline.name == variant)
        assignments = [baseline.assignment(site.site, site.shape) for site in answer.sites]
        shapes = [site.shape for site in answer.sites]
        makers = [operand_makers(shape, assignment) for shape, assignment in zip(shapes, assignments, strict=True)]
        found = converted(answer.spec, fused.load(answer.settings.hardware).hardware, shapes, assignments, makers, RECIPE)
    tables = TABLE_LAUNCHES * len(answer.spec.tables)
    beside = answer.others if found is None else found.others
    host = called(launches_of_step(answer.spec, beside) + tables, host_step_us)
    longer = sum(other.called.us - other.time.us for other in beside if other.called is not None) / 1e3
    return tuple(max(end / 1e3, ms + longer) for end, ms in zip(host, graph_ms, strict=True))


if __name__ == "__main__":
    sys.exit(main())

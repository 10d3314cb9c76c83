"""Steps that were measured on several GPUs of one host beside what is predicted of them.

    python -m benchmarks.gpu_steps                          # of data/h100/gpu_steps.json
    python -m benchmarks.gpu_steps --add steps/*.json       # takes in what benchmarks/step_on_gpus.py wrote
    python -m benchmarks.gpu_steps --predict wukong-production:3072:2 wukong-production:2048:2:decision:ddp    # writes it down

Forward and backward as measured there, in bf16 or as decided among torch's kernels: DistributedDataParallel or FSDP, embeddings
and their gradients exchanged, tables cut to 10,000 rows, a log loss behind the model. Three predictions stand beside each: that
of `loka-sim step`, the same if kernels and collectives that run at once did not slow each other, and of one GPU alone. Steps
that the host bounds, which launches the kernels, are judged apart. Steps of one rank, which exchanges with itself, say what a
host takes whose speed was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.whole_step import judge
from loka_sim import step_plan
from loka_sim.dispatch.cost import Time
from loka_sim.files import write_bytes_atomic
from loka_sim.overlap import IN_STEP
from loka_sim.step_plan import BACKWARD, BF16, DECISION, LAUNCHED, OPTIMIZER, TABLE_UPDATE, Piece, plan
from loka_sim.validation.runnable import TABLE_ROWS
from loka_sim.whatif import WhatIf, whatif
from loka_sim.whole_step import CALLED_GAP_US, GAP, log_loss, others, table_gradient
from perfmodel import fused
from perfmodel.data_folder import data_folder
from perfmodel.timeline import HOST, schedule

KEPT = (
    "model", "batch", "ranks", "precision", "dense", "command", "machine", "dense_bytes", "embedding_bytes", "all_reduces",
    "units", "compiled_in_s", "host_step_us", "step",
)  # fmt: skip
KEY = KEPT[:5]
PRECISIONS, SPREADS = tuple(LAUNCHED), ("ddp", "fsdp")
PROFILED = ("compute", "ddp_exchange", "fsdp_exchange", "kernels")
# A step is the host's whose GPUs wait for launches this share of it at least (of 17 that were profiled 12 did 1% to 4%, the
# others 22% to 88%); of those that were not, which the host takes this share of it at least to launch, or to wait for room to.
IDLE, OF_THE_HOST = 0.1, 0.95


def measured_ms(step: dict[str, Any]) -> float:
    """What a measured step took with all that it exchanges."""
    return float(step["step"][f"{step['dense']}_exchange"]["p50_ms"])


def pieces(answer: WhatIf, hardware: str, precision: str) -> list[Piece]:
    """A forward and backward as measured: without optimizer, with dense gradients of tables and a loss."""
    converted = answer.converted if precision == DECISION else None
    own = step_plan.pieces_of(answer, LAUNCHED[precision], converted=converted)
    kernels = [*table_gradient(answer.spec.tables, TABLE_ROWS), *log_loss()]
    more = others(kernels, answer.spec.batch, fused.load(hardware))
    gap_us = CALLED_GAP_US * sum(kernel.count for kernel in kernels)
    gap = Piece(BACKWARD, "between these kernels", GAP, Time(gap_us, 0.5 * gap_us, 1.5 * gap_us))
    run = [piece for piece in own if piece.phase not in (OPTIMIZER, TABLE_UPDATE)]
    beside = [*(piece for other in more for piece in other.pieces()), gap]
    factor = step_plan.slowest(answer.parallel.gpus)
    return [*run, *(step_plan.longer(piece, factor) for piece in beside)]


def predicted(
    model: str, batch: int, gpus: int, precision: str, dense: str, hardware: str, host_step_us: float | None = None
) -> dict[str, Any]:
    """Milliseconds of a step: on one GPU, on several with the 90% interval, there by part, and if nothing slowed anything.

    Args:
        model: A zoo model.
        batch: Of each rank.
        gpus: Ranks; of one, which exchanges with itself, only what its host takes is known.
        precision: One of `PRECISIONS`.
        dense: One of `SPREADS`.
        hardware: The GPU.
        host_step_us: How fast the host was, see `hil.host.step_us`.
    """
    answer = replace(whatif(model, batch=batch, gpus=max(gpus, 2), hardware=hardware, dense=dense), host_step_us=host_step_us)
    found = answer.communication
    assert found is not None
    own = pieces(answer, hardware, precision)
    ops = plan(own, found)
    step = step_plan.timeline(answer, own)
    host = next(op for op in step.ops if op.stream == HOST)
    return {
        "one_ms": schedule(plan(own)).total_us / 1e3,
        "several_ms": [end / 1e3 for end in (step.total_us, *step.interval())],
        "gpus_ms": step.gpu_us / 1e3,
        "host_ms": [end / 1e3 for end in (host.us, host.low_us, host.high_us)],
        "unslowed_ms": schedule(ops).total_us / 1e3,
        "exposed_ms": step.exposed_us / 1e3,
        "slowed_ms": step.slowed_us / 1e3,
    }


def add(file: Path, paths: Sequence[Path]) -> None:
    """Take measured steps into a file, each in the place of an earlier one of the same model, batch and number of GPUs."""
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"schema_version": 1, "steps": []}
    for path in paths:
        document = json.loads(path.read_text())
        entry = {name: document.get(name) for name in KEPT}
        if document.get("profile"):
            parts = document["profile"]
            entry["profile"] = {name: parts[name] for name in PROFILED if name in parts}
        known["steps"] = [step for step in known["steps"] if any(step[name] != entry[name] for name in KEY)]
        known["steps"].append(entry)
    _write(file, known)


def asked_for(text: str) -> tuple[str, int, int, str, str]:
    """A step by `KEY`, of MODEL:BATCH:GPUS in bf16 under DDP, or of MODEL:BATCH:GPUS:PRECISION:DENSE.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    model, *numbers, precision, dense = (text if text.count(":") == 4 else f"{text}:{BF16}:ddp").split(":")
    if len(numbers) != 2 or not all(map(str.isdecimal, numbers)) or precision not in PRECISIONS or dense not in SPREADS:
        known = f"PRECISION one of {', '.join(PRECISIONS)}, DENSE one of {', '.join(SPREADS)}"
        raise argparse.ArgumentTypeError(f"{text}: give MODEL:BATCH:GPUS or MODEL:BATCH:GPUS:PRECISION:DENSE, {known}")
    return model, int(numbers[0]), int(numbers[1]), precision, dense


def predict(file: Path, wanted: Sequence[tuple[str, int, int, str, str]], hardware: str, about: str) -> None:
    """Write down what is predicted of steps, as one set more."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"schema_version": 1, "sets": []}
    steps = []
    for step in wanted:
        steps.append({**dict(zip(KEY, step, strict=True)), **predicted(*step, hardware=hardware)})
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    known["sets"].append({"about": about, "predicted": now, "commit": commit, "steps": steps})
    _write(file, known)


def _write(file: Path, document: dict[str, Any]) -> None:
    write_bytes_atomic(file, (json.dumps(document, indent=1) + "\n").encode())


def is_of_the_host(step: dict[str, Any]) -> bool:
    """Whether a measured step is what the host takes to launch it, and not what the GPUs take."""
    if profiled := (step.get("profile") or {}).get(f"{step['dense']}_exchange"):
        return float(profiled["idle_us"]) >= IDLE * float(profiled["span_us"])
    variant = step["step"][f"{step['dense']}_exchange"]
    return float(variant["host_ms"]) >= OF_THE_HOST * float(variant["p50_ms"])


def show(steps: Sequence[dict[str, Any]], hardware: str) -> None:
    """Every measured step beside what is predicted now."""
    several = f"{'several':>9s}{'predicted':>10s}{'90%':>20s}{'off':>8s}{'GPUs':>9s}{'host':>9s}{'unslowed':>10s}{'off':>8s}"
    head = f"{'one GPU':>9s}{'predicted':>10s}{'off':>8s}{several}"
    print(f"{'model':24s}{'batch':>6s}{'GPUs':>5s}  {'':14s}{head}")
    judged: dict[bool, list[tuple[float, bool]]] = {False: [], True: []}
    unslowed = []
    for step in steps:
        if step["ranks"] == 1:
            continue
        found = predicted(*(step[name] for name in KEY), hardware=hardware)
        on_several, alone, of_host = measured_ms(step), step["step"].get("compute"), is_of_the_host(step)
        ms, low, high = found["several_ms"]
        one = f"{alone['p50_ms']:9.2f}" if alone else f"{'':9s}"
        off = f"{found['one_ms'] / alone['p50_ms'] - 1:+8.1%}" if alone and not of_host else f"{'':8s}"
        line = f"{_named(step)}{one}{found['one_ms']:10.2f}{off}{on_several:9.2f}{ms:10.2f}  [{low:7.2f}, {high:7.2f}]"
        line += f"{ms / on_several - 1:+8.1%}{found['gpus_ms']:9.2f}{found['host_ms'][0]:9.2f}"
        if of_host:
            print(f"{line}  the host was the bound{_given_the_host(step, hardware)}")
        else:
            print(f"{line}{found['unslowed_ms']:10.2f}{found['unslowed_ms'] / on_several - 1:+8.1%}")
            unslowed.append(found["unslowed_ms"] / on_several)
        judged[of_host].append((ms / on_several, low <= on_several <= high))
    for of_host, entries in judged.items():
        if entries:
            what = "bound by the host" if of_host else "bound by the GPUs"
            judge(f"several GPUs, {what}", [ratio for ratio, _ in entries], [held for _, held in entries])
    if unslowed:
        judge("if nothing slowed anything", unslowed, [])


def _given_the_host(step: dict[str, Any], hardware: str) -> str:
    """What is predicted of a step where it is known how fast its hosts were, the slowest's; nothing where it is not."""
    if not step.get("host_step_us"):
        return ""
    told = predicted(*(step[name] for name in KEY), hardware, max(step["host_step_us"]))["several_ms"][0]
    return f"; given how fast it was {told:.2f}, {told / measured_ms(step) - 1:+.1%}"


def lost_ms(step: dict[str, Any]) -> float | None:
    """How much longer a measured step's kernels took with its collectives than without; None where that was not profiled."""
    rows = (step.get("profile") or {}).get("kernels")
    # Kernels that a step without collectives has not are copies into buckets and the like.
    return None if rows is None else sum(row["ddp_us"] - row["us"] for row in rows if row["launches"]) / 1e3


def show_lost(steps: Sequence[dict[str, Any]], hardware: str) -> None:
    """What steps under DDP that the GPUs bound lost to their collectives, and were told to."""
    ratios = []
    for step in steps:
        if step["ranks"] == 1 or is_of_the_host(step) or (lost := lost_ms(step)) is None:
            continue
        told = predicted(*(step[name] for name in KEY), hardware=hardware)["slowed_ms"]
        print(f"{_named(step)}{lost:9.2f}{told:10.2f}{told / lost - 1:+8.1%}")
        ratios.append(told / lost)
    if ratios:
        judge(f"lost to collectives (kernels lose {IN_STEP} times what pairs do; found with these)", ratios, [])


def show_hosts(steps: Sequence[dict[str, Any]], hardware: str) -> None:
    """Steps of one rank that exchanges with itself: what the host takes, given how fast it was."""
    ratios, inside = [], []
    for step in steps:
        if step["ranks"] > 1:
            continue
        ms, low, high = predicted(*(step[name] for name in KEY), hardware, max(step["host_step_us"]))["host_ms"]
        measured = measured_ms(step)
        print(f"{_named(step)}{measured:9.2f}{ms:10.2f}  [{low:7.2f}, {high:7.2f}]{ms / measured - 1:+8.1%}")
        ratios.append(ms / measured)
        inside.append(low <= measured <= high)
    if ratios:
        judge("one rank, the host's, given how fast it was (by these what DDP and FSDP take was found)", ratios, inside)


def _named(step: dict[str, Any]) -> str:
    model, batch, ranks, precision, dense = (step[name] for name in KEY)
    return f"{model:24s}{batch:6d}{ranks:5d}  {precision:9s}{dense:5s}"


def show_said(sets: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> None:
    """What was said before steps were measured, as it was said."""
    known = {tuple(step[name] for name in KEY): step for step in steps}
    for some in sets:
        pairs = [(said, known[key]) for said in some["steps"] if (key := tuple(said[name] for name in KEY)) in known]
        print(f"said before, {some['predicted']}, {some['about']}: {len(pairs)} of {len(some['steps'])} measured since")
        ratios, inside = [], []
        for said, step in pairs:
            measured, (ms, low, high) = measured_ms(step), said["several_ms"]
            print(f"  {_named(said)}{measured:9.2f}{ms:10.2f}{ms / measured - 1:+8.1%}")
            ratios.append(ms / measured)
            inside.append(low <= measured <= high)
        judge("  several GPUs", ratios, inside)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", default="h100", help="whose times, and whose steps (default: %(default)s)")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--predict", type=asked_for, nargs="+", metavar="MODEL:BATCH:GPUS[:PRECISION:DENSE]", default=[])
    parser.add_argument("--about", default="", help="of a set of predictions")
    options = parser.parse_args(arguments)
    folder = data_folder() / options.hardware
    measured, said = folder / "gpu_steps.json", folder / "gpu_step_predictions.json"
    if options.predict:
        predict(said, options.predict, options.hardware, options.about)
        return 0
    if options.add:
        add(measured, options.add)
    if not measured.is_file():
        print(f"no step on several GPUs was measured: {measured} is not there", file=sys.stderr)
        return 3
    steps = json.loads(measured.read_text())["steps"]
    show(steps, options.hardware)
    show_lost(steps, options.hardware)
    show_hosts(steps, options.hardware)
    if said.is_file():
        show_said(json.loads(said.read_text())["sets"], steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())

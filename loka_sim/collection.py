"""`loka-sim collect --gpu`: a GPU's own times, from nothing, for a GPU that the package has no data of.

torch's GEMMs are measured, then memory-bound kernels. Where there is time to fit a model of this GPU's own, very many quick
launches of the GEMMs follow, which show where the library changes its kernel, then other libraries' kernels, and then cuBLAS is
asked which kernels it chooses; on a host of several GPUs collectives come last. The result is that model, learned from where the
shipped model of a related GPU ends, where every kernel was measured often enough; and that shipped model, corrected by what was
measured, where not or where that predicts better. Each part goes on where a killed run left it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loka_sim import calibration
from loka_sim.ceilings import hardware_of
from loka_sim.errors import DataError, UserError
from loka_sim.files import write_text_atomic
from loka_sim.validation import measuring, require_gpu
from perfmodel.hardware import nearest
from perfmodel.kernels import KERNELS, library_of
from perfmodel.saved import read_spec

if TYPE_CHECKING:
    import pandas

    from hil.kernels.base import Shape
    from perfmodel.hardware import HardwareSpec
    from perfmodel.model import PerfModel
    from perfmodel.refinement import Refinement

HARDWARE, FIT = "hardware.json", "fit"
OWN, FROM = "fitted to this GPU alone", "fitted to this GPU, from where the {}'s ends"
# From so many minutes on a fit of its own is meant: on an H200 beside 16 cores, each of torch's kernels then has the rows for it.
LEAST_MINUTES_FIT = 15.0
# More shapes than can be launched in the minutes after which more of them teach little.
MOST_LAUNCHED, MOST_MINUTES_LAUNCHING = 120_000, 4.5
# Of a long run's time for kernels of one library, what its GEMMs take: memory-bound kernels take longer to their 60 rows.
GEMMS = 0.37
# The kernel that few of the shapes drawn for all are for, though it is the hardest to learn, and what launching it alone takes of
# the time. On an H200's launches: 6.7% off on `blind` and `blind2` with 12,000 of them, 5.9% with 30,000.
BATCHED, ALONE = "torch/bf16_batched", 0.2
# Libraries beside torch whose GEMMs are launched quickly, too, and what that takes of their time: our own are compiled first.
LAUNCHED, LAUNCHING = ("fbgemm/", "loka/"), 0.42
# Asking cuBLAS: what processes take to start, and the seconds of less than which tell too little, of more than which little more;
# learning takes as many at most.
ASKING_STARTS_S, LEAST_ASKING_S, MOST_ASKING_S = 20.0, 10.0, 60.0
# Times that each answer is seen where learning goes on from another GPU's networks: on an H100, from 668,000 answers in bf16, 4
# times make 81.0% of the choices right, 24 times from nothing 74.5% (networks 384 and 256 wide).
EPOCHS_ON = 8
# Of the time for collectives, what they take alone; and of pairs of kernels and collectives, how few say less than what ships.
COLLECTING, LEAST_PAIRS = 0.65, 100
# Of the GPU's memory, for a process that asks, or compiles ahead.
PROCESS_BYTES = 9e9
# After the fit, to write the calibration.
ENDING_S = 5.0
# Other shapes than the shipped models were fitted to: on those a correction would seem better, and surer, than it is.
SEED = 271_828
# GEMMs and operands of other kinds among those drawn as layers have them: without any, a fit is far off on them.
OTHERS = {
    "gemm": {"broad": 240, "grouped": 240, "interaction": 600, "tall": 200, "tower": 240, "wide": 200},
    "memory": {"broad": 60},
}
# Rows of a kernel that a correction of a shipped model is made from: it learns little from more, and its time is their cube.
MOST_ROWS_REFINED = 400


@dataclass(frozen=True)
class Shares:
    """Parts of the whole time at which each kind of measuring ends; making the model has the rest.

    Attributes:
        sweeps: torch's kernels.
        launches: Quick launches of its GEMMs.
        libraries: Kernels of other libraries.
        choices: Asking which kernels cuBLAS chooses, and learning that.
        collectives: Collectives, and what they and kernels cost each other, where there are several GPUs.
    """

    sweeps: float
    launches: float
    libraries: float
    choices: float
    collectives: float

    @classmethod
    def of(cls, minutes: float, gpus: int, related: bool) -> Shares:
        """Those of a run: without collectives on one GPU, and all for torch's kernels where the time is too short for a fit."""
        if minutes < LEAST_MINUTES_FIT:
            # Correcting takes seconds, fitting tens of them.
            end = 0.9 if related else 0.75
            sweeps = end - (0.15 if gpus > 1 else 0.0)
            return cls(sweeps, sweeps, sweeps, sweeps, end)
        # A fit of 12,400 rows and 230,000 launches took 90 s on two cores, 112 of them CPU seconds.
        end = 0.9
        choices = end - (0.1 if gpus > 1 else 0.0)
        return cls(choices - 0.46, choices - 0.31, choices - 0.1, choices, end)

    @property
    def own(self) -> bool:
        """Whether a fit of this GPU's own is meant."""
        return self.choices > self.sweeps


def collect(out: str | Path, *, minutes: float = 28.0, name: str | None = None, command: Sequence[str] = ()) -> dict[str, Any]:
    """Measure this machine's GPU and make a time model of it.

    Args:
        out: Folder of the calibration: a new one, or one that was begun.
        minutes: Time to spend, at least 2.
        name: What to call the hardware; None for the GPU's own name (`NVIDIA H100 80GB HBM3` -> `h100-80gb-hbm3`).
        command: The command line, for the record.

    Returns:
        What was made: hardware, rows per kernel, from which model the times come, its accuracy on held-out shapes, and what
        was left out.

    Raises:
        UserError: an argument is wrong, or the folder holds something else.
        DataError: there is no GPU that can do it, or a measuring process failed.
    """
    out, started = Path(out), time.monotonic()
    if not minutes >= 2:
        raise UserError(f"--minutes {minutes:g} is too short for a sweep; give at least 2, 28 is usual")
    timings = out / "timings"
    if out.is_dir() and any(out.iterdir()) and not timings.is_dir():
        raise UserError(f"--out {out} holds other files; choose a new folder")
    require_gpu()
    import torch

    from hil.fingerprint import fingerprint

    def left(share: float = 1.0) -> float:
        return 60 * minutes * share - (time.monotonic() - started)

    machine = fingerprint()
    hardware = name or _slug(machine["gpu"])
    major, minor = machine["capability"].split(".")
    is_related = nearest((int(major), int(minor)), gpu=machine["gpu"]) is not None
    gpus = torch.cuda.device_count()
    shares = Shares.of(minutes, gpus, is_related)
    timings.mkdir(parents=True, exist_ok=True)
    machine[calibration.HOST] = measuring.host_step_us(timings)
    # Each process holds operands and results of its own.
    beside = max(1, min(measuring.workers(), int(machine["memory_bytes"] / PROCESS_BYTES)))
    measure(timings, shares, left, beside)
    rows, left_out, pairs = measuring.timings(timings), list[str](), 0
    if rows.empty:
        raise DataError(f"nothing was measured within {minutes:g} minutes; give more with --minutes")
    write_text_atomic(out / HARDWARE, json.dumps(specification(out, hardware, machine, rows), indent=1) + "\n")
    related = _related(read_spec(out / HARDWARE))
    if shares.own:
        left_out += ask(timings, out / HARDWARE, left(shares.choices), beside, related)
    if gpus > 1 and left(shares.collectives) > 0:
        _say(f"collectives between {gpus} GPUs, {left(shares.collectives):.0f} s ...")
        measuring.collectives(timings, gpus, COLLECTING * left(shares.collectives))
        _say(f"kernels beside collectives, {left(shares.collectives):.0f} s ...")
        pairs = measuring.overlap(timings, gpus, left(shares.collectives))
        if pairs < LEAST_PAIRS:
            left_out.append(
                f"kernels beside collectives: {pairs} pairs are too few; those that ship tell what they cost each other"
            )
    elif gpus == 1:
        left_out.append("collectives: one GPU alone is here; times of several come from the shipped table, where there is one")
    left_out += unmeasured(rows)
    _say(f"making the time model of {len(rows):,} rows, {max(left(), 0):.0f} s are left ...")
    made, notes = make_model(out, timings, rows, related, left())
    tables = [timings / "collectives.parquet", *([timings / "overlap.parquet"] if pairs >= LEAST_PAIRS else [])]
    for folder, model in ((out, made["model"]), (out / FIT, _own(related))):
        if (folder / "perfmodel").is_dir():
            for table in filter(Path.is_file, tables):
                shutil.copyfile(table, folder / "perfmodel" / table.name)
            calibration.save_manifest(folder, hardware, machine, list(command), {"timings": len(rows), "model": model})
    return {
        "schema_version": 1, "kind": "loka-sim/collection", "hardware": hardware, "folder": str(out), "machine": machine,
        "seconds": time.monotonic() - started, "rows": {str(k): int(v) for k, v in rows["kernel"].value_counts().items()},
        **made, "left_out": [*left_out, *notes],
    }  # fmt: skip


def measure(timings: Path, shares: Shares, left: Callable[[float], float], beside: int) -> None:
    """Sweep, launch quickly, and sweep other libraries' kernels, as far as the shares of the time allow.

    Args:
        timings: Where the rows go.
        shares: Of the time.
        left: Seconds that are left of such a share.
        beside: Processes that may compile at the same time, but for memory-bound kernels.
    """
    from hil.kernels.availability import available_kernels

    others = sorted({library_of(name) for name in KERNELS} - {"torch"})
    gemms = [name for name in available_kernels() if "gemm" in KERNELS[name].kind and not KERNELS[name].across]
    with measuring.Sweeps(timings) as sweeps:
        _say(f"torch's kernels, at most {left(shares.sweeps):.0f} s ...")
        wanted = drawn(("torch/*",))
        if not shares.own:
            sweeps.measure("lrm", wanted, left(shares.sweeps))
            return
        sweeps.measure("lrm", wanted, left(shares.sweeps), GEMMS)
        own, further = ([name for name in gemms if name.startswith(start)] for start in ("torch/", LAUNCHED))
        _launch(timings, [BATCHED], ALONE * left(shares.launches), SEED + 1, beside)
        _launch(timings, [name for name in own if name != BATCHED], left(shares.launches), SEED + 2, beside)
        _launch(timings, further, LAUNCHING * left(shares.libraries), SEED + 3, beside)
        _say(f"other libraries' kernels, at most {left(shares.libraries):.0f} s ...")
        sweeps.measure("lrm", drawn([f"{library}/*" for library in others]), left(shares.libraries), GEMMS)


def _launch(timings: Path, kernels: Sequence[str], seconds: float, seed: int, beside: int) -> None:
    """Launch GEMMs quickly for so many seconds, where none of them was before."""
    import pandas

    from perfmodel.measured import launch_files

    known = {name for path in launch_files(timings) for name in pandas.read_parquet(path, columns=["kernel"])["kernel"].unique()}
    seconds = min(seconds, 60 * MOST_MINUTES_LAUNCHING)
    if not kernels or not set(kernels).isdisjoint(known) or seconds <= 0:
        return
    _say(f"quick launches of {kernels[0]}{' and others' if len(kernels) > 1 else ''}, {seconds:.0f} s ...")
    arguments = ["--out", str(timings), "--count", str(MOST_LAUNCHED), "--seed", str(seed), "--minutes", f"{seconds / 60:.3f}"]
    arguments += ["--workers", str(beside), "--kernels", *kernels]
    # 1: nothing new was measured.
    measuring.run("hil.launches", arguments, accept=(0, 1), seconds=seconds + measuring.GRACE_S)


def ask(timings: Path, spec: Path, seconds: float, beside: int, related: PerfModel | None) -> list[str]:
    """Have cuBLAS asked which of its kernels it chooses, where that is not known yet, and networks learn it.

    Args:
        timings: Where they go; shapes measured there are not asked for.
        spec: The GPU's specification.
        seconds: For all of it.
        beside: Processes that may ask at the same time.
        related: The shipped model of a GPU of the same capability, from whose networks learning goes on.

    Returns:
        What was left out, in words.
    """
    from hil.choices import unanswered
    from hil.kernels.availability import available_kernels

    kernels = available_kernels(unanswered(timings))
    asking = min(MOST_ASKING_S, (seconds - ASKING_STARTS_S) / 2)
    if kernels and asking >= LEAST_ASKING_S:
        _say(f"which kernels cuBLAS chooses, {asking:.0f} s and what learning takes, at most {seconds:.0f} s ...")
        arguments = ["--out", str(timings), "--hardware-spec", str(spec), "--minutes", f"{asking / 60:.3f}"]
        arguments += ["--seed", str(SEED + 4), "--workers", str(beside), "--learners", str(min(beside, len(kernels)))]
        if related is not None:
            arguments += ["--start", related.hardware.name, "--epochs", str(EPOCHS_ON)]
        try:
            measuring.run("hil.choices", [*arguments, "--kernels", *kernels], seconds=seconds + measuring.GRACE_S)
        except DataError as error:
            # The fit does without.
            _say(str(error))
        kernels = available_kernels(unanswered(timings))
    return [f"which kernels cuBLAS chooses, for {', '.join(kernels)}; the same command asks again"] if kernels else []


def drawn(patterns: Sequence[str]) -> dict[str, list[tuple[Shape, tuple[str, ...]]]]:
    """The shapes of the whole sweeps, under kernels of these names; the first of them are a fair sample of all.

    But for operands of memory-bound kernels that blocks of 128 x 128 divide, which come twice as often: a fit needs as many rows
    of the kernels that take no others.
    """
    from hil.shapes import SWEEPS as DRAWN

    found: dict[str, list[tuple[Shape, tuple[str, ...]]]] = {}
    for family in measuring.FAMILIES:
        draw, count = DRAWN[family, "lrm"]
        shapes = draw(count, SEED)
        if family == "memory":
            whole = [shape for shape in shapes if not shape.m % 128 and not shape.k % 128]
            rest = [shape for shape in shapes if shape not in whole]
            shapes = [*_spread(whole, rest[: len(whole)]), *rest[len(whole) :]]
        others = (DRAWN[family, name][0](number, SEED) for name, number in OTHERS.get(family, {}).items())
        shapes = _spread(shapes, *others)
        found[family] = [(shape, tuple(patterns)) for shape in shapes]
    return found


def _spread(*kinds: Sequence[Shape]) -> list[Shape]:
    """All in their order, each kind evenly among the others."""
    places = [((number + 0.5) / len(some), shape) for some in kinds for number, shape in enumerate(some)]
    return list(dict.fromkeys(shape for _, shape in sorted(places, key=lambda pair: pair[0])))


def unmeasured(rows: pandas.DataFrame) -> list[str]:
    """What of the whole sweeps is not there, in words."""
    from loka_sim.validation.plan import FAMILIES as KINDS

    kinds = rows["kernel"].map(lambda kernel: KINDS[KERNELS[kernel].kind])
    found = []
    for family, items in drawn(()).items():
        whole = len(items)
        number = len(rows.loc[kinds == family, ["m", "n", "k", "groups"]].drop_duplicates())
        if number < whole:
            found.append(f"{family}: {number:,} of {whole:,} shapes were measured; the same command goes on")
    return found


def make_model(
    out: Path, timings: Path, rows: pandas.DataFrame, related: PerfModel | None, seconds: float
) -> tuple[dict[str, Any], list[str]]:
    """Write `out/perfmodel`: a fit of its own, or a shipped model corrected, whichever predicts held-out shapes better.

    Args:
        out: The calibration.
        timings: Where the sweeps lie.
        rows: What they hold.
        related: The shipped model of the nearest GPU; None where there is none of the same capability.
        seconds: What a fit may take where there is a model to correct instead.

    Returns:
        `model` (in words) and `held_out` (accuracy per kernel), and what was left out.

    Raises:
        DataError: neither can be made.
    """
    from hil.kernels.availability import available_kernels
    from perfmodel.fit import LEAST_ROWS_FIT, LEAST_ROWS_START

    needed = set(available_kernels(list(related.manifest["kernels"]))) if related else set()
    least = LEAST_ROWS_START if related else LEAST_ROWS_FIT
    few = {name for name in needed if (rows["kernel"] == name).sum() < least}
    shutil.rmtree(out / FIT, ignore_errors=True)
    begun, fitted, notes = time.monotonic(), None, []
    if basic := [name for name in few if name.startswith("torch/")]:
        refinement = _refined(related, rows) if related else None
        notes.append(f"a fit of its own: {len(basic)} of torch's kernels have fewer than {least} rows")
    else:
        _say("fitting a time model of its own ...")
        arguments = ["--timings", str(timings), "--hardware-spec", str(out / HARDWARE), "--out", str(out / FIT)]
        arguments += ["--start", related.hardware.name] if related else []
        with measuring.Child("perfmodel.fit", arguments) as child:
            refinement = _refined(related, rows) if related else None
            rest = None if refinement is None else max(seconds - ENDING_S - (time.monotonic() - begun), 0.0)
            if child.wait(seconds=rest) is None:
                notes.append("a fit of its own: it would take longer than the minutes given")
        fitted = (measuring.read_json(out / FIT / "perfmodel" / "manifest.json") or {}).get("kernels")
    shutil.rmtree(out / "perfmodel", ignore_errors=True)
    accuracy = {} if refinement is None else refinement.accuracy_after["kernels"]
    held_out = {kernel: entry["held_out"] for kernel, entry in (fitted or {}).items()}
    if refinement is None and not fitted:
        raise DataError(f"too little was measured to make a time model: {len(rows)} rows; run again with more --minutes")
    corrected, own = _mean_error(accuracy, held_out), _mean_error(held_out, accuracy)
    if refinement is not None and (not held_out or corrected <= own):
        assert related is not None
        refinement.save(out)
        if held_out:
            notes.append(
                f"a fit of its own: {own:.1%} off on average, the corrected one {corrected:.1%}; --calibration {out / FIT}"
            )
        else:
            shutil.rmtree(out / FIT, ignore_errors=True)
        unseen = sorted(needed - set(accuracy))
        if unseen:
            notes.append(f"not measured, so as on {related.hardware.name}, corrected like their kind: {', '.join(unseen)}")
        return {"model": f"{related.hardware.name}'s, corrected", "held_out": accuracy}, notes
    shutil.move(out / FIT / "perfmodel", out / "perfmodel")
    shutil.rmtree(out / FIT)
    if few:
        notes.append(f"not in it, for they have fewer than {least} rows: {', '.join(sorted(few))}")
    return {"model": _own(related), "held_out": held_out}, notes


def _own(related: PerfModel | None) -> str:
    """What a fit of this GPU's own is called."""
    return OWN if related is None else FROM.format(related.hardware.name.upper())


def _related(spec: HardwareSpec) -> PerfModel | None:
    """The shipped model of the GPU that this one is like."""
    import perfmodel

    return None if spec.like is None else perfmodel.load(spec.like)


def _refined(base: PerfModel, rows: pandas.DataFrame) -> Refinement:
    """The base corrected by at most `MOST_ROWS_REFINED` shapes of each kernel, the first ones drawn."""
    from perfmodel.refine import refine

    known = rows[rows["kernel"].isin(list(base.manifest["kernels"]))]
    return refine(base, known.groupby("kernel", sort=False).head(MOST_ROWS_REFINED))


def _mean_error(held_out: dict[str, Any], other: dict[str, Any]) -> float:
    """Mean error over held-out shapes of the kernels that both have, every kernel alike."""
    both = [name for name in held_out if name in other]
    return sum(held_out[name]["mape"] for name in both) / len(both) if both else float("inf")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def specification(out: Path, name: str, machine: dict[str, Any], rows: pandas.DataFrame) -> dict[str, Any]:
    """`hardware_of`, or with the figures that are there where networks of what cuBLAS chooses have learned by these."""
    from hil.choices import SIDECAR

    known = measuring.read_json(out / HARDWARE) if (out / "timings" / SIDECAR).is_file() else None
    found = {**known, "name": name} if known else hardware_of(name, machine, rows)
    near = {"name": name, "gpu": found["gpu"], "copy_bandwidth_tbs": found["copy_bandwidth_tbs"]}
    like = nearest(found["capability"], **near, having="models/manifest.json")
    return {**found, **({"like": like} if like else {})}

"""Step times of a whole model under different assignments, with intervals on their ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from loka_sim.dispatch.around import Around
from loka_sim.dispatch.candidates import Row, SiteShape, launches
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.decide import Accuracies, flat
from loka_sim.dispatch.operands import TORCH, Toolbox
from perfmodel.kernels import KERNELS, library_of


@dataclass(frozen=True)
class SiteCost:
    """What a step needs to know of one site."""

    shape: SiteShape
    around: Around
    accuracies: Accuracies


@dataclass(frozen=True)
class Step:
    """The dense part of one training step on one GPU under one way of assigning kernels.

    Attributes:
        name: Key in documents.
        label: Name on screen.
        description: What is converted.
        total: GEMMs, quantization, layout changes, norms, activations, bias gradients.
        gemm_us: GEMMs with quantization and layout changes.
        quantize_us: Quantization and layout changes alone.
        around_us: The rest: the same under every assignment.
        speedup: bf16 total over this total, with its 90% interval.
        gemm_speedup: The same over `gemm_us`.
        fp8_sites: Sites with at least one FP8 pass.
        fp8_passes: FP8 passes.
        unsafe_passes: FP8 passes whose predicted MERE is not below the limit.
        whole: Forward and backward with everything in them; None where the specification does not know what that is.
        whole_speedup: bf16's over this one's.
        gaps_us: Of `whole`, what passes between the kernels of a CUDA graph.
    """

    name: str
    label: str
    description: str
    total: Time
    gemm_us: float
    quantize_us: float
    around_us: float
    speedup: Time
    gemm_speedup: float
    fp8_sites: int
    fp8_passes: int
    unsafe_passes: int
    whole: Time | None = None
    whole_speedup: Time | None = None
    gaps_us: float = 0.0


def torch_makes(row: Row) -> bool:
    """Whether a launch is a quantizer or transposition of torch's, which torch.compile fuses."""
    return library_of(row.kernel) == "torch" and KERNELS[row.kernel].kind in ("quantize", "layout")


RECIPE, EXPORT, RUNTIME = "recipe", "export", "runtime"
"""What runs an assignment: torchao's linears as one of its recipes has them, or as `export` writes it; or `dispatch.runtime`."""
RUN_AS = {"torch/fp8_rowwise_split": "torch/fp8_tensorwise_split"}
"""What torchao's linears run instead of a kernel: behind it they multiply the scales (torchao 0.17, `addmm_float8_unwrapped`)."""
ALIKE = 0.9
"""Part of the variance of a family's error that both sides of a speedup have in common: most of their kernels are the same ones.
Of 17 measured speedups 14 lie inside their intervals so, 12 if all were in common (`benchmarks/whole_step.py`)."""
NOTHING: Mapping[str, Time] = {}
CERTAIN: Mapping[bool, float] = {}


def as_run(row: Row, known: Container[Row]) -> Row:
    """The GEMM that torchao's linears run of a launch, without what multiplies the scales behind it.

    Args:
        row: A launch.
        known: Launches that have a time; of another the row stays what it is.
    """
    instead = row._replace(kernel=RUN_AS.get(row.kernel, row.kernel))
    return instead if instead in known else row


def by_precision(times: Times, rows: Counter[Row]) -> dict[bool, float]:
    """Total of the GEMMs among launches, FP8 and not."""
    total = {False: 0.0, True: 0.0}
    for row, count in rows.items():
        if KERNELS[row.kernel].kind == "gemm":
            total[KERNELS[row.kernel].is_fp8] += count * times.of[row].us
    return total


def whole(gemms: Time, beside: Mapping[str, Time], off_us: float = 0.0) -> Time:
    """A step of GEMMs with their quantization, and of what stands beside them.

    Args:
        gemms: Their total.
        beside: The others' total by kind: kernels of one kind are off together, those of several kinds independently.
        off_us: By how much the GEMMs may be off together beside that, on either side.
    """
    parts = [gemms, *beside.values(), Time(0.0, -off_us, off_us)]
    us = sum(part.us for part in parts)
    below = sum((part.us - part.low_us) ** 2 for part in parts) ** 0.5
    above = sum((part.high_us - part.us) ** 2 for part in parts) ** 0.5
    return Time(us, us - below, us + above)


def _compared(rows: Counter[Row], than: Counter[Row]) -> tuple[Counter[Row], Counter[Row], Counter[Row]]:
    """Launches on both sides, on the first alone and on the second alone: `Counter`'s own operators take twice as long."""
    both, new = Counter[Row](), Counter[Row]()
    for row, count in rows.items():
        common = min(count, than.get(row, 0))
        if common:
            both[row] = common
        if count > common:
            new[row] = count - common
    gone = Counter({row: count - both.get(row, 0) for row, count in than.items() if count > both.get(row, 0)})
    return both, new, gone


def _together(rows: Counter[Row], others: Counter[Row]) -> Counter[Row]:
    """Launches of both."""
    total = rows.copy()
    total.update(others)
    return total


def speedup(
    times: Times,
    rows: Counter[Row],
    than: Counter[Row],
    beside: Mapping[str, Time] = NOTHING,
    beside_than: Mapping[str, Time] = NOTHING,
    off: Mapping[bool, float] = CERTAIN,
) -> Time:
    """How many times faster `rows` are than `than`, with a 90% interval.

    What all kernels are off together cancels. Launches on both sides move the ratio only as far as it is from 1; the
    others' errors are independent. First-order propagation of the three parts (both, slow only, fast only), and of the
    kernels beside them: those of a kind are off by much the same share on both sides (`ALIKE`).

    Args:
        times: Of every launch.
        rows: Launches.
        than: Those that they are compared with.
        beside: What else runs with `rows`, by kind.
        beside_than: And with `than`.
        off: By which share FP8 GEMMs, and the others, may be off together, the half-width of a 90% interval.
    """
    common, new, gone = (times.difference(part, ()) for part in _compared(rows, than))
    fast = common.us + new.us + sum(time.us for time in beside.values())
    slow = common.us + gone.us + sum(time.us for time in beside_than.values())
    ratio = slow / fast
    gradients = ((gone, 1 / fast, 1), (new, ratio / fast, -1), (common, abs(1 - ratio) / fast, -1 if ratio > 1 else 1))
    below = above = 0.0
    for part, gradient, sign in gradients:
        ends = (gradient * (part.us - part.low_us), gradient * (part.high_us - part.us))[::sign]
        below += ends[0] ** 2
        above += ends[1] ** 2
    for kind in {**beside, **beside_than}:
        here, there = (side.get(kind, Time(0.0, 0.0, 0.0)) for side in (beside, beside_than))
        shift = (there.us - ratio * here.us) / fast
        known = here if here.us else there
        shares = tuple(abs(end / known.us - 1) for end in (known.low_us, known.high_us)) if known.us else (0.0, 0.0)
        each = (1 - ALIKE) * (there.us**2 + (ratio * here.us) ** 2) / fast**2 if here != there else 0.0
        below += (ALIKE * shift**2 + each) * shares[shift < 0] ** 2
        above += (ALIKE * shift**2 + each) * shares[shift >= 0] ** 2
    here_us, there_us = (by_precision(times, side) for side in (rows, than)) if off and rows != than else ({}, {})
    for fp8 in here_us:
        share, fast_side, slow_side = off[fp8], ratio * here_us[fp8] / fast, there_us[fp8] / fast
        apart = (ALIKE * (slow_side - fast_side) ** 2 + (1 - ALIKE) * (slow_side**2 + fast_side**2)) * share**2
        below, above = below + apart, above + apart
    return Time(ratio, ratio - below**0.5, ratio + above**0.5)


def step(
    name: str,
    label: str,
    description: str,
    sites: Sequence[SiteCost],
    assignments: Sequence[Mapping[str, str]],
    times: Times,
    max_mere: float,
    toolbox: Toolbox = TORCH,
    beside: Mapping[str, Time] | None = None,
    converted: Sequence[bool] = (),
    beside_converted: Mapping[str, Time] | None = None,
    in_step: Times | None = None,
    off: Mapping[bool, float] = CERTAIN,
    runner: str = EXPORT,
) -> Step:
    """Add up a model's sites under one assignment each, their operands made by the fastest kernels of a toolbox.

    Args:
        name: Of the step, as the next two.
        label: Of the step.
        description: Of the step.
        sites: The model's.
        assignments: Kernel per pass of each site.
        times: Of every launch, as what runs the assignment has it.
        max_mere: Limit of a safe pass.
        toolbox: What makes the operands.
        beside: Every other kernel of a forward and backward in bf16, by kind; None where it is not known.
        converted: Of each site whether its quantization by torch is among `beside_converted`; empty for none.
        beside_converted: Every kernel of this forward and backward beside GEMMs; None where it is bf16's.
        in_step: Of every launch as it runs between the others of a whole step; None for `times`.
        off: As `speedup` takes it, of those.
        runner: What runs it: `RECIPE`, `EXPORT` or `RUNTIME`.
    """
    bf16_gemms: Counter[Row] = Counter()
    gemms: Counter[Row] = Counter()
    apart: Counter[Row] = Counter()  # what a whole step launches beside what is fused
    others = Counter(row for site in sites for row in site.around.rows)
    inside = converted or [False] * len(sites)
    alike = Counter(
        (site.shape, tuple(assignment.items()), fused) for site, assignment, fused in zip(sites, assignments, inside, strict=True)
    )
    for (shape, entries, fused), count in alike.items():
        # `Counter[row] += count` takes several times as long for a row that is not in it yet.
        for row in shape.bf16_rows:
            bf16_gemms[row] = bf16_gemms.get(row, 0) + count
        runs = dict(entries)
        for row in shape.bf16_rows if runs == shape.bf16() else flat(launches(shape, runs, toolbox)):
            gemms[row] = gemms.get(row, 0) + count
            if beside is not None:
                run = as_run(row, times.of) if fused and runner != RUNTIME else row
                apart[run] += count * (not (fused and torch_makes(row)))
    fp8_sites = fp8_passes = unsafe = 0
    for site, assignment in zip(sites, assignments, strict=True):
        fp8 = [(which, kernel) for which, kernel in assignment.items() if KERNELS[kernel].is_fp8]
        fp8_sites += bool(fp8)
        fp8_passes += len(fp8)
        unsafe += sum(not site.accuracies[entry].mere < max_mere for entry in fp8)
    quantize = Counter({row: count for row, count in gemms.items() if KERNELS[row.kernel].kind in ("quantize", "layout")})
    gemm_us, dense = times.sum(gemms), _together(gemms, others)
    complete = None
    if beside is not None:
        rest = beside if beside_converted is None else beside_converted
        between = times if in_step is None else in_step
        together = sum(off.get(fp8, 0.0) * us for fp8, us in by_precision(between, apart).items())
        ratio = speedup(between, +apart, bf16_gemms, rest, beside, off)
        gaps_us = rest["gap"].us if "gap" in rest else 0.0
        complete = whole(between.interval(apart), rest, together), ratio, gaps_us
    return Step(
        name, label, description, times.interval(dense),
        gemm_us, times.sum(quantize), times.sum(others),
        speedup(times, dense, _together(bf16_gemms, others)), times.sum(bf16_gemms) / gemm_us,
        fp8_sites, fp8_passes, unsafe, *(complete or ()),
    )  # fmt: skip

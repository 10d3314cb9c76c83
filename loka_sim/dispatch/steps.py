"""Step times of a whole model under different assignments, with intervals on their ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loka_sim.dispatch.around import Around
from loka_sim.dispatch.candidates import Row, SiteShape, launches
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.decide import Accuracies, flat
from loka_sim.dispatch.operands import TORCH, Toolbox
from perfmodel.kernels import KERNELS


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


def whole(gemms: Time, beside: Mapping[str, Time]) -> Time:
    """A step of GEMMs with their quantization, and of what stands beside them.

    Args:
        gemms: Their total.
        beside: The others' total by kind: kernels of one kind are off together, those of several kinds independently.
    """
    parts = [gemms, *beside.values()]
    us = sum(part.us for part in parts)
    below = sum((part.us - part.low_us) ** 2 for part in parts) ** 0.5
    above = sum((part.high_us - part.us) ** 2 for part in parts) ** 0.5
    return Time(us, us - below, us + above)


def diluted(ratio: Time, fast_us: float, beside: Mapping[str, Time]) -> Time:
    """The speedup of a part of the step, once what is the same on both sides is added to both.

    Args:
        ratio: The part's slower time over its faster.
        fast_us: The faster.
        beside: What is added, by kind.
    """
    total = whole(Time(fast_us, fast_us, fast_us), beside)
    gain = fast_us * (ratio.us - 1)
    # How much there is beside moves the ratio to or from 1; the part's own error moves its gain.
    ends = [1 + gain / end for end in (total.low_us, total.high_us)]
    below = [1 + gain / total.us - min(ends), fast_us * (ratio.us - ratio.low_us) / total.us]
    above = [max(ends) - 1 - gain / total.us, fast_us * (ratio.high_us - ratio.us) / total.us]
    middle = 1 + gain / total.us
    return Time(middle, middle - sum(b * b for b in below) ** 0.5, middle + sum(a * a for a in above) ** 0.5)


def speedup(times: Times, rows: Counter[Row], than: Counter[Row]) -> Time:
    """How many times faster `rows` are than `than`, with a 90% interval.

    What all kernels are off together cancels. Launches on both sides move the ratio only as far as it is from 1; the
    others' errors are independent. First-order propagation of the three parts (both, slow only, fast only).
    """
    both = rows & than
    common, new, gone = (times.difference(part.elements(), ()) for part in (both, rows - both, than - both))
    fast, slow = common.us + new.us, common.us + gone.us
    ratio = slow / fast
    gradients = ((gone, 1 / fast, 1), (new, ratio / fast, -1), (common, abs(1 - ratio) / fast, -1 if ratio > 1 else 1))
    below = above = 0.0
    for part, gradient, sign in gradients:
        ends = (gradient * (part.us - part.low_us), gradient * (part.high_us - part.us))[::sign]
        below += ends[0] ** 2
        above += ends[1] ** 2
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
) -> Step:
    """Add up a model's sites under one assignment each, their operands made by the fastest kernels of a toolbox.

    `beside` is the time of every other kernel of the forward and backward, by kind; None where it is not known.
    """
    bf16_gemms: Counter[Row] = Counter()
    gemms: Counter[Row] = Counter()
    others: Counter[Row] = Counter()
    alike = Counter((site.shape, tuple(assignment.items())) for site, assignment in zip(sites, assignments, strict=True))
    for (shape, entries), count in alike.items():
        for counts, launched in (
            (bf16_gemms, launches(shape, shape.bf16())),
            (gemms, launches(shape, dict(entries), toolbox)),
        ):
            for row in flat(launched):
                counts[row] += count
    fp8_sites = fp8_passes = unsafe = 0
    for site, assignment in zip(sites, assignments, strict=True):
        others.update(site.around.rows)
        fp8 = [(which, kernel) for which, kernel in assignment.items() if KERNELS[kernel].is_fp8]
        fp8_sites += bool(fp8)
        fp8_passes += len(fp8)
        unsafe += sum(not site.accuracies[entry].mere < max_mere for entry in fp8)
    quantize = Counter({row: count for row, count in gemms.items() if KERNELS[row.kernel].kind in ("quantize", "layout")})
    gemm_us = times.sum(gemms.elements())
    complete = None
    if beside is not None:
        ratio = speedup(times, gemms, bf16_gemms)
        complete = whole(times.interval(gemms.elements()), beside), diluted(ratio, gemm_us, beside)
    return Step(
        name, label, description, times.interval((gemms + others).elements()),
        gemm_us, times.sum(quantize.elements()), times.sum(others.elements()),
        speedup(times, gemms + others, bf16_gemms + others), times.sum(bf16_gemms.elements()) / gemm_us,
        fp8_sites, fp8_passes, unsafe, *(complete or (None, None)),
    )  # fmt: skip

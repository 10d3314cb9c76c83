"""Sums of predicted times, with their interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Standard deviation of the error that all kernels of a run have in common (clocks, temperature, another machine of the
# kind), as a share of the time. Cautious: 1.8% is the mean difference of single kernels between two runs on two H200s;
# in our own repeat (sweep `repeat`, 300 shapes) the part in common was 0.3%.
COMMON_DEVIATION = 0.018


def combine(times: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float, float]:
    """Total of predicted times and its 90% interval, in the unit of the input.

    Kernel errors are taken as independent of one another, so their half-widths add in quadrature; the common error
    (`COMMON_DEVIATION`, at 1.645 deviations for 90%) scales with the total.
    A kernel called several times must come in as one entry with its total, since its error repeats.
    """
    total = math.fsum(times)
    common = 1.645 * COMMON_DEVIATION * total
    below, above = math.dist(times, lows), math.dist(highs, times)
    return total, max(0.0, total - math.hypot(below, common)), total + math.hypot(above, common)

"""What a host takes to launch a step's forward and backward kernel by kernel, without a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable

from loka_sim.dispatch.cost import Time
from loka_sim.step_plan import BACKWARD, FORWARD
from loka_sim.whole_step import Other

# A compiled forward and backward without a CUDA graph, on an H200's host: what one takes, and each kernel that it launches.
# A line through four networks of 48 to 232 launches (`python -m hil.fused eager`, step_compiled in data/h200/eager_ops.json).
STEP_CALL_US, CALL_US = 1355.0, 19.6
# Of 41 steps of sixteen models on eight such hosts, 90% took between these times as long as that line; one and the same step took
# 4.1 and 5.0 ms, 6.0 and 9.0, 10 and 27 on different days: what else a host does tells more than what it launches.
CALLED_LOW, CALLED_HIGH = 0.90, 1.55


def called(found: Iterable[Other], gemms: int) -> Time:
    """What a host takes to launch a step's forward and backward kernel by kernel.

    Args:
        found: What the step holds beside its GEMMs.
        gemms: How many GEMMs, and what else it launches.
    """
    beside = [other for other in found if other.phase in (FORWARD, BACKWARD)]
    number = sum(other.count if other.launches is None else other.launches for other in beside)
    us = STEP_CALL_US + CALL_US * (gemms + number)
    return Time(us, CALLED_LOW * us, CALLED_HIGH * us)

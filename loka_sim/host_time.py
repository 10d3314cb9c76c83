"""What a host takes to launch a step's forward and backward kernel by kernel, without a CUDA graph.

One and the same step takes a host 6.0 or 9.0 ms, by what else it does and how fast it is; the eager step of a small network
(`hil.host.step_us`) goes up and down with it. So a step is told in that unit, and in microseconds as far as the host is known.
"""

from __future__ import annotations

from collections.abc import Iterable

from loka_sim.dispatch.cost import Time
from loka_sim.modelspec import ModelSpec
from loka_sim.step_plan import BACKWARD, FORWARD
from loka_sim.whole_step import Other, batched_products

# A compiled forward and backward, and each kernel that it launches, in steps of the small network: a line through twelve steps of
# eight models, three visits each (`python benchmarks/host_steps.py`, data/h200/host_steps.json). With the kind of model left out
# visits are 6.1% off on average, 90% of them within 14%; in microseconds by one figure for all 10.7%.
STEP, LAUNCH = 0.1515, 0.00518
KNOWN_HOST = 0.86, 1.16
# What the small network took on hosts where that was not measured, by 42 steps as called (data/h200/step_profiles.json):
# 90% of them took 0.80 to 1.31 times as long, busy hosts 1.55 times. All of one kind of CPU (Intel Xeon, 16 to 64 virtual cores).
USUAL_US = 4700.0
ANY_HOST = 0.80, 1.55


def called(spec: ModelSpec, found: Iterable[Other], more: int = 0, host_step_us: float | None = None) -> Time:
    """What a host takes to launch a step's forward and backward kernel by kernel.

    Args:
        spec: The model, at the batch asked for.
        found: What the step holds beside its GEMMs.
        more: What else it launches, in kernels.
        host_step_us: What the host takes for the step that tells its speed (`hil.host.step_us`); None where that is not known.
    """
    beside = [other for other in found if other.phase in (FORWARD, BACKWARD)]
    number = more + sum(other.count if other.launches is None else other.launches for other in beside)
    # A batched product has a node of its own before it.
    number += sum(len(site.passes) for site in spec.sites) + batched_products(spec)
    us = (USUAL_US if host_step_us is None else host_step_us) * (STEP + LAUNCH * number)
    low, high = ANY_HOST if host_step_us is None else KNOWN_HOST
    return Time(us, low * us, high * us)

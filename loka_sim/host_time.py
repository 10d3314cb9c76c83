"""What a host takes to launch a step's forward and backward kernel by kernel, without a CUDA graph.

One and the same step takes a host 6.0 or 9.0 ms, by what else it does and how fast it is; the eager step of a small network
(`hil.host.step_us`) goes up and down with it. So a step is told in that unit, and in microseconds as far as the host is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loka_sim.dispatch.cost import Time

if TYPE_CHECKING:
    from loka_sim.communication import Communication

# A compiled forward and backward, and each kernel that it launches, in steps of the small network: a line through twelve steps of
# eight models, three visits each (`python benchmarks/host_steps.py`, data/h200/host_steps.json). With the kind of model left out
# visits are 6.1% off on average, 90% of them within 14%; in microseconds by one figure for all 10.7%.
STEP, LAUNCH = 0.1515, 0.00518
KNOWN_HOST = 0.86, 1.16
# What the small network took on hosts where that was not measured, by 42 steps as called (data/h200/step_profiles.json):
# 90% of them took 0.80 to 1.31 times as long, busy hosts 1.55 times. All of one kind of CPU (Intel Xeon, 16 to 64 virtual cores).
USUAL_US = 4700.0
ANY_HOST = 0.80, 1.55
# What comes on top in a job of several GPUs, in the same unit: an all-to-all, a bucket of DDP (the compiled graph is cut there,
# too), a tensor that FSDP shards. Of eight steps of one H200 that exchanged with itself, host-bound, and with the small network
# timed beside each, the told are 0.70 to 1.27 times as long (`python -m benchmarks.gpu_steps --hardware h200`).
EXCHANGE, BUCKET, TENSOR = 0.15, 0.08, 0.06
KNOWN_HOSTS = 0.72, 1.40
# What the small network took on hosts of several GPUs, by what they took for the steps of data/h*/gpu_steps.json: 4.1 to 9.7 ms.
SEVERAL_US = 6200.0
ANY_HOSTS = 0.65, 1.55


def called(launches: int, host_step_us: float | None = None) -> Time:
    """What a host takes to launch a forward and backward on one GPU.

    Args:
        launches: Their number, see `loka_sim.whole_step.launches_of_step`.
        host_step_us: What the host takes for the step that tells its speed (`hil.host.step_us`); None where that is not known.
    """
    return _time(STEP + LAUNCH * launches, host_step_us, USUAL_US, KNOWN_HOST, ANY_HOST)


def called_on_several(launches: int, exchanged: Communication | None, host_step_us: float | None = None) -> Time:
    """Likewise on one of several GPUs, with what DDP or FSDP does around them.

    Args:
        launches: As of `called`.
        exchanged: What the GPUs exchange; None for the host of several GPUs that has but one to serve.
        host_step_us: As of `called`.
    """
    more = 0.0
    if exchanged is not None:
        spread = BUCKET * len(exchanged.units) if exchanged.parallel.dense == "ddp" else TENSOR * exchanged.tensors
        more = spread + EXCHANGE * (2 if exchanged.exchange else 0)
    return _time(STEP + LAUNCH * launches + more, host_step_us, SEVERAL_US, KNOWN_HOSTS, ANY_HOSTS)


def _time(
    steps: float, host_step_us: float | None, usual_us: float, known: tuple[float, float], unknown: tuple[float, float]
) -> Time:
    us = steps * (usual_us if host_step_us is None else host_step_us)
    low, high = unknown if host_step_us is None else known
    return Time(us, low * us, high * us)

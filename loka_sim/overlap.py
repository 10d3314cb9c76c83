"""What kernels and collectives of a step cost each other while they run at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from loka_sim.communication import NETWORK
from perfmodel.kernels import of_kernel
from perfmodel.roofline import limits_us
from perfmodel.timeline import COMPUTE, HOST, Op, Slower

if TYPE_CHECKING:
    from perfmodel.model import PerfModel
    from perfmodel.overlap import Kernels

_ALONE = (1.0, 1.0)
IN_STEP = 1.5
"""How many times as much kernels of a step lose beside its collectives as pairs lose that were run at once.

With it what seven profiled steps lose in all (two GPUs of each kind, four H100s, in bf16 and as decided; `ddp_us` over `us` in
the profiles of data/h*/gpu_steps.json) is told within 7.3%, without it 23% to 31% too short. Steps under FSDP had no say. Why is
not known: an all-reduce that waits for a slower GPU holds its multiprocessors all the same.
"""


def slower(ops: Sequence[Op], timing: PerfModel) -> Slower | None:
    """What the operations of a step cost each other, as `perfmodel.timeline.schedule` asks; None where nothing is known.

    A collective that crosses the network slows kernels as one inside a host does, and is not slowed: it waits for its links.

    Args:
        ops: Of `loka_sim.step_plan.plan`.
        timing: What knows of pairs that were measured, and of tiles.
    """
    exchanges, model = {_exchange(op) for op in ops if op.stream not in (COMPUTE, HOST)}, timing.overlap
    if model is None or not exchanges:
        return None
    names, kernels = _kernels(ops, timing)
    found = {what: dict(zip(names, zip(*model.slower(kernels, *what), strict=True), strict=True)) for what in exchanges}

    def ask(kernel: Op, other: Op) -> tuple[float, float]:
        own, exchange = found[_exchange(other)].get(kernel.name, _ALONE)
        return 1 + IN_STEP * (float(own) - 1), 1.0 if other.stream == NETWORK else float(exchange)

    return ask


def _exchange(op: Op) -> tuple[str, float]:
    return op.details["op"], op.us


def _kernels(ops: Sequence[Op], timing: PerfModel) -> tuple[list[str], Kernels]:
    """Names of the kernels of the compute stream, and what is known of each; gaps between kernels are none."""
    # Here: it imports pandas, which one GPU alone needs not.
    from perfmodel.overlap import Kernels, told_tiles

    names = list[str]()
    us, peak, bandwidth, tiles = list[float](), list[float](), list[float](), list[float]()
    gemms: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        if op.stream != COMPUTE or op.us <= 0:
            continue
        if "kernel" in op.details:
            gemms[of_kernel(op.details["kernel"])].append(op)
        elif op.details.get("bytes"):
            names.append(op.name)
            us.append(op.us)
            peak.append(0.0)
            bandwidth.append(op.details["bytes"] / (op.us * timing.hardware.copy_bandwidth_tbs * 1e6))
            tiles.append(0.0)
    for kernel, some in gemms.items():
        sizes = [np.array([op.details[name] for op in some], dtype=np.float64) for name in ("m", "n", "k", "groups")]
        m, n, k, groups = sizes
        compute, memory = limits_us(kernel, m, n, k, groups, timing.hardware)
        names += [op.name for op in some]
        us += (own := [op.us for op in some])
        peak += (compute / own).tolist()
        bandwidth += (memory / own).tolist()
        tiles += told_tiles(timing, kernel, m, n, k, groups).tolist()
    return names, Kernels(*map(np.array, (us, peak, bandwidth, tiles)))

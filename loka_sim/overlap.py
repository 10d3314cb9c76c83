"""What kernels and collectives of a step cost each other while they run at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from loka_sim.communication import NETWORK
from perfmodel.overlap import Kernels
from perfmodel.roofline import limits_us
from perfmodel.timeline import COMPUTE, Op, Slower

if TYPE_CHECKING:
    from perfmodel.overlap import OverlapModel

_ALONE = (1.0, 1.0)


def slower(ops: Sequence[Op], model: OverlapModel | None) -> Slower | None:
    """What the operations of a step cost each other, as `perfmodel.timeline.schedule` asks; None where nothing is known.

    A collective that crosses the network slows kernels as one inside a host does, and is not slowed: it waits for its links.

    Args:
        ops: Of `loka_sim.step_plan.plan`.
        model: Of pairs that were measured.
    """
    exchanges = {_exchange(op) for op in ops if op.stream != COMPUTE}
    if model is None or not exchanges:
        return None
    names, kernels = _kernels(ops, model)
    found = {what: dict(zip(names, zip(*model.slower(kernels, *what), strict=True), strict=True)) for what in exchanges}

    def ask(kernel: Op, other: Op) -> tuple[float, float]:
        own, exchange = found[_exchange(other)].get(kernel.name, _ALONE)
        return float(own), 1.0 if other.stream == NETWORK else float(exchange)

    return ask


def _exchange(op: Op) -> tuple[str, float]:
    return op.details["op"], op.details["bytes_per_rank"]


def _kernels(ops: Sequence[Op], model: OverlapModel) -> tuple[list[str], Kernels]:
    """Names of the kernels of the compute stream, and what is known of each; gaps between kernels are none."""
    names = list[str]()
    us, peak, bandwidth = list[float](), list[float](), list[float]()
    gemms: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        if op.stream != COMPUTE or op.us <= 0:
            continue
        if "kernel" in op.details:
            gemms[op.details["kernel"]].append(op)
        elif op.details.get("bytes"):
            names.append(op.name)
            us.append(op.us)
            peak.append(0.0)
            bandwidth.append(op.details["bytes"] / (op.us * model.hardware.copy_bandwidth_tbs * 1e6))
    for kernel, some in gemms.items():
        sizes = (np.array([op.details[name] for op in some], dtype=np.float64) for name in ("m", "n", "k", "groups"))
        compute, memory = limits_us(kernel, *sizes, model.hardware)
        names += [op.name for op in some]
        us += (own := [op.us for op in some])
        peak += (compute / own).tolist()
        bandwidth += (memory / own).tolist()
    return names, Kernels(np.array(us), np.array(peak), np.array(bandwidth))

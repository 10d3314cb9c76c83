"""Where an all-to-all in FP8 pays: from which size on, and up to which network speed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from perfmodel.collectives import CollectiveModel
from perfmodel.curves import Array
from perfmodel.topology import Cluster, usual

FP8 = "fp8_rowwise"
SIZES = 2.0 ** np.arange(15, 29.01, 1 / 16)
"""Bytes per rank that are tried: those that the codec was measured at, 32 KiB to 512 MiB."""
_SLOWEST, _FASTEST = 1.0, 1e5


def gain(model: CollectiveModel, sizes: Array, ranks: int, dim: int, cluster: Cluster | None = None, dtype: str = FP8) -> Array:
    """bf16 time over FP8 time of an all-to-all, quantizing and dequantizing included.

    Args:
        model: The collectives.
        sizes: Bytes per rank in bf16.
        ranks: GPUs that take part.
        dim: Values of a row with a scale of its own.
        cluster: Hosts and network, as `CollectiveModel.predict` takes it.
        dtype: What travels instead of bf16.
    """
    asked = pd.DataFrame({"op": "all_to_all", "ranks": ranks, "bytes_per_rank": sizes, "dim": dim})
    plain, compressed = (model.predict(asked.assign(dtype=name), cluster)["time_us"].to_numpy() for name in ("bf16", dtype))
    return plain / compressed


def pays_from(
    model: CollectiveModel, ranks: int, dim: int, cluster: Cluster | None = None, least_gain: float = 1.0, dtype: str = FP8
) -> float | None:
    """Bytes per rank from which on, up to the largest of `SIZES`, FP8 is the faster way; None where it is not.

    Args:
        model: The collectives.
        ranks: GPUs that take part.
        dim: Values of a row with a scale of its own.
        cluster: Hosts and network, as `CollectiveModel.predict` takes it.
        least_gain: How many times faster it must be.
        dtype: What travels instead of bf16.
    """
    slower = np.flatnonzero(gain(model, SIZES, ranks, dim, cluster, dtype) <= least_gain)
    if not len(slower):
        return float(SIZES[0])
    return None if slower[-1] == len(SIZES) - 1 else float(SIZES[slower[-1] + 1])


def pays_up_to_gbps(
    model: CollectiveModel, ranks: int, dim: int, bytes_per_rank: float, cluster: Cluster | None = None, dtype: str = FP8
) -> float | None:
    """Network speed a GPU, in Gb/s, up to which FP8 is the faster way at a size; infinite where it is at any speed.

    The slower the network, the more halving the bytes is worth, so that there is one such speed. None where FP8 is slower
    even at 1 Gb/s, and where the ranks share one host: no network matters there.

    Raises:
        ValueError: no cluster is given and none is known for the hardware.
    """
    cluster = usual(model.hardware) if cluster is None else cluster
    if cluster is None:
        raise ValueError(f"no cluster is known for {model.hardware}; give one")
    if cluster.island(ranks) == ranks:
        return None

    def pays(gbps: float) -> bool:
        faster = replace(cluster, nic_gbps=gbps)
        return bool(gain(model, np.array([bytes_per_rank]), ranks, dim, faster, dtype)[0] > 1)

    if not pays(_SLOWEST):
        return None
    if pays(_FASTEST):
        return float("inf")
    low, high = _SLOWEST, _FASTEST
    while high / low > 1.001:
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low

"""What a predicted time is made of, where it is fitted as where it is asked: a baseline, what the trees see, an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perfmodel.calls import Sizes
from perfmodel.cells import WELL_KNOWN, Cells
from perfmodel.choice import Choice, are_largest, with_choice
from perfmodel.features import DOUBTED, PLANNED, features
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS
from perfmodel.memory_costs import estimated_us
from perfmodel.network import Network
from perfmodel.roofline import roofline_us

Array = npt.NDArray[np.float64]

# Added to the roofline, so that the target stays of order one for launches that take a microsecond whatever their size.
LAUNCH_FLOOR_US = 1.0
# Of the roofline, what no call is predicted below: of all timings on H200s and H100s none took less (a test of the model's).
ROOFLINE_SHARE = 0.95
# Edges of the size classes, in microseconds of predicted time, within which intervals are calibrated.
SIZE_CLASSES_US = (5.0, 20.0, 100.0)
# By how much, as a power, an interval is wider for each octave by which a call is larger than what was measured, of GEMMs and of
# what is bound by memory: so it holds 90% of what lies in two left-out octaves of M, N or K, of nine kernels of torch's on H200s
# (python benchmarks/time_model.py beyond).
WIDER_GEMM, WIDER_MEMORY = 3.4, 3.8
# Likewise for each octave from all that was measured, in a hole between smaller and larger calls. There products in groups hang
# on which kernel is chosen as no other calls do: learned without those of long K, 90% of 465 such calls, half an octave to two
# from the rest, took powers of 3.7, 4.8, 8.7 and 7.9 (python benchmarks/time_model.py between). Of 86 GEMMs of ours and FBGEMM's
# that an earlier fit knew nothing within an octave of, 1.1 to 2.9.
WIDER_BETWEEN = {"gemm": 0.6, "batched_gemm": 5.0, "memory": 1.0}
# Batched products in fewer groups are of towers or features, not one a sample: their intervals have a power of their own.
FEW_GROUPS = 200
# What the features know of a size's alignment: its remainder by this.
EDGE_MULTIPLE = 256
# Binary digits of M, N and K, between the first 1 of each and its last, that put a GEMM into the next class (`digits`).
DIGITS = (5, 12, 16)


def size_class(time_us: Array) -> npt.NDArray[np.int64]:
    """Index of the size class of each time: below 5 us, 20 us, 100 us, and above."""
    return np.searchsorted(np.asarray(SIZE_CLASSES_US), time_us, side="right")


def baseline_us(
    kernel: str, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec, planned: int = PLANNED
) -> Array:
    """What the trees correct, in microseconds: a memory-bound kernel's costs where they are known, else roofline and launch.

    Args:
        kernel: Which.
        m: Rows.
        n: Columns of the result.
        k: Contracted dimension.
        groups: Products.
        hardware: The GPU.
        planned: As of `perfmodel.features.features`.
    """
    estimate = estimated_us(kernel, m, k, hardware) if planned else None
    if estimate is not None:
        return estimate
    return roofline_us(kernel, m, n, k, groups, hardware) + LAUNCH_FLOOR_US


def no_less(time: Array, kernel: str, sizes: Sizes, hardware: HardwareSpec, least_us: float) -> Array:
    """Learned times of one kernel's calls, but not less than `ROOFLINE_SHARE` of the roofline, nor than its `least_us`."""
    return np.maximum(time, np.maximum(ROOFLINE_SHARE * roofline_us(kernel, *sizes, hardware), least_us))


def octaves_beyond(sizes: Sizes, measured: Mapping[str, Sequence[float]]) -> Array:
    """By how many octaves calls are larger than what was measured, (calls,): the most of m, n, k, groups and their product.

    0 where they are not. A call smaller than all that was measured is a launch, which is known.

    Args:
        sizes: m, n, k, groups.
        measured: Least and largest measured size by name.
    """
    asked = dict(zip(("m", "n", "k", "groups"), sizes, strict=True))
    asked["product"] = np.prod(sizes, axis=0)
    beyond = [asked[name] / largest for name, (_, largest) in measured.items()]
    return np.log2(np.maximum(1.0, np.max(beyond, axis=0)))


def gap_octaves(sizes: Sizes, entry: Mapping[str, Any]) -> Array:
    """By how many octaves each call lies in a hole between those that were measured, (calls,); 0 of a model that knows of none.

    Args:
        sizes: m, n, k, groups.
        entry: The kernel's, of a manifest.
    """
    return Cells.load(entry["cells"]).gap_octaves(sizes) if "cells" in entry else np.zeros(len(sizes[0]))


def wider_beyond(kernel: str, sizes: Sizes, entry: Mapping[str, Any]) -> Array:
    """The power of the interval's factors for how far calls are from what was measured, (calls,): 1 where they are not.

    Args:
        kernel: Which.
        sizes: m, n, k, groups.
        entry: The kernel's, of a manifest: the `range` of its sizes, and the `cells` in which something was measured.
    """
    kind = KERNELS[kernel].kind
    each = WIDER_GEMM if "gemm" in kind else WIDER_MEMORY
    between = WIDER_BETWEEN.get(kind, WIDER_BETWEEN["memory"])
    return 1 + np.maximum(each * octaves_beyond(sizes, entry["range"]), between * gap_octaves(sizes, entry))


def few_neighbours(sizes: Sizes, entry: Mapping[str, Any]) -> npt.NDArray[np.int64]:
    """The class of how many calls were timed carefully around each, (calls,), as of `Cells.few`; arguments as above."""
    return Cells.load(entry["cells"]).few(sizes) if "cells" in entry else np.full(len(sizes[0]), WELL_KNOWN)


def wider(kernel: str, sizes: Sizes, entry: Mapping[str, Any]) -> Array:
    """The power of the interval's factors for what is known around calls, (calls,): `wider_beyond`, or for few neighbours.

    Arguments as of `wider_beyond`; the entry may have `wider_where_few`, powers by that class (`perfmodel.held_out`), and what
    these are raised by: `wider_by_digits`, by that class, and for the calls that these name `wider_where_largest` and
    `wider_in_few_groups` (`perfmodel.fresh`).
    """
    power = wider_beyond(kernel, sizes, entry)
    if (powers := entry.get("wider_where_few")) is not None:
        power = np.maximum(power, np.asarray(powers)[few_neighbours(sizes, entry)])
    power = power * by_digits(sizes, entry)
    if few_groups := entry.get("wider_in_few_groups"):
        power = np.where(in_few_groups(kernel, sizes), few_groups * power, power)
    if largest := entry.get("wider_where_largest"):
        power = np.where(are_largest(sizes), largest * power, power)
    return power


def by_digits(sizes: Sizes, entry: Mapping[str, Any]) -> Array:
    """The power of `wider_by_digits` of each call, (calls,): 1 of the largest ones, and of a kernel that has none."""
    if (powers := entry.get("wider_by_digits")) is None:
        return np.ones(len(sizes[0]))
    return np.where(are_largest(sizes), 1.0, np.asarray(powers)[digits(sizes)])


def digits(sizes: Sizes) -> npt.NDArray[np.int64]:
    """The class of how many binary digits M, N and K take together, (calls,), without the zeros at their ends.

    A power of two takes none. What people round takes few, as does most of what is measured: calls of many are further off.
    """
    taken = sum(np.log2(size / np.bitwise_and(size, -size)).astype(np.int64) for size in (s.astype(np.int64) for s in sizes[:3]))
    return np.searchsorted(np.asarray(DIGITS), taken, side="right")


def in_few_groups(kernel: str, sizes: Sizes) -> npt.NDArray[np.bool_]:
    """Which calls are of batched products in fewer groups than `FEW_GROUPS`, (calls,): of towers or features, not of samples.

    The largest calls are none (`perfmodel.choice.are_largest`), nor are those of a grouped kernel, all of which are in few.
    """
    batched = KERNELS[kernel].kind == "batched_gemm" and "grouped" not in kernel
    return batched & (sizes[3] < FEW_GROUPS) & ~are_largest(sizes)


def bounds_of(time_us: Array, entry: Mapping[str, Any], doubt: npt.NDArray[np.int64], wider: Array | float = 1.0) -> Array:
    """Both ends of the 90% intervals of predicted times, (calls, 2).

    Args:
        time_us: The times.
        entry: The kernel's, of a manifest: factors by size class, and powers of them by class of doubt where it has a choice.
        doubt: As of `Seen`.
        wider: What `wider` says.
    """
    factors = np.asarray(entry["interval_factors"])[size_class(time_us)]
    power = np.asarray(wider)
    if in_doubt := entry.get("wider_in_doubt"):
        power = power * np.asarray(in_doubt)[doubt]
    return time_us[:, None] * factors ** np.broadcast_to(power, time_us.shape)[:, None]


class Seen(NamedTuple):
    """What the trees see of calls of one kernel.

    Attributes:
        names: Of the features, `network` the last where there is one.
        matrix: The features, (calls, features).
        doubt: Of what the library chooses, by class (`perfmodel.choice.DOUBT`), (calls,).
        smooth: The network's value, 0 without one.
    """

    names: list[str]
    matrix: Array
    doubt: npt.NDArray[np.int64]
    smooth: Array | float = 0.0

    @classmethod
    def of(
        cls,
        kernel: str,
        sizes: Sizes,
        hardware: HardwareSpec,
        choice: Choice | None,
        network: Network | None,
        planned: int = PLANNED,
    ) -> Seen:
        """Features, those of the kernel that is likely chosen, and what the network makes of both."""
        known = features(kernel, *sizes, hardware, planned)
        doubted = planned >= DOUBTED and KERNELS[kernel].kind == "batched_gemm"
        seen = cls(*with_choice(*known, choice, kernel, sizes, hardware, doubted, planned))
        if network is None:
            return seen
        smooth = network.predict(seen.matrix)
        return seen._replace(names=[*seen.names, "network"], matrix=np.column_stack([seen.matrix, smooth]), smooth=smooth)


def at_edge(sizes: Sizes, measured: dict[str, list[float]]) -> Sizes:
    """Sizes beyond what was measured, cut to the largest measured one with the same remainder by `EDGE_MULTIPLE`.

    A call outside takes the roofline's time there, times what was learned at the edge: along that dimension it never falls,
    and what an odd size costs stays.

    Args:
        sizes: m, n, k, groups.
        measured: Least and largest measured size by name.
    """

    def cut(size: Array, edge: float) -> Array:
        alike = edge - (edge - size) % EDGE_MULTIPLE
        return np.where(size > edge, np.where(alike < edge / 2, edge, alike), size)

    m, n, k, groups = (cut(size, measured[name][1]) for size, name in zip(sizes, ("m", "n", "k", "groups"), strict=True))
    return m, n, k, groups

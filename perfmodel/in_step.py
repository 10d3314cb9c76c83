"""What a kernel takes inside a training step, beside what it takes alone.

Alone a kernel was timed from cold caches (`python -m hil.fused`), or, if a GEMM, again and again until the GPU's power was the
bound. In a step what it reads was often just written and lies in the L2, and a GEMM stands between kernels that need less power.
How much that is follows a curve over its size, for each family of kernels, found from kernels of profiled steps
(`perfmodel.fit_in_step`). Between two kernels of a CUDA graph there is a gap, behind a short kernel a shorter one. Before each
batched product cuBLAS clears a counter, a node of its own in the graph, and gaps are longer; some of that is part of what it
takes alone, too. Alone a GEMM is one in the layout of its pass (`perfmodel.layouts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from perfmodel import hardware as hardware_module
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import BF16_BATCHED, of_kernel

Array = npt.NDArray[np.float64]

SCHEMA_VERSION = 4
FILE = "in_step.json"
_OF_KIND = {
    "pointwise": "pointwise", "fill": "pointwise", "external": "pointwise", "gather": "gather", "scatter": "scatter",
    "row": "reduction", "column": "reduction", "both": "reduction", "partials": "partials", "copy": "copy",
}  # fmt: skip
FUSED = (
    "pointwise", "gather", "scatter", "scatter_strided", "scatter_turned", "reduction", "quantize_pointwise",
    "quantize_reduction", "magnitudes", "copy",
)  # fmt: skip
"""Families of fused kernels that have a curve."""
RESCALES = {"rescale", "rescale_rounded"}
COMPUTES = {*RESCALES, "random", "turned_cat", "picked", "put", "one_block", "one_block_masked"}
"""Operators that take a kernel longer to compute than its bytes to move: where these lie is no matter, and it has no curve."""
TURNED = "quantize_turned"
WITHOUT_CURVE = (TURNED, "partials")
"""Reductions that write a transposed copy in 8 bits, and sums of parts: what takes them long is not where their bytes lie."""
GEMMS = ("gemm_bf16", "gemm_fp8")
SHORT_US = 2.0  # kernels from this on have whole gaps: of 1.25 to 64 it left the least error on kinds of models left out
CLEARED_US = 0.8  # what clears their counter: 0.7 to 0.9 in 22 profiled steps, where it is a kernel of its own
LEAST_OF_BATCHED = 0.5  # of the time alone, whatever is taken off it
VECTOR = 8  # values of bf16 that operands must lie by for Hopper's own GEMMs
SECTOR_BYTES = 32  # what a GPU fetches at least
# Of the L2, what holds bytes of the kernels just before; and of a kernel's bytes, what comes from memory however small it is, as
# weights and what the forward saved do. By hand, from steps of dcnv2-production and dlrm-production that were profiled on an H100
# and on an H200 (4.39 TB/s over 3.06 are 1.43): kernels of 1 to 16 MB took 1.08 times as long there, of 16 to 32 MB 1.18, of
# 32 to 64 MB 1.25, and larger ones 1.39.
HELD, NEVER_HELD = 0.35, 0.2


def family(kind: str, label: str, kept: int, unordered_bytes: int) -> str:
    """Family of a fused kernel; empty for a kind that is unknown.

    Args:
        kind: Of it.
        label: Its operators: quantization is known by them.
        kept: Its elements.
        unordered_bytes: What it reads across memory: where that is a sector an element, neighbours in memory are read by kernels
            that follow, and found in the L2; where it is more, the kernel itself reads them.
    """
    found, operators = _OF_KIND.get(kind, ""), set(label.split())
    if found == "scatter" and unordered_bytes:
        return "scatter_turned" if unordered_bytes > SECTOR_BYTES * kept else "scatter_strided"
    if COMPUTES & {operator.partition("*")[0] for operator in operators}:
        return "rescale"
    # A softmax, too, looks at magnitudes (whether all are finite: torch 2.13).
    quantizes = "cast" in operators or ({"abs", "amax"} <= operators and "any" not in operators)
    if quantizes and kind == "row" and not operators & {"cast", "var_mean"}:  # of a whole tensor, in long pieces
        return "magnitudes"
    if quantizes and found == "reduction" and unordered_bytes:
        return TURNED
    return f"quantize_{found}" if quantizes and found in ("pointwise", "reduction") else found


def weights(x: Array, knots: Array) -> Array:
    """Share of each knot (columns) in a value between two of them; beyond the ends, of the end."""
    inside = np.clip(x, knots[0], knots[-1])
    left = np.clip(np.searchsorted(knots, inside, side="right") - 1, 0, len(knots) - 2)
    right_share = (inside - knots[left]) / (knots[left + 1] - knots[left])
    result = np.zeros((len(x), len(knots)))
    rows = np.arange(len(x))
    result[rows, left] = 1 - right_share
    result[rows, left + 1] += right_share
    return result


@dataclass(frozen=True)
class InStep:
    """Factors from times alone to times in a step.

    Attributes:
        knots: Per family, base-2 logarithms of the bytes moved, or of a GEMM's microseconds alone.
        logs: Per family, logarithms of the factor there.
        gap_us: Between two kernels of a CUDA graph, see `gaps_us`.
        batched_gap_us: Beside that, around each batched product.
        batched_less_us: What one takes alone beyond its kernel and what clears its counter, where it is counted (`is_counted`).
        off: Per family, by how much its kernels of a step are off together: the half-width of a 90% interval, as a share.
        hardware: The GPU whose steps were profiled.
    """

    knots: Mapping[str, Sequence[float]]
    logs: Mapping[str, Sequence[float]]
    gap_us: float
    batched_gap_us: float
    batched_less_us: float
    off: Mapping[str, float]
    hardware: HardwareSpec

    @cached_property
    def _curves(self) -> dict[str, tuple[Array, Array]]:
        return {name: (np.array(self.knots[name], dtype=float), np.array(self.logs[name], dtype=float)) for name in self.logs}

    def _factors(self, family: str, x: Array) -> Array:
        knots, logs = self._curves[family]
        return np.asarray(np.exp(np.interp(x, knots, logs)), dtype=np.float64)

    def fused(self, families: Sequence[str], moved_bytes: npt.ArrayLike) -> Array:
        """Factors of fused kernels of these families that move so many bytes; 1 for a family that is unknown."""
        x = np.log2(np.maximum(np.asarray(moved_bytes, dtype=np.float64), 1.0))
        every = np.array(families)
        result = np.ones(len(x))
        for name in set(families) & self.logs.keys():
            mine = every == name
            result[mine] = self._factors(name, x[mine])
        return result

    def gemms(self, fp8: npt.ArrayLike, alone_us: npt.ArrayLike) -> Array:
        """Factors of GEMMs, FP8 or not, that take so long alone."""
        which, x = np.asarray(fp8, dtype=bool), np.log2(np.maximum(np.asarray(alone_us, dtype=np.float64), 1e-3))
        return np.where(which, self._factors(GEMMS[True], x), self._factors(GEMMS[False], x))

    def gaps_us(self, us: npt.ArrayLike) -> Array:
        """Microseconds from kernels of a CUDA graph that take so long to the next: in proportion of those below `SHORT_US`."""
        return self.gap_us * np.minimum(np.asarray(us, dtype=np.float64) / SHORT_US, 1.0)

    def batched(self, alone_us: npt.ArrayLike) -> Array:
        """Factors of batched products that are counted and take so long alone."""
        alone = np.asarray(alone_us, dtype=np.float64)
        return np.maximum(1 - self.batched_less_us / np.maximum(alone, 1e-3), LEAST_OF_BATCHED)


def from_memory(moved_bytes: npt.ArrayLike, hardware: HardwareSpec) -> Array:
    """Share of the bytes of kernels inside a step that come from a GPU's memory or go there, not found in the L2."""
    moved = np.maximum(np.asarray(moved_bytes, dtype=np.float64), 1.0)
    return np.asarray(np.maximum(1 - HELD * hardware.l2_bytes / moved, NEVER_HELD), dtype=np.float64)


def is_counted(kernel: str, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Whether cuBLAS counts the products of a batched one on the GPU: those that Hopper's own kernels take.

    In eight profiled steps it did so for all of these, and for one of twenty others.
    """
    rows, columns, inner = (np.asarray(size, dtype=np.int64) for size in (m, n, k))
    even: npt.NDArray[np.bool_] = (rows % 2 == 0) & (columns % 2 == 0) & (inner % 4 == 0)
    return even & (of_kernel(kernel) == BF16_BATCHED)


def load(hardware: str | HardwareSpec = "h200") -> InStep | None:
    """Of a GPU, or of the nearest shipped one where none of its own steps were profiled; None where there is neither.

    Args:
        hardware: A name of `perfmodel.hardware.available()`, or a specification.

    Raises:
        ValueError: the hardware is unknown, or the file is of another schema version.
    """
    spec = hardware_module.load(hardware) if isinstance(hardware, str) else hardware
    found = hardware_module.fitted(spec, FILE, SCHEMA_VERSION)
    if found is None:
        return None
    document, like = found
    curves = document["curves"]
    return InStep(
        {name: curve["log2"] for name, curve in curves.items()},
        {name: np.log(curve["factor"]).tolist() for name, curve in curves.items()},
        document["gap_us"], document["batched_gap_us"], document["batched_less_us"], document["off"], hardware_module.load(like),
    )  # fmt: skip

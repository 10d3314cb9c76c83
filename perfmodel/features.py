"""What the learned model sees of a kernel call: sizes, roofline terms, tiles, waves, alignment."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perfmodel.gemm_plan import STEP, plans_of_many
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS, library_of
from perfmodel.memory_costs import estimated_us
from perfmodel.memory_plan import plan
from perfmodel.roofline import flops, moved_bytes, roofline_us

Array = npt.NDArray[np.float64]

# How much is told of a launch: 0 nothing, 1 what is known of memory-bound kernels and of one product of many, 2 how our GEMM is
# cut, too, 3 of products of many how sure it is which kernel the library chooses (`perfmodel.choice`), besides.
DOUBTED = PLANNED = 3
# Output tiles that cuBLAS and CUTLASS use on Hopper for bf16 and FP8 (M x N).
TILES = ((64, 64), (64, 128), (128, 128), (128, 256), (256, 128))
# Of one product of a grouped GEMM.
PRODUCT_TILES = ((64, 32), (128, 64), (128, 256), (256, 128))


def alignment(size: Array, most: int = 256) -> Array:
    """log2 of the largest power of two that divides `size`, at most `most`."""
    whole = size.astype(np.int64)
    return np.log2(np.minimum(whole & -whole, most))


def waves(tiles: Array, multiprocessors: int) -> tuple[Array, Array]:
    """log2 of the tiles of each multiprocessor, and how full the last of their waves makes all."""
    each = tiles / multiprocessors
    return np.log2(each), each / np.ceil(each)


def gemm_features(
    kernel: str, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec, planned: int = PLANNED
) -> tuple[list[str], Array]:
    """Names and (rows, features) matrix for a GEMM kernel; arguments as `features`."""
    spec = KERNELS[kernel]
    work, moved = flops(spec, m, n, k, groups), moved_bytes(spec, m, n, k, groups)
    element = 1.0 if spec.is_fp8 else 2.0
    columns: dict[str, Array] = {
        "log2_m": np.log2(m), "log2_n": np.log2(n), "log2_k": np.log2(k), "log2_groups": np.log2(groups),
        "log2_flops": np.log2(work), "log2_bytes": np.log2(moved), "log2_intensity": np.log2(work / moved),
        "align_m": alignment(m), "align_n": alignment(n), "align_k": alignment(k),
        "l2_share": np.log2(moved / hardware.l2_bytes),
        "log2_output_bytes": np.log2(2.0 * groups * m * n), "log2_weight_bytes": np.log2(element * n * k * groups),
        "log2_m_over_n": np.log2(m / n), "log2_k_over_mn": np.log2(k / np.sqrt(m * n)),
    }  # fmt: skip
    for tile_m, tile_n in TILES:
        tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n) * groups
        name = f"{tile_m}x{tile_n}"
        columns[f"log2_waves_{name}"], columns[f"wave_fill_{name}"] = waves(tiles, hardware.multiprocessors)
        columns[f"tile_fill_{name}"] = groups * m * n / (tiles * tile_m * tile_n)
        # Time of whole waves if each multiprocessor did one tile at its share of the peak: what quantization adds.
        columns[f"log2_wave_work_{name}"] = np.log2(np.ceil(tiles / hardware.multiprocessors) * tile_m * tile_n * k)
    if planned and spec.kind == "batched_gemm":
        columns |= _each_product(m, n, k, grouped="grouped" in kernel)
    if planned >= 2 and library_of(kernel) == "loka":
        columns |= _own_plan(kernel, m, n, k, groups, hardware)
    return list(columns), np.stack(list(columns.values()), axis=1)


def _own_plan(kernel: str, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec) -> dict[str, Array]:
    """How our GEMM is cut, which follows from the size: where other kernels leave that to be learned."""
    plan = plans_of_many(m, n, k, fast=KERNELS[kernel].accumulation == "hopper_fast")
    programs = plan.tiles_down * plan.tiles_across * plan.parts
    each, at_once = programs / hardware.multiprocessors, programs / (hardware.multiprocessors * plan.resident)
    return {
        "plan_rows": plan.rows, "plan_columns": plan.columns, "plan_stages": plan.stages, "plan_swapped": plan.swapped,
        "log2_plan_parts": np.log2(plan.parts), "log2_plan_steps": np.log2(plan.steps), "plan_last_step": (k - 1) % STEP + 1,
        "log2_plan_tiles_down": np.log2(plan.tiles_down), "log2_plan_tiles_across": np.log2(plan.tiles_across),
        "log2_plan_programs": np.log2(programs), "plan_tile_fill": m * n * plan.parts / (programs * plan.rows * plan.columns),
        "log2_plan_each": np.log2(np.ceil(each)), "plan_wave_fill": each / np.ceil(each),
        "log2_plan_rounds": np.log2(np.ceil(at_once)), "plan_round_fill": at_once / np.ceil(at_once),
        "plan_over_roofline": np.log(plan.ns / (1e3 * (1.0 + roofline_us(kernel, m, n, k, groups, hardware)))),
    }  # fmt: skip


def _each_product(m: Array, n: Array, k: Array, grouped: bool) -> dict[str, Array]:
    """One product of many: what is left for the last tile, and for torch's grouped GEMM what it chooses its tile by."""
    columns = {
        "last_m": (m - 1) % 128 + 1, "last_n": (n - 1) % 128 + 1, "last_k": (k - 1) % 64 + 1,
        "log2_less_of_mn": np.log2(np.minimum(m, n)), "log2_more_of_mn": np.log2(np.maximum(m, n)), "log2_mn": np.log2(m * n),
    }  # fmt: skip
    if grouped:
        for tile_m, tile_n in PRODUCT_TILES:
            columns[f"log2_tiles_{tile_m}x{tile_n}"] = np.log2(np.ceil(m / tile_m) * np.ceil(n / tile_n))
        columns["large_sizes"] = ((m >= 2048).astype(float) + (n >= 2048) + (k >= 2048) >= 2).astype(float)
    return columns


def memory_features(
    kernel: str, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec, planned: int = PLANNED
) -> tuple[list[str], Array]:
    """Names and (rows, features) matrix for a memory-bound kernel on (rows, columns) = (m, k).

    Args:
        kernel: Which.
        m: Rows.
        n: 1.
        k: Columns.
        groups: 1.
        hardware: The GPU.
        planned: As of `features`.
    """
    moved = moved_bytes(KERNELS[kernel], m, n, k, groups)
    columns: dict[str, Array] = {
        "log2_rows": np.log2(m), "log2_columns": np.log2(k), "log2_bytes": np.log2(moved),
        "l2_share": np.log2(moved / hardware.l2_bytes),
        # A transposed result's rows lie this far apart: by large powers of two they fall into the same places of the L2.
        "align_rows": alignment(m, 2**16 if planned else 256), "align_columns": alignment(k, 2**14 if planned else 2048),
        "log2_rows_over_columns": np.log2(m / k),
        # A block of a reduction is a power of two: a row of 1,040 columns costs as one of 2,048.
        "row_fill": k / 2.0 ** np.ceil(np.log2(k)),
        "log2_row_waves": np.log2(m / hardware.multiprocessors), "log2_column_waves": np.log2(k / hardware.multiprocessors),
    }  # fmt: skip
    if planned:
        columns |= {
            "row_block": np.ceil(np.log2(k)), "row_loops": np.ceil(k / 1024), "loop_fill": k / (1024 * np.ceil(k / 1024)),
            "column_block": np.ceil(np.log2(m)), "column_fill": m / 2.0 ** np.ceil(np.log2(m)),
            **plan(kernel, m, k),
        }  # fmt: skip
        estimate = estimated_us(kernel, m, k, hardware)
        if estimate is not None:
            columns["estimate_over_bytes"] = np.log(estimate / (1.0 + moved / (hardware.copy_bandwidth_tbs * 1e6)))
    return list(columns), np.stack(list(columns.values()), axis=1)


def features(
    kernel: str, m: Array, n: Array, k: Array, groups: Array, hardware: HardwareSpec, planned: int = PLANNED
) -> tuple[list[str], Array]:
    """Feature names and matrix of calls of one kernel.

    Args:
        kernel: A name of `perfmodel.kernels.KERNELS`.
        m: Rows, a 1-D array.
        n: Columns of the result (1 for a memory-bound kernel).
        k: Contracted dimension (columns of a memory-bound kernel's input).
        groups: Products in one call.
        hardware: The GPU.
        planned: How much of what is known of a launch, `PLANNED` at most; models that were fitted before have less.
    """
    if "gemm" in KERNELS[kernel].kind:
        return gemm_features(kernel, m, n, k, groups, hardware, planned)
    return memory_features(kernel, m, n, k, groups, hardware, planned)

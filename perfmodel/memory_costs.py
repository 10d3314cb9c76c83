"""What a memory-bound kernel's launch should cost: a sum of its parts, before trees learn what that leaves.

A few hundred timings show trees where a time jumps, but not how it grows between two of them. So their baseline is a sum of
costs, none of them negative: of a call, of bytes, of rows and columns, of whole tiles, of waves of programs, of what is masked.
Beyond the sweep it grows as these do.

`python -m perfmodel.fit_memory_costs` fits them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from perfmodel import hardware as hardware_module
from perfmodel.data_folder import data_folder
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import KERNELS
from perfmodel.memory_plan import Columns, few_lines, plan, run_height
from perfmodel.roofline import moved_bytes

Array = npt.NDArray[np.float64]

FILE = "memory_costs.json"


def terms(
    kernel: str, m: Array, k: Array, hardware: HardwareSpec, costs: Mapping[str, Mapping[str, float]] | None = None
) -> Columns:
    """What may cost time in a call on (rows, columns) = (m, k), by name, each some microseconds.

    Args:
        kernel: Which.
        m: Rows.
        k: Columns.
        hardware: The GPU.
        costs: Of the kernels that it may be made of, by name; by default those that are known.
    """
    one, bandwidth = np.ones_like(m), hardware.copy_bandwidth_tbs * 1e6
    moved = moved_bytes(KERNELS[kernel], m, one, k, one) / bandwidth
    per_element = moved / (m * k)
    found: Columns = {
        "call": one, "log_rows": np.log2(m) / 16, "log_columns": np.log2(k) / 16, "rows": m / 1e4, "columns": k / 1e4,
        "bytes": moved,
        "bytes_beyond_l2": np.maximum(moved - hardware.l2_bytes / bandwidth, 0),
        "read_beyond_l2": np.maximum(2 * m * k - hardware.l2_bytes, 0) / bandwidth,
        "tiles": per_element * np.ceil(m / 128) * np.ceil(k / 128) * 128 * 128,
        "row_blocks": per_element * m * 2.0 ** np.ceil(np.log2(k)),
        "row_loops": per_element * m * np.ceil(k / 1024) * 1024,
    }  # fmt: skip
    launch = plan(kernel, m, k)
    if "programs" in launch:
        found |= {"programs": launch["programs"] / 1e3, "waves": launch["waves"] / 4, "padded": moved / launch["fill"]}
    for name in ("odd", "by_word"):
        if name in launch:
            # Where a result is turned, tiles are taken whole.
            taken = found["tiles"] if "copied" in launch else moved
            found |= {name: launch[name], f"{name}_bytes": launch[name] * taken, f"{name}_rows": launch[name] * m / 1e4}
    if kernel in _FLAT:
        # Elements are loaded a few at a time: the programs of a multiprocessor, whole ones where there are several.
        several = np.ceil(launch["programs"] / hardware.multiprocessors)
        several = np.where(launch["programs"] > 1, several, launch["fill"])
        found |= {f"{name}_programs": launch[name] * several for name in ("odd", "by_word")}
    if kernel == "loka/quantize_rowwise_dual":
        # A launch apart that makes scales of maxima.
        found["apart"] = (~few_lines(m.astype(np.int64), k.astype(np.int64))).astype(float)
    if kernel == "loka/quantize_rowwise":
        found |= _narrow_runs(m, k, launch, moved)
    if "unmasked" in launch:
        masked = 1 - launch["unmasked"]
        found |= {"masked": masked, "masked_bytes": masked * moved, "masked_programs": masked * launch["programs"] / 1e3}
    found |= {name: launch[name] / scale for name, scale in _COUNTS.items() if name in launch}
    for name in [column.removesuffix("_parts") for column in launch if column.endswith("_parts")]:
        found[f"{name}_cut"] = (launch[f"{name}_parts"] > 1).astype(float)
        found[f"{name}_uneven"] = (1 - launch[f"{name}_even"]) * moved
        found[f"{name}_odd_part"] = (launch[f"{name}_align_part"] < 1) * moved
    if kernel in _TURNED:
        found = _copied(kernel, m, k, hardware, known(hardware.like or hardware.name) if costs is None else costs, found)
    if kernel.startswith("torch/"):
        found |= {"odd_columns": (k % 8 > 0) * moved, "read_in_l2": np.minimum(2 * m * k, hardware.l2_bytes) / bandwidth}
    return found


# What turns its result, and what it is made of where 4 does not divide the rows (`numerics.gpu_dual`).
_TURNED = {
    f"loka/quantize_{scaling}_{form}": f"loka/quantize_{scaling}"
    for scaling in ("tensorwise", "rowwise")
    for form in ("transposed", "dual")
}


# Bytes of a row that a copy of turned columns fetches at once.
_SECTORS = 64


def _copied(
    kernel: str, m: Array, k: Array, hardware: HardwareSpec, costs: Mapping[str, Mapping[str, float]], found: Columns
) -> Columns:
    """Terms of what turns its result, `found` where 4 divides the rows: else a copy, turned, and what quantizes that.

    What also quantizes the tensor as it lies does so by itself then.
    """
    copied, plain = (m % 4 > 0).astype(float), _TURNED[kernel]
    moved = 4 * m * k / (hardware.copy_bandwidth_tbs * 1e6)
    beyond = np.maximum(moved - hardware.l2_bytes / (hardware.copy_bandwidth_tbs * 1e6), 0)
    # A column is read in sectors of several columns, which the L2 keeps for the next ones, unless the rows are too many.
    kept = m * np.minimum(2 * k, _SECTORS) / hardware.l2_bytes
    found = {name: (1 - copied) * cost for name, cost in found.items()}
    found |= {
        "copied": copied, "copied_bytes": copied * moved, "copied_beyond_l2": copied * beyond,
        "copied_wide": copied * (2 * k > _SECTORS) * moved, "copied_anew": copied * np.clip((kept - 0.3) / 0.7, 0, 1) * moved,
    }  # fmt: skip
    if plain in costs:
        calls, some = np.zeros_like(m), np.flatnonzero(copied)
        # Hardly any rows are: nothing is worked out for the others.
        if len(some):
            rows, columns = m[some], k[some]
            calls[some] = _sum(costs[plain], terms(plain, columns, rows, hardware))
            if kernel.endswith("dual"):
                calls[some] += _sum(costs[plain], terms(plain, rows, columns, hardware))
        found["copied_calls"] = calls
    return found


# Kernels that take a tensor as one line of elements, whatever its rows.
_FLAT = ("loka/quantize_tensorwise", "loka/quantize_tensorwise_delayed")


def _narrow_runs(m: Array, k: Array, launch: Columns, moved: Array) -> Columns:
    """What rows cost that are not read by whole vectors: many short ones to a program, whose maxima follow one another.

    An odd row is read a value at a time, another by words of two. An odd number of words go one by one (`apart`) where 16 does
    not divide the rows, or they have less than eight. Rows that a last program has too many have no maximum, and a scale of
    nothing takes the division's slow way.
    """
    rows, columns = m.astype(np.int64), k.astype(np.int64)
    height = run_height(rows, columns)
    high, many = np.log2(height) / 8, np.log2(launch["programs"]) / 16
    ragged, odd = (rows % height > 0).astype(float), launch["odd"]
    costs = {
        "padded": moved / launch["fill"], "height": high, "height_squared": high**2, "ragged": ragged,
        "ragged_height": ragged * high, "many": many, "many_height": many * high,
        "programs_height": high * launch["programs"] / 1e3,
    }  # fmt: skip
    apart = (columns % 4 == 2) * ((rows % 16 > 0) | (columns < 16))
    reads = {"odd": odd, "words": (1 - odd) * (1 - launch["unmasked"]), "apart": apart}
    return {f"{name}_{cost}": which * size for name, which in reads.items() for cost, size in costs.items()}


# Counts of a launch that cost time by themselves, and what they are divided by.
_COUNTS = {"steps": 4, "members": 64, "chunk": 64, "down": 64, "across": 16}


@lru_cache(maxsize=8)
def known(hardware_name: str) -> dict[str, dict[str, float]]:
    """Costs by kernel and name of the term, of a GPU's `memory_costs.json` or of the shipped one that it is like; else none."""
    path = data_folder() / hardware_name / FILE
    if path.is_file():
        costs: dict[str, dict[str, float]] = json.loads(path.read_text())["kernels"]
        return costs
    like = hardware_module.load(hardware_name).like if hardware_name in hardware_module.available() else None
    return {} if like is None else known(like)


def estimated_us(kernel: str, m: Array, k: Array, hardware: HardwareSpec) -> Array | None:
    """Time of calls as the sum of their costs, in microseconds; None for a kernel whose costs are not known."""
    costs = known(hardware.like or hardware.name).get(kernel)
    return None if costs is None else _sum(costs, terms(kernel, m, k, hardware))


def _sum(costs: Mapping[str, float], found: Columns) -> Array:
    """Time of calls, in microseconds, by their terms."""
    total: Array = np.sum([cost * found[name] for name, cost in costs.items()], axis=0)
    return total

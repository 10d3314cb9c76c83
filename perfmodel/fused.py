"""Time of a memory-bound kernel from what it moves: bytes over bandwidth, and how far from it such kernels were.

A kernel is known by its kind (pointwise, gather, row, column, both, scatter, fill, external), its iteration space and its
bytes, whatever it computes; so any kernel that a compiler makes can be asked, also one that nobody measured by name. Two kinds
are torch's own: `partials` adds up what kernels that sum both ways leave, `copy` copies a bias to each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from perfmodel import hardware as hardware_module
from perfmodel import in_step
from perfmodel.data_folder import data_folder
from perfmodel.hardware import HardwareSpec
from perfmodel.in_step import InStep
from perfmodel.trees import Trees

if TYPE_CHECKING:
    import pandas as pd

Array = npt.NDArray[np.float64]
Rows: TypeAlias = "pd.DataFrame | Mapping[str, Any]"
"""Columns by name: of a DataFrame, or without pandas."""

SCHEMA_VERSION = 1
KINDS = ("pointwise", "gather", "row", "column", "both", "scatter", "fill", "partials", "copy")
COLUMNS = ("kind", "kept", "reduced", "read_bytes", "written_bytes", "unordered_bytes", "uneven", "instructions")
MANIFEST, MODEL = "fused.json", "fused.ubj.gz"
LAUNCH_US = 1.0
# Instructions that an operator adds to a kernel's element: counted in the sm_90 code that Triton 3.9 makes of libdevice's
# functions in FP32, less those of a kernel that adds one; slow paths of large arguments not taken. Others count one.
INSTRUCTIONS = {
    "exp": 10, "exp2": 10, "sigmoid": 11, "silu": 11, "div": 8, "reciprocal": 8, "tanh": 17, "erf": 30, "gelu": 30, "log": 28,
    "log1p": 28, "softplus": 38, "sin": 28, "cos": 30, "pow": 58, "_softmax": 10,
    # A random number: two kernels of 8 and 17 million elements that drop some out, 3.6 us a million (a step of DeepFM).
    "random": 116,
    # Largest magnitudes of tensors that are put together, some of them turned, one element after another: the middle one of
    # such kernels of two InterFormers and an AutoInt, 3.6, 5.0 and 7.1 us a million elements.
    "turned_cat": 168,
    # A looked-up row's element added across rows: each finds its row anew (130 to 170 in steps of DeepFM, NFM and a drawn model).
    "gathered_across": 130,
    # An element looked up by several indices at once, one after another, and one added so in bf16: such kernels of seven and
    # twenty-six steps of drawn models, 2.6 us a million elements behind a launch, and 8.8 to 12 of a million or more. Where they
    # are put together with others each element of all finds its indices: 2.1 to 8.2 us a million of all, in twelve steps.
    "picked": 80, "put": 300,
    # Magnitudes that one block of threads reduces: 65,536 to 786,432 of them took 33 to 56 us a million in steps, and 92 to 190
    # where they are no multiple of 2,048.
    "one_block": 1650, "one_block_masked": 5000,
    # A row's and a column's scale found in FP64, and rounded to powers of two: kernels that do nothing else took 3.1 and 4.8 us
    # a million elements (steps of dcnv2-production and of wukong at other widths). A column's alone: half of it.
    "rescale": 80, "column_scale": 40, "rescale_rounded": 125, "column_scale_rounded": 62,
}  # fmt: skip
BOUND = 1.5  # octaves that computing takes longer than moving, from which on only how much there is to compute counts
AGAIN = 3.0  # a middling value: reductions of 64 to 512 elements took 2 to 10 times their bytes across memory more
HELD = 64  # elements of an uneven row that torch.compile holds at once (`InductorChoices.should_use_persistent_reduction`, 2.11)
TILES_TBS = 5.0
"""What passes through the multiprocessors where rows are read in tiles, twice: norms' gradients of rows of 128 elements, of
turned tensors too, took 4.8 on an H200 and 5.0 in a step on an H100, whose clock is the same."""
VALUES, WARP, ADDERS, MOST_VALUES = 4, 32, 128, 256
"""Of torch's sums: values that a thread reads at once, threads side by side, threads of a block, and values from which on several
blocks share a sum."""
VALUE_US, MEET_US = 0.13, 5.0
"""Microseconds from one value to the next, and until several blocks have met: medians of `python -m hil.fused called`, H200."""
LANES, CLOCK_GHZ = 128, 1.98
"""FP32 lanes of a multiprocessor and its highest clock (Hopper)."""


def instructions_of(operators: Iterable[str]) -> int:
    """Instructions per element of a kernel, each of its distinct operators once, or as often as it says (`rescale*2`)."""
    counted = (operator.partition("*") for operator in set(operators))
    return sum(INSTRUCTIONS.get(operator, 1) * int(number or 1) for operator, _, number in counted)


def baseline_us(rows: Rows, hardware: HardwareSpec) -> Array:
    """A launch, and the longest of bytes at the bandwidth of a copy, of tiles and of instructions, in microseconds."""
    read, written = _numbers(rows, "read_bytes"), _numbers(rows, "written_bytes")
    # Tiles of two dimensions hide the order of memory from pointwise kernels; a reduction without reads it again and again.
    tiles = in_tiles(rows)
    again = (np.isin(_kinds(rows), ("row", "both", "column")) & ~tiles) * _numbers(rows, "unordered_bytes")
    moved = (read + written + AGAIN * again) / (hardware.copy_bandwidth_tbs * 1e6)
    through = tiles * (2 * read + written) / (TILES_TBS * 1e6)
    longest = np.maximum(np.maximum(moved, through), _computing_us(rows, hardware))
    return np.maximum(longest, (_kinds(rows) == "partials") * _adding_us(rows)) + LAUNCH_US


def in_tiles(rows: Rows) -> npt.NDArray[np.bool_]:
    """Which reductions read tiles of rows, once to reduce them and once more for what is made of them."""
    uneven = np.asarray(rows["uneven"], dtype=bool)
    found: npt.NDArray[np.bool_] = (_kinds(rows) == "row") & uneven & (_numbers(rows, "reduced") > HELD)
    return found


def _adding_us(rows: Rows) -> Array:
    """What torch takes to add up the parts of sums, (parts, sums): each thread adds one value after the other.

    How many that are: `aten/src/ATen/native/cuda/Reduce.cuh`, `setReduceConfig` (2.11), of FP32 whose sums lie side by side.
    """
    sums, parts = _numbers(rows, "kept"), _numbers(rows, "reduced")
    width = np.minimum(2.0 ** np.floor(np.log2(np.maximum(sums / VALUES, 1.0))), WARP)
    height = np.minimum(2.0 ** np.floor(np.log2(np.maximum(parts, 1.0))), ADDERS / width)
    each = np.where((parts >= 16 * height) | (parts >= MOST_VALUES), parts / height, parts)
    several = each >= MOST_VALUES
    return np.where(several, 16.0, each) * VALUE_US + several * MEET_US


def _computing_us(rows: Rows, hardware: HardwareSpec) -> Array:
    elements = _numbers(rows, "kept") * _numbers(rows, "reduced")
    rate = hardware.multiprocessors * LANES * CLOCK_GHZ * 1e3
    return elements * _numbers(rows, "instructions") / rate


def _numbers(rows: Rows, name: str) -> Array:
    return np.asarray(rows[name], dtype=np.float64)


def _kinds(rows: Rows) -> npt.NDArray[np.str_]:
    return np.asarray(rows["kind"], dtype=np.str_)


def features(rows: Rows, hardware: HardwareSpec) -> tuple[list[str], Array]:
    """Names and (rows, features) matrix: sizes, shares of the bytes, and which kind it is."""
    read, written, unordered, kept, reduced = (
        _numbers(rows, name) for name in ("read_bytes", "written_bytes", "unordered_bytes", "kept", "reduced")
    )
    moved = np.maximum(read + written, 1.0)
    kind = _kinds(rows)
    computing = _computing_us(rows, hardware) * hardware.copy_bandwidth_tbs * 1e6 / moved
    columns: dict[str, Array] = {
        "log2_bytes": np.log2(moved),
        "log2_kept": np.log2(np.maximum(kept, 1.0)),
        "log2_reduced": np.log2(np.maximum(reduced, 1.0)),
        "row_fill": reduced / 2.0 ** np.ceil(np.log2(np.maximum(reduced, 1.0))),
        "written_share": written / moved,
        "unordered_share": unordered / moved,
        "l2_share": np.log2(moved / hardware.l2_bytes),
        "uneven": _numbers(rows, "uneven"),
        "log2_computing": np.minimum(np.log2(computing + 1e-3), BOUND),
        **{name: (kind == name).astype(np.float64) for name in KINDS},
    }
    # Rounded, so that no tree splits between kernels that are alike: a vector more or less is no other kernel.
    matrix: Array = np.stack(list(columns.values()), axis=1)
    return list(columns), np.asarray(np.round(matrix, 2), dtype=np.float64)


@dataclass(frozen=True)
class FusedModel:
    """Predicts times of memory-bound kernels on one GPU.

    Attributes:
        hardware: The GPU.
        folder: Where the trees and their manifest lie.
        manifest: What they were fitted on, and how far off they were on kernels held out.
        fitted: The GPU whose kernels the trees were fitted to: on another one, kernels are as far from the bandwidth as there.
        in_step: What kernels take inside a step, beside what they take alone; None where no steps were profiled.
    """

    hardware: HardwareSpec
    folder: Path
    manifest: dict[str, Any]
    fitted: HardwareSpec
    in_step: InStep | None = None

    @cached_property
    def _trees(self) -> Trees:
        path = self.folder / MODEL
        try:
            return Trees(path.read_bytes())
        except (EOFError, OSError) as error:
            raise ValueError(f"{path} is missing or truncated; copy the folder again") from error

    def times(self, rows: Rows) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Times of kernels.

        Args:
            rows: The columns of `COLUMNS`: kind, elements kept and elements reduced for each, bytes read, written, and
                of these read or written across memory; whether it is a reduction of an uneven input (see
                `loka_sim.modelspec.Fused`), and instructions per element (see `instructions_of`).

        Returns:
            Time and both ends of a 90% interval, (rows, 3); and whether the kind was measured, (rows,). The time of another kind
            is that of its bytes at the copy's bandwidth, with an interval up to three times that.
        """
        if missing := set(COLUMNS) - set(rows):
            raise ValueError(f"the frame lacks the columns {sorted(missing)}; a fused kernel needs {', '.join(COLUMNS)}")
        base, kinds = baseline_us(rows, self.hardware), _kinds(rows)
        known: npt.NDArray[np.bool_] = np.isin(kinds, list(self.manifest["kinds"]))
        time = base.copy()
        low, high = base.copy(), 3.0 * base
        if known.any():
            _, matrix = features({name: np.asarray(rows[name])[known] for name in COLUMNS}, self.fitted)
            time[known] = base[known] * np.exp(self._trees.predict(matrix).astype(np.float64))
            factors = np.array([self.manifest["kinds"][kind]["interval_factors"] for kind in kinds[known].tolist()])
            low[known], high[known] = time[known] * factors[:, 0], time[known] * factors[:, 1]
        return np.stack([time, low, high], axis=1), known

    def elsewhere(self, rows: Rows) -> Array:
        """What kernels inside a step take beside the curves of `in_step`, which another GPU's steps may have shown.

        Of the time alone, the part of the bytes that the L2 holds is as fast on both GPUs; the rest is as fast as the memories.
        """
        if self.in_step is None or self.in_step.hardware == self.hardware:
            return np.ones(len(rows["kind"]))
        moved = _numbers(rows, "read_bytes") + _numbers(rows, "written_bytes")
        there = baseline_us(rows, self.in_step.hardware) / baseline_us(rows, self.hardware)
        memory = in_step.from_memory(moved, self.hardware)
        return np.asarray(memory + (1 - memory) * there, dtype=np.float64)

    def predict(self, rows: pd.DataFrame) -> pd.DataFrame:
        """As `times`: columns `time_us`, `low_us`, `high_us` and `measured`."""
        import pandas

        ends, known = self.times(rows)
        columns = dict(zip(("time_us", "low_us", "high_us"), ends.T, strict=True))
        return pandas.DataFrame({**columns, "measured": known}, index=rows.index)


def load(hardware: str | HardwareSpec = "h200", between: bool = True) -> FusedModel:
    """The model of a GPU's memory-bound kernels: its own, or where none was fitted the nearest shipped GPU's under its ceilings.

    Args:
        hardware: A name of `perfmodel.hardware.available()`, or a specification, of a GPU that need not be shipped.
        between: With what they take inside a step.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the hardware is unknown, or the manifest is of another schema version.
    """
    spec = hardware_module.load(hardware) if isinstance(hardware, str) else hardware
    found = hardware_module.fitted(spec, MANIFEST, SCHEMA_VERSION)
    if found is None:
        raise FileNotFoundError(
            f"no memory-bound kernels were fitted on {spec.name} or a GPU like it; "
            f"fit them with: python -m perfmodel.fit_fused --hardware {spec.name}"
        )
    manifest, like = found
    folder = data_folder() / like / "models"
    return FusedModel(spec, folder, manifest, hardware_module.load(like), in_step.load(spec) if between else None)

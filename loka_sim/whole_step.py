"""What a training step holds beside its sites' GEMMs: fused kernels, table updates, the optimizer; bytes and times.

The fused kernels are those of a compiled forward and backward as the specification lists them in bf16, or as `loka_sim.fp8_step`
finds them for a step with FP8 in it, quantization among them. They take the place of the norms, activations and bias gradients
of the dense step, which are among them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from loka_sim.dense_units import dense_tensors
from loka_sim.dispatch.candidates import Row
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.steps import RECIPE, RUN_AS, RUNTIME, as_run
from loka_sim.fusion import BOTH
from loka_sim.loops import ADDED
from loka_sim.modelspec import PASSES, Dim, Fused, ModelSpec, Table
from loka_sim.quantized_loops import FP64, RESCALE, ROUNDED
from loka_sim.step_plan import BACKWARD, FORWARD, OPTIMIZER, TABLE_UPDATE, Piece
from perfmodel import attention
from perfmodel import hardware as hardware_module
from perfmodel.in_step import GEMMS, family, is_counted
from perfmodel.kernels import BF16_BATCHED, KERNELS, of_kernel
from perfmodel.memory_plan import partial_sums, stages
from perfmodel.optimizers import MEASURED_ON, OPTIMIZERS, UNCERTAINTY, step_us

if TYPE_CHECKING:
    from perfmodel.fused import FusedModel
    from perfmodel.hardware import HardwareSpec
    from perfmodel.in_step import InStep

GAP, PARTIALS = "gap", "partials"
# torch's own kernel that adds at indices, behind one that copies what it adds to: microseconds a million values
# (the interaction of two InterFormers, 0.3 to 4.1 million values: 4.3 to 36 us).
INDEX_ADD, ADD_US = "index_add", 8.2


@dataclass(frozen=True)
class Other:
    """Kernels of a step that no site's GEMM launches, all alike.

    Attributes:
        phase: Part of the step, see `loka_sim.step_plan.PHASES`.
        kind: As `Fused.kind`, or `optimizer`, or `gap` of what passes between kernels.
        label: What they compute.
        moved_bytes: Bytes that one of them reads and writes.
        count: Their number.
        time: Of all of them together.
        measured: Learned from measured kernels of the kind; else from the bandwidth alone.
        launches: GPU kernels that all of them are (`launched`), 0 of what others take longer; None for one each.
        called: The time where a host launches the step kernel by kernel and not as a CUDA graph; None where it is the same.
    """

    phase: str
    kind: str
    label: str
    moved_bytes: int
    count: int
    time: Time
    measured: bool
    launches: int | None = None
    called: Time | None = None

    def pieces(self, called: bool = False) -> list[Piece]:
        """As the timeline takes them, of a CUDA graph or as a host calls them."""
        time = self.called if called and self.called is not None else self.time
        one = Time(*(end / self.count for end in time))
        name = f"{self.kind}: {self.label[:60]}"
        details = {"bytes": self.moved_bytes}
        launches = 1 if self.launches is None else self.launches // self.count
        return [Piece(self.phase, name, self.kind, one, None, f"fused {self.kind}", details, launches=launches)] * self.count


def described(kernel: Fused, batch: int) -> dict[str, Any]:
    """A kernel at a batch as `perfmodel.fused` takes it."""
    from perfmodel.fused import instructions_of

    sizes = ("kept", "reduced", "read_bytes", "written_bytes", "unordered_bytes")
    values = {name: max(getattr(kernel, name).at(batch), 0) for name in sizes}
    return {"kind": kernel.kind, **values, "uneven": kernel.uneven, "instructions": instructions_of(kernel.label.split())}


TABLE_LAUNCHES = 2
"""Kernels of a table's dense gradient beside the adding, see `table_gradient`."""


def table_gradient(tables: Iterable[Table], rows: int) -> list[Fused]:
    """What torch's dense gradients of embedding tables cost beside the adding: FP32 filled, then cast to bf16.

    Args:
        tables: The model's.
        rows: Rows of the largest table; larger ones are cut, as a benchmark does whose tables must fit.
    """
    found = []
    for table in tables:
        elements = min(table.rows, rows) * table.dim
        nothing = Dim(0)
        found.append(Fused(BACKWARD, "fill", "gradient of a table", Dim(elements), Dim(1), nothing, Dim(4 * elements), nothing))
        found.append(
            Fused(
                BACKWARD, "pointwise", "gradient of a table", Dim(elements), Dim(1), Dim(4 * elements), Dim(2 * elements), nothing
            )
        )
    return found


LOSS_LAUNCHES = 14
"""Kernels of torch's log loss of bf16 logits, forward and backward together (torch 2.11)."""


def log_loss() -> list[Fused]:
    """What a loss outside the compiled model launches: that of binary labels, each kernel over the batch in FP32."""
    size = Dim(0, 4)
    return [
        Fused(phase, "pointwise", "log loss", Dim(0, 1), Dim(1), size, size, Dim(0), count=LOSS_LAUNCHES // 2)
        for phase in (FORWARD, BACKWARD)
    ]


def table_update(tables: Iterable[Table], batch: int, optimizer: str) -> list[Fused]:
    """Rows that a step looked up, updated in place with their optimizer's state, as a fused embedding library does."""
    state = OPTIMIZERS[optimizer].state_bytes
    found = []
    for table in tables:
        elements = min(table.rows, round(table.lookups * batch)) * table.dim
        if elements:
            read, written = Dim((2 + 2 + state // 2) * elements), Dim((2 + state // 2) * elements)
            found.append(Fused(TABLE_UPDATE, "scatter", "rows of a table", Dim(elements), Dim(1), read, written, Dim(0)))
    return found


def optimizer_step(sizes: Sequence[int], optimizer: str, hardware: HardwareSpec) -> list[Other]:
    """One step over parameters of so many elements, by torch's fused kernels over lists of tensors."""
    parameters = sum(sizes)
    if not parameters:
        return []
    kind = OPTIMIZERS[optimizer]
    faster = hardware.copy_bandwidth_tbs / hardware_module.load(MEASURED_ON).copy_bandwidth_tbs
    us = step_us(sizes, optimizer, replace(kind, bandwidth_tbs=faster * kind.bandwidth_tbs))
    moved = (kind.read_bytes + kind.written_bytes) * parameters
    return [Other(OPTIMIZER, "optimizer", optimizer, moved, 1, Time(us, us / (1 + UNCERTAINTY), us * (1 + UNCERTAINTY)), True)]


def with_partial_sums(kernels: Iterable[Fused], batch: int) -> list[Fused]:
    """Kernels, and behind those that sum both ways what adds up the parts that they leave of their sums over all rows."""
    found = []
    for kernel in kernels:
        found.append(kernel)
        if kernel.kind == BOTH:
            sizes = described(kernel, batch)
            columns = sizes["reduced"]
            ((parts,), (number,)) = partial_sums([sizes["kept"]], [columns], [sizes["written_bytes"]])
            kept, reduced, read, written, unordered = (
                Dim(int(size)) for size in (columns, parts, 4 * parts * columns, 4 * columns, 0)
            )
            count = kernel.count * int(number)
            found.append(Fused(kernel.phase, PARTIALS, "sum", kept, reduced, read, written, unordered, count=count))
    return found


def others(kernels: Iterable[Fused], batch: int, model: FusedModel) -> list[Other]:
    """Kernels with their predicted times, sums of parts (`with_partial_sums`) among them.

    Args:
        kernels: Of a specification, and of the functions above.
        batch: Samples per GPU.
        model: Times of memory-bound kernels.
    """
    kernels = with_partial_sums(kernels, batch)
    if not kernels:
        return []
    described_all = [described(kernel, batch) for kernel in kernels]
    rows = {name: [each[name] for each in described_all] for name in described_all[0]}
    ends, measured = model.times(rows)
    moved = np.array(rows["read_bytes"]) + np.array(rows["written_bytes"])
    if model.in_step is not None:
        sizes = zip(kernels, rows["kept"], rows["unordered_bytes"], strict=True)
        ends = _in_step(model.in_step, [family(kernel.kind, kernel.label, *size) for kernel, *size in sizes], moved, ends)
        ends = ends * model.elsewhere(rows)[:, None]
    attends = attention.load(model.hardware)
    for index, kernel in enumerate(kernels):
        if kernel.kind in attention.KINDS and attends is not None:
            ends[index], measured[index] = attends.times(kernel.kind, kernel.label, int(rows["kept"][index])), True
    adds = np.array([kernel.label == INDEX_ADD for kernel in kernels])
    if adds.any():
        read, written = (np.array(rows[name], dtype=float)[adds] for name in ("read_bytes", "written_bytes"))
        added = ADD_US * np.maximum(read - written, 0) / 2e6
        ends[adds] = (2.0 + 2 * written / (model.hardware.copy_bandwidth_tbs * 1e6) + added)[:, None] * (1.0, 0.7, 1.4)
    return [
        Other(k.phase, k.kind, k.label, int(size), k.count, Time(*(k.count * end).tolist()), bool(known), int(number))
        for k, size, end, known, number in zip(kernels, moved, ends, measured, _launches(kernels, rows), strict=True)
    ]


def _in_step(model: InStep, families: Sequence[str], moved: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Times and ends inside a step: those of a family are off together, which is less than each by itself."""
    us = ends[:, 0] * model.fused(families, moved)
    shares = [model.off.get(name) for name in families]
    below, above = (np.array([other if share is None else share for share, other in zip(shares, alone, strict=True)])
                    for alone in (1 - ends[:, 1] / ends[:, 0], ends[:, 2] / ends[:, 0] - 1))  # fmt: skip
    return np.stack([us, us * np.maximum(1 - below, 0.0), us * (1 + above)], axis=1)


# A row's adds follow one another: tables of 3 to 14 rows took so much longer a sample in profiled steps than those of thousands
# (dcnv2-production at batches 2,048 and 8,192, H200); power-law ids over 10,000 rows 0.012 us (families `table_gradient*`).
CONFLICT_US = 0.009


def conflicts(tables: Iterable[Table], batch: int) -> list[Other]:
    """What gradients lose that meet in the same rows of small tables, ids spread evenly over the rows."""
    us = sum(CONFLICT_US * table.lookups * batch / table.rows for table in tables)
    label = "adds to the same rows of tables"
    return [Other(BACKWARD, "scatter", label, 0, 1, Time(us, 0.5 * us, 2.0 * us), True, 0)] if us > 1 else []


def by_kind(found: Iterable[Other], phases: Sequence[str] = (FORWARD, BACKWARD)) -> dict[str, Time]:
    """Total of each kind's kernels in these parts of a step: kernels of a kind are off together, so that their ends add."""
    sums: dict[str, np.ndarray] = {}
    for other in found:
        if other.phase in phases:
            sums[other.kind] = sums.get(other.kind, np.zeros(3)) + np.array(other.time)
    return {kind: Time(*total.tolist()) for kind, total in sums.items()}


@lru_cache(maxsize=4)
def _times(hardware: HardwareSpec) -> FusedModel | None:
    """Times of memory-bound kernels under a GPU's own ceilings; None where those of no GPU like it are known."""
    from perfmodel import fused

    try:
        return fused.load(hardware)
    except FileNotFoundError:
        return None


def borrowed(hardware: HardwareSpec) -> dict[str, list[str]]:
    """What of `of_step` was not measured on a GPU: by the name of the shipped GPU that it was measured on, in words."""
    model = _times(hardware)
    found: dict[str, list[str]] = {}
    if model is not None:
        kernels = [("the whole step's fused kernels", model.fitted.name)]
        between = [] if model.in_step is None else [("what changes inside a step", model.in_step.hardware.name)]
        for what, name in (*kernels, *between, ("the optimizer", MEASURED_ON)):
            if name != hardware.name:
                found.setdefault(name, []).append(what)
    return found


def as_run_by(runner: str, times: Times, hardware: HardwareSpec) -> Times:
    """Launches as what runs them has them: torchao multiplies some GEMMs' scales by a kernel behind another GEMM (`RUN_AS`).

    Args:
        runner: `dispatch.steps.RECIPE`, `EXPORT` or `RUNTIME`.
        times: Of each launch by itself.
        hardware: The GPU.
    """
    runs = [(row, as_run(row, times.of)) for row in times.of if row.kernel in RUN_AS and runner != RUNTIME]
    if not (runs := [(row, instead) for row, instead in runs if instead != row]):
        return times
    gemms = np.array([times.of[instead] for _, instead in runs])
    behind = _rescaled(np.array([row.m for row, _ in runs]), np.array([row.n for row, _ in runs]), runner, hardware)
    us = gemms[:, 0] + behind[:, 0]
    below, above = (np.hypot(gemms[:, 0] - gemms[:, end], behind[:, 0] - behind[:, end]) for end in (1, 2))
    ends = np.stack([us, us - below, us + above], axis=1).tolist()
    return replace(times, of={**times.of, **{row: Time(*end) for (row, _), end in zip(runs, ends, strict=True)}})


def _rescaled(m: np.ndarray, n: np.ndarray, runner: str, hardware: HardwareSpec) -> np.ndarray:
    """Times and ends of the kernels that multiply the scales of rows and columns to bf16 matrices, (matrices, 3)."""
    from perfmodel import fused

    elements, nothing = m * n, np.zeros(len(m))
    rows = {
        "kind": np.full(len(m), "pointwise"), "kept": elements, "reduced": np.ones(len(m)),
        "read_bytes": 2 * elements + 4 * (m + n), "written_bytes": 2 * elements, "unordered_bytes": nothing, "uneven": nothing,
        "instructions": np.full(len(m), fused.instructions_of({"mul", *RESCALE[ROUNDED if runner == RECIPE else FP64]})),
    }  # fmt: skip
    model = _times(hardware)
    if model is None:
        us = fused.baseline_us(rows, hardware)
        return np.stack([us, us, 3.0 * us], axis=1)
    return model.times(rows)[0]


def gemms_in_step(times: Mapping[Row, Time], hardware: HardwareSpec) -> tuple[dict[Row, Time], dict[bool, float]]:
    """Launches as they run between the other kernels of a step, and by which share FP8 GEMMs, and others, may be off together.

    Args:
        times: Of each launch alone; of what is no GEMM they stay.
        hardware: The GPU.
    """
    model = _times(hardware)
    if model is None or model.in_step is None:
        return dict(times), {}
    gemms = [row for row in times if KERNELS[row.kernel].kind == "gemm" or of_kernel(row.kernel) == BF16_BATCHED]
    ends = np.array([times[row] for row in gemms]).reshape(-1, 3)
    batched = np.array([bool(is_counted(row.kernel, row.m, row.n, row.k)) for row in gemms], dtype=bool)
    factors = model.in_step.gemms([KERNELS[row.kernel].is_fp8 for row in gemms], ends[:, 0])
    inside = np.where(batched, model.in_step.batched(ends[:, 0]), factors)[:, None] * ends
    between = {row: Time(*time) for row, time in zip(gemms, inside.tolist(), strict=True)}
    off = {bool(fp8): model.in_step.off.get(name, 0.0) for fp8, name in enumerate(GEMMS)}
    return {**times, **between}, off


def launched(kernels: Iterable[Fused], batch: int) -> int:
    """GPU kernels that fused ones are.

    Cut reductions are several, what adds at indices copies first what it adds to, a sum of parts is cast behind it, and what a
    product reads of its bias is none.
    """
    every = with_partial_sums(kernels, batch)
    sizes = [described(kernel, batch) for kernel in every]
    return int(_launches(every, {name: [size[name] for size in sizes] for name in sizes[0]}).sum()) if every else 0


def _launches(kernels: Sequence[Fused], rows: Mapping[str, Sequence[Any]]) -> np.ndarray:
    each = [0 if kernel.label == ADDED else 1 + (kernel.label == INDEX_ADD or kernel.kind == PARTIALS) for kernel in kernels]
    counts = np.array([kernel.count for kernel in kernels], dtype=np.int64) * each
    return counts * stages(*(rows[name] for name in ("kind", "kept", "reduced", "written_bytes")))


def batched_products(spec: ModelSpec, passes: Container[str] = PASSES) -> int:
    """Products of a step that are many in one."""
    return sum(gemm.groups.at(spec.batch) > 1 for site in spec.sites for name, gemm in site.passes.items() if name in passes)


def launches_of_step(spec: ModelSpec, found: Iterable[Other]) -> int:
    """What a host launches for a forward and backward: kernels, and the nodes of a CUDA graph that stand before some.

    Args:
        spec: The model, at the batch asked for.
        found: What the step holds beside its GEMMs.
    """
    beside = [other for other in found if other.phase in (FORWARD, BACKWARD)]
    number = sum(other.count if other.launches is None else other.launches for other in beside)
    # A batched product has a node of its own before it.
    return number + sum(len(site.passes) for site in spec.sites) + batched_products(spec)


CALLED_GAP_US = 3.0
"""Between two kernels that a host launches one by one, ahead of the GPU.

2.8 to 3.2 in five profiled steps of Wukong and InterFormer at a batch of 2,048, in bf16 and as decided, on an H100 and an H200,
of kernels as `launched` counts them, 5.3 in one on a busier host (`benchmarks/step_on_gpus.py`, `idle_us` of `compute`).
"""


def between_us(found: Iterable[Other], model: InStep) -> float:
    """Microseconds that pass behind these kernels in a CUDA graph."""
    each = np.array([(other.launches or 0, other.time.us) for other in found]).reshape(-1, 2)
    number, us = each[each[:, 0] > 0].T
    return float((number * model.gaps_us(us / number)).sum())


def gaps(found: Sequence[Other], spec: ModelSpec, model: InStep | None) -> list[Other]:
    """What passes between the kernels of a forward and a backward, those beside the GEMMs given; GEMMs have whole gaps."""
    gap: list[Other] = []
    if model is None:
        return gap
    for phase, passes in ((FORWARD, {"output"}), (BACKWARD, set(PASSES) - {"output"})):
        beside = [other for other in found if other.phase == phase]
        products = sum(len(passes & set(site.passes)) for site in spec.sites)
        batched_us = batched_products(spec, passes) * model.batched_gap_us
        us = products * model.gap_us + between_us(beside, model) + batched_us
        called_us = (products + sum(other.launches or 0 for other in beside)) * CALLED_GAP_US + batched_us
        if us:
            time, called = (Time(us, 0.5 * us, 1.5 * us) for us in (us, called_us))
            gap.append(Other(phase, GAP, "between kernels", 0, 1, time, True, 0, called))
    return gap


def of_step(
    spec: ModelSpec,
    hardware: HardwareSpec,
    optimizer: str = "adamw",
    kernels: Sequence[Fused] | None = None,
) -> tuple[Other, ...]:
    """Everything beside the sites' GEMMs in a training step of one GPU; nothing where the specification lists no kernels.

    Args:
        spec: The model, at the batch asked for.
        hardware: The GPU; without any timings of memory-bound kernels nothing is known either.
        optimizer: Of the dense parameters and of the tables' rows: a key of `perfmodel.optimizers.OPTIMIZERS`.
        kernels: Of the forward and backward; None for the specification's, in bf16.
    """
    if not spec.fused:
        return ()
    model = _times(hardware)
    if model is None:
        return ()
    step = spec.fused if kernels is None else kernels
    every = [*step, *table_update(spec.tables, spec.batch, optimizer)]
    adds = any(kernel.kind == "scatter" for kernel in spec.fused)
    found = [*others(every, spec.batch, model), *(conflicts(spec.tables, spec.batch) if adds else [])]
    found += gaps(found, spec, model.in_step)
    return (*found, *optimizer_step(dense_tensors(spec), optimizer, hardware))

"""What each pass of a site may run, and what each choice launches: GEMMs, quantization, layout changes.

The three passes of a site with output (M, N, K) read three tensors: x (M, K), w (N, K), g (M, N), the last
being the output's gradient. Each tensor is read twice, contracted along its columns by one pass and along
its rows by another:

    output       (M, N, K)   left x, right w                  both along their columns
    grad_input   (M, K, N)   left g, right w transposed
    grad_weight  (N, K, M)   left g transposed, right x transposed

so quantized operands can be shared between passes: a decision is about a site, not about a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from loka_sim.modelspec import PASSES, Site
from perfmodel.kernels import GEMM_KERNELS, KERNELS

BF16 = "torch/bf16"
BF16_BATCHED = "torch/bf16_batched"
FP8_KERNELS = tuple(name for name in GEMM_KERNELS if KERNELS[name].is_fp8 and KERNELS[name].library == "torch")

Assignment = Mapping[str, str]
"""Kernel name per pass."""


class Row(NamedTuple):
    """One kernel launch as the time model takes it; quantize, layout and pointwise kernels have n = 1."""

    kernel: str
    m: int
    n: int
    k: int
    groups: int = 1


class Use(NamedTuple):
    """One operand of a pass: which tensor, and whether it is contracted along the tensor's rows."""

    tensor: str
    transposed: bool


OPERANDS: dict[str, tuple[Use, Use]] = {
    "output": (Use("x", False), Use("w", False)),
    "grad_input": (Use("g", False), Use("w", True)),
    "grad_weight": (Use("g", True), Use("x", True)),
}
"""Left and right operand of each pass."""

TRANSPOSE = "torch/transpose_e4m3"

TRANSPOSABLE = frozenset({"torch/quantize_tensorwise", "torch/quantize_block128x128"})
"""Quantizers whose result, transposed, is the transposed tensor's own quantization (the scales' blocks are
square), so that a second reading costs a transposition of 8-bit values. Row and 1x128 scales belong to one
direction: the other needs a quantization of its own."""


def producers(quantizer: str, orientations: frozenset[bool]) -> dict[bool, str]:
    """Kernels that make a tensor's quantized readings: False as stored, True transposed.

    Args:
        quantizer: Name of the quantizer that reads the tensor as stored.
        orientations: Which readings are needed.

    Returns:
        The kernel that each needed reading adds.
    """
    both = len(orientations) == 2
    transposed = TRANSPOSE if both and quantizer in TRANSPOSABLE else f"{quantizer}_transposed"
    return {flag: transposed if flag else quantizer for flag in orientations}


@dataclass(frozen=True)
class SiteShape:
    """A site's GEMMs at one batch; what a decision depends on beside accuracy.

    Attributes:
        passes: (name, m, n, k, groups) of the passes the model computes, in the order they run.
        stored_transposed: Tensors of x, w, g that the model stores with their rows contiguous, as (K, M)
            for x, (K, N) for w and (N, M) for g.
    """

    passes: tuple[tuple[str, int, int, int, int], ...]
    stored_transposed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, site: Site, batch: int) -> SiteShape:
        """A site of a model at a batch per GPU, in samples."""
        passes = tuple(
            (name, *site.passes[name].shape(batch), site.passes[name].groups.at(batch)) for name in PASSES if name in site.passes
        )
        output = site.passes["output"]
        stored = {tensor for tensor, flag in (("x", output.layout_a == "column"), ("w", output.layout_b == "row")) if flag}
        if "grad_input" in site.passes and site.passes["grad_input"].layout_a == "column":
            stored.add("g")
        return cls(passes, frozenset(stored))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the passes."""
        return tuple(entry[0] for entry in self.passes)

    def gemm(self, name: str) -> tuple[int, int, int, int]:
        """(m, n, k, groups) of a pass."""
        return next(entry[1:] for entry in self.passes if entry[0] == name)

    def tensor(self, tensor: str) -> tuple[int, int]:
        """Rows and columns of x (M, K), w (N, K) or g (M, N) as the model stores it."""
        m, n, k, _ = self.gemm("output")
        rows, columns = {"x": (m, k), "w": (n, k), "g": (m, n)}[tensor]
        return (columns, rows) if tensor in self.stored_transposed else (rows, columns)

    def bf16(self) -> dict[str, str]:
        """The assignment that leaves every pass in bf16."""
        return {name: BF16_BATCHED if groups != 1 else BF16 for name, _, _, _, groups in self.passes}


@cache
def illegal(shape: SiteShape, name: str, kernel: str, capability: tuple[int, int] = (9, 0)) -> str | None:
    """Why a pass cannot run a kernel, in words; None when it can.

    The quantizers that the kernel needs must be legal too.
    """
    m, n, k, groups = shape.gemm(name)
    spec = KERNELS[kernel]
    if groups != 1 and spec.kind != "batched_gemm":
        return f"{groups} GEMMs in one batched call, and {kernel} has no batched form"
    if groups == 1 and spec.kind == "batched_gemm":
        return f"{kernel} is for batched calls"
    reason = spec.illegal(m, n, k, capability)
    if reason or not spec.is_fp8:
        return reason
    for row in launches(shape, {name: kernel})[name]:
        reason = KERNELS[row.kernel].illegal(row.m, row.n, row.k, capability)
        if reason:
            return f"{row.kernel}: {reason}"
    return None


def legal_fp8(shape: SiteShape, name: str, capability: tuple[int, int] = (9, 0)) -> tuple[str, ...]:
    """FP8 kernels that a pass may run."""
    return tuple(kernel for kernel in FP8_KERNELS if illegal(shape, name, kernel, capability) is None)


def launches(shape: SiteShape, assignment: Assignment) -> dict[str, tuple[Row, ...]]:
    """Every kernel that an assignment launches, under the pass that needs it: its GEMM first.

    A quantizer stands under the pass that reads its result, a transposition of a shared result under the
    pass that reads it transposed; so the passes' rows add up to the site's, none counted twice.

    Args:
        shape: The site.
        assignment: Kernel per pass; passes left out launch nothing.
    """
    rows = {name: [Row(kernel, *shape.gemm(name))] for name, kernel in assignment.items()}
    readings: dict[tuple[str, str], dict[bool, str]] = {}
    for name, kernel in assignment.items():
        spec = KERNELS[kernel]
        for quantizer, use in zip((spec.quantize_a, spec.quantize_b), OPERANDS[name], strict=True):
            if quantizer is not None:
                as_stored = use.transposed != (use.tensor in shape.stored_transposed)
                readings.setdefault((use.tensor, quantizer), {})[as_stored] = name
    for (tensor, quantizer), readers in readings.items():
        height, width = shape.tensor(tensor)
        for orientation, kernel in producers(quantizer, frozenset(readers)).items():
            rows[readers[orientation]].append(Row(kernel, height, 1, width))
    return {name: tuple(launched) for name, launched in rows.items()}


def shared_tensors(shape: SiteShape, assignment: Assignment, name: str) -> tuple[str, ...]:
    """Tensors of x, w, g whose quantization a pass shares with another pass of the assignment."""

    def readings(kernel: str, which: str) -> dict[str, str]:
        quantizers = (KERNELS[kernel].quantize_a, KERNELS[kernel].quantize_b)
        return {use.tensor: q for q, use in zip(quantizers, OPERANDS[which], strict=True) if q in TRANSPOSABLE}

    others = [readings(kernel, other) for other, kernel in assignment.items() if other != name]
    own = readings(assignment[name], name)
    return tuple(tensor for tensor, q in own.items() if any(other.get(tensor) == q for other in others))


def possible_rows(shape: SiteShape, capability: tuple[int, int] = (9, 0)) -> set[Row]:
    """Every row that some assignment of legal kernels may launch, bf16 included."""
    found = {Row(kernel, *shape.gemm(name)) for name, kernel in shape.bf16().items()}
    tensors: dict[tuple[str, str], set[bool]] = {}
    for name in shape.names:
        for kernel in legal_fp8(shape, name, capability):
            found.add(Row(kernel, *shape.gemm(name)))
            spec = KERNELS[kernel]
            for quantizer, use in zip((spec.quantize_a, spec.quantize_b), OPERANDS[name], strict=True):
                assert quantizer is not None
                as_stored = use.transposed != (use.tensor in shape.stored_transposed)
                tensors.setdefault((use.tensor, quantizer), set()).add(as_stored)
    for (tensor, quantizer), orientations in tensors.items():
        height, width = shape.tensor(tensor)
        wanted = [frozenset({flag}) for flag in orientations]
        if len(orientations) == 2:
            wanted.append(frozenset(orientations))
        for some in wanted:
            found.update(Row(kernel, height, 1, width) for kernel in producers(quantizer, some).values())
    return found

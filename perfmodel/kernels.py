"""Kernel names, what each computes, and where each is legal. A recipe is a string here.

The name joins the floors: perfmodel times it, numerics judges its recipe, hil runs it, Dispatch chooses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Layout = tuple[str, ...]
"""Of operand a (M, K) and of b (K, N): `row` or `column`, by what lies next to each other; behind them `bias` if one is added."""

K_FASTEST: Layout = ("row", "column")
ACROSS: tuple[Layout, ...] = (("row", "row"), ("column", "row"), ("column", "column"))
"""Layouts of bf16 products that read an operand across, as gradients do: of an input b, of a weight both."""
BIASED: Layout = (*K_FASTEST, "bias")
"""A layer's output to which the kernel itself adds a bias for each column: cuBLAS has others for it, and chooses otherwise."""


@dataclass(frozen=True)
class KernelSpec:
    """One kernel family.

    Attributes:
        name: `library/what`, the key in timing files, models and dispatch tables.
        kind: `gemm`, `batched_gemm`, `linear` (forward and backward of one linear layer), `quantize` (bf16 in, e4m3 and
            scales out), `layout` or `pointwise`.
        recipe_a: Recipe of the left operand (M, K), for `numerics.Recipe.parse`; bf16 for none.
        recipe_b: Recipe of the right operand, stored (N, K).
        accumulation: `hopper_fast`, `hopper_split` or `fp32` (see `numerics.fp8_matmul`).
        takes_a: What the left operand of an FP8 GEMM must be: its scaling, and the order of the scales where that matters. A
            quantizer whose `makes` is the same fits, whatever its library; None for bf16.
        takes_b: Of the right operand likewise.
        makes: What a quantizer's result is, in the same words; None for other kernels, and where no GEMM may take it unasked.
        readings: How a quantizer's result lies, and what its scales run along: `False` for (rows, columns) as the tensor is
            stored, `True` for (columns, rows). A kernel of two makes both from one read.
        multiple_m: M must be a multiple of this; likewise N and K.
        most_k: The largest K; None for any.
        most_groups: Products that one call takes at most; None for any number.
        min_capability: Least CUDA compute capability.
        requires: The distribution that it comes from, as a PEP 508 requirement; None where torch and triton are enough.
        module: What is imported to run it; None likewise.
        of: The kernel that is the same product with K fastest in both operands and no bias, for one that reads an operand across
            or adds a bias; else None.
        layout: How the operands of a bf16 product lie: `row` or `column`, as in `loka_sim.modelspec.Gemm`; `BIASED` says that a
            bias is added, too. FP8 takes K fastest.
    """

    name: str
    kind: str
    recipe_a: str | None = None
    recipe_b: str | None = None
    accumulation: str = "fp32"
    takes_a: str | None = None
    takes_b: str | None = None
    makes: str | None = None
    readings: tuple[bool, ...] = ()
    multiple_m: int = 1
    multiple_n: int = 1
    multiple_k: int = 1
    most_k: int | None = None
    most_groups: int | None = None
    min_capability: tuple[int, int] = (8, 0)
    requires: str | None = None
    module: str | None = None
    of: str | None = None
    layout: Layout = K_FASTEST

    @property
    def across(self) -> bool:
        """Whether it is a bf16 product that reads an operand across or adds a bias: its times follow from what it is `of`."""
        return self.of is not None

    @property
    def is_fp8(self) -> bool:
        """Whether the operands are FP8."""
        return self.recipe_a is not None and self.recipe_a != "bf16"

    def illegal(self, m: int, n: int, k: int, capability: tuple[int, int] = (9, 0), groups: int = 1) -> str | None:
        """Why this kernel cannot run `groups` (m, n, k) GEMMs on that hardware; None when it can."""
        if capability < self.min_capability:
            return f"{self.name} needs compute capability {self.min_capability[0]}.{self.min_capability[1]}"
        for letter, size, multiple in (("M", m, self.multiple_m), ("N", n, self.multiple_n), ("K", k, self.multiple_k)):
            if size % multiple:
                return f"{letter} = {size} is no multiple of {multiple}"
        if self.most_k is not None and k > self.most_k:
            return f"K = {k} is more than {self.most_k}"
        if self.most_groups is not None and groups > self.most_groups:
            return f"{groups} groups are more than {self.most_groups}"
        return None


def library_of(kernel: str) -> str:
    """Whose a kernel is: the part of its name before the slash."""
    return kernel.partition("/")[0]


BF16, BF16_BATCHED = "torch/bf16", "torch/bf16_batched"
BY_ROWS = "block1x128"
"""1 x 128 blocks whose scales lie as the blocks do, (rows, columns / 128) row-major."""
BY_COLUMNS = "block1x128, rows fastest"
"""1 x 128 blocks with the row as the fastest index of their scales, as cuBLAS and DeepGEMM take them."""
SQUARE = ("tensorwise", "block128x128")
"""What a GEMM takes that stays right when it is transposed: the scales' blocks are as wide as high. Row and 1x128 scales belong
to one direction; the other needs a quantization of its own."""

_BLOCK128: dict[str, Any] = {"multiple_n": 128, "multiple_k": 128}
_FBGEMM: dict[str, Any] = {"requires": "fbgemm-gpu-genai>=1.0", "module": "fbgemm_gpu"}
_TORCHAO: dict[str, Any] = {"requires": "torchao>=0.17", "module": "torchao"}
_DEEPGEMM: dict[str, Any] = {"requires": "deep-gemm @ git+https://github.com/deepseek-ai/DeepGEMM", "module": "deep_gemm"}
_TE: dict[str, Any] = {"requires": "transformer-engine>=2.3", "module": "transformer_engine"}


def _fp8(name: str, scaling: str, accumulation: str, **fields: Any) -> KernelSpec:
    """An FP8 GEMM that scales both operands alike; the fields of `KernelSpec` that differ from cuBLAS' may follow."""
    fields = {"multiple_n": 16, "multiple_k": 16, **fields}
    return KernelSpec(
        name, "gemm", f"e4m3/{scaling}", f"e4m3/{scaling}", f"hopper_{accumulation}", scaling, scaling,
        min_capability=(9, 0), **fields,
    )  # fmt: skip


def _block128(name: str, **fields: Any) -> KernelSpec:
    """An FP8 GEMM of 1x128 by 128x128 blocks."""
    return KernelSpec(
        name, "gemm", "e4m3/block1x128", "e4m3/block128x128", "hopper_split", BY_COLUMNS, "block128x128",
        min_capability=(9, 0), **_BLOCK128, **fields,
    )  # fmt: skip


def _grouped(accumulation: str) -> KernelSpec:
    """`torch._scaled_grouped_mm` of equal groups, scaled by rows."""
    return KernelSpec(
        f"torch/fp8_grouped_rowwise_{accumulation}", "batched_gemm", "e4m3/rowwise", "e4m3/rowwise", f"hopper_{accumulation}",
        "rowwise", "rowwise", multiple_n=16, multiple_k=16, most_groups=1023, min_capability=(9, 0),
    )  # fmt: skip


def _linear(name: str, recipe: str | None = None, **fields: Any) -> KernelSpec:
    """Forward and backward of a linear layer: (m, k) by (n, k), every size a multiple of 16 where it is FP8."""
    multiples: dict[str, Any] = dict.fromkeys(("multiple_m", "multiple_n", "multiple_k"), 16) if recipe else {}
    capability = (9, 0) if recipe else (8, 0)
    return KernelSpec(name, "linear", recipe or "bf16", recipe or "bf16", min_capability=capability, **multiples, **fields)


def of_kernel(kernel: str) -> str:
    """The kernel that a name is of with K fastest in both operands: itself, but for bf16 products that read one across."""
    spec = KERNELS.get(kernel)
    return kernel if spec is None or spec.of is None else spec.of


def laid(kernel: str, layout: Layout) -> str:
    """The kernel that is a bf16 product (`BF16`, `BF16_BATCHED`) of operands that lie so; with a bias, single products alone."""
    if layout == BIASED:
        return f"{kernel}_bias"
    return kernel if layout == K_FASTEST else f"{kernel}_{'_'.join(layout)}"


def _bf16() -> tuple[KernelSpec, ...]:
    """Products in bf16 by cuBLAS, single and batched, in each layout of their operands, and with a bias."""
    return tuple(
        KernelSpec(laid(name, layout), kind, "bf16", "bf16", of=None if layout == K_FASTEST else name, layout=layout)
        for name, kind, layouts in (
            (BF16, "gemm", (K_FASTEST, *ACROSS, BIASED)),
            (BF16_BATCHED, "batched_gemm", (K_FASTEST, *ACROSS)),
        )
        for layout in layouts
    )


_READINGS = {"": (False,), "_transposed": (True,), "_dual": (False, True)}


def _quantizers(library: str, suffix: str = "") -> tuple[KernelSpec, ...]:
    """One for every scaling. Row-major bf16 (rows, cols) in; e4m3 and FP32 scales out.

    `_transposed`: the e4m3 result is (cols, rows) row-major and scaled along rows, as grad_weight needs it. `_dual`: both
    results from one kernel. torch's 1 x 128 scales are made as cuBLAS takes them.
    """

    def quantizer(scaling: str, makes: str = "", **multiples: Any) -> KernelSpec:
        name = f"{library}/quantize_{scaling}{suffix}"
        return KernelSpec(name, "quantize", makes=makes or scaling, readings=_READINGS[suffix], **multiples)

    return (
        quantizer("tensorwise"),
        quantizer("rowwise"),
        quantizer(
            "block1x128", BY_COLUMNS if library == "torch" else BY_ROWS,
            multiple_m=128 if suffix else 1, multiple_k=1 if (library, suffix) == ("torch", "_transposed") else 128,
        ),
        quantizer("block128x128", multiple_m=128, multiple_k=128),
    )  # fmt: skip


KERNELS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        *_bf16(),
        # cuBLAS and CUTLASS, through torch._scaled_mm.
        *(_fp8(f"torch/fp8_{s}_{how}", s, how) for s in ("tensorwise", "rowwise") for how in ("fast", "split")),
        _block128("torch/fp8_block128", multiple_m=4),
        _grouped("fast"),
        _grouped("split"),
        # Our own, in Triton, for outputs so small that the above leave most of the GPU idle.
        *(_fp8(f"loka/fp8_{s}_{how}", s, how, multiple_n=1) for s in ("tensorwise", "rowwise") for how in ("fast", "split")),
        _fp8("fbgemm/fp8_rowwise_fast", "rowwise", "fast", **_FBGEMM),
        _fp8("fbgemm/fp8_rowwise_split", "rowwise", "split", **_FBGEMM),
        # Tiles of 128 x 128 on both sides.
        replace(_block128("fbgemm/fp8_block128", **_FBGEMM), recipe_a="e4m3/block128x128", takes_a="block128x128",
                multiple_m=128),
        _block128("deepgemm/fp8_block128", **_DEEPGEMM),
        # Whole layers, as a user would convert them.
        _linear("torch/linear_bf16"),
        _linear("torchao/linear_tensorwise", "e4m3/tensorwise", **_TORCHAO),
        _linear("torchao/linear_rowwise", "e4m3/rowwise", **_TORCHAO),
        _linear("torchao/linear_rowwise_gw_hp", "e4m3/rowwise", **_TORCHAO),
        _linear("transformer_engine/linear_fp8_delayed", "e4m3/tensorwise", **_TE),
        _linear("transformer_engine/linear_fp8_current", "e4m3/tensorwise", **_TE),
        _linear("transformer_engine/linear_fp8_block", "e4m3/block1x128", **_TE),
        # Quantization, compiled by torch.compile; in our own kernels; in FBGEMM's.
        *_quantizers("torch"),
        *_quantizers("torch", "_transposed"),
        *_quantizers("loka"),
        *_quantizers("loka", "_transposed"),
        *_quantizers("loka", "_dual"),
        # The amax of an earlier step scales it, and its own amax comes out for the next. Another scale, another error: not taken
        # in place of the others.
        KernelSpec("loka/quantize_tensorwise_delayed", "quantize", readings=(False,)),
        KernelSpec("fbgemm/quantize_tensorwise", "quantize", makes="tensorwise", readings=(False,), **_FBGEMM),
        # A row lies in 48 KiB of shared memory beside 128 bytes: 22,272 values are taken, of 29,184 the launch fails (1.6.0).
        KernelSpec(
            "fbgemm/quantize_rowwise", "quantize", makes="rowwise", readings=(False,), multiple_k=4, most_k=24512, **_FBGEMM
        ),
        # e4m3 (rows, cols) in, e4m3 (cols, rows) out.
        KernelSpec("torch/transpose_e4m3", "layout"),
        # bf16 (rows, cols) in and out, compiled. An activation behind a norm fuses into it.
        *(
            KernelSpec(f"torch/{what}_{direction}", "pointwise")
            for what in ("layernorm", "rmsnorm", "blocknorm", "relu", "silu", "hardswish")
            for direction in ("forward", "backward")
        ),
        # Gradient of a bias: bf16 (rows, cols) summed over rows.
        KernelSpec("torch/bias_backward", "pointwise"),
    )
}  # fmt: skip

# Kinds of kernels that are bound by memory.
MEMORY_KINDS = ("quantize", "layout", "pointwise")
# Those that are learned by themselves.
GEMM_KERNELS = tuple(name for name, spec in KERNELS.items() if spec.kind == "gemm" and not spec.across)

LIBRARIES = tuple(dict.fromkeys(map(library_of, KERNELS)))

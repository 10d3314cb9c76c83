"""Kernel names, what each computes, and where each is legal. A recipe is a string here.

The name joins the floors: perfmodel times it, numerics judges its recipe, hil runs it, Dispatch chooses it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSpec:
    """One kernel family.

    Attributes:
        name: `library/what`, the key in timing files, models and dispatch tables.
        kind: `gemm`, `batched_gemm`, `quantize` (bf16 in, e4m3 and scales out), `layout` or `pointwise`.
        recipe_a: Recipe of the left operand (M, K), for `numerics.Recipe.parse`; bf16 for none.
        recipe_b: Recipe of the right operand, stored (N, K).
        accumulation: `hopper_fast`, `hopper_split` or `fp32` (see `numerics.fp8_matmul`).
        quantize_a: Kernel that makes the left operand from a row-major bf16 (M, K); None for none.
        quantize_b: Kernel that makes the right operand from a row-major bf16 (N, K).
        multiple_m: M must be a multiple of this; likewise N and K.
        min_capability: Least CUDA compute capability.
    """

    name: str
    kind: str
    recipe_a: str | None = None
    recipe_b: str | None = None
    accumulation: str = "fp32"
    quantize_a: str | None = None
    quantize_b: str | None = None
    multiple_m: int = 1
    multiple_n: int = 1
    multiple_k: int = 1
    min_capability: tuple[int, int] = (8, 0)

    @property
    def library(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]

    @property
    def is_fp8(self) -> bool:
        """Whether the operands are FP8."""
        return self.recipe_a is not None and self.recipe_a != "bf16"

    def illegal(self, m: int, n: int, k: int, capability: tuple[int, int] = (9, 0)) -> str | None:
        """Why this kernel cannot run an (m, n, k) GEMM on that hardware; None when it can."""
        if capability < self.min_capability:
            return f"{self.name} needs compute capability {self.min_capability[0]}.{self.min_capability[1]}"
        for letter, size, multiple in (("M", m, self.multiple_m), ("N", n, self.multiple_n), ("K", k, self.multiple_k)):
            if size % multiple:
                return f"{letter} = {size} is no multiple of {multiple}"
        return None


def _fp8(name: str, scaling: str, accumulation: str) -> KernelSpec:
    quantize = f"torch/quantize_{scaling}"
    return KernelSpec(
        f"torch/{name}", "gemm", f"e4m3/{scaling}", f"e4m3/{scaling}", accumulation, quantize, quantize,
        multiple_n=16, multiple_k=16, min_capability=(9, 0),
    )  # fmt: skip


KERNELS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in (
        KernelSpec("torch/bf16", "gemm", "bf16", "bf16"),
        KernelSpec("torch/bf16_batched", "batched_gemm", "bf16", "bf16"),
        _fp8("fp8_tensorwise_fast", "tensorwise", "hopper_fast"),
        _fp8("fp8_tensorwise_split", "tensorwise", "hopper_split"),
        _fp8("fp8_rowwise_fast", "rowwise", "hopper_fast"),
        _fp8("fp8_rowwise_split", "rowwise", "hopper_split"),
        KernelSpec(
            "torch/fp8_block128", "gemm", "e4m3/block1x128", "e4m3/block128x128", "hopper_split",
            "torch/quantize_block1x128", "torch/quantize_block128x128",
            multiple_m=4, multiple_n=128, multiple_k=128, min_capability=(9, 0),
        ),  # fmt: skip
        # Quantization: row-major bf16 (rows, cols) in; e4m3 and FP32 scales out, compiled by torch.compile.
        # `_transposed`: the e4m3 result is (cols, rows) row-major and scaled along rows, as grad_weight needs it.
        KernelSpec("torch/quantize_tensorwise", "quantize"),
        KernelSpec("torch/quantize_rowwise", "quantize"),
        KernelSpec("torch/quantize_block1x128", "quantize", multiple_k=128),
        KernelSpec("torch/quantize_block128x128", "quantize", multiple_m=128, multiple_k=128),
        KernelSpec("torch/quantize_tensorwise_transposed", "quantize"),
        KernelSpec("torch/quantize_rowwise_transposed", "quantize"),
        KernelSpec("torch/quantize_block1x128_transposed", "quantize", multiple_m=128),
        KernelSpec("torch/quantize_block128x128_transposed", "quantize", multiple_m=128, multiple_k=128),
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

GEMM_KERNELS = tuple(name for name, spec in KERNELS.items() if spec.kind == "gemm")

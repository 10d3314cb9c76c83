"""What a user would quantize with instead of our kernels: torch.compile, torchao's own casts and kernels, FBGEMM's.

`peers(form)` gives runners beside ours of the same form: a scaling, as the tensor lies, `_transposed`, or `_dual` (both
results). Where a library has no kernel that writes both, its two are launched, or compiled together, which is what its user
would run. torchao's casts are compiled, as it counts on; its Triton kernels tune themselves as they do for any user. Every
result is checked as ours is. Importing this module imports no library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hil.kernels.base import E4M3, Runner, Shape
from hil.kernels.loka_quantize import LOKA_QUANTIZE_RUNNERS
from hil.kernels.torch_memory import QUANTIZERS
from hil.timing import BufferPool

Result = tuple[torch.Tensor, torch.Tensor]
Quantize = Callable[[torch.Tensor], Any]
OURS: dict[str, Runner] = {runner.name.removeprefix("loka/quantize_"): runner for runner in LOKA_QUANTIZE_RUNNERS}


def _compiled(form: str) -> Quantize | None:
    scaling, _, how = form.partition("_")
    if scaling not in QUANTIZERS:
        return None
    plain, turned = QUANTIZERS[scaling][0], QUANTIZERS[f"{scaling}_transposed"][0]
    functions: dict[str, Quantize] = {"": plain, "transposed": turned, "dual": lambda x: (plain(x), turned(x))}
    return torch.compile(functions[how], dynamic=False) if how in functions else None


def _torchao_cast(form: str, power: bool = False) -> Quantize | None:
    """`hp_tensor_to_float8_dynamic`, which its float8 training calls, with the reciprocal scale that its GEMM takes."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    scaling, _, how = form.partition("_")
    if scaling not in ("tensorwise", "rowwise") or how == "delayed" or (power and scaling == "tensorwise"):
        return None
    granularity = ScalingGranularity.TENSORWISE if scaling == "tensorwise" else ScalingGranularity.AXISWISE

    def cast(x: torch.Tensor) -> Result:
        made = hp_tensor_to_float8_dynamic(
            x, E4M3, LinearMMConfig(), scaling_granularity=granularity, axiswise_dim=-1 if scaling == "rowwise" else None,
            round_scales_to_power_of_2=power,
        )  # fmt: skip
        return made._data, made._scale.reciprocal()

    def turned(x: torch.Tensor) -> Result:
        codes, scale = cast(x.t())
        return codes.contiguous(), scale

    functions: dict[str, Quantize] = {"": cast, "transposed": turned, "dual": lambda x: (cast(x), turned(x))}
    return torch.compile(functions[how], dynamic=False)


def _torchao_kernels(form: str) -> Quantize | None:
    """Its Triton kernels for blocks: the plain ones as it ships them, the others of its prototype for training."""
    if not form.startswith("block"):
        return None
    from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant, fp8_blockwise_weight_quant
    from torchao.prototype.blockwise_fp8_training import kernels

    def weight_turned(x: torch.Tensor) -> Result:
        # Its column-major result of x is a row-major one of x.t().
        codes, scales = kernels.triton_fp8_blockwise_weight_quant_rhs(x)
        return codes.t(), scales.t()

    plain: dict[str, Quantize] = {"block1x128": fp8_blockwise_act_quant, "block128x128": fp8_blockwise_weight_quant}
    turned: dict[str, Quantize] = {
        "block1x128": kernels.triton_fp8_blockwise_act_quant_transposed_lhs,
        "block128x128": weight_turned,
    }
    scaling, _, how = form.partition("_")
    functions: dict[str, Quantize] = {
        "": plain[scaling], "transposed": turned[scaling], "dual": lambda x: (plain[scaling](x), turned[scaling](x)),
    }  # fmt: skip
    return functions[how]


def _torchao_training(form: str) -> Quantize | None:
    """The 1x128 kernel of its prototype for training: scales as cuBLAS wants them, tuned over 30 configurations."""
    if form != "block1x128":
        return None
    from torchao.prototype.blockwise_fp8_training import kernels

    result: Quantize = kernels.triton_fp8_blockwise_act_quant_lhs
    return result


def _by_row(quantize: Quantize, x: torch.Tensor) -> Result:
    """With scales as (rows, 1); a single one as it is."""
    codes, scales = quantize(x)
    return codes, scales.view(-1, 1) if scales.numel() > 1 else scales


def _fbgemm(form: str) -> Quantize | None:
    """Its C++ operators."""
    operators = {"tensorwise": "quantize_fp8_per_tensor", "rowwise": "quantize_fp8_per_row"}
    if form not in operators:
        return None
    import fbgemm_gpu.experimental.gen_ai  # noqa: F401  registers torch.ops.fbgemm

    return partial(_by_row, getattr(torch.ops.fbgemm, operators[form]))


def _fbgemm_triton(form: str) -> Quantize | None:
    """Its Triton kernels."""
    if form not in ("rowwise", "block1x128", "block128x128"):
        return None
    from fbgemm_gpu.experimental.gemm.triton_gemm import fp8_gemm

    functions: dict[str, Quantize] = {
        "rowwise": partial(_by_row, fp8_gemm.quantize_fp8_row),
        "block1x128": lambda x: fp8_gemm.quantize_fp8_group(x, 128),
        "block128x128": lambda x: fp8_gemm.quantize_fp8_block(x, 128, 128),
    }
    return functions[form]


MAKERS: dict[str, Callable[[str], Quantize | None]] = {
    "torch.compile": _compiled,
    "torchao": _torchao_cast,
    "torchao, scales 2^n": partial(_torchao_cast, power=True),
    "torchao Triton": _torchao_kernels,
    "torchao prototype": _torchao_training,
    "FBGEMM": _fbgemm,
    "FBGEMM Triton": _fbgemm_triton,
}
"""Who has which form: a quantizer of a row-major bf16 tensor, or None. A library that is absent raises ImportError."""


def _bind(maker: Callable[[str], Quantize | None], form: str, shape: Shape, pool: BufferPool) -> Callable[[int], Any]:
    quantize = maker(form)
    assert quantize is not None
    return lambda index: quantize(pool.view((shape.m, shape.k), index, 0))


def peers(form: str) -> tuple[dict[str, Runner], dict[str, str]]:
    """Runners by who has this form, as our own checked and counted; and why a library could not be asked."""
    own = OURS[form]
    found, missing = {}, {}
    for who, maker in MAKERS.items():
        try:
            has = maker(form) is not None
        # Whatever a library raises on being imported concerns it alone.
        except Exception as error:
            missing[who] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
            continue
        if has:
            found[who] = Runner(f"{who}/{form}", own.moved_bytes, partial(_bind, maker, form), own.error, own.limit)
    return found, missing

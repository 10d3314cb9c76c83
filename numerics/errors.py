"""How far a GEMM in low precision is from the same GEMM in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numerics.tensor_core import ACCUMULATIONS, TENSOR_CORES

if TYPE_CHECKING:
    import torch

    from numerics.recipe import Recipe

# A relative error needs a floor: with zero-mean outputs the mean of 1/|y| has no limit, one output near zero would
# decide it. The floor is bf16's half step (2^-8) of the outputs' root mean square: what lies below it drowns in
# the rounding of the outputs that it is added to.
MERE_FLOOR = 2.0**-8


@dataclass(frozen=True)
class GemmError:
    """The error of one GEMM's outputs y' against the exact y.

    Where an output overflows into an infinity, the first three are infinite (`sqnr_db` -infinite); where one is NaN, NaN.

    Attributes:
        mere: Mean element-wise relative error, the mean of |y' - y| / max(|y|, 2^-8 rms(y)).
        sqnr_db: 10 log10(sum y^2 / sum (y' - y)^2); infinite for no error.
        relative_frobenius: |y' - y| / |y| in the Frobenius norm.
        cosine: Cosine of the angle between y' and y.
        underflow_share: Share of an operand's elements that are not zero and become zero; the worse operand.
        overflow_share: Share of an operand's elements beyond the format's range by over half a step; the worse operand. Not
            counted (0) in formats of shared exponents, mx9 to msfp12, whose range is that of the block's exponent.
    """

    mere: float
    sqnr_db: float
    relative_frobenius: float
    cosine: float
    underflow_share: float
    overflow_share: float


def gemm_error(
    a: torch.Tensor,
    b: torch.Tensor,
    recipe_a: str | Recipe,
    recipe_b: str | Recipe,
    accumulation: str,
    *,
    output: str = "bf16",
    max_rows: int | None = None,
) -> GemmError:
    """Quantize both operands, multiply, and compare with the float64 product of the same inputs.

    Args:
        a: (M, K), contracted over its last axis.
        b: (N, K), likewise.
        recipe_a: Recipe or name, of `a`; its amax is `current`. Stochastic rounding draws from torch's own generator.
        recipe_b: The same of `b`.
        accumulation: `hopper_fast`, `hopper_split` and `hopper_mma` (both operands e4m3 or e5m2, scaled tensorwise,
            rowwise, in `hopper_split` both in blocks of 128, or not at all); `hopper_bf16` (both bf16); `fp32` and
            `exact` for all recipes.
        output: Format that the outputs are rounded to; `bf16` as the training kernels do, `fp32` for none. Beyond its range
            outputs become infinite (or NaN) in a format of over 8 bits, as on the hardware, and saturate in a narrower one.
        max_rows: Judge at most so many evenly spaced rows of each operand (an output depends on one row of each);
            scales are still taken from all rows.

    Raises:
        TypeError: an operand is not a floating-point tensor.
        ValueError: shapes or devices do not fit, a value is not finite, the accumulation is not defined for the recipes, a
            recipe takes its amax from elsewhere, or `max_rows` or `output` is no choice.
    """
    import torch

    from numerics.accumulate import bf16_matmul, fp8_matmul, plain_product
    from numerics.formats import get_format
    from numerics.quantization import codes_and_values
    from numerics.recipe import Recipe
    from numerics.rounding import cast, check_dense
    from numerics.sizes import is_whole

    recipes = Recipe.parse(recipe_a), Recipe.parse(recipe_b)
    check_dense(a, "a")
    check_dense(b, "b")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a is {tuple(a.shape)} and b is {tuple(b.shape)}; both must be (rows, K) with the same K")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device} and b on {b.device}; put both on one device")
    if max_rows is not None and not is_whole(max_rows):
        raise ValueError(f"max_rows = {max_rows!r}; give a whole number, 1 or more, or None for all rows")
    fmt = None if output == "fp32" else get_format(output)
    if fmt is not None and not fmt.signed:
        raise ValueError(f"output = {output!r} has no sign; choose a format of signed values, or fp32")
    if accumulation not in ACCUMULATIONS:
        raise ValueError(f"unknown accumulation {accumulation!r}; choose one of {', '.join(ACCUMULATIONS)}")
    core = TENSOR_CORES.get(accumulation)
    for recipe in recipes:
        if recipe.amax != "current":
            raise ValueError(f"gemm_error takes scales from the operands themselves; use amax='current' in {recipe.name}")
        if core and recipe.format not in core.formats:
            raise ValueError(
                f"{accumulation} is defined for {' and '.join(core.formats)}; use accumulation='fp32' for {recipe.name}"
            )
    a, b = a.detach(), b.detach()
    fp8 = core is not None and "bf16" not in core.formats
    shares, picked, parts = [], [], []
    kept = [slice(None, None, 1 if max_rows is None else math.ceil(len(x) / max_rows)) for x in (a, b)]
    for x, recipe, rows in zip((a, b), recipes, kept, strict=True):
        codes, scales, values = codes_and_values(x, recipe, codes=fp8)
        shares.append(_shares(x, recipe, scales, values))
        picked.append(values[rows])
        if codes is not None:
            parts.append(_kept_codes(codes, scales, recipe, rows))
    exact = a[kept[0]].to(torch.float64) @ b[kept[1]].to(torch.float64).T
    if fp8:
        y = fp8_matmul(
            parts[0][0], parts[1][0], accumulation=accumulation, scale_a=parts[0][1], scale_b=parts[1][1],
            format_a=recipes[0].format, format_b=recipes[1].format,
        )  # fmt: skip
    elif core:
        y = bf16_matmul(*(x.to(torch.bfloat16) for x in picked), accumulation=accumulation)
    else:
        y = plain_product(picked[0], picked[1], accumulation)
    if fmt is not None:
        y = cast(y, fmt, overflow="saturate" if fmt.bits <= 8 else "nonfinite")
    return _metrics(exact, y.to(torch.float64), [max(pair) for pair in zip(*shares, strict=True)])


def output_error(exact: torch.Tensor, y: torch.Tensor) -> GemmError:
    """The error of outputs that some kernel gave.

    Args:
        exact: The outputs as they should be.
        y: The outputs, of the same shape; each is taken to float64.

    Returns:
        The error, its shares NaN: outputs do not tell what became of the operands.

    Raises:
        ValueError: the shapes differ.
    """
    import torch

    if exact.shape != y.shape:
        raise ValueError(f"y has the shape {tuple(y.shape)}, exact {tuple(exact.shape)}; give the same outputs of both")
    return _metrics(exact.to(torch.float64), y.to(torch.float64), [math.nan, math.nan])


def _metrics(exact: torch.Tensor, y: torch.Tensor, shares: list[float]) -> GemmError:
    error = (y - exact).abs()
    signal_power = float(exact.square().mean())
    error_power = float(error.square().mean())
    if signal_power == 0.0:
        nothing = error_power == 0.0
        return GemmError(
            0.0 if nothing else math.inf, math.inf if nothing else -math.inf, 0.0 if nothing else math.inf,
            1.0 if nothing else 0.0, *shares,
        )  # fmt: skip
    floor = MERE_FLOOR * math.sqrt(signal_power)
    size = math.sqrt(float(y.square().mean()) * signal_power)
    ratio = signal_power / error_power if error_power else math.inf
    return GemmError(
        mere=float((error / exact.abs().clamp(min=floor)).mean()),
        sqnr_db=10 * math.log10(ratio) if ratio else -math.inf,
        relative_frobenius=math.sqrt(error_power / signal_power),
        cosine=float((exact * y).mean()) / size if size else 0.0,
        underflow_share=shares[0],
        overflow_share=shares[1],
    )


def _shares(x: torch.Tensor, recipe: Recipe, scales: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
    """Underflow and overflow."""
    from numerics.scaling import expand_scales

    underflow = float(((values == 0) & (x != 0)).double().mean())
    if recipe.shared is not None:
        return underflow, 0.0
    fmt = recipe.element
    top = fmt.max + 2.0 ** (fmt.max_exponent - fmt.fraction_bits - 1)
    quotient = x.float() / expand_scales(scales, recipe, x.shape)
    return underflow, float((quotient.abs() > top).double().mean())


def _kept_codes(
    codes: torch.Tensor, scales: torch.Tensor, recipe: Recipe, rows: slice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `fp8_matmul` takes, for some of the rows."""
    scaling, codes = recipe.scaling, codes[rows]
    if scaling == "none":
        return codes, None
    if scaling == "block128x128":
        if rows.step == 1:
            return codes, scales
        # Some rows of a block have its scale each, and are scaled as blocks 1 x 128 are: other last bits.
        scales = scales.repeat_interleave(128, 0)
    elif scaling not in ("tensorwise", "rowwise", "block1x128"):
        raise ValueError(f"Hopper kernels apply no {scaling} scales; use accumulation='fp32' for {recipe.name}")
    return codes, scales if scaling == "tensorwise" else scales[rows]

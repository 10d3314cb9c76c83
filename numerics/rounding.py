"""One rounding algorithm for every format, in torch, on any device; and codes to and from values."""

from __future__ import annotations

import torch

from numerics.formats import Format, get_format

ROUNDINGS = ("nearest_even", "toward_zero", "stochastic")
OVERFLOWS = ("saturate", "nonfinite")

_BITS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
# Two values in a byte: torch has no arithmetic for it.
_PACKED = tuple(getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name))
_TABLES: dict[tuple[Format, torch.device], torch.Tensor] = {}


def cast(
    x: torch.Tensor,
    format: str | Format,
    *,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    generator: torch.Generator | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round to the format's grid, unscaled, with a single rounding also from float64.

    Args:
        x: Any shape and strides; float32, float64, bfloat16, float16 or a float8 type. No gradient flows.
        format: A name in `FORMATS` or a record.
        rounding: `nearest_even`, `toward_zero` or `stochastic` (up with the probability of the distance).
        overflow: `saturate` makes everything beyond the range, infinities too, the greatest value; `nonfinite`
            makes it infinity, or NaN where the format has no infinity.
        generator: Source of the stochastic draws; torch's own when None.
        out: Tensor of the result's shape and type to write to; may be x where x is of that type.

    Returns:
        Values on the grid, float32 (float64 for float64 input). NaN stays NaN; so does a negative value in an
        unsigned format. In a format without a zero, zero becomes the least value.

    Raises:
        TypeError: x is not a floating-point tensor, `out` not a tensor of the result's type, or `generator` none of torch's.
        ValueError: an unknown name, `nonfinite` for a format that has neither infinity nor NaN, x is sparse or has no
            values, or `out` does not fit.
    """
    fmt = get_format(format)
    _check(rounding, ROUNDINGS, "rounding")
    _check(overflow, OVERFLOWS, "overflow")
    check_dense(x, "x")
    if not x.is_floating_point() or x.dtype in _PACKED:
        raise TypeError(f"cast takes a floating-point tensor, got {x.dtype}; convert with .float()")
    if overflow == "nonfinite" and not fmt.infinity and fmt.nan_code is None:
        raise ValueError(f"{fmt.name} has no infinity and no NaN; use overflow='saturate'")
    result = torch.float64 if x.dtype == torch.float64 else torch.float32
    if out is not None:
        check_out(out, x, x.shape, result, "out", may_be_x=True)
    # Powers of two as small as the grid's step must be representable in the type that we compute in.
    narrow = fmt.min_exponent - fmt.fraction_bits >= -100 and result == torch.float32
    x = x.detach().to(torch.float32 if narrow else torch.float64)
    step = torch.clamp(exponent_of(x), min=fmt.min_exponent) - fmt.fraction_bits
    # Beyond the range the step does not matter; the bound keeps its inverse a normal number.
    step = torch.clamp(step, max=fmt.max_exponent + 1 - fmt.fraction_bits)
    scaled = x * power_of_two(-step, x.dtype)
    rounded = round_to_integer(scaled, rounding, generator)
    y = rounded * power_of_two(step, x.dtype)
    if overflow == "saturate":
        y = torch.clamp(y, -fmt.max, fmt.max)
    else:
        beyond = torch.isinf(x) if rounding == "toward_zero" else y.abs() > fmt.max
        replaced = torch.copysign(torch.full_like(y, torch.inf), y) if fmt.infinity else torch.full_like(y, torch.nan)
        y = torch.where(beyond, replaced, torch.clamp(y, -fmt.max, fmt.max))
    if not fmt.negative_zero:
        y = torch.where(y == 0, torch.zeros_like(y), y)
    if not fmt.signed:
        y = torch.where(x < 0, torch.full_like(y, torch.nan), y)
    if not fmt.zero:
        y = torch.where(y < fmt.min_subnormal, torch.full_like(y, fmt.min_subnormal), y)
    return y.to(result) if out is None else out.copy_(y)


def round_to_integer(x: torch.Tensor, rounding: str, generator: torch.Generator | None) -> torch.Tensor:
    """Round float32 or float64 to whole numbers; `stochastic` draws from the generator, once per element."""
    if rounding == "nearest_even":
        return torch.round(x)
    if rounding == "toward_zero":
        return torch.trunc(x)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if generator is not None and generator.device.type != x.device.type:
        raise ValueError(f"generator is on {generator.device} and x on {x.device}; use torch.Generator({x.device.type!r})")
    draws = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return torch.floor(x) + (x - torch.floor(x) > draws)


def check_dense(x: torch.Tensor, name: str) -> None:
    """Refuse what is no tensor, or one whose values do not lie in memory.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is sparse, nested, or on the meta device.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(x).__name__}; numpy arrays go through torch.from_numpy")
    if x.is_nested or x.layout != torch.strided or x.is_meta:
        kind = "a meta tensor without values" if x.is_meta else "nested" if x.is_nested else f"of layout {x.layout}"
        raise ValueError(f"{name} is {kind}; give a dense tensor with values")


def check_out(
    out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str, *, may_be_x: bool = False
) -> None:
    """Refuse an output that what is made from x does not fit in.

    Raises:
        TypeError: it is no tensor, or one of another dtype.
        ValueError: its shape, device or layout is another, it may not be written to in place, or it shares memory with
            itself or with x.
    """
    if not isinstance(out, torch.Tensor) or out.dtype != dtype:
        raise TypeError(f"{name} must be a {dtype} tensor, got {getattr(out, 'dtype', type(out).__name__)}")
    if out.is_nested or out.layout != torch.strided or out.is_neg():
        raise ValueError(f"{name} is sparse, nested or a negated view; make it with torch.empty")
    if tuple(out.shape) != tuple(shape) or out.device != x.device:
        raise ValueError(
            f"{name} has shape {tuple(out.shape)} on {out.device}; it must have {tuple(shape)} on {x.device}: "
            "make it with torch.empty"
        )
    if out.requires_grad:
        raise ValueError(f"{name} requires a gradient, and none flows through rounding; pass {name}.detach()")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name} was made in inference mode and cannot be written to outside of it; pass {name}.clone()")
    reach = 0
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(f"{name} is expanded: its elements share memory; pass {name}.clone()")
        reach += (size - 1) * stride
    same = may_be_x and out.data_ptr() == x.data_ptr() and out.stride() == x.stride() and out.dtype == x.dtype
    if not same and out.numel() and x.numel() and _span(out)[0] < _span(x)[1] and _span(x)[0] < _span(out)[1]:
        raise ValueError(f"{name} overlaps x in part; pass x itself or memory of its own")


def _span(x: torch.Tensor) -> tuple[int, int]:
    """First address, and the one after the last."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def encode(values: torch.Tensor, format: str | Format) -> torch.Tensor:
    """Codes of values that lie on the format's grid (as `cast` returns them).

    Returns:
        uint8 codes for formats of at most 8 bits, int32 for wider ones, same shape.

    Raises:
        ValueError: NaN or infinity in a format that has no code for it.
    """
    fmt = get_format(format)
    narrow = fmt.min_exponent - fmt.fraction_bits >= -100
    x = values.to(torch.float32 if narrow else torch.float64)
    integer = torch.int32 if narrow else torch.int64
    magnitude = x.abs()
    finite = torch.isfinite(magnitude)
    if fmt.nan_code is None and not bool(finite.all()):
        raise ValueError(f"{fmt.name} has no code for NaN or infinity; the tensor holds {int((~finite).sum())} of them")
    magnitude = torch.where(finite, magnitude, torch.zeros_like(magnitude))
    if fmt.twos_complement:
        codes = torch.remainder(torch.where(finite, x, magnitude).to(integer), 2**fmt.bits)
    else:
        exponent = torch.clamp(exponent_of(magnitude), min=fmt.min_exponent)
        significand = (magnitude * power_of_two(fmt.fraction_bits - exponent, x.dtype)).to(integer)
        # A normal number's leading one carries into the exponent field, so subnormals need no case of their own.
        codes = (exponent - fmt.min_exponent).to(integer) * 2**fmt.fraction_bits + significand
        if not fmt.zero:
            codes = codes - 1
        if fmt.signed:
            negative = torch.signbit(x) if fmt.negative_zero else x < 0
            codes = codes + negative.to(integer) * 2 ** (fmt.bits - 1)
        if fmt.infinity:
            top = (fmt.max_exponent - fmt.min_exponent + 2) * 2**fmt.fraction_bits
            codes = torch.where(torch.isinf(x), top + (x < 0).to(integer) * 2 ** (fmt.bits - 1), codes)
        if fmt.nan_code is not None:
            special = torch.isnan(x) if fmt.infinity else ~finite
            codes = torch.where(special, torch.full_like(codes, fmt.nan_code), codes)
    return codes.to(torch.uint8 if fmt.bits <= 8 else torch.int32)


def decode(codes: torch.Tensor, format: str | Format) -> torch.Tensor:
    """float32 values of integer codes (float64 would add nothing: every value of every format is a float32)."""
    fmt = get_format(format)
    if fmt.bits > 16:  # tf32: float32 without its last bits
        return (codes.to(torch.int32) << (32 - fmt.bits)).view(torch.float32)
    key = (fmt, codes.device)
    if key not in _TABLES:
        _TABLES[key] = torch.from_numpy(fmt.values()).to(torch.float32).to(codes.device)
    return _TABLES[key][codes.to(torch.int64)]


def exponent_of(x: torch.Tensor) -> torch.Tensor:
    """floor(log2|x|) of float32 or float64 from the bits; zeros and subnormals give the least normal exponent less one."""
    integer, shift, bias = _BITS[x.dtype]
    mask = (1 << (8 if x.dtype == torch.float32 else 11)) - 1
    return ((x.contiguous().view(integer) >> shift) & mask) - bias


def power_of_two(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2**exponent exactly, for exponents of normal numbers of `dtype` (torch.ldexp goes through float32)."""
    integer, shift, bias = _BITS[dtype]
    return ((exponent.to(integer) + bias) << shift).view(dtype)


def _check(value: str, choices: tuple[str, ...], what: str) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}; choose one of {', '.join(choices)}")

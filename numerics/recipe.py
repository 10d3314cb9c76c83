"""A recipe says how one operand becomes low precision: format, scaling, scale type, rounding, overflow."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace

from numerics.formats import FORMATS, Format

# Elements that share a scale, as (rows, columns) of an operand whose last axis is contracted; 0 is the whole axis.
SCALINGS: dict[str, tuple[int, int] | None] = {
    "none": None,
    "tensorwise": (0, 0),
    "rowwise": (1, 0),
    "columnwise": (0, 1),
    "block1x128": (1, 128),
    "block128x128": (128, 128),
    "mx32": (1, 32),
    "bdr16": (1, 16),
}
_MX = {
    "mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2", "mxfp6_e3m2": "e3m2", "mxfp6_e2m3": "e2m3", "mxfp4": "e2m1", "mxint8": "int8",
}  # fmt: skip


@dataclass(frozen=True)
class SharedExponent:
    """A format of sign and magnitude, 16 elements under one 8-bit exponent.

    Attributes:
        magnitude_bits: Bits of an element beside its sign; there is no hidden one.
        pairs: Whether pairs of elements have a bit of their own that halves their step.
    """

    magnitude_bits: int
    pairs: bool


# The first three: Rouhani et al. 2023, "With Shared Microexponents, A Little Shifting Goes a Long Way", table 1. Block
# floating point: Rouhani et al. 2020, "Pushing the Limits of Narrow Precision Inferencing at Cloud Scale with MSFP".
SHARED_EXPONENT = {
    "mx9": SharedExponent(7, True), "mx6": SharedExponent(4, True), "mx4": SharedExponent(2, True),
    "msfp16": SharedExponent(7, False), "msfp12": SharedExponent(3, False),
}  # fmt: skip
_SCALED = ("tensorwise", "rowwise", "columnwise", "block1x128", "block128x128")
# e8m0 holds scales; it has no sign and is no element format.
_ELEMENTS = tuple(name for name in FORMATS if name != "e8m0")
_NARROW = tuple(name for name in _ELEMENTS if FORMATS[name].bits <= 8)
_CHOICES: dict[str, tuple[str, ...]] = {
    "format": (*_ELEMENTS, *SHARED_EXPONENT),
    "scaling": tuple(SCALINGS),
    "scale_format": ("fp32", "e8m0"),
    "scale_rounding": ("floor", "ceil", "nearest_even"),
    "rounding": ("nearest_even", "toward_zero", "stochastic"),
    "overflow": ("saturate", "nonfinite"),
    "amax": ("current", "delayed", "given"),
}


@dataclass(frozen=True)
class Recipe:
    """How an operand (rows, K), contracted over its last axis, is quantized.

    Attributes:
        name: The short form, what `parse` takes.
        format: Element format, or one of `SHARED_EXPONENT`.
        scaling: A key of `SCALINGS`; `none` is a plain cast.
        scale_format: `fp32` (amax / format max), or `e8m0` (a power of two from 2^-127 to 2^127). An int8 element counts whole
            numbers, so that mxint8's scale is OCP's times 2^-6, and ends at 2^-127 where OCP's ends at 2^-133.
        scale_rounding: How a power of two is chosen: `floor` (OCP: exponent of amax less that of the format's max),
            `ceil` (least power that does not saturate), `nearest_even` (floor, after rounding amax to the format).
        rounding: See `numerics.cast`.
        overflow: See `numerics.cast`.
        amax: Where a scale comes from: the `current` tensor, the tensors before it (`delayed`, see
            `numerics.AmaxHistory`), or the caller (`given`). Values beyond an amax that is not the tensor's own overflow.
    """

    name: str
    format: str
    scaling: str = "none"
    scale_format: str = "fp32"
    scale_rounding: str = "floor"
    rounding: str = "nearest_even"
    overflow: str = "saturate"
    amax: str = "current"

    def __hash__(self) -> int:
        """Of the name alone, which the other fields follow from: recipes are looked up by the ten thousand."""
        return hash(self.name)

    def __post_init__(self) -> None:
        """Refuse a field that names nothing, and fields that mean nothing together.

        Raises:
            ValueError: naming the field and its choices.
        """
        if not isinstance(self.name, str):
            raise ValueError(f"recipe: name = {self.name!r}; give a string")
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if not isinstance(value, str) or value not in allowed:
                raise ValueError(f"recipe: {field} = {value!r}; choose one of {', '.join(allowed)}")
        shared = self.format in SHARED_EXPONENT
        if shared != (self.scaling == "bdr16"):
            mend = "scaling='bdr16'" if shared else f"one of the formats {', '.join(SHARED_EXPONENT)}"
            raise ValueError(f"recipe: format {self.format} does not go with scaling {self.scaling}; use {mend}")
        if shared:
            only = {"scale_format": "e8m0", "scale_rounding": "floor", "overflow": "saturate", "amax": "current"}
            for field, needed in only.items():
                if getattr(self, field) != needed:
                    raise ValueError(f"recipe: format {self.format} shares the exponent of its amax; use {field}={needed!r}")
            return
        if self.scaling == "none" and (self.scale_format, self.amax) != ("fp32", "current"):
            field = "scale_format" if self.scale_format != "fp32" else "amax"
            raise ValueError(f"recipe: scaling none has no scale; leave {field} away, or choose a scaling")
        if self.scale_format == "fp32" and self.scale_rounding != "floor":
            raise ValueError("recipe: scale_rounding is of powers of two; use scale_format='e8m0', or leave it away")
        fmt = FORMATS[self.format]
        if self.overflow == "nonfinite" and not fmt.infinity and fmt.nan_code is None:
            raise ValueError(f"recipe: {fmt.name} has no infinity and no NaN; use overflow='saturate'")

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) under one scale, 0 for a whole axis; None without a scale."""
        return SCALINGS[self.scaling]

    @property
    def element(self) -> Format:
        """The element format's record.

        Raises:
            ValueError: a format of shared exponents has none.
        """
        if self.format in SHARED_EXPONENT:
            raise ValueError(f"{self.name} has no element format of its own; its elements share exponents")
        return FORMATS[self.format]

    @property
    def shared(self) -> SharedExponent | None:
        """The record of a format of shared exponents; None for the others."""
        return SHARED_EXPONENT.get(self.format)

    @property
    def is_power_of_two(self) -> bool:
        """Whether scales are powers of two."""
        return self.scale_format == "e8m0"

    @classmethod
    def parse(cls, text: str | Recipe) -> Recipe:
        """The recipe that a string names; a recipe is returned as it is.

        A string is a name (`bf16`, `e4m3/rowwise`, `mxfp8_e4m3`, `mx9`), then fields that are not as the name has
        them: `e4m3/rowwise;scale_format=e8m0;scale_rounding=ceil`.

        Raises:
            ValueError: nothing has that name; the message lists the choices.
        """
        if isinstance(text, Recipe):
            return text
        return _parse(text if isinstance(text, str) else repr(text))

    @staticmethod
    def names() -> tuple[str, ...]:
        """Every name that `parse` knows."""
        scaled = (f"{fmt}/{scaling}" for fmt in _NARROW for scaling in _SCALED)
        return (*_ELEMENTS, *scaled, *_MX, *SHARED_EXPONENT)


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Recipe:
    name, *changes = text.split(";")
    fmt, slash, scaling = name.partition("/")
    if name in _MX:
        recipe = Recipe(name, _MX[name], "mx32", "e8m0")
    elif name in SHARED_EXPONENT:
        recipe = Recipe(name, name, "bdr16", "e8m0")
    elif name in _ELEMENTS:
        recipe = Recipe(name, name)
    elif slash and fmt in _NARROW and scaling in _SCALED:
        recipe = Recipe(name, fmt, scaling)
    else:
        raise ValueError(
            f"unknown recipe {text!r}; choose a format ({', '.join(_ELEMENTS)}), one of {', '.join(_NARROW)} "
            f"with /{', /'.join(_SCALED)}, or one of {', '.join((*_MX, *SHARED_EXPONENT))}"
        )
    known = [field.name for field in fields(Recipe)][3:]
    new = {}
    for change in changes:
        field, equals, value = change.strip().partition("=")
        if not equals or field not in known:
            raise ValueError(f"recipe {text!r}: {change.strip()!r} is no field=value of {', '.join(known)}")
        if field in new:
            raise ValueError(f"recipe {text!r}: {field} is there twice; keep one")
        new[field] = value
    name = ";".join([name, *(f"{field}={new[field]}" for field in known if field in new)])
    return replace(recipe, name=name, **new)

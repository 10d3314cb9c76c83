"""A recipe says how one operand becomes low precision: format, scaling, scale type, rounding, overflow."""

from __future__ import annotations

import functools
from dataclasses import dataclass

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
# Bits of magnitude of the shared-microexponent formats (Rouhani et al. 2023): 16 elements under one 8-bit exponent.
BDR_BITS = {"mx9": 7, "mx6": 4, "mx4": 2}
_SCALED = tuple(name for name in ("tensorwise", "rowwise", "columnwise", "block1x128", "block128x128"))
# e8m0 holds scales; it has no sign and is no element format.
_ELEMENTS = tuple(name for name in FORMATS if name != "e8m0")
_NARROW = tuple(name for name in _ELEMENTS if FORMATS[name].bits <= 8)


@dataclass(frozen=True)
class Recipe:
    """How an operand (rows, K), contracted over its last axis, is quantized.

    Attributes:
        name: The short form, what `parse` takes.
        format: Element format; for mx9, mx6 and mx4 a sign and a magnitude under the shared exponents.
        scaling: A key of `SCALINGS`; `none` is a plain cast.
        scale_format: `fp32` (amax / format max), or `e8m0` (a power of two).
        scale_rounding: How a power of two is chosen: `floor` (OCP: exponent of amax less that of the format's max),
            `ceil` (least power that does not saturate), `nearest_even` (floor, after rounding amax to the format).
        rounding: See `numerics.cast`.
        overflow: See `numerics.cast`.
    """

    name: str
    format: str
    scaling: str = "none"
    scale_format: str = "fp32"
    scale_rounding: str = "floor"
    rounding: str = "nearest_even"
    overflow: str = "saturate"

    def __post_init__(self) -> None:
        """Refuse a field that names nothing.

        Raises:
            ValueError: naming the field and its choices.
        """
        choices: dict[str, tuple[str, ...]] = {
            "format": (*_ELEMENTS, *BDR_BITS),
            "scaling": tuple(SCALINGS),
            "scale_format": ("fp32", "e8m0"),
            "scale_rounding": ("floor", "ceil", "nearest_even"),
            "rounding": ("nearest_even", "toward_zero", "stochastic"),
            "overflow": ("saturate", "nonfinite"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"recipe: {field} = {getattr(self, field)!r}; choose one of {', '.join(allowed)}")
        if (self.format in BDR_BITS) != (self.scaling == "bdr16"):
            raise ValueError(f"recipe: format {self.format} does not go with scaling {self.scaling}")

    @property
    def block(self) -> tuple[int, int] | None:
        """(rows, columns) under one scale, 0 for a whole axis; None without a scale."""
        return SCALINGS[self.scaling]

    @property
    def element(self) -> Format:
        """The element format's record.

        Raises:
            ValueError: a shared-microexponent recipe has none.
        """
        if self.format in BDR_BITS:
            raise ValueError(f"{self.name} has no element format of its own; its pairs share exponents")
        return FORMATS[self.format]

    @property
    def is_power_of_two(self) -> bool:
        """Whether scales are powers of two."""
        return self.scale_format == "e8m0"

    @classmethod
    def parse(cls, text: str | Recipe) -> Recipe:
        """The recipe that a string names: `bf16`, `e4m3/rowwise`, `mxfp8_e4m3`, `mx9`; a recipe is returned as it is.

        Raises:
            ValueError: nothing has that name; the message lists the choices.
        """
        return text if isinstance(text, Recipe) else _parse(text)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Every string that `parse` knows."""
        scaled = (f"{fmt}/{scaling}" for fmt in _NARROW for scaling in _SCALED)
        return (*_ELEMENTS, *scaled, *_MX, *BDR_BITS)


@functools.cache
def _parse(text: str) -> Recipe:
    if text in _MX:
        return Recipe(text, _MX[text], "mx32", "e8m0")
    if text in BDR_BITS:
        return Recipe(text, text, "bdr16", "e8m0")
    if text in _ELEMENTS:
        return Recipe(text, text)
    fmt, slash, scaling = text.partition("/") if isinstance(text, str) else ("", "", "")
    if slash and fmt in _NARROW and scaling in _SCALED:
        return Recipe(text, fmt, scaling)
    raise ValueError(
        f"unknown recipe {text!r}; choose a format ({', '.join(_ELEMENTS)}), one of {', '.join(_NARROW)} "
        f"with /{', /'.join(_SCALED)}, or one of {', '.join((*_MX, *BDR_BITS))}"
    )

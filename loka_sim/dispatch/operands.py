"""How a GEMM's quantized operands are made: by any library's quantizer whose result fits, not by the GEMM's own library's.

A tensor that is read both as it is stored and transposed is quantized once where that serves both: by a kernel that writes
both readings, or by one quantizer and a transposition of its 8-bit result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from loka_sim.errors import UserError
from perfmodel.kernels import KERNELS, SQUARE, library_of

TRANSPOSE = "torch/transpose_e4m3"

LIBRARIES = tuple(
    dict.fromkeys(library_of(name) for name, s in KERNELS.items() if (s.is_fp8 and "gemm" in s.kind) or s.kind == "quantize")
)
"""Libraries that a decision may take kernels from. Whole layers (`linear`) are none of its choices."""

DEFAULT_LIBRARIES = ("torch",)
"""What `loka-sim export` can hand to a training job as it is decided."""


class Row(NamedTuple):
    """One kernel launch as the time model takes it; quantize, layout and pointwise kernels have n = 1."""

    kernel: str
    m: int
    n: int
    k: int
    groups: int = 1


class Launch(NamedTuple):
    """A kernel that makes quantized readings of a tensor: False as it is stored, True transposed."""

    row: Row
    readings: tuple[bool, ...]


Way = tuple[Launch, ...]
"""Launches that together make what is needed of a tensor, each reading once."""


MULTIPLE = math.lcm(*(size for spec in KERNELS.values() for size in (spec.multiple_m, spec.multiple_n, spec.multiple_k)))
"""Sizes that leave the same remainder of this are legal alike, whatever the kernel, up to `UNBOUNDED`."""
UNBOUNDED = min(spec.most_k for spec in KERNELS.values() if spec.most_k is not None)


def least(size: int) -> int:
    """The smallest size known to be legal wherever this one is, and illegal wherever it is not."""
    return (size - 1) % MULTIPLE + 1 if size <= UNBOUNDED else size


_Named = tuple[tuple[str, tuple[bool, ...]], ...]
"""A way by its kernels' names."""


def _launches(way: _Named, height: int, width: int) -> Way:
    return tuple(Launch(Row(name, height, 1, width), made) for name, made in way)


@cache
def _ways(
    takes: str, readings: frozenset[bool], height: int, width: int, quantizers: tuple[str, ...], capability: tuple[int, int]
) -> tuple[_Named, ...]:
    """Kernels and the readings that each makes, for every way that the hardware and the sizes allow."""

    def makers(*made: bool) -> list[tuple[str, tuple[bool, ...]]]:
        specs = (KERNELS[name] for name in quantizers)
        fit = (spec for spec in specs if spec.makes == takes and spec.readings == made)
        return [(spec.name, made) for spec in fit if spec.illegal(height, 1, width, capability) is None]

    if len(readings) == 1:
        return tuple((maker,) for maker in makers(*readings))
    # Square blocks of scales turn with the tensor: the second reading is a transposition of 8-bit values.
    turned = [(TRANSPOSE, (True,))] if takes in SQUARE else makers(True)
    return (*((first, second) for first in makers(False) for second in turned), *((maker,) for maker in makers(False, True)))


@dataclass(frozen=True)
class Toolbox:
    """The FP8 kernels that a decision may take, and how it tells which way to quantize is the fastest.

    Attributes:
        gemms: FP8 GEMMs.
        quantizers: Quantizers.
        capability: CUDA compute capability of the hardware.
        us: Time of a launch in microseconds, infinite where it is not known; None where there is no choice between ways, as
            with torch's quantizers alone.
    """

    gemms: tuple[str, ...]
    quantizers: tuple[str, ...]
    capability: tuple[int, int] = (9, 0)
    us: Callable[[Row], float] | None = field(default=None, compare=False)

    @cached_property
    def unpriced(self) -> Toolbox:
        """The same kernels without times: what may be remembered for long."""
        return self if self.us is None else replace(self, us=None)

    @classmethod
    def of(cls, libraries: Sequence[str], known: Container[str] | None = None, capability: tuple[int, int] = (9, 0)) -> Toolbox:
        """The kernels of some libraries, those alone that are `known` (have a time) where that is said."""
        specs = [s for name, s in KERNELS.items() if library_of(name) in libraries and (known is None or name in known)]
        return cls(
            tuple(s.name for s in specs if s.is_fp8 and s.kind in ("gemm", "batched_gemm")),
            tuple(s.name for s in specs if s.makes is not None),
            capability,
        )

    def ways(self, takes: str, readings: frozenset[bool], height: int, width: int) -> tuple[Way, ...]:
        """Every way to make a tensor's quantized readings that the hardware and the sizes allow.

        Args:
            takes: What the GEMMs take that read it (`KernelSpec.takes_a`).
            readings: Which readings are needed.
            height: Rows of the tensor as it is stored.
            width: Its columns.
        """
        return tuple(_launches(way, height, width) for way in self._named(takes, readings, height, width))

    def _named(self, takes: str, readings: frozenset[bool], height: int, width: int) -> tuple[_Named, ...]:
        key = takes, readings, least(height), least(width)
        if key not in self._ways:
            self._ways[key] = _ways(*key, self.quantizers, self.capability)
        return self._ways[key]

    def fastest(self, takes: str, readings: frozenset[bool], height: int, width: int) -> Way:
        """The fastest legal way to make a tensor's readings; the first by name where times tie.

        Raises:
            LookupError: there is none.
        """
        key = takes, readings, height, width
        if key not in self._fastest:
            found = self._named(*key)
            if not found:
                raise LookupError(f"no quantizer makes {takes} of ({height}, {width})")
            chosen = found[0] if len(found) == 1 or self.us is None else min(found, key=self._cost(found, height, width))
            self._fastest[key] = _launches(chosen, height, width)
        return self._fastest[key]

    @cached_property
    def _ways(self) -> dict[tuple[str, frozenset[bool], int, int], tuple[_Named, ...]]:
        return {}

    @cached_property
    def _fastest(self) -> dict[tuple[str, frozenset[bool], int, int], Way]:
        return {}

    @cached_property
    def launched(self) -> dict[Hashable, dict[str, tuple[Row, ...]]]:
        """What `candidates.launches` found: the baselines and a decision have many assignments in common."""
        return {}

    def _cost(self, ways: Sequence[_Named], height: int, width: int) -> Callable[[_Named], tuple[float, _Named]]:
        assert self.us is not None
        us = {name: self.us(Row(name, height, 1, width)) for name in {name for way in ways for name, _ in way}}
        return lambda way: (sum([us[name] for name, _ in way]), way)


TORCH = Toolbox.of(("torch",))
"""torch's kernels on Hopper: what a conversion by torchao runs."""


def parse_libraries(libraries: str | Sequence[str]) -> tuple[str, ...]:
    """Libraries as named by a user, in the registry's order; `all` for every one.

    Args:
        libraries: Names, or one text with commas between them.

    Raises:
        UserError: a name is unknown, or there is none.
    """
    words = libraries.split(",") if isinstance(libraries, str) else libraries
    names = {word.strip() for word in words} - {""}
    if names == {"all"}:
        return LIBRARIES
    if unknown := sorted(names - set(LIBRARIES)):
        raise UserError(f"unknown library {unknown[0]!r}: choose among {', '.join(LIBRARIES)}, or all")
    if not names:
        raise UserError(f"--libraries names none: choose among {', '.join(LIBRARIES)}, or all")
    return tuple(library for library in LIBRARIES if library in names)

"""What the assignments of kernels to a site's passes launch, the same for many sites.

A tensor is read by two passes, so what an assignment launches is a part a pass (its GEMM) and a part a pair of passes (what
makes the tensor that both read). Sites that may run the same kernels have one `Structure`; those whose operands are also made
in the same ways, and whose sizes coincide alike, have one `Layout`: how often each of their distinct rows is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from loka_sim.dispatch.candidates import SiteShape, Use, legal_fp8
from loka_sim.dispatch.operands import Toolbox
from perfmodel.kernels import KERNELS

Array = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Place = tuple[int, ...]
"""An assignment: per pass the place of its kernel in `Structure.options`, or their number for a pass that is left out."""

Options = tuple[tuple[str, ...], ...]
"""Per pass the kernels that it may run, by name."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """Who reads one of x, w, g, and what is to be made of it.

    What kernels take of it is numbered from 1; 0 is a kernel that takes nothing quantized, or a pass left out.

    Attributes:
        name: x, w or g.
        axes: The one or two passes that read it.
        taken: For each of them, what each of its kernels takes, (options + 1,).
        needs: Quantized readings that are made together: what kernels take, and the readings.
        made: Which of `needs` serve each taking of the first pass and each of the second.
    """

    name: str
    axes: list[int]
    taken: list[Places]
    needs: list[tuple[str, frozenset[bool]]]
    made: list[list[tuple[int, ...]]]


@dataclass(frozen=True, eq=False)
class Structure:
    """What sites have in common for which the same kernels are legal.

    Attributes:
        names: Of their passes.
        options: Kernels that each pass may run, bf16 included.
        bf16: The place where all passes are in bf16.
        tensors: Those that some kernel takes quantized.
        ways: For each of them and each of its needs, all ways to make it: each the numbers of its makers.
        makers: Tensor and kernel of every launch that is part of some way.
    """

    names: tuple[str, ...]
    options: Options
    bf16: Place
    tensors: tuple[Tensor, ...]
    ways: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    makers: tuple[tuple[str, str], ...]

    def rows(self, shape: SiteShape) -> Iterator[tuple[str, int, int, int, int]]:
        """Every launch that an assignment of a site may need, as tuples that are equal to its `Row`.

        Each pass' GEMMs, then the makers; equal ones may be several.
        """
        for name, kernels in zip(self.names, self.options, strict=True):
            for kernel in kernels:
                yield shape.row(name, kernel)
        tensors = {tensor.name: shape.tensor(tensor.name) for tensor in self.tensors}
        for name, kernel in self.makers:
            height, width = tensors[name]
            yield kernel, height, 1, width, 1

    def coinciding(self, shape: SiteShape) -> tuple[int, ...]:
        """Which of a site's GEMMs are one in FP8, which in bf16, and which of its tensors are of one size.

        For each the first that it is like.
        """
        gemms, tensors = [shape.gemm(name) for name in self.names], [shape.tensor(tensor.name) for tensor in self.tensors]
        in_bf16 = shape.bf16_rows
        return (*map(gemms.index, gemms), *map(in_bf16.index, in_bf16), *map(tensors.index, tensors))


@dataclass(frozen=True, eq=False)
class Layout:
    """How often each distinct row of a site is in what its assignments launch.

    Attributes:
        columns: Which of `Structure.rows` the distinct rows are.
        gemms: Per pass, of each kernel's GEMM, and last of no kernel, (options + 1, rows).
        made: Per tensor, of what makes it, for each taking of its first pass and each of its second, (takings, takings, rows).
    """

    columns: list[int]
    gemms: list[Array]
    made: list[Array]


def structure(shape: SiteShape, toolbox: Toolbox) -> Structure:
    """What a site may run, and its operands' ways."""
    return _of_least(shape.least, toolbox.unpriced)


@cache
def _of_least(shape: SiteShape, toolbox: Toolbox) -> Structure:
    stays = shape.bf16()
    # By name: of equal totals the first place is the one of the least names.
    options = tuple(tuple(sorted((stays[name], *legal_fp8(shape, name, toolbox)))) for name in shape.names)
    bf16 = tuple(names.index(stays[name]) for names, name in zip(options, shape.names, strict=True))
    tensors = _tensors(options, tuple(shape.reads(name) for name in shape.names))
    named = tuple(
        tuple(
            tuple(tuple(launch.row.kernel for launch in way) for way in toolbox.ways(*need, *shape.tensor(tensor.name)))
            for need in tensor.needs
        )
        for tensor in tensors
    )
    return _structure(shape.names, options, bf16, tensors, named)


@cache
def _structure(
    names: tuple[str, ...],
    options: Options,
    bf16: Place,
    tensors: tuple[Tensor, ...],
    ways: tuple[tuple[tuple[tuple[str, ...], ...], ...], ...],
) -> Structure:
    """One object for all sites that may run the same kernels; ways are given by their kernels."""
    number: dict[tuple[str, str], int] = {}

    def numbers(tensor: Tensor, way: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(number.setdefault((tensor.name, kernel), len(number)) for kernel in way)

    numbered = tuple(
        tuple(tuple(numbers(tensor, way) for way in some) for some in needs) for tensor, needs in zip(tensors, ways, strict=True)
    )
    return Structure(names, options, bf16, tensors, numbered, tuple(number))


@cache
def _tensors(options: Options, reads: tuple[tuple[Use, Use], ...]) -> tuple[Tensor, ...]:
    """The tensors that some kernel takes quantized."""
    found = (_tensor(name, options, reads) for name in "xwg")
    return tuple(tensor for tensor in found if tensor is not None)


def _tensor(name: str, options: Options, reads: tuple[tuple[Use, Use], ...]) -> Tensor | None:
    axes: list[int] = []
    turned: list[bool] = []
    takes: list[list[str | None]] = []
    for axis, kernels in enumerate(options):
        for side, use in enumerate(reads[axis]):
            if use.tensor == name:
                axes.append(axis)
                turned.append(use.transposed)
                takes.append([(KERNELS[kernel].takes_a, KERNELS[kernel].takes_b)[side] for kernel in kernels])
    kinds = sorted({some for taken in takes for some in taken if some is not None})
    if not kinds:
        return None
    number: dict[str | None, int] = {some: i for i, some in enumerate((None, *kinds))}
    needs: list[tuple[str, frozenset[bool]]] = []

    def need(some: str, *readings: bool) -> tuple[int, ...]:
        needs.append((some, frozenset(readings)))
        return (len(needs) - 1,)

    alone = [
        [(), *(need(some, reading) if some in taken else () for some in kinds)]
        for reading, taken in zip(turned, takes, strict=True)
    ]
    if len(axes) == 1:
        alone.append([() for _ in number])
    made = [[first + second for second in alone[1]] for first in alone[0]]
    for some in kinds:
        if len(axes) == 2 and some in takes[0] and some in takes[1]:
            made[number[some]][number[some]] = need(some, *turned)
    # A pass that is left out takes nothing.
    taken = [np.array([*(number[some] for some in each), 0]) for each in takes]
    return Tensor(name, axes, taken, needs, made)


@lru_cache(maxsize=4096)
def layout(of: Structure, chosen: tuple[int, ...], coinciding: tuple[int, ...]) -> Layout:
    """How often each row is launched.

    Args:
        of: What sites may run.
        chosen: For each need of each tensor, in their order, which of its ways.
        coinciding: As `Structure.coinciding` says it.
    """
    passes = len(of.names)
    gemm_like, in_bf16_like, tensor_like = coinciding[:passes], coinciding[passes : 2 * passes], coinciding[2 * passes :]
    index: dict[tuple[str, str, int], int] = {}
    columns: list[int] = []

    def number(kind: str, kernel: str, like: int, column: int) -> int:
        if (key := (kind, kernel, like)) not in index:
            index[key] = len(index)
            columns.append(column)
        return index[key]

    place = iter(range(sum(map(len, of.options))))
    gemms = [
        [number("gemm", kernel, in_bf16 if axis == home else like, next(place)) for axis, kernel in enumerate(kernels)]
        for like, in_bf16, home, kernels in zip(gemm_like, in_bf16_like, of.bf16, of.options, strict=True)
    ]
    like_of = {tensor.name: like for tensor, like in zip(of.tensors, tensor_like, strict=True)}
    first = sum(map(len, of.options))
    way = iter(chosen)
    makers = [
        [
            [number("maker", of.makers[maker][1], like_of[tensor.name], first + maker) for maker in ways[next(way)]]
            for ways in needs
        ]
        for tensor, needs in zip(of.tensors, of.ways, strict=True)
    ]

    def counts(lists: list[list[int]]) -> Array:
        result = np.zeros((len(lists), len(index)))
        for line, rows in enumerate(lists):
            for row in rows:
                result[line, row] += 1
        return result

    made = []
    for tensor, launched in zip(of.tensors, makers, strict=True):
        lists = [[row for need in needs for row in launched[need]] for line in tensor.made for needs in line]
        made.append(counts(lists).reshape(len(tensor.made), len(tensor.made), -1))
    return Layout(columns, [counts([*([row] for row in rows), []]) for rows in gemms], made)

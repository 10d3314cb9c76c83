"""The inner loops of trees and networks, compiled for the processor at hand by LLVM when this module is imported."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt

from perfmodel.loop_texts import source

# Such a processor gathers 16 values at once.
_GATHERS = "avx512f"


def _compiled(by_vectors: bool | None = None) -> tuple[Any, ...]:
    """The loops in the order of their names, and what holds their code.

    Args:
        by_vectors: Whether trees are gone down by vectors; None for what is faster on this processor.
    """
    with contextlib.suppress(AttributeError, RuntimeError):  # from 0.45 on llvmlite does so by itself, and refuses to be told
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
    )
    text = source(bool(features.get(_GATHERS)) if by_vectors is None else by_vectors)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    size, array = ctypes.c_uint64, ctypes.c_void_p
    arguments = {
        "add_leaves": (array, size, size, array, array, size, array, array),
        "add_worth": (array, size, size, size, array, array, size, array, array, size, array, array, size, array),
        "best": (array, size, size, size, size, array, array),
        "rectify": (array, array, size, size),
    }
    found = (ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address(name)) for name, kinds in arguments.items())
    return *found, engine


_add_leaves, _add_worth, _best_of_rows, _rectify, _engine = _compiled()


def add_leaves(
    x: npt.NDArray[np.uint32],
    roots: npt.NDArray[np.int64],
    depths: npt.NDArray[np.int64],
    nodes: npt.NDArray[np.uint64],
    total: npt.NDArray[np.float32],
) -> None:
    """Add the leaf that each row ends in, of one tree after the other, to its total. Arrays lie densely in memory.

    Args:
        x: What rows compare, as of `forest.Forest`, (groups, features + 1, rows of a group), a multiple of `IN_TURN` in all.
        roots: As of `forest.Forest`, as the next two; there is one tree at least.
        depths: Of each tree.
        nodes: Of all trees.
        total: (rows,).
    """
    if len(x):
        pointers = [array.ctypes.data for array in (x, roots, depths, nodes, total)]
        _add_leaves(pointers[0], x.itemsize * x.shape[1], len(total), *pointers[1:3], len(roots), *pointers[3:])


def rectify(x: npt.NDArray[np.float32], biases: npt.NDArray[np.float32]) -> None:
    """Turn a layer's products into what its hard-swish units give, in place.

    Args:
        x: Products, (rows, units), lying densely in memory; units are a multiple of `AT_ONCE`.
        biases: (units,).
    """
    _rectify(x.ctypes.data, biases.ctypes.data, *x.shape)


def best(values: npt.NDArray[np.float32], first: int, last: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Where among some of each row's values the largest is, the first of equal ones, and its softmax among them.

    Args:
        values: (rows, values), lying densely in memory, none of them NaN.
        first: The first that is looked at.
        last: The one behind the last; there is one at least.

    Returns:
        Places counted from `first`, and the softmax, which is less than a millionth off, each (rows,).
    """
    places, chances = np.empty(len(values), dtype=np.int32), np.empty(len(values), dtype=np.float32)
    _best_of_rows(values.ctypes.data, *values.shape, first, last, places.ctypes.data, chances.ctypes.data)
    return places, chances


def add_worth(
    values: npt.NDArray[np.float32],
    places: npt.NDArray[np.int32],
    own: npt.NDArray[np.float32],
    tiles: int,
    sides: tuple[npt.NDArray[np.float32], ...],
    context: npt.NDArray[np.float32],
) -> None:
    """Add to the first values of each row what fits of tiles are worth (`perfmodel.fits`). Arrays lie densely in memory.

    Args:
        values: (rows, values), of which the first are of tiles.
        places: Of each tile's extents along N and M among those that there are, (2, a multiple of `AT_ONCE`), 0 behind the last.
        own: What the last wave's fill and one over the waves are worth more to each tile, alike.
        tiles: How many there are.
        sides: Tiles along N and what these are worth, then along M, each (rows, extents).
        context: What that fill and one over the waves are worth, and waves of one tile, (rows, 3).
    """
    across, along, down, along_m = (side.ctypes.data for side in sides)
    _add_worth(
        values.ctypes.data, *values.shape, tiles, places.ctypes.data, own.ctypes.data, places.shape[1],
        across, along, sides[0].shape[1], down, along_m, sides[2].shape[1], context.ctypes.data,
    )  # fmt: skip

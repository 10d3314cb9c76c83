"""The inner loops of trees and networks, compiled for the processor at hand by LLVM when this module is imported.

They are written in LLVM's own language and not for numba: what numba takes to import itself and to read a compiled loop from disk
is as long as xgboost takes for 100,000 rows; this takes a twentieth of a second, and leaves nothing on disk. In a tree a row goes
from node to node by numbers alone, without a branch, and several rows in turn, so that the processor need not wait for one of
them. A layer's units are rectified in one pass, while they lie in the cache, where numpy takes six.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt

# Rows that go down a tree in turn, and rows that it serves before the next one comes into the cache.
IN_TURN = 8
_SERVED = 128

# Units that are rectified at once: layers are as wide as a multiple of it.
AT_ONCE = 16

_LEAVES = """
define void @add_leaves(ptr noalias %x, i64 %width, i64 %rows, ptr noalias %roots, ptr noalias %depths, i64 %trees,
                        ptr noalias %nodes, ptr noalias %values, ptr noalias %total) {
entry:
  br label %block
block:
  %first = phi i64 [0, %entry], [%last, %served]
  %behind = add i64 %first, SERVED
  %whole = icmp ult i64 %behind, %rows
  %last = select i1 %whole, i64 %behind, i64 %rows
  br label %tree
tree:
  %number = phi i64 [0, %block], [%next.number, %grown]
  %root.at = getelementptr i64, ptr %roots, i64 %number
  %root = load i64, ptr %root.at
  %depth.at = getelementptr i64, ptr %depths, i64 %number
  %depth = load i64, ptr %depth.at
  br label %turn
turn:
  %row = phi i64 [%first, %tree], [%next.row, %leaf]
  EACH %row.# = add i64 %row, #
  EACH %start.# = mul i64 %row.#, %width
  EACH %seen.# = getelementptr float, ptr %x, i64 %start.#
  br label %node
node:
  %step = phi i64 [0, %turn], [%next.step, %down]
  EACH %at.# = phi i64 [%root, %turn], [%child.#, %down]
  %inner = icmp ult i64 %step, %depth
  br i1 %inner, label %down, label %leaf
down:
  EACH %node.at.# = getelementptr i32, ptr %nodes, i64 %at.#
  EACH %node.# = load i32, ptr %node.at.#
  EACH %value.at.# = getelementptr float, ptr %values, i64 %at.#
  EACH %value.# = load float, ptr %value.at.#
  EACH %low.# = and i32 %node.#, 255
  EACH %feature.# = zext i32 %low.# to i64
  EACH %compared.at.# = getelementptr float, ptr %seen.#, i64 %feature.#
  EACH %compared.# = load float, ptr %compared.at.#
  EACH %right.# = fcmp uge float %compared.#, %value.#
  EACH %one.# = zext i1 %right.# to i64
  EACH %high.# = lshr i32 %node.#, 8
  EACH %left.# = zext i32 %high.# to i64
  EACH %child.# = add i64 %left.#, %one.#
  %next.step = add i64 %step, 1
  br label %node
leaf:
  EACH %leaf.at.# = getelementptr float, ptr %values, i64 %at.#
  EACH %leaf.# = load float, ptr %leaf.at.#
  EACH %total.at.# = getelementptr float, ptr %total, i64 %row.#
  EACH %before.# = load float, ptr %total.at.#
  EACH %after.# = fadd float %before.#, %leaf.#
  EACH store float %after.#, ptr %total.at.#
  %next.row = add i64 %row, IN_TURN
  %more.rows = icmp ult i64 %next.row, %last
  br i1 %more.rows, label %turn, label %grown
grown:
  %next.number = add i64 %number, 1
  %more.trees = icmp ult i64 %next.number, %trees
  br i1 %more.trees, label %tree, label %served
served:
  %more.blocks = icmp ult i64 %last, %rows
  br i1 %more.blocks, label %block, label %done
done:
  ret void
}
"""

# x := x' clip(x' / 6 + 1/2, 0, 1) of x' = x + biases, rounded step by step as numpy does it.
_RECTIFY = """
define void @rectify(ptr noalias %x, ptr noalias %biases, i64 %rows, i64 %width) {
entry:
  %empty = icmp eq i64 %rows, 0
  br i1 %empty, label %done, label %row
row:
  %number = phi i64 [0, %entry], [%next.number, %served]
  %start = mul i64 %number, %width
  br label %units
units:
  %unit = phi i64 [0, %row], [%next.unit, %units]
  %at = add i64 %start, %unit
  %x.at = getelementptr float, ptr %x, i64 %at
  %x.was = load VECTOR, ptr %x.at, align 4
  %bias.at = getelementptr float, ptr %biases, i64 %unit
  %bias = load VECTOR, ptr %bias.at, align 4
  %value = fadd VECTOR %x.was, %bias
  %sixth = fmul VECTOR %value, SIXTH
  %gate = fadd VECTOR %sixth, HALF
  %above = fcmp ogt VECTOR %gate, zeroinitializer
  %positive = select <AT_ONCE x i1> %above, VECTOR %gate, VECTOR zeroinitializer
  %below = fcmp olt VECTOR %positive, ONE
  %clipped = select <AT_ONCE x i1> %below, VECTOR %positive, VECTOR ONE
  %result = fmul VECTOR %value, %clipped
  store VECTOR %result, ptr %x.at, align 4
  %next.unit = add i64 %unit, AT_ONCE
  %more.units = icmp ult i64 %next.unit, %width
  br i1 %more.units, label %units, label %served
served:
  %next.number = add i64 %number, 1
  %more.rows = icmp ult i64 %next.number, %rows
  br i1 %more.rows, label %row, label %done
done:
  ret void
}
"""


def _constant(value: float) -> str:
    """A vector whose elements are all the float32 next to `value`, as LLVM writes it: by the bits of the same float64."""
    bits = np.float64(np.float32(value)).view(np.uint64)
    return f"<{', '.join([f'float 0x{int(bits):016X}'] * AT_ONCE)}>"


def _source() -> str:
    """Both loops in LLVM's language."""
    # A line that begins with EACH is there once for each row in turn, whose number stands for `#`.
    lines = _LEAVES.replace("SERVED", str(_SERVED)).replace("IN_TURN", str(IN_TURN)).splitlines()
    each = (
        [line] if "EACH" not in line else [line.replace("EACH", "").replace("#", str(i)) for i in range(IN_TURN)]
        for line in lines
    )
    rectify = _RECTIFY.replace("SIXTH", _constant(1 / 6)).replace("HALF", _constant(0.5)).replace("ONE", _constant(1.0))
    rectify = rectify.replace("VECTOR", f"<{AT_ONCE} x float>").replace("AT_ONCE", str(AT_ONCE))
    return "\n".join([*(line for some in each for line in some), rectify])


def _compiled() -> tuple[Any, Any, Any]:
    """Both loops, and what holds their code."""
    with contextlib.suppress(AttributeError, RuntimeError):  # from 0.45 on llvmlite does so by itself, and refuses to be told
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_source()), machine)
    engine.finalize_object()
    size, array = ctypes.c_uint64, ctypes.c_void_p
    leaves = ctypes.CFUNCTYPE(None, array, size, size, array, array, size, array, array, array)
    rectifies = ctypes.CFUNCTYPE(None, array, array, size, size)
    return leaves(engine.get_function_address("add_leaves")), rectifies(engine.get_function_address("rectify")), engine


_add_leaves, _rectify, _engine = _compiled()


def add_leaves(
    x: npt.NDArray[np.float32],
    roots: npt.NDArray[np.int64],
    depths: npt.NDArray[np.int64],
    nodes: npt.NDArray[np.uint32],
    values: npt.NDArray[np.float32],
    total: npt.NDArray[np.float32],
) -> None:
    """Add the leaf that each row of x ends in, of one tree after the other, to its total. Arrays lie densely in memory.

    Args:
        x: Features, (rows, features + 1), the last -inf; rows are a multiple of `IN_TURN`.
        roots: As of `forest.Forest`, as the next three; there is one tree at least.
        depths: Of each tree.
        nodes: Of all trees.
        values: Of all trees.
        total: (rows,).
    """
    if len(x):
        pointers = [array.ctypes.data for array in (x, roots, depths, nodes, values, total)]
        _add_leaves(pointers[0], x.shape[1], len(x), *pointers[1:3], len(roots), *pointers[3:])


def rectify(x: npt.NDArray[np.float32], biases: npt.NDArray[np.float32]) -> None:
    """Turn a layer's products into what its hard-swish units give, in place.

    Args:
        x: Products, (rows, units), lying densely in memory; units are a multiple of `AT_ONCE`.
        biases: (units,).
    """
    _rectify(x.ctypes.data, biases.ctypes.data, *x.shape)

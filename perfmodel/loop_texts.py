"""The inner loops of trees and networks in LLVM's own language, which `perfmodel.loops` compiles.

They are written so and not for numba: what numba takes to import itself and to read a compiled loop from disk is as long as
xgboost takes for 100,000 rows; this takes a twentieth of a second, and leaves nothing on disk. In a tree rows go from node to
node by numbers alone, without a branch, several in turn, so that the processor need not wait for one of them. A layer's units
are rectified in one pass, while they lie in the cache, where numpy takes six. What each tile of a library's kernels is worth is
added to a row's values in one, where numpy takes fifteen. Of a row's values the largest is found and how it stands to the
others, in two passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

import numpy as np

from perfmodel.compiled import AT_ONCE

# Vectors of rows that go down a tree in turn, their rows, and rows that it serves before the next one comes into the cache.
_VECTORS = 4
IN_TURN = _VECTORS * AT_ONCE
_SERVED = 16 * IN_TURN
# The bit of a node's number at which its left child begins, 16 bits; below is where the feature lies among a group's values.
ABOVE_FEATURE = 16

# What LLVM has of its own.
_DECLARED = (
    "VECTOR @llvm.masked.load.vAT_ONCEf32.p0(ptr, i32, <AT_ONCE x i1>, VECTOR)",
    "float @llvm.vector.reduce.fmax.vAT_ONCEf32(VECTOR)",
    "float @llvm.vector.reduce.fadd.vAT_ONCEf32(float, VECTOR)",
    "i32 @llvm.vector.reduce.umin.vAT_ONCEi32(WHOLE)",
    "VECTOR @llvm.masked.gather.vAT_ONCEf32.vAT_ONCEp0(<AT_ONCE x ptr>, i32, <AT_ONCE x i1>, VECTOR)",
    "VECTOR @llvm.ceil.vAT_ONCEf32(VECTOR)",
    "void @llvm.masked.store.vAT_ONCEf32.p0(VECTOR, ptr, i32, <AT_ONCE x i1>)",
    "<AT_ONCE x i64> @llvm.masked.gather.vAT_ONCEi64.vAT_ONCEp0(<AT_ONCE x ptr>, i32, <AT_ONCE x i1>, <AT_ONCE x i64>)",
    "WHOLE @llvm.masked.gather.vAT_ONCEi32.vAT_ONCEp0(<AT_ONCE x ptr>, i32, <AT_ONCE x i1>, WHOLE)",
)

# A node's number is its place in its tree; at it lie, as one number, from below where the compared feature lies in a group of
# rows, the left child, and the value. A tree is gone down by vectors where the processor has instructions to gather as many
# values as a vector has, each row by itself where it has not: there rows by themselves take 0.6 of the time, here 1.1 to 1.2.
_LEAVES = """
define void @add_leaves(ptr noalias %x, i64 %stride, i64 %rows, ptr noalias %roots, ptr noalias %depths, i64 %trees,
                        ptr noalias %nodes, ptr noalias %total) {
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
  %own = getelementptr i64, ptr %nodes, i64 %root
  %depth.at = getelementptr i64, ptr %depths, i64 %number
  %depth = load i64, ptr %depth.at
  br label %turn
turn:
  %row = phi i64 [%first, %tree], [%next.row, %leaf]
BEGIN
  br label %node
node:
  %step = phi i64 [0, %turn], [%next.step, %down]
  EACH %at.# = phi INDEX [NO_INDEX, %turn], [%child.#, %down]
  %inner = icmp ult i64 %step, %depth
  br i1 %inner, label %down, label %leaf
down:
DOWN
  %next.step = add i64 %step, 1
  br label %node
leaf:
LEAF
  EACH %total.at.# = getelementptr float, ptr %total, i64 %row.#
  EACH %before.# = load VALUE, ptr %total.at.#, align 4
  EACH %after.# = fadd VALUE %before.#, %value.#
  EACH store VALUE %after.#, ptr %total.at.#, align 4
  %next.row = add i64 %row, ROWS
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

# Rows of one group, each by itself.
_ROW_BY_ROW = {
    "BEGIN": """
  %start = mul i64 %row, %stride
  %seen = getelementptr i8, ptr %x, i64 %start
  EACH %row.# = add i64 %row, #""",
    "DOWN": """
  EACH %node.at.# = getelementptr i64, ptr %own, i64 %at.#
  EACH %node.# = load i64, ptr %node.at.#
  EACH %feature.# = and i64 %node.#, FEATURE
  EACH %group.at.# = getelementptr i8, ptr %seen, i64 %feature.#
  EACH %compared.at.# = getelementptr i32, ptr %group.at.#, i64 #
  EACH %compared.# = load i32, ptr %compared.at.#
  EACH %lower.# = trunc i64 %node.# to i32
  EACH %left.32.# = lshr i32 %lower.#, ABOVE
  EACH %left.# = zext i32 %left.32.# to i64
  EACH %upper.# = lshr i64 %node.#, 32
  EACH %bits.# = trunc i64 %upper.# to i32
  EACH %right.# = icmp uge i32 %compared.#, %bits.#
  EACH %one.# = zext i1 %right.# to i64
  EACH %child.# = add i64 %left.#, %one.#""",
    "LEAF": """
  EACH %leaf.at.# = getelementptr i64, ptr %own, i64 %at.#
  EACH %value.at.# = getelementptr float, ptr %leaf.at.#, i64 1
  EACH %value.# = load float, ptr %value.at.#""",
    "ROWS": "AT_ONCE", "NO_INDEX": "0", "INDEX": "i64", "VALUE": "float",
}  # fmt: skip

# Vectors of them, several in turn.
_BY_VECTORS = {
    "BEGIN": """
  EACH %row.# = add i64 %row, FIRST#
  EACH %start.# = mul i64 %row.#, %stride
  EACH %seen.# = getelementptr i8, ptr %x, i64 %start.#""",
    "DOWN": """
  EACH %node.at.# = getelementptr i64, ptr %own, WHOLE %at.#
  EACH %node.# = call PAIRS GATHER_i64(<AT_ONCE x ptr> %node.at.#, i32 8, EVERY, PAIRS poison)
  EACH %lower.# = trunc PAIRS %node.# to WHOLE
  EACH %feature.# = and WHOLE %lower.#, FEATURES
  EACH %group.at.# = getelementptr i8, ptr %seen.#, WHOLE %feature.#
  EACH %compared.at.# = getelementptr i32, <AT_ONCE x ptr> %group.at.#, WHOLE PLACES
  EACH %compared.# = call WHOLE GATHER_i32(<AT_ONCE x ptr> %compared.at.#, i32 4, EVERY, WHOLE poison)
  EACH %left.# = lshr WHOLE %lower.#, ABOVES
  EACH %upper.# = lshr PAIRS %node.#, HALF_OF_PAIR
  EACH %bits.# = trunc PAIRS %upper.# to WHOLE
  EACH %right.# = icmp uge WHOLE %compared.#, %bits.#
  EACH %one.# = zext <AT_ONCE x i1> %right.# to WHOLE
  EACH %child.# = add WHOLE %left.#, %one.#""",
    "LEAF": """
  EACH %leaf.at.# = getelementptr i64, ptr %own, WHOLE %at.#
  EACH %value.at.# = getelementptr float, <AT_ONCE x ptr> %leaf.at.#, i64 1
  EACH %value.# = call VECTOR GATHER_f32(<AT_ONCE x ptr> %value.at.#, i32 4, EVERY, VECTOR poison)""",
    "ROWS": "IN_TURN", "NO_INDEX": "zeroinitializer", "INDEX": "WHOLE", "VALUE": "VECTOR",
}  # fmt: skip

# How a loop over rows, the label %row, begins; and how it goes on behind the label %served, and ends.
_FIRST_ROW = """  %empty = icmp eq i64 %rows, 0
  br i1 %empty, label %done, label %row
row:
  %number = phi i64 [0, %entry], [%next.number, %served]
  %start = mul i64 %number, %width"""
_NEXT_ROW = """  %next.number = add i64 %number, 1
  %more.rows = icmp ult i64 %next.number, %rows
  br i1 %more.rows, label %row, label %done
done:
  ret void
}"""

# x := x' clip(x' / 6 + 1/2, 0, 1) of x' = x + biases, rounded step by step as numpy does it.
_RECTIFY = """
define void @rectify(ptr noalias %x, ptr noalias %biases, i64 %rows, i64 %width) {
entry:
FIRST_ROW
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
NEXT_ROW
"""

# Of each row's values from one place up to another: where the largest is, the first of equal ones, and 1 over the sum of all
# exp(value - largest): its softmax. There exp(x) is 2^f 2^n of a whole number n and of f from -1/2 to 1/2: POWER is a polynomial.
_BEST = """
define void @best(ptr noalias %values, i64 %rows, i64 %width, i64 %from, i64 %to, ptr noalias %places, ptr noalias %chances) {
entry:
  %count = sub i64 %to, %from
COUNTS count
FIRST_ROW
  %first = add i64 %start, %from
  %row.at = getelementptr float, ptr %values, i64 %first
  br label %look
look:
  %at = phi i64 [0, %row], [%next.at, %look]
  %own = phi WHOLE [PLACES, %row], [%next.own, %look]
  %most = phi VECTOR [NOTHING, %row], [%more, %look]
  %where = phi WHOLE [zeroinitializer, %row], [%there, %look]
  %x.at = getelementptr float, ptr %row.at, i64 %at
  %inside = icmp ult WHOLE %own, %counts
  %x = call VECTOR @llvm.masked.load.vAT_ONCEf32.p0(ptr %x.at, i32 4, <AT_ONCE x i1> %inside, VECTOR NOTHING)
  %greater = fcmp ogt VECTOR %x, %most
  %more = select <AT_ONCE x i1> %greater, VECTOR %x, VECTOR %most
  %there = select <AT_ONCE x i1> %greater, WHOLE %own, WHOLE %where
  %next.own = add WHOLE %own, STEP
  %next.at = add i64 %at, AT_ONCE
  %looking = icmp ult i64 %next.at, %count
  br i1 %looking, label %look, label %looked
looked:
  %largest = call nnan float @llvm.vector.reduce.fmax.vAT_ONCEf32(VECTOR %more)
  %largest.1 = insertelement VECTOR poison, float %largest, i64 0
  %largests = shufflevector VECTOR %largest.1, VECTOR poison, WHOLE zeroinitializer
  %is = fcmp oeq VECTOR %more, %largests
  %found = select <AT_ONCE x i1> %is, WHOLE %there, WHOLE %counts
  %place = call i32 @llvm.vector.reduce.umin.vAT_ONCEi32(WHOLE %found)
  %place.at = getelementptr i32, ptr %places, i64 %number
  store i32 %place, ptr %place.at
  br label %sum
sum:
  %at.2 = phi i64 [0, %looked], [%next.at.2, %sum]
  %own.2 = phi WHOLE [PLACES, %looked], [%next.own.2, %sum]
  %total = phi VECTOR [zeroinitializer, %looked], [%next.total, %sum]
  %y.at = getelementptr float, ptr %row.at, i64 %at.2
  %inside.2 = icmp ult WHOLE %own.2, %counts
  %y = call VECTOR @llvm.masked.load.vAT_ONCEf32.p0(ptr %y.at, i32 4, <AT_ONCE x i1> %inside.2, VECTOR NOTHING)
  %less = fsub VECTOR %y, %largests
  %octaves.all = fmul VECTOR %less, TO_OCTAVES
  %not.tiny = fcmp ogt VECTOR %octaves.all, LEAST
  %octaves = select <AT_ONCE x i1> %not.tiny, VECTOR %octaves.all, VECTOR LEAST
  %shifted = fadd VECTOR %octaves, SHIFT
  %whole = fsub VECTOR %shifted, SHIFT
  %f = fsub VECTOR %octaves, %whole
POWER
  %shifted.bits = bitcast VECTOR %shifted to WHOLE
  %exponent = shl WHOLE %shifted.bits, EXPONENT_AT
  %power.bits = bitcast VECTOR %power to WHOLE
  %exp.bits = add WHOLE %power.bits, %exponent
  %exp = bitcast WHOLE %exp.bits to VECTOR
  %counted = select <AT_ONCE x i1> %not.tiny, VECTOR %exp, VECTOR zeroinitializer
  %next.total = fadd VECTOR %total, %counted
  %next.own.2 = add WHOLE %own.2, STEP
  %next.at.2 = add i64 %at.2, AT_ONCE
  %summing = icmp ult i64 %next.at.2, %count
  br i1 %summing, label %sum, label %served
served:
  %sum.all = call reassoc float @llvm.vector.reduce.fadd.vAT_ONCEf32(float 0.0, VECTOR %next.total)
  %chance = fdiv float 1.0, %sum.all
  %chance.at = getelementptr float, ptr %chances, i64 %number
  store float %chance, ptr %chance.at
NEXT_ROW
"""

# What the fits of tiles are worth (`perfmodel.fits`), added to each row's values of tiles, rounded step by step as numpy does it.
_ADD_WORTH = """
define void @add_worth(ptr noalias %values, i64 %rows, i64 %width, i64 %tiles, ptr noalias %places, ptr noalias %own, i64 %filled,
                       ptr noalias %across, ptr noalias %along, i64 %wide, ptr noalias %down, ptr noalias %along.m, i64 %high,
                       ptr noalias %context) {
entry:
COUNTS tiles
FIRST_ROW
  %row.at = getelementptr float, ptr %values, i64 %start
  %wide.start = mul i64 %number, %wide
  %across.at = getelementptr float, ptr %across, i64 %wide.start
  %along.at = getelementptr float, ptr %along, i64 %wide.start
  %high.start = mul i64 %number, %high
  %down.at = getelementptr float, ptr %down, i64 %high.start
  %along.m.at = getelementptr float, ptr %along.m, i64 %high.start
  %context.start = mul i64 %number, 3
  %context.at = getelementptr float, ptr %context, i64 %context.start
SPREAD fill 0
SPREAD over 1
SPREAD each 2
  br label %tile
tile:
  %at = phi i64 [0, %row], [%next.at, %tile]
  %mine = phi WHOLE [PLACES, %row], [%next.mine, %tile]
  %inside = icmp ult WHOLE %mine, %counts
  %wide.places.at = getelementptr i32, ptr %places, i64 %at
  %wide.places = load WHOLE, ptr %wide.places.at, align 4
  %high.places.at = getelementptr i32, ptr %wide.places.at, i64 %filled
  %high.places = load WHOLE, ptr %high.places.at, align 4
GATHER n across.at wide.places
GATHER m down.at high.places
GATHER worth.n along.at wide.places
GATHER worth.m along.m.at high.places
  %tiles.all = fmul VECTOR %n, %m
  %waves = fmul VECTOR %tiles.all, %each
  %whole = call VECTOR @llvm.ceil.vAT_ONCEf32(VECTOR %waves)
  %one.over = fdiv VECTOR ONE, %whole
  %full = fmul VECTOR %waves, %one.over
  %own.fill.at = getelementptr float, ptr %own, i64 %at
  %own.fill = load VECTOR, ptr %own.fill.at, align 4
  %own.over.at = getelementptr float, ptr %own.fill.at, i64 %filled
  %own.over = load VECTOR, ptr %own.over.at, align 4
  %worth.fill = fadd VECTOR %own.fill, %fill
  %worth.over = fadd VECTOR %own.over, %over
  %w.1 = fmul VECTOR %worth.fill, %full
  %w.2 = fmul VECTOR %worth.over, %one.over
  %w.3 = fadd VECTOR %w.1, %w.2
  %w.4 = fadd VECTOR %w.3, %worth.n
  %w.5 = fadd VECTOR %w.4, %worth.m
  %value.at = getelementptr float, ptr %row.at, i64 %at
  %value = call VECTOR @llvm.masked.load.vAT_ONCEf32.p0(ptr %value.at, i32 4, <AT_ONCE x i1> %inside, VECTOR zeroinitializer)
  %sum = fadd VECTOR %value, %w.5
  call void @llvm.masked.store.vAT_ONCEf32.p0(VECTOR %sum, ptr %value.at, i32 4, <AT_ONCE x i1> %inside)
  %next.mine = add WHOLE %mine, STEP
  %next.at = add i64 %at, AT_ONCE
  %more.tiles = icmp ult i64 %next.at, %tiles
  br i1 %more.tiles, label %tile, label %served
served:
NEXT_ROW
"""
# 2^f by as many terms of its series: less than 2e-7 off. 2^-126 and less counts as nothing.
_TERMS, _LEAST_OCTAVES = 7, -126.0
# Added to a float32 of up to so many octaves it leaves a whole number in the lowest bits, above which the exponent begins.
_SHIFT, _EXPONENT_AT = 1.5 * 2**23, 23


def _constant(value: float) -> str:
    """A vector whose elements are all the float32 next to `value`, as LLVM writes it: by the bits of the same float64."""
    bits = np.float64(np.float32(value)).view(np.uint64)
    return f"<{', '.join([f'float 0x{int(bits):016X}'] * AT_ONCE)}>"


def _wholes(values: Iterable[int], bits: int = 32) -> str:
    """A vector of integers."""
    return f"<{', '.join(f'i{bits} {value}' for value in values)}>"


def _alike(value: int, bits: int = 32) -> str:
    """A vector of one integer."""
    return _wholes([value] * AT_ONCE, bits)


def _power() -> str:
    """%power = 2^%f, by Horner's rule."""
    *rest, last = (math.log(2) ** order / math.factorial(order) for order in range(_TERMS))
    lines = [f"  %p.0 = fadd VECTOR {_constant(last)}, zeroinitializer"]
    for number, term in enumerate(reversed(rest)):
        result = "%power" if number == len(rest) - 1 else f"%p.{number + 1}"
        lines.append(f"  %m.{number} = fmul contract VECTOR %p.{number}, %f")
        lines.append(f"  {result} = fadd contract VECTOR %m.{number}, {_constant(term)}")
    return "\n".join(lines)


def _counts(number: str) -> list[str]:
    """%counts, a vector of a number that the loop is given."""
    return [
        f"  %count.32 = trunc i64 %{number} to i32", "  %count.1 = insertelement WHOLE poison, i32 %count.32, i64 0",
        "  %counts = shufflevector WHOLE %count.1, WHOLE poison, WHOLE zeroinitializer",
    ]  # fmt: skip


def _spread(name: str, place: str) -> list[str]:
    """A vector of one of a row's numbers."""
    return [
        f"  %{name}.at = getelementptr float, ptr %context.at, i64 {place}", f"  %{name}.1 = load float, ptr %{name}.at",
        f"  %{name}.2 = insertelement VECTOR poison, float %{name}.1, i64 0",
        f"  %{name} = shufflevector VECTOR %{name}.2, VECTOR poison, WHOLE zeroinitializer",
    ]  # fmt: skip


def _gather(name: str, base: str, places: str) -> list[str]:
    """A vector of what is at these places of an array."""
    return [
        f"  %{name}.ats = getelementptr float, ptr %{base}, WHOLE %{places}",
        f"  %{name} = call VECTOR @llvm.masked.gather.vAT_ONCEf32.vAT_ONCEp0(<AT_ONCE x ptr> %{name}.ats, i32 4, EVERY, "
        "VECTOR zeroinitializer)",
    ]


def _written_out(loop: str) -> str:
    """A loop with what its lines COUNTS, SPREAD and GATHER stand for."""
    written: Mapping[str, Callable[..., list[str]]] = {"COUNTS": _counts, "SPREAD": _spread, "GATHER": _gather}
    lines = list[str]()
    for line in loop.splitlines():
        first, *rest = line.split(" ")
        lines += written[first](*rest) if first in written else [line]
    return "\n".join(lines)


def _filled(loop: str, texts: Mapping[str, str]) -> str:
    """A loop with texts in the place of their names, one after the other: a text may hold a later name."""
    for name, text in texts.items():
        loop = loop.replace(name, text)
    return loop


def _each(loop: str, number: int) -> str:
    """A loop whose runs of lines that begin with EACH are there once for each of so many, whose number stands for `#`.

    Not line by line: LLVM would keep what it has of one in memory while it begins all others.
    """
    lines = list[str]()
    for repeated, run in groupby(loop.splitlines(), lambda line: "EACH" in line):
        some = list(run)
        for i in range(number) if repeated else (0,):
            lines += [line.replace("EACH ", "").replace("FIRST#", str(i * AT_ONCE)).replace("#", str(i)) for line in some]
    return "\n".join(lines)


def source(by_vectors: bool) -> str:
    """All loops in LLVM's language.

    Args:
        by_vectors: Whether vectors of rows go down a tree, not rows.
    """
    down, number = (_BY_VECTORS, _VECTORS) if by_vectors else (_ROW_BY_ROW, AT_ONCE)
    below = (1 << ABOVE_FEATURE) - 1
    declared = "\n".join(f"declare {function}" for function in _DECLARED)
    wide = {
        "VECTOR": f"<{AT_ONCE} x float>", "EVERY": f"<AT_ONCE x i1> <{', '.join(['i1 true'] * AT_ONCE)}>",
        "AT_ONCE": str(AT_ONCE),
    }  # fmt: skip
    rows = {"FIRST_ROW": _FIRST_ROW, "NEXT_ROW": _NEXT_ROW}
    whole = {"PLACES": _wholes(range(AT_ONCE)), "STEP": _alike(AT_ONCE), "WHOLE": "<AT_ONCE x i32>"}
    nodes = {
        "SERVED": str(_SERVED), "IN_TURN": str(IN_TURN), "PAIRS": "<AT_ONCE x i64>", "HALF_OF_PAIR": _alike(32, bits=64),
        "ABOVES": _alike(ABOVE_FEATURE), "ABOVE": str(ABOVE_FEATURE), "FEATURES": _alike(below), "FEATURE": str(below), **whole,
        **{f"GATHER_{kind}": f"@llvm.masked.gather.vAT_ONCE{kind}.vAT_ONCEp0" for kind in ("i64", "i32", "f32")},
    }  # fmt: skip
    rectify = {"SIXTH": _constant(1 / 6), "HALF": _constant(0.5), "ONE": _constant(1.0)}
    best = {
        "POWER": _power(), "EXPONENT_AT": _alike(_EXPONENT_AT), "NOTHING": _constant(-math.inf), "SHIFT": _constant(_SHIFT),
        "TO_OCTAVES": _constant(1 / math.log(2)), "LEAST": _constant(_LEAST_OCTAVES), "ONE": rectify["ONE"], **whole,
    }  # fmt: skip
    loops = (
        (declared, whole), (_each(_filled(_LEAVES, down), number), nodes), (_RECTIFY, {**rows, **rectify}),
        (_BEST, {**rows, **best}), (_ADD_WORTH, {**rows, "ONE": rectify["ONE"], **whole}),
    )  # fmt: skip
    return "\n".join(_filled(_written_out(loop), {**texts, **wide}) for loop, texts in loops)

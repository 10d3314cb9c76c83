"""Which loops a compiler runs as one kernel, and the bytes that each such kernel moves.

torch.compile's rule: two loops become one where they run over the same elements and share a buffer, read in the same
order, unless something between them cannot join. A reduction along memory joins with loops over its input or over its
result; one across memory (the gradient of a bias) only with its like, unless its results are so many that it is not cut into
parts. GEMMs, library calls and fills stay alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from loka_sim.loops import ACROSS, DENSE, FETCHED, OF, Lowered, Scheduled
from perfmodel.attention import KINDS as ATTENTION
from perfmodel.memory_plan import stages

MOST_FUSED = 64  # torch._inductor.config.max_fusion_size
LEAST_SHARED = 10  # bytes: torch._inductor.config.score_fusion_memory_threshold
# torch._inductor.scheduler.MixOrderReduction, torch 2.11 and 2.13.
BOTH_WAYS_ELEMENTS, BOTH_WAYS_ROWS, BOTH_WAYS_COLUMNS = 5 * 2**20, 4096, 16 * 1024
BOTH = "both"
# Operators that say nothing of a kernel.
UNSAID = {"convert_element_type", "full", "input", "lookup_seed", DENSE, ""}
IN_REDUCTIONS = {"column_scale", "column_scale_rounded"}  # once a tile elsewhere
GATHERED_ACROSS = "gathered_across"  # rows that are looked up, added element by element
COUNTED = {"rescale", "rescale_rounded"}  # of several in one kernel each is computed: `rescale*2`
# torch._inductor.scheduler and its config, torch 2.11 and 2.13.
ROUNDS, ATTEMPTS, FURTHEST = 10, 64, 64
ALONE = ("gemm", "external", "gather", "fill", "place", "copy", *ATTENTION)
REDUCTIONS = ("row", "column", BOTH)
PRECEDENCE = ("row", "column", "scatter", "gather", "external", "fill", "copy", *ATTENTION)  # the first that a loop of it is


class RawGroup(NamedTuple):
    """One kernel at one batch.

    Attributes:
        kind: pointwise, row, column, both (row and column), scatter, fill, copy, external; `gather` where a pointwise kernel
            looks rows up.
        label: Operators in it.
        space: Elements kept and elements reduced for each of them.
        read_bytes: Distinct bytes read.
        written_bytes: Bytes written.
        unordered_bytes: Of all these, those read or written in another order than they lie.
        uneven: See `Scheduled.uneven`.
    """

    kind: str
    label: str
    space: tuple[int, int]
    read_bytes: int
    written_bytes: int
    unordered_bytes: int
    uneven: bool = False


_Data = dict[tuple[int, str, int], tuple[int, tuple[tuple[int, ...], ...]]]
"""Bytes of what is used, and the shapes in which it is, by buffer, part and order."""


@dataclass
class _Group:
    members: list[Scheduled]
    space: tuple[int, int]
    kind: str
    bits: int  # its own, and those of the groups that it took in
    before: int = 0  # bits of the groups that must run earlier: of each at least one
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    added: set[int] = field(default_factory=set)  # of these, those that a scatter adds to
    first: int = 0  # places in the order of all loops
    last: int = 0
    data: dict[bool, _Data] = field(default_factory=dict)  # as `_data` has it


def _joined_space(first: _Group, second: _Group) -> tuple[int, int] | None:
    """The iteration space of both as one kernel, or None where they cannot be one."""
    if first.kind in ALONE or second.kind in ALONE:
        return None
    if "column" in (first.kind, second.kind) or BOTH in (first.kind, second.kind):
        return _across(first, second)
    if "row" in (first.kind, second.kind):
        row, other = (first, second) if first.kind == "row" else (second, first)
        if other.kind == "row":
            return row.space if row.space == other.space else None
        return row.space if _fits(row, other) and _in_rows(row, other) and not (_flat(row) and _across_memory(other)) else None
    if first.kind == second.kind == "scatter" and not _own(first) & _own(second):
        return None
    return first.space if first.space[0] == second.space[0] else None


def _shared(one: _Group, other: _Group, turning: bool, merging: bool = False) -> int:
    """Bytes that two groups read, or one makes and the other reads, in the same order: of loops that turn, where they may.

    Loops of several shapes read nothing alike unless their dimensions are merged.
    """
    sizes, others = _data(one, turning), _data(other, turning)
    return sum([size for key, (size, shapes) in sizes.items() if key in others and (merging or _alike(shapes, others[key][1]))])


def _data(group: _Group, turning: bool) -> _Data:
    """What a group reads or writes, by buffer, part, and order; found once as long as it is what it is."""
    if turning in group.data:
        return group.data[turning]
    found = group.data[turning] = _Data()
    for loop in group.members:
        straight = loop.stored_across or (turning and loop.turns)
        keys = {(buffer, part, 0 if straight else read.turned): read.read_bytes for (buffer, part), read in loop.reads.items()}
        for key, size in (keys | {(buffer, "", 0): size for buffer, size in loop.writes.items()}).items():
            _, shapes = found.get(key, (0, ()))
            found[key] = size, shapes if loop.shape in shapes else (*shapes, loop.shape)
    return found


@lru_cache(maxsize=4096)
def _alike(some: tuple[tuple[int, ...], ...], others: tuple[tuple[int, ...], ...]) -> bool:
    """Whether a loop of some shape reads a buffer as one of another: in the same shape, or in one with more behind it."""
    return any(all(a == b for a, b in zip(one, other, strict=False)) for one in some for other in others)


def _distance(one: _Group, other: _Group) -> int:
    return max(abs(one.first - other.last), abs(other.first - one.last))


def _own(group: _Group) -> set[tuple[int, str]]:
    """What each thread of a kernel reads one element of."""
    return {key for loop in group.members for key, access in loop.reads.items() if access.whole}


def _across(first: _Group, second: _Group) -> tuple[int, int] | None:
    """Of a reduction across memory: with its like, with one of the same elements along memory, or with what uses its sums."""
    if first.kind == second.kind:
        return first.space if first.space == second.space else None
    if {first.kind, second.kind} == {"row", "column"}:
        return _both_ways(first, second)
    reduction, other = (first, second) if first.kind in ("column", BOTH) else (second, first)
    if other.kind != "pointwise":
        return None
    if reduction.kind == "column" and other.space[0] == math.prod(reduction.space) and not _is_cut(reduction):
        return reduction.space
    if other.writes & reduction.reads:
        return None
    uses_sums = bool(other.reads & reduction.writes) and other.space[0] == reduction.space[reduction.kind == BOTH]
    fits = reduction.kind == BOTH and _fits(reduction, other) and _in_rows(reduction, other)
    return reduction.space if uses_sums or fits else None


def _is_cut(column: _Group) -> bool:
    """Whether a reduction across memory is cut into parts, which run over other elements than its input's loops."""
    return _in_parts(*column.space)


@lru_cache(maxsize=4096)
def _in_parts(kept: int, reduced: int) -> bool:
    """Of a column reduction to so many elements, each of so many: asked of the same ones again and again."""
    return bool(stages(["column"], [kept], [reduced], [0])[0] > 1)


def _joined_kind(first: str, second: str) -> str:
    kinds = {first, second}
    if BOTH in kinds or kinds == {"row", "column"}:
        return BOTH
    return next((kind for kind in ("row", "column", "scatter") if kind in kinds), first)


def _flat(group: _Group) -> bool:
    return any(loop.flat for loop in group.members)


def _across_memory(group: _Group) -> bool:
    return any(access.turned == ACROSS for loop in group.members for access in loop.reads.values())


def _fits(row: _Group, other: _Group) -> bool:
    """Whether a loop runs over a reduction's input or over its result."""
    return other.space[0] in (row.space[0] * row.space[1], row.space[0])


def _in_rows(row: _Group, other: _Group) -> bool:
    """Whether what loops run over in tiles has a reduction's rows: in tiles of other rows it does not run.

    So run matrices that are written transposed, and rows that are added to others (torch._inductor.config:
    triton.tiling_prevents_reduction_fusion).
    """
    return all(_rows_of_tiles(loop) in (0, row.space[0]) for loop in other.members)


def _rows_of_tiles(loop: Scheduled) -> int:
    """Rows that a loop runs over in tiles; 0 of one that does not."""
    return math.prod(loop.shape[:-1]) if loop.kind == "scatter" and loop.shape else loop.turned_rows


def _both_ways(first: _Group, second: _Group) -> tuple[int, int] | None:
    """Reductions of the same elements along memory and across it are one kernel where that is worth it."""
    row, column = (first, second) if first.kind == "row" else (second, first)
    kept, reduced = row.space
    fits = row.kind == "row" and column.space == (reduced, kept)
    enough = kept * reduced >= BOTH_WAYS_ELEMENTS and kept >= max(BOTH_WAYS_ROWS, 2 * reduced) and reduced <= BOTH_WAYS_COLUMNS
    enough &= not any(access.turned == ACROSS for loop in row.members for access in loop.reads.values())
    sums = all(loop.label in ("sum", "prod") for loop in column.members if loop.kind == "column")
    return row.space if fits and enough and sums and row.reads & column.reads else None


class _Fusion:
    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.groups: list[_Group | None] = []
        maker: dict[int, int] = {}
        self.moved: dict[int, int] = {}
        for loop in lowered.scheduled:
            index = len(self.groups)
            reads = {buffer for buffer, _ in loop.reads}
            made = set(loop.writes)
            added = made if loop.kind == "scatter" else set()
            group = _Group([loop], loop.space, loop.kind, 1 << index, 0, reads, made, added, index, index)
            for buffer in reads & maker.keys():
                earlier = maker[buffer]
                other = self.groups[earlier]
                assert other is not None
                group.before |= other.before | other.bits
            self.groups.append(group)
            maker.update(dict.fromkeys(loop.writes, index))

    def run(self) -> list[_Group]:
        """Rounds until nothing fuses; then one in which loops that could run in another order do."""
        for _ in range(ROUNDS):
            if not self._round(turning=False):
                break
        self._round(turning=True)
        return [group for group in self.groups if group is not None]

    def _round(self, turning: bool) -> int:
        """Fuse pairs of groups that share data, those of the highest score first; how many were."""
        pairs = [pair for pair in self._pairs() if self._space(*pair, turning)]
        scores = {pair: self._score(*pair, turning) for pair in pairs}
        fused = 0
        for first, second in sorted(pairs, key=scores.__getitem__, reverse=True):
            one, other = self._where(first), self._where(second)
            fused += one != other and self._fuse(one, other, turning)
        return fused

    def _pairs(self) -> list[tuple[int, int]]:
        """Groups that use a buffer, each with some of the next that do."""
        users: dict[int, list[int]] = {}
        for index, group in enumerate(self.groups):
            if group is not None and group.kind not in ALONE:
                for buffer in sorted(group.reads | group.writes):
                    users.setdefault(buffer, []).append(index)
        return list(
            dict.fromkeys(
                (first, second)
                for found in users.values()
                for position, first in enumerate(found)
                for second in found[position + 1 : position + 1 + ATTEMPTS]
            )
        )

    def _score(self, first: int, second: int, turning: bool) -> tuple[bool, int, int]:
        """What comes first: two reductions, or none; many shared bytes; neighbours."""
        one, other = self._group(first), self._group(second)
        reduces = [group.kind in REDUCTIONS for group in (one, other)]
        both_ways = {one.kind, other.kind} == {"row", "column"}
        shared = math.prod(one.space) if both_ways else _shared(one, other, turning)
        return reduces[0] == reduces[1] and shared > 0, shared, -_distance(one, other)

    def _space(self, first: int, second: int, turning: bool) -> tuple[int, int] | None:
        """The iteration space of two groups as one kernel; None where they are not made one."""
        one, other = self._group(first), self._group(second)
        space = _joined_space(one, other)
        if space is None or len(one.members) + len(other.members) > MOST_FUSED:
            return None
        if one.kind != BOTH and other.kind == BOTH:  # which nothing is put before (`Scheduler.can_fuse`)
            return None
        if {one.kind, other.kind} != {"row", "column"}:
            waits = bool((one.before & other.bits) | (other.before & one.bits))
            if _shared(one, other, turning, merging=turning) < (1 if waits else LEAST_SHARED):
                return None
            if not waits and _distance(one, other) > FURTHEST:
                return None
        return space

    def _where(self, index: int) -> int:
        while self.groups[index] is None:
            index = self.moved[index]
        return index

    def _group(self, index: int) -> _Group:
        group = self.groups[index]
        assert group is not None
        return group

    def _fuse(self, first: int, second: int, turning: bool) -> bool:
        """Make one kernel of two groups, if that is possible; it takes the place of the earlier."""
        one, other = self._group(first), self._group(second)
        space = self._space(first, second, turning)
        if space is None:
            return False
        for reader, writer in ((other, one), (one, other)):
            for loop in reader.members:
                for (buffer, _), access in loop.reads.items():
                    if buffer not in writer.writes:
                        continue
                    if not access.whole or (access.turned and not (loop.stored_across or (turning and loop.turns))):
                        return False
                    if buffer in writer.added:  # by others of the kernel's threads, at any time
                        return False
        both, needed = one.bits | other.bits, one.before | other.before
        between = needed & ~both
        # No third group may have to run after one of them and before the other: it would be among what the later one needs
        # and the earlier does not.
        rest = (one.before ^ other.before) & ~both if needed & both else 0
        while rest:
            middle = self.groups[self._where((rest & -rest).bit_length() - 1)]
            assert middle is not None
            if middle.before & both:
                return False
            rest &= rest - 1
        # What those lack that wait for one of them alone: where one waits for the other, those that wait for the earlier.
        known = one.before & other.before
        if needed & both:
            known = other.before if one.before & other.bits else one.before
        lacking = between & ~known
        one.members += other.members
        one.data = {}
        one.space = space
        one.kind = _joined_kind(one.kind, other.kind)
        one.reads |= other.reads
        one.writes |= other.writes
        one.added |= other.added
        one.bits, one.before = both, between
        one.first, one.last = min(one.first, other.first), max(one.last, other.last)
        place, gone = sorted((first, second))
        self.groups[place], self.groups[gone] = one, None
        self.moved[gone] = place
        if lacking:
            for group in filter(None, self.groups):
                if group.before & both:
                    group.before |= between
        return True


def kernels(lowered: Lowered) -> list[list[int]]:
    """Which loops run together: indices into `lowered.scheduled`, in the order of each kernel's first; GEMMs left out."""
    position = {id(loop): index for index, loop in enumerate(lowered.scheduled)}
    groups = _Fusion(lowered).run()
    return [sorted(position[id(loop)] for loop in group.members) for group in groups if group.kind not in ("gemm", "place")]


def measured(lowered: Lowered, together: list[list[int]]) -> list[RawGroup]:
    """What each kernel moves.

    Args:
        lowered: A graph's loops, at any batch.
        together: Which of them run together, as `kernels` found it at one batch.
    """
    loops = lowered.scheduled
    of = {index: number for number, members in enumerate(together) for index in members}
    users: dict[int, set[int]] = {}
    for index, loop in enumerate(loops):
        number = of.get(index, -1)
        for buffer, _ in loop.reads:
            users.setdefault(buffer, set()).add(number)
    return [_measured(lowered, [loops[index] for index in members], number, users) for number, members in enumerate(together)]


def _counted(operator: str, loops: list[Scheduled]) -> str:
    """How often an operator is computed: by each loop, but once of what several read."""
    number = sum(operator in loop.operators for loop in loops)
    number += len({name for loop in loops for name in loop.operators if name.startswith(operator + OF)})
    return operator if number == 1 else f"{operator}*{number}"


def _measured(lowered: Lowered, loops: list[Scheduled], number: int, users: dict[int, set[int]]) -> RawGroup:
    made = {buffer: size for loop in loops for buffer, size in loop.writes.items()}
    alone = {number}
    kept = {buffer for buffer in made if buffer in lowered.outputs or users.get(buffer, alone) != alone}
    parts: dict[int, dict[str, int]] = {}
    unordered: set[int] = set()
    # A loop that could run in either order runs in that of the others, and then it is what it writes that is turned.
    follows = len(loops) > 1 and not all(loop.turns for loop in loops)
    turned_writes = 0
    if follows:
        turned_writes = sum(size for loop in loops if loop.across for b, size in loop.writes.items() if b in kept)
    for loop in loops:
        for (buffer, part), access in loop.reads.items():
            if buffer not in made:
                sizes, size, fetched = parts.setdefault(buffer, {}), access.read_bytes, part.rpartition(FETCHED)[0] or part
                if size > sizes.get(fetched, -1):
                    sizes[fetched] = size
                if access.turned == ACROSS and not (follows and loop.turns):
                    unordered.add(buffer)
    # Parts of a buffer may overlap: together they are no more than all of it.
    read = {
        buffer: min(sum(sizes.values()), max(lowered.sizes[buffer], *sizes.values())) if len(sizes) > 1 else sum(sizes.values())
        for buffer, sizes in parts.items()
    }
    kinds = {loop.kind for loop in loops}
    kind = next((kind for kind in PRECEDENCE if kind in kinds), "pointwise")
    space = next((loop.space for loop in loops if loop.kind == kind), loops[0].space)
    if kinds >= {"row", "column"}:
        kind = BOTH
    if kind == "pointwise" and any(loop.gathers for loop in loops):
        kind = "gather"
    said = {loop.label for loop in loops}.union(*(loop.operators for loop in loops)) - UNSAID
    said = {name.partition(OF)[0] if OF in name else name for name in said}
    if counted := said & COUNTED:
        said = (said - COUNTED) | {_counted(operator, loops) for operator in counted}
    if kind == "column" and "embedding" in said:
        said |= {GATHERED_ACROSS}
    label = " ".join(sorted(said if kinds & {"row", "column"} else said - IN_REDUCTIONS))
    uneven = any(loop.uneven for loop in loops if loop.kind == "row") if "row" in kinds else False
    written = sum(made[buffer] for buffer in kept)
    return RawGroup(kind, label, space, sum(read.values()), written, turned_writes + sum(read[b] for b in unordered), uneven)

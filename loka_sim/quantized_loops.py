"""A step's loops with some of its GEMMs in FP8, as torch.compile gets them from torchao's linears.

A tensor is quantized by loops of its own: its largest magnitudes, a scale from them, the cast to 8 bits, and the cast of the
transposed tensor where the backward reads it so. What made the tensor for bf16 GEMMs alone is computed inside these loops where
torch.compile would, and what else fuses with them is left to `loka_sim.fusion`. With one scale the magnitudes must be there
before the cast: two kernels, and a small one between them. With a scale for each row (or 128 of its elements) magnitudes and
cast are one kernel, and join a norm before them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from loka_sim.loops import ACROSS, ADDED, DENSE, OF, TURNED, Access, Lowered, Reads, Scheduled
from perfmodel.attention import KINDS as ATTENTION

# torch._inductor.config.realize_reads_threshold: what reads more is written for several uses.
MOST_READS = 4
# What a backward never computes anew (torch/_functorch/partitioners.py, `get_default_op_list`, torch 2.11 and 2.13).
NEVER_AGAIN = frozenset({"cat", "slice_scatter", "constant_pad_nd"})
# How torch.compile cuts a reduction to one value (torch._inductor.choices.reduction_split_factor, torch 2.11 and 2.13): on a
# GPU of 132 multiprocessors of 2,048 threads, in pieces of blocks of 256 threads.
THREADS, LEAST_EACH, MOST_EACH = 256, 32, 512
MULTIPROCESSORS, RESIDENT = 132, 2048
BLOCK = 128

MAGNITUDES, CAST = frozenset({"abs", "amax"}), frozenset({"mul", "clamp_min", "clamp_max"})
# Where each of several tensors that are put together, some of them turned, has an element: found anew for every one. Pieces of
# as few elements as a block of threads takes at least are read as fast as others (InterFormer at other widths).
PLACES = frozenset({"turned_cat"})
# The largest of many rows' or pieces' magnitudes is found by one block of threads: slower where they do not fill its last turn.
ONE_BLOCK, ONE_BLOCK_MASKED, LOADED = frozenset({"one_block"}), frozenset({"one_block_masked"}), 2048
CALLED = ("gemm", "external", "copy", *ATTENTION)
"""Kinds of what reads its tensors from memory as they are."""
BIAS = frozenset({"add"})
# torchao finds the scales of rows in FP64, and its recipe rounds them to powers of two. torch.compile computes them anew for
# every element behind a GEMM, and where a reduction over rows casts by the scales of columns, too.
FP32, FP64, ROUNDED = "", "fp64", "fp64_rounded"
RESCALE = {FP64: frozenset({"rescale"}), ROUNDED: frozenset({"rescale_rounded"})}
BY_COLUMNS = {
    FP32: frozenset[str](), FP64: frozenset({"column_scale"}), ROUNDED: frozenset({"column_scale_rounded"}),
}  # fmt: skip


class Taken(NamedTuple):
    """An operand of an FP8 GEMM.

    Attributes:
        scaling: tensorwise, rowwise, block1x128 or block128x128.
        turned: It is read transposed to how it is stored.
        rows: Rows of the tensor as it is stored.
        columns: Its columns.
        after: Its scale is multiplied to the GEMM's output by a kernel behind it.
        scales: How its scales are found: `FP32`, `FP64` or `ROUNDED`.
    """

    scaling: str
    turned: bool
    rows: int
    columns: int
    after: bool = False
    scales: str = FP32

    @property
    def across(self) -> bool:
        """Its scales are those of the tensor's columns."""
        return self.turned and self.scaling == "rowwise"


Assigned = Mapping[tuple[str, str], Mapping[str, Taken]]
"""By site and pass: x, w or g, and how it is taken."""


def pieces(elements: int) -> int:
    """Into how many parts torch.compile cuts the reduction of so many elements to one value."""
    if elements <= THREADS * LEAST_EACH:
        return 1
    if elements <= LEAST_EACH * MULTIPROCESSORS * RESIDENT:
        each = LEAST_EACH
    elif elements < MOST_EACH * MULTIPROCESSORS * RESIDENT:
        blocks = MULTIPROCESSORS * RESIDENT // (2 * THREADS)
        each = _near(elements, -(-elements // (THREADS * blocks)), 30)
        each = max(each, LEAST_EACH)
    else:
        each = _near(elements, MOST_EACH, 50)
    return -(-elements // (each * THREADS))


def _one_block(elements: int) -> frozenset[str]:
    """What the reduction of so many magnitudes by one block of threads is called, where they are more than it takes at once."""
    if elements <= THREADS * LEAST_EACH:
        return frozenset()
    return ONE_BLOCK if elements % LOADED == 0 else ONE_BLOCK_MASKED


def _near(elements: int, wanted: int, most: int) -> int:
    """A divisor of `elements` less than `most` away from the wanted number, else that number."""
    for distance in range(most):
        for divisor in (wanted - distance, wanted + distance):
            if divisor > 0 and elements % divisor == 0:
                return divisor
    return wanted


def _readers(loops: Iterable[Scheduled]) -> dict[int, list[Scheduled]]:
    """Of each buffer the loops that read it."""
    found: dict[int, list[Scheduled]] = {}
    for loop in loops:
        for buffer in {buffer for buffer, _ in loop.reads}:
            found.setdefault(buffer, []).append(loop)
    return found


def quantized(step: Lowered, assigned: Assigned) -> Lowered:
    """The loops of a step whose GEMMs are FP8 where that is assigned; GEMMs whose pass the step does not name stay."""
    return _Quantized(step, assigned).run()


@dataclass
class _Quantized:
    step: Lowered
    assigned: Assigned

    def run(self) -> Lowered:
        loops = [loop.copy(dict(loop.reads)) for loop in self.step.scheduled]
        self.sizes, self.next = dict(self.step.sizes), max(self.step.sizes, default=0) + 1
        self.taken = {id(loop): self.assigned[loop.site] for loop in loops if loop.site in self.assigned}
        self.maker = {buffer: loop for loop in loops for buffer in loop.writes}
        loops = self._without_dense(self._without_spread(loops))
        inside = self._computed_inside(loops)
        self.again, self.kept = self._computed_again(loops, inside), self._kept(loops)
        result: list[Scheduled] = []
        made: dict[tuple[object, ...], int] = {}
        readers = _readers(loops)
        for loop in loops:
            if any(buffer in inside for buffer in loop.writes):
                continue
            taken = self.taken.get(id(loop))
            if taken is None:
                result.append(loop)
                continue
            # What another library quantizes is written in bf16 for it.
            reads = {at: read for at, read in loop.reads.items() if not self._takes(loop, at[0])}
            for name, how in taken.items():
                if name in loop.operands:
                    result += self._made(loop, loop.operands[name], how, inside, made)
                    place = loop.operands[name][:2]
                    for buffer in (
                        made[(*place, how.scaling, how.turned, loop.backward)],
                        made[(*place, how.scaling, how.across)],
                    ):
                        reads[buffer, ""] = Access(self.sizes[buffer], False)
            after = next((RESCALE[how.scales] for how in taken.values() if how.after), frozenset[str]())
            bias = self._added_behind(loop, readers)
            if after or bias:
                ((buffer, size),) = loop.writes.items()
                raw = self._buffer(size)
                result.append(loop.copy({at: read for at, read in reads.items() if at not in bias}, {raw: size}))
                sources, operators = {(raw, ""): Access(size, True), **bias}, after | (BIAS if bias else frozenset())
                result.append(
                    Scheduled(
                        "mul" if after else "add", "pointwise", (size // 2, 1), sources, {buffer: size}, operators=operators,
                        backward=loop.backward,
                    )
                )  # fmt: skip
            else:
                result.append(loop.copy(reads))
        return Lowered(self._rescaled_inside(result), self.sizes, self.step.outputs)

    def _rescaled_inside(self, loops: list[Scheduled]) -> list[Scheduled]:
        """The loops with each product scaled where it is read, by each reader anew, if all of them are loops.

        So torch.compile has it: a product and two scales are no more reads, and their 20 to 27 operations no more, than it
        computes anew for any number of uses.
        """
        readers = _readers(loops)
        inside = {}
        for loop in loops:
            (buffer, *_) = loop.writes
            if loop.operators in RESCALE.values() and buffer in readers and buffer not in self.step.outputs:
                if not any(reader.kind in CALLED for reader in readers[buffer]):
                    inside[buffer] = loop
        if not inside:
            return loops
        found = [loop.copy(dict(loop.reads)) for loop in loops if inside.keys().isdisjoint(loop.writes)]
        for loop in found:
            for buffer, part in [at for at in loop.reads if at[0] in inside]:
                ((raw, _),) = inside[buffer].reads
                loop.reads[raw, part] = loop.reads.pop((buffer, part))
                (operator,) = inside[buffer].operators
                loop.operators |= {f"{operator}{OF}{raw}{part}", "mul"}
        return found

    # What is no longer written.

    def _without_spread(self, loops: list[Scheduled]) -> list[Scheduled]:
        """The loops without the copies of biases to each row: those of FP8 products are added without."""
        copies = {buffer for loop in loops if loop.kind == "copy" for buffer in loop.writes}
        gone = {buffer for loop in loops if id(loop) in self.taken for buffer, _ in loop.reads if buffer in copies}
        for loop in loops:
            if id(loop) in self.taken:
                loop.reads = {at: read for at, read in loop.reads.items() if at[0] not in gone}
        return [
            loop
            for loop in loops
            if not (gone & loop.writes.keys() or (loop.label == ADDED and gone & {buffer for buffer, _ in loop.reads}))
        ]

    def _without_dense(self, loops: list[Scheduled]) -> list[Scheduled]:
        """The loops without copies whose padding was in the way of products that are FP8 now: these have none padded.

        What an FP8 product needs is not padded (`torch._inductor.graph.mark_nodes_dislike_padding`, 2.11 and 2.13).
        """
        source = {buffer: next(iter(loop.reads))[0] for loop in loops if loop.label == DENSE for buffer in loop.writes}
        for loop in loops:
            for name in self.taken.get(id(loop), ()):
                if name in loop.operands and (buffer := loop.operands[name][0]) in source:
                    _, part, elements = loop.operands[name]
                    loop.operands = {**loop.operands, name: (source[buffer], part, elements)}
                    reads = {at for at in loop.reads if at[0] == buffer}
                    loop.reads = {(source[at[0]] if at in reads else at[0], at[1]): read for at, read in loop.reads.items()}
        needed = _readers(loops).keys() | self.step.outputs
        return [loop for loop in loops if loop.label != DENSE or needed & loop.writes.keys()]

    def _added_behind(self, gemm: Scheduled, readers: Mapping[int, list[Scheduled]]) -> Reads:
        """What a product reads of a bias that is added in a kernel of its own: for what is no loop, which cannot add it itself.

        torchao adds biases behind its FP8 products (`Float8Linear.forward`, 0.17).
        """
        (buffer,) = gemm.writes
        multiplied = {source for source, _, _ in gemm.operands.values()}
        called = [reader for reader in readers.get(buffer, []) if reader.kind in CALLED and not self._takes(reader, buffer)]
        return {at: read for at, read in gemm.reads.items() if at[0] not in multiplied} if called else {}

    def _computed_again(self, loops: list[Scheduled], inside: Mapping[int, Scheduled]) -> dict[int, Scheduled]:
        """Buffers of the forward, as a norm's result, that of the backward only FP8 GEMMs read: it keeps what they are made of.

        That is as torch.compile's partitioner has it where the backward reads it anyway (`torch/_functorch/partitioners.py`).
        """
        kept = {buffer for loop in loops if loop.backward for buffer, _ in loop.reads}
        readers = _readers(loop for loop in loops if loop.backward)
        found: dict[int, Scheduled] = {}
        for loop in loops:
            (buffer, *others) = loop.writes
            if loop.kind != "pointwise" or loop.backward or loop.gathers or others or loop.label in NEVER_AGAIN:
                continue
            if buffer not in readers or buffer in inside:
                continue
            large = {source for source, _ in loop.reads if 2 * self.sizes[source] >= self.sizes[buffer]}
            there = all(source in kept or source not in self.maker for source in large)
            if there and buffer not in self.step.outputs and all(self._takes(reader, buffer) for reader in readers[buffer]):
                found[buffer] = loop
        return found

    def _kept(self, loops: list[Scheduled]) -> set[int]:
        """Buffers of the forward that the backward keeps in 8 bits: only FP8 GEMMs read them there, and it computes none anew."""
        readers = _readers(loop for loop in loops if loop.backward)
        return {
            buffer
            for loop in loops
            if not loop.backward and (loop.label in NEVER_AGAIN or loop.gathers)
            for buffer in loop.writes
            if buffer in readers and all(self._takes(reader, buffer) for reader in readers[buffer])
        }

    def _computed_inside(self, loops: list[Scheduled]) -> dict[int, Scheduled]:
        """Buffers that only FP8 GEMMs and loops read: those loops compute them anew, from what their maker reads."""
        wanted = {loop.operands[name][0] for loop in loops for name in self.taken.get(id(loop), ()) if name in loop.operands}
        readers = _readers(loops)
        inside: dict[int, Scheduled] = {}
        for loop in loops:
            (buffer, *others) = loop.writes
            fits = loop.kind == "pointwise" and not (loop.gathers or loop.much or others) and len(loop.reads) <= MOST_READS
            if not fits or buffer not in wanted or buffer in self.step.outputs or self._is_kept_as_it_is(loop, readers[buffer]):
                continue
            if all(self._takes(reader, buffer) or reader.kind in ("pointwise", "row", "column") for reader in readers[buffer]):
                inside[buffer] = loop
                for reader in readers[buffer]:
                    if not self._takes(reader, buffer):
                        self._compute_inside(reader, buffer, loop)
                        for read, _ in loop.reads:
                            if reader not in readers.setdefault(read, []):
                                readers[read].append(reader)
        return inside

    def _is_kept_as_it_is(self, loop: Scheduled, readers: Iterable[Scheduled]) -> bool:
        """Whether the backward reads what it does not compute anew, and not in 8 bits alone: the forward writes that."""
        (buffer,) = loop.writes
        again = loop.backward or loop.label not in NEVER_AGAIN
        return not again and any(reader.backward and not self._takes(reader, buffer) for reader in readers)

    def _takes(self, loop: Scheduled, buffer: int) -> bool:
        """Whether a GEMM reads a buffer in 8 bits."""
        return any(name in loop.operands and loop.operands[name][0] == buffer for name in self.taken.get(id(loop), ()))

    def _compute_inside(self, reader: Scheduled, buffer: int, maker: Scheduled) -> None:
        for key in [key for key in reader.reads if key[0] == buffer]:
            access = reader.reads.pop(key)
            for at, read in self._part(maker, buffer, key[1], access).items():
                known = reader.reads.get(at)
                reader.reads[at] = read if known is None or known.read_bytes < read.read_bytes else known
        reader.operators |= maker.operators

    def _part(self, maker: Scheduled, buffer: int, part: str, access: Access) -> Reads:
        """What a loop reads that computes a buffer, or a part of it, instead of reading it."""
        share = min(1.0, access.read_bytes / max(self.sizes[buffer], 1))
        found: Reads = {}
        for (source, piece), read in maker.reads.items():
            order = 0 if read.turned == access.turned else max(read.turned, access.turned)
            whole = access.whole and read.whole
            found[source, piece or (part if share < 1 else "")] = Access(math.ceil(read.read_bytes * share), whole, order)
        return found

    # What is computed for the GEMMs.

    def _buffer(self, size_bytes: int) -> int:
        self.sizes[self.next] = size_bytes
        self.next += 1
        return self.next - 1

    def _made(
        self, gemm: Scheduled, operand: tuple[int, str, int], how: Taken, inside: Mapping[int, Scheduled],
        made: dict[tuple[object, ...], int],
    ) -> Iterator[Scheduled]:  # fmt: skip
        """The loops that an operand still needs: scale and cast, each once."""
        buffer, part, elements = operand
        backward = gemm.backward and buffer not in self.kept
        key = (buffer, part, how.scaling, how.turned, gemm.backward)
        if key in made:
            return
        maker = inside.get(buffer) or (self.again.get(buffer) if backward else None)
        whole = Access(2 * elements, True)
        # The forward quantizes its input as it is; all else torchao reshapes to matrices before.
        shape = () if not gemm.backward and operand == gemm.operands.get("x") else (how.rows, how.columns)
        reads = {(buffer, part): whole} if maker is None else self._part(maker, buffer, part, whole)
        operators = frozenset() if maker is None else maker.operators
        # One scale serves both readings, and the backward those of the forward.
        scale = (buffer, part, how.scaling, how.across)
        if scale not in made:
            for loop in self._magnitudes(reads, operators, elements, how, backward):
                if loop.kind == "row" and loop.space == (how.rows, how.columns):
                    loop.shape = shape
                yield loop
                (made[scale],) = loop.writes
        turned = {at: self._turned(read) if how.turned and read.whole else read for at, read in reads.items()}
        made[key] = self._buffer(elements)
        along = how.scaling != "tensorwise" and not how.across  # a scale for what lies side by side: there when its turn comes
        sources = {**turned, (made[scale], ""): Access(self.sizes[made[scale]], along)}
        operators |= CAST | (BY_COLUMNS[how.scales] if how.across else frozenset())
        # What the forward keeps so it turns behind all else, too far from what reads it as it lies.
        stored_across = how.turned and backward and operand == list(gemm.operands.values())[1]
        yield Scheduled(
            "cast", "pointwise", (elements, 1), sources, {made[key]: elements}, operators=operators, backward=backward,
            stored_across=stored_across, turned_rows=how.rows if how.turned else 0,
            shape=shape if stored_across or not how.turned else (),
        )  # fmt: skip

    @staticmethod
    def _turned(read: Access) -> Access:
        """A reading by a loop over the transposed tensor: of one that was across memory the closest elements are close again."""
        return Access(read.read_bytes, read.whole, TURNED if read.turned == ACROSS else ACROSS)

    def _magnitudes(
        self, reads: Reads, operators: frozenset[str], elements: int, how: Taken, backward: bool
    ) -> Iterator[Scheduled]:
        def reduction(kind: str, kept: int, uneven: bool = False, flat: bool = False) -> Scheduled:
            space, writes = (kept, max(elements // kept, 1)), {self._buffer(4 * kept): 4 * kept}
            found = operators | MAGNITUDES
            if (
                flat
                and elements > kept * THREADS * LEAST_EACH
                and "cat" in operators
                and any(read.turned for read in reads.values())
            ):
                found |= PLACES
            return Scheduled("amax", kind, space, reads, writes, False, uneven, found, backward, flat=flat)

        if how.scaling == "rowwise":
            yield reduction("column" if how.across else "row", how.columns if how.across else how.rows)
        elif how.scaling == "block128x128":
            yield reduction("row", max(elements // BLOCK**2, 1), uneven=True)
        elif how.scaling.startswith("block1x128"):
            yield reduction("row", max(elements // BLOCK, 1))
        else:
            rows = self._rows_before(reads, elements)
            kept = rows or pieces(elements)
            # Where pieces are not even, each element is looked for, and some are none.
            first = reduction("row", kept, uneven=not rows and elements % kept > 0, flat=not rows)
            yield first
            if kept > 1:
                (partial,) = first.writes
                last = {self._buffer(4): 4}
                yield Scheduled(
                    "amax", "row", (1, kept), {(partial, ""): Access(4 * kept, True)}, last,
                    operators=MAGNITUDES | CAST | _one_block(kept), backward=backward,
                )  # fmt: skip

    def _rows_before(self, reads: Reads, elements: int) -> int | None:
        """Rows of the reduction that made what is quantized: torch.compile takes the magnitudes row by row, too."""
        buffers = {buffer for buffer, _ in reads}
        seen: set[int] = set()
        while buffers:
            seen |= buffers
            loops = [self.maker[buffer] for buffer in buffers if buffer in self.maker]
            spaces = {loop.space for loop in loops if loop.kind == "row"}
            if spaces:
                ((kept, reduced),) = spaces if len(spaces) == 1 else ((1, 0),)
                return kept if kept * reduced == elements else None
            buffers = {buffer for loop in loops if loop.kind == "pointwise" for buffer, _ in loop.reads} - seen
        return None

"""Loops as a compiler schedules them before it fuses any: what each reads, in which order, and writes."""

from __future__ import annotations

from dataclasses import dataclass, field

TURNED, ACROSS = 1, 2
ADDED = "added"
"""Stands for a product's reading of the bias that was copied to each of its rows."""
DENSE = "dense"
"""Labels a copy without the padding between rows, for a product that reads its operand so."""
PICKED, PUT = "picked", "put"
"""Stand for elements that are looked up one by one, by several indices, and for such that are added so."""
OF = "@"
"""In an operator's name before what it is computed of: once for each in a kernel."""
FETCHED = "~"
"""In a part's name behind what is fetched with it: slices of a tensor with one step lie in the same sectors."""


@dataclass(frozen=True)
class Access:
    """One reading of a buffer.

    Attributes:
        read_bytes: Distinct bytes.
        whole: Every element of the reader's loop reads its own, so that both may be one loop.
        turned: `TURNED` where the elements lie in another order than the reader's loop runs, `ACROSS` where also the
            loop's closest elements are not the closest in memory; 0 where the order is the same.
    """

    read_bytes: int
    whole: bool
    turned: int = 0


Reads = dict[tuple[int, str], Access]
"""By buffer, and by which part of it (empty: all of it)."""

Operand = tuple[int, str, int]
"""Buffer, part, and elements."""


@dataclass
class Scheduled:
    """One loop nest, or one library call, before fusion.

    Attributes:
        label: The aten operator that ends it.
        operators: All that are computed in it.
        kind: pointwise, row (reduces along memory), column (across it), scatter, fill, gemm, copy (torch's own), external.
        space: Elements kept and elements reduced for each of them.
        reads: What it reads.
        writes: Bytes of each buffer that it makes.
        gathers: It reads at indices that data decide.
        uneven: A reduction that reads something across memory, or one element for several of its own, as a mask.
        operators: The aten operators in it, its own among them.
        backward: It runs in the backward.
        flat: A reduction to one value, in pieces that are no rows, or a copy of what was written in another order: nothing that
            runs in another order joins it.
        stored_across: It runs in the order of what it reads, and turns what it writes.
        shape: Sizes of the tensor that it runs over, but those of 1, the outermost first; empty where it may have any. Until
            torch.compile has fused loops it merges none, and such over the same elements in other shapes read nothing alike.
        much: It computes more than is computed anew where its result is used.
        turned_rows: Of a loop that writes a matrix transposed, the matrix' rows; 0 of any other.
        gemm: Groups, m, n and k of a GEMM; None of everything else.
        operands: What a GEMM multiplies: buffer, part, elements; named `x`, `w` or `g` once it is known whose GEMM it is.
        site: Whose GEMM it is, and which pass; empty where that is not known.
    """

    label: str
    kind: str
    space: tuple[int, int]
    reads: Reads
    writes: dict[int, int]
    gathers: bool = False
    uneven: bool = False
    operators: frozenset[str] = frozenset()
    backward: bool = False
    gemm: tuple[int, int, int, int] | None = None
    operands: dict[str, Operand] = field(default_factory=dict)
    site: tuple[str, str] = ("", "")
    flat: bool = False
    stored_across: bool = False
    turned_rows: int = 0
    much: bool = False
    shape: tuple[int, ...] = ()

    def copy(self, reads: Reads, writes: dict[int, int] | None = None) -> Scheduled:
        """The same with other reads, and writes if given; `dataclasses.replace` takes several times as long."""
        return Scheduled(
            self.label, self.kind, self.space, reads, self.writes if writes is None else writes, self.gathers, self.uneven,
            self.operators, self.backward, self.gemm, self.operands, self.site, self.flat, self.stored_across,
            self.turned_rows, self.much, self.shape,
        )  # fmt: skip

    @property
    def turns(self) -> bool:
        """A loop that brings elements into another order and could run in either; parts of a concatenation may lie in any."""
        large = [access for access in self.reads.values() if 2 * access.read_bytes >= max(self.writes.values(), default=0)]
        whole = [access for access in large if access.whole]
        return self.kind == "pointwise" and not self.flat and bool(whole) and all(access.turned for access in whole)

    @property
    def across(self) -> bool:
        """A loop that turns the closest elements too."""
        return self.turns and any(access.turned == ACROSS for access in self.reads.values())


@dataclass
class Lowered:
    """A graph's loops in order, and the buffers that outlive it.

    Attributes:
        scheduled: Loops and library calls.
        sizes: Bytes of every buffer, inputs among them.
        outputs: Buffers that leave the graph.
        inputs: Of one graph, the buffers of its inputs by name.
        results: Of one graph, the whole buffers that leave it, by name.
    """

    scheduled: list[Scheduled] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)
    inputs: dict[str, int] = field(default_factory=dict)
    results: dict[str, int] = field(default_factory=dict)

"""Results while a graph is lowered: what each is computed from, as long as it is not written, and the views that share it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from loka_sim.capture.operators import CONSTANT, Computed
from loka_sim.loops import Access, Reads

# torch._inductor.config, alike in torch 2.11 and 2.13: realize_opcount_threshold, realize_reads_threshold,
# realize_acc_reads_threshold.
MOST_OPERATIONS, MOST_READS, MOST_READS_AT_ALL = 30, 4, 8


class Behind(NamedTuple):
    """What is computed of a product wherever it is read: operations, how many of them numbers that others share, and readings."""

    operations: int
    numbers: int
    readings: int


# As torch.compile counts them (`torch._inductor.ir.Loops.inner_fn_opcount`, torch 2.13) of what torchao 0.17 computes behind its
# FP8 products: the scales of rows and columns by its rowwise recipe, and biases.
SCALING, BIAS = Behind(26, 3, 2), Behind(2, 0, 1)


@dataclass
class Root:
    """A result that views share: computed where it is used until it is written.

    Attributes:
        computed_behind: What it computes of products, by which part of which.
        behind: What is computed of it where it is read.
        shape: See `Scheduled.shape`.
        as_traced: Its sizes follow one another in memory as where they were traced, or (False) as they are counted; None as long
            as the compiler is free to lay them.
    """

    numel: int
    itemsize: int
    label: str
    reads: Reads = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    computed: frozenset[Computed] = frozenset()
    computed_behind: frozenset[tuple[str, int, Behind]] = frozenset()
    gathers: bool = False
    buffer: int | None = None
    behind: Behind | None = None
    shape: tuple[int, ...] = ()
    as_traced: bool | None = None

    @property
    def computes_much(self) -> bool:
        """More than is computed anew where the result is used, however often."""
        more = sum(behind.operations - behind.numbers for _, _, behind in self.computed_behind)
        numbers = max((behind.numbers for _, _, behind in self.computed_behind), default=0)
        return len(self.computed) + more + numbers > MOST_OPERATIONS

    @property
    def readings(self) -> int:
        """What it reads, scales and biases among them."""
        return len(self.reads) + sum(behind.readings for _, _, behind in self.computed_behind)


@dataclass(frozen=True)
class View:
    """All of a result, or a part of it.

    Attributes:
        root: The result.
        part: Which part, by a name; empty for all of it.
        numel: Elements of the part.
        whole: What reads it reads each element once, each for its own.
        spread: Of the memory that is fetched in sectors, one part in so many is used.
    """

    root: Root
    part: str
    numel: int
    whole: bool
    spread: int = 1


def inline(root: Root, view: View) -> None:
    """Read what is written inside another result; compute there what is not."""
    inside = view.root
    if inside.buffer is not None:
        root.computed |= {(view.part, inside.buffer)}
        if inside.behind:
            root.computed_behind |= {(view.part, inside.buffer, inside.behind)}
        return
    # A part of a result is computed for itself, all but its constants.
    root.computed |= {(view.part + part if part != CONSTANT else part, what) for part, what in inside.computed}
    root.computed_behind |= {(view.part + part, *rest) for part, *rest in inside.computed_behind}  # type: ignore[misc]
    root.operators |= inside.operators
    root.gathers |= inside.gathers


def add(reads: Reads, key: tuple[int, str], access: Access) -> None:
    """Read a part of a buffer, perhaps once more."""
    known = reads.get(key)
    if known is None:
        reads[key] = access
    else:
        bytes_read = max(known.read_bytes, access.read_bytes)
        reads[key] = Access(bytes_read, known.whole and access.whole, max(known.turned, access.turned))

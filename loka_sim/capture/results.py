"""Results while a graph is lowered: what each is computed from, as long as it is not written, and the views that share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from loka_sim.capture.operators import CONSTANT, Computed
from loka_sim.loops import Access, Reads

# torch._inductor.config, alike in torch 2.11 and 2.13: realize_opcount_threshold, realize_reads_threshold,
# realize_acc_reads_threshold.
MOST_OPERATIONS, MOST_READS, MOST_READS_AT_ALL = 30, 4, 8

# Operations of a product's scaling by torchao's rowwise recipe beside its reading, three of them numbers that scalings share, and
# the scales' own readings (`torch._inductor.ir.Loops.inner_fn_opcount`, torch 2.13, torchao 0.17).
SCALING, SCALING_CONSTANTS, SCALES_READ = 26, 3, 2


@dataclass
class Root:
    """A result that views share: computed where it is used until it is written.

    Attributes:
        scalings: Products, and which part of each, that it multiplies by their scales.
        scaled: A product that is multiplied by its row's and its column's scales where it is read.
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
    scalings: frozenset[tuple[str, int]] = frozenset()
    gathers: bool = False
    buffer: int | None = None
    scaled: bool = False
    shape: tuple[int, ...] = ()
    as_traced: bool | None = None

    @property
    def computes_much(self) -> bool:
        """More than is computed anew where the result is used, however often."""
        shared = SCALING_CONSTANTS * bool(self.scalings)
        return len(self.computed) + (SCALING - SCALING_CONSTANTS) * len(self.scalings) + shared > MOST_OPERATIONS

    @property
    def readings(self) -> int:
        """What it reads, scales among them."""
        return len(self.reads) + SCALES_READ * len(self.scalings)


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
        root.scalings |= {(view.part, inside.buffer)} if inside.scaled else set()
        return
    # A part of a result is computed for itself, all but its constants.
    root.computed |= {(view.part + part if part != CONSTANT else part, what) for part, what in inside.computed}
    root.scalings |= {(view.part + part, buffer) for part, buffer in inside.scalings}
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

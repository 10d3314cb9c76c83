"""One training step as operations on streams: the model's kernels in their order, and what is exchanged around them.

Compute runs the forward site by site, then the backward in reverse. The first site that reads tables waits for the
embeddings' all-to-all, and so does all behind it; the embeddings' gradients leave when the last such site's backward is
through. Dense gradients are copied into buckets, which are reduced unit by unit while the backward goes on; with FSDP the next
unit's parameters are gathered while one computes, and copied to their places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from loka_sim.communication import Collective, Communication, Unit
from loka_sim.dispatch.candidates import Row
from loka_sim.dispatch.cost import Time
from loka_sim.dispatch.steps import RUNTIME, as_run, torch_makes
from loka_sim.host_time import called_on_several
from loka_sim.overlap import slower
from perfmodel.kernels import KERNELS
from perfmodel.timeline import COMPUTE, HOST, Op, Timeline, schedule

if TYPE_CHECKING:
    from loka_sim.fp8_step import Converted
    from loka_sim.whatif import SiteDecision, WhatIf

LOOKUP, FORWARD, LOSS, BACKWARD, TABLE_UPDATE, OPTIMIZER = PHASES = (
    "look-up", "forward", "loss", "backward", "table update", "optimizer",
)  # fmt: skip
"""Parts of a step, in order."""

BF16, DECISION = "bf16", "decision"
RECOMPUTE = "#recompute"
"""Ends the name of a site that is a forward run again in the backward."""


@dataclass(frozen=True)
class Piece:
    """One kernel in its place of the step.

    Attributes:
        phase: One of `PHASES`. Look-ups precede the exchange of embeddings, table updates follow that of their
            gradients, and the optimizer follows the last reduction.
        name: What a trace calls it.
        kind: What sums call it: gemm, quantize, norm, ...
        time: Microseconds with the 90% interval.
        site: Name of the site that it belongs to: its unit's parameters must be there, and its gradients come of it. Pieces
            without one are spread evenly over their phase.
        reads_tables: Its site needs the embeddings, and its backward makes their gradients.
        alike: Pieces that name the same are off by the same share.
        details: What a trace shows of it.
        launches: What a host launches for it.
    """

    phase: str
    name: str
    kind: str
    time: Time
    site: str | None = None
    alike: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    reads_tables: bool = True
    launches: int = 1


Launched = Callable[["SiteDecision", str], Sequence[Row]]
"""What a site's pass launches, in order."""


def in_bf16(site: SiteDecision, name: str) -> Sequence[Row]:
    """A pass of the model as it is."""
    return [site.shape.row(name, site.shape.bf16()[name])]


def as_decided(site: SiteDecision, name: str) -> Sequence[Row]:
    """A pass as the what-if decided: quantization, then its GEMM."""
    gemm, *quantize = site.passes[name].rows
    return [*quantize, gemm]


LAUNCHED: Mapping[str, Launched] = {BF16: in_bf16, DECISION: as_decided}


def site_pieces(sites: Sequence[SiteDecision], times: Mapping[Row, Time], launched: Launched, around: bool = True) -> list[Piece]:
    """Kernels of all sites, forward in order and backward in reverse; a forward that runs again stands in the backward.

    Args:
        sites: The what-if's.
        times: Of every row.
        launched: What each pass launches.
        around: With the norms, activations and bias gradients around each site's GEMMs; without where other pieces hold them.
    """

    def piece(phase: str, site: SiteDecision, what: str, row: Row) -> Piece:
        details = {"kernel": row.kernel, "m": row.m, "n": row.n, "k": row.k, "groups": row.groups}
        kind = KERNELS[row.kernel].kind
        shown = f"{site.site.name} {what}" if kind in ("gemm", "batched_gemm") else f"{site.site.name} {what}: {row.kernel}"
        # A batched product has a node of its own before it.
        number = 1 + (kind == "batched_gemm")
        return Piece(phase, shown, kind, times[row], site.site.name, str(tuple(row)), details, site.site.reads_tables, number)

    def run(site: SiteDecision, phase: str) -> list[Piece]:
        beside = [row for row in site.around.rows if around and row.kernel.endswith("_forward")]
        made = [piece(phase, site, "output", row) for row in launched(site, "output")]
        return made + [piece(phase, site, "output", row) for row in beside]

    def back(site: SiteDecision) -> list[Piece]:
        beside = [row for row in site.around.rows if around and not row.kernel.endswith("_forward")]
        made = [piece(BACKWARD, site, "gradient", row) for row in beside]
        return made + [piece(BACKWARD, site, n, row) for n in site.passes if n != "output" for row in launched(site, n)]

    again = {site.site.name.removesuffix(RECOMPUTE): site for site in sites if site.site.name.endswith(RECOMPUTE)}
    first = [site for site in sites if not site.site.name.endswith(RECOMPUTE)]
    found = [made for site in first for made in run(site, FORWARD)]
    for site in reversed(first):
        if site.site.name in again:
            other = again.pop(site.site.name)
            found += [*run(other, BACKWARD), *back(other)]
        found += back(site)
    return found + [made for other in again.values() for made in (*run(other, BACKWARD), *back(other))]


def plan(pieces: Sequence[Piece], exchanged: Communication | None = None) -> list[Op]:
    """The step's operations, ready for `perfmodel.timeline.schedule`.

    Args:
        pieces: Kernels of the compute stream, in their order inside each phase.
        exchanged: Collectives; None, or one without figures, for a step of one GPU.
    """
    if exchanged is None or exchanged.missing:
        exchanged = None
    writer = _Writer()
    by_phase = {phase: _spread([piece for piece in pieces if piece.phase == phase]) for phase in PHASES}
    units = exchanged.units if exchanged else ()
    unit_of = {site: number for number, unit in enumerate(units) for site in unit.sites}
    writer.compute(by_phase[LOOKUP])
    exchange = exchanged.exchange if exchanged else None
    if exchange:
        writer.collective("embeddings", exchange, wait_compute=True)
        writer.before(_first(by_phase[FORWARD]), "embeddings")
    _gathered(writer, _runs(by_phase[FORWARD], unit_of), units, "forward")
    writer.compute(by_phase[LOSS])
    backward = _runs(by_phase[BACKWARD], unit_of)
    last = {number: position for position, (number, _) in enumerate(backward)}
    if exchange:
        writer.behind(_first(by_phase[BACKWARD][::-1]), "gradients of embeddings", exchange)
    _gathered(writer, backward, units, "backward", last)
    for number, unit in enumerate(units):
        if number not in last:
            writer.reduce(number, unit)
    if exchange:
        if not writer.has("gradients of embeddings"):
            writer.collective("gradients of embeddings", exchange, wait_compute=True)
        writer.hold("gradients of embeddings")
    writer.compute(by_phase[TABLE_UPDATE])
    writer.hold(*writer.reduced)
    writer.compute(by_phase[OPTIMIZER])
    return writer.ops


def _first(pieces: Sequence[Piece]) -> Piece | None:
    """The first piece whose site reads tables."""
    return next((piece for piece in pieces if piece.site is not None and piece.reads_tables), None)


def _spread(pieces: Sequence[Piece]) -> list[Piece]:
    """A phase's pieces with those of no site, whose places are not known, evenly among the others; all keep their order.

    They are taken to read tables, and so stand among the pieces of sites that do, not before or behind them.
    """
    placed = [piece for piece in pieces if piece.site is not None]
    loose = [piece for piece in pieces if piece.site is None]
    readers = sum(piece.reads_tables for piece in placed)
    keyed: list[tuple[float, Piece]] = []
    seen = 0
    for piece in placed:
        keyed.append(((seen + 0.5 * piece.reads_tables) / max(readers, 1), piece))
        seen += piece.reads_tables
    keyed += [((i + 0.5) / len(loose), piece) for i, piece in enumerate(loose)]
    return [piece for _, piece in sorted(keyed, key=lambda entry: entry[0])]


Run = tuple[int | None, list[Piece]]
"""Pieces in a row that need the same unit; None where they need none."""


def _runs(pieces: Iterable[Piece], unit_of: Mapping[str, int]) -> list[Run]:
    found: list[Run] = []
    for piece in pieces:
        number = unit_of.get(piece.site) if piece.site is not None else None
        if not found or found[-1][0] != number:
            found.append((number, []))
        found[-1][1].append(piece)
    return found


def _gathered(
    writer: _Writer, runs: Sequence[Run], units: Sequence[Unit], phase: str, last: Mapping[int | None, int] | None = None
) -> None:
    """A forward or backward: each unit gathered while the one before it computes, and reduced behind its last run."""
    order = list(dict.fromkeys(number for number, _ in runs if number is not None))
    again = phase == "backward"
    loose = [number for number, unit in enumerate(units) if not unit.sites and unit.gather and not (again and unit.kept)]
    waiting = [*loose, *(number for number in order if units[number].gather)]

    def fetch() -> None:
        if waiting:
            number = waiting.pop(0)
            gather = units[number].gather
            assert gather is not None
            # A gather may begin when the run before the one that computes meanwhile has freed its own parameters.
            writer.collective(f"parameters {number}, {phase}", gather, wait_compute=True)

    for _ in range(len(loose) + 1):
        fetch()
    writer.hold(*(f"parameters {number}, {phase}" for number in loose))
    for of_no_site in loose:
        writer.copy(f"parameters {of_no_site}, {phase}: to their places", phase, units[of_no_site])
    entered: set[int] = set()
    for position, (number, pieces) in enumerate(runs):
        if number is not None and number not in entered and units[number].gather:
            entered.add(number)
            while not writer.has(f"parameters {number}, {phase}"):
                fetch()
            fetch()
            writer.hold(f"parameters {number}, {phase}")
            writer.copy(f"parameters {number}, {phase}: to their places", phase, units[number])
        writer.compute(pieces)
        if last is not None and number is not None and last[number] == position:
            writer.reduce(number, units[number])


class _Writer:
    """Lists operations: on the compute stream in order, on the others behind what they wait for."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.reduced: list[str] = []
        self._names: Counter[str] = Counter()
        self._held: list[str] = []
        self._last_compute: str | None = None
        self._before: tuple[Piece, str] | None = None
        self._behind: tuple[Piece, str, Collective] | None = None

    def before(self, piece: Piece | None, name: str) -> None:
        """Let a piece on the compute stream wait for an operation; the next one where there is none such."""
        if piece is None:
            self.hold(name)
        else:
            self._before = (piece, name)

    def behind(self, piece: Piece | None, name: str, what: Collective) -> None:
        """List a collective when a piece is listed; not at all where there is none such."""
        self._behind = None if piece is None else (piece, name, what)

    def has(self, name: str) -> bool:
        """Whether an operation of that name is listed."""
        return name in self._names

    def hold(self, *names: str) -> None:
        """Let the next piece on the compute stream wait for operations."""
        self._held += names

    def compute(self, pieces: Iterable[Piece]) -> None:
        """List kernels."""
        for piece in pieces:
            if self._before and piece is self._before[0]:
                self.hold(self._before[1])
            details = {"phase": piece.phase, **piece.details}
            kind = piece.phase if piece.phase in (TABLE_UPDATE, OPTIMIZER) else piece.kind
            self._last_compute = self._add(Op(piece.name, COMPUTE, *piece.time, self._waits(), kind, piece.alike, details))
            if self._behind and piece is self._behind[0]:
                self.collective(*self._behind[1:], wait_compute=True)

    def copy(self, name: str, phase: str, unit: Unit) -> None:
        """List what reads and writes a unit once, where its time is known."""
        if unit.copy is not None:
            details = {"phase": phase, "bytes": 2 * unit.size_bytes}
            self._last_compute = self._add(Op(name, COMPUTE, *unit.copy, self._waits(), "copy", "copy", details))

    def _waits(self) -> tuple[str, ...]:
        """What the next operation on the compute stream waits for."""
        held, self._held = tuple(dict.fromkeys(self._held)), []
        return held

    def collective(self, name: str, what: Collective, *, wait_compute: bool = False, after: Sequence[str] = ()) -> str:
        """List a collective, behind all that the compute stream has so far where it must be."""
        waits = [*after, *([self._last_compute] if wait_compute and self._last_compute else [])]
        details = {
            "op": what.call.op, "dtype": what.call.dtype, "ranks": what.call.ranks, "bytes_per_rank": what.call.bytes_per_rank,
            "basis": what.basis,
        }  # fmt: skip
        # Links are faster or slower than predicted for all that crosses them.
        return self._add(Op(name, what.stream, *what.time, tuple(waits), what.call.op, what.stream, details))

    def reduce(self, number: int, unit: Unit) -> None:
        """List a unit's reductions, one behind the other, behind the copy of its gradients into what is reduced."""
        self.copy(f"gradients {number}: into a bucket", BACKWARD, unit)
        done: list[str] = []
        for step, what in enumerate(unit.reduce):
            name = f"gradients {number}" + (" between hosts" if step else "")
            done = [self.collective(name, what, wait_compute=not step, after=done)]
        self.reduced += done

    def _add(self, op: Op) -> str:
        self._names[op.name] += 1
        count = self._names[op.name]
        if count > 1:
            op = Op(**{**vars(op), "name": f"{op.name} ({count})"})
        self.ops.append(op)
        return op.name


def beside(answer: WhatIf, converted: Converted | None = None, called: bool = False) -> list[Piece]:
    """Every kernel of a step beside its GEMMs, on one of the GPUs; none where they are not known.

    Where dense parameters are sharded, so is the optimizer's work.

    Args:
        answer: The what-if.
        converted: Those of a step with FP8 in it, quantization among them; None for bf16's.
        called: Whether a host launches them one by one, and not as a CUDA graph.
    """
    found = answer.others if converted is None else converted.others
    pieces = [piece for other in found for piece in other.pieces(called)]
    share = 1 / answer.parallel.shards
    return [longer(piece, share) if piece.phase == OPTIMIZER else piece for piece in pieces]


GPUS_DEVIATION = 0.0125
"""Standard deviation of what one and the same step takes one GPU beside another of its host, as a share.

Ranks of three hosts, each computing alone (`benchmarks/step_on_gpus.py`): two H200s 2.0% to 3.3% apart, two H100s 1.0% to 1.8%,
four H100s with a deviation of 1.0%.
"""


def slowest(gpus: int) -> float:
    """How many times as long the slowest of so many GPUs is expected to compute, over the mean."""
    # Blom's approximation of the largest of so many normal values.
    return 1.0 + GPUS_DEVIATION * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)) if gpus > 1 else 1.0


def longer(piece: Piece, factor: float) -> Piece:
    """A kernel that takes so many times as long."""
    return replace(piece, time=Time(*(factor * end for end in piece.time)))


def pieces_of(
    answer: WhatIf,
    launched: Launched,
    times: Mapping[Row, Time] | None = None,
    converted: Converted | None = None,
    called: bool | None = None,
) -> list[Piece]:
    """Every kernel of a what-if's step, on the GPU that the others wait for.

    Args:
        answer: The what-if.
        launched: What each pass launches: `in_bf16`, `as_decided`, or what a table says.
        times: Of every row; None for the what-if's own, as in a whole step where that is known.
        converted: What stands beside its GEMMs, quantization among it; None where that is as in bf16 and each site launches its
            own quantizers.
        called: Whether a host launches the kernels one by one; None for so on several GPUs, and for a CUDA graph on one.
    """
    others = beside(answer, converted, _is_called(answer, called))
    # What is known of all kernels holds the norms, activations and bias gradients that each site knows of too.
    between = answer.runs.between if answer.runs else None
    known = times or (between or answer.run).of

    def unfused(site: SiteDecision, name: str) -> Sequence[Row]:
        rows = launched(site, name)
        if converted is None or site.site.name not in converted.sites:
            return rows
        beside_gemms = [row for row in rows if not torch_makes(row)]
        # What multiplies the scales behind these is among the others.
        return [as_run(row, known) if converted.runner != RUNTIME else row for row in beside_gemms]

    pieces = [*site_pieces(answer.sites, known, unfused, around=not others), *others]
    if answer.communication is None:
        return pieces
    factor = slowest(answer.parallel.gpus)
    return [longer(piece, factor) for piece in pieces]


def _is_called(answer: WhatIf, called: bool | None) -> bool:
    """Whether a host launches the kernels one by one: as said, or where they are on several GPUs."""
    return answer.communication is not None if called is None else called


def launching(answer: WhatIf, pieces: Sequence[Piece], called: bool | None = None) -> Op | None:
    """What the host does meanwhile: it launches the kernels of a forward and backward. None of a CUDA graph.

    None, too, where not every kernel is known.

    Args:
        answer: The what-if.
        pieces: Its kernels.
        called: As of `pieces_of`.
    """
    if not answer.others or not _is_called(answer, called):
        return None
    number = sum(piece.launches for piece in pieces if piece.phase in (FORWARD, LOSS, BACKWARD))
    time = called_on_several(number, answer.communication, answer.host_step_us)
    return Op("launches of the forward and backward", HOST, *time, kind="launches", details={"launches": number})


def timeline(answer: WhatIf, pieces: Sequence[Piece], called: bool | None = None) -> Timeline:
    """The schedule of a what-if's kernels (`pieces_of`), of what it exchanges and of the host; `called` as of `pieces_of`."""
    host, ops = launching(answer, pieces, called), plan(pieces, answer.communication)
    timing = answer.communication.timing if answer.communication else None
    return schedule([*([host] if host else []), *ops], slower(ops, timing) if timing else None)


def timelines(answer: WhatIf, called: bool | None = None) -> dict[str, Timeline]:
    """A what-if's step in bf16 and as decided, by the names of `LAUNCHED`; `called` as of `pieces_of`."""
    converted = {BF16: None, DECISION: answer.converted}
    return {
        name: timeline(answer, pieces_of(answer, launched, converted=converted[name], called=called), called)
        for name, launched in LAUNCHED.items()
    }

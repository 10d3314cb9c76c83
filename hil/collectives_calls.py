"""One call of each collective, on buffers of its own, with what its result must be.

Contents are whole numbers small enough that sums over up to 16 ranks are exact in bf16, drawn anew for each rank of each
group: a sum over the wrong group, a chunk from the wrong rank or place, shows. Compressed exchanges carry normal values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hil.codec import split_rows
from hil.compressed import CompressedAllToAll

MOST_CALLS, LEAST_CALLS = 16, 2
MOST_LOCAL_CALLS = 64
"""The same for what needs no other GPU: it is short, and a replay must outlast its launch."""
LOCAL_OPS = ("copy", "pack", "unpack")
ROTATION_BYTES = 160 * 2**20
UNEVEN_UNIT = 64
"""Elements that an uneven split is a multiple of, as rows are: chunks that start off 16 bytes are slow in NCCL."""
PLAIN_DIM = 64
"""Row length that stands in where an exchange has no rows of its own (fp16)."""
_POISON = -77.0
_E4M3_HALF_STEP = 16.0


@dataclass(frozen=True)
class Case:
    """What a row of the table is about.

    Attributes:
        op: all_to_all, all_reduce, reduce_scatter, all_gather; pack, unpack, copy.
        dtype: What travels: bf16, fp16, fp8_rowwise, fp8_rowwise_unfused.
        split: equal, uneven.
        dim: Values of a row with a scale; 0 where there is none.
        ranks: GPUs of a group.
        groups: Groups at the same moment.
        bytes_per_rank: The larger of a rank's two buffers, in bf16.
    """

    op: str
    dtype: str
    split: str
    dim: int
    ranks: int
    groups: int
    bytes_per_rank: int

    @property
    def label(self) -> str:
        """All but the size, in words."""
        parts = [self.op, self.dtype, *([f"dim {self.dim}"] if self.dim else []), *(["uneven"] if self.split == "uneven" else [])]
        return " ".join(parts) + f", {self.groups} x {self.ranks} ranks"


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a setting: its device, its group, its place there of how many, and the group's number."""

    device: torch.device
    group: Any
    rank: int
    ranks: int
    number: int


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        launch: Do it.
        prepare: Fill inputs anew and outputs with what no result holds.
        wrong: What is wrong with the result of the launch after `prepare`; empty when it is right.
        refill: Fill anew the inputs that a launch overwrites.
    """

    launch: Callable[[], object]
    prepare: Callable[[], None]
    wrong: Callable[[], str]
    refill: Callable[[], None]


def calls_for(case: Case) -> int:
    """Calls in one graph: enough that their buffers exceed twice the L2, within limits."""
    most = MOST_LOCAL_CALLS if case.op in LOCAL_OPS else MOST_CALLS
    return max(LEAST_CALLS, min(most, -(-ROTATION_BYTES // (2 * case.bytes_per_rank))))


def build(case: Case, place: Place) -> Call:
    """A call of the case at this place.

    Raises:
        ValueError: no such op.
    """
    if case.op in ("pack", "unpack") or (case.op == "all_to_all" and case.dtype != "bf16"):
        return _compressed(case, place)
    makers = {
        "all_to_all": _all_to_all, "all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter,
        "all_gather": _all_gather, "copy": _copy,
    }  # fmt: skip
    if case.op not in makers:
        raise ValueError(f"op {case.op!r}: give one of {', '.join(makers)}, pack, unpack")
    return makers[case.op](case, place)


def whole_numbers(elements: int, place: Place, rank: int) -> torch.Tensor:
    """(elements,) bf16: what a rank of this place's group holds: -4 to 4, plus its rank."""
    generator = torch.Generator(device=place.device).manual_seed(1000 + place.number)
    base = torch.randint(-4, 5, (elements,), generator=generator, dtype=torch.int8, device=place.device)
    return (base + rank).to(torch.bfloat16)


def _call(
    launch: Callable[[], object],
    source: torch.Tensor,
    out: torch.Tensor,
    fresh: torch.Tensor,
    expected: Callable[[], torch.Tensor],
) -> Call:
    """A call that reads `source`, which `fresh` fills, and writes `out`, which may be `source`."""

    def prepare() -> None:
        out.fill_(_POISON)
        source.copy_(fresh)

    def wrong() -> str:
        count = int((out != expected()).sum())
        return f"{count:,} of {out.numel():,} elements" if count else ""

    def refill() -> None:
        if out is source:
            source.copy_(fresh)

    return Call(launch, prepare, wrong, refill)


def _elements(case: Case, place: Place) -> int:
    return case.bytes_per_rank // 2 // place.ranks * place.ranks


def _all_to_all(case: Case, place: Place) -> Call:
    elements = _elements(case, place)
    ranks = range(place.ranks)
    # Weights of sources: the mean is 1, and what all send one rank makes up its buffer.
    weights = [0.5 + rank / (place.ranks - 1) for rank in ranks] if case.split == "uneven" else None
    units = split_rows(elements // UNEVEN_UNIT, place.ranks, weights)
    from_rank = [UNEVEN_UNIT * n for n in units]
    from_rank[-1] += elements % UNEVEN_UNIT
    if weights is None:
        from_rank = [elements // place.ranks] * place.ranks
    mine = from_rank[place.rank]
    fresh = whole_numbers(mine * place.ranks, place, place.rank)
    source, out = torch.empty_like(fresh), fresh.new_empty(elements)

    def expected() -> torch.Tensor:
        return torch.cat(
            [whole_numbers(n * place.ranks, place, r)[place.rank * n : (place.rank + 1) * n] for r, n in enumerate(from_rank)]
        )

    def launch() -> None:
        if weights is None:
            dist.all_to_all_single(out, source, group=place.group)
        else:
            dist.all_to_all_single(out, source, from_rank, [mine] * place.ranks, group=place.group)

    return _call(launch, source, out, fresh, expected)


def _sum(elements: int, place: Place) -> torch.Tensor:
    total = whole_numbers(elements, place, 0)
    for rank in range(1, place.ranks):
        total += whole_numbers(elements, place, rank)
    return total


def _all_reduce(case: Case, place: Place) -> Call:
    elements = _elements(case, place)
    fresh = whole_numbers(elements, place, place.rank)
    buffer = torch.empty_like(fresh)
    return _call(lambda: dist.all_reduce(buffer, group=place.group), buffer, buffer, fresh, lambda: _sum(elements, place))


def _reduce_scatter(case: Case, place: Place) -> Call:
    elements = _elements(case, place)
    part = elements // place.ranks
    fresh = whole_numbers(elements, place, place.rank)
    source, out = torch.empty_like(fresh), fresh.new_empty(part)
    return _call(
        lambda: dist.reduce_scatter_tensor(out, source, group=place.group), source, out, fresh,
        lambda: _sum(elements, place)[place.rank * part : (place.rank + 1) * part],
    )  # fmt: skip


def _all_gather(case: Case, place: Place) -> Call:
    elements = _elements(case, place)
    part = elements // place.ranks
    fresh = whole_numbers(part, place, place.rank)
    source, out = torch.empty_like(fresh), fresh.new_empty(elements)
    return _call(
        lambda: dist.all_gather_into_tensor(out, source, group=place.group), source, out, fresh,
        lambda: torch.cat([whole_numbers(part, place, rank) for rank in range(place.ranks)]),
    )  # fmt: skip


def _copy(case: Case, place: Place) -> Call:
    fresh = whole_numbers(case.bytes_per_rank // 2, place, place.rank)
    source, out = torch.empty_like(fresh), torch.empty_like(fresh)
    return _call(lambda: out.copy_(source), source, out, fresh, lambda: fresh)


def normal_rows(rows: int, dim: int, place: Place, rank: int) -> torch.Tensor:
    """(rows, dim) bf16: what a rank of this place's group sends."""
    generator = torch.Generator(device=place.device).manual_seed(1000 * (place.number + 1) + rank)
    return torch.empty(rows, dim, dtype=torch.bfloat16, device=place.device).normal_(generator=generator)


def _compressed(case: Case, place: Place) -> Call:
    """An exchange of rows, or one half of its codec alone (`pack`, `unpack`)."""
    dim = case.dim or PLAIN_DIM
    part = max(case.bytes_per_rank // 2 // dim // place.ranks, 1)
    total, rows = part * place.ranks, [part] * place.ranks
    exchange = CompressedAllToAll(case.dtype, dim, rows, rows, place.group, place.device)
    source, out = normal_rows(total, dim, place, place.rank), torch.empty(total, dim, dtype=torch.bfloat16, device=place.device)
    launch = {
        "all_to_all": lambda: exchange(source, out),
        "pack": lambda: exchange.encode(source),
        "unpack": lambda: exchange.decode(out),
    }[case.op]

    def pass_on() -> None:
        """A message to oneself: what the codec does alone, without a collective."""
        for wire in exchange.wires:
            wire.received.copy_(wire.sent)

    def prepare() -> None:
        out.fill_(_POISON)
        for wire in exchange.wires:
            wire.received.zero_()
        if case.op == "unpack":
            exchange.encode(source)
            pass_on()

    def wrong() -> str:
        sent = source
        if case.op == "pack":
            pass_on()
            exchange.decode(out)
        if case.op == "all_to_all":
            cut = slice(place.rank * part, (place.rank + 1) * part)
            sent = torch.cat([normal_rows(total, dim, place, rank)[cut] for rank in range(place.ranks)])
        return mismatch(case.dtype, out, sent)

    return Call(launch, prepare, wrong, lambda: None)


def mismatch(dtype: str, got: torch.Tensor, sent: torch.Tensor) -> str:
    """What is wrong with rows (n, dim) that arrived, given those sent; empty when nothing is.

    The fused codec must be equal to the last bit to the same steps in torch; compiled code, which may divide otherwise,
    to within half a step of e4m3 and bf16's rounding; fp16 to within half its least step.
    """
    if dtype == "fp16":
        bad = (got.float() - sent.float()).abs() > 2.0**-25
    else:
        wide = sent.float()
        amax = wide.abs().amax(dim=1, keepdim=True)
        # By a tensor: torch on a GPU takes a division by a number for a product with its inverse.
        scale = torch.where(amax == 0, 1.0, amax / torch.full_like(amax, 448.0))
        if dtype == "fp8_rowwise":
            restored = (wide / scale).to(torch.float8_e4m3fn).float() * scale
            if not restored.is_cuda:
                # Triton's interpreter cuts to bf16 where a GPU rounds.
                restored = (restored.view(torch.int32) & -65536).view(torch.float32)
            bad = got != restored.to(torch.bfloat16)
        else:
            bad = ~((got.float() - wide).abs() <= 1.01 * _E4M3_HALF_STEP * scale + wide.abs() / 256)
    count = int(bad.sum())
    return f"{count:,} of {got.numel():,} elements" if count else ""

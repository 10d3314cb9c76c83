"""Time collectives between the GPUs of one host, into `collectives.parquet` with a sidecar.

    torchrun --nproc-per-node 8 -m hil.collectives --out data/h200

Settings are the first 2, 4 and 8 ranks alone, and, where more of them fit, as many groups as do, all at the same moment.
Every op is captured in a CUDA graph of several calls, each with buffers of its own; a sample is a replay divided by the
calls, on the slowest rank of all groups, less the time of a kernel of one element that runs between calls. Before it is
timed, each case's graph is replayed once and every element that every call wrote is compared with what it must be. A
run that was stopped continues where it was: cases that the table holds are not measured again.

`bytes_per_rank` is the larger of a rank's two buffers, in bf16 also where fewer bytes travel, so that dtypes compare at
equal content. An uneven all-to-all is that of embedding tables unevenly spread: rank r of n sends each rank
0.5 + r / (n - 1) times the mean, and every rank receives bytes_per_rank. Rows whose op is `pack`, `unpack` or `copy` are
no collectives: the two halves of the FP8 codec alone, and a plain copy of as many bytes to hold them against.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hil.collectives_calls import LOCAL_OPS, Case, Place, build, calls_for
from hil.collectives_table import Table
from hil.command import Parser

SIZES = tuple(2**exponent for exponent in range(12, 31))
CODEC_SIZES = tuple(2**exponent for exponent in range(15, 30))
DIMS = (64, 128, 256, 512)
RANKS = (2, 4, 8)
PLAIN = (
    ("all_to_all", "equal"), ("all_to_all", "uneven"), ("all_reduce", "equal"),
    ("reduce_scatter", "equal"), ("all_gather", "equal"),
)  # fmt: skip
FUSED, UNFUSED = "fp8_rowwise", "fp8_rowwise_unfused"
WARM_UP = 3
SPACERS = 64


def settings(world: int) -> list[tuple[int, int]]:
    """(ranks, groups) to measure in a world of so many GPUs, the whole host first."""
    found = {(ranks, groups) for ranks in RANKS if ranks <= world for groups in (1, world // ranks)}
    return sorted(found, key=lambda setting: (-setting[0] * setting[1], -setting[0]))


def series(world: int, sizes: Sequence[int], codec_sizes: Sequence[int], dims: Sequence[int]) -> Iterator[list[Case]]:
    """Cases, one list for each op, dtype, dim and setting; what matters most first, should time run out."""

    def of(op: str, dtype: str, ranks: int, groups: int, at: Sequence[int], dim: int = 0, split: str = "equal") -> list[Case]:
        # What is compiled is tuned on the first operands that it meets; large ones are what it should be good at.
        order = sorted(at, reverse=dtype == UNFUSED)
        return [Case(op, dtype, split, dim, ranks, groups, size) for size in order]

    every = settings(world)
    for ranks, groups in every:
        for op, split in PLAIN:
            yield of(op, "bf16", ranks, groups, sizes, split=split)
    for ranks, groups in every:
        yield of("all_to_all", "fp16", ranks, groups, codec_sizes)
        for dim in dims:
            for dtype in (FUSED, UNFUSED):
                yield of("all_to_all", dtype, ranks, groups, codec_sizes, dim)
    yield of("copy", "bf16", *every[0], codec_sizes)
    for dim in dims:
        for dtype in (FUSED, UNFUSED):
            for op in ("pack", "unpack"):
                yield of(op, dtype, *every[0], codec_sizes, dim)


@dataclass(frozen=True)
class World:
    """The process groups of a run.

    Attributes:
        device: This rank's.
        control: All ranks, over gloo, for decisions: idle ranks wait in it without loading a GPU.
    """

    device: torch.device
    control: Any

    def places(self, every: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[Place, Any] | None]:
        """For each setting this rank's place and the group of all who take part; None where it does not."""
        found: dict[tuple[int, int], tuple[Place, Any] | None] = {}
        known: dict[tuple[int, ...], Any] = {}

        def group(members: Sequence[int]) -> Any:
            # All ranks make all groups, in the same order.
            if tuple(members) not in known:
                known[tuple(members)] = dist.new_group(list(members))
            return known[tuple(members)]

        rank = dist.get_rank()
        for ranks, groups in every:
            together = group(range(ranks * groups))
            own = [group(range(number * ranks, (number + 1) * ranks)) for number in range(groups)]
            place = Place(self.device, own[min(rank // ranks, groups - 1)], rank % ranks, ranks, rank // ranks)
            found[ranks, groups] = (place, together) if rank < ranks * groups else None
        return found

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]


class Spacer:
    """A kernel of one element that runs between calls, as other kernels do in a step, and the time that it takes.

    NCCL's kernels right behind each other begin later than behind another kernel, which would make a plain collective
    look slower than one with a codec around it. Its time alone is taken off every sample.

    Attributes:
        us: Microseconds, on this rank.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure it."""
        self._element = torch.zeros(1, device=device)
        replay = captured([self.launch] * SPACERS, device)
        self.us = _median([elapsed / SPACERS for elapsed in timed(replay, lambda: None, 15, device)])

    def launch(self) -> None:
        """Run it."""
        self._element.add_(1.0)


def captured(launches: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], None]:
    """All launches as one call: a CUDA graph on a GPU, whose first launch must have been made before."""
    if device.type != "cuda":

        def run() -> None:
            for launch in launches:
                launch()

        return run
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph.replay


def timed(replay: Callable[[], None], before: Callable[[], None], replays: int, device: torch.device) -> list[float]:
    """Microseconds of replays, each after `before`, nothing waiting for the GPU in between."""
    cuda = device.type == "cuda"
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) if cuda else _HostClock() for _ in range(2 * (replays + WARM_UP))]
    for index in range(replays + WARM_UP):
        before()
        marks[2 * index].record()
        replay()
        marks[2 * index + 1].record()
    if cuda:
        torch.cuda.synchronize()
    pairs = zip(marks[2 * WARM_UP :: 2], marks[2 * WARM_UP + 1 :: 2], strict=True)
    return [1e3 * start.elapsed_time(stop) for start, stop in pairs]


def measure(case: Case, place: Place, together: Any, spacer: Spacer) -> torch.Tensor:
    """Check a case, then time it.

    Returns:
        (replays,) float64 microseconds a call, each the slowest rank's.

    Raises:
        RuntimeError: a call's result is not what it must be.
    """
    device = place.device
    calls = [build(case, place) for _ in range(calls_for(case))]
    spaced = case.op not in LOCAL_OPS
    replay = captured([step for call in calls for step in ((call.launch, spacer.launch) if spaced else (call.launch,))], device)
    for call in calls:
        call.prepare()
    replay()
    wrong = [call.wrong() for call in calls]
    if any(wrong):
        raise RuntimeError(f"{case}: wrong in call {next(filter(None, wrong))}, on rank {dist.get_rank()}")
    token = torch.ones(1, device=device)

    def before() -> None:
        for call in calls:
            call.refill()
        # Queued right before the replay, so that ranks begin it together.
        dist.all_reduce(token, dist.ReduceOp.MAX, group=together)

    replays = (30 if case.bytes_per_rank <= 2**24 else 15) if device.type == "cuda" else 3
    elapsed = [us / len(calls) - (spacer.us if spaced else 0.0) for us in timed(replay, before, replays, device)]
    samples = torch.tensor(elapsed, dtype=torch.float64, device=device)
    dist.all_reduce(samples, dist.ReduceOp.MAX, group=together)
    return samples.cpu()


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


class _HostClock:
    """An event's two methods, for a CPU."""

    def record(self) -> None:
        self.at_ms = 1e3 * time.perf_counter()

    def elapsed_time(self, later: Any) -> float:
        return later.at_ms - self.at_ms


def _row(case: Case, samples: torch.Tensor) -> dict[str, Any]:
    p10, p50, p90 = samples.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return {
        **asdict(case), "n": len(samples), "p10_us": p10, "p50_us": p50, "p90_us": p90,
        "least_us": float(samples.min()), "most_us": float(samples.max()),
    }  # fmt: skip


def collect(options: argparse.Namespace, world: World) -> bool:
    """Measure what the table lacks, series by series; whether all of it is there now."""
    first = dist.get_rank() == 0
    spacer = Spacer(world.device)
    table = Table.open(options.out, world.device, sys.argv[1:], spacer.us) if first else None
    known = world.agree(table.keys if table else None)
    places = world.places(settings(dist.get_world_size()))
    every = list(series(dist.get_world_size(), options.sizes, options.codec_sizes, options.dims))
    deadline = time.monotonic() + 60 * options.minutes
    for number, cases in enumerate(every, 1):
        missing = [case for case in cases if case not in known]
        if not missing:
            continue
        if not world.agree(time.monotonic() < deadline):
            if first:
                print(f"stopped after {options.minutes:g} minutes; the same command continues", file=sys.stderr)
            return False
        taken = places[missing[0].ranks, missing[0].groups]
        rows = [_row(case, measure(case, *taken, spacer)) for case in missing] if taken else []
        if table:
            table.add(rows)
            most = max(row["p50_us"] for row in rows)
            print(
                f"[{number}/{len(every)}] {missing[0].label}: {len(rows)} sizes, up to {most:,.0f} us",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    return True


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; run under torchrun. Exit codes: 0 all is measured, 1 time ran out, 2 bad usage, 3 no GPUs."""
    parser = Parser(prog="python -m hil.collectives", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of collectives.parquet and collectives.json")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin nothing after this long (default: 30)")
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="bytes a rank, comma-separated")
    parser.add_argument("--codec-sizes", type=_sizes, default=CODEC_SIZES, help="the same, of compressed all-to-alls")
    parser.add_argument("--dims", type=_sizes, default=DIMS, help="row lengths of compressed all-to-alls")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run over gloo, times mean nothing")
    options = parser.parse_args(arguments)
    cuda = options.device == "cuda"
    if (cuda and not torch.cuda.is_available()) or "RANK" not in os.environ:
        print("no GPUs here, or not under torchrun: torchrun --nproc-per-node 8 -m hil.collectives --out DIR", file=sys.stderr)
        return 3
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        done = collect(options, World(device, dist.new_group(backend="gloo")))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    dist.barrier()
    dist.destroy_process_group()
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())

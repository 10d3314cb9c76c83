"""Time kernels while a collective runs beside them, and collectives while kernels do, into `overlap.parquet` with a sidecar.

    torchrun --nproc-per-node 4 -m hil.overlap --out data/h100 --minutes 2

A step hides its reductions behind the backward, but not for nothing: NCCL's kernels keep multiprocessors to themselves and move
bytes through the same memory. Each row is a kernel at a shape, a collective at a size, and four times: either alone, and
either while the other runs without a pause. All ranks run the same kernel at the same moment, as replays of a CUDA graph whose
launches rotate over buffers; collectives are called on a stream of their own, one behind the other, from before the
first replay until after the last. A collective counts that begins and ends while the kernels run. A
table that is there already is extended, and pairs that it holds are not measured again.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch._inductor.config
import torch.distributed as dist

from hil.collectives_calls import Call, Case, Place, build
from hil.collectives_table import describe
from hil.command import Parser
from hil.files import write_atomic
from hil.kernels.base import Shape
from hil.launches import takes
from hil.shapes import gemm_shapes, interaction_shapes, memory_shapes
from perfmodel.choice import PARTS
from perfmodel.judge import SHAPE
from perfmodel.overlap import tiles

NAME = "overlap"
METHOD = "replays of a kernel's graph beside collectives on a stream of their own; see hil/overlap.py"
OPS = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter")
SIZES = (2**25, 2**27)
LARGE_SIZES = (2**24, 25 * 2**20, 2**26, 2**27, 2**28)
GEMMS = ("torch/bf16", "torch/fp8_tensorwise_fast", "torch/fp8_rowwise_fast", "loka/fp8_tensorwise_fast")
MEMORY = ("loka/quantize_rowwise", "torch/hardswish_forward", "torch/layernorm_forward", "torch/bias_backward")
# How long a kernel runs beside collectives, at least, and how many of these pass meanwhile.
BUSY_MS, LEAST_COLLECTIVES = 6.0, 6
TURNS = 3
# Multiply-adds of a GEMM: some 10 us to 2 ms.
LEAST_MULTIPLY_ADDS, MOST_MULTIPLY_ADDS = 2e9, 5e11
# Of the GEMMs of wide layers: some 60 us to 3 ms, bound by the tensor cores.
LEAST_LARGE, MOST_LARGE, LEAST_SIDE = 2e10, 1e12, 384
# Cycles for which both streams wait until the host has called all: some 3 ms.
_AHEAD_CYCLES = 6_000_000
_LEAST_ELEMENTS = 2**22


@dataclass(frozen=True)
class Work:
    """A kernel at a shape, beside which collectives: (op, bytes a rank)."""

    kernel: str
    shape: Shape
    beside: tuple[tuple[str, int], ...]


def asked_tiles(works: Sequence[Work]) -> dict[tuple[str, Shape], float]:
    """Tiles of every kernel's result (`perfmodel.overlap.tiles`), cuBLAS's as it answers when it is asked."""
    from hil.asking import KERNELS_ASKED, asked_of

    calls = [(work.kernel, work.shape) for work in works]
    answers = asked_of([call for call in calls if call[0] in KERNELS_ASKED])
    told = {
        (kernel, Shape(*sizes)): np.array([parts])
        for kernel, sizes, parts in zip(
            answers["kernel"], answers[SHAPE].to_numpy(), answers[list(PARTS)].to_numpy(), strict=True
        )
    }
    found = {}
    for kernel, shape in calls:
        m, n, k, groups = (np.array([float(size)]) for size in (shape.m, shape.n, shape.k, shape.groups))
        found[kernel, shape] = float(tiles(kernel, m, n, k, groups, told.get((kernel, shape)))[0])
    return found


def drawn(count: int, seed: int) -> list[Work]:
    """So many shapes, each with one kernel, of all kinds in turn: six of ten GEMMs, one batched product, three bound by memory.

    Each stands beside an all-reduce, as most of a step does, and beside one of the other collectives, in turn.
    """
    gemms = (s for s in gemm_shapes(20 * count, seed) if LEAST_MULTIPLY_ADDS <= s.m * s.n * s.k <= MOST_MULTIPLY_ADDS)
    batched = iter(interaction_shapes(count, seed + 1))
    memory = (s for s in memory_shapes(20 * count, seed + 2) if s.m * s.k >= _LEAST_ELEMENTS)
    found = []
    for number in range(count):
        place = number % 10
        if place in (3, 6, 9):
            kernel, shape = MEMORY[number // 10 % len(MEMORY)], next(memory)
        elif place == 5:
            kernel, shape = "torch/bf16_batched", next(batched)
        else:
            kernel = GEMMS[(number + number // 10) % len(GEMMS)]
            shape = next(s for s in gemms if takes(kernel, s))
        others = OPS[1:]
        sizes = SIZES[number % 2], SIZES[number // 2 % 2]
        found.append(Work(kernel, shape, ((OPS[0], sizes[0]), (others[number % len(others)], sizes[1]))))
    return found


def drawn_large(count: int, seed: int) -> list[Work]:
    """So many GEMMs of wide layers, each by one kernel, in bf16 every other: where a step's reductions hide.

    Each stands beside an all-reduce and one of the other collectives, of DDP's own buckets and of up to 256 MiB.
    """
    gemms = (s for s in gemm_shapes(40 * count, seed) if LEAST_LARGE <= s.m * s.n * s.k <= MOST_LARGE)
    wide = (s for s in gemms if min(s.m, s.n, s.k) >= LEAST_SIDE)
    found = []
    for number in range(count):
        kernel = GEMMS[0] if number % 2 == 0 else GEMMS[1 + number // 2 % (len(GEMMS) - 1)]
        shape = next(s for s in wide if takes(kernel, s))
        sizes = LARGE_SIZES[number % len(LARGE_SIZES)], LARGE_SIZES[number // 3 % len(LARGE_SIZES)]
        found.append(Work(kernel, shape, ((OPS[0], sizes[0]), (OPS[1 + number % (len(OPS) - 1)], sizes[1]))))
    return found


def known(folder: Path, gpu: str) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """Pairs that a folder's table holds, and the runs that measured them; none where there is no table.

    Raises:
        ValueError: they are of another GPU.
    """
    path = folder / f"{NAME}.parquet"
    if not path.is_file():
        return pd.DataFrame(), []
    runs = json.loads(path.with_suffix(".json").read_text())["runs"]
    if other := next((run["gpu"] for run in runs if run["gpu"] != gpu), None):
        raise ValueError(f"{path} was measured on {other}, this is {gpu}; give another --out")
    return pd.read_parquet(path), runs


def without(works: Sequence[Work], table: pd.DataFrame, ranks: int) -> list[Work]:
    """Kernels beside those collectives only that a table of pairs does not hold between so many GPUs."""
    names = ["kernel", *SHAPE, "ranks", "op", "bytes_per_rank"]
    held = set(table[names].itertuples(index=False, name=None)) if len(table) else set()

    def is_new(work: Work, op: str, size: int) -> bool:
        s = work.shape
        return (work.kernel, s.m, s.n, s.k, s.groups, ranks, op, size) not in held

    left = [replace(work, beside=tuple(pair for pair in work.beside if is_new(work, *pair))) for work in works]
    return [work for work in left if work.beside]


def inside(ends_ms: Sequence[float], start_ms: float, stop_ms: float) -> list[float]:
    """How long each collective took of those that began and ended in a span, given when each of a row of them ended."""
    return [b - a for a, b in zip(ends_ms, ends_ms[1:], strict=False) if a >= start_ms and b <= stop_ms]


def grid_of(profiler: Any, word: str) -> int:
    """Blocks of the largest kernel with a word in its name that a profiler saw; 0 where it saw none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    grids = [event["args"].get("grid", [0]) for event in events if event.get("cat") == "kernel" and word in event["name"]]
    return max((math.prod(grid) for grid in grids), default=0)


class Bench:
    """Two streams of one rank: what computes, and what exchanges."""

    def __init__(self, place: Place) -> None:
        """Nothing runs yet."""
        self._place, self._own = place, torch.cuda.Stream()
        self._calls: dict[tuple[str, int], list[Call]] = {}
        self._blocks: dict[tuple[str, int], int] = {}

    def collective(self, op: str, size: int) -> Callable[[int], None]:
        """A collective of so many bytes a rank; each call is on one of two sets of buffers."""
        if (op, size) not in self._calls:
            case = Case(op, "bf16", "equal", 0, self._place.ranks, 1, size)
            self._calls[op, size] = [build(case, self._place) for _ in range(2)]
            for call in self._calls[op, size]:
                call.prepare()
        calls = self._calls[op, size]
        return lambda number: (calls[number % 2].launch(), None)[1]

    def blocks(self, op: str, size: int) -> int:
        """Blocks of a collective's kernel, each of which holds a multiprocessor; 0 where the profiler does not tell."""
        if (op, size) not in self._blocks:
            exchange = self.collective(op, size)
            exchange(0)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                exchange(1)
                torch.cuda.synchronize()
            self._blocks[op, size] = grid_of(profiler, "nccl")
        return self._blocks[op, size]

    def run(
        self, replay: Callable[[], None] | None, replays: int, exchange: Callable[[int], None] | None, exchanges: int
    ) -> tuple[float, list[float], bool]:
        """Both at once, or one alone.

        Returns:
            Milliseconds of all replays, of each exchange that was all inside them (of all but the first, alone), and whether
            exchanges lasted until after the last replay.
        """
        start, stop, begun = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(exchanges)]
        torch.cuda.synchronize()
        dist.barrier(group=self._place.group)
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD_CYCLES)
        begun.record()
        self._own.wait_event(begun)
        with torch.cuda.stream(self._own):
            for number in range(exchanges):
                assert exchange is not None
                exchange(number)
                ends[number].record()
        if exchanges:
            torch.cuda.current_stream().wait_event(ends[0])
        start.record()
        for _ in range(replays):
            assert replay is not None
            replay()
        stop.record()
        torch.cuda.synchronize()
        at = [begun.elapsed_time(end) for end in ends]
        span = begun.elapsed_time(start), begun.elapsed_time(stop)
        if not replays:
            return 0.0, [b - a for a, b in zip(at, at[1:], strict=False)], True
        return span[1] - span[0], inside(at, *span), not at or at[-1] >= span[1]


def measure(work: Work, tiled: float, bench: Bench, pool: Any, group: Any, busy_ms: float) -> Iterator[dict[str, Any]]:
    """Rows of a kernel of so many tiles, busy for so long at least, one for each collective beside it.

    Times are the mean over ranks, the median of turns. A kernel that fails on any rank, or whose result is wrong, is named on
    stderr and left out on all.
    """

    def agreed(values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device="cuda")
        dist.all_reduce(tensor, group=group)
        return (tensor / dist.get_world_size(group)).tolist()

    # Whatever a library raises concerns its own kernels alone.
    try:
        graph, launches, kept = _captured(work, pool)
    except Exception as problem:
        print(f"left out: {work.kernel} on {work.shape}: {(str(problem).splitlines() or [''])[0]}", file=sys.stderr)
        graph = None
    if agreed([float(graph is None)])[0]:
        return
    once = agreed([bench.run(graph.replay, 2, None, 0)[0] / 2])[0]
    for op, size in work.beside:
        exchange = bench.collective(op, size)
        each = agreed([statistics.mean(bench.run(None, 0, exchange, 4)[1])])[0]
        replays = max(1, round(max(busy_ms, LEAST_COLLECTIVES * each) / once))
        # Each may take so much longer beside the other.
        exchanges = 4 + round(2.5 * replays * once / each)
        alone, exchange_alone, beside, exchange_beside, whole = [], [], [], [], 1.0
        for _ in range(TURNS):
            first = bench.run(graph.replay, replays, None, 0)[0]
            second = bench.run(None, 0, exchange, max(6, exchanges // 3))[1]
            both, exchanged, covered = bench.run(graph.replay, replays, exchange, exchanges)
            found = agreed(
                [first, statistics.mean(second), both, statistics.mean(exchanged or [0.0]), float(bool(exchanged) and covered)]
            )
            alone.append(found[0])
            exchange_alone.append(found[1])
            beside.append(found[2])
            exchange_beside.append(found[3])
            whole = min(whole, found[4])
        if whole < 1.0:
            # On some rank the exchanges were through before the kernel was.
            continue
        calls, s = replays * launches / 1e3, work.shape
        yield {
            "kernel": work.kernel, "m": s.m, "n": s.n, "k": s.k, "groups": s.groups,
            "tiles": tiled, "op": op, "ranks": dist.get_world_size(group), "bytes_per_rank": size,
            "blocks": bench.blocks(op, size), "busy_ms": replays * once,
            "alone_us": statistics.median(alone) / calls, "beside_us": statistics.median(beside) / calls,
            "exchange_alone_us": 1e3 * statistics.median(exchange_alone),
            "exchange_beside_us": 1e3 * statistics.median(exchange_beside),
            "spread": float(np.ptp(beside)) / statistics.median(beside), "sm_mhz": float(torch.cuda.clock_rate()),
        }  # fmt: skip
    del kept


def _captured(work: Work, pool: Any) -> tuple[Any, int, list[object]]:
    """A kernel's graph, the launches in it, and their results, which must stay.

    Raises:
        ValueError: the result is wrong.
    """
    from hil.kernels import RUNNERS
    from hil.timing import capture, launches_for

    runner = RUNNERS[work.kernel]
    launch = runner.bind(work.shape, pool)
    error = runner.error(work.shape, pool, launch(0))
    if not error <= runner.limit:
        raise ValueError(f"wrong: relative error {error:.3g} against FP64, limit {runner.limit}")
    launches = launches_for(runner.moved_bytes(work.shape))
    graph, kept = capture(launch, launches)
    return graph, launches, kept


def collect(
    out: Path, works: Sequence[Work], minutes: float, arguments: list[str], device: torch.device, busy_ms: float = BUSY_MS
) -> bool:
    """Measure until done or out of time, and write after every few; whether all was measured."""
    from hil.timing import BufferPool

    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(list(range(ranks)))
    bench = Bench(Place(device, group, rank, ranks, 0))
    pool = BufferPool(elements=max([2**28, *(2 * work.shape.largest_operand for work in works)]))
    run = describe(device, arguments, "hil.overlap")
    before, runs = known(out, run["gpu"])
    works = without(works, before, ranks)
    tiled, rows = asked_tiles(works), list[dict[str, Any]]()
    deadline = time.monotonic() + 60 * minutes
    document = {"schema_version": 1, "method": METHOD, "runs": [*runs, run]}

    def save() -> None:
        run["rows"] = len(rows)
        table = pd.concat([before, pd.DataFrame(rows).assign(run=len(runs))], ignore_index=True)
        write_atomic(out / f"{NAME}.json", partial(Path.write_text, data=json.dumps(document, indent=1) + "\n"))
        write_atomic(out / f"{NAME}.parquet", partial(table.to_parquet, index=False, compression="zstd"))

    for number, work in enumerate(works, 1):
        late = torch.tensor([float(time.monotonic() > deadline)], device=device)
        dist.all_reduce(late, dist.ReduceOp.MAX, group=group)
        if late.item():
            if not rank:
                if rows:
                    save()
                print(f"out of time after {number - 1} of {len(works)} kernels and shapes", file=sys.stderr)
            return False
        rows += measure(work, tiled[work.kernel, work.shape], bench, pool, group, busy_ms)
        torch._dynamo.reset()
        if not rank and rows and (number % 10 == 0 or number == len(works)):
            save()
            print(f"{number}/{len(works)} kernels and shapes, {len(rows)} rows", file=sys.stderr, flush=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; run under torchrun. Exit codes: 0 all is measured, 1 time ran out, 2 bad usage, 3 no GPUs."""
    parser = Parser(prog="python -m hil.overlap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of overlap.parquet and overlap.json")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin nothing after this long (default: %(default)s)")
    parser.add_argument("--count", type=int, default=120, help="kernels and shapes to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--large", action="store_true", help="GEMMs of wide layers alone, beside more sizes of collectives")
    parser.add_argument("--busy-ms", type=float, default=BUSY_MS, help="how long kernels run at least (default: %(default)g ms)")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"--count {options.count}: give 1 or more")
    if not torch.cuda.is_available() or "RANK" not in os.environ:
        print("no GPUs here, or not under torchrun: torchrun --nproc-per-node 4 -m hil.overlap --out DIR", file=sys.stderr)
        return 3
    torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = 256
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(minutes=2))
    options.out.mkdir(parents=True, exist_ok=True)
    words = list(arguments) if arguments is not None else sys.argv[1:]
    try:
        works = (drawn_large if options.large else drawn)(options.count, options.seed)
        done = collect(options.out, works, options.minutes, words, device, options.busy_ms)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())

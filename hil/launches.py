"""Time single launches of GEMMs over very many shapes: far quicker than `hil.collect`, and far noisier.

    python -m hil.launches --out data/h200 --count 60000 --seed 9001 --minutes 5
    python -m hil.launches --out data/h200 --count 40000 --seed 9101 --minutes 2 --kernels 'loka/fp8_*' 'fbgemm/fp8_rowwise_*'
    python -m hil.launches --out data/h200 --count 90000 --seed 9201 --minutes 2 --odd
    python -m hil.launches --out data/h200 --count 90000 --seed 9251 --minutes 1 --few --kernels torch/bf16_batched
    python -m hil.launches --out data/h200 --count 4000 --seed 9301 --minutes 2 --large --kernels '*'
    python -m hil.launches --out data/h200 --count 90000 --seed 9351 --minutes 1 --short
    python -m hil.launches --out data/h200 --count 90000 --seed 9451 --minutes 4 --broad --kernels 'torch/*'

Each shape is launched three times under torch's profiler, and the median of the kernels' durations is kept: 1,000 to 1,400 rows a
second, where replays of graphs give 31 to 36. They are 6% from those replays on average, most of it the clocks'. What a library's
choice of kernel does to the time (tiles, splits of K, slow paths of odd sizes) shows all the same, which is what so many
shapes are for: `perfmodel.fit` learns it here first, and the rest from the careful timings.

Nothing else may use the GPU meanwhile, not even a process that only asks what cuBLAS would run (`hil.choices`): its time slices
lie in launches of over 0.6 ms, which then take up to twice as long.

Shapes that `gemm.parquet` in the folder has are left out: what is learned here stays ignorant of the shapes that judge it.
Triton compiles our own GEMM for some hundred ways to cut a shape, a second each: `--workers` processes do so first.
"""

from __future__ import annotations

import json
import multiprocessing
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hil.command import Parser
from hil.files import write_atomic
from hil.fingerprint import fingerprint, has_gpu
from hil.kernels.availability import absences, available_kernels
from hil.kernels.base import Runner, Shape
from hil.shapes import (
    batched_shapes,
    broad_shapes,
    gemm_shapes,
    grouped_shapes,
    interaction_shapes,
    large_shapes,
    odd_batched_shapes,
    odd_shapes,
    short_shapes,
    tall_shapes,
    tower_shapes,
    wide_shapes,
)
from hil.timing import POOL_ELEMENTS, BufferPool
from perfmodel.gemm_plan import STEP, parts_of, plan_of
from perfmodel.kernels import KERNELS
from perfmodel.measured import launch_file, launch_files

LAUNCHES = 3
# Rows from which on a file is full and the next one begins: what is there already is not written again with every run.
MOST_ROWS = 3_500_000
TORCH = tuple(
    name
    for name, spec in KERNELS.items()
    if name.startswith("torch/") and "gemm" in spec.kind and "grouped" not in name and not spec.across
)
# Shapes that are launched under one profiler; of the largest calls, whose scales are large, too, and which take long.
_CHUNK, _LARGE_CHUNK = 800, 80
# Shapes whose forms of our own GEMM are compiled ahead: those that come up later are few.
_COMPILED_FOR = 8000
# Below this the operands stay in the L2, as they do when `hil.collect` rotates as many buffers as it may.
_RESIDENT_BYTES = 8e5
_MARKER = "spin_kernel"
# Elements of a block that shares a scale, along N and K.
_BLOCK = 128


def drawn(count: int, seed: int, kernels: Collection[str] = TORCH, *, which: str = "layers") -> list[Shape]:
    """Distinct shapes, up to a half more than `count`: of that 56% as `gemm_shapes`, 8% of whole blocks, 15% tall or wide.

    And batched ones: 16% as interactions, 5% of any small sizes, 20% in few groups of any sizes, 5% that a grouped kernel takes,
    21% where one is asked for; and 15% between the round sizes, batched or not (`broad_shapes`). Kinds that none of the kernels
    takes are left out.

    Args:
        count: Of those drawn, from which come those that a kernel takes.
        seed: Of the draw.
        kernels: Which must take a shape, any of them.
        which: "odd" for `odd_shapes` and `odd_batched_shapes` instead, `count` of each that a kernel takes, in turn; "large" for
            `count` of `large_shapes`, "few" for as many of `tower_shapes`, products in few groups of any sizes, "short" of
            `short_shapes`, large results of a short K, "broad" of `broad_shapes`, sizes between the round ones, of which those
            stay that a kernel takes.
    """
    if which in (apart := {"large": large_shapes, "few": tower_shapes, "short": short_shapes, "broad": broad_shapes}):
        return [shape for shape in apart[which](count, seed) if any(takes(name, shape) for name in kernels)]
    if which == "odd":
        asked = {KERNELS[name].kind for name in kernels}
        odds = {"gemm": odd_shapes, "batched_gemm": odd_batched_shapes}
        alternating = zip(*(draw(count, seed) for kind, draw in odds.items() if kind in asked), strict=True)
        return [shape for shape in chain.from_iterable(alternating) if any(takes(name, shape) for name in kernels)]
    rows = min((KERNELS[name].multiple_m for name in kernels if KERNELS[name].multiple_n == _BLOCK), default=4)
    share: tuple[tuple[Callable[[int, int], list[Shape]], float], ...] = (
        (gemm_shapes, 0.56), (tall_shapes, 0.07), (wide_shapes, 0.08), (interaction_shapes, 0.16), (batched_shapes, 0.05),
        (partial(_block_shapes, rows=rows), 0.08), (grouped_shapes, 0.21 if any("grouped" in name for name in kernels) else 0.05),
        (tower_shapes, 0.2), (broad_shapes, 0.15),
    )  # fmt: skip
    kinds = {"grouped" if "grouped" in name else KERNELS[name].kind for name in kernels}
    if "batched_gemm" in kinds:
        kinds.add("grouped")
    of: dict[Any, str] = dict.fromkeys((interaction_shapes, batched_shapes, tower_shapes), "batched_gemm")
    of[grouped_shapes] = "grouped"
    draws = [
        (draw, round(part * count), number)
        for number, (draw, part) in enumerate(share, seed)
        if draw is broad_shapes or of.get(draw, "gemm") in kinds
    ]
    shapes = dict.fromkeys(chain.from_iterable(draw(part, number) for draw, part, number in draws))
    legal = [shape for shape in shapes if any(takes(name, shape) for name in kernels)]
    return [legal[i] for i in np.random.default_rng(seed).permutation(len(legal))]


def _block_shapes(count: int, seed: int, rows: int) -> list[Shape]:
    """`gemm_shapes` brought to what block scaling needs: N and K multiples of 128, M one of `rows`."""
    return [
        Shape(rows * max(1, round(s.m / rows)), *(_BLOCK * max(1, round(size / _BLOCK)) for size in (s.n, s.k)))
        for s in gemm_shapes(count, seed)
    ]


def takes(kernel: str, shape: Shape) -> bool:
    """Whether a kernel is timed at a shape: it is legal, and as batched as the kernel."""
    spec = KERNELS[kernel]
    return (spec.kind == "batched_gemm") == (shape.groups > 1) and not spec.illegal(
        shape.m, shape.n, shape.k, groups=shape.groups
    )


def kernel_times(events: Sequence[tuple[float, float, str]]) -> list[float | None]:
    """Microseconds of each call, from the (start, duration, name) of all kernels in order of start, in nanoseconds.

    A call is what runs between two markers: `LAUNCHES` launches of as many kernels each. The median launch counts, and of it
    the time in which any of its kernels ran: one that is launched ahead of the one that it waits for counts once.
    None where the number of kernels does not divide.
    """
    calls: list[list[tuple[float, float]]] = []
    for start, duration, name in events:
        if _MARKER in name:
            calls.append([])
        elif calls:
            calls[-1].append((start, start + duration))
    times: list[float | None] = []
    for kernels in calls[:-1]:
        each, odd = divmod(len(kernels), LAUNCHES)
        launches = [_covered(kernels[i * each : (i + 1) * each]) for i in range(LAUNCHES)]
        times.append(None if odd or not each else statistics.median(launches) / 1e3)
    return times


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Time in which any of the spans (start, end), in order of start, lasts."""
    total, until = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def compile_ahead(shapes: Sequence[Shape], names: Sequence[str], workers: int) -> None:
    """Launch every form of our own GEMM that the shapes take once, in several processes that share Triton's cache."""
    own = [name for name in names if name.startswith("loka/")]
    # The last of a form is its smallest; a form of none that fits into the usual pool is compiled when it is timed.
    falling = sorted((s for s in shapes if 2 * s.largest_operand <= POOL_ELEMENTS), key=lambda s: -s.largest_operand)
    forms = {_form(name, shape): (name, shape) for shape in falling for name in own if takes(name, shape)}
    todo = list(forms.values())
    if todo:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.map(_launch_once, [todo[i::workers] for i in range(workers)], chunksize=1)
        print(f"compiled {len(todo)} forms", file=sys.stderr)


def _form(name: str, shape: Shape) -> tuple[Any, ...]:
    """What Triton compiles a GEMM of ours anew for: its cut, and which sizes are multiples of 16, or 1."""
    plan = plan_of(shape.m, shape.n, shape.k, name.endswith("_fast"))
    sizes = (shape.m, shape.n, parts_of(shape.k, plan.parts)[0].stop)
    return name, replace(plan, parts=min(plan.parts, 2)), shape.k % STEP == 0, *((size == 1, size % 16 == 0) for size in sizes)


def _launch_once(calls: Sequence[tuple[str, Shape]]) -> None:
    from hil.kernels import RUNNERS

    for name, shape in calls:
        RUNNERS[name].bind(shape, pool := BufferPool())(0)
        del pool


def profiled(calls: Sequence[tuple[Runner, Shape]], pool: BufferPool, first: int) -> list[float | None]:
    """Times of calls, launched one after another on rotating operands from number `first` on; None for one that fails."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    bound = [(runner.bind(shape, pool), runner.moved_bytes(shape) < _RESIDENT_BYTES) for runner, shape in calls]
    failed = set()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(1)
        for number, (launch, resident) in enumerate(bound):
            try:
                for turn in range(LAUNCHES):
                    launch(0 if resident else first + LAUNCHES * number + turn)
            except RuntimeError as error:
                print(f"left out: {calls[number]}: {str(error).splitlines()[0]}", file=sys.stderr)
                failed.add(number)
            torch.cuda._sleep(1)
        torch.cuda.synchronize()
    raw = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    kernels = [event for event in raw if "CUDA" in str(event.device_type()) and "Sync" not in event.name()]
    times = kernel_times(sorted((e.start_ns(), e.duration_ns(), e.name()) for e in kernels))
    if len(times) != len(calls):
        print(f"{len(times)} profiled calls of {len(calls)}: these are left out", file=sys.stderr)
        return [None] * len(calls)
    return [None if number in failed else value for number, value in enumerate(times)]


def measured(
    shapes: Sequence[Shape], runners: Sequence[Runner], deadline: float, chunk: int = _CHUNK
) -> Iterator[dict[str, Any]]:
    """Rows of (kernel, shape), so many shapes at a time, until done or out of time."""
    pool, done = BufferPool(elements=max([POOL_ELEMENTS, *(2 * shape.largest_operand for shape in shapes)])), 0
    for start in range(0, len(shapes), chunk):
        if time.time() > deadline:
            print(f"out of time after {start} of {len(shapes)} shapes", file=sys.stderr)
            return
        calls = [(runner, shape) for shape in shapes[start : start + chunk] for runner in runners if takes(runner.name, shape)]
        for (runner, s), value in zip(calls, profiled(calls, pool, LAUNCHES * done), strict=True):
            if value is not None:
                yield {"kernel": runner.name, "m": s.m, "n": s.n, "k": s.k, "groups": s.groups, "time_us": value}
        done += len(calls)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.launches", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder of launches.parquet, extended if it is there (from 3.5 million rows on launches2.parquet)",
    )
    parser.add_argument("--count", type=int, default=60000, help="shapes to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=9001)
    draws = parser.add_mutually_exclusive_group()
    for which, of in (
        ("odd", "shapes of any sizes (hil.shapes.odd_shapes and odd_batched_shapes)"),
        ("large", "shapes of the largest batches (hil.shapes.large_shapes)"),
        ("few", "products in few groups of any sizes (hil.shapes.tower_shapes)"),
        ("short", "large results of a short K (hil.shapes.short_shapes)"),
        ("broad", "sizes between the round ones (hil.shapes.broad_shapes)"),
    ):
        draws.add_argument(f"--{which}", dest="which", action="store_const", const=which, default="layers", help=of)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="stop in time and keep what is measured (default: %(default)s)"
    )
    parser.add_argument(
        "--kernels", nargs="+", default=list(TORCH), metavar="PATTERN", help="GEMMs (default: torch's but grouped)"
    )
    parser.add_argument("--workers", type=int, default=8, help="processes that compile our own GEMM (default 8)")
    options = parser.parse_args(arguments)
    names = [
        name
        for name, spec in KERNELS.items()
        if "gemm" in spec.kind and not spec.across and any(fnmatchcase(name, pattern) for pattern in options.kernels)
    ]
    if not names:
        parser.error(f"--kernels {' '.join(options.kernels)} fits no GEMM; see: loka-sim kernels")

    if not has_gpu():
        return 3
    for line in absences(names):
        print(line, file=sys.stderr)
    if not (names := list(available_kernels(names))):
        return 3
    from hil.kernels import RUNNERS

    # That a profiler's second cycle would forget its first: it has one.
    warnings.filterwarnings("ignore", message=".*Profiler clears events")
    began, shape = time.time(), ["m", "n", "k", "groups"]
    careful = options.out / "gemm.parquet"
    before = [*launch_files(options.out), *([careful] if careful.is_file() else [])]
    known = {tuple(row) for old in before for row in pd.read_parquet(old, columns=shape).to_numpy()}
    shapes = [s for s in drawn(options.count, options.seed, names, which=options.which) if (s.m, s.n, s.k, s.groups) not in known]
    compile_ahead(shapes[:_COMPILED_FOR], names, options.workers)
    chunk = _LARGE_CHUNK if options.which == "large" else _CHUNK
    fresh = pd.DataFrame(measured(shapes, [RUNNERS[name] for name in names], began + 60 * options.minutes, chunk))
    if not len(fresh):
        print("nothing new was measured", file=sys.stderr)
        return 1
    command = f"python -m hil.launches {shlex.join(arguments if arguments is not None else sys.argv[1:])}"
    add(fresh, {"command": command, **fingerprint(), "rows": len(fresh)}, options.out)
    print(f"{len(fresh)} rows, {time.time() - began:.0f} s", file=sys.stderr)
    return 0


def add(rows: pd.DataFrame, run: dict[str, Any], folder: Path) -> None:
    """Add a run's rows to the last file of launches, or begin the next where that is full, and the run to their sidecar.

    Each file is written whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sidecar, files = folder / "launches.json", launch_files(folder)
    runs = json.loads(sidecar.read_text())["runs"] if sidecar.is_file() else []
    path = launch_file(folder, len(files) + 1)
    if files and len(last := pd.read_parquet(files[-1])) < MOST_ROWS:
        path, rows = files[-1], pd.concat([last, rows], ignore_index=True)
    method = "median of three single launches' kernel durations under torch's profiler; see hil/launches.py"
    small = {"kernel": "category", **dict.fromkeys(("m", "n", "k", "groups"), "int32"), "time_us": "float32"}
    document = json.dumps({"schema_version": 1, "method": method, "runs": [*runs, run]}, indent=1) + "\n"
    table = rows.assign(kernel=rows["kernel"].astype(str)).astype(small)
    # The sidecar first: a row without its run would be worse than a run without rows.
    write_atomic(sidecar, lambda beside: beside.write_text(document))
    write_atomic(path, lambda beside: table.to_parquet(beside, index=False, compression="zstd", compression_level=15))


if __name__ == "__main__":
    sys.exit(main())

"""Time bf16 GEMMs as a training step lays their operands, beside the same products with K fastest in both.

    python -m hil.layouts --out data/h200 --count 60000 --seed 9501 --minutes 3
    python -m hil.layouts --out data/h200 --count 30000 --seed 9551 --minutes 1 --odd
    python -m hil.layouts --out data/h200 --count 2000 --seed 9571 --minutes 2 --careful
    python -m hil.layouts --out data/h200 --count 60000 --seed 9601 --minutes 2 --bias

`torch/bf16` and `torch/bf16_batched` are timed, and their times learned, with K fastest: as a layer's output reads its input
and its weight. Its input's gradient reads the weight along N, and its weight's gradient reads both operands across; cuBLAS has
other kernels for each, chooses otherwise among them, and where sizes are odd falls back on far older ones. Every product here is
timed in all four layouts of its operands, one behind the other: quickly, as `hil.launches` does (420 products a second), or as
carefully as `hil.collect` (`--careful`: graphs replayed in turn, 20 a second). With `--bias` single products are timed with K
fastest alone, without a bias and with one, as torch.compile calls a layer's output. What all that takes is learned from here by
`perfmodel.fit_layouts`.

A row is one product: m, n, k, groups, a column of microseconds for each layout (`row_column_us`: operand a contiguous along K
("row"), b along K ("column"), as in `loka_sim.modelspec.Gemm`; none where it was not timed), and whether it was timed carefully.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hil.command import Parser
from hil.files import write_atomic
from hil.fingerprint import fingerprint, has_gpu
from hil.kernels import RUNNERS
from hil.kernels.base import Runner, Shape
from hil.launches import LAUNCHES, drawn, profiled
from hil.timing import BufferPool, capture, launches_for, time_interleaved
from perfmodel.kernels import ACROSS, BF16, BF16_BATCHED, BIASED, K_FASTEST, Layout, laid
from perfmodel.layouts import FILE, LAYOUTS, column

MOST_ELEMENTS = 2**28
_CHUNK = 400


def runners(shape: Shape, layouts: Sequence[Layout]) -> list[Runner]:
    """The products of a shape in these layouts, batched where it has groups."""
    return [RUNNERS[laid(BF16 if shape.groups == 1 else BF16_BATCHED, layout)] for layout in layouts]


def quickly(shapes: Sequence[Shape], layouts: Sequence[Layout], deadline: float) -> Iterator[dict[str, Any]]:
    """Rows of shapes by single launches under torch's profiler, until done or out of time; without those that fail."""
    pool, each = BufferPool(elements=2 * MOST_ELEMENTS), len(layouts)
    for start in range(0, len(shapes), _CHUNK):
        if time.time() > deadline:
            print(f"out of time after {start} of {len(shapes)} products", file=sys.stderr)
            return
        chunk = shapes[start : start + _CHUNK]
        times = profiled(
            [(runner, shape) for shape in chunk for runner in runners(shape, layouts)], pool, LAUNCHES * each * start
        )
        for number, shape in enumerate(chunk):
            yield from _row(shape, layouts, times[number * each : (number + 1) * each], careful=False)


def carefully(shapes: Sequence[Shape], layouts: Sequence[Layout], deadline: float) -> Iterator[dict[str, Any]]:
    """Rows of shapes by graphs that are replayed in turn, until done or out of time."""
    pool = BufferPool(elements=2 * MOST_ELEMENTS)
    for done, shape in enumerate(shapes):
        if time.time() > deadline:
            print(f"out of time after {done} of {len(shapes)} products", file=sys.stderr)
            return
        every = runners(shape, layouts)
        number = launches_for(every[0].moved_bytes(shape))
        captured = [capture(runner.bind(shape, pool), number) for runner in every]
        times = [timing.quantile(0.5) for timing in time_interleaved([(graph, number) for graph, _ in captured], 6.0)]
        del captured
        yield from _row(shape, layouts, times, careful=True)


def _row(shape: Shape, layouts: Sequence[Layout], times: Sequence[float | None], careful: bool) -> Iterator[dict[str, Any]]:
    if None not in times:
        sizes = {"m": shape.m, "n": shape.n, "k": shape.k, "groups": shape.groups}
        yield {**sizes, **{column(layout): us for layout, us in zip(layouts, times, strict=True)}, "careful": careful}


def add(rows: pd.DataFrame, run: dict[str, Any], folder: Path) -> None:
    """Add a run's rows to the folder's table, and the run to its sidecar; each is written whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path, sidecar = folder / FILE, (folder / FILE).with_suffix(".json")
    runs = json.loads(sidecar.read_text())["runs"] if sidecar.is_file() else []
    if path.is_file():
        rows = pd.concat([pd.read_parquet(path), rows], ignore_index=True)
    method = (
        "quick: medians of three single launches under torch's profiler (hil/launches.py); careful: of graphs (hil/timing.py)"
    )
    types = {**dict.fromkeys(("m", "n", "k", "groups"), "int32"), **{column(layout): "float32" for layout in LAYOUTS}}
    document = json.dumps({"schema_version": 1, "method": method, "runs": [*runs, run]}, indent=1) + "\n"
    # The sidecar first: a row without its run would be worse than a run without rows.
    write_atomic(sidecar, lambda beside: beside.write_text(document))
    table = rows.reindex(columns=[*types, "careful"]).astype(types)
    write_atomic(path, lambda beside: table.to_parquet(beside, index=False, compression="zstd", compression_level=15))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.layouts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help=f"folder of {FILE}, extended if it is there")
    parser.add_argument("--count", type=int, default=60000, help="products to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=9501)
    draws = parser.add_mutually_exclusive_group()
    for which, of in (("odd", "of any sizes"), ("few", "in few groups of any sizes"), ("broad", "between the round sizes")):
        draws.add_argument(f"--{which}", dest="which", action="store_const", const=which, default="layers", help=f"products {of}")
    parser.add_argument(
        "--minutes", type=float, default=3.0, help="stop in time and keep what is measured (default: %(default)s)"
    )
    parser.add_argument("--careful", action="store_true", help="replay graphs, as hil.collect does: some 20 products a second")
    parser.add_argument("--bias", action="store_true", help="with K fastest alone, without a bias and with one")
    options = parser.parse_args(arguments)

    if not has_gpu():
        return 3
    warnings.filterwarnings("ignore", message=".*Profiler clears events")
    began, sizes = time.time(), ["m", "n", "k", "groups"]
    path = options.out / FILE
    known = {tuple(row) for row in pd.read_parquet(path, columns=sizes).to_numpy()} if path.is_file() else set()
    shapes = [
        s
        for s in drawn(options.count, options.seed, (BF16,) if options.bias else (BF16, BF16_BATCHED), which=options.which)
        if (s.m, s.n, s.k, s.groups) not in known and s.largest_operand <= MOST_ELEMENTS
    ]
    layouts = (K_FASTEST, BIASED) if options.bias else (K_FASTEST, *ACROSS)
    if options.bias:
        shapes = [shape for shape in shapes if shape.groups == 1 and shape.n > 1]
    measured = carefully if options.careful else quickly
    fresh = pd.DataFrame(measured(shapes, layouts, began + 60 * options.minutes))
    if not len(fresh):
        print("nothing new was measured; draw more (--count) or otherwise (--seed)", file=sys.stderr)
        return 1
    command = f"python -m hil.layouts {shlex.join(arguments if arguments is not None else sys.argv[1:])}"
    add(fresh, {"command": command, **fingerprint(), "rows": len(fresh)}, options.out)
    print(f"{len(fresh)} products, {time.time() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

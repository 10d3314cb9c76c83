"""Quantization on a GPU: our Triton kernels beside a plain copy of as many bytes, torch.compile and eager torch.

    python benchmarks/emulation_gpu.py [--out FILE] [--workers 14] [--minutes 4] [--quick]

Times are medians of CUDA graph replays whose launches rotate over operands past the L2, the four methods in turn. A
share is the time of a plain copy that moves the same bytes (input once, codes and scales; `passes` twice the input where
amax must be known before the cast) over ours; every output is compared with the torch path of `numerics` first, to the
last bit. Eager torch is `numerics` itself without the kernels; torch.compile runs a plain e4m3 quantizer (scale 448 / amax,
values times scale) and is there for the four scalings that it has. With workers, so many processes compile, and one at a time
measures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hil.candidates import locked_autotune
from hil.fingerprint import fingerprint
from hil.kernels import torch_memory
from hil.kernels.base import Shape
from hil.measure import Workers
from hil.timing import capture, launches_for, time_interleaved
from numerics import gpu, gpu_dual
from numerics.quantization import QuantizedTensor, fake_quantize, quantize
from numerics.recipe import Recipe
from numerics.scaling import scales_shape

SHAPES = ((2048, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (16384, 8192))
RECIPES = (
    "e4m3", "e4m3/tensorwise", "e4m3/rowwise", "e4m3/columnwise", "e4m3/block1x128", "e4m3/block128x128",
    "e5m2/rowwise", "e4m3fnuz/rowwise", "e3m2/rowwise", "e2m1/rowwise", "int8/rowwise",
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "mx9", "mx6", "mx4", "msfp16", "msfp12",
)  # fmt: skip
COMPILED = {
    "e4m3/tensorwise": torch_memory.quantize_tensorwise,
    "e4m3/rowwise": torch_memory.quantize_rowwise,
    "e4m3/block1x128": torch_memory.quantize_block1x128,
    "e4m3/block128x128": torch_memory.quantize_block128x128,
}
# What else is timed, at one size: values instead of codes, a given amax, both layouts at once.
VALUES = ("e4m3/tensorwise", "e4m3/rowwise", "mxfp8_e4m3", "mx9", "e2m1/rowwise")
GIVEN = ("e4m3/tensorwise", "e4m3/rowwise", "e4m3/columnwise")
DUAL = ("e4m3/tensorwise", "e4m3/rowwise", "e4m3/block1x128", "e4m3/block128x128")
TWO_PASS = ("tensorwise", "columnwise")
DETAILED = (8192, 8192)
# Two of the largest matrices, and more of the smaller ones.
INPUTS = 2 * SHAPES[-1][0] * SHAPES[-1][1]
# The shapes at which every recipe is measured.
FULL = (SHAPES[1], DETAILED)


@dataclass(frozen=True)
class Row:
    """One measured quantization.

    Attributes:
        recipe: Its name.
        output: `codes`, `values`, `codes given amax` or `dual`.
        dtype: Of the input.
        rows: Of the input.
        columns: Of the input.
        moved_bytes: Input once and every output.
        ours_us: Median time.
        copy_us: Of a plain copy that moves as many bytes.
        share: copy_us / ours_us.
        share_passes: The same when a second read of the input, where one is needed, is counted.
        tb_per_s: moved_bytes over our time.
        compiled_us: torch.compile's median; None where there is none.
        eager_us: numerics in torch; None where not measured.
        equal: Whether every bit equals the torch path's.
    """

    recipe: str
    output: str
    dtype: str
    rows: int
    columns: int
    moved_bytes: int
    ours_us: float
    copy_us: float
    share: float
    share_passes: float
    tb_per_s: float
    compiled_us: float | None
    eager_us: float | None
    equal: bool


def rounded(row: Row) -> dict[str, Any]:
    """The row, without digits that no clock measured."""
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(row).items()}


class Inputs:
    """Views at rotating offsets of one random buffer per dtype, so that launches do not meet in the L2."""

    def __init__(self, elements: int) -> None:
        """Allocate and fill."""
        generator = torch.Generator(device="cuda").manual_seed(0)
        self._buffers = {torch.bfloat16: torch.empty(elements, dtype=torch.bfloat16, device="cuda")}
        self._buffers[torch.bfloat16].normal_(generator=generator)
        self._buffers[torch.float32] = torch.empty(elements, dtype=torch.float32, device="cuda").normal_(generator=generator)

    def view(self, shape: tuple[int, int], index: int, dtype: torch.dtype) -> torch.Tensor:
        """Launch number `index`'s matrix."""
        buffer, size = self._buffers[dtype], shape[0] * shape[1]
        offset = index % (buffer.numel() // size) * size
        return buffer[offset : offset + size].view(shape)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal bits."""
    if got.dtype == torch.float32:
        got, wanted = got.contiguous().view(torch.int32), wanted.contiguous().view(torch.int32)
    return torch.equal(got, wanted)


def in_torch(function: Callable[..., Any], *arguments: Any) -> Any:
    """`numerics` without the kernels."""
    with mock.patch.object(gpu, "supports", return_value=False):
        return function(*arguments)


def median(launch: Callable[[int], object], count: int, others: list[tuple[Callable[[int], object], int]]) -> list[float]:
    """Medians of launches timed in turn; the first is ours."""
    graphs, kept = [], []
    for function, launches in ((launch, count), *others):
        graph, results = capture(function, launches)
        graphs.append((graph, launches))
        kept.append(results)
    return [timing.quantile(0.5) for timing in time_interleaved(graphs, budget_ms=6.0)]


def measure(recipe: Recipe, output: str, shape: tuple[int, int], dtype: torch.dtype, inputs: Inputs, lock: Any = None) -> Row:
    """Check, then time; the lock is held while the GPU works for long."""
    x = inputs.view(shape, 0, dtype)
    moved, extra, ours, check = operation(recipe, output, shape, dtype, inputs, lock)
    launches = launches_for(moved)
    ours(0)  # compiles: that needs no lock
    compiled = None
    if output == "codes" and recipe.name in COMPILED and dtype == torch.bfloat16 and shape in FULL:
        compiled = torch.compile(COMPILED[recipe.name], dynamic=False)
        compiled(x)
    with lock or nullcontext():
        equal = check()
        others = [(copies(moved, launches), launches)]
        if extra:
            others.append((copies(moved + extra, launches), launches))
        if compiled is not None:
            others.append((lambda index: compiled(inputs.view(shape, index, dtype)), launches))
        times = median(ours, launches, others)
        eager = eager_us(x, recipe) if output == "codes" and shape == DETAILED else None
    return Row(
        recipe.name, output, str(dtype).removeprefix("torch."), *shape, moved, times[0], times[1], times[1] / times[0],
        (times[2] if extra else times[1]) / times[0], moved / times[0] * 1e-6,
        times[-1] if compiled is not None else None, eager, equal,
    )  # fmt: skip


def copies(moved: int, launches: int) -> Callable[[int], object]:
    """A launcher of plain copies that read and write `moved` bytes together, at addresses rotated as ours are."""
    count = max(2, min(launches, 2**29 // moved))
    buffers = [torch.randint(255, (2, moved // 2 // 512 * 512), dtype=torch.uint8, device="cuda") for _ in range(count)]
    return lambda index: buffers[index % count][0].copy_(buffers[index % count][1])


def operation(
    recipe: Recipe, output: str, shape: tuple[int, int], dtype: torch.dtype, inputs: Inputs, lock: Any
) -> tuple[int, int, Callable[[int], Any], Callable[[], bool]]:
    """Bytes moved, bytes of a second read, the launcher, and whether its result is right."""
    x = inputs.view(shape, 0, dtype)
    read = x.numel() * x.element_size()
    extra = read if recipe.scaling in TWO_PASS and "given" not in output else 0
    little: QuantizedTensor = in_torch(quantize, x[:128, :128], recipe)
    scales_like = little.scales.new_empty(scales_shape(recipe, *shape))
    code_bytes = little.codes.element_size()
    if output == "dual":
        moved = read + 2 * (x.numel() * code_bytes + scales_like.numel() * 4)
        second = read if recipe.scaling in ("tensorwise", "rowwise") else 0

        def both_equal() -> bool:
            wanted = in_torch(quantize, x, recipe), in_torch(quantize, x.t().contiguous(), recipe)
            made = gpu_dual.quantize_dual(x, recipe)
            return all(same(a.codes, b.codes) and same(a.scales, b.scales) for a, b in zip(made, wanted, strict=True))

        def dual(index: int) -> object:
            return gpu_dual.quantize_dual(inputs.view(shape, index, dtype), recipe, check=False)

        return moved, second, dual, both_equal
    amax = None
    if "given" in output:
        # Of a tensor half as large as this one, so that values saturate.
        with lock or nullcontext():
            amax = in_torch(quantize, x.float() / 2, recipe).scales * torch.full_like(scales_like, recipe.element.max)
    values = output == "values"

    def launch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = torch.empty_like(scales_like)
        target = torch.empty(shape, dtype=torch.float32 if values else little.codes.dtype, device="cuda")
        gpu.quantize_into(
            inputs.view(shape, index, dtype), recipe, amax, scales, None if values else target, target if values else None,
            check=False,
        )  # fmt: skip
        return scales, target

    def equal() -> bool:
        scales, target = launch(0)
        if amax is not None:
            spread = torch.clamp(amax / torch.full_like(amax, recipe.element.max), min=2.0**-126)
            checked = (x.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            return same(scales, spread) and same(target, checked)
        wanted = in_torch(quantize, x, recipe)
        return same(scales, wanted.scales) and same(target, in_torch(fake_quantize, x, recipe) if values else wanted.codes)

    return read + scales_like.numel() * 4 + x.numel() * (4 if values else code_bytes), extra, launch, equal


def eager_us(x: torch.Tensor, recipe: Recipe) -> float:
    """Median of `numerics` in torch, called as a user calls it."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(4):
        start.record()
        in_torch(quantize, x, recipe)
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return float(torch.tensor(times[1:]).median())


def cases(quick: bool) -> list[tuple[str, str, tuple[int, int], torch.dtype]]:
    """Everything that is measured."""
    wanted = []
    for dtype in (torch.bfloat16, torch.float32):
        for shape in FULL if quick else SHAPES:
            main = RECIPES if shape in FULL else RECIPES[1:6]
            wanted += [(name, "codes", shape, dtype) for name in main]
            if shape in FULL:
                wanted += [(name, "values", shape, dtype) for name in VALUES]
                wanted += [(name, "codes given amax", shape, dtype) for name in GIVEN]
            if dtype == torch.bfloat16:
                wanted += [(name, "dual", shape, dtype) for name in DUAL]
    return wanted


def attempt(name: str, output: str, shape: tuple[int, int], dtype: torch.dtype, inputs: Inputs, lock: Any = None) -> list[Row]:
    """The row, or none where there is no such quantization, which is said."""
    torch._dynamo.reset()
    try:
        return [measure(Recipe.parse(name), output, shape, dtype, inputs, lock)]
    except ValueError as error:
        print(f"{name}: {str(error).splitlines()[0][:80]}", file=sys.stderr)
        return []


def serve(index: int, lock: Any, tasks: Any, results: Any) -> None:
    """A worker: measures the rows that it finds."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    inputs = Inputs(INPUTS)
    with locked_autotune(lock):
        while (task := tasks.get()) is not None:
            key, shape, (name, output, dtype), deadline = task
            late = time.time() > deadline
            rows = [] if late else attempt(name, output, (shape.m, shape.k), getattr(torch, dtype), inputs, lock)
            torch.cuda.empty_cache()
            results.put((key, [asdict(row) for row in rows]))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile (default: this one alone)")
    parser.add_argument("--minutes", type=float, default=30.0, help="when no further row is begun (default 30)")
    parser.add_argument("--quick", action="store_true", help="two shapes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 3
    warnings.filterwarnings("ignore")
    begun = time.time()
    wanted = cases(options.quick)
    deadline = begun + 60 * options.minutes
    rows: list[Row] = []
    if options.workers:
        work = [
            (Shape(shape[0], 1, shape[1]), [name, output, str(dtype).removeprefix("torch.")])
            for name, output, shape, dtype in wanted
        ]
        with Workers(options.workers, serve=serve) as workers:
            workers.run(work, deadline, lambda fresh: rows.extend(Row(**row) for row in fresh))
    else:
        inputs = Inputs(INPUTS)
        for name, output, shape, dtype in wanted:
            rows += attempt(name, output, shape, dtype, inputs) if time.time() < deadline else []
    order = {(name, output, *shape, dtype): place for place, (name, output, shape, dtype) in enumerate(wanted)}
    rows.sort(key=lambda row: order[row.recipe, row.output, row.rows, row.columns, getattr(torch, row.dtype)])
    print(f"{'recipe':18} {'output':16} {'input':8} {'shape':>11} {'us':>8} {'TB/s':>5} {'of copy':>7} {'passes':>6} "
          f"{'compile':>8} {'eager':>9}  equal")  # fmt: skip
    for row in rows:
        print(
            f"{row.recipe:18} {row.output:16} {row.dtype:8} {row.rows:>5}x{row.columns:<5} {row.ours_us:8.1f} "
            f"{row.tb_per_s:5.2f} {row.share:7.0%} {row.share_passes:6.0%} {row.compiled_us or float('nan'):8.1f} "
            f"{row.eager_us or float('nan'):9.1f}  {'yes' if row.equal else 'NO'}"
        )
    large = [row for row in rows if row.rows * row.columns * (2 if row.dtype == "bfloat16" else 4) >= 8e6]
    below = [row for row in large if row.share_passes < 0.7]
    print(f"{len(large) - len(below)} of {len(large)} from 8 MB up at 70% or more of copy bandwidth; "
          f"{sum(not row.equal for row in rows)} of {len(rows)} differ from torch; {time.time() - begun:.0f} s")  # fmt: skip
    if options.out:
        document = {
            "schema_version": 1,
            "command": f"python benchmarks/emulation_gpu.py --out data/h200/emulation.json{' --quick' * options.quick}",
            "machine": fingerprint(),
            "rows": [rounded(r) for r in rows],
        }
        options.out.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

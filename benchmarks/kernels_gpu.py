"""Our own kernels beside what a user would run instead, and how near all of them are to what the GPU can do.

    python benchmarks/kernels_gpu.py [--out FILE] [--workers 14] [--quick]

Quantizers beside torch.compile's, torchao's and FBGEMM's of the same recipe; GEMMs of torch, ours and FBGEMM's beside bf16.
Medians of CUDA graph replays whose launches rotate over operands past the L2, all methods of a line in turn; every result is
checked against FP64 first.

A quantizer's share is the time of a plain copy of as many bytes, the input counted once, over its own. Where the amax of a
whole tensor or column must be known before the first code is written, a tensor that does not fit on the chip must be read
twice: a second share counts that. A GEMM's ceiling is the larger of its operations at the fastest rate that 8192^3 reaches here
and of its bytes at copy bandwidth. With workers, kernels are compiled ahead in so many processes; nothing is timed meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from kernel_peers import OURS, peers

from hil.fingerprint import fingerprint
from hil.kernels import RUNNERS
from hil.kernels.availability import absences, availability
from hil.kernels.base import Runner, Shape
from hil.kernels.loka_gemm import plan_of
from hil.lock import GpuLock
from hil.measure import locked_autotune
from hil.timing import BufferPool, capture, launches_for, time_interleaved
from perfmodel.kernels import KERNELS

# (rows, columns): 8 MB to 268 MB of bf16.
SIZES = ((2048, 2048), (4096, 4096), (8192, 8192), (16384, 8192))
# Weight gradients (K is the batch), few rows, narrow outputs, and small layers; none was used to fit the plans.
SMALL = (
    (64, 128, 2048), (128, 128, 4096), (256, 64, 4096), (512, 512, 2048), (256, 256, 4096), (512, 128, 8192), (512, 256, 8192),
    (1024, 512, 8192), (64, 64, 16384), (256, 128, 16384), (768, 256, 16384), (512, 512, 32768), (128, 128, 65536),
    (256, 256, 65536), (512, 128, 65536), (1024, 256, 32768), (32, 512, 65536), (16, 256, 131072), (192, 448, 49152),
    (96, 768, 16384), (16, 512, 512), (32, 1024, 1024), (64, 2048, 512), (64, 1024, 4096), (128, 1024, 1024), (128, 4096, 512),
    (256, 512, 512), (256, 2048, 1024), (512, 512, 512), (384, 1024, 256),
    (2048, 32, 256), (4096, 16, 512), (8192, 32, 512), (16384, 64, 128), (32768, 16, 256), (2048, 64, 1024), (4096, 128, 512),
    (2048, 256, 512), (4096, 256, 256), (2048, 1024, 256),
)  # fmt: skip
# Layers of LRMs at usual batches: forward, and gradients of weights with K the batch.
LARGE = (
    (2048, 768, 256), (2048, 2048, 2048), (2048, 4096, 4096), (2048, 8192, 2048), (2048, 1024, 16384), (2048, 1024, 123200),
    (4096, 4096, 1024), (8192, 1024, 1024), (8192, 4096, 4096), (16384, 512, 1024), (65536, 256, 512), (32768, 1024, 512),
    (1024, 1024, 8192), (4096, 4096, 2048), (1024, 2048, 32768), (16384, 4096, 4096),
)  # fmt: skip
SQUARE = (8192, 8192, 8192)
SCALED = ("tensorwise_fast", "tensorwise_split", "rowwise_fast", "rowwise_split")
GEMMS = (
    "torch/bf16", *(f"torch/fp8_{kind}" for kind in SCALED), "torch/fp8_block128", *(f"loka/fp8_{kind}" for kind in SCALED),
    "fbgemm/fp8_rowwise_fast", "fbgemm/fp8_block128",
)  # fmt: skip
SHOWN = {
    "torch/bf16": "bf16", "torch/fp8_tensorwise_fast": "tensorwise", "loka/fp8_tensorwise_fast": "ours",
    "torch/fp8_rowwise_fast": "rowwise", "loka/fp8_rowwise_fast": "ours", "fbgemm/fp8_rowwise_fast": "FBGEMM",
    "torch/fp8_block128": "blocks",
}  # fmt: skip
# NVIDIA's data sheet of the H200: dense TFLOP/s, and TB/s of its memory.
DATASHEET = {"bf16_tflops": 989.5, "fp8_tflops": 1979.0, "memory_tbs": 4.8}
# What compiling ahead may take.
PREPARE_S = 90.0
Problems = dict[str, str]


def medians(runners: Sequence[Runner], shape: Shape, pool: BufferPool, problems: Problems, copied: Sequence[int] = ()) -> Any:
    """Medians in us, and errors, of the kernels (None of one that fails, which is named); medians of copies of so many bytes."""
    launches = launches_for(runners[0].moved_bytes(shape))
    graphs, kept, errors = [], [], {}
    for place, runner in enumerate(runners):
        # Whatever a library raises concerns its own kernel alone.
        try:
            launch = runner.bind(shape, pool)
            error = runner.error(shape, pool, launch(0))
            graph, results = capture(launch, launches)
        except Exception as failure:
            torch.cuda.synchronize()
            problems[f"{runner.name} {shape.m}x{shape.n}x{shape.k}"] = (
                f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:160]}"
            )
            continue
        errors[place] = error
        graphs.append((graph, launches))
        kept.append(results)
    for moved in copied:
        graph, results = capture(copies(moved, launches), launches)
        graphs.append((graph, launches))
        kept.append(results)
    timed = iter([timing.quantile(0.5) for timing in time_interleaved(graphs, budget_ms=5.0)])
    times = [next(timed) if place in errors else None for place in range(len(runners))]
    return times, [errors.get(place) for place in range(len(runners))], list(timed)


def copies(moved: int, launches: int) -> Callable[[int], object]:
    """A launcher of plain copies that read and write `moved` bytes together, rotated as the kernels' operands are."""
    count = max(2, min(launches, 2**29 // moved))
    buffers = [torch.randint(255, (2, moved // 2), dtype=torch.uint8, device="cuda") for _ in range(count)]
    return lambda index: buffers[index % count][0].copy_(buffers[index % count][1])


def read_again(form: str, size: tuple[int, int]) -> int:
    """Bytes of a second read: under the amax of a whole tensor, or of whole columns, nothing can be cast in the first."""
    first = "tensorwise" in form and "delayed" not in form
    return 2 * size[0] * size[1] if first or form in ("rowwise_transposed", "rowwise_dual") else 0


def ceiling(form: str) -> str:
    """The bytes of an element that a form must move."""
    again = " and again 2" if read_again(form, (1, 1)) else ""
    return f"reads 2{again}, writes {2 if form.endswith('_dual') else 1}"


def quantizers(
    pool: BufferPool, sizes: Sequence[tuple[int, int]], problems: Problems, keep: Callable[..., None]
) -> list[dict[str, Any]]:
    """A row per form, maker and size, kept as they come; prints shares of copy bandwidth."""
    made: list[dict[str, Any]] = []
    print("Quantizers, bf16 to e4m3: share of a plain copy's bandwidth; after the slash with the second read counted")
    print("that the recipe needs. '2^n': powers of two. Who has no kernel for both results launches two.")
    print(f"{'':22s}" + "".join(f"{2 * rows * columns / 1e6:>8.0f} MB" for rows, columns in sizes))
    for form, own in OURS.items():
        others, missing = peers(form)
        problems.update({f"{who} ({form})": why for who, why in missing.items()})
        runners = {"ours": own, **others}
        cells: dict[str, list[str]] = {who: [] for who in runners}
        for size in sizes:
            torch._dynamo.reset()
            shape, again = Shape(size[0], 1, size[1]), read_again(form, size)
            moved = own.moved_bytes(shape)
            times, errors, (copy, with_second) = medians(list(runners.values()), shape, pool, problems, (moved, moved + again))
            for who, us, error in zip(runners, times, errors, strict=True):
                if us is None:
                    cells[who].append("failed")
                    continue
                shares = copy / us, with_second / us if again else copy / us
                cells[who].append(f"{shares[0]:.0%}" + (f"/{shares[1]:.0%}" if again else ""))
                made.append({
                    "form": form, "whose": who, "rows": size[0], "columns": size[1], "us": us, "copy_us": copy,
                    "copied_bytes": moved, "second_read_bytes": again, "share": shares[0], "share_passes": shares[1],
                    "faster_than_ours": times[0] / us if times[0] else None, "error": error, "correct": error <= own.limit,
                })  # fmt: skip
        print(f"{form}: of an element's bytes {ceiling(form)}")
        for who, texts in cells.items():
            print(f"  {who:20s}" + "".join(f"{text:>11s}" for text in texts), flush=True)
        keep(quantizers=made)
    return made


def legal(name: str, size: tuple[int, int, int]) -> bool:
    """Whether a GEMM is installed and takes this shape."""
    return availability(KERNELS[name]).available and KERNELS[name].illegal(*size) is None


def ceiling_us(name: str, size: tuple[int, int, int], ceilings: dict[str, float]) -> tuple[float, str]:
    """The least time of a GEMM by the measured ceilings, and which one binds."""
    m, n, k = size
    rate = ceilings["fp8_tflops" if KERNELS[name].is_fp8 else "bf16_tflops"]
    work, moved = 2 * m * n * k / rate / 1e6, RUNNERS[name].moved_bytes(Shape(*size)) / ceilings["copy_tbs"] / 1e6
    return (work, "rate") if work >= moved else (moved, "bandwidth")


def measured_ceilings(pool: BufferPool, problems: Problems) -> dict[str, float]:
    """The fastest bf16 and FP8 rates of 8192^3, and what a copy of 268 MB reads and writes in a second."""
    names = [name for name in GEMMS if not name.startswith("loka/") and legal(name, SQUARE)]
    copied = 2**28
    times, _, (copy,) = medians([RUNNERS[name] for name in names], Shape(*SQUARE), pool, problems, (copied,))
    rates = {name: 2 * 8192**3 / us / 1e6 for name, us in zip(names, times, strict=True) if us}
    fp8 = max((rate for name, rate in rates.items() if KERNELS[name].is_fp8), default=float("nan"))
    return {"bf16_tflops": rates["torch/bf16"], "fp8_tflops": fp8, "copy_tbs": copied / copy / 1e6}


def gemms(pool: BufferPool, ceilings: dict[str, float], problems: Problems, quick: bool) -> list[dict[str, Any]]:
    """A row per shape and kernel; prints TFLOP/s and shares of the ceilings."""
    print(f"GEMMs to bf16, TFLOP/s (share of the ceiling). Ceilings measured: bf16 {ceilings['bf16_tflops']:.0f}, FP8 "
          f"{ceilings['fp8_tflops']:.0f} TFLOP/s (8192^3),")  # fmt: skip
    print(f"copy {ceilings['copy_tbs']:.2f} TB/s; data sheet: {DATASHEET['bf16_tflops']:.0f}, {DATASHEET['fp8_tflops']:.0f}, "
          f"{DATASHEET['memory_tbs']}. Fast accumulation; blocks split. b: bytes bind FP8.")  # fmt: skip
    print(f"{'M x N x K':19s}" + "".join(f"{head:>11s}" for head in SHOWN.values()))
    rows = []
    for size in [*SMALL, *LARGE][:: 6 if quick else 1]:
        names = [name for name in GEMMS if legal(name, size)]
        times, errors, _ = medians([RUNNERS[name] for name in names], Shape(*size), pool, problems)
        cells = {}
        for name, us, error in zip(names, times, errors, strict=True):
            if us is None:
                continue
            least, bound = ceiling_us(name, size, ceilings)
            rate = 2 * size[0] * size[1] * size[2] / us / 1e6
            sheet = DATASHEET["fp8_tflops" if KERNELS[name].is_fp8 else "bf16_tflops"]
            cells[name] = f"{rate:.0f} ({least / us:.0%})"
            rows.append({
                "shape": size, "large": size in LARGE, "kernel": name, "us": us, "tflops": rate, "ceiling_us": least,
                "bound": bound, "share": least / us, "share_of_datasheet_rate": rate / sheet, "error": error,
                "correct": error <= RUNNERS[name].limit,
                **({"plan": str(plan_of(*size, fast=name.endswith("fast")))} if name.startswith("loka/") else {}),
            })  # fmt: skip
        bound = "b" if ceiling_us("torch/fp8_tensorwise_fast", size, ceilings)[1] == "bandwidth" else ""
        label = "x".join(map(str, size))
        print(f"{label:17s}{bound:2s}" + "".join(f"{cells.get(name, '-'):>11s}" for name in SHOWN), flush=True)
    summary(rows)
    return rows


def summary(rows: Iterable[dict[str, Any]]) -> None:
    """Prints every GEMM's median share, and its mean speedup over bf16 and over torch's of the same recipe."""
    by = {(tuple(row["shape"]), row["kernel"]): row for row in rows}
    print(f"\n{'GEMM':26s}{'shapes':>14s}{'TFLOP/s':>9s}{'of ceiling':>12s}{'over bf16':>11s}{'faster on':>11s}"
          f"{'over torch, same recipe':>25s}")  # fmt: skip
    for name in GEMMS:
        for label, large in (("small", False), ("large", True)):
            some = [row for (_, kernel), row in by.items() if kernel == name and row["large"] is large]
            if not some:
                continue
            middle = [statistics.median(row[key] for row in some) for key in ("tflops", "share")]
            gains = [by[tuple(row["shape"]), "torch/bf16"]["us"] / row["us"] for row in some]
            twin = "torch/" + name.partition("/")[2]
            pairs = [by[tuple(r["shape"]), twin]["us"] / r["us"] for r in some if (tuple(r["shape"]), twin) in by]
            same = (
                f"{statistics.geometric_mean(pairs):.2f}x ({min(pairs):.2f} to {max(pairs):.2f})"
                if twin != name and pairs
                else ""
            )
            print(f"{name:26s}{f'{len(some)} {label}':>14s}{middle[0]:9.0f}{middle[1]:12.0%}"
                  f"{statistics.geometric_mean(gains):10.2f}x{sum(g > 1 for g in gains):>11d}{same:>25s}")  # fmt: skip


def prepare(index: int, number: int, quick: bool, lock: str) -> None:
    """Compile this process's share of all kernels, so that the disk's caches hold them."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    work: list[tuple[Runner, Shape]] = []
    for form, own in OURS.items():
        for size in SIZES[1:3] if quick else SIZES:
            work += [(runner, Shape(size[0], 1, size[1])) for runner in (own, *peers(form)[0].values())]
    for shape in [*SMALL, *LARGE][:: 6 if quick else 1]:
        work += [(RUNNERS[name], Shape(*shape)) for name in GEMMS if name.startswith("loka/") and legal(name, shape)]
    pool = BufferPool(elements=2**28)
    with locked_autotune(GpuLock(lock)):
        for runner, shape in work[index::number]:
            torch._dynamo.reset()
            try:
                runner.bind(shape, pool)(0)
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{runner.name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)


def main() -> int:
    """Measure, print, write; 1 when a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile ahead (default: none)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 3
    warnings.filterwarnings("ignore")
    # A choice that was made while others compiled is not kept.
    torch._inductor.config.autotune_local_cache = False
    begun = time.monotonic()
    print(*absences(GEMMS), sep="\n", end="\n" * bool(absences(GEMMS)))
    if options.workers:
        with tempfile.NamedTemporaryFile() as lock:
            arguments = (options.workers, options.quick, lock.name)
            context = multiprocessing.get_context("spawn")
            processes = [context.Process(target=prepare, args=(i, *arguments), daemon=True) for i in range(options.workers)]
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.1, begun + PREPARE_S - time.monotonic()))
                process.terminate()
        print(f"compiled ahead in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    document: dict[str, Any] = {
        "schema_version": 2, "machine": fingerprint(),
        "command": f"python benchmarks/kernels_gpu.py --out data/h200/kernels.json{' --quick' * options.quick}",
        "datasheet": DATASHEET,
    }  # fmt: skip
    pool, problems = BufferPool(elements=2**29), Problems()

    def keep(**parts: Any) -> None:
        document.update(parts, problems=problems)
        if options.out:
            options.out.write_text(json.dumps(document, indent=1, default=str) + "\n")

    ceilings = measured_ceilings(pool, problems)
    shapes = gemms(pool, ceilings, problems, options.quick)
    keep(ceilings=ceilings, gemms=shapes)
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    print()
    made = quantizers(pool, SIZES[1:3] if options.quick else SIZES, problems, keep)
    ours = [row for row in made if row["whose"] == "ours"]
    reached = [sum(row[key] >= 0.75 for row in ours) for key in ("share", "share_passes")]
    ahead = sum(all(row["us"] < other["us"] for other in made if other["whose"] != "ours" and same(row, other)) for row in ours)
    wrong = [str(row.get("form", row.get("kernel"))) for row in (*shapes, *made) if not row["correct"]]
    print(f"{reached[0]} of {len(ours)} of our quantizations from 8 MB up at 75% of copy bandwidth or more, {reached[1]} with a "
          f"second read counted; {ahead} faster than everybody else's")  # fmt: skip
    for what, why in problems.items():
        print(f"left out: {what}: {why}")
    print(f"wrong: {', '.join(wrong) or 'none'}; {time.monotonic() - begun:.0f} s")
    return int(bool(wrong))


def same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two quantizations are of the same form and size."""
    return all(row[key] == other[key] for key in ("form", "rows", "columns"))


if __name__ == "__main__":
    raise SystemExit(main())

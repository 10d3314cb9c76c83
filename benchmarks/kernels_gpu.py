"""Our own kernels beside what a user would run instead, and how near all of them are to what the GPU can do.

    python benchmarks/kernels_gpu.py [--out FILE] [--workers 14] [--minutes 4]

Quantizers beside torch.compile's, torchao's and FBGEMM's of the same recipe; GEMMs of torch, ours and FBGEMM's beside bf16.
Medians of CUDA graph replays whose launches rotate over operands past the L2, all methods of a line in turn; every result is
checked against FP64 first. With workers, so many processes compile, and one at a time measures.

A quantizer's share is the time of a plain copy of as many bytes, the input counted once, over its own. Where the amax of a
whole tensor or column must be known before the first code is written, a tensor that does not fit on the chip must be read
twice: a second share counts that, and two kernels that move those bytes without arithmetic stand beside the others
(`benchmarks/kernel_floors.py`): one launch that reads, meets and writes, and two that read, and read and write. A GEMM's
ceiling is the larger of its operations at the fastest rate that any GEMM of this run reaches (8192^3, on whose power draw
clocks fall, is among them) and of its bytes at the fastest copy's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from kernel_floors import FLOORS, floors
from kernel_peers import OURS, peers

from hil.candidates import locked_autotune
from hil.fingerprint import fingerprint
from hil.kernels import RUNNERS
from hil.kernels.availability import absences, availability
from hil.kernels.base import Runner, Shape
from hil.kernels.loka_gemm import plan_of
from hil.measure import Workers
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
# Bytes from which a copy is past the L2.
COPIED = 10**8
# NVIDIA's data sheet of the H200: dense TFLOP/s, and TB/s of its memory.
DATASHEET = {"bf16_tflops": 989.5, "fp8_tflops": 1979.0, "memory_tbs": 4.8}
Size = tuple[int, int, int]
Line = dict[str, Any]
"""What was measured of one shape: `whose` with `times` and `errors` (None of one that failed), `copies`, `problems`."""
POOL = 2**29


def methods(kind: str, shape: Shape) -> tuple[dict[str, Runner], list[int], dict[str, str]]:
    """The kernels of a line by whose they are, the bytes of the copies beside them, and why a library could not be asked.

    Args:
        kind: A quantizer's form, `gemm`, or `ceiling`.
        shape: The size.
    """
    size = shape.m, shape.n, shape.k
    if kind == "ceiling":
        return {name: RUNNERS[name] for name in GEMMS if not name.startswith("loka/") and legal(name, size)}, [], {}
    if kind == "gemm":
        return {name: RUNNERS[name] for name in GEMMS if legal(name, size)}, [], {}
    others, missing = peers(kind)
    moved = OURS[kind].moved_bytes(shape)
    missing = {f"{who} ({kind})": why for who, why in missing.items()}
    again = read_again(kind, (shape.m, shape.k))
    return {"ours": OURS[kind], **others, **(floors(kind) if again else {})}, [moved, moved + again], missing


def measured(kind: str, shape: Shape, pool: BufferPool, lock: Any = None) -> Line:
    """Check and time all kernels of a line; the lock is held while the GPU is measured on."""
    runners, copied, problems = methods(kind, shape)

    def failed(who: str, error: Exception) -> None:
        torch.cuda.synchronize()
        said = (str(error).splitlines() or [""])[0][:160]
        problems[f"{who} ({kind} {shape.m}x{shape.n}x{shape.k})"] = f"{type(error).__name__}: {said}"

    launchers: dict[str, Callable[[int], object]] = {}
    for who, runner in runners.items():
        # Whatever a library raises concerns its own kernel alone.
        try:
            launch = runner.bind(shape, pool)
            launch(0)
            launchers[who] = launch
        except Exception as error:
            failed(who, error)
    launches = launches_for(next(iter(runners.values())).moved_bytes(shape))
    graphs, kept, errors = [], [], dict[str, float]()
    with lock or nullcontext():
        for who, launch in launchers.items():
            try:
                error_of = runners[who].error(shape, pool, launch(0))
                graph, results = capture(launch, launches)
            except Exception as error:
                failed(who, error)
                continue
            errors[who] = error_of
            graphs.append((graph, launches))
            kept.append(results)
        for moved in copied:
            graph, results = capture(copies(moved, launches), launches)
            graphs.append((graph, launches))
            kept.append(results)
        medians = [timing.quantile(0.5) for timing in time_interleaved(graphs, budget_ms=5.0)]
        del graphs, kept
    times = dict(zip(errors, medians, strict=False))
    return {
        "kind": kind, "shape": (shape.m, shape.n, shape.k), "whose": list(runners), "times": [times.get(who) for who in runners],
        "errors": [errors.get(who) for who in runners], "copies": medians[len(errors) :], "problems": problems,
    }  # fmt: skip


@contextmanager
def locked_triton(lock: Any) -> Iterator[None]:
    """Hold the lock while Triton's autotuner times a configuration, as `locked_autotune` does for torch.compile's."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    def benchmark(call: Callable[[], Any], **options: Any) -> Any:
        call()  # compiles: that needs no lock
        with lock:
            return do_bench(call, **options)

    original = Autotuner.__dict__["do_bench"]
    Autotuner.do_bench = property(lambda tuner: benchmark)  # type: ignore[assignment]
    try:
        yield
    finally:
        Autotuner.do_bench = original


def serve(index: int, lock: Any, tasks: Any, results: Any) -> None:
    """A worker: measures the lines that it finds."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    torch.compile(lambda x: (x + 1).sum())(torch.zeros(512, device="cuda"))
    pool = BufferPool(elements=POOL, seed=index)
    with locked_autotune(lock), locked_triton(lock):
        while (task := tasks.get()) is not None:
            key, shape, (kind,), deadline = task
            lines = []
            if time.time() <= deadline:
                torch._dynamo.reset()
                lines.append(measured(kind, shape, pool, lock))
                torch.cuda.empty_cache()
            results.put((key, lines))


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


def quantizers(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """A row per form, maker and size; prints shares of copy bandwidth."""
    made: list[dict[str, Any]] = []
    print("Quantizers, bf16 to e4m3: share of a plain copy's bandwidth; after the slash with the second read counted")
    print("that the recipe needs. '2^n': powers of two. Who has no kernel for both results launches two.")
    print(f"{'':22s}" + "".join(f"{2 * rows * columns / 1e6:>8.0f} MB" for rows, columns in SIZES))
    for form, own in OURS.items():
        some = {(line["shape"][0], line["shape"][2]): line for line in lines if line["kind"] == form}
        cells: dict[str, dict[tuple[int, int], str]] = {}
        for size, line in some.items():
            again = read_again(form, size)
            copy, with_second = line["copies"]
            for who, us, error in zip(line["whose"], line["times"], line["errors"], strict=True):
                if us is None:
                    cells.setdefault(who, {})[size] = "failed"
                    continue
                shares = copy / us, with_second / us if again else copy / us
                cells.setdefault(who, {})[size] = f"{shares[0]:.0%}" + (f"/{shares[1]:.0%}" if again else "")
                made.append({
                    "form": form, "whose": who, "rows": size[0], "columns": size[1], "us": us, "copy_us": copy,
                    "copied_bytes": own.moved_bytes(Shape(size[0], 1, size[1])), "second_read_bytes": again,
                    "share": shares[0], "share_passes": shares[1], "error": error, "correct": error <= own.limit,
                })  # fmt: skip
        print(f"{form}: of an element's bytes {ceiling(form)}")
        for who, texts in cells.items():
            print(f"  {who:20s}" + "".join(f"{texts.get(size, '-'):>11s}" for size in SIZES))
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


def measured_ceilings(lines: Sequence[Line]) -> dict[str, float]:
    """The fastest bf16 and FP8 rates of any shape, and what the fastest copy beyond the L2 reads and writes in a second."""
    fastest = dict.fromkeys(("bf16_tflops", "fp8_tflops", "copy_tbs"), 0.0)
    for line in lines:
        m, n, k = line["shape"]
        if line["kind"] in ("gemm", "ceiling"):
            for name, us in zip(line["whose"], line["times"], strict=True):
                key = "fp8_tflops" if KERNELS[name].is_fp8 else "bf16_tflops"
                fastest[key] = max(fastest[key], 2 * m * n * k / us / 1e6 if us else 0.0)
        elif (moved := OURS[line["kind"]].moved_bytes(Shape(m, 1, k))) >= COPIED:
            fastest["copy_tbs"] = max(fastest["copy_tbs"], moved / line["copies"][0] / 1e6)
    return fastest


def gemms(lines: Sequence[Line], ceilings: dict[str, float]) -> list[dict[str, Any]]:
    """A row per shape and kernel; prints TFLOP/s and shares of the ceilings."""
    print(f"GEMMs to bf16, TFLOP/s and share of the ceiling. Ceilings measured: bf16 {ceilings['bf16_tflops']:.0f}, FP8 "
          f"{ceilings['fp8_tflops']:.0f} TFLOP/s,")  # fmt: skip
    print(f"copy {ceilings['copy_tbs']:.2f} TB/s; data sheet: {DATASHEET['bf16_tflops']:.0f}, {DATASHEET['fp8_tflops']:.0f}, "
          f"{DATASHEET['memory_tbs']}. Fast accumulation; blocks split. b: bytes bind FP8.")  # fmt: skip
    print(f"{'M x N x K':19s}" + "".join(f"{head:>11s}" for head in SHOWN.values()))
    rows = []
    for line in lines:
        size = line["shape"]
        cells = {}
        for name, us, error in zip(line["whose"], line["times"], line["errors"], strict=True):
            if us is None:
                continue
            least, bound = ceiling_us(name, size, ceilings)
            rate = 2 * size[0] * size[1] * size[2] / us / 1e6
            sheet = DATASHEET["fp8_tflops" if KERNELS[name].is_fp8 else "bf16_tflops"]
            cells[name] = f"{rate:.0f} {least / us:4.0%}"
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
    print(f"\n{'GEMM':26s}{'shapes':>10s}{'TFLOP/s':>9s}{'of ceiling':>11s}{'over bf16':>10s}{'faster on':>10s}"
          f"{'over torch, same recipe':>24s}")  # fmt: skip
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
            print(f"{name:26s}{f'{len(some)} {label}':>10s}{middle[0]:9.0f}{middle[1]:11.0%}"
                  f"{statistics.geometric_mean(gains):9.2f}x{sum(g > 1 for g in gains):>10d}{same:>24s}")  # fmt: skip


def work(quick: bool) -> list[tuple[Shape, list[str]]]:
    """The lines, what is wanted most first: each is a shape and what kind of line it is."""
    sizes = [SIZES[i] for i in ((1,) if quick else (1, 2, 0, 3))]
    shapes = [*LARGE, *SMALL][:: 6 if quick else 1]
    made = [(Shape(rows, 1, columns), [form]) for rows, columns in sizes for form in OURS]
    products = [(Shape(*size), ["gemm"]) for size in shapes]
    mixed = [line for pair in zip(made, products, strict=False) for line in pair]
    rest = made[len(products) :] + products[len(made) :]
    return [(Shape(*SQUARE), ["ceiling"]), *mixed, *rest]


def main() -> int:
    """Measure, print, write; 1 when a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile (default: this one alone)")
    parser.add_argument("--minutes", type=float, default=30.0, help="when no further line is begun (default 30)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 3
    warnings.filterwarnings("ignore")
    begun = time.time()
    print(*absences(GEMMS), sep="\n", end="\n" * bool(absences(GEMMS)))
    lines: list[Line] = []
    wanted = work(options.quick)
    deadline = begun + 60 * options.minutes
    if options.workers:
        with Workers(options.workers, serve=serve) as workers:
            workers.run(wanted, deadline, lines.extend)
    else:
        pool = BufferPool(elements=POOL)
        for shape, (kind,) in wanted:
            if time.time() < deadline:
                torch._dynamo.reset()
                lines.append(measured(kind, shape, pool))
    order = {(kind, (shape.m, shape.n, shape.k)): place for place, (shape, (kind,)) in enumerate(wanted)}
    lines.sort(key=lambda line: order[line["kind"], line["shape"]])
    products = [line for size in (*SMALL, *LARGE) for line in lines if (line["kind"], line["shape"]) == ("gemm", size)]
    ceilings = measured_ceilings(lines)
    shapes = gemms(products, ceilings) if all(ceilings.values()) else []
    print()
    made = quantizers(lines)
    problems = {what: why for line in lines for what, why in line["problems"].items()}
    ours = [row for row in made if row["whose"] == "ours"]
    reached = [sum(row[key] >= 0.75 for row in ours) for key in ("share", "share_passes")]
    others = [row for row in made if row["whose"] not in ("ours", *FLOORS)]
    ahead = sum(all(row["us"] < other["us"] for other in others if same(row, other)) for row in ours)
    wrong = [str(row.get("form", row.get("kernel"))) for row in (*shapes, *made) if not row["correct"]]
    print(f"{reached[0]} of {len(ours)} of our quantizations from 8 MB up at 75% of copy bandwidth or more, {reached[1]} with a "
          f"second read counted; {ahead} faster than everybody else's")  # fmt: skip
    for what, why in problems.items():
        print(f"left out: {what}: {why}")
    print(f"{len(lines)} of {len(wanted)} lines; wrong: {', '.join(wrong) or 'none'}; {time.time() - begun:.0f} s")
    if options.out:
        document = {
            "schema_version": 2, "machine": fingerprint(),
            "command": f"python benchmarks/kernels_gpu.py --out data/h200/kernels.json --workers {options.workers}"
            + " --quick" * options.quick,
            "datasheet": DATASHEET, "ceilings": ceilings, "gemms": shapes, "quantizers": made, "problems": problems,
        }  # fmt: skip
        options.out.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return int(bool(wrong))


def same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two quantizations are of the same form and size."""
    return all(row[key] == other[key] for key in ("form", "rows", "columns"))


if __name__ == "__main__":
    raise SystemExit(main())

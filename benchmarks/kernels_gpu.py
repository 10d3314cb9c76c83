"""Our own kernels beside what a user would run instead: quantizers beside torch.compile's, the FP8 GEMM beside cuBLAS's.

    python benchmarks/kernels_gpu.py [--out FILE] [--quick]

Medians of CUDA graph replays whose launches rotate over operands past the L2, the methods in turn. A quantizer's share is the
time of a plain copy of as many bytes, the input counted once, over its own. Where the amax of a whole tensor or column must be
known before the first code is written, a tensor that does not fit on the chip must be read twice: a second share counts that.
Every result is checked against FP64 first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hil.fingerprint import fingerprint
from hil.kernels.base import Runner, Shape
from hil.kernels.loka_gemm import LOKA_GEMM_RUNNERS, plan_of
from hil.kernels.loka_quantize import LOKA_QUANTIZE_RUNNERS
from hil.kernels.torch_gemm import GEMM_RUNNERS
from hil.kernels.torch_memory import MEMORY_RUNNERS
from hil.timing import BufferPool, capture, launches_for, time_interleaved

RUNNERS: dict[str, Runner] = {
    runner.name: runner for runner in (*LOKA_QUANTIZE_RUNNERS, *LOKA_GEMM_RUNNERS, *GEMM_RUNNERS, *MEMORY_RUNNERS)
}
# (rows, columns): 2 MB to 256 MB of bf16.
SIZES = ((1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (16384, 8192))
# Weight gradients (K is the batch), few rows, narrow outputs, and small layers; none was used to fit the plans.
GEMMS = (
    (64, 128, 2048), (128, 128, 4096), (256, 64, 4096), (512, 512, 2048), (256, 256, 4096), (512, 128, 8192), (512, 256, 8192),
    (1024, 512, 8192), (64, 64, 16384), (256, 128, 16384), (768, 256, 16384), (512, 512, 32768), (128, 128, 65536),
    (256, 256, 65536), (512, 128, 65536), (1024, 256, 32768), (32, 512, 65536), (16, 256, 131072), (192, 448, 49152),
    (96, 768, 16384), (16, 512, 512), (32, 1024, 1024), (64, 2048, 512), (64, 1024, 4096), (128, 1024, 1024), (128, 4096, 512),
    (256, 512, 512), (256, 2048, 1024), (512, 512, 512), (384, 1024, 256),
    (2048, 32, 256), (4096, 16, 512), (8192, 32, 512), (16384, 64, 128), (32768, 16, 256), (2048, 64, 1024), (4096, 128, 512),
    (2048, 256, 512), (4096, 256, 256), (2048, 1024, 256),
)  # fmt: skip
FP8 = ("tensorwise_fast", "tensorwise_split", "rowwise_fast", "rowwise_split")


def medians(names: Sequence[str], shape: Shape, pool: BufferPool, copied: Sequence[int] = ()) -> tuple[list[float], list[float]]:
    """Median times in us of the kernels and of copies that move so many bytes, and the kernels' errors."""
    launches = launches_for(RUNNERS[names[0]].moved_bytes(shape))
    graphs, kept, errors = [], [], []
    for name in names:
        launch = RUNNERS[name].bind(shape, pool)
        errors.append(RUNNERS[name].error(shape, pool, launch(0)))
        graph, results = capture(launch, launches)
        graphs.append((graph, launches))
        kept.append(results)
    for moved in copied:
        graph, results = capture(copies(moved, launches), launches)
        graphs.append((graph, launches))
        kept.append(results)
    return [timing.quantile(0.5) for timing in time_interleaved(graphs, budget_ms=5.0)], errors


def copies(moved: int, launches: int) -> Callable[[int], object]:
    """A launcher of plain copies that read and write `moved` bytes together, rotated as the kernels' operands are."""
    count = max(2, min(launches, 2**29 // moved))
    buffers = [torch.randint(255, (2, moved // 2), dtype=torch.uint8, device="cuda") for _ in range(count)]
    return lambda index: buffers[index % count][0].copy_(buffers[index % count][1])


def quantizers(pool: BufferPool, quick: bool) -> list[dict[str, Any]]:
    """A row per quantizer and size; prints shares of copy bandwidth, ours and torch.compile's."""
    rows = []
    sizes = SIZES[1:4:2] if quick else SIZES
    print("share of copy bandwidth, of it with a second read counted where one may be needed, and torch.compile's")
    print(f"{'loka/quantize_':24s}" + "".join(f"{2 * r * c / 1e6:>12.0f} MB" for r, c in sizes))
    for runner in LOKA_QUANTIZE_RUNNERS:
        other = runner.name.replace("loka/", "torch/")
        names = [runner.name] + [other] * (other in RUNNERS)
        line = f"{runner.name.removeprefix('loka/quantize_'):24s}"
        for size in sizes:
            torch._dynamo.reset()
            shape = Shape(size[0], 1, size[1])
            moved = runner.moved_bytes(shape)
            times, errors = medians(names, shape, pool, (moved, moved + read_again(runner.name, size)))
            compiled = times[1] if len(names) > 1 else None
            us, copy, again = times[0], *times[-2:]
            rows.append({
                "kernel": runner.name, "rows": size[0], "columns": size[1], "us": us, "copy_us": copy, "share": copy / us,
                "share_passes": again / us if read_again(runner.name, size) else copy / us,
                "compiled_us": compiled, "correct": errors[0] <= runner.limit,
            })  # fmt: skip
            passes = f"/{again / us:.0%}" if read_again(runner.name, size) else ""
            line += f"{f'{copy / us:.0%}{passes}':>8s} {f'({copy / compiled:.0%})' if compiled else '':6s}"
        print(line, flush=True)
    return rows


def read_again(name: str, size: tuple[int, int]) -> int:
    """Bytes of a second read: under the amax of a whole tensor, or of whole columns, nothing can be cast in the first."""
    first = "tensorwise" in name and "delayed" not in name
    return 2 * size[0] * size[1] if first or name.endswith(("rowwise_transposed", "rowwise_dual")) else 0


def gemms(pool: BufferPool, quick: bool) -> list[dict[str, Any]]:
    """A row per shape; prints times, and how much faster ours is than the faster of bf16 and the same FP8 kernel of torch."""
    names = ["torch/bf16", *(f"{library}/fp8_{kind}" for library in ("torch", "loka") for kind in FP8)]
    short = [f"{kind.split('_')[0][0]}{kind.split('_')[1][0]}" for kind in FP8]
    print(f"\n{'us: M x N x K':22s}   bf16 |{''.join(f'{s:>7s}' for s in short)} |" + "".join(f"{'our ' + s:>7s}" for s in short)
          + " | gain" + "".join(f"{s:>6s}" for s in short))  # fmt: skip
    rows = []
    for size in GEMMS[::4] if quick else GEMMS:
        shape = Shape(*size)
        times, errors = medians(names, shape, pool)
        correct = all(e <= RUNNERS[n].limit for n, e in zip(names, errors, strict=True))
        # Beside the better of what is there: bf16 and the same recipe in torch.
        gains = [min(times[0], times[1 + i]) / times[5 + i] for i in range(4)]
        rows.append({
            "shape": size, "plan": str(plan_of(*size)), "plan_split": str(plan_of(*size, fast=False)),
            **dict(zip(names, times, strict=True)), "gain": gains, "correct": correct
        })  # fmt: skip
        print(f"{' x '.join(map(str, size)):22s}{times[0]:7.1f} |" + "".join(f"{t:7.1f}" for t in times[1:5]) + " |" +
              "".join(f"{t:7.1f}" for t in times[5:]) + " |     " + "".join(f"{g:5.2f}x" for g in gains), flush=True)  # fmt: skip
    for i, kind in enumerate(FP8):
        gains = [row["gain"][i] for row in rows]
        same = [row[f"torch/fp8_{kind}"] / row[f"loka/fp8_{kind}"] for row in rows]
        mean = statistics.geometric_mean(same)
        print(
            f"{kind}: {mean:.2f}x torch's in the geometric mean, {min(same):.2f}x to {max(same):.2f}x; faster on "
            f"{sum(s > 1 for s in same)} of {len(rows)}, and than bf16 too on {sum(g > 1 for g in gains)}"
        )
    return rows


def main() -> int:
    """Measure, print, write; 1 when a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 3
    warnings.filterwarnings("ignore")
    begun = time.monotonic()
    pool = BufferPool(elements=2**29)
    shapes = gemms(pool, options.quick)
    print()
    made = quantizers(pool, options.quick)
    large = [row for row in made if 2 * row["rows"] * row["columns"] >= 8e6]
    wrong = [str(row.get("kernel", row.get("shape"))) for row in (*shapes, *made) if not row["correct"]]
    reached = [sum(row[key] >= 0.75 for row in large) for key in ("share", "share_passes")]
    print(f"{reached[0]} of {len(large)} quantizations from 8 MB up at 75% of copy bandwidth or more, {reached[1]} with a second "
          f"read counted; wrong: {', '.join(wrong) or 'none'}; {time.monotonic() - begun:.0f} s")  # fmt: skip
    if options.out:
        document = {
            "schema_version": 1, "machine": fingerprint(),
            "command": f"python benchmarks/kernels_gpu.py --out data/h200/kernels.json{' --quick' * options.quick}",
            "quantizers": made, "gemms": shapes,
        }  # fmt: skip
        options.out.write_text(json.dumps(document, indent=1, default=str) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())

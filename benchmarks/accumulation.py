"""Multiply-adds a second of the emulated tensor core, beside mmasim's, on one thread (or on a GPU).

    python benchmarks/accumulation.py [--size 256 256 2048] [--device cpu] [--repeats 5]

Medians of calls that take turns. mmasim (a development dependency) emulates the same FP8 wgmma; its result is compared bit
for bit with ours first, on the rows that it is timed on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch

from numerics import bf16_matmul, fp8_matmul

E4M3 = torch.float8_e4m3fn
# mmasim holds a product of every row, column and place of a step at once; it is timed on this many rows and columns.
MMASIM_ROWS, MMASIM_COLUMNS = 64, 64


def calls(m: int, n: int, k: int, device: str) -> dict[str, tuple[int, Callable[[], torch.Tensor]]]:
    """By name: multiply-adds, and the call."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, k, generator=generator).to(device) for rows in (m, n))
    a, b, a16, b16 = x.to(E4M3), w.to(E4M3), x.bfloat16(), w.bfloat16()
    made: dict[str, tuple[int, Callable[[], torch.Tensor]]] = {
        name: (m * n * k, lambda name=name: fp8_matmul(a, b, accumulation=name))  # type: ignore[misc]
        for name in ("hopper_fast", "hopper_split", "hopper_mma")
    }
    made["hopper_bf16"] = m * n * k, lambda: bf16_matmul(a16, b16)
    if device == "cpu":
        try:
            from mmasim.nv_ptx.sim import WGMMA
        except ImportError:
            return made
        rows, columns = min(m, MMASIM_ROWS), min(n, MMASIM_COLUMNS)
        operation = WGMMA("Hopper", f"m64n{columns}k32.f32.e4m3.e4m3")
        few, zero = (a[:rows], b[:columns]), torch.zeros(rows, columns)
        if not torch.equal(operation(few[0], few[1].T, zero), fp8_matmul(*few, accumulation="hopper_fast")):
            raise SystemExit("mmasim and fp8_matmul differ")
        made[f"mmasim {importlib.metadata.version('mmasim')}"] = rows * columns * k, lambda: operation(few[0], few[1].T, zero)
    return made


def main() -> int:
    """Time and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=int, nargs=3, default=(256, 256, 2048), metavar=("M", "N", "K"))
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = calls(*options.size, options.device)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.repeats):
        for name, (_, call) in made.items():
            start = time.perf_counter()
            call()
            if options.device == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    where = (
        torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.processor() or platform.machine()}, one thread"
    )
    print(f"{' x '.join(map(str, options.size))}, {where}, torch {torch.__version__}")
    for name, (work, _) in made.items():
        print(f"{name:16s} {work / statistics.median(seconds[name]) / 1e6:10.0f} million multiply-adds a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())

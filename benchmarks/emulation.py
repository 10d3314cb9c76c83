"""Time of quantizing a float32 matrix on the CPU, beside what people use today.

    python benchmarks/emulation.py [--size 4096] [--threads 1 2] [--repeats 15] [--json FILE]

A row is one recipe: milliseconds (median of calls that take turns with the other rows', so that a slow moment meets all
alike) of `fake_quantize` into `out=` and into a new tensor, and of `quantize` likewise; then their ratio to a plain copy
into a tensor that is there already. Below, the same matrix through ml_dtypes' cast, torch's own e4m3 rowwise, and
torchao's MX, where installed, and how much longer each takes than our nearest row in the same run. microxcaling is not on PyPI.
Each row's result is compared bit for bit with the torch code (`numerics.quantization` without compiled loops) first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import numerics
from numerics import Recipe

SCALINGS = ("", "/tensorwise", "/rowwise", "/columnwise", "/block1x128", "/block128x128")
FP8 = tuple(fmt + scaling for fmt in ("e4m3", "e5m2") for scaling in SCALINGS)
BLOCKS = (
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "mx9", "mx6", "mx4", "msfp16", "msfp12",
)  # fmt: skip
KINDS = ("fake, out=", "fake", "codes, out=", "codes")
# Milliseconds into out= with one thread at 4096 x 4096; twice that without.
TARGETS = dict.fromkeys(FP8, 16.0) | dict.fromkeys(BLOCKS, 28.0)


def ours(x: torch.Tensor, name: str) -> dict[str, Callable[[], object]]:
    """The calls of one recipe, by kind."""
    recipe = Recipe.parse(name)
    values, codes = torch.empty_like(x), numerics.quantize(x, recipe)
    return {
        "fake, out=": lambda: numerics.fake_quantize(x, recipe, out=values),
        "fake": lambda: numerics.fake_quantize(x, recipe),
        "codes, out=": lambda: numerics.quantize(x, recipe, out=codes),
        "codes": lambda: numerics.quantize(x, recipe),
    }


def others(x: torch.Tensor) -> dict[str, tuple[str, str, Callable[[], object]]]:
    """By name: our row and kind that does the same, and the call."""

    def torch_rowwise() -> torch.Tensor:
        scale = x.abs().amax(1, keepdim=True) / 448.0
        return (x / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale

    made = {"torch e4m3 rowwise, eager": ("e4m3/rowwise", "fake", torch_rowwise)}
    try:
        import ml_dtypes
    except ImportError:
        pass
    else:
        array = x.numpy()
        made[f"ml_dtypes {ml_dtypes.__version__} e4m3 cast and back"] = (
            "e4m3", "fake", lambda: array.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
        )  # fmt: skip
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        pass
    else:
        version = importlib.metadata.version("torchao")
        made[f"torchao {version} to_mx e4m3"] = ("mxfp8_e4m3", "codes", lambda: to_mx(x, torch.float8_e4m3fn, 32))
        made[f"torchao {version} to_mx e2m1"] = ("mxfp4", "codes", lambda: to_mx(x, torch.float4_e2m1fn_x2, 32))
    return made


def medians(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Milliseconds; the first round, which compiles and warms, is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            kept = call()
            samples[name].append((time.perf_counter() - start) * 1e3)
            del kept
    return {name: statistics.median(values[1:]) for name, values in samples.items()}


def equal_to_torch(x: torch.Tensor, name: str) -> bool:
    """Whether every bit is as the torch code has it."""
    made = numerics.fake_quantize(x, name)
    with mock.patch("numerics.cpu.supports", return_value=False):
        return torch.equal(made.view(torch.int32), numerics.fake_quantize(x, name).view(torch.int32))


def machine() -> str:
    """Processor and versions, in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = lines[0] if lines else model
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "numba"))
    return f"{model}, {os.cpu_count()} cores; {platform.system()}; Python {platform.python_version()}, {versions}"


def measure(x: torch.Tensor, threads: int, repeats: int) -> dict[str, Any]:
    """All figures with so many threads."""
    torch.set_num_threads(threads)
    into = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: into.copy_(x)}
    for name in (*FP8, *BLOCKS):
        calls.update({f"{name}|{kind}": call for kind, call in ours(x, name).items()})
    rivals = others(x)
    calls.update({name: call for name, (_, _, call) in rivals.items()})
    times = medians(calls, repeats)
    return {
        "threads": threads,
        "copy_ms": times["copy"],
        "ours_ms": {name: {kind: times[f"{name}|{kind}"] for kind in KINDS} for name in (*FP8, *BLOCKS)},
        "others": {name: {"ms": times[name], "ratio": times[name] / times[f"{row}|{kind}"], "to": f"{row}, {kind}"}
                   for name, (row, kind, _) in rivals.items()},
    }  # fmt: skip


def show(result: dict[str, Any], equal: dict[str, bool], size: int) -> bool:
    """Print one table; whether all targets are met."""
    print(f"\n{size} x {size} float32, {result['threads']} thread(s), ms (median); copy {result['copy_ms']:.1f}")
    print(f"{'recipe':<20}" + "".join(f"{kind:>13}" for kind in KINDS) + f"{'x copy':>8}{'= torch':>9}{'target':>8}")
    met = True
    for name, row in result["ours_ms"].items():
        within = row["fake, out="] <= TARGETS[name] and row["fake"] <= 2 * TARGETS[name]
        met &= equal[name]
        verdict = ""
        if size == 4096 and result["threads"] == 1:
            met &= within
            verdict = f"{TARGETS[name]:.0f} {'ok' if within else 'NO'}"
        ratio = row["fake, out="] / result["copy_ms"]
        print(
            f"{name:<20}" + "".join(f"{row[kind]:>13.1f}" for kind in KINDS)
            + f"{ratio:>8.2f}{'yes' if equal[name] else 'NO':>9}{verdict:>8}"
        )  # fmt: skip
    for name, row in result["others"].items():
        print(f"{name:<40}{row['ms']:>8.1f}  {row['ratio']:.1f}x ours ({row['to']})")
    return met


def main() -> int:
    """Run; 1 when a target is missed or a result differs from torch's."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns, a multiple of 128 (default 4096)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.size < 128 or arguments.size % 128 or arguments.repeats < 1 or min(arguments.threads) < 1:
        parser.error("--size must be a positive multiple of 128, --repeats and --threads positive")
    x = torch.randn(arguments.size, arguments.size, generator=torch.Generator().manual_seed(0))
    print(machine())
    equal = {name: equal_to_torch(x, name) for name in (*FP8, *BLOCKS)}
    results = [measure(x, threads, arguments.repeats) for threads in arguments.threads]
    met = all([show(result, equal, arguments.size) for result in results])
    if arguments.json is not None:
        document = {"machine": machine(), "size": arguments.size, "equal_to_torch": equal, "results": results}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

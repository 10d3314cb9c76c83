"""How long predictions take, and how far the estimate is from sampling, over families of distributions and recipes.

    python benchmarks/prediction.py [--sites 1000] [--processes 2] [--accuracy]

Cost: `--sites` sites, each with statistics of its own (distinct objects with fresh caches, widths 256 to 2,048, 16 factors),
three passes, twelve recipes; in `--processes` processes from cold, then once more for the same requests at other batch sizes
(warm: what depends on the operands alone is known). Targets: 20 s on 2 cores, 1 ms a prediction. `--accuracy` adds a table
of families by recipes: predicted less sampled SQNR in dB (`numerics.sample_gemm_error`, to a standard error of 0.1 dB).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

from numerics import (
    TensorStatistics,
    copula,
    gaussian,
    log_normal,
    mixture,
    predict_gemm_error,
    relu,
    sample_gemm_error,
    student_t,
    uniform,
)

RECIPES = (
    ("e4m3/tensorwise", "hopper_fast"), ("e4m3/rowwise", "hopper_split"), ("e4m3/block128x128", "hopper_split"),
    ("e5m2/tensorwise", "hopper_split"), ("e5m2/rowwise", "hopper_fast"), ("e4m3", "fp32"), ("int8/rowwise", "fp32"),
    ("mxfp8_e4m3", "fp32"), ("mxfp6_e2m3", "fp32"), ("mxfp4", "fp32"), ("mx9", "fp32"), ("bf16", "fp32"),
)  # fmt: skip
WIDTHS = (256, 512, 768, 1024, 2048)
RANK = 16


def record(base: TensorStatistics, rng: np.random.Generator) -> TensorStatistics:
    """A record of its own: other scales of its features, 16 factors."""
    features, single = base.features, np.float32
    scale = np.exp(0.3 * rng.standard_normal(features)).astype(single)
    factor = (0.1 * rng.standard_normal((RANK, features)) * scale).astype(single)
    return dataclasses.replace(
        base, mean=base.mean * scale, second_moment=base.second_moment * scale**2, factor=factor,
        residual=np.maximum(base.residual * scale**2 - np.square(factor).sum(0), 0.0).astype(single), _views={},
    )  # fmt: skip


def seconds(seed: int, sites: int) -> tuple[float, float]:
    """Time for all predictions of some sites: cold, and again at another batch."""
    rng = np.random.default_rng(seed)
    families = [make for width in WIDTHS for make in (gaussian(width), relu(width), student_t(width, 4.0))]
    work = []
    for _ in range(sites):
        k, n = (int(rng.choice(WIDTHS)) for _ in range(2))
        x, w, wt, g = (record(next(f for f in rng.permutation(families) if f.features == width), rng) for width in (k, k, n, n))
        work.append((n, k, x, w, wt, g))

    def run(batch: int) -> float:
        start = time.perf_counter()
        for n, k, x, w, wt, g in work:
            for recipe, accumulation in RECIPES:
                predict_gemm_error(x, w, (batch, n, k), recipe, recipe, accumulation)
                predict_gemm_error(g, wt, (batch, k, n), recipe, recipe, accumulation)
                predict_gemm_error(g.along_rows(), x.along_rows(), (n, k, batch), recipe, recipe, accumulation)
        return time.perf_counter() - start

    # One core a process: BLAS threads of two processes would get in each other's way.
    with threadpool_limits(1):
        return run(2048), run(4096)


def accuracy() -> float:
    """Print the table; returns the share of entries within half a decibel."""
    k = 256
    correlation = 0.5 * np.eye(k) + 0.5
    families = {
        "gaussian": gaussian(k), "uniform": uniform(k), "student-t(4)": student_t(k, 4.0), "log-normal(1)": log_normal(k, 1.0),
        "signed log-normal": log_normal(k, 1.0, signed=True), "relu": relu(k), "copula": copula(gaussian(k), correlation),
        "mixture": mixture([(0.9, gaussian(k)), (0.1, gaussian(k, 0.0, 10.0))], 0.25),
    }  # fmt: skip
    print(f"{'':18s}" + "".join(f"{recipe[:12]:>13s}" for recipe, _ in RECIPES))
    gaps = []
    for name, left in families.items():
        line = f"{name:18s}"
        for recipe, accumulation in RECIPES:
            request = left, gaussian(k, 0.0, 0.02), (128, 128, k), recipe, recipe, accumulation
            sampled = sample_gemm_error(*request, pairs=24, least_pairs=3, standard_error_db=0.1)
            gaps.append(predict_gemm_error(*request).sqnr_db - sampled.error.sqnr_db)
            line += f"{gaps[-1]:+13.2f}"
        print(line, flush=True)
    return float(np.mean(np.abs(gaps) < 0.5))


def main() -> int:
    """Measure, print; returns 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--accuracy", action="store_true", help="compare with sampling too (a minute)")
    options = parser.parse_args()
    share = options.sites // options.processes
    with ProcessPoolExecutor(options.processes) as pool:
        times = list(pool.map(seconds, range(options.processes), [share] * options.processes))
    cold, warm = (max(each) for each in zip(*times, strict=True))
    count = share * 3 * len(RECIPES)
    print(
        f"{options.sites} sites x 3 passes x {len(RECIPES)} recipes in {options.processes} processes: {cold:.1f} s from cold"
        f" ({1e3 * cold / count:.2f} ms each on a core), {1e3 * warm / count:.2f} ms each at another batch"
    )
    agree = accuracy() if options.accuracy else 1.0
    if options.accuracy:
        print(f"within 0.5 dB of sampling: {agree:.0%}")
    return int(cold * 1000 / options.sites > 20.0 or 1e3 * warm / count > 1.0 or agree < 0.95)


if __name__ == "__main__":
    sys.exit(main())

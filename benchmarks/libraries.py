"""What more kernel libraries are worth: the zoo's predicted dense steps when Dispatch chooses among torch, our own and FBGEMM's.

    python benchmarks/libraries.py [--models wukong ...] [--batches 2048 ...] [--calibration DIR]

Times are predictions of the shipped time model (or a calibration's): a library that it does not know adds nothing, and the
what-if's screen says so. Speedups are over bf16 of the same model, with their 90% intervals.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import loka_sim
from perfmodel.kernels import KERNELS

CHOICES = ("torch", "torch,loka", "torch,loka,fbgemm")
MODELS = ("dlrm", "dcnv2", "wukong", "interformer")


def kernels(answer: loka_sim.WhatIf) -> str:
    """Libraries of the FP8 GEMMs and of what makes their operands, with how many of each a step launches."""
    rows = [row.kernel for site in answer.sites for decided in site.passes.values() for row in decided.rows]
    gemms = Counter(KERNELS[name].library for name in rows if KERNELS[name].is_fp8)
    makers = Counter(KERNELS[name].library for name in rows if KERNELS[name].kind in ("quantize", "layout"))
    parts = [", ".join(f"{count} {library}" for library, count in some.most_common()) for some in (gemms, makers)]
    return f"GEMMs {parts[0]}; operands {parts[1]}" if gemms else "bf16 everywhere"


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[2048])
    parser.add_argument("--calibration")
    options = parser.parse_args(arguments)
    print(f"{'model':14s}{'batch':>7s}  {'libraries':20s}{'step us':>10s}  {'against bf16':22s}FP8 launches")
    for model in options.models:
        for batch in options.batches:
            for libraries in CHOICES:
                answer = loka_sim.whatif(model, batch=batch, libraries=libraries, calibration=options.calibration)
                step, speedup = answer.decision.total, answer.decision.speedup
                ratio = f"{speedup.us:.3f}x [{speedup.low_us:.2f}, {speedup.high_us:.2f}]"
                print(f"{model:14s}{batch:7d}  {libraries:20s}{step.us:10,.0f}  {ratio:22s}{kernels(answer)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

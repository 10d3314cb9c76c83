"""What more kernel libraries are worth: the zoo's steps when Dispatch chooses among torch's, our own and FBGEMM's kernels.

    python benchmarks/libraries.py [--models wukong ...] [--batches 2048 ...] [--calibration DIR]

Dense steps are predictions of the shipped time model (or a calibration's): a library that it does not know adds nothing, and
the what-if's screen says so. Speedups are over bf16 of the same model, with their 90% intervals.

Beside them, measured: every GEMM, quantization and transposition that the decision launches, as timed on an H200 in the sweep
`zoo`, added up over the sites whose launches all were (under every choice), against the same sites in bf16. The shipped
models are never fitted to that sweep.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import pandas
from zoo_across import with_across

import loka_sim
from loka_sim.dispatch.candidates import launches
from loka_sim.dispatch.cost import Times
from loka_sim.dispatch.decide import flat
from loka_sim.validation.regret import measured_times
from perfmodel.data_folder import data_folder
from perfmodel.kernels import KERNELS, library_of

CHOICES = ("torch", "torch,loka", "torch,loka,fbgemm")
MODELS = ("dlrm", "dcnv2", "wukong", "interformer")


def kernels(answer: loka_sim.WhatIf) -> str:
    """Libraries of the FP8 GEMMs and of what makes their operands, with how many of each a step launches."""
    specs = [KERNELS[row.kernel] for site in answer.sites for decided in site.passes.values() for row in decided.rows]
    gemms = Counter(library_of(spec.name) for spec in specs if spec.is_fp8)
    makers = Counter(library_of(spec.name) for spec in specs if spec.kind in ("quantize", "layout"))
    parts = [", ".join(f"{count} {name}" for name, count in some.most_common()) for some in (gemms, makers)]
    return f"GEMMs {parts[0]}; operands {parts[1]}" if gemms else "bf16 everywhere"


def as_measured(answers: list[loka_sim.WhatIf], measured: Times) -> tuple[list[float], float, int]:
    """Microseconds of each answer's launches and of bf16's, over the sites where all of them were timed; how many those are."""
    totals, bf16, sites = [0.0] * len(answers), 0.0, 0
    for alike in zip(*(answer.sites for answer in answers), strict=True):
        rows = [[row for decided in site.passes.values() for row in decided.rows] for site in alike]
        plain = flat(launches(alike[0].shape, alike[0].shape.bf16()))
        if all(row in measured.of for some in (*rows, plain) for row in some):
            totals = [total + measured.sum(some) for total, some in zip(totals, rows, strict=True)]
            bf16, sites = bf16 + measured.sum(plain), sites + 1
    return totals, bf16, sites


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[2048])
    parser.add_argument("--calibration")
    options = parser.parse_args(arguments)
    timings = pandas.concat(pandas.read_parquet(data_folder() / "h200" / f"{family}.parquet") for family in ("gemm", "memory"))
    measured = measured_times(with_across(timings[timings["sweep"] == "zoo"]))
    print(f"{'':51s}{'dense step, predicted':34s}{'GEMMs and quantization, measured':>34s}")
    print(f"{'model':14s}{'batch':>7s}  {'libraries':18s}{'us':>10s}  {'against bf16':22s}{'us':>10s}{'bf16':>8s}{'sites':>12s}")
    for model in options.models:
        for batch in options.batches:
            answers = {
                libraries: loka_sim.whatif(model, batch=batch, libraries=libraries, calibration=options.calibration)
                for libraries in CHOICES
            }
            costs, bf16, sites = as_measured(list(answers.values()), measured)
            for (libraries, answer), us in zip(answers.items(), costs, strict=True):
                step, speedup = answer.decision.total, answer.decision.speedup
                ratio = f"{speedup.us:.3f}x [{speedup.low_us:.2f}, {speedup.high_us:.2f}]"
                counted = f"{sites} of {len(answer.sites)}"
                beside = f"{us:10,.0f}{bf16 / us:7.3f}x{counted:>12s}" if sites else f"{'not measured':>30s}"
                print(
                    f"{model:14s}{batch:7d}  {libraries:18s}{step.us:10,.0f}  {ratio:22s}{beside}  {kernels(answer)}", flush=True
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

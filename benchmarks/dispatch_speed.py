"""How long a what-if of many sites takes, and which part of it: times, errors, decisions, steps, the document.

    python benchmarks/dispatch_speed.py [--sites 1000] [--shapes 50 1000] [--libraries all] [--statistics] [--calibration DIR]

A made-up model of linear layers, three passes each, of standard normal values or of Wukong's statistics; of its sites only so
many differ in shape, as in a model of repeated layers (50), or all do (1000). Libraries are those whose kernels the time model
knows. The whole what-if is of shapes that nothing has met before, and reads the time model from disk; imports are not in it.
CPU seconds beside seconds, since another process on the machine lengthens the latter. Then 100,000 kernel times through
`PerfModel.predict`, of the GEMM kernels of those libraries at random sizes, and of each alone of which cuBLAS' choice is told.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import pandas as pd

import loka_sim
from loka_sim.dispatch.accuracy import Errors
from loka_sim.dispatch.candidates import SiteShape, legal_fp8, possible_rows
from loka_sim.dispatch.cost import Times
from loka_sim.dispatch.decide import Decider, Policy
from loka_sim.dispatch.operands import Toolbox, parse_libraries
from loka_sim.modelspec import Dim, ModelSpec, Site, linear_passes
from loka_sim.sources import distributions
from perfmodel import load
from perfmodel.kernels import KERNELS, library_of

BATCH = 2048
ROLES = ("fmb.project", "fmb.mlp.0", "fmb.mlp.1", "fmb.out", "lcb")
STATISTICS = "wukong-small"


def model(sites: int, shapes: int, seed: int = 0) -> ModelSpec:
    """Linear layers of 128 to 4,096 features, named as Wukong's are."""
    rng = np.random.default_rng(seed)
    sizes = [(16 * int(n), 16 * int(k)) for n, k in rng.integers(8, 257, (shapes, 2))]
    made = []
    for number in range(sites):
        n, k = sizes[number % shapes]
        name = f"layers.{number // len(ROLES)}.{ROLES[number % len(ROLES)]}"
        made.append(Site(name, "linear", linear_passes(Dim(0, 1), Dim(n), Dim(k)), weight=f"{name}.weight"))
    return ModelSpec("many", BATCH, tuple(made), dense_parameters=0, source="made up")


class Clock:
    """Seconds and CPU seconds of named parts."""

    def __init__(self) -> None:
        """Start."""
        self.parts: dict[str, tuple[float, float]] = {}
        self.last = time.perf_counter(), time.process_time()

    def part(self, name: str) -> None:
        """What went by since the last part belongs to this one."""
        now = time.perf_counter(), time.process_time()
        self.parts[name] = now[0] - self.last[0], now[1] - self.last[1]
        self.last = time.perf_counter(), time.process_time()


Parts = dict[str, tuple[float, float]]


def measure(
    sites: int,
    shapes: int,
    libraries: tuple[str, ...],
    statistics: str | None,
    calibration: str | None,
    hardware: str,
    seed: int = 0,
) -> tuple[Parts, Parts, str]:
    """Seconds and CPU seconds of a what-if's parts, and of a whole one of other shapes; in words what it looks at."""
    spec = model(sites, shapes, seed)
    timing = load(hardware, calibration)
    known = distributions(spec, statistics, ())
    toolbox = Toolbox.of(libraries, timing.manifest["kernels"])
    clock = Clock()
    asked = [(SiteShape.of(site, BATCH), known.of(site.name)) for site in spec.sites]
    rows = dict.fromkeys(row for shape, _ in asked for row in possible_rows(shape, toolbox))
    clock.part("candidates")
    times = Times.predict(timing, rows)
    clock.part("times")
    accuracies = Errors(toolbox).of_sites(asked)
    clock.part("errors")
    decider = Decider(times, Policy(), toolbox)
    alike = {(shape, id(some)): (shape, found) for (shape, some), found in zip(asked, accuracies, strict=True)}
    decider.decide(list(alike.values()))
    clock.part("decisions")
    whole = Clock()
    settings = {"libraries": libraries, "statistics": statistics, "calibration": calibration, "hardware": hardware}
    answer = loka_sim.whatif(model(sites, shapes, seed + 1), **settings)
    whole.part("whole what-if")
    answer.to_dict()
    whole.part("its document")
    kernels = max(len(legal_fp8(shape, "output", toolbox)) for shape, _ in asked)
    return clock.parts, whole.parts, f"{sites} sites of {shapes} shapes, {kernels} FP8 kernels a pass, {len(rows):,} kernel times"


def predicted(names: list[str], hardware: str, rows: int = 100_000) -> tuple[float, float]:
    """Seconds, and CPU seconds, that a DataFrame of so many calls of these kernels takes; the least of five."""
    perf, generator = load(hardware), np.random.default_rng(0)
    sizes = {size: 128 * generator.integers(1, most, rows) for size, most in (("m", 400), ("n", 60), ("k", 60))}
    frame = pd.DataFrame({"kernel": generator.choice(names, rows), **sizes})
    perf.predict(frame.head(1000))
    seconds = []
    for _ in range(5):
        wall, cpu = time.perf_counter(), time.process_time()
        perf.predict(frame)
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(seconds)


def main(arguments: list[str] | None = None) -> int:
    """Print a table; 0 when every whole what-if takes at most two CPU seconds, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--shapes", type=int, nargs="+", default=[50, 1000])
    parser.add_argument("--libraries", default="all")
    parser.add_argument("--statistics", action="store_true", help="of Wukong's tensors instead of standard normal values")
    parser.add_argument("--calibration")
    parser.add_argument("--hardware", default="h200")
    options = parser.parse_args(arguments)
    fixed = parse_libraries(options.libraries), STATISTICS if options.statistics else None, options.calibration, options.hardware
    # Imports: a first call pays for them.
    measure(5, 5, *fixed, seed=100)
    worst = 0.0
    for number in options.shapes:
        parts, whole, words = measure(options.sites, number, *fixed)
        print(words)
        for name, (wall, cpu) in {**parts, **whole}.items():
            print(f"  {name:16s}{wall:8.2f} s{cpu:8.2f} s CPU")
        worst = max(worst, whole["whole what-if"][1])
    print(f"a whole what-if: at most {worst:.2f} s CPU; the target is 2 s")
    known = load(options.hardware).manifest["kernels"]
    names = [name for name in known if KERNELS[name].kind == "gemm" and library_of(name) in fixed[0]]
    # Telling which kernel cuBLAS takes costs most.
    told = [name for name, entry in known.items() if entry.get("choice") and library_of(name) in fixed[0]]
    for what, some in (("kernel times", names), *((f"times of {name} alone", [name]) for name in told)):
        wall, cpu = predicted(some, options.hardware)
        print(f"100,000 {what}: {wall:.2f} s, {cpu:.2f} s CPU; the target is 1 s")
    return int(worst > 2.0)


if __name__ == "__main__":
    sys.exit(main())

"""Which kernel for each GEMM of models never fitted to: our choice and what a user would pick instead, against the measured best.

    python benchmarks/choice.py

Every pass of every linear of the zoo's eight models at batches 512 and 2,048, as measured on an H200 in the sweep `zoo`; torch's
kernels, the default choice (`benchmarks/libraries.py` has several libraries'). bf16 reads operands as they are stored: the
weight across for its input's gradient, both across for the weight's; what that takes more or less than with K fastest was
measured beside it in one run (`data/h200/across/`). The cost of an FP8 kernel is its GEMM plus the quantization (and
transposition) of both bf16 operands, unshared. Regret is a choice's measured cost over the best candidate's; the total weighs
each pass by how often the models run it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from zoo_across import with_across

import perfmodel
from loka_sim.dispatch.baselines import filter_rowwise, filter_tensorwise, is_linear
from loka_sim.resolve import resolve_model
from loka_sim.zoo import NAMES
from perfmodel.fit import read_timings
from perfmodel.kernels import BF16, GEMM_KERNELS, K_FASTEST, KERNELS, Layout, laid
from perfmodel.roofline import roofline_us

Row = tuple[str, int, int, int]
LIES: dict[str, Layout] = {"output": K_FASTEST, "grad_input": ("row", "row"), "grad_weight": ("column", "row")}
"""How a linear layer's passes read their operands in bf16."""


@dataclass(frozen=True)
class Call:
    """One pass of one linear: its GEMM shape and its layer's (n, k)."""

    name: str
    shape: tuple[int, int, int]
    layer: tuple[int, int, int]

    def rows(self, kernel: str) -> list[Row]:
        """Everything that this kernel launches for the pass."""
        spec, (m, n, k) = KERNELS[kernel], self.layer
        parts: list[Row] = [(laid(kernel, LIES[self.name]) if kernel == BF16 else kernel, *self.shape)]
        if spec.is_fp8:
            left, right = {"output": ((m, k), (n, k)), "grad_input": ((m, n), (n, k)), "grad_weight": ((m, n), (m, k))}[self.name]
            turned_a, turned_b = self.name == "grad_weight", self.name != "output"
            for recipe, turned, tensor in ((spec.recipe_a, turned_a, left), (spec.recipe_b, turned_b, right)):
                scaling = str(recipe).partition("/")[2]
                parts.append((f"torch/quantize_{scaling}{'_transposed' * turned}", tensor[0], 1, tensor[1]))
        return parts


def calls() -> dict[Call, int]:
    """Every pass of the zoo's linears, with how many times it occurs."""
    found: dict[Call, int] = {}
    for name in NAMES:
        for site in filter(is_linear, resolve_model(name).sites):
            for batch in (512, 2048):
                layer = site.passes["output"].shape(batch)
                for which, gemm in site.passes.items():
                    call = Call(which, gemm.shape(batch), layer)
                    found[call] = found.get(call, 0) + 1
    return found


def main() -> int:
    """Print the table."""
    model = perfmodel.load("h200")
    zoo = read_timings("h200")
    zoo = with_across(zoo[(zoo["sweep"] == "zoo") & (zoo["groups"] == 1) & zoo["kernel"].str.startswith("torch/")])
    keys: list[Row] = list(zip(zoo["kernel"], zoo["m"], zoo["n"], zoo["k"], strict=True))
    measured = dict(zip(keys, zoo["p50_us"], strict=True))
    learned = dict(zip(keys, model.predict_together(zoo)["time_us"], strict=True))
    roofline = {
        row: float(roofline_us(row[0], *(np.array([float(x)]) for x in (*row[1:], 1)), model.hardware)[0]) for row in keys
    }

    def cost(call: Call, kernel: str, table: dict[Row, float]) -> float:
        return sum(table[row] for row in call.rows(kernel))

    def cheapest(table: dict[Row, float]) -> Callable[[Call, list[str]], str]:
        return lambda call, options: min(options, key=lambda kernel: cost(call, kernel, table))

    def fixed(scaling: str, wants: Callable[[int, int], bool]) -> Callable[[Call, list[str]], str]:
        def pick(call: Call, options: list[str]) -> str:
            kernel = f"torch/fp8_{scaling}_{'fast' if call.name == 'output' else 'split'}"
            return kernel if kernel in options and wants(call.layer[1], call.layer[2]) else BF16

        return pick

    policies = {
        "loka-sim": cheapest(learned),
        "roofline alone": cheapest(roofline),
        "bf16 everywhere": lambda call, options: BF16,
        "FP8 tensorwise everywhere": fixed("tensorwise", lambda n, k: True),
        "FP8 rowwise everywhere": fixed("rowwise", lambda n, k: True),
        "torchao filter, tensorwise": fixed("tensorwise", filter_tensorwise),
        "torchao filter, rowwise": fixed("rowwise", filter_rowwise),
    }
    rows = []
    for call, times in calls().items():
        options = [k for k in GEMM_KERNELS if all(row in measured for row in call.rows(k))]
        if len(options) > 1:
            costs = {kernel: cost(call, kernel, measured) for kernel in options}
            chosen = {name: costs[pick(call, options)] for name, pick in policies.items()}
            rows.append({"times": times, "best": min(costs.values()), "bf16": costs[BF16], **chosen})
    frame = pd.DataFrame(rows)
    wins = (frame["best"] < frame["bf16"]).mean()
    print(
        f"{len(frame)} distinct passes ({frame['times'].sum()} calls) with every part measured; "
        f"FP8 is fastest for {wins:.0%} of them"
    )
    print(f"{'policy':28s} {'right':>7s} {'regret (geomean)':>17s} {'p90':>7s} {'worst':>7s} {'total':>8s}")
    for name in policies:
        ratio = frame[name] / frame["best"]
        total = (frame[name] * frame["times"]).sum() / (frame["best"] * frame["times"]).sum() - 1
        geomean = np.exp(np.log(ratio).mean()) - 1
        tail = f"{ratio.quantile(0.9) - 1:7.1%} {ratio.max() - 1:7.0%} {total:8.2%}"
        print(f"{name:28s} {(ratio == 1).mean():7.1%} {geomean:17.2%} {tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A GPU learned from another's model, judged on shapes that neither was fitted to: what its timings add, and how many it takes.

    python benchmarks/another_gpu.py               # the H100 from the H200's model, two minutes on two cores

Judged on the sweeps of `perfmodel.fit.NEVER_SEEN`: the other GPU's model as it is; that model corrected as `loka-sim collect`
corrects it in a short run; a fit to this GPU's timings and launches alone; and from where the other's ends by a tenth, a third
and all of the careful timings, then by the launches, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

import perfmodel
from loka_sim.collection import MOST_ROWS_REFINED
from perfmodel import learn
from perfmodel.data_folder import data_folder
from perfmodel.fit import LEAST_ROWS_START, NEVER_SEEN, TORCH_GEMMS, fitted_rows
from perfmodel.held_out import choice_regret
from perfmodel.judge import SHAPE
from perfmodel.kernels import KERNELS
from perfmodel.measured import read_choices, read_launches, read_timings
from perfmodel.refine import refine
from perfmodel.transfer import begin, starts

Array = npt.NDArray[np.float64]
FAMILIES: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("torch/bf16", lambda name: name == "torch/bf16"),
    ("torch/bf16_batched", lambda name: name == "torch/bf16_batched"),
    ("torch, tensorwise", lambda name: name.startswith("torch/fp8_tensorwise")),
    ("torch, rowwise", lambda name: name.startswith("torch/fp8_rowwise")),
    ("torch, blocks", lambda name: name.startswith("torch/fp8_block")),
    ("torch, grouped", lambda name: name.startswith("torch/fp8_grouped")),
    ("loka-sim's GEMMs", lambda name: name.startswith("loka/") and KERNELS[name].kind == "gemm"),
    ("FBGEMM's GEMMs", lambda name: name.startswith("fbgemm/") and KERNELS[name].kind == "gemm"),
    ("quantizers", lambda name: KERNELS[name].kind == "quantize"),
    ("other memory kernels", lambda name: KERNELS[name].kind in ("layout", "pointwise")),
)


class Judged:
    """One GPU's timings, and the other's model."""

    def __init__(self, name: str, other: str) -> None:
        """Reads them."""
        folder = data_folder() / name
        everything = read_timings(name)
        self.hardware, self.other = perfmodel.hardware.load(name), perfmodel.load(other)
        self.rows = fitted_rows(everything, LEAST_ROWS_START)
        known = self.rows["kernel"].unique()
        fresh = everything["settled"] & everything["sweep"].isin(NEVER_SEEN) & everything["kernel"].isin(known)
        self.fresh = everything[fresh].reset_index(drop=True)
        self.launches, self.choices = read_launches(everything, folder), read_choices(folder)

    def learned(self, from_other: bool, share: float = 1.0, launches: bool = True) -> Array:
        """Predictions of the fresh shapes, learned from a share of the shapes, at random."""
        shape = self.rows.groupby(SHAPE).ngroup().to_numpy()
        kept = np.random.default_rng(0).random(shape.max() + 1)[shape] < share
        rows, quick = self.rows[kept], self.launches if launches else None
        kernels = rows["kernel"].unique()
        if from_other:
            first = dict(starts(self.other, None, self.hardware, kernels, quick, self.choices))
        else:
            first = dict(learn.learn_first(quick, self.hardware, kernels, self.choices))
        result = np.full(len(self.fresh), np.nan)
        for kernel, index in self.fresh.groupby("kernel").indices.items():
            mine = rows[rows["kernel"] == kernel]
            if len(mine):
                known = learn.train(str(kernel), mine, self.hardware, begin(first.get(str(kernel))))
                result[index] = learn.predict(known, str(kernel), self.fresh.iloc[index], self.hardware)
        return result

    def corrected(self) -> Array:
        """Likewise by the other GPU's model with `perfmodel.refine`."""
        known = self.rows[self.rows["kernel"].isin(list(self.other.manifest["kernels"]))]
        some = known.groupby("kernel", sort=False).head(MOST_ROWS_REFINED)
        return refine(self.other, some).model.predict(self.fresh)["time_us"].to_numpy()


def table(fresh: pd.DataFrame, found: dict[str, Array]) -> str:
    """MAPE and 90th percentile by family and method, and the regret of choosing among torch's GEMMs."""
    lines = [f"{'MAPE / p90':22s} {'n':>5s} " + " ".join(f"{name:>14s}" for name in found)]
    measured = fresh["p50_us"].to_numpy()
    for family, belongs in FAMILIES:
        mine = fresh["kernel"].map(belongs).to_numpy(dtype=bool)
        cells = []
        for predicted in found.values():
            known = mine & np.isfinite(predicted)
            error = np.abs(predicted[known] / measured[known] - 1)
            cells.append(f"{error.mean():.1%} / {np.quantile(error, 0.9):.1%}" if known.any() else "")
        lines.append(f"{family:22s} {mine.sum():5d} " + " ".join(f"{cell:>14s}" for cell in cells))
    cells = []
    for predicted in found.values():
        known = np.isfinite(predicted)
        regret = choice_regret(fresh[known], predicted[known], TORCH_GEMMS)
        cells.append(f"{regret['geomean']:.2%}" if regret else "")
    lines.append(f"{'regret, torch GEMMs':22s} {'':5s} " + " ".join(f"{cell:>14s}" for cell in cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", default="h100", choices=perfmodel.hardware.available())
    parser.add_argument("--start", default="h200", choices=perfmodel.hardware.available())
    options = parser.parse_args(arguments)
    data = Judged(options.hardware, options.start)
    print(f"{len(data.rows):,} timings fitted to, {len(data.fresh):,} judged, of shapes that no fit saw", file=sys.stderr)
    print(table(data.fresh, {
        f"{options.start} as it is": data.other.predict(data.fresh)["time_us"].to_numpy(),
        "corrected": data.corrected(),
        "alone": data.learned(False),
        "+ a tenth": data.learned(True, 0.1, launches=False),
        "+ a third": data.learned(True, 1 / 3, launches=False),
        "+ all": data.learned(True, launches=False),
        "+ launches": data.learned(True),
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

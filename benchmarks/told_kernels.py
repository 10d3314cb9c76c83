"""How often the kernel that cuBLAS takes is told rightly, and how far off times would be were it told rightly everywhere.

    python benchmarks/told_kernels.py [--hardware h200]

By what cuBLAS answered on the GPU for the shapes of careful timings, which no network learned from
(`data/<hardware>/choices/asked.parquet`). The first table has the share told rightly: of the shapes that are fitted, of fresh
sweeps, products in few groups and any sizes apart, and of the sweep `zoo`. The next two have the MAPE of fresh timings at a clock
of their own, as predicted, and with the right kernel told, without doubt, to the trees as they ship; choosing goes by each kernel
told alone, on the sweeps whose shapes were asked about.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from fresh_sweeps import APART, FEW_PRODUCTS, MANY_WORKERS

import perfmodel
from perfmodel import PerfModel, data_folder, fit
from perfmodel.calls import Sizes, columns_of
from perfmodel.choice import PARTS, Codes, asked
from perfmodel.held_out import choice_regret
from perfmodel.judge import SHAPE
from perfmodel.kernels import GEMM_KERNELS
from perfmodel.prediction import Seen, baseline_us, no_less

Array = npt.NDArray[np.float64]

OF = {**dict.fromkeys(FEW_PRODUCTS, "few groups"), **APART, "zoo": "zoo"}


@dataclass(frozen=True)
class Answered:
    """Stands for a network of choices that knows the answers of these calls, in their order, and has no doubt.

    Attributes:
        parts: Of the kernels that were taken (`perfmodel.choice.PARTS`), (calls, parts).
    """

    parts: Codes

    def told(self, matrix: npt.NDArray[np.floating]) -> tuple[Codes, npt.NDArray[np.int64]]:
        """As of `perfmodel.choice.Choice`."""
        return self.parts, np.zeros(len(matrix), dtype=np.int64)


def rightly_told(model: PerfModel, kernel: str, rows: pd.DataFrame) -> Array:
    """Times in microseconds of calls whose answers are in `rows`, (calls,), as the model has them once these are told."""
    sizes = columns_of(rows)
    network, trees = model.learned(kernel)
    told = Answered(rows[list(PARTS)].to_numpy(dtype=np.int64))
    seen = Seen.of(kernel, sizes, model.hardware, told, network, model.planned(kernel))  # type: ignore[arg-type]
    times = baseline_us(kernel, *sizes, model.hardware) * np.exp(seen.smooth + trees.predict(seen.matrix).astype(np.float64))
    return no_less(times, kernel, sizes, model.hardware, model.least_us(kernel))


def is_right(model: PerfModel, kernel: str, rows: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Whether the network tells the kernel that was answered, part by part, (calls,)."""
    choice = model.choice(kernel)
    assert choice is not None
    sizes: Sizes = columns_of(rows)
    told, _ = choice.told(asked(kernel, *sizes, model.hardware))
    return np.asarray((told == rows[list(PARTS)].to_numpy()).all(axis=1))


def table(rows: pd.DataFrame, value: str, what: str) -> None:
    """Means of a column by kernel, and of which sweeps the rows are, with their number."""
    groups = list(dict.fromkeys(("fitted", "fresh", *OF.values())))
    print(f"\n{what:28s}" + "".join(f"{name:>18s}" for name in groups))
    for kernel, mine in rows.groupby("kernel", sort=False):
        cells = (mine.loc[mine["of"] == name, value] for name in groups)
        shown = (f"{100 * some.mean():.2f} ({len(some)})" if len(some) else "-" for some in cells)
        print(f"{kernel:28s}" + "".join(f"{cell:>18s}" for cell in shown))


def main(arguments: list[str] | None = None) -> int:
    """Print the tables; 3 where the GPU was not asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", default="h100")
    options = parser.parse_args(arguments)
    path = data_folder() / options.hardware / "choices" / "asked.parquet"
    if not path.is_file():
        print(f"{path} is not there: python -m hil.asked --out {path.parent.parent} asks on such a GPU", file=sys.stderr)
        return 3
    model, answers, timings = perfmodel.load(options.hardware), pd.read_parquet(path), fit.read_timings(options.hardware)
    key = ["kernel", *SHAPE]
    unseen = timings[timings["sweep"].isin(list(fit.NEVER_SEEN))]
    of = unseen["sweep"].map(OF).fillna("fresh")
    answers = answers.merge(unseen.assign(of=of)[[*key, "of"]].drop_duplicates(key), how="left", on=key)
    answers["of"] = answers["of"].fillna("fitted")
    for kernel, index in answers.groupby("kernel").indices.items():
        answers.loc[answers.index[index], "right"] = is_right(model, str(kernel), answers.iloc[index])
    table(answers.assign(right=answers["right"].astype(float)), "right", "told rightly, %")
    judged = set(model.manifest["kernels"]) & {*GEMM_KERNELS, *answers["kernel"]}
    shared = unseen["sweep"].isin(MANY_WORKERS.get(options.hardware, ()))
    fresh = unseen[unseen["settled"] & ~shared & unseen["kernel"].isin(list(judged))].assign(of=of)
    fresh = fresh.merge(answers[[*key, *PARTS]], how="left", on=key)
    fresh["predicted"] = model.predict(fresh)["time_us"].to_numpy()
    known = fresh[PARTS[0]].notna().to_numpy()
    fresh["rightly"] = fresh["predicted"]
    for kernel, index in fresh[known].groupby("kernel").indices.items():
        mine = fresh.index[known][index]
        fresh.loc[mine, "rightly"] = rightly_told(model, str(kernel), fresh.loc[mine])
    for column, what in (("predicted", "MAPE, %"), ("rightly", "MAPE, rightly told, %")):
        off = np.abs(fresh[column] / fresh["p50_us"] - 1)
        table(fresh[known].assign(off=off[known]), "off", what)
    fresh = fresh[fresh["sweep"].isin(fresh.loc[known, "sweep"].unique())]
    for name in dict.fromkeys(fresh["of"]):
        some = fresh[fresh["of"] == name].reset_index(drop=True)
        costs = [choice_regret(some, some[column].to_numpy()) for column in ("predicted", "rightly")]
        if all(costs):
            each = " and ".join(f"{cost['geomean']:.2%}" for cost in costs if cost)
            print(f"choosing among all libraries' of {name}: {each} rightly told (n = {costs[0]['shapes']})")  # type: ignore[index]
    return 0


if __name__ == "__main__":
    sys.exit(main())

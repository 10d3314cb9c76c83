"""Learn what bf16 GEMMs take in the layouts of a training step and with a bias; judge it on products timed with more care.

    python -m perfmodel.fit_layouts --hardware h200
    python -m perfmodel.fit_layouts --judge data/h200/across

Trees on the logarithm of a product's time in a layout, or with a bias, over its time with K fastest and without one, less what
another kernel changes of that (`perfmodel.layouts`), from `layouts.parquet` (`hil.layouts`) and `choices` (`hil.choices`).
First they learn from the quick timings alone and are judged on the careful ones, whose products are others: by themselves, and
together with the model of times with K fastest as it ships. Those that are written learn from both. With `--judge` nothing is
learned: those that ship are judged on what a folder has of products that they have not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

import perfmodel
from perfmodel import hardware as hardware_module
from perfmodel.calls import columns_of
from perfmodel.data_folder import data_folder
from perfmodel.kernels import BF16, BF16_BATCHED, K_FASTEST, KERNELS, Layout, laid
from perfmodel.layouts import FILE, MANIFEST, OTHERS, SCHEMA_VERSION, Known, are_even, column, model_file
from perfmodel.opened import choice_file
from perfmodel.packed import pack
from perfmodel.saved import write_whole
from perfmodel.slim import slim

Array = npt.NDArray[np.float64]

ROUNDS = 900
PARAMETERS: dict[str, Any] = {
    "objective": "reg:pseudohubererror", "huber_slope": 0.3, "base_score": 0.0, "eta": 0.04, "max_depth": 9,
    "min_child_weight": 8, "subsample": 0.8, "colsample_bytree": 0.5, "max_bin": 512, "tree_method": "hist", "seed": 0,
}  # fmt: skip
CAREFUL_WEIGHT = 3.0
COVERAGE = 0.9
SIZES = ["m", "n", "k", "groups"]


def train(rows: pd.DataFrame, matrix: Array, as_if: Array, names: list[str], layout: Layout, rounds: int = ROUNDS) -> Any:
    """Trees on log(time in a layout / time with K fastest) less `as_if`, as `perfmodel.layouts.Known.in_layout` gives it."""
    import xgboost

    target = np.log(rows[column(layout)].to_numpy(dtype=float) / rows[column(K_FASTEST)].to_numpy(dtype=float)) - as_if
    weight = np.where(rows["careful"], CAREFUL_WEIGHT, 1.0)
    return xgboost.train(PARAMETERS, xgboost.DMatrix(matrix, target, weight=weight, feature_names=names), rounds)


def judged(rows: pd.DataFrame, alone: Array, factor: Array, layout: Layout, bounds: Array | None = None) -> list[dict[str, Any]]:
    """How far off products of each sort are: taken for ones with K fastest, told in their layout, and by the factor alone.

    `off` is what nine in ten of the factors' logarithms are off by at most, and `inside` the share of times that lie in the
    interval: of both together, or as it is told.

    Args:
        rows: Products.
        alone: What they are told to take with K fastest, in microseconds, and both ends of the interval, (products, 3).
        factor: Told of the layout.
        layout: Of their operands.
        bounds: Both ends of the interval that they are told in, (products, 2), where that is there already.
    """
    measured, timed = (rows[column(which)].to_numpy(dtype=float) for which in (layout, K_FASTEST))
    told, down, up = alone[:, 0] * factor, np.log(alone[:, 0] / alone[:, 1]), np.log(alone[:, 2] / alone[:, 0])
    error = np.log(measured / told)
    even, batched = are_even(columns_of(rows)), (rows["groups"] > 1).to_numpy()
    found = []
    for many in (False, True):
        for lies_evenly in (True, False):
            mine = (batched == many) & (even == lies_evenly)
            if not mine.any():  # batched products have no bias
                continue
            off, before, by_factor = (np.abs(us[mine] / measured[mine] - 1) for us in (told, alone[:, 0], timed * factor))
            width = float(np.quantile(np.abs(np.log(timed * factor / measured)[mine]), COVERAGE))
            inside = np.abs(error[mine]) <= np.hypot(np.where(error > 0, up, down)[mine], width)
            if bounds is not None:
                inside = ((bounds[:, 0] <= measured) & (measured <= bounds[:, 1]))[mine]
            found.append(
                {
                    "layout": "_".join(layout), "batched": many, "even": lies_evenly, "n": int(mine.sum()),
                    "mape": float(off.mean()), "p90": float(np.quantile(off, 0.9)), "worst": float(off.max()),
                    "factor_alone": float(by_factor.mean()), "off": width, "inside": float(inside.mean()),
                    "as_k_fastest": float(before.mean()), "as_k_fastest_p90": float(np.quantile(before, 0.9)),
                }
            )  # fmt: skip
    return found


def fit(rows: pd.DataFrame, model: perfmodel.PerfModel, folder: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Learn and judge every layout's trees: what `judged` says of products that were timed with care, and files by name.

    Args:
        rows: Of `layouts.parquet`.
        model: Of kernels' times with K fastest.
        folder: That has what tells which kernel cuBLAS takes in each layout.
    """
    known = Known.of(columns_of(rows), model)
    careful = rows["careful"].to_numpy(dtype=bool)
    kernels = np.where(rows["groups"] > 1, BF16_BATCHED, BF16)
    alone = np.full((len(rows), 3), np.nan)
    asked = rows[SIZES].assign(kernel=kernels)[careful]
    alone[careful] = model.predict(asked)[["time_us", "low_us", "high_us"]].to_numpy()
    found, files = [], {}
    for layout in OTHERS:
        print(f"products of layout {'_'.join(layout)} ...", file=sys.stderr, flush=True)
        timed = np.flatnonzero(rows[column(layout)].notna())
        names, matrix, as_if = known.of_products(timed).in_layout(layout, model, folder)
        mine, slow = rows.iloc[timed], careful[timed]
        booster = train(mine[~slow], matrix[~slow], as_if[~slow], names, layout)
        factor = np.exp(as_if[slow] + booster.inplace_predict(matrix[slow]).astype(np.float64))
        found += judged(mine[slow], alone[timed][slow], factor, layout)
        files[model_file(layout)] = pack(slim(train(mine, matrix, as_if, names, layout)))
    return found, files


def judge(rows: pd.DataFrame, seen: pd.DataFrame, model: perfmodel.PerfModel) -> list[dict[str, Any]]:
    """What `judged` says of the model as it is, on products timed with care that no fit saw.

    Args:
        rows: Of `layouts.parquet`.
        seen: Of that which was learned from: its products are left out.
        model: Of kernels' times, and of their layouts.
    """
    known = set(seen[SIZES].itertuples(index=False, name=None))
    fresh = np.array([sizes not in known for sizes in rows[SIZES].itertuples(index=False, name=None)], dtype=bool)
    found = []
    for layout in OTHERS:
        mine = rows[rows[column(layout)].notna() & rows["careful"] & fresh]
        kernels = np.where(mine["groups"] > 1, BF16_BATCHED, BF16)
        alone, told = (
            model.predict(mine[SIZES].assign(kernel=names))[["time_us", "low_us", "high_us"]].to_numpy()
            for names in (kernels, [laid(kernel, layout) for kernel in kernels])
        )
        found += judged(mine, alone, told[:, 0] / alone[:, 0], layout, told[:, 1:])
    return found


def _print(found: list[dict[str, Any]]) -> None:
    told = f"{'as K fastest':20s} {'told in it':30s} inside  factor alone"
    print(f"{'layout':16s} {'':8s} {'sizes':7s} {'n':>5s}   {told}")
    for entry in found:
        sort = f"{'batched' if entry['batched'] else '':8s} {'even' if entry['even'] else 'uneven':7s}"
        print(
            f"{entry['layout']:16s} {sort} {entry['n']:5d}  {entry['as_k_fastest']:6.1%} (p90 {entry['as_k_fastest_p90']:6.1%})"
            f"  {entry['mape']:6.1%} (p90 {entry['p90']:6.1%}, worst {entry['worst']:.0%})  {entry['inside']:6.1%}"
            f"  {entry['factor_alone']:6.1%} (90% within {entry['off']:.1%})"
        )


def answers(folder: Path) -> dict[str, bytes]:
    """What tells which kernel cuBLAS takes in each layout, by its file's name in the models folder.

    Raises:
        ValueError: cuBLAS was not asked of one.
    """
    names = [choice_file(name) for name, spec in KERNELS.items() if spec.across]
    if missing := [name for name in names if not (folder / "choices" / name).is_file()]:
        raise ValueError(
            f"{folder / 'choices' / missing[0]} is not there; ask cuBLAS with: python -m hil.choices --out {folder} "
            "--kernels 'torch/bf16_*_*' torch/bf16_bias"
        )
    return {name: (folder / "choices" / name).read_bytes() for name in names}


def main() -> int:
    """Fit, judge, write."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.fit_layouts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", default="h200", choices=hardware_module.available())
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help=f"whose {FILE} to judge by, of products that no fit saw")
    options = parser.parse_args()
    folder = data_folder() / options.hardware
    if not (folder / FILE).is_file():
        parser.error(f"{folder / FILE} is not there; measure it with: python -m hil.layouts --out {folder}")
    if options.judge is not None:
        if not (options.judge / FILE).is_file():
            parser.error(
                f"{options.judge / FILE} is not there; measure it with: python -m hil.layouts --careful --out {options.judge}"
            )
        fresh, seen = (pd.read_parquet(path / FILE) for path in (options.judge, folder))
        _print(judge(fresh, seen, perfmodel.load(options.hardware)))
        return 0
    try:
        choices = answers(folder)
    except ValueError as error:
        parser.error(str(error))
    rows, models = pd.read_parquet(folder / FILE), folder / "models"
    for name, content in choices.items():
        write_whole(models / name, content)
    found, files = fit(rows, perfmodel.load(options.hardware), models)
    manifest = {
        "schema_version": SCHEMA_VERSION, "hardware": options.hardware,
        "command": f"python -m perfmodel.fit_layouts --hardware {options.hardware}", "products": len(rows), "judged": found,
    }  # fmt: skip
    for name, content in (*files.items(), (MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())):
        write_whole(models / name, content)
    _print(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

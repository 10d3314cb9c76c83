"""Learning what pairs of kernels differ by (`perfmodel.pairs`), on top of a fit of the kernels: the last part of a fit.

Trees learn from quick launches of both kernels of a pair on one shape, which followed one another, then from careful timings of
one run. How far a pair's ratio is off, which says how much it counts, is of whole shapes held out of the careful ones, two folds
of five. A GPU that was learned from another one's model goes on from what launches on that one taught: so an H100's ratios are
off by 1.96%, 0.90% and 1.64% (torch's tensorwise kernels; ours, tensorwise and rowwise, fast and split), by its own data alone by
2.05%, 0.96% and 1.68%. Shapes that judge are neither among these timings nor among the launches. What is said of choices among
GEMMs of the sweeps that judge is said anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import learn
from perfmodel.calls import columns_of
from perfmodel.held_out import choice_regret, folds_of
from perfmodel.judge import SHAPE
from perfmodel.kernels import GEMM_KERNELS
from perfmodel.model import PerfModel
from perfmodel.packed import pack
from perfmodel.pairs import PAIRS, Array, Pair, both_seen, pair_file, smooth_ratio
from perfmodel.parallel import each
from perfmodel.prediction import Seen
from perfmodel.saved import load, write_whole
from perfmodel.slim import slim

# Careful timings of both kernels on one shape, and launches, of which fewer teach no ratio.
LEAST_BOTH, LEAST_LAUNCHED = 1000, 20_000
MANIFEST = "manifest.json"
# Folds that say how far a ratio is off.
JUDGED = 2


def of_both(rows: pd.DataFrame, pair: Pair, key: list[str], time: str) -> pd.DataFrame:
    """Shapes that both kernels of a pair were timed on, with the logarithm of the `ratio` of their times.

    Args:
        rows: Timings, `kernel` and sizes among them.
        pair: The kernels.
        key: Columns in which two rows of a shape agree.
        time: The column of the time.
    """
    one, other = (rows[rows["kernel"] == name].drop_duplicates(key).set_index(key)[time].astype(float) for name in pair)
    both = pd.concat([one, other], axis=1, join="inner", keys=["one", "other"]).reset_index()
    return both.assign(ratio=np.log(both["one"] / both["other"]))


def _data(model: PerfModel, pair: Pair, rows: pd.DataFrame) -> tuple[Array, Array]:
    """What a pair's trees see of `of_both`'s rows, and what they are to tell of them."""
    sizes = columns_of(rows)
    seen = [Seen.of(name, sizes, model.hardware, model.choice(name), model.learned(name)[0]) for name in pair]
    return both_seen(*seen), rows["ratio"].to_numpy() - smooth_ratio(pair, seen, sizes, model.hardware)


def learn_pair(
    model: PerfModel, careful: pd.DataFrame, launched: pd.DataFrame, pair: Pair, start: Any = None
) -> tuple[bytes, float, float]:
    """A pair's trees as they are written, and how far ratios of shapes held out are off: by them, and by the network alone.

    Args:
        model: What knows the kernels.
        careful: `of_both` of careful timings.
        launched: `of_both` of launches; none where there are few.
        pair: The kernels.
        start: Trees of another GPU's launches, to go on from; None to begin anew.
    """
    xgboost = learn.xgboost_package()
    if len(launched):
        matrix, target = _data(model, pair, launched)
        parameters, rounds = (
            (learn.FIRST_PARAMETERS, learn.MORE_ROUNDS) if start is not None else (learn.TOLD_PARAMETERS, learn.TOLD_ROUNDS)
        )
        start = xgboost.train({**parameters, "base_score": 0.0}, xgboost.DMatrix(matrix, target), rounds, xgb_model=start)
    matrix, target = _data(model, pair, careful)
    fold = folds_of(careful)

    def trained(rows: Any) -> Any:
        parameters = {**learn.NEXT_PARAMETERS, "base_score": 0.0}
        return xgboost.train(parameters, xgboost.DMatrix(matrix[rows], target[rows]), learn.NEXT_ROUNDS, xgb_model=start)

    off = np.full(len(careful), np.nan)
    for number in range(JUDGED):
        mine = fold == number
        off[mine] = trained(~mine).predict(xgboost.DMatrix(matrix[mine])) - target[mine]
    judged = fold < JUDGED
    trees = pack(slim(trained(np.ones(len(careful), dtype=bool))))
    return trees, float(np.abs(off[judged]).mean()), float(np.abs(target[judged]).mean())


def launches_of(model: PerfModel, pair: Pair) -> Any:
    """Trees of a pair as launches taught it, before careful timings; None of a model that does not know it."""
    if pair not in model.agreement.pairs:
        return None
    trees = learn.read_trees((model.folder / pair_file(pair)).read_bytes())
    first = trees.num_boosted_rounds() - learn.NEXT_ROUNDS
    return trees[:first] if first else None


def add_pairs(
    model: PerfModel, timings: pd.DataFrame, launches: pd.DataFrame | None, pairs: Iterable[Pair] = PAIRS
) -> dict[str, Any]:
    """Learn pairs, write their trees beside those of the kernels and name them in the manifest, which is returned.

    Args:
        model: A fit of the kernels.
        timings: What it was fitted to.
        launches: Quick launches of other shapes; None for none.
        pairs: Which; those of which too little was timed are left out.
    """
    jobs, bare = [], replace(model)
    begun = model.manifest.get("start")
    other = load(begun["hardware"]) if begun else None
    for pair in pairs:
        careful = of_both(timings, pair, [*SHAPE, "run"], "p50_us")
        if not set(pair) <= set(model.manifest["kernels"]) or len(careful) < LEAST_BOTH:
            continue
        quick = careful[:0] if launches is None else of_both(launches, pair, SHAPE, "time_us")
        quick = quick if len(quick) >= LEAST_LAUNCHED else quick[:0]
        jobs.append((bare, careful, quick, pair, launches_of(other, pair) if other else None))
    known: dict[Pair, float] = {}
    for (_, careful, quick, pair, _), (trees, off, smooth) in zip(jobs, each(learn_pair, jobs), strict=True):
        write_whole(model.folder / pair_file(pair), trees)
        known[pair] = off
        print(
            f"{pair[0]} beside {pair[1]}: {len(quick)} launches, {len(careful)} careful timings; off by {off:.2%}, "
            f"without trees {smooth:.2%}",
            file=sys.stderr,
        )
    for old in model.folder.glob("*__beside__*.ubj.gz"):
        if old.name not in map(pair_file, known):
            old.unlink()
    manifest = {name: value for name, value in model.manifest.items() if name != "pairs"}
    if known:
        manifest["pairs"] = [[*pair, off] for pair, off in known.items()]
    write_whole(model.folder / MANIFEST, _json(manifest))
    return manifest


def judge_choices(
    model: PerfModel, unseen: pd.DataFrame, sweeps: Mapping[str, str], torch_gemms: Iterable[str]
) -> dict[str, Any]:
    """Say in the manifest what choosing among GEMMs of sweeps that judge costs, kernels of one shape asked together; returns it.

    Args:
        model: With pairs.
        unseen: Settled rows of these sweeps.
        sweeps: By name, the manifest's key.
        torch_gemms: Names.
    """
    manifest = dict(model.manifest)
    for sweep, key in sweeps.items():
        rows = unseen[(unseen["sweep"] == sweep) & unseen["kernel"].isin(list(manifest["kernels"]))].reset_index(drop=True)
        if key in manifest and len(rows):
            told = model.predict_together(rows)["time_us"].to_numpy()
            among = {"gemm_choice": torch_gemms, "gemm_choice_all_libraries": GEMM_KERNELS}
            manifest[key] = manifest[key] | {name: choice_regret(rows, told, kernels) for name, kernels in among.items()}
    write_whole(model.folder / MANIFEST, _json(manifest))
    return manifest


def _json(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1) + "\n").encode()

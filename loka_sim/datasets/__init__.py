"""Recommendation data: Criteo's TSV format, MovieLens in RecBole's atomic files, and a synthetic stream.

Every dataset is an iterator of `Batch` records of numpy arrays, with the `InputShape` that a zoo model must be built
for. Files are found by an argument or by the variables LOKA_SIM_CRITEO and LOKA_SIM_MOVIELENS; none are shipped.
"""

from __future__ import annotations

import os
from pathlib import Path

from loka_sim.datasets.base import Batch, Dataset
from loka_sim.datasets.criteo import CriteoDataset
from loka_sim.datasets.movielens import MovieLensDataset
from loka_sim.datasets.synthetic import SyntheticDataset
from loka_sim.errors import DataError, UserError
from loka_sim.inputs import InputShape

__all__ = ["SPLITS", "Batch", "CriteoDataset", "Dataset", "MovieLensDataset", "SyntheticDataset", "open_dataset"]

SPLITS = ("train", "dev")
NAMES = ("criteo", "movielens", "synthetic")


def located(given: str | Path | None, variable: str, what: str) -> Path:
    """The data's path, from the argument or from the environment.

    Raises:
        DataError: neither is given, or there is nothing.
    """
    text = given or os.environ.get(variable)
    if not text:
        raise DataError(f"no {what} data given; pass its path or set {variable}")
    path = Path(text)
    if not path.exists():
        raise DataError(f"{what} data not found at {path}; pass another path or set {variable}")
    return path


def open_dataset(
    name: str, path: str | Path | None = None, split: str = "train", *, shape: InputShape | None = None,
    seed: int = 0, rows: int = 100_000,
) -> Dataset:  # fmt: skip
    """A dataset by name.

    Args:
        name: `criteo`, `movielens` or `synthetic`.
        path: File or folder; by default what LOKA_SIM_CRITEO or LOKA_SIM_MOVIELENS says. Synthetic data need none.
        split: `train` or `dev`.
        shape: What the model wants (Criteo and synthetic data are hashed to it; MovieLens brings its own).
        seed: Of synthetic data.
        rows: Samples of a synthetic training split; its dev split has a tenth.

    Raises:
        UserError: no such dataset or split.
        DataError: the data are not there.
    """
    if split not in SPLITS:
        raise UserError(f"unknown split '{split}'; choose from {', '.join(SPLITS)}")
    if name == "criteo":
        return CriteoDataset(located(path, "LOKA_SIM_CRITEO", "Criteo"), split, shape or InputShape())
    if name == "movielens":
        return MovieLensDataset(located(path, "LOKA_SIM_MOVIELENS", "MovieLens"), split)
    if name == "synthetic":
        return SyntheticDataset(rows if split == "train" else max(rows // 10, 1), split, shape or InputShape(), seed)
    raise UserError(f"unknown dataset '{name}'; choose from {', '.join(NAMES)}")

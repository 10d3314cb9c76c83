"""Calls of kernels as they are asked: names, and sizes as numbers, from a DataFrame or from columns without pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

Array = npt.NDArray[np.float64]
Sizes = tuple[Array, Array, Array, Array]
Columns = Mapping[str, Sequence[Any]]
"""Columns by name, all equally long: a DataFrame without pandas, whose import takes longer than a small prediction."""


def kernels_of(frame: pd.DataFrame | Columns) -> list[str]:
    """The names in the kernel column, of a frame that has the columns of sizes, too."""
    if missing := {"kernel", "m", "n", "k"} - set(frame):
        raise ValueError(f"the frame lacks the columns {sorted(missing)}; predict needs kernel, m, n, k")
    column = frame["kernel"]
    if getattr(column, "ndim", 1) > 1:
        raise ValueError("the frame has the column 'kernel' more than once; leave one of them out")
    # A column of strings that Arrow holds takes ten times as long value by value.
    kernels = list(column.to_numpy(dtype=object) if hasattr(column, "to_numpy") else column)
    if not all(issubclass(kind, str) for kind in set(map(type, kernels))):
        raise ValueError("a row names no kernel; predict needs kernel, m, n, k in every row")
    return kernels


def columns_of(frame: pd.DataFrame | Columns) -> Sizes:
    """The (m, n, k, groups) columns as float arrays; groups is 1 where there is no such column."""
    m, n, k = (_numbers(name, frame[name]) for name in ("m", "n", "k"))
    return m, n, k, _numbers("groups", frame["groups"]) if "groups" in frame else np.ones_like(m)


def _numbers(name: str, column: pd.Series | Sequence[Any]) -> Array:
    """A column of numbers, or of None; of truth values, words or anything else it is refused."""
    values = column.to_numpy() if hasattr(column, "to_numpy") else np.asarray(column)
    odd: list[Any] = []
    if values.dtype == object:
        odd = [value for value in values.reshape(-1) if not isinstance(value, Real | None) or isinstance(value, bool)]
    elif values.dtype.kind not in "iuf":
        odd = values.reshape(-1).tolist()
    if odd:
        raise ValueError(f"{name} = {odd[0]!r} is no size; m, n, k and groups must be at least 1, and whole numbers")
    return np.asarray(values, dtype=np.float64)


def of_calls(sizes: Sizes, calls: slice | npt.NDArray[np.intp]) -> Sizes:
    """Sizes of some calls, by their numbers."""
    m, n, k, groups = sizes
    return m[calls], n[calls], k[calls], groups[calls]


def places_of(kernels: Sequence[str]) -> dict[str, npt.NDArray[np.intp]]:
    """The rows of each kernel, by name."""
    numbers = {kernel: number for number, kernel in enumerate(dict.fromkeys(kernels))}
    found = np.fromiter(map(numbers.__getitem__, kernels), dtype=np.int64, count=len(kernels))
    return {kernel: np.flatnonzero(found == number) for kernel, number in sorted(numbers.items())}

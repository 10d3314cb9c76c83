"""How wide intervals are for shapes to come: as fresh sweeps ask, drawn anew, timed on other days, and seen by no fit.

Runs left out of the fit (`perfmodel.held_out`) say how an interval's width follows a call's size, the doubt about its kernel
and what was measured around it. But they were drawn to teach, many of odd sizes, and trees without them know less than those
that are shipped: by these alone 83% to 99% of fresh measurements are inside, by kernel and size class. So the factors of each
family and size class are raised to the power at which they hold 90% of the fresh sweeps, few rows leaning on what their kind
asks for: split-conformal once more, by the shipped trees themselves. A sweep is judged by powers that it did not help to find.
Of a kernel's largest calls (`perfmodel.choice.are_largest`) few are fitted, which asks for a power of their own; there a run
stands for a sweep, rows of one run count for fewer (`ALIKE_IN_A_RUN`), and a kernel leans on its library. Batched products in
few groups (`perfmodel.prediction.in_few_groups`) are further off than one a sample, and ask for one more. So do GEMMs, and
memory-bound kernels, by how many digits their sizes take (`perfmodel.prediction.digits`): most sweeps are drawn as what
teaches, of round sizes, and users' shapes need not be. Therefore the sweeps `WRITTEN`, of any sizes, count as a half if they
are fewer; of operands there is but one such, whose halves stand for two (`HALVED`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel.calls import columns_of
from perfmodel.choice import are_largest
from perfmodel.held_out import COVERAGE
from perfmodel.kernels import KERNELS, library_of
from perfmodel.model import PerfModel
from perfmodel.prediction import DIGITS, SIZE_CLASSES_US, bounds_of, digits, in_few_groups, size_class, wider

Array = npt.NDArray[np.float64]

Powers = Mapping[str, Sequence[float]]
"""By family, a power for each size class; and one by which these are raised for each class of `BY_DIGITS`."""
CLASSES = len(SIZE_CLASSES_US) + 1
# Whole models' shapes: kept for judging alone.
KEPT = ("zoo",)
# Of any sizes, drawn unlike all that is fitted (`hil.shapes.any_shapes`, operands as `any_memory_shapes`, `blind14` as
# `odd_shapes`): of a family they count for this share at least. By a quarter an H200's GEMMs of any sizes were inside 88.4% of
# torch's, 88.2% of ours and 87.4% of FBGEMM's, by a half each 88.6% or more, and its usual calls hardly more often.
WRITTEN = (*(f"blind{number}" for number in (14, 15, 16, *range(19, 26))), "blind_memory10")
WRITTEN_SHARE = 0.5
# Of operands of any sizes there is one sweep: halves of its shapes, one in turn for each, stand for two.
HALVED = "blind_memory10"
_HALVES = (f"{HALVED}, half 0", f"{HALVED}, half 1")
# What a family's few rows lean on, and each by the class of its calls' digits, but for the largest calls. Memory-bound ones of
# the last class were inside 59% to 79% on both GPUs, of round draws and any, when nothing asked for more.
KINDS = ("GEMMs", "quantizers", "other memory-bound")
BY_DIGITS = tuple(f"{kind}, by digits" for kind in KINDS)
# Behind a kernel's name, the family of its largest calls; behind a library's, of all of its kernels' that have none.
LARGEST = ", largest GEMMs"
# Behind a kernel's, that of its products in few groups.
IN_FEW_GROUPS = ", few groups"
# A family counts beside so many rows that ask for what all of its kind do, a size class beside so many as its family, a kind
# beside so many that ask for no other width. With these, each family of 200 rows of an H200's and an H100's fresh sweeps is
# inside 88% to 92%, of sweeps that had no say; with twice as many FBGEMM's blocks on an H200 are 87.8%, torch's on an H100 92.8%.
ALIKE_FAMILY_ROWS, ALIKE_CLASS_ROWS = 100, 50
# Of how much largest calls ask for so large a share differs between runs, thus GPUs, and not within one: the intra-class
# correlation, by analysis of variance, of an H200's 3,153 rows of 12 runs (of an H100's 237 rows it is none).
ALIKE_IN_A_RUN = 0.033
# Rows of a kernel that a report draws.
SHOWN = 30


def family_of(kernel: str) -> str:
    """What shares a kernel's powers: itself where it is a GEMM, else all of its library that quantize, or that do not."""
    if "gemm" in KERNELS[kernel].kind:
        return kernel
    library, _, name = kernel.partition("/")
    return f"{library}/quantize_*" if name.startswith("quantize") else f"{library}, other memory-bound"


def kind_of(family: str) -> str:
    """Which of `KINDS` a family's few rows lean on: all GEMMs', all libraries' quantizers, or the others; "" of what is apart."""
    if family.endswith((LARGEST, IN_FEW_GROUPS)):
        return ""
    return KINDS[0] if family in KERNELS else KINDS[1] if family.endswith("quantize_*") else KINDS[2]


def _within(family: str) -> tuple[str, ...]:
    """What a family's few rows lean on: its kind, or of largest calls its library's of these, and all libraries' (`LARGEST`)."""
    if family.endswith(LARGEST):
        return library_of(family) + LARGEST, LARGEST
    return (kind,) if (kind := kind_of(family)) else ()


@dataclass(frozen=True)
class Fresh:
    """Fresh measurements beside intervals that none of them has widened.

    Attributes:
        family: `family_of` each row's kernel, or of its largest calls, or of its products in few groups, (rows,).
        size_class: Of its predicted time, (rows,).
        sweep: Its sweep, and its run where it is of the largest calls, or which half of `HALVED`, (rows,).
        needed: The logarithm of the power of its interval's factors at which the measurement is at an end of it, (rows,).
        heard: Whether it has a say, (rows,).
        digits: Its class among all of `BY_DIGITS`, one kind's behind the other's, -1 for none, (rows,).
    """

    family: npt.NDArray[Any]
    size_class: npt.NDArray[np.int64]
    sweep: npt.NDArray[Any]
    needed: Array
    heard: npt.NDArray[np.bool_]
    digits: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: pd.DataFrame, predicted: Array, bounds: Array) -> Fresh:
        """Rows that no fit saw, with `kernel`, sizes, `sweep`, `run`, `p50_us`, `shared` and `settled`, beside predictions.

        The sweeps `KEPT` have no say, nor have GEMMs that were timed beside other processes, nor what was timed at another's
        clock.

        Args:
            rows: As `perfmodel.measured.read_timings` has them.
            predicted: Their times, (rows,).
            bounds: Both ends of their intervals, (rows, 2).
        """
        off = np.log(rows["p50_us"].to_numpy(dtype=float) / predicted)
        end = np.where(off > 0, np.log(bounds[:, 1] / predicted), -np.log(bounds[:, 0] / predicted))
        # An interval without width on one side holds nothing there, whatever the power.
        needed = np.log(np.maximum(np.abs(off), 1e-9) / np.maximum(end, 1e-9))
        gemm = np.array(["gemm" in KERNELS[name].kind for name in rows["kernel"]], dtype=bool)
        sweep = rows["sweep"].to_numpy(dtype=object, copy=True)
        shared, settled = (rows[name].to_numpy(dtype=bool) for name in ("shared", "settled"))
        heard = ~np.isin(sweep.astype(str), KEPT) & settled & ~(gemm & shared)
        family, run = _families(rows), rows["run"].to_numpy()
        largest = np.array([name.endswith(LARGEST) for name in family], dtype=bool)
        sweep[largest] = [f"{name}, run {number}" for name, number in zip(sweep[largest], run[largest], strict=True)]
        halved = np.flatnonzero(sweep == HALVED)
        shape = rows.iloc[halved].groupby(["m", "k"], sort=False).ngroup()
        sweep[halved] = np.array(_HALVES, dtype=object)[shape % 2]
        return cls(family, size_class(predicted), sweep, needed, heard, _digits(rows))

    @cached_property
    def _rows_of(self) -> dict[str, npt.NDArray[np.bool_]]:
        """Which rows are of a family, and of what such are `_within`, by name."""
        numbers, names = pd.factorize(self.family)
        each = {name: numbers == number for number, name in enumerate(names.tolist())}
        within = {name: _within(name) for name in each}
        return each | {
            wide: np.logical_or.reduce([each[name] for name in each if wide in within[name]])
            for wide in dict.fromkeys(wide for found in within.values() for wide in found)
        }

    @cached_property
    def _written(self) -> npt.NDArray[np.bool_]:
        return np.isin(self.sweep.astype(str), (*WRITTEN, *_HALVES))

    def powers(self, without: str | None = None) -> Powers:
        """The power of each size class's interval factors, by family; of what there are no rows of it is 1, and not there.

        Args:
            without: A sweep that has no say.
        """
        heard = self.heard & (self.sweep != without)
        weight = self._weight(heard)
        families, by_digits = self._of_families(heard, weight, self.needed), np.zeros((len(BY_DIGITS), len(DIGITS) + 1))
        # Each by what the other leaves.
        for _ in range(2):
            rest = self.needed - self._of_each(families)
            for number in range(by_digits.size):
                mine = heard & (self.digits == number)
                by_digits.flat[number] = _beside(rest[mine], weight[mine], ALIKE_FAMILY_ROWS, 0.0)
            families = self._of_families(heard, weight, self.needed - _by_digits(by_digits, self.digits))
        kinds = set((self.digits[heard & (self.digits >= 0)] // by_digits.shape[1]).tolist())
        return _powers({**families, **{BY_DIGITS[kind]: by_digits[kind].tolist() for kind in sorted(kinds)}})

    def _weight(self, heard: npt.NDArray[np.bool_]) -> Array:
        """How many rows each counts for, (rows,), among those that are heard."""
        weight, written = np.ones(len(heard)), self._written
        for family in dict.fromkeys(self.family[heard & written].tolist()):
            mine = heard & self._rows_of[family]
            if usual := (mine & ~written).sum():
                share = WRITTEN_SHARE / (1 - WRITTEN_SHARE)
                weight[mine & written] = max(1.0, share * usual / (mine & written).sum())
        return weight

    def _of_families(self, heard: npt.NDArray[np.bool_], weight: Array, needed: Array) -> dict[str, list[float]]:
        """Logarithms of powers by family, a class each.

        Args:
            heard: Rows that have a say.
            weight: How many rows each counts for.
            needed: What each asks for, by a logarithm.
        """
        found: dict[str, list[float]] = {}

        def beside(mine: npt.NDArray[np.bool_], rows: int, usual: float) -> float:
            return _beside(needed[mine], weight[mine], rows, usual)

        def beside_runs(mine: npt.NDArray[np.bool_], usual: float) -> float:
            return _beside(needed[mine], weight[mine], ALIKE_CLASS_ROWS, usual, _alike(self.sweep[mine]))

        @cache
        def of_all(kind: str) -> float:
            return beside(heard & self._rows_of[kind], ALIKE_FAMILY_ROWS, 0.0)

        @cache
        def of_largest(library: str) -> float:
            usual = of_largest("") if library else 0.0
            return beside_runs(heard & self._rows_of[library + LARGEST], usual)

        # Those in few groups come last: theirs is one power more.
        families = sorted(dict.fromkeys(self.family[heard].tolist()), key=lambda name: name.endswith(IN_FEW_GROUPS))
        for family in families:
            mine = heard & self._rows_of[family]
            if family.endswith(IN_FEW_GROUPS):
                usual_of = np.array(found.get(family.removesuffix(IN_FEW_GROUPS), [0.0] * CLASSES))
                rest = needed[mine] - usual_of[self.size_class[mine]]
                own = (usual_of + _beside(rest, weight[mine], ALIKE_FAMILY_ROWS, 0.0)).tolist()
            elif family.endswith(LARGEST):
                # Beside its library's, those beside all, and of any size alike: few are of another class than the last.
                found[library_of(family) + LARGEST] = [of_largest(library_of(family))] * CLASSES
                own = [beside_runs(mine, of_largest(library_of(family)))] * CLASSES
            else:
                usual = beside(mine, ALIKE_FAMILY_ROWS, of_all(kind_of(family)))
                own = [beside(mine & (self.size_class == c), ALIKE_CLASS_ROWS, usual) for c in range(CLASSES)]
            found[family] = own
        return found

    def _of_each(self, families: Mapping[str, Sequence[float]]) -> Array:
        """The logarithm of the power of each row's family and class, (rows,); 0 of what has none."""
        return np.log(_power(self.family, self.size_class, self.digits, _powers(families)))

    def raised(self, predicted: Array, bounds: Array) -> Array:
        """Each row's interval under the powers that its sweep had no say in, (rows, 2); arguments as of `of`."""
        result = bounds.copy()
        for sweep in dict.fromkeys(self.sweep.tolist()):
            mine = self.sweep == sweep
            power = _power(self.family[mine], self.size_class[mine], self.digits[mine], self.powers(sweep))
            result[mine] = _raised(predicted[mine], bounds[mine], power)
        return result


def _families(rows: pd.DataFrame) -> npt.NDArray[Any]:
    families = np.empty(len(rows), dtype=object)
    for kernel, index in rows.groupby("kernel").indices.items():
        name, sizes = str(kernel), columns_of(rows.iloc[index])
        families[index] = family_of(name)
        families[index[in_few_groups(name, sizes)]] = family_of(name) + IN_FEW_GROUPS
        if "gemm" in KERNELS[name].kind:
            families[index[are_largest(sizes)]] = name + LARGEST
    return families


def _digits(rows: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Each row's class among all of `BY_DIGITS`, one kind's behind the other's, (rows,): -1 of the largest calls."""
    sizes = columns_of(rows)
    kinds = {name: _kind_number(name) for name in rows["kernel"].unique()}
    kind = rows["kernel"].map(kinds).to_numpy(dtype=np.int64)
    return np.where(are_largest(sizes), -1, digits(sizes) + kind * (len(DIGITS) + 1))


def _kind_number(kernel: str) -> int:
    """Where a kernel's kind is among `KINDS`, and so `BY_DIGITS`."""
    return KINDS.index(kind_of(family_of(kernel)))


def _by_digits(powers: Array, classes: npt.NDArray[np.int64]) -> Array:
    """The logarithm of each row's, (rows,), from those of `BY_DIGITS`, (kinds, classes): 0 of what is none of them."""
    return np.where(classes >= 0, powers.flat[classes], 0.0)


def _powers(logarithms: Mapping[str, Sequence[float]]) -> Powers:
    return {family: [float(power) for power in np.exp(own)] for family, own in logarithms.items()}


def _power(family: npt.NDArray[Any], classes: npt.NDArray[np.int64], by_digits: npt.NDArray[np.int64], powers: Powers) -> Array:
    """Of each row, (rows,)."""
    numbers, names = pd.factorize(family)
    of_each = (_of_family(powers, name) or [1.0] * CLASSES for name in names.tolist())
    own = np.array(list(of_each)).reshape(-1, CLASSES)[numbers, classes]
    return own * np.exp(_by_digits(np.log([powers.get(name, [1.0] * (len(DIGITS) + 1)) for name in BY_DIGITS]), by_digits))


def _of_family(powers: Powers, family: str) -> Sequence[float] | None:
    """A family's, or of largest calls that have none their library's; None where there is none."""
    if family in powers or not family.endswith(LARGEST):
        return powers.get(family)
    return powers.get(library_of(family) + LARGEST)


def _raised(predicted: Array, bounds: Array, power: Array) -> Array:
    """Ends of intervals with their factors on the predicted times to a power, (rows, 2)."""
    return np.asarray(predicted[:, None] * (bounds / predicted[:, None]) ** power[:, None])


def _alike(runs: npt.NDArray[Any]) -> float:
    """Of how many rows, of these runs, each says as much as one that is of a run of its own: the design effect of clusters."""
    sizes = np.unique(runs.astype(str), return_counts=True)[1]
    return 1 + ALIKE_IN_A_RUN * float((sizes**2).sum() / sizes.sum() - 1) if len(sizes) else 1.0


def _beside(needed: Array, weight: Array, rows: int, usual: float, alike: float = 1.0) -> float:
    """The power, as a logarithm, that holds `COVERAGE` of such rows, beside so many rows that ask for what is usual.

    Rows that count for several are as sure as so many alike: the square of their sum over the sum of their squares. How far
    beyond these rows others may be is by as many as say something of their own, one in `alike`.
    """
    if not len(needed):
        return usual
    number = weight.sum() ** 2 / (weight**2).sum()
    rank = min(1.0, COVERAGE * (1 + alike / number))
    return float((number * _quantile(needed, weight, rank) + rows * usual) / (number + rows))


def _quantile(values: Array, weight: Array, rank: float) -> float:
    """As `numpy.quantile`, between neighbours in proportion, of values that count for as many as their weight."""
    order = np.argsort(values, kind="stable")
    values, weight = values[order], weight[order]
    middle = np.cumsum(weight) - weight / 2
    first, last = middle[[0, -1]]
    return float(np.interp(first + rank * (last - first), middle, values))


def raise_bounds(rows: pd.DataFrame, predicted: Array, bounds: Array, powers: Powers) -> Array:
    """Intervals of rows with `kernel` as they are under these powers, (rows, 2); arguments as of `Fresh.of`."""
    return _raised(predicted, bounds, _power(_families(rows), size_class(predicted), _digits(rows), powers))


def raise_factors(entries: Mapping[str, Any], powers: Powers) -> dict[str, Any]:
    """A manifest's kernels with the interval factors of each size class raised, and the powers by which: `interval_powers`.

    `wider_where_largest` is by how much further they are of the largest calls, which nearly all are of the last size class,
    `wider_in_few_groups` likewise of products in few groups, `wider_by_digits` by the class of a call's digits.

    Args:
        entries: By kernel.
        powers: Of `Fresh.powers`.
    """
    result = {}
    for kernel, entry in entries.items():
        own = np.array(powers.get(family_of(kernel), [1.0] * CLASSES))
        factors = np.asarray(entry["interval_factors"]) ** own[:, None]
        result[kernel] = {**entry, "interval_factors": factors.tolist(), "interval_powers": own.tolist()}
        if "gemm" in KERNELS[kernel].kind and (largest := _of_family(powers, kernel + LARGEST)):
            result[kernel]["wider_where_largest"] = float(largest[-1] / own[-1])
        if few := powers.get(family_of(kernel) + IN_FEW_GROUPS):
            result[kernel]["wider_in_few_groups"] = float(few[-1] / own[-1])
        if by_digits := powers.get(BY_DIGITS[_kind_number(kernel)]):
            result[kernel]["wider_by_digits"] = list(by_digits)
    return result


def lower_factors(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel of a manifest as it was before `raise_factors`; one that was never raised as it is."""
    own = 1 / np.array(entry.get("interval_powers", [1.0] * CLASSES))
    lowered = {**entry, "interval_factors": (np.asarray(entry["interval_factors"]) ** own[:, None]).tolist()}
    more = ("wider_where_largest", "wider_in_few_groups", "wider_by_digits")
    return {name: value for name, value in lowered.items() if name not in more}


def shown(rows: pd.DataFrame, predicted: Array) -> dict[str, dict[str, list[float]]]:
    """Of each kernel's settled rows up to `SHOWN`, drawn by a seed: times measured and predicted in microseconds, 4 digits."""
    found = {}
    settled = rows["settled"].to_numpy(dtype=bool)
    for kernel, index in rows.groupby("kernel").indices.items():
        mine = np.asarray(index)[settled[index]]
        drawn = np.sort(np.random.default_rng(0).permutation(len(mine))[:SHOWN])
        times = {"measured_us": rows["p50_us"].to_numpy(dtype=float), "predicted_us": predicted}
        found[str(kernel)] = {name: [float(f"{us:.4g}") for us in of[mine[drawn]]] for name, of in times.items()}
    return found


def of_model(model: PerfModel, rows: pd.DataFrame) -> tuple[Array, Array, Fresh]:
    """Of fresh rows, times by a shipped model, ends of the intervals before any fresh sweep had a say, and what rows ask for."""
    predicted, bounds = model.predict(rows)["time_us"].to_numpy(), np.full((len(rows), 2), np.nan)
    for kernel, index in rows.groupby("kernel").indices.items():
        sizes, name = columns_of(rows.iloc[index]), str(kernel)
        entry = lower_factors(model.manifest["kernels"][name])
        power = wider(name, sizes, entry)
        bounds[index] = bounds_of(predicted[index], entry, model.seen(name, sizes).doubt, power)
    return predicted, bounds, Fresh.of(rows, predicted, bounds)

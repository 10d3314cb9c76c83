"""Refine the time model from what one machine measured, with intervals that say how good that is."""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.correction import (
    Array,
    Local,
    Sizes,
    choose_local,
    coordinates,
    fit_local,
    fit_machine,
    machine_features,
    memory_share,
)  # fmt: skip
from perfmodel.judge import SHAPE, accuracy_of
from perfmodel.kernels import KERNELS
from perfmodel.model import REFINEMENT as KIND
from perfmodel.model import SIZE_CLASSES_US, PerfModel, baseline_us, check_version, columns_of, read_json, size_class

SCHEMA_VERSION = 2
FOLDS = 5
COVERAGE = 0.90
NORMAL_90 = 1.6449
# A kernel that the base has no trees for needs this many measured shapes.
LEAST_ROWS_NEW = 60
# Fewer rows of a kernel take their kind's choice of parts and their kind's interval.
LEAST_ROWS = 40
LEAST_ROWS_LOCAL = 8
# How many measured shapes the base's own interval outweighs.
PRIOR_SHAPES = 40
# At 200 equal steps of probability.
_NORMAL = np.array([NormalDist().inv_cdf((step + 0.5) / 200) for step in range(200)])
# How far a second measurement of a shape is off (90th percentile) where the base does not know.
REPEAT_P90 = 0.05
METHODS = ("none", "machine", "local")


def group_of(kernel: str, known: bool) -> str:
    """Kernels whose machine part is estimated together; one that the base does not know stands alone."""
    spec = KERNELS[kernel]
    kind = f"fp8_{spec.kind}" if spec.is_fp8 else spec.kind
    return kind if known else f"new {kernel}"


@dataclass(frozen=True)
class Correction:
    """What is added to the logarithm of one kernel's predicted times.

    Attributes:
        method: `none`, `machine`, or `local` (machine and local part).
        coefficients: Of `machine_features`, (4,).
        covariance: How unsure those are, (4, 4).
        local: The local part; None but for `local`.
        spread: Scale of the residuals where the base has no interval (a kernel unknown to it); 0 elsewhere.
    """

    method: str
    coefficients: Array
    covariance: Array
    local: Local | None = None
    spread: float = 0.0

    def predict(self, features: Array, at: Array, base_scale: Array) -> tuple[Array, Array]:
        """Correction of the logarithm and the scale of its error, (rows,) each."""
        scale = np.maximum(base_scale, self.spread)
        if self.method == "none":
            return np.zeros(len(features)), scale
        value = features @ self.coefficients
        scale = np.hypot(scale, np.sqrt(np.einsum("ri,ij,rj->r", features, self.covariance, features)))
        if self.local is None:
            return value, scale
        mean, deviation, unknown = self.local.predict(at)
        # Where the process knows nothing, as much as the base is unsure of remains; and few rows do not know where that is.
        remains = unknown if len(self.local.residual) >= LEAST_ROWS else 1.0
        return value + mean, np.maximum(deviation, remains * scale)


def _prepare(base: PerfModel, rows: pd.DataFrame) -> pd.DataFrame:
    """One row per kernel and shape, with what the base predicts; rows of kind `linear` have no model and are left out."""
    missing = {"kernel", "m", "n", "k", "p50_us"} - set(rows.columns)
    if missing:
        raise ValueError(f"the measured rows lack the columns {sorted(missing)}; refine needs kernel, m, n, k, p50_us")
    rows = rows.assign(**dict(zip(SHAPE, columns_of(rows), strict=True)))
    unknown = sorted(set(rows["kernel"].astype(str)) - set(KERNELS))
    if unknown:
        raise ValueError(f"kernel {unknown[0]!r} is not a kernel; known: {', '.join(KERNELS)}")
    rows = rows[[KERNELS[name].kind != "linear" for name in rows["kernel"]]]
    times = rows["p50_us"].to_numpy(dtype=float)
    if not len(rows) or not (np.isfinite(times) & (times > 0)).all():
        raise ValueError("p50_us must be positive and finite in every measured row, and there must be a row")
    if not np.isfinite(rows[SHAPE].to_numpy()).all() or (rows[SHAPE].to_numpy() < 1).any():
        raise ValueError("m, n, k and groups must be at least 1 in every measured row")
    for name in ("p10_us", "p90_us"):
        rows = rows.assign(**{name: rows[name] if name in rows else rows["p50_us"]})
    columns = ["p10_us", "p50_us", "p90_us"]
    rows = rows.assign(kernel=rows["kernel"].astype(str)).groupby(["kernel", *SHAPE], as_index=False)[columns].median()
    for kernel, number in rows["kernel"].value_counts().items():
        if kernel not in base.manifest["kernels"] and number < LEAST_ROWS_NEW:
            raise ValueError(
                f"{kernel} is new to the time model of {base.hardware.name} and has {number} measured shapes; "
                f"measure at least {LEAST_ROWS_NEW}, or leave its rows out"
            )
    return _with_base(base, rows).assign(target=lambda frame: np.log(frame["p50_us"] / frame["base_us"]))


def _with_base(base: PerfModel, rows: pd.DataFrame) -> pd.DataFrame:
    """`rows` with the base's time (roofline plus launch where it has no trees), the log scale of its interval and its group."""
    known = rows["kernel"].isin(list(base.manifest["kernels"])).to_numpy(dtype=bool)
    values = np.zeros((len(rows), 3))
    if known.any():
        values[known] = base.predict(rows[known]).to_numpy()
    for kernel, index in rows[~known].reset_index(drop=True).groupby("kernel").indices.items():
        new = np.flatnonzero(~known)[index]
        values[new] = baseline_us(str(kernel), *columns_of(rows.iloc[new]), base.hardware)[:, None]
    scale = np.log(values[:, 2] / values[:, 1]) / (2 * NORMAL_90)
    groups = [group_of(name, bool(is_known)) for name, is_known in zip(rows["kernel"], known, strict=True)]
    return rows.assign(base_us=values[:, 0], low_us=values[:, 1], high_us=values[:, 2], scale=scale, group=groups)


def _inputs(kernel: str, base_us: Array, sizes: Sizes, base: PerfModel) -> tuple[Array, Array]:
    return machine_features(base_us, memory_share(kernel, sizes, base.hardware)), coordinates(sizes)


def _features(rows: pd.DataFrame, base: PerfModel) -> tuple[Array, Array]:
    features, at = np.empty((len(rows), 4)), np.empty((len(rows), 7))
    for kernel, index in rows.groupby("kernel").indices.items():
        part = rows.iloc[index]
        features[index], at[index] = _inputs(str(kernel), part["base_us"].to_numpy(), columns_of(part), base)
    return features, at


def shape_folds(rows: pd.DataFrame, seed: int = 0) -> np.ndarray:
    """Fold of each row; all kernels of a shape share theirs."""
    shape = rows.groupby(SHAPE).ngroup().to_numpy()
    return np.random.default_rng(seed).permutation(shape.max() + 1)[shape] % FOLDS


def _parts(
    rows: pd.DataFrame, features: Array, at: Array, parameters: dict[str, tuple[float, float, float]] | None
) -> tuple[dict[str, tuple[Array, Array]], dict[str, Local]]:
    """Machine part per kernel (and per group, for its kernels without rows), and local parts where rows suffice."""
    machine: dict[str, tuple[Array, Array]] = {}
    local: dict[str, Local] = {}
    names, target = rows["kernel"].to_numpy(dtype=object), rows["target"].to_numpy()
    for group, index in rows.groupby("group").indices.items():
        fitted = fit_machine(names[index], features[index], target[index])
        # Kernels err alike on a shape: rows of the same shape are no independent witnesses.
        per_shape = len(index) / rows.iloc[index].groupby(SHAPE).ngroups
        fitted = {name: (value, per_shape * covariance) for name, (value, covariance) in fitted.items()}
        machine[str(group)] = fitted.pop("")
        machine |= fitted
    for kernel, index in rows.groupby("kernel").indices.items():
        if len(index) >= LEAST_ROWS_LOCAL:
            left = target[index] - features[index] @ machine[str(kernel)][0]
            chosen = parameters[str(kernel)] if parameters else choose_local(at[index], left)
            local[str(kernel)] = fit_local(at[index], left, chosen)
    return machine, local


def _least(errors: Array) -> int:
    """Index of the fewest of `METHODS` that nothing beats by more than a standard error of the held-out difference."""
    judged = errors[np.isfinite(errors).all(axis=1)]
    chosen = 0
    for more in range(1, errors.shape[1]):
        gain = judged[:, chosen] - judged[:, more]
        if len(gain) > 1 and gain.mean() > gain.std(ddof=1) / np.sqrt(len(gain)):
            chosen = more
    return chosen


def _fit(base: PerfModel, rows: pd.DataFrame, seed: int) -> dict[str, Correction]:
    """Corrections per kernel and group; how many parts each has is chosen by cross-validation inside `rows`."""
    features, at = _features(rows, base)
    machine, local = _parts(rows, features, at, None)
    parameters = {kernel: (part.length, part.amplitude, part.noise) for kernel, part in local.items()}
    names, target = rows["kernel"].to_numpy(dtype=object), rows["target"].to_numpy()
    errors = np.full((len(rows), len(METHODS)), np.nan)
    fold = shape_folds(rows, seed)
    for number in range(FOLDS):
        train, test = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        if not len(train) or not len(test):
            continue
        coefficients, processes = _parts(rows.iloc[train], features[train], at[train], parameters)
        for name in set(names[test]):
            some = test[names[test] == name]
            group = str(rows["group"].iloc[some[0]])
            known = coefficients.get(name, coefficients.get(group))
            value = features[some] @ known[0] if known else np.zeros(len(some))
            more = processes[name].predict(at[some])[0] if name in processes else 0.0
            predictions = np.stack([np.zeros(len(some)), value, value + more], axis=1)
            errors[some] = np.abs(predictions - target[some, None])
    result: dict[str, Correction] = {}
    by_group = rows.groupby("group").indices
    for key, index in rows.groupby("kernel").indices.items():
        kernel = str(key)
        group = str(rows["group"].iloc[index[0]])
        judged = errors[index if len(index) >= LEAST_ROWS else by_group[group]]
        method = METHODS[_least(judged)]
        if method == "local" and kernel not in local:
            method = "machine"
        unknown = kernel not in base.manifest["kernels"]
        left = target[index] - features[index] @ machine[kernel][0]
        spread = float(np.sqrt(np.mean(left**2))) if unknown else 0.0
        process = local[kernel] if method == "local" else None
        result[kernel] = Correction(method, *machine[kernel], process, spread)
    for name, index in by_group.items():
        # One kernel says little about another: a kind's part is for the others only where two or more agree on it.
        several = rows["kernel"].iloc[index].nunique() > 1
        method = "machine" if several and _least(errors[index, :2]) else "none"
        result[str(name)] = Correction(method, *machine[str(name)])
    return result


def _apply(corrections: dict[str, Correction], base: PerfModel, rows: pd.DataFrame) -> tuple[Array, Array]:
    """Log correction and scale of each row (of a frame that went through `_with_base`)."""
    value, scale = np.zeros(len(rows)), rows["scale"].to_numpy().copy()
    for kernel, index in rows.groupby("kernel").indices.items():
        part = rows.iloc[index]
        correction = corrections.get(str(kernel), corrections.get(str(part["group"].iloc[0])))
        if correction is not None:
            features, at = _inputs(str(kernel), part["base_us"].to_numpy(), columns_of(part), base)
            value[index], scale[index] = correction.predict(features, at, scale[index])
    return value, scale


def interval_bounds(score: Array, shapes: int, expected: tuple[float, float] = (-NORMAL_90, NORMAL_90)) -> tuple[float, float]:
    """Bounds on (log measured - log predicted) / scale that hold 90%; they always include 0.

    Quantiles of the held-out scores together with what was expected of them, two half normals with those bounds: the
    latter weigh as much as `PRIOR_SHAPES` shapes, so that a few shapes neither widen nor narrow what many calibrated.

    Args:
        score: Held-out scores, (rows,).
        shapes: Distinct shapes among them: kernels err alike on a shape, so that rows count together as this many.
        expected: Bounds of 90% before any score was seen; the base's own by default.
    """
    prior = np.where(_NORMAL < 0, -expected[0], expected[1]) / NORMAL_90 * _NORMAL
    values = np.concatenate([prior, score])
    weights = np.repeat([PRIOR_SHAPES / len(prior), shapes / max(len(score), 1)], [len(prior), len(score)])
    order = np.argsort(values)
    rank = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    tail = (1 - COVERAGE) / 2
    low, high = np.interp([tail, 1 - tail], rank, values[order])
    return min(float(low), 0.0), max(float(high), 0.0)


def _bounds(rows: pd.DataFrame, score: Array, predicted_us: Array) -> dict[str, list[tuple[float, float]]]:
    """Bounds per kernel and group, one pair per size class: each expects what is wider around it, from class to all."""
    classes, groups, names = size_class(predicted_us), rows["group"].to_numpy(), rows["kernel"].to_numpy()
    shape = rows.groupby(SHAPE).ngroup().to_numpy()

    def bounds(pool: np.ndarray | slice, *expected: tuple[float, float]) -> tuple[float, float]:
        return interval_bounds(score[pool], len(np.unique(shape[pool])), *expected)

    def by_class(pool: np.ndarray, whole: tuple[float, float]) -> list[tuple[float, float]]:
        return [bounds(pool & (classes == number), whole) for number in range(len(SIZE_CLASSES_US) + 1)]

    everything = bounds(slice(None))
    result = {"": [everything] * (len(SIZE_CLASSES_US) + 1)}
    for group in np.unique(groups):
        of_group = bounds(groups == group, everything)
        result[str(group)] = by_class(groups == group, of_group)
        for name in np.unique(names[groups == group]):
            result[str(name)] = by_class(names == name, bounds(names == name, of_group))
    return result


def _interval(time_us: Array, scale: Array, bounds: list[tuple[float, float]]) -> tuple[Array, Array]:
    pair = np.asarray(bounds)[size_class(time_us)]
    return time_us * np.exp(pair[:, 0] * scale), time_us * np.exp(pair[:, 1] * scale)


@dataclass(frozen=True)
class Refinement:
    """A correction of one machine's kernel times.

    Attributes:
        base: The time model that it corrects.
        rows: Measured rows, one per kernel and shape: kernel, m, n, k, groups, p10_us, p50_us, p90_us.
        corrections: By kernel, and by kind of kernel for kernels without rows.
        bounds: Interval bounds by kernel or kind and size class, in units of the scale.
        repeat: 90th percentile of the difference between two measurements of one shape.
        accuracy_before: Of the base on the rows: `all`, `kernels`, `kinds` (n, mape, median, p90, worst, coverage) and
            `worst` (the ten worst rows). Kernels that the base does not know are not in it.
        accuracy_after: The same of the refined model, each shape judged by a model that saw none of its rows.
        held_out: Those predictions: time_us, low_us, high_us for each of `rows`, in its order; None when loaded from a folder.
    """

    base: PerfModel
    rows: pd.DataFrame
    corrections: dict[str, Correction]
    bounds: dict[str, list[tuple[float, float]]]
    repeat: float
    accuracy_before: dict[str, Any]
    accuracy_after: dict[str, Any]
    held_out: pd.DataFrame | None = None

    @cached_property
    def model(self) -> RefinedModel:
        """The time model with this refinement in it."""
        return RefinedModel.of(self)

    @cached_property
    def _files(self) -> tuple[dict[str, Any], bytes]:
        """Manifest without its fingerprint, and the arrays' bytes."""
        arrays: dict[str, np.ndarray] = {}
        corrections: dict[str, Any] = {}
        for number, (name, correction) in enumerate(sorted(self.corrections.items())):
            corrections[name] = {
                "method": correction.method, "coefficients": correction.coefficients.tolist(),
                "covariance": correction.covariance.tolist(), "spread": correction.spread,
            }  # fmt: skip
            if (local := correction.local) is not None:
                corrections[name] |= {
                    "local": f"local{number}", "length": local.length, "amplitude": local.amplitude, "noise": local.noise,
                }  # fmt: skip
                arrays[f"local{number}_at"], arrays[f"local{number}_residual"] = local.at, local.residual
                arrays[f"local{number}_spread"] = local.spread
        kernels = sorted(set(self.rows["kernel"]))
        arrays["kernel"] = np.searchsorted(kernels, self.rows["kernel"].to_numpy(dtype=str))
        for column in (*SHAPE, "p10_us", "p50_us", "p90_us"):
            arrays[column] = self.rows[column].to_numpy(dtype=np.float64)
        stream = io.BytesIO()
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
        data = stream.getvalue()
        digest = hashlib.sha256(data).hexdigest()
        document = {
            "kind": KIND, "schema_version": SCHEMA_VERSION, "hardware": self.base.hardware.name,
            "base_fingerprint": self.base.fingerprint, "arrays": f"rows-{digest[:16]}.npz", "arrays_sha256": digest,
            "kernels": kernels, "corrections": corrections, "bounds": self.bounds, "repeat": self.repeat,
            "accuracy_before": self.accuracy_before, "accuracy_after": self.accuracy_after,
        }  # fmt: skip
        return document, data

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the base and of everything that was learned."""
        return hashlib.sha256(json.dumps(self._files[0], sort_keys=True).encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write `folder/perfmodel/`; whoever reads meanwhile, or finds it after a crash, sees the old or the new one whole.

        Args:
            folder: The calibration folder, as `perfmodel.load(..., calibration=folder)` takes it.
        """
        document, data = self._files
        target = Path(folder) / "perfmodel"
        target.mkdir(parents=True, exist_ok=True)
        manifest = json.dumps({**document, "fingerprint": self.fingerprint}, indent=1) + "\n"
        # The manifest comes last: it names the arrays by their content.
        for name, content in ((document["arrays"], data), ("manifest.json", manifest.encode())):
            part = target / f".{name}.{os.getpid()}"
            part.write_bytes(content)
            os.replace(part, target / name)
        for old in target.glob("rows-*.npz"):
            if old.name != document["arrays"]:
                old.unlink()

    @classmethod
    def load(cls, folder: Path, base: PerfModel) -> Refinement:
        """Read what `save` wrote.

        Raises:
            ValueError: no refinement, of another schema, hardware or base, or damaged; one line that names the file.
        """
        path = Path(folder) / "perfmodel" / "manifest.json"
        document = read_json(path)
        if document.get("kind") != KIND:
            raise ValueError(f"{path} is no refinement of the time model; make one with: loka-sim validate --gpu --out DIR")
        check_version(path, document, SCHEMA_VERSION)
        if document["hardware"] != base.hardware.name:
            raise ValueError(f"{path} was made for {document['hardware']}, not {base.hardware.name}")
        if document["base_fingerprint"] != base.fingerprint:
            raise ValueError(
                f"{path} corrects the time model {document['base_fingerprint']}, and this is {base.fingerprint}; "
                "measure again with: loka-sim validate --gpu"
            )
        arrays_path = path.parent / document["arrays"]
        if not arrays_path.is_file():
            raise ValueError(f"{arrays_path} is missing; copy the calibration folder whole")
        data = arrays_path.read_bytes()
        stated = document.pop("fingerprint", None)
        intact = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16] == stated
        if not intact or hashlib.sha256(data).hexdigest() != document["arrays_sha256"]:
            raise ValueError(f"{arrays_path if intact else path} is truncated or changed; copy the calibration folder again")
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = dict(archive)
        rows = pd.DataFrame({"kernel": np.asarray(document["kernels"], dtype=object)[arrays["kernel"]]})
        for column in (*SHAPE, "p10_us", "p50_us", "p90_us"):
            rows[column] = arrays[column]
        corrections = {}
        for name, entry in document["corrections"].items():
            local = None
            if key := entry.get("local"):
                parts = (arrays[f"{key}_{what}"] for what in ("at", "residual", "spread"))
                local = Local(entry["length"], entry["amplitude"], entry["noise"], *parts)
            coefficients, covariance = (np.asarray(entry[what]) for what in ("coefficients", "covariance"))
            corrections[name] = Correction(entry["method"], coefficients, covariance, local, entry["spread"])
        return cls(
            base, rows, corrections, document["bounds"], document["repeat"],
            document["accuracy_before"], document["accuracy_after"],
        )  # fmt: skip


@dataclass(frozen=True)
class RefinedModel(PerfModel):
    """A time model with a machine's refinement in it: same use, another fingerprint, other times and intervals."""

    refinement: Refinement | None = None

    @classmethod
    def of(cls, refinement: Refinement) -> RefinedModel:
        """The refined model; its manifest has the new kernels too, and what the refinement is under `refinement`."""
        base = refinement.base
        kernels = dict(base.manifest["kernels"])
        for name in sorted(set(refinement.rows["kernel"]) - set(kernels)):
            sizes = dict(zip(SHAPE, columns_of(refinement.rows[refinement.rows["kernel"] == name]), strict=True))
            sizes["product"] = sizes["m"] * sizes["n"] * sizes["k"] * sizes["groups"]
            after = refinement.accuracy_after["kernels"][name]
            ranges = {key: [float(values.min()), float(values.max())] for key, values in sizes.items()}
            kernels[name] = {"held_out": after, "range": ranges}
        summary = {
            "fingerprint": refinement.fingerprint, "base_fingerprint": base.fingerprint, "rows": len(refinement.rows),
            "accuracy_before": refinement.accuracy_before, "accuracy_after": refinement.accuracy_after,
        }  # fmt: skip
        return cls(base.hardware, base.folder, {**base.manifest, "kernels": kernels, "refinement": summary}, refinement)

    @cached_property
    def _measured(self) -> dict[str, tuple[pd.MultiIndex, Array]]:
        """Per kernel: measured shapes, and p50, low and high of another measurement of them."""
        assert self.refinement is not None
        result = {}
        for kernel, part in self.refinement.rows.groupby("kernel"):
            p10, p50, p90 = (part[name].to_numpy() for name in ("p10_us", "p50_us", "p90_us"))
            again = 1 + self.refinement.repeat
            low, high = np.minimum(p10, p50 / again), np.maximum(p90, p50 * again)
            result[str(kernel)] = (pd.MultiIndex.from_arrays(columns_of(part)), np.stack([p50, low, high], axis=1))
        return result

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Times of kernel calls, as `PerfModel.predict`; a measured shape has its measured time."""
        refinement = self.refinement
        assert refinement is not None
        new = set(self.manifest["kernels"]) - set(refinement.base.manifest["kernels"])
        if not len(frame) or not {"kernel", "m", "n", "k"} <= set(frame.columns):
            return super().predict(frame)
        old = frame[~frame["kernel"].isin(new)] if new else frame
        unknown = [name for name in old["kernel"].unique() if name not in self.manifest["kernels"]]
        if unknown or min(sizes.min() for sizes in columns_of(frame)) < 1:
            return super().predict(frame)  # which names what is wrong
        rows = _with_base(refinement.base, frame.reset_index(drop=True).assign(kernel=lambda f: f["kernel"].astype(str)))
        value, scale = _apply(refinement.corrections, refinement.base, rows)
        time = rows["base_us"].to_numpy() * np.exp(value)
        result = np.empty((len(rows), 3))
        result[:] = rows[["base_us", "low_us", "high_us"]].to_numpy()
        for kernel, index in rows.groupby("kernel").indices.items():
            group = str(rows["group"].iloc[index[0]])
            if str(kernel) not in refinement.bounds and group not in refinement.bounds:
                continue  # nothing of its kind was measured: the base's word stands
            bounds = refinement.bounds.get(str(kernel)) or refinement.bounds[group]
            result[index] = np.stack([time[index], *_interval(time[index], scale[index], bounds)], axis=1)
            if str(kernel) in self._measured:
                shapes, values = self._measured[str(kernel)]
                found = shapes.get_indexer(pd.MultiIndex.from_arrays(columns_of(rows.iloc[index])))
                result[index[found >= 0]] = values[found[found >= 0]]
        return pd.DataFrame(result, columns=["time_us", "low_us", "high_us"], index=frame.index)

    def in_range(self, frame: pd.DataFrame) -> pd.Series:
        """Whether each call lies inside the sizes that the base was fitted to, or was measured here."""
        inside = super().in_range(frame)
        values = inside.to_numpy().copy()
        for kernel, index in frame.reset_index(drop=True).groupby("kernel", observed=True).indices.items():
            if str(kernel) in self._measured:
                shapes = pd.MultiIndex.from_arrays(columns_of(frame.iloc[index]))
                values[index] |= self._measured[str(kernel)][0].get_indexer(shapes) >= 0
        return pd.Series(values, index=frame.index)


def refine(base: PerfModel, rows: pd.DataFrame, seed: int = 0) -> Refinement:
    """Correct a time model by what one machine measured in one run.

    Everything, the choice of parts included, is cross-validated by whole shapes: those residuals make the accuracy and
    the intervals.

    Args:
        base: The time model to correct.
        rows: Columns kernel, m, n, k, p50_us; groups (default 1), p10_us and p90_us where known. Others are ignored, and
            so are rows of kernels of kind `linear`.
        seed: Seeds the folds.

    Raises:
        ValueError: a column is missing, a value is impossible, or a kernel new to the base has fewer than
            `LEAST_ROWS_NEW` shapes.
    """
    prepared = _prepare(base, rows)
    fold = shape_folds(prepared, seed)
    value, scale = np.zeros(len(prepared)), prepared["scale"].to_numpy().copy()
    for number in range(FOLDS):
        test = fold == number
        if test.any() and not test.all():
            value[test], scale[test] = _apply(_fit(base, prepared[~test], seed + 1), base, prepared[test])
    corrections = _fit(base, prepared, seed + 1)
    base_us, measured = prepared["base_us"].to_numpy(), prepared["p50_us"].to_numpy()
    time = base_us * np.exp(value)
    score = np.log(measured / time) / np.maximum(scale, 1e-6)
    bounds = _bounds(prepared, score, time)
    # Coverage is judged with bounds that the judged fold had no part in.
    low, high = time.copy(), time.copy()
    for number in range(FOLDS):
        test = fold == number
        if test.any() and not test.all():
            others = _bounds(prepared[~test], score[~test], time[~test])
            for kernel, index in prepared.groupby("kernel").indices.items():
                some = index[test[index]]
                chosen = others.get(str(kernel)) or others.get(str(prepared["group"].iloc[index[0]])) or others[""]
                low[some], high[some] = _interval(time[some], scale[some], chosen)
    known = prepared["kernel"].isin(list(base.manifest["kernels"])).to_numpy(dtype=bool)
    before = prepared[known]
    repeat = float((base.manifest.get("repeat_on_another_machine") or {}).get("p90") or REPEAT_P90)
    return Refinement(
        base, prepared[["kernel", *SHAPE, "p10_us", "p50_us", "p90_us"]].reset_index(drop=True), corrections, bounds, repeat,
        accuracy_of(before, *(before[name].to_numpy() for name in ("base_us", "low_us", "high_us"))),
        accuracy_of(prepared, time, low, high), pd.DataFrame({"time_us": time, "low_us": low, "high_us": high}),
    )  # fmt: skip

"""A time model with what one machine measured in it: the corrections, the file that keeps them, the model that uses them."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.calls import columns_of
from perfmodel.correction import Array, Local, Sizes, coordinates, machine_features, memory_share
from perfmodel.judge import SHAPE
from perfmodel.kernels import KERNELS, of_kernel
from perfmodel.model import PerfModel
from perfmodel.prediction import baseline_us, size_class
from perfmodel.saved import REFINEMENT as KIND
from perfmodel.saved import check_version, read_json, write_whole

SCHEMA_VERSION = 3
NORMAL_90 = 1.6449
# A local part of fewer rows does not know where it knows nothing.
LEAST_ROWS = 40
# torch.compile chooses the kernels of these kinds anew in every process, now and then one that takes 1.25 to 3 times as long:
# 90th percentile of how far a second measurement, in another process or on another H200, is off the first (815, 137 and 171
# pairs of validations and of the sweep `zoo`: python benchmarks/validations.py --again).
COMPILED_REPEAT = {"quantize": 0.25, "layout": 0.15, "pointwise": 0.13}
# What the group of a kernel that the base does not know begins with.
NEW = "new "


def group_of(kernel: str, known: bool) -> str:
    """Kernels whose machine part is estimated together; one that the base does not know stands alone."""
    spec = KERNELS[kernel]
    kind = f"fp8_{spec.kind}" if spec.is_fp8 else spec.kind
    return kind if known else f"{NEW}{kernel}"


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


def with_base(base: PerfModel, rows: pd.DataFrame, together: bool = False) -> pd.DataFrame:
    """`rows` with the base's time (roofline plus launch where it has no trees), its log interval's scale and skew, and the group.

    The skew is 1 where all of the interval lies above the time, -1 where below, 0 where it is as wide on either side. `moved` is
    by how much more the base tells where kernels are asked `together` (`PerfModel.predict_together`), 1 where they are not.
    """
    known = np.array([base.knows(name) for name in rows["kernel"]], dtype=bool)
    values, moved = np.zeros((len(rows), 3)), np.ones(len(rows))
    if known.any() and together:
        values[known], told = base.alone_and_together(rows[known])
        moved[known] = told[:, 0] / values[known, 0]
    elif known.any():
        values[known] = base.predict(rows[known]).to_numpy()
    for kernel, index in rows[~known].reset_index(drop=True).groupby("kernel").indices.items():
        new = np.flatnonzero(~known)[index]
        values[new] = baseline_us(str(kernel), *columns_of(rows.iloc[new]), base.hardware)[:, None]
    above, below = np.log(values[:, 2] / values[:, 0]), np.log(values[:, 0] / values[:, 1])
    scale = (above + below) / (2 * NORMAL_90)
    skew = (above - below) / np.maximum(above + below, 1e-12)
    groups = [group_of(name, bool(is_known)) for name, is_known in zip(rows["kernel"], known, strict=True)]
    times = dict(zip(("base_us", "low_us", "high_us"), values.T, strict=True))
    return rows.assign(**times, moved=moved, scale=scale, skew=skew, group=groups)


def inputs(kernel: str, base_us: Array, sizes: Sizes, base: PerfModel) -> tuple[Array, Array]:
    """What the machine part, (rows, 4), and the local part, (rows, 7), look at."""
    return machine_features(base_us, memory_share(kernel, sizes, base.hardware)), coordinates(sizes)


def apply(corrections: dict[str, Correction], base: PerfModel, rows: pd.DataFrame) -> tuple[Array, Array]:
    """Log correction and scale of each row (of a frame that went through `with_base`).

    A product that lies otherwise, or has a bias, is off as the one with K fastest was measured to be, unless it was measured too.
    """
    value, scale = np.zeros(len(rows)), rows["scale"].to_numpy().copy()
    for kernel, index in rows.groupby("kernel").indices.items():
        part = rows.iloc[index]
        names = (str(kernel), of_kernel(str(kernel)), str(part["group"].iloc[0]))
        correction = next((corrections[name] for name in names if name in corrections), None)
        if correction is not None:
            features, at = inputs(str(kernel), part["base_us"].to_numpy(), columns_of(part), base)
            value[index], scale[index] = correction.predict(features, at, scale[index])
    return value, scale


def interval(time_us: Array, scale: Array, skew: Array, bounds: list[tuple[float, float]]) -> tuple[Array, Array]:
    """Ends of the intervals of predicted times, (rows,) each, by the bounds of each size class in units of the skewed scale."""
    pair = np.asarray(bounds)[size_class(time_us)]
    return time_us * np.exp(pair[:, 0] * scale * (1 - skew)), time_us * np.exp(pair[:, 1] * scale * (1 + skew))


@dataclass(frozen=True)
class Refinement:
    """A correction of one machine's kernel times.

    Attributes:
        base: The time model that it corrects.
        rows: Measured rows, one per kernel and shape: kernel, m, n, k, groups, p10_us, p50_us, p90_us.
        corrections: By kernel, and by kind of kernel for kernels without rows.
        bounds: Interval bounds by kernel or kind and size class, in units of the scale: on either side the base's, as skewed.
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
            write_whole(target / name, content)
        for old in target.glob("rows-*.npz"):
            if old.name != document["arrays"]:
                old.unlink()

    @classmethod
    def load(cls, folder: Path, base: PerfModel) -> Refinement:
        """Read what `save` wrote.

        Raises:
            ValueError: no refinement, of another schema, hardware or base, or damaged; one line that names the file.
        """
        document, arrays, rows = read(folder, base)
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


def read(folder: Path, base: PerfModel | None = None) -> tuple[dict[str, Any], dict[str, Array], pd.DataFrame]:
    """What `Refinement.save` wrote: the manifest, the arrays, and of these the measured rows.

    Args:
        folder: The calibration.
        base: The time model that it must correct; None for whichever.

    Raises:
        ValueError: as `Refinement.load`.
    """
    path = Path(folder) / "perfmodel" / "manifest.json"
    document = read_json(path)
    if document.get("kind") != KIND:
        raise ValueError(f"{path} is no refinement of the time model; make one with: loka-sim validate --gpu --out DIR")
    check_version(path, document, SCHEMA_VERSION)
    if base is not None and document["hardware"] != base.hardware.name:
        raise ValueError(f"{path} was made for {document['hardware']}, not {base.hardware.name}")
    if base is not None and document["base_fingerprint"] != base.fingerprint:
        raise ValueError(
            f"{path} corrects the time model {document['base_fingerprint']}, and this is {base.fingerprint}; "
            f"make it anew of the same measurements, without a GPU: python -m perfmodel.refine {folder}"
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
    return document, arrays, rows


@dataclass(frozen=True)
class RefinedModel(PerfModel):
    """A time model with a machine's refinement in it: same use, another fingerprint, other times and intervals."""

    refinement: Refinement | None = None

    @classmethod
    def of(cls, refinement: Refinement) -> RefinedModel:
        """The refined model; its manifest has the new kernels too, and what the refinement is under `refinement`."""
        base = refinement.base
        kernels = dict(base.manifest["kernels"])
        for name in sorted(name for name in set(refinement.rows["kernel"]) if not base.knows(name)):
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
            compiled = COMPILED_REPEAT.get(KERNELS[str(kernel)].kind, 0.0) if str(kernel).startswith("torch/") else 0.0
            again = 1 + max(self.refinement.repeat, compiled)
            low, high = np.minimum(p10, p50 / again), np.maximum(p90, p50 * again)
            result[str(kernel)] = (pd.MultiIndex.from_arrays(columns_of(part)), np.stack([p50, low, high], axis=1))
        return result

    def predict(self, frame: Any) -> Any:
        """Times of kernel calls, as `PerfModel.predict`; a measured shape has its measured time."""
        return self._refined(frame, together=False)

    def predict_together(self, frame: Any) -> Any:
        """Likewise, as `PerfModel.predict_together`: calls that were not measured here move as the base's do."""
        return self._refined(frame, together=True)

    def alone_and_together(self, frame: Any) -> tuple[Array, Array]:
        """As `PerfModel.alone_and_together`."""
        alone, together = (pd.DataFrame(dict(told(frame))).to_numpy() for told in (self.predict, self.predict_together))
        return alone, together

    def _refined(self, frame: Any, together: bool) -> Any:
        if isinstance(frame, Mapping):
            columns = self._refined(pd.DataFrame(dict(frame)), together)
            return {str(name): column.to_numpy() for name, column in columns.items()}
        refinement = self.refinement
        assert refinement is not None
        new = set(self.manifest["kernels"]) - set(refinement.base.manifest["kernels"])
        if not len(frame) or not {"kernel", "m", "n", "k"} <= set(frame.columns):
            return super().predict(frame)
        known = ~frame["kernel"].isin(new).to_numpy(dtype=bool)
        unknown = [name for name in frame["kernel"][known].unique() if not self.knows(name)]
        if unknown or min(sizes.min() for sizes in columns_of(frame)) < 1:
            return super().predict(frame)  # which names what is wrong
        asked = frame.reset_index(drop=True).assign(kernel=lambda f: f["kernel"].astype(str))
        rows = with_base(refinement.base, asked, together)
        value, scale = apply(refinement.corrections, refinement.base, rows)
        time, skew = rows["base_us"].to_numpy() * np.exp(value), rows["skew"].to_numpy()
        result = np.empty((len(rows), 3))
        result[:] = rows[["base_us", "low_us", "high_us"]].to_numpy()
        indices = {str(kernel): index for kernel, index in rows.groupby("kernel").indices.items()}
        for kernel, index in indices.items():
            group = str(rows["group"].iloc[index[0]])
            # Where nothing of its kind was measured the base's word stands.
            if bounds := refinement.bounds.get(kernel) or refinement.bounds.get(group):
                result[index] = np.stack([time[index], *interval(time[index], scale[index], skew[index], bounds)], axis=1)
        result *= rows["moved"].to_numpy()[:, None]
        for kernel in indices.keys() & self._measured.keys():
            index, (shapes, values) = indices[kernel], self._measured[kernel]
            found = shapes.get_indexer(pd.MultiIndex.from_arrays(columns_of(rows.iloc[index])))
            result[index[found >= 0]] = values[found[found >= 0]]
        return self._answer(frame, dict(zip(("time_us", "low_us", "high_us"), result.T, strict=True)))

    def in_range(self, frame: Any) -> Any:
        """Whether each call lies inside the sizes that the base was fitted to, or was measured here."""
        if isinstance(frame, Mapping):
            return self.in_range(pd.DataFrame(dict(frame))).to_numpy()
        inside = super().in_range(frame)
        values = inside.to_numpy().copy()
        for kernel, index in frame.reset_index(drop=True).groupby("kernel", observed=True).indices.items():
            if str(kernel) in self._measured:
                shapes = pd.MultiIndex.from_arrays(columns_of(frame.iloc[index]))
                values[index] |= self._measured[str(kernel)][0].get_indexer(shapes) >= 0
        return pd.Series(values, index=frame.index)

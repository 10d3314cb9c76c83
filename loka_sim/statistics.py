"""The statistics store: per site what its activations, weights and output gradients look like, without raw tensors.

A folder holds `statistics.safetensors` (arrays of all records, joined by kind) and `manifest.json` (what model, data,
command and versions they came from, and a summary of every record in the arrays' order). Reading it needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from loka_sim.errors import DataError, UserError
from loka_sim.files import write_bytes_atomic, write_text_atomic
from loka_sim.modelspec import ModelSpec
from loka_sim.site_names import role
from numerics.distributions import TensorStatistics
from numerics.gradient import GradientSignal
from numerics.pair import PairStatistics

SCHEMA_VERSION = 1
ARRAYS = "statistics.safetensors"
MANIFEST = "manifest.json"
ROLES = ("activation", "weight", "weight_transposed", "grad_output")


@dataclass(frozen=True)
class SiteStatistics:
    """Statistics of one site whose output is (M, N) = x (M, K) by w (N, K).

    Attributes:
        activation: x: rows (M), features K. Of a product of two activations, the left operand.
        weight: w: rows (N), features K. Of a product of two activations, the right one, transposed.
        weight_transposed: w^T: rows (K), features N.
        grad_output: The loss's gradient of the output: rows (M), features N.
        gradient: What g^T x sums to over a batch, for `grad_weight`. None for a product of two activations, whose
            GEMMs are batched (no FP8 kernel runs them), and in folders older than it.
        pairs: How the operands of each pass meet, by pass; empty where `gradient` is None.
    """

    activation: TensorStatistics
    weight: TensorStatistics
    weight_transposed: TensorStatistics
    grad_output: TensorStatistics
    gradient: GradientSignal | None = None
    pairs: dict[str, PairStatistics] = field(default_factory=dict)


@dataclass(frozen=True)
class Statistics:
    """The statistics of one training run.

    Attributes:
        model: The model's name.
        fingerprint: Of the `ModelSpec` that they came from.
        sites: By the site's name, in the model's order.
        manifest: Where they came from: mods, dataset, steps, seed, command, versions, metrics.
    """

    model: str
    fingerprint: str
    sites: dict[str, SiteStatistics]
    manifest: dict[str, Any] = field(default_factory=dict)


def folder_of_shipped() -> Path:
    """Where the shipped statistics lie.

    Raises:
        DataError: the package's data are missing.
    """
    from perfmodel.data_folder import data_folder

    try:
        return data_folder() / "statistics"
    except FileNotFoundError as error:
        raise DataError(str(error)) from None


def shipped() -> tuple[str, ...]:
    """Names of the statistics that come with the package."""
    return tuple(sorted(path.parent.name for path in folder_of_shipped().glob(f"*/{MANIFEST}")))


def default_name(model: str, mods: Iterable[str] = ()) -> str | None:
    """The shipped statistics for a zoo model of any size, or None: `wukong-production` -> `wukong-small`.

    With any Mod the run with all of them, `wukong-small+mods`: the nearest that there is.
    """
    base = re.sub(r"-(small|production)$", "", model)
    name = f"{base}-small+mods" if tuple(mods) else f"{base}-small"
    return name if name in shipped() else None


def load(name_or_dir: str | Path) -> Statistics:
    """Shipped statistics by name, or a folder's.

    Raises:
        UserError: neither a shipped name nor a folder.
        DataError: the folder is incomplete or damaged.
    """
    folder = Path(name_or_dir)
    if not folder.is_dir():
        known = shipped()
        if str(name_or_dir) not in known:
            names = ", ".join(known) or "none"
            raise UserError(f"no statistics named '{name_or_dir}' and no such folder; shipped: {names}")
        folder = folder_of_shipped() / str(name_or_dir)
    manifest = _read_manifest(folder / MANIFEST)
    records = _unpack(_read_arrays(folder / ARRAYS, manifest["arrays_sha256"]), manifest, folder)
    sites = {
        name: SiteStatistics(
            **{role: records[name, role] for role in ROLES},
            gradient=_signal(site, name, folder),
            pairs=_pairs(site, name, folder),
        )  # fmt: skip
        for name, site in manifest["sites"].items()
    }
    return Statistics(manifest["model"], manifest["fingerprint"], sites, manifest)


def save(folder: str | Path, statistics: Statistics) -> None:
    """Write a statistics folder; the arrays first, so that a manifest never speaks of what is not there.

    Raises:
        UserError: the folder cannot be written to.
    """
    from safetensors.numpy import save as serialize

    folder = Path(folder)
    arrays, layout = _pack(statistics.sites)
    payload = serialize(arrays)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "model": statistics.model,
        "fingerprint": statistics.fingerprint,
        **{key: value for key, value in statistics.manifest.items() if key not in ("arrays_sha256", "layout", "sites")},
        "arrays_sha256": hashlib.sha256(payload).hexdigest(),
        "layout": layout,
        "sites": {name: _summary(site) for name, site in statistics.sites.items()},
    }
    write_bytes_atomic(folder / ARRAYS, payload)
    write_text_atomic(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=False) + "\n")


def match(spec: ModelSpec, statistics: Statistics) -> dict[str, tuple[SiteStatistics, str]]:
    """Statistics for every site of a model.

    Returns:
        By site name, the statistics and how they were found: `exact`, by the same name; `role`, by the same name with
        the nearest other layer index (a production model's `layers.7.lcb` takes the small model's `layers.2.lcb`).

    Raises:
        UserError: a site has neither: the statistics are of another model.
    """
    by_role: dict[str, list[str]] = {}
    for name in statistics.sites:
        by_role.setdefault(role(name), []).append(name)
    found: dict[str, tuple[SiteStatistics, str]] = {}
    missing = []
    for site in spec.sites:
        if site.name in statistics.sites:
            found[site.name] = (statistics.sites[site.name], "exact")
        elif candidates := by_role.get(role(site.name)):
            nearest = min(candidates, key=lambda name: (_distance(name, site.name), _indices(name)))
            found[site.name] = (statistics.sites[nearest], "role")
        else:
            missing.append(site.name)
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise UserError(
            f"statistics of '{statistics.model}' do not fit model '{spec.name}': nothing for {some};"
            " give statistics collected from this model"
        )
    return found


@lru_cache(maxsize=4096)
def _indices(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"(?<![^.])\d+(?![^.#])", name))


def _distance(name: str, other: str) -> tuple[int, ...]:
    """Of two names of one role: the outermost index counts first."""
    return tuple(abs(a - b) for a, b in zip(_indices(name), _indices(other), strict=True))


def _summary(site: SiteStatistics) -> dict[str, Any]:
    """What a reader of the manifest wants to see of a site, and the few numbers that are kept nowhere else."""
    gradient = asdict(site.gradient).items() if site.gradient is not None else ()
    summary: dict[str, Any] = {
        role: {
            "rows_seen": record.rows_seen,
            "features": record.features,
            "rank": int(record.factor.shape[0]),
            "rms": float(f"{np.sqrt(record.mean_square):.4g}"),
            "amax": float(f"{np.abs(record.amax).max():.4g}"),
            "zero_share": float(f"{record.zero_share.mean():.4g}"),
        }
        for role in ROLES
        for record in (getattr(site, role),)
    }
    if gradient:
        summary["gradient"] = {key: float(f"{value:.6g}") for key, value in gradient}
    if site.pairs:
        summary["pairs"] = {name: pair.to_dict() for name, pair in site.pairs.items()}
    return summary


def _signal(site: dict[str, Any], name: str, folder: Path) -> GradientSignal | None:
    """The site's gradient signal as its summary has it."""
    if "gradient" not in site:
        return None
    try:
        return GradientSignal(**{key: float(value) for key, value in site["gradient"].items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{folder / MANIFEST}: gradient of {name} is damaged ({error}); collect the statistics again") from None


def _pairs(site: dict[str, Any], name: str, folder: Path) -> dict[str, PairStatistics]:
    """The site's pairs as its summary has them; none in folders older than they are."""
    try:
        return {key: PairStatistics.from_dict(value) for key, value in site.get("pairs", {}).items()}
    except (ValueError, AttributeError) as error:
        raise DataError(f"{folder / MANIFEST}: pairs of {name} are damaged ({error}); collect the statistics again") from None


def _pack(sites: dict[str, SiteStatistics]) -> tuple[dict[str, np.ndarray], dict[str, list[int | str]]]:
    """Arrays of one kind joined end to end over all records, site by site, in the order of `ROLES`; and the layout.

    The layout says what shape a record's part of each array has: numbers, `features` and `rank`.
    """
    parts: dict[str, list[np.ndarray]] = {}
    layout: dict[str, list[int | str]] = {}
    records = [getattr(site, role) for site in sites.values() for role in ROLES]
    for record in records:
        for kind, array in record.to_arrays().items():
            parts.setdefault(kind, []).append(array)
    for kind, arrays in parts.items():
        by_width = all(array.shape == (record.features,) for array, record in zip(arrays, records, strict=True))
        fixed: list[int | str] = list(arrays[0].shape)
        layout[kind] = ["rank", "features"] if kind == "loadings" else ["features"] if by_width else fixed
    return {kind: np.concatenate([array.reshape(-1) for array in arrays]) for kind, arrays in parts.items()}, layout


def _unpack(arrays: dict[str, np.ndarray], manifest: dict[str, Any], folder: Path) -> dict[tuple[str, str], TensorStatistics]:
    """The inverse of `_pack`."""
    mend = "collect the statistics again"
    position = dict.fromkeys(arrays, 0)
    records: dict[tuple[str, str], TensorStatistics] = {}
    try:
        for name, roles in manifest["sites"].items():
            for role in ROLES:
                sizes = {"features": int(roles[role]["features"]), "rank": int(roles[role]["rank"])}
                record = {}
                for kind, joined in arrays.items():
                    shape = [sizes[size] if isinstance(size, str) else int(size) for size in manifest["layout"][kind]]
                    start, position[kind] = position[kind], position[kind] + int(np.prod(shape))
                    record[kind] = joined[start : position[kind]].reshape(shape)
                records[name, role] = TensorStatistics.from_arrays(record)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise DataError(f"{folder / ARRAYS} does not fit its manifest ({error}); {mend}") from None
    for kind, joined in arrays.items():
        if position[kind] != joined.size:
            raise DataError(f"{folder / ARRAYS} does not fit its manifest ({kind} has another length); {mend}")
    return records


def _read_manifest(path: Path) -> dict[str, Any]:
    mend = "give a folder that `python -m loka_sim.training` wrote"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing; {mend}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); {mend}") from None
    if not isinstance(manifest, dict):
        raise DataError(f"{path} is no manifest of statistics; {mend}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        version = manifest.get("schema_version")
        raise DataError(f"{path}: schema_version is {version}, expected {SCHEMA_VERSION}; collect the statistics again")
    for key, kind in (("model", str), ("fingerprint", str), ("arrays_sha256", str), ("layout", dict), ("sites", dict)):
        if not isinstance(manifest.get(key), kind):
            raise DataError(f"{path}: {key} is missing or no {kind.__name__}; {mend}")
    return manifest


def _read_arrays(path: Path, digest: str) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load as deserialize

    try:
        payload = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing; collect the statistics again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a folder that you may read") from None
    if hashlib.sha256(payload).hexdigest() != digest:
        raise DataError(f"{path} is truncated, damaged or of another run than its manifest; collect it again")
    try:
        return deserialize(payload)
    except (SafetensorError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); collect the statistics again") from None

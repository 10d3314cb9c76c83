"""Where a what-if's inputs come from: the model, and the distributions of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loka_sim.errors import UserError
from loka_sim.modelspec import ModelSpec

if TYPE_CHECKING:
    from loka_sim.statistics import SiteStatistics

ASSUMED = "standard normal"


@dataclass(frozen=True)
class Distributions:
    """Distributions of a model's tensors, and where they came from.

    Attributes:
        origin: `shipped`, `folder` or `assumed`.
        name: Shipped name or folder; `standard normal` when assumed.
        model: Model that they were collected from; None when assumed.
        fingerprint: That model's fingerprint; None when assumed.
        provenance: Data set, steps and seed, in words; None when unknown.
        mods: Mods of the model that they were collected from.
        sites: Statistics per site, and how they were matched.
    """

    origin: str
    name: str
    model: str | None = None
    fingerprint: str | None = None
    provenance: str | None = None
    mods: tuple[str, ...] = ()
    sites: Mapping[str, tuple[SiteStatistics, str]] = field(default_factory=dict)

    def of(self, site: str) -> SiteStatistics | None:
        """A site's statistics; None where standard normal values are assumed."""
        return self.sites[site][0] if site in self.sites else None

    def how(self, site: str) -> str:
        """`exact`, `role` or `assumed`."""
        return self.sites[site][1] if site in self.sites else "assumed"


def model_spec(model: str | ModelSpec, mods: str | Sequence[str]) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model with its mods applied, and the mods' names in the order of `MODS`.

    A zoo model with all of them was captured with them: what its step holds beside the GEMMs is known, too.

    Raises:
        UserError: no such model or mod.
    """
    from loka_sim.mods import MODS, apply_to_spec, parse_mods

    names = parse_mods(mods)
    if isinstance(model, ModelSpec):
        spec = model
    else:
        from loka_sim.resolve import resolve_model, zoo_with_mods

        spec = (zoo_with_mods(model) if names == MODS else None) or resolve_model(model)
    return apply_to_spec(spec, names), names


def distributions(spec: ModelSpec, given: str | None, mods: Sequence[str]) -> Distributions:
    """Distributions of a model's tensors.

    Args:
        spec: The model.
        given: Shipped name or folder; None for the zoo model's own statistics, standard normal values for others.
        mods: The model's mods; a zoo model with mods prefers statistics that were collected with them.

    Raises:
        UserError, DataError: no such statistics, or they belong to another model.
    """
    from loka_sim import statistics

    name = given if given is not None else statistics.default_name(spec.name, mods)
    if name is None:
        return Distributions("assumed", ASSUMED)
    loaded = statistics.load(name)
    try:
        sites = statistics.match(spec, loaded)
    except UserError:
        if given is not None:
            raise
        # A model that only bears a zoo model's name.
        return Distributions("assumed", ASSUMED)
    origin = "folder" if Path(name).is_dir() else "shipped"
    provenance, collected_with = _provenance(loaded.manifest), tuple(loaded.manifest.get("mods") or ())
    return Distributions(origin, name, loaded.model, loaded.fingerprint, provenance, collected_with, sites)


def _provenance(manifest: Mapping[str, Any]) -> str | None:
    """Data set, steps and seed of a statistics folder, as far as its manifest says."""
    dataset = manifest.get("dataset")
    name = dataset.get("name") if isinstance(dataset, dict) else dataset
    parts = [str(name)] if name else []
    parts += [f"{manifest['steps']:,} steps"] if isinstance(manifest.get("steps"), int) else []
    parts += [f"seed {manifest['seed']}"] if manifest.get("seed") is not None else []
    return ", ".join(parts) or None

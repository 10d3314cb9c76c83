"""The three model changes (Mods) that make FP8 pay: names, and what they do to a model specification.

Source: LoKA (arXiv 2605.10886). `no_bias`: no linear layer has a bias but the last prediction layer.
`blocknorm`: RMS norm without parameters over blocks of 256 features instead of the model's norms.
`hardswish`: x * ReLU6(x + 3) / 6 instead of Swish; a ReLU, cheaper than both, stays.

Importing this needs no torch; the modules are in `loka_sim.mods.modules`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from loka_sim.errors import UserError
from loka_sim.modelspec import ModelSpec, Site

MODS = ("no_bias", "blocknorm", "hardswish")

_REPLACED_NORMS = ("layernorm", "batchnorm", "rmsnorm")


def parse_mods(text: str | Iterable[str] | None) -> tuple[str, ...]:
    """Names of Mods in their canonical order, without repetition.

    Args:
        text: `all`, `none`, an empty string, names separated by commas, or an iterable of names.

    Raises:
        UserError: a name is unknown.
    """
    parts = [] if text is None else text.split(",") if isinstance(text, str) else list(text)
    names = {part.strip() for part in parts} - {"", "none"}
    if "all" in names:
        names = (names - {"all"}) | set(MODS)
    for name in sorted(names - set(MODS)):
        raise UserError(f"unknown mod '{name}'; choose from {', '.join(MODS)}, all, none")
    return tuple(mod for mod in MODS if mod in names)


def prediction_site(spec: ModelSpec) -> str | None:
    """Name of the last site with a weight: the prediction layer, which keeps its bias."""
    return next((site.name for site in reversed(spec.sites) if site.weight is not None), None)


def _module(name: str) -> str:
    """The module of a site: every call of it has the same bias."""
    return name.partition("#")[0]


def _apply_to_site(site: Site, mods: tuple[str, ...], last: str) -> Site:
    """The site under Mods; `last` is the prediction layer's module."""
    if "no_bias" in mods and site.bias and _module(site.name) != last:
        site = replace(site, bias=False)
    if "blocknorm" in mods and site.norm in _REPLACED_NORMS:
        site = replace(site, norm="blocknorm")
    if "hardswish" in mods and site.activation == "silu":
        site = replace(site, activation="hardswish")
    return site


def _lost(before: Iterable[Site], after: Iterable[Site]) -> int:
    """Trainable biases, in elements, that sites lost: one for each weight of a module, called how often it may; no frozen one."""
    found = {
        (_module(old.name), old.weight): old.passes["output"].n.const
        for old, new in zip(before, after, strict=True)
        if old.bias and not new.bias and "grad_weight" in old.passes
    }
    return sum(found.values())


def apply_to_spec(spec: ModelSpec, mods: str | Iterable[str]) -> ModelSpec:
    """The model under Mods: the same GEMMs, other biases, norms and activations.

    `dense_parameters` loses the biases. The parameters of the norms stay counted, since a specification does not say
    how many they are (less than 1% of any zoo model's). The kernels beside the GEMMs were captured of the model as it was:
    where a Mod changes a site they are left out, and `untraced` says so.

    Raises:
        UserError: a Mod's name is unknown.
    """
    names = parse_mods(mods)
    if not names:
        return spec
    last = _module(prediction_site(spec) or "")
    sites = tuple(_apply_to_site(site, names, last) for site in spec.sites)
    if sites == spec.sites:
        return spec
    changed = replace(spec, sites=sites, dense_parameters=max(spec.dense_parameters - _lost(spec.sites, sites), 0))
    if not spec.fused:
        return changed
    return replace(changed, fused=(), loops=(), untraced=f"they were captured without the Mods {', '.join(names)}")

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


def _apply_to_site(site: Site, mods: tuple[str, ...], last: str | None) -> tuple[Site, int]:
    """The site under Mods, and how many parameters it lost."""
    lost = 0
    if "no_bias" in mods and site.bias and site.name != last:
        site, lost = replace(site, bias=False), site.passes["output"].n.const
    if "blocknorm" in mods and site.norm in _REPLACED_NORMS:
        site = replace(site, norm="blocknorm")
    if "hardswish" in mods and site.activation == "silu":
        site = replace(site, activation="hardswish")
    return site, lost


def apply_to_spec(spec: ModelSpec, mods: str | Iterable[str]) -> ModelSpec:
    """The model under Mods: the same GEMMs, other biases, norms and activations.

    `dense_parameters` loses the biases. The parameters of the norms stay counted, since a specification does not say
    how many they are (less than 1% of any zoo model's).

    Raises:
        UserError: a Mod's name is unknown.
    """
    names = parse_mods(mods)
    if not names:
        return spec
    last = prediction_site(spec)
    changed = [_apply_to_site(site, names, last) for site in spec.sites]
    sites = tuple(site for site, _ in changed)
    parameters = max(spec.dense_parameters - sum(lost for _, lost in changed), 0)
    return replace(spec, sites=sites, dense_parameters=parameters)

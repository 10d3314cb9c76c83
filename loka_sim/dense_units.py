"""Which dense parameters travel together: DDP's buckets, FSDP's units."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from loka_sim.modelspec import ModelSpec, Site

BF16_BYTES = 2
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""Defaults of `torch.nn.parallel.DistributedDataParallel`: of what it reduces first, and of all else."""
_LAYER = re.compile(r"(?:.+?\.)??\d+(?=\.)")


class Part(NamedTuple):
    """Parameters that travel together.

    Attributes:
        sites: Names of the sites whose weights they are, in forward order; none where they are needed throughout.
        size_bytes: Their size in bf16.
        kept: Gathered once, and held until the backward.
    """

    sites: tuple[str, ...]
    size_bytes: int
    kept: bool = False


def buckets(spec: ModelSpec) -> list[Part]:
    """As DDP reduces gradients, in forward order: filled from the end, each until it is as large as its limit or larger."""
    weights, rest = _weights(spec)
    parts = [Part(tuple(reversed(sites)), size) for sites, size in reversed(_filled(reversed(weights), FIRST_BUCKET_BYTES))]
    return _with_rest(parts, rest)


def shards(spec: ModelSpec) -> list[Part]:
    """As FSDP shards modules: each layer of a list of layers by itself, the model around them gathered first and kept.

    A layer is what sites have in common up to a number in their names, where there are several such. A model without layers is
    taken to be sharded in parts of at least `BUCKET_BYTES`.
    """
    weights, rest = _weights(spec)
    number = Counter(layer for name, _ in weights if (layer := layer_of(name)))
    layers: dict[str, list[tuple[str, int]]] = {}
    for name, size in weights:
        layer = layer_of(name)
        if layer and number[layer] > 1:
            layers.setdefault(layer, []).append((name, size))
    if len(layers) < 2:
        return _with_rest([Part(sites, size) for sites, size in _filled(weights)], rest)
    parts = [Part(tuple(name for name, _ in own), sum(size for _, size in own)) for own in layers.values()]
    root = sum(size for _, size in weights) - sum(part.size_bytes for part in parts) + rest
    return [*([Part((), root, kept=True)] if root else []), *parts]


def dense_tensors(spec: ModelSpec) -> list[int]:
    """Elements of each trainable parameter beside tables: weights and biases of the sites, and the rest as one."""
    sizes: list[int] = []
    seen: set[str] = set()
    for site in spec.sites:
        if site.weight is not None and site.weight not in seen:
            seen.add(site.weight)
            _, n, k = site.passes["output"].shape(1)
            sizes += [n * k, *([n] if site.bias else [])]
    rest = spec.dense_parameters - sum(sizes)
    # A shared or frozen weight may be counted that is no parameter: what there is bounds the sum.
    return [*sizes, rest] if rest > 0 else sizes if not rest else [spec.dense_parameters]


def layer_of(site: str) -> str | None:
    """The layer of a list of layers that a site's name lies in, if any: `layers.3` of `layers.3.mlp.0`, none of `top.0`."""
    found = _LAYER.match(site)
    return found[0] if found else None


def _weights(spec: ModelSpec) -> tuple[list[tuple[str, int]], int]:
    """Name of the first site of each trained weight, and its bytes, in forward order; and bytes of what stands at no GEMM."""
    sizes: dict[str, tuple[str, int]] = {}
    for site in spec.sites:
        if (size := _weight_bytes(site)) and site.weight not in sizes:
            assert site.weight is not None
            sizes[site.weight] = (site.name, size)
    at_sites = sum(size for _, size in sizes.values())
    total = spec.dense_parameters * BF16_BYTES or at_sites
    # A weight that a GEMM reads in a larger form than it is stored in must not count for more than there is.
    scale = min(1.0, total / at_sites) if at_sites else 1.0
    weights = [(name, round(size * scale)) for name, size in sizes.values()]
    return weights, max(total - sum(size for _, size in weights), 0)


def _filled(weights: Iterable[tuple[str, int]], first: int = BUCKET_BYTES) -> list[tuple[tuple[str, ...], int]]:
    """Parts of at least `BUCKET_BYTES`, or `first`, but for the last."""
    parts: list[tuple[tuple[str, ...], int]] = []
    names: list[str] = []
    filled = 0
    for name, size in weights:
        names.append(name)
        filled += size
        if filled >= (BUCKET_BYTES if parts else first):
            parts.append((tuple(names), filled))
            names, filled = [], 0
    return [*parts, (tuple(names), filled)] if names else parts


def _with_rest(parts: list[Part], rest: int) -> list[Part]:
    """Parts with what stands at no GEMM (biases, norms): its place is not known, so it is there first, its gradients last."""
    others, left = divmod(rest, BUCKET_BYTES)
    if parts:
        parts = [parts[0]._replace(size_bytes=parts[0].size_bytes + left), *parts[1:]]
    elif left:
        parts = [Part((), left)]
    return [*[Part((), BUCKET_BYTES)] * others, *parts]


def _weight_bytes(site: Site) -> int:
    """Size of the parameter that a site trains; 0 where it trains none, or in a form that depends on the batch."""
    gemm = site.passes.get("grad_weight")
    if site.weight is None or gemm is None or any(dim.per_batch for dim in (gemm.m, gemm.n, gemm.groups)):
        return 0
    return gemm.m.const * gemm.n.const * gemm.groups.const * BF16_BYTES

"""Recommenders that nobody designed: drawn parts side by side, a drawn tower on them, of drawn sizes.

    loka-sim whatif benchmarks.drawn_models:drawn_3
    python benchmarks/step_profile.py benchmarks.drawn_models:drawn_3

What published models are made of (sums and products of pairs of fields, crosses, attention, gates, mixers, pooled sequences,
activations, norms, dropout), put together by a seed: whole steps of these have kernels that no one chose. The batch is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.other_models import Fields, Made, ids_of

DENSE = 13
LEAST, MOST = 2.0**21, 2.0**25  # elements of what is looked up
ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.PReLU, nn.LeakyReLU, nn.Hardswish, nn.Tanh, nn.ELU, nn.Sigmoid,
)  # fmt: skip


class _Tower(nn.Module):
    """Linear layers with a drawn activation, norm and dropout; some with what came in added."""

    def __init__(self, source: random.Random, inputs: int, widths: tuple[int, ...], out: int = 0) -> None:
        super().__init__()
        activation, norm = source.choice(ACTIVATIONS), source.choice((None, None, nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm))
        dropout, self.adds = source.choice((0.0, 0.0, 0.0, 0.1, 0.2)), source.random() < 0.3
        self.layers = nn.ModuleList()
        for width in widths:
            layers: list[nn.Module] = [nn.Linear(inputs, width)]
            layers += [norm(width)] if norm else []
            layers += [activation(), *([nn.Dropout(dropout)] if dropout else [])]
            self.layers.append(nn.Sequential(*layers))
            inputs = width
        self.out = nn.Linear(inputs, out) if out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + y if self.adds and y.shape == x.shape else y
        return self.out(x)


class _Sums(nn.Module):
    """Rendle 2010: the sum of products of all pairs."""

    def __init__(self, _: random.Random, fields: int, dim: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x.sum(1).square() - x.square().sum(1))


class _Dots(nn.Module):
    """Naumov et al. 2019: the products of all pairs."""

    def __init__(self, _: random.Random, fields: int, dim: int) -> None:
        super().__init__()
        self.first: Tensor
        self.second: Tensor
        first, second = torch.triu_indices(fields, fields, 1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2))[:, self.first, self.second]


class _Cross(nn.Module):
    """Wang et al. 2021: crosses of full or of low rank."""

    def __init__(self, source: random.Random, fields: int, dim: int) -> None:
        super().__init__()
        width, rank = fields * dim, source.choice((0, 64, 128, 256))

        def layer() -> nn.Module:
            return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width)) if rank else nn.Linear(width, width)

        self.layers = nn.ModuleList(layer() for _ in range(source.choice((1, 2, 3))))

    def forward(self, x: Tensor) -> Tensor:
        first = crossed = x.flatten(1)
        for layer in self.layers:
            crossed = first * layer(crossed) + crossed
        return crossed


class _Attention(nn.Module):
    """Song et al. 2019: fields that attend to one another, with or without a norm behind."""

    def __init__(self, source: random.Random, fields: int, dim: int) -> None:
        super().__init__()
        self.heads, self.called = source.choice((1, 2, 4)), source.random() < 0.5
        width = self.heads * source.choice((16, 32, 64))
        self.project, self.beside = nn.Linear(dim, 3 * width), nn.Linear(dim, width)
        self.norm = nn.LayerNorm(width) if source.random() < 0.5 else nn.ReLU()
        self.mean = source.random() < 0.4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.project(x).chunk(3, dim=2))
        if self.called:
            found = F.scaled_dot_product_attention(q, k, v)
        else:
            found = torch.softmax(q @ k.transpose(2, 3) / q.shape[3] ** 0.5, dim=3) @ v
        y = self.norm(found.transpose(1, 2).flatten(2) + self.beside(x))
        return y.mean(1) if self.mean else y.flatten(1)


class _Gate(nn.Module):
    """Huang et al. 2019: fields weighed by a network of their means."""

    def __init__(self, source: random.Random, fields: int, dim: int) -> None:
        super().__init__()
        inner = max(fields // source.choice((2, 3, 4)), 4)
        self.weigh = nn.Sequential(nn.Linear(fields, inner), nn.ReLU(), nn.Linear(inner, fields), nn.Sigmoid())
        self.sum = source.random() < 0.4

    def forward(self, x: Tensor) -> Tensor:
        weighed = x * self.weigh(x.mean(2)).unsqueeze(2)
        return weighed.sum(1) if self.sum else weighed.flatten(1)


class _Mixer(nn.Module):
    """Tolstikhin et al. 2021: linear layers over fields, then over elements."""

    def __init__(self, source: random.Random, fields: int, dim: int) -> None:
        super().__init__()
        times, activation = source.choice((1, 2)), source.choice((nn.GELU, nn.ReLU, nn.SiLU))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.over = nn.Sequential(nn.Linear(fields, times * fields), activation(), nn.Linear(times * fields, fields))
        self.within = nn.Sequential(nn.Linear(dim, 2 * dim), activation(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return (x + self.within(self.norms[1](x))).flatten(1)


class _Compressed(nn.Module):
    """Zhang et al. 2024: fewer mixtures of fields, and their products with all."""

    def __init__(self, source: random.Random, fields: int, dim: int) -> None:
        super().__init__()
        self.mix = nn.Linear(fields, source.choice((8, 16, 24)), bias=False)
        self.norm = nn.LayerNorm(fields * self.mix.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm((x @ self.mix(x.transpose(1, 2))).flatten(1))


class _Masked(nn.Module):
    """Wang et al. 2021 (MaskNet): a normed input, times what a network makes of it."""

    def __init__(self, source: random.Random, fields: int, dim: int) -> None:
        super().__init__()
        width = fields * dim
        self.norm, self.mask = nn.LayerNorm(width), _Tower(source, width, (source.choice((128, 256, 512)),), width)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.norm(flat) * self.mask(flat)


class _Plain(nn.Module):
    """What was looked up, side by side."""

    def __init__(self, _: random.Random, fields: int, dim: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class _Sequence(nn.Module):
    """What a user saw before: its mean, weighed by a network or by products with what is asked, or a layer of attention."""

    def __init__(self, source: random.Random, length: int, dim: int) -> None:
        super().__init__()
        self.kind, self.table = source.choice(("mean", "weighed", "weighed", "products", "layer")), Fields(1, dim)
        self.weigh = _Tower(source, 4 * dim, (source.choice((32, 64, 80)),), 1) if self.kind == "weighed" else nn.Identity()
        self.layer = nn.Linear(dim, 3 * dim) if self.kind == "layer" else nn.Identity()
        self.norm = source.choice((nn.LayerNorm, nn.RMSNorm))(dim) if self.kind == "layer" else nn.Identity()

    def forward(self, ids: Tensor, asked: Tensor) -> Tensor:
        seen, keep = self.table(ids), (ids > 100).unsqueeze(2)
        if self.kind == "mean":
            return (seen * keep).sum(1) / keep.sum(1).clamp(min=1)
        if self.kind == "layer":
            q, k, v = (part.unsqueeze(1) for part in self.layer(self.norm(seen)).chunk(3, dim=2))
            return (seen + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)).mean(1)
        if self.kind == "products":
            scores = (seen @ asked.unsqueeze(2)).masked_fill(~keep, -1e4)
            return (torch.softmax(scores, dim=1) * seen).sum(1)
        other = asked.unsqueeze(1).expand_as(seen)
        scores = self.weigh(torch.cat((seen, other, seen - other, seen * other), dim=2).flatten(0, 1))
        return (scores.unflatten(0, seen.shape[:2]) * keep * seen).sum(1)


PARTS: tuple[type[nn.Module], ...] = (_Plain, _Plain, _Sums, _Dots, _Cross, _Attention, _Gate, _Mixer, _Compressed, _Masked)


class _Drawn(nn.Module):
    """Fields, numbers and a sequence, parts of them side by side, and towers for one task or several."""

    def __init__(self, source: random.Random, fields: int, dim: int, length: int, dense: bool) -> None:
        super().__init__()
        self.embedding = Fields(fields, dim)
        self.numbers = _Tower(source, DENSE, (source.choice((128, 256, 512)), dim)) if dense else None
        self.sequence = _Sequence(source, length, dim) if length else None
        fields += dense + bool(length)
        chosen = source.sample(PARTS, source.choice((2, 2, 3, 4)))
        self.parts = nn.ModuleList(kind(source, fields, dim) for kind in dict.fromkeys(chosen))
        with torch.no_grad():
            width = sum(part(torch.zeros(2, fields, dim)).shape[1] for part in self.parts)
        widths = tuple(source.choice((256, 384, 512, 768, 1000, 1024, 1536, 2048)) for _ in range(source.choice((1, 2, 2, 3))))
        widths = tuple(sorted(widths, reverse=True))
        tasks = source.choice((1, 1, 1, 2, 3))
        self.first = _Tower(source, width, widths)
        self.last = nn.ModuleList(_Tower(source, widths[-1], (source.choice((64, 128, 256)),), 1) for _ in range(tasks))

    def forward(self, ids: Tensor, *others: Tensor) -> Tensor:
        x, rest = self.embedding(ids), list(others)
        if self.numbers is not None:
            x = torch.cat((x, self.numbers(rest.pop(0)).unsqueeze(1)), dim=1)
        if self.sequence is not None:
            x = torch.cat((x, self.sequence(rest.pop(0), x[:, 0]).unsqueeze(1)), dim=1)
        deep = self.first(torch.cat([part(x) for part in self.parts], dim=1))
        return torch.cat([last(deep) for last in self.last], dim=1).sum(1)


def drawn(seed: int) -> Made:
    """A model and its inputs; the same for the same seed."""
    source = random.Random(f"drawn {seed}")
    while True:
        fields, dim = round(2 ** source.uniform(3, 6)), source.choice((8, 12, 16, 16, 24, 32, 32, 40, 48, 64, 64, 96, 128))
        batch = 128 * round(2 ** source.uniform(2, 7))
        length = source.choice((0, 0, 0, 20, 50, 100, 150))
        if LEAST <= batch * fields * dim <= MOST and batch * length * dim <= MOST and fields * dim <= 4096:
            break
    dense = source.random() < 0.4
    model = _Drawn(source, fields, dim, length, dense)
    inputs = [ids_of(batch, fields)]
    inputs += [torch.randn(batch, DENSE)] if dense else []
    inputs += [ids_of(batch, length)] if length else []
    return model, tuple(inputs)


def __getattr__(name: str) -> Callable[[], Made]:
    """`drawn_SEED`: the function of a drawn model."""
    kind, _, seed = name.rpartition("_")
    if kind != "drawn" or not seed.isdigit():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: drawn(int(seed))

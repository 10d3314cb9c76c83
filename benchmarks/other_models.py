"""Published recommenders that are not in the zoo, as their papers have them: steps of kinds that no figure was ever made for.

    python benchmarks/step_profile.py benchmarks.other_models:autoint
    loka-sim whatif benchmarks.other_models:autoint --batch 4096
    loka-sim whatif benchmarks.other_models:autoint_7     # sizes and the batch drawn with seed 7

Each function returns (model, inputs) with a batch of its own (`BATCHES`, or drawn). Tables have `TABLE_ROWS` rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from loka_sim.validation.runnable import TABLE_ROWS

BATCHES = {
    "deepfm": 8192, "xdeepfm": 2048, "autoint": 4096, "mmoe": 8192, "masknet": 4096, "finalmlp": 8192, "din": 2048, "hstu": 256,
    "sasrec": 256, "two_tower": 4096,
}  # fmt: skip
"""Samples of each function's inputs."""

Made = tuple[nn.Module, tuple[Tensor, ...]]
_WIDTHS = ((512, 256), (1024, 512), (1024, 1024, 512), (2048, 2048, 1024))


def ids_of(*size: int) -> Tensor:
    """Rows of a table."""
    return torch.randint(TABLE_ROWS, size)


def mlp(sizes: tuple[int, ...], *between: type[nn.Module], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers, each but the last with these modules behind it; a norm is given its width."""
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(zip(sizes, sizes[1:], strict=False)):
        layers.append(nn.Linear(inputs, outputs))
        if number < len(sizes) - 2:
            layers += [kind(outputs) if kind in (nn.LayerNorm, nn.BatchNorm1d) else kind() for kind in between]
            layers += [nn.Dropout(dropout)] * bool(dropout)
    return nn.Sequential(*layers)


class Fields(nn.Module):
    """One table for all fields, whose ids are counted on."""

    def __init__(self, fields: int, dim: int) -> None:
        """So many fields, and elements of a row."""
        super().__init__()
        self.table = nn.Embedding(TABLE_ROWS, dim)
        self.first: Tensor
        self.register_buffer("first", torch.arange(fields) * (TABLE_ROWS // fields))

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of ids, (samples, fields, elements)."""
        return self.table((ids + self.first) % TABLE_ROWS)


class _DeepFM(nn.Module):
    """Guo et al. 2017: linear terms, products of all pairs of embeddings, and a network with dropout."""

    def __init__(self, fields: int = 39, dim: int = 40, hidden: tuple[int, ...] = (2048, 2048, 1024)) -> None:
        super().__init__()
        self.fields = fields
        self.linear, self.embedding = Fields(fields, 1), Fields(fields, dim)
        self.deep = mlp((fields * dim, *hidden, 1), nn.ReLU, dropout=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        pairs = 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1, keepdim=True)
        return self.linear(ids).sum(1) + pairs + self.deep(x.flatten(1))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (ids_of(batch, self.fields),)


class _XDeepFM(nn.Module):
    """Lian et al. 2018: compressed interactions, each layer's maps by all fields, made fewer by a linear layer."""

    def __init__(self, fields: int = 26, dim: int = 16, maps: tuple[int, ...] = (96, 96), hidden: int = 512) -> None:
        super().__init__()
        self.fields = fields
        self.embedding = Fields(fields, dim)
        before = (fields, *maps)
        self.compress = nn.ModuleList(nn.Linear(b * fields, m) for b, m in zip(before, maps, strict=False))
        self.deep = mlp((fields * dim, hidden, hidden, 1), nn.ReLU)
        self.out = nn.Linear(sum(maps), 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.embedding(ids).transpose(1, 2)  # batch, dim, fields
        found = []
        for layer in self.compress:
            x = F.relu(layer((x.unsqueeze(-1) * first.unsqueeze(-2)).flatten(2)))
            found.append(x.sum(1))
        return self.out(torch.cat(found, 1)) + self.deep(first.flatten(1))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (ids_of(batch, self.fields),)


class _AutoInt(nn.Module):
    """Song et al. 2019: self-attention among fields, with residuals."""

    def __init__(self, fields: int = 39, dim: int = 64, heads: int = 4, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.fields = fields
        self.embedding, self.heads = Fields(fields, dim), heads
        sizes = (dim, *[width] * layers)
        self.qkv = nn.ModuleList(nn.Linear(before, 3 * width, bias=False) for before in sizes[:-1])
        self.residual = nn.ModuleList(nn.Linear(before, width, bias=False) for before in sizes[:-1])
        self.out = nn.Linear(fields * width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for qkv, residual in zip(self.qkv, self.residual, strict=True):
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            attention = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1)
            x = F.relu((attention @ v).transpose(1, 2).flatten(2) + residual(x))
        return self.out(x.flatten(1))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (ids_of(batch, self.fields),)


class _MMoE(nn.Module):
    """Ma et al. 2018: experts that several tasks mix, each by a gate of its own."""

    def __init__(self, fields: int = 40, dim: int = 32, experts: int = 6, tasks: int = 3, width: int = 768) -> None:
        super().__init__()
        self.fields = fields
        self.embedding = Fields(fields, dim)
        self.first = nn.Parameter(torch.empty(experts, fields * dim, width).uniform_(-0.02, 0.02))
        self.second = nn.Parameter(torch.empty(experts, width, width // 2).uniform_(-0.02, 0.02))
        self.gates = nn.ModuleList(nn.Linear(fields * dim, experts) for _ in range(tasks))
        self.towers = nn.ModuleList(mlp((width // 2, 256, 1), nn.ReLU) for _ in range(tasks))

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(ids).flatten(1)
        hidden = F.relu(torch.einsum("bi,eij->ebj", x, self.first))
        experts = F.relu(torch.einsum("ebi,eij->ebj", hidden, self.second))
        found = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            mixed = (torch.softmax(gate(x), -1).t().unsqueeze(-1) * experts).sum(0)
            found.append(tower(mixed))
        return tuple(found)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (ids_of(batch, self.fields),)


class _MaskNet(nn.Module):
    """Wang et al. 2021: blocks that multiply the embeddings by masks made of them, side by side."""

    def __init__(self, fields: int = 39, dim: int = 64, blocks: int = 3, width: int = 2048) -> None:
        super().__init__()
        self.fields = fields
        self.embedding, self.norm, size = Fields(fields, dim), nn.LayerNorm(dim), fields * dim
        self.masks = nn.ModuleList(mlp((size, width, size), nn.ReLU) for _ in range(blocks))
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.Linear(size, width, bias=False), nn.LayerNorm(width), nn.ReLU()) for _ in range(blocks)
        )
        self.out = mlp((blocks * width, 1024, 1), nn.ReLU)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        flat, normed = x.flatten(1), self.norm(x).flatten(1)
        return self.out(torch.cat([hidden(mask(flat) * normed) for mask, hidden in zip(self.masks, self.hidden, strict=True)], 1))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (ids_of(batch, self.fields),)


class _FinalMLP(nn.Module):
    """Mao et al. 2023: two networks over gated features, joined by bilinear products of heads."""

    def __init__(self, fields: int = 39, dim: int = 20, width: int = 1000, heads: int = 10) -> None:
        super().__init__()
        self.fields = fields
        size = fields * dim
        self.embedding, self.heads = Fields(fields, dim), heads
        self.gates = nn.ModuleList(mlp((size, 800, size), nn.ReLU) for _ in range(2))
        self.streams = nn.ModuleList(mlp((size, width, width, width), nn.BatchNorm1d, nn.ReLU) for _ in range(2))
        self.left, self.right = nn.Linear(width, 1), nn.Linear(width, 1)
        self.between = nn.Parameter(torch.empty(heads, width // heads, width // heads).uniform_(-0.02, 0.02))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).flatten(1)
        one, other = (stream(x * 2 * torch.sigmoid(gate(x))) for gate, stream in zip(self.gates, self.streams, strict=True))
        left, right = (side.unflatten(-1, (self.heads, -1)) for side in (one, other))
        pairs = torch.einsum("bhi,hij,bhj->b", left, self.between, right).unsqueeze(-1)
        return self.left(one) + self.right(other) + pairs

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (ids_of(batch, self.fields),)


class _DIN(nn.Module):
    """Zhou et al. 2018: what was seen before, weighed by a small network of it and the candidate; PReLU."""

    def __init__(self, dim: int = 64, hidden: tuple[int, ...] = (512, 256)) -> None:
        super().__init__()
        self.items = nn.Embedding(TABLE_ROWS, dim)
        self.weigh = mlp((4 * dim, 128, 64, 1), nn.PReLU)
        self.deep = mlp((3 * dim, *hidden, 1), nn.PReLU)

    def forward(self, history: Tensor, lengths: Tensor, item: Tensor) -> Tensor:
        past, now = self.items(history), self.items(item)
        each = now.unsqueeze(1).expand_as(past)
        weight = self.weigh(torch.cat([each, past, each - past, each * past], -1))
        there = torch.arange(history.shape[1], device=history.device) < lengths.unsqueeze(1)
        interest = (weight.masked_fill(~there.unsqueeze(-1), 0.0) * past).sum(1)
        return self.deep(torch.cat([interest, now, interest * now], 1))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return ids_of(batch, 100), torch.randint(1, 100, (batch,)), ids_of(batch)


class _HSTU(nn.Module):
    """Zhai et al. 2024: sequences by pointwise attention without a softmax, gated, with biases of relative places."""

    def __init__(self, length: int = 200, dim: int = 256, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.length = length
        self.items, self.places, self.heads = nn.Embedding(TABLE_ROWS, dim), nn.Parameter(torch.zeros(length, dim)), heads
        self.before = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.uvqk = nn.ModuleList(nn.Linear(dim, 4 * dim, bias=False) for _ in range(layers))
        self.after = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.bias = nn.Parameter(torch.zeros(layers, length, length))
        self.seen: Tensor
        self.register_buffer("seen", torch.ones(length, length).tril())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.items(ids) + self.places
        for number, (before, uvqk, after, out) in enumerate(zip(self.before, self.uvqk, self.after, self.out, strict=True)):
            u, v, q, k = F.silu(uvqk(before(x))).chunk(4, -1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
            scores = F.silu(q @ k.transpose(-2, -1) + self.bias[number]) / ids.shape[1] * self.seen
            x = x + out(u * after((scores @ v).transpose(1, 2).flatten(2)))
        return (x[:, :-1] * self.items(ids[:, 1:])).sum(-1)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (ids_of(batch, self.length),)


class _SASRec(nn.Module):
    """Kang and McAuley 2018: a causal transformer over what was seen, by torch's own attention."""

    def __init__(self, length: int = 200, dim: int = 256, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.length = length
        self.items, self.places, self.heads = nn.Embedding(TABLE_ROWS, dim), nn.Parameter(torch.zeros(length, dim)), heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.project = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.feed = nn.ModuleList(mlp((dim, 4 * dim, dim), nn.GELU) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.items(ids) + self.places
        for number, (qkv, project, feed) in enumerate(zip(self.qkv, self.project, self.feed, strict=True)):
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(self.norms[2 * number](x)).chunk(3, -1)
            )
            x = x + project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + feed(self.norms[2 * number + 1](x))
        return (x[:, :-1] * self.items(ids[:, 1:])).sum(-1)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return (ids_of(batch, self.length),)


class _TwoTower(nn.Module):
    """Yi et al. 2019: users and items by networks of their own, each item of the batch the other users' negative."""

    def __init__(self, dim: int = 64, fields: tuple[int, int] = (20, 12), out: int = 128) -> None:
        super().__init__()
        self.fields = fields
        self.embeddings = nn.ModuleList(Fields(number, dim) for number in fields)
        self.towers = nn.ModuleList(mlp((number * dim, 2048, 1024, out), nn.ReLU) for number in fields)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        sides = zip((user, item), self.embeddings, self.towers, strict=True)
        left, right = (F.normalize(tower(embedding(ids).flatten(1)), dim=-1) for ids, embedding, tower in sides)
        scores = left @ right.t() / 0.05
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(ids_of(batch, number) for number in self.fields)


KINDS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, ...]]]] = {
    "deepfm": (_DeepFM, {"fields": (26, 32, 39), "dim": (16, 32, 40, 64), "hidden": _WIDTHS}),
    "xdeepfm": (
        _XDeepFM, {"fields": (20, 26, 32), "dim": (8, 16, 24), "maps": ((64, 64), (96, 96), (128,)), "hidden": (384, 512)},
    ),
    "autoint": (
        _AutoInt,
        {"fields": (24, 32, 39), "dim": (32, 48, 64), "heads": (2, 4), "width": (64, 128, 192), "layers": (2, 3)},
    ),
    "mmoe": (
        _MMoE,
        {"fields": (24, 32, 40), "dim": (16, 32, 48), "experts": (4, 6, 8), "tasks": (2, 3), "width": (512, 768, 1024)},
    ),
    "masknet": (_MaskNet, {"fields": (26, 32, 39), "dim": (16, 32, 64), "blocks": (2, 3, 4), "width": (512, 1024, 2048)}),
    "finalmlp": (_FinalMLP, {"fields": (26, 32, 39), "dim": (16, 20, 32), "width": (800, 1000, 1280), "heads": (5, 10, 20)}),
    "din": (_DIN, {"dim": (32, 48, 64, 96), "hidden": _WIDTHS}),
    "hstu": (_HSTU, {"length": (96, 128, 200), "dim": (128, 192, 256), "heads": (2, 4), "layers": (2, 3)}),
    "sasrec": (_SASRec, {"length": (96, 128, 200), "dim": (128, 192, 256), "heads": (2, 4), "layers": (2, 3)}),
    "two_tower": (_TwoTower, {"dim": (32, 64), "fields": ((20, 12), (14, 8)), "out": (64, 128, 256)}),
}  # fmt: skip


def made(name: str, seed: int | None = None) -> Made:
    """A model and its inputs; with a seed its sizes and its batch are drawn."""
    kind, options = KINDS[name]
    source, batch, sizes = random.Random(f"{name} {seed}"), BATCHES[name], dict[str, Any]()
    if seed is not None:
        sizes = {option: source.choice(values) for option, values in options.items()}
        batch = source.choice((batch // 2, batch * 3 // 4, batch, batch * 3 // 2))
    model = kind(**sizes)
    inputs: tuple[Tensor, ...] = model.inputs(batch)
    return model, inputs


def __getattr__(name: str) -> Callable[[], Made]:
    """`MODEL` or `MODEL_SEED`: the function of a model as it is in `KINDS`, or drawn."""
    kind, _, seed = name.rpartition("_")
    if name in KINDS:
        return lambda: made(name)
    if kind in KINDS and seed.isdigit():
        return lambda: made(kind, int(seed))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

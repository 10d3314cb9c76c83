"""Eight kinds of recommenders more, seven of them published: told before any of them was measured, to judge predictions by.

    loka-sim whatif benchmarks.fresh_models:gdcn --batch 8192
    python benchmarks/step_profile.py benchmarks.fresh_models:gdcn

Each function returns (model, inputs) with the batch of `BATCHES`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.other_models import Fields, Made, ids_of, mlp
from loka_sim.validation.runnable import TABLE_ROWS

BATCHES = {
    "nfm": 8192, "gdcn": 8192, "ft_transformer": 1024, "pepnet": 4096,
    "multvae": 2048, "mlp_mixer": 2048, "causal": 512, "star": 2048,
}  # fmt: skip
"""Samples of each function's inputs."""


class _NFM(nn.Module):
    """He and Chua 2017: products of all pairs summed up by squares, a norm over the batch, and a deep network."""

    def __init__(self, fields: int = 39, dim: int = 64) -> None:
        super().__init__()
        self.embedding, self.first = Fields(fields, dim), Fields(fields, 1)
        self.norm, self.deep = nn.BatchNorm1d(dim), mlp((dim, 1024, 512, 256, 1), nn.ReLU, dropout=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        pooled = 0.5 * (x.sum(1).square() - x.square().sum(1))
        return self.deep(self.norm(pooled)) + self.first(ids).sum(1)


class _GDCN(nn.Module):
    """Wang et al. 2023: cross layers, each of which lets through what a gate of its own says."""

    def __init__(self, fields: int = 30, dim: int = 32, layers: int = 4) -> None:
        super().__init__()
        size = fields * dim
        self.embedding = Fields(fields, dim)
        self.cross = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers))
        self.gates = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers))
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(layers))
        self.deep, self.out = mlp((size, 1024, 1024), nn.ReLU, dropout=0.1), nn.Linear(size + 1024, 1)

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embedding(ids).flatten(1)
        for cross, gate, bias in zip(self.cross, self.gates, self.bias, strict=True):
            x = first * (cross(x) + bias) * torch.sigmoid(gate(x)) + x
        return self.out(torch.cat([x, self.deep(first)], 1))


class _FTTransformer(nn.Module):
    """Gorishniy et al. 2021: a transformer over fields with gated GELU units, read off at a token of its own."""

    def __init__(self, fields: int = 31, dim: int = 192, heads: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.heads = Fields(fields, dim), heads
        self.token = nn.Parameter(torch.zeros(dim))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.project = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers + 1))
        self.out = nn.Linear(dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(ids), 1, -1), self.embedding(ids)], 1)
        for layer, (qkv, project, up, down) in enumerate(zip(self.qkv, self.project, self.up, self.down, strict=True)):
            parts = qkv(self.norms[2 * layer](x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            x = x + project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            gate, value = up(self.norms[2 * layer + 1](x)).chunk(2, -1)
            x = x + down(F.gelu(gate) * value)
        return self.out(F.relu(self.norms[-1](x[:, 0])))


class _PEPNet(nn.Module):
    """Chang et al. 2023: embeddings and each layer of each task's network scaled by gates from the domain and the user."""

    def __init__(self, fields: int = 24, dim: int = 32, tasks: int = 2, widths: tuple[int, ...] = (512, 256, 128)) -> None:
        super().__init__()
        size = fields * dim
        self.embedding, self.domain = Fields(fields, dim), Fields(4, 16)
        self.scale = self._gate(64 + size, size)
        sizes = (size, *widths)
        self.gates = nn.ModuleList(nn.ModuleList(self._gate(64 + size, width) for width in sizes[:-1]) for _ in range(tasks))
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(before, after) for before, after in zip(sizes[:-1], widths, strict=True))
            for _ in range(tasks)
        )
        self.out = nn.ModuleList(nn.Linear(widths[-1], 1) for _ in range(tasks))

    @staticmethod
    def _gate(size: int, width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(size, 256), nn.ReLU(), nn.Linear(256, width), nn.Sigmoid())

    def forward(self, ids: Tensor, domain: Tensor) -> tuple[Tensor, ...]:
        x, prior = self.embedding(ids).flatten(1), self.domain(domain).flatten(1)
        x = x * 2 * self.scale(torch.cat([prior, x.detach()], 1))
        known, results = torch.cat([prior, x.detach()], 1), []
        for gates, layers, out in zip(self.gates, self.layers, self.out, strict=True):
            hidden = x
            for gate, layer in zip(gates, layers, strict=True):
                hidden = F.relu(layer(hidden * 2 * gate(known)))
            results.append(out(hidden))
        return tuple(results)


class _MultVAE(nn.Module):
    """Liang et al. 2018: what a user clicked on, normed and dropped out, through a narrow normal layer to odds of all items."""

    def __init__(self, items: int = 12_000, hidden: int = 600, dim: int = 200) -> None:
        super().__init__()
        self.up, self.mean = nn.Linear(items, hidden), nn.Linear(hidden, 2 * dim)
        self.down, self.out = nn.Linear(dim, hidden), nn.Linear(hidden, items)

    def forward(self, clicks: Tensor) -> Tensor:
        x = F.dropout(F.normalize(clicks), 0.5, self.training)
        mean, log_variance = self.mean(torch.tanh(self.up(x))).chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        odds = torch.log_softmax(self.out(torch.tanh(self.down(z))), -1)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        return (0.2 * divergence - (odds * clicks).sum(-1)).mean()


class _MLPMixer(nn.Module):
    """Li et al. 2022 (MLP4Rec): networks over places, over features and over both, one after the other, of a user's sequence."""

    def __init__(self, length: int = 50, dim: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.items = nn.Embedding(TABLE_ROWS, dim)
        self.places = nn.ModuleList(mlp((length, 2 * length, length), nn.GELU) for _ in range(layers))
        self.features = nn.ModuleList(mlp((dim, 4 * dim, dim), nn.GELU) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers))
        self.deep = mlp((2 * dim, 256, 1), nn.GELU)

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        x = self.items(history)
        for layer, (places, features) in enumerate(zip(self.places, self.features, strict=True)):
            x = x + places(self.norms[2 * layer](x).transpose(1, 2)).transpose(1, 2)
            x = x + features(self.norms[2 * layer + 1](x))
        return self.deep(torch.cat([x.mean(1), self.items(candidate)], 1))


class _Causal(nn.Module):
    """A causal transformer over long sequences with RMSNorm, SwiGLU and a bilinear score of sampled items."""

    def __init__(self, length: int = 200, dim: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.items, self.heads = nn.Embedding(TABLE_ROWS, dim), heads
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim, bias=False) for _ in range(layers))
        self.project = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(dim, 6 * dim, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(3 * dim, dim, bias=False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 * layers))
        self.score = nn.Linear(dim, dim, bias=False)

    def forward(self, history: Tensor, following: Tensor, others: Tensor) -> Tensor:
        x = self.items(history)
        for layer, (qkv, project, up, down) in enumerate(zip(self.qkv, self.project, self.up, self.down, strict=True)):
            parts = qkv(self.norms[2 * layer](x)).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            x = x + project(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            gate, value = up(self.norms[2 * layer + 1](x)).chunk(2, -1)
            x = x + down(F.silu(gate) * value)
        wanted = self.score(x)
        right, wrong = ((wanted * self.items(ids)).sum(-1) for ids in (following, others))
        return F.softplus(wrong - right).mean()


class _STAR(nn.Module):
    """Sheng et al. 2021: a shared network whose weights are multiplied by those of one domain of several."""

    def __init__(self, fields: int = 28, dim: int = 32, domains: int = 3, widths: tuple[int, ...] = (768, 384, 192)) -> None:
        super().__init__()
        self.embedding = Fields(fields, dim)
        sizes = (fields * dim, *widths, 1)
        self.shared = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True))
        self.own = nn.ModuleList(
            nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:], strict=True)) for _ in range(domains)
        )

    def forward(self, *ids: Tensor) -> Tensor:
        parts = []
        for own, some in zip(self.own, ids, strict=True):
            x = self.embedding(some).flatten(1)
            for place, (shared, layer) in enumerate(zip(self.shared, own, strict=True)):
                x = F.linear(x, shared.weight * layer.weight, shared.bias + layer.bias)
                x = F.relu(x) if place < len(own) - 1 else x
            parts.append(x)
        return torch.cat(parts)


def _clicks(batch: int, items: int = 12_000) -> Tensor:
    device = torch.get_default_device()
    return torch.empty(batch, items, device=device) if device.type == "meta" else (torch.rand(batch, items) < 0.01).float()


KINDS: dict[str, Callable[[int], Made]] = {
    "nfm": lambda batch: (_NFM(), (ids_of(batch, 39),)),
    "gdcn": lambda batch: (_GDCN(), (ids_of(batch, 30),)),
    "ft_transformer": lambda batch: (_FTTransformer(), (ids_of(batch, 31),)),
    "pepnet": lambda batch: (_PEPNet(), (ids_of(batch, 24), ids_of(batch, 4))),
    "multvae": lambda batch: (_MultVAE(), (_clicks(batch),)),
    "mlp_mixer": lambda batch: (_MLPMixer(), (ids_of(batch, 50), ids_of(batch))),
    "causal": lambda batch: (_Causal(), (ids_of(batch, 200), ids_of(batch, 200), ids_of(batch, 200))),
    "star": lambda batch: (_STAR(), tuple(ids_of(batch, 28) for _ in range(3))),
}


def __getattr__(name: str) -> Callable[[], Made]:
    """The function of a model of `KINDS`."""
    if name not in KINDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: KINDS[name](BATCHES[name])

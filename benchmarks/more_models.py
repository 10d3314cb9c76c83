"""Eight kinds of recommenders more, all published: told before any of them was measured, as `benchmarks/fresh_models.py`'s were.

Then each at other sizes (`_wide`), told before these were measured, by a model that learned from the first.

    loka-sim whatif benchmarks.more_models:rankmixer --batch 2048
    python benchmarks/step_profile.py benchmarks.more_models:rankmixer

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
    "rankmixer": 2048, "hiformer": 2048, "can": 4096, "bert4rec": 256, "aitm": 8192, "dhen": 2048, "crossing": 8192, "sim": 1024,
    "rankmixer_wide": 1024, "hiformer_wide": 1024, "can_wide": 2048, "bert4rec_wide": 192, "aitm_wide": 4096, "dhen_wide": 3072,
    "crossing_wide": 6144, "sim_wide": 1536,
}  # fmt: skip
"""Samples of each function's inputs."""


class _RankMixer(nn.Module):
    """Zhu et al. 2025: tokens mixed by taking heads of all of them, and a network of its own for each token."""

    def __init__(self, fields: int = 48, dim: int = 32, tokens: int = 16, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.tokens = Fields(fields, dim), tokens
        self.into = nn.Parameter(torch.randn(tokens, fields * dim // tokens, width) * 0.1)
        self.up = nn.ParameterList(nn.Parameter(torch.randn(tokens, width, 4 * width) * 0.06) for _ in range(layers))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(tokens, 4 * width, width) * 0.03) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.out = nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.embedding(ids).flatten(1).unflatten(1, (self.tokens, -1))
        x = torch.einsum("btd,tdw->btw", parts, self.into)
        for layer, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            mixed = x.unflatten(2, (self.tokens, -1)).transpose(1, 2).flatten(2)
            x = self.norms[2 * layer](x + mixed)
            hidden = F.gelu(torch.einsum("btw,twh->bth", x, up))
            x = self.norms[2 * layer + 1](x + torch.einsum("bth,thw->btw", hidden, down))
        return self.out(x.mean(1))


class _HiFormer(nn.Module):
    """Gui et al. 2023: attention over fields, whose queries and keys are made of all fields together."""

    def __init__(self, fields: int = 24, dim: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.fields, self.dim, self.heads = Fields(fields, dim), fields, dim, heads
        size = fields * dim
        self.query = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers))
        self.key = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers))
        self.value = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(layers))
        self.feed = nn.ModuleList(mlp((dim, 4 * dim, dim), nn.GELU) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers))
        self.deep = mlp((size, 512, 1), nn.ReLU)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.fields, self.heads, -1)).transpose(1, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer, (query, key, value, feed) in enumerate(zip(self.query, self.key, self.value, self.feed, strict=True)):
            whole = x.flatten(1)
            q, k, v = (self._heads(project(whole)) for project in (query, key, value))
            weights = torch.softmax(q @ k.transpose(-2, -1) / (self.dim / self.heads) ** 0.5, -1)
            x = self.norms[2 * layer](x + (weights @ v).transpose(1, 2).flatten(2))
            x = self.norms[2 * layer + 1](x + feed(x))
        return self.deep(x.flatten(1))


class _CAN(nn.Module):
    """Bian et al. 2020: each candidate's row is the weights of a small network, through which what was seen is passed."""

    def __init__(self, length: int = 50, dim: int = 16, fields: int = 20, out: int = 8) -> None:
        super().__init__()
        self.dim, self.out = dim, out
        self.history, self.fields = nn.Embedding(TABLE_ROWS, dim), Fields(fields, 2 * dim)
        self.weights = nn.Embedding(TABLE_ROWS, dim * out + out * out)
        self.deep = mlp((2 * out + 2 * dim * fields, 1024, 512, 1), nn.PReLU)

    def forward(self, history: Tensor, candidate: Tensor, ids: Tensor) -> Tensor:
        first, second = self.weights(candidate).split((self.dim * self.out, self.out * self.out), 1)
        hidden = torch.tanh(self.history(history) @ first.unflatten(1, (self.dim, self.out)))
        last = torch.tanh(hidden @ second.unflatten(1, (self.out, self.out)))
        return self.deep(torch.cat([hidden.sum(1), last.sum(1), self.fields(ids).flatten(1)], 1))


class _BERT4Rec(nn.Module):
    """Sun et al. 2019: torch's own encoder over sequences both ways, and odds of all items at the places that were masked."""

    def __init__(self, length: int = 100, dim: int = 256, heads: int = 4, layers: int = 2, masked: int = 16) -> None:
        super().__init__()
        self.masked = masked
        self.items, self.places = nn.Embedding(TABLE_ROWS, dim), nn.Parameter(torch.zeros(length, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.1, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.project, self.norm, self.out = nn.Linear(dim, dim), nn.LayerNorm(dim), nn.Linear(dim, TABLE_ROWS)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        x = F.dropout(self.items(ids) + self.places, 0.1, self.training)
        for layer in self.layers:
            x = layer(x)
        odds = self.out(self.norm(F.gelu(self.project(x[:, : self.masked])))).flatten(0, 1)
        return F.cross_entropy(odds, wanted.flatten())


class _AITM(nn.Module):
    """Xi et al. 2021: towers of steps that follow each other, each told what the one before found by attention over two."""

    def __init__(self, fields: int = 32, dim: int = 40, steps: int = 3, width: int = 128) -> None:
        super().__init__()
        self.embedding, self.width = Fields(fields, dim), width
        self.towers = nn.ModuleList(mlp((fields * dim, 1024, 512, width), nn.ReLU, dropout=0.1) for _ in range(steps))
        self.passed = nn.ModuleList(nn.Linear(width, width) for _ in range(steps - 1))
        self.attend = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(steps - 1))
        self.out = nn.ModuleList(nn.Linear(width, 1) for _ in range(steps))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).flatten(1)
        state, results = F.relu(self.towers[0](x)), list[Tensor]()
        results.append(torch.sigmoid(self.out[0](state)))
        for tower, passed, attend, out in zip(self.towers[1:], self.passed, self.attend, self.out[1:], strict=True):
            both = torch.stack([F.relu(tower(x)), F.relu(passed(state))], 1)
            q, k, v = attend(both).chunk(3, -1)
            weights = torch.softmax((q * k).sum(-1) / self.width**0.5, 1)
            state = (weights[:, :, None] * v).sum(1)
            results.append(torch.sigmoid(out(state)))
        every = torch.cat(results, 1)
        return every.sum(1) + 0.6 * F.relu(every[:, 1:] - every[:, :-1]).sum(1)


class _DHEN(nn.Module):
    """Zhang et al. 2022: layers of several interactions side by side, put together, with a shortcut and a norm."""

    def __init__(self, fields: int = 32, dim: int = 64, layers: int = 3, out: int = 16) -> None:
        super().__init__()
        self.embedding, self.out = Fields(fields, dim), out
        counts = [fields] + [2 * out] * layers
        self.cross = nn.ModuleList(nn.Linear(count * dim, count * dim) for count in counts[:-1])
        self.pick = nn.ModuleList(nn.Linear(count, out) for count in counts[:-1])
        self.dots = nn.ModuleList(mlp((count * (count - 1) // 2, 512, out * dim), nn.ReLU) for count in counts[:-1])
        self.short = nn.ModuleList(nn.Linear(count, 2 * out) for count in counts[:-1])
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.deep = mlp((2 * out * dim, 512, 256, 1), nn.ReLU)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for cross, pick, dots, short, norm in zip(self.cross, self.pick, self.dots, self.short, self.norms, strict=True):
            count = x.shape[1]
            flat = x.flatten(1)
            crossed = (flat * cross(flat) + flat).unflatten(1, (count, -1))
            row, column = torch.triu_indices(count, count, 1, device=x.device)
            pairs = (x @ x.transpose(1, 2))[:, row, column]
            parts = [pick(crossed.transpose(1, 2)).transpose(1, 2), dots(pairs).unflatten(1, (self.out, -1))]
            x = norm(torch.cat(parts, 1) + short(x.transpose(1, 2)).transpose(1, 2))
        return self.deep(x.flatten(1))


class _Crossing(nn.Module):
    """Shan et al. 2016 (Deep Crossing): fields of widths of their own put together, and residual units of two layers each."""

    def __init__(self, units: int = 4, hidden: int = 512, dims: tuple[int, ...] = (128, 96, 64, 48, 32, 32, 24, 16)) -> None:
        super().__init__()
        self.fields = nn.ModuleList(Fields(3, dim) for dim in dims)
        self.dense = nn.Linear(13, 64)
        size = 3 * sum(dims) + 64
        self.units = nn.ModuleList(mlp((size, hidden, size), nn.ReLU) for _ in range(units))
        self.out = nn.Linear(size, 1)

    def forward(self, dense: Tensor, *ids: Tensor) -> Tensor:
        x = torch.cat(
            [F.relu(self.dense(dense)), *(field(some).flatten(1) for field, some in zip(self.fields, ids, strict=True))], 1
        )
        for unit in self.units:
            x = F.relu(x + unit(x))
        return self.out(x)


class _SIM(nn.Module):
    """Pi et al. 2020: the nearest hundred of a long history, attended to by heads with the candidate and times gone by."""

    def __init__(self, length: int = 100, dim: int = 64, heads: int = 4, fields: int = 24) -> None:
        super().__init__()
        self.heads = heads
        self.items, self.gone, self.fields = nn.Embedding(TABLE_ROWS, dim), nn.Embedding(TABLE_ROWS, dim), Fields(fields, 32)
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(2 * dim, dim), nn.Linear(2 * dim, dim)
        self.project, self.short = nn.Linear(dim, dim), mlp((4 * dim, 128, 1), nn.Sigmoid)
        self.deep = mlp((3 * dim + 32 * fields, 1024, 512, 1), nn.ReLU, nn.BatchNorm1d)

    def forward(self, history: Tensor, gone: Tensor, recent: Tensor, candidate: Tensor, ids: Tensor) -> Tensor:
        seen, item = torch.cat([self.items(history), self.gone(gone)], -1), self.items(candidate)
        q = self.query(item)[:, None].unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (project(seen).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.key, self.value))
        weights = torch.softmax(q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5, -1)
        long = self.project((weights @ v).transpose(1, 2).flatten(1))
        last = self.items(recent)
        beside = item[:, None].expand_as(last)
        scores = self.short(torch.cat([last, beside, last - beside, last * beside], -1))
        return self.deep(torch.cat([item, long, (scores * last).sum(1), self.fields(ids).flatten(1)], 1))


KINDS: dict[str, Callable[[int], Made]] = {
    "rankmixer": lambda batch: (_RankMixer(), (ids_of(batch, 48),)),
    "hiformer": lambda batch: (_HiFormer(), (ids_of(batch, 24),)),
    "can": lambda batch: (_CAN(), (ids_of(batch, 50), ids_of(batch), ids_of(batch, 20))),
    "bert4rec": lambda batch: (_BERT4Rec(), (ids_of(batch, 100), ids_of(batch, 16))),
    "aitm": lambda batch: (_AITM(), (ids_of(batch, 32),)),
    "dhen": lambda batch: (_DHEN(), (ids_of(batch, 32),)),
    "crossing": lambda batch: (_Crossing(), (torch.rand(batch, 13), *(ids_of(batch, 3) for _ in range(8)))),
    "sim": lambda batch: (_SIM(), (ids_of(batch, 100), ids_of(batch, 100), ids_of(batch, 20), ids_of(batch), ids_of(batch, 24))),
    "rankmixer_wide": lambda batch: (_RankMixer(64, 24, 32, 512, 3), (ids_of(batch, 64),)),
    "hiformer_wide": lambda batch: (_HiFormer(40, 48, 3, 3), (ids_of(batch, 40),)),
    "can_wide": lambda batch: (_CAN(120, 32, 30, 16), (ids_of(batch, 120), ids_of(batch), ids_of(batch, 30))),
    "bert4rec_wide": lambda batch: (_BERT4Rec(200, 192, 6, 3, 30), (ids_of(batch, 200), ids_of(batch, 30))),
    "aitm_wide": lambda batch: (_AITM(24, 64, 4, 256), (ids_of(batch, 24),)),
    "dhen_wide": lambda batch: (_DHEN(26, 96, 2, 24), (ids_of(batch, 26),)),
    "crossing_wide": lambda batch: (
        _Crossing(5, 1024, (160, 128, 96, 64, 64, 32)),
        (torch.rand(batch, 13), *(ids_of(batch, 3) for _ in range(6))),
    ),
    "sim_wide": lambda batch: (
        _SIM(200, 96, 8, 32),
        (ids_of(batch, 200), ids_of(batch, 200), ids_of(batch, 40), ids_of(batch), ids_of(batch, 32)),
    ),
}


def __getattr__(name: str) -> Callable[[], Made]:
    """The function of a model of `KINDS`."""
    if name not in KINDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: KINDS[name](BATCHES[name])

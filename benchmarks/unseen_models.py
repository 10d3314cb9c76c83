"""More recommenders, seven of them published, of whose kinds no kernel was ever fitted: to judge predictions of steps by.

    loka-sim whatif benchmarks.unseen_models:fibinet --batch 4096
    python benchmarks/step_profile.py benchmarks.unseen_models:fibinet

Each function returns (model, inputs) with the batch of `BATCHES`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.other_models import Fields, Made, ids_of, mlp
from loka_sim.validation.runnable import TABLE_ROWS

BATCHES = {"fibinet": 4096, "ple": 4096, "pnn": 4096, "afm": 2048, "dcnmix": 4096, "bst": 1024, "edcn": 6144, "tagger": 1024}
"""Samples of each function's inputs."""


class _FiBiNET(nn.Module):
    """Huang et al. 2019: fields weighed by what squeezes them, then products of all pairs through a matrix."""

    def __init__(self, fields: int = 26, dim: int = 32) -> None:
        super().__init__()
        self.embedding = Fields(fields, dim)
        self.squeeze = nn.Sequential(nn.Linear(fields, 8), nn.ReLU(), nn.Linear(8, fields), nn.ReLU())
        self.plain, self.weighed = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        left, right = torch.triu_indices(fields, fields, offset=1)
        self.left: Tensor
        self.right: Tensor
        self.register_buffer("left", left)
        self.register_buffer("right", right)
        self.deep = mlp((fields * (fields - 1) * dim, 1024, 512, 1), nn.ReLU)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        weighed = x * self.squeeze(x.mean(-1)).unsqueeze(-1)
        pairs = [layer(y)[:, self.left] * y[:, self.right] for layer, y in ((self.plain, x), (self.weighed, weighed))]
        return self.deep(torch.cat(pairs, 1).flatten(1))


class _PLE(nn.Module):
    """Tang et al. 2020: experts of each task and shared ones, mixed layer after layer."""

    def __init__(
        self, fields: int = 32, dim: int = 24, tasks: int = 2, experts: int = 3, widths: tuple[int, ...] = (768, 512)
    ) -> None:
        super().__init__()
        self.embedding, self.tasks, self.each = Fields(fields, dim), tasks, experts
        sizes = (fields * dim, *widths)
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(before, after), nn.ReLU()) for _ in range(experts * (tasks + 1)))
            for before, after in zip(sizes, widths, strict=False)
        )
        self.gates = nn.ModuleList(nn.ModuleList(nn.Linear(before, 2 * experts) for _ in range(tasks)) for before in sizes[:-1])
        self.shared = nn.ModuleList(nn.Linear(before, (tasks + 1) * experts) for before in sizes[:-1])
        self.towers = nn.ModuleList(mlp((widths[-1], 256, 1), nn.ReLU) for _ in range(tasks))

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(ids).flatten(1)
        inputs = [x] * (self.tasks + 1)
        for experts, gates, shared in zip(self.experts, self.gates, self.shared, strict=True):
            n = self.each
            found = [experts[task * n + i](inputs[task]) for task in range(self.tasks + 1) for i in range(n)]
            common = found[self.tasks * n :]
            mixed = [self._mixed(gates[t](inputs[t]), found[t * n : (t + 1) * n] + common) for t in range(self.tasks)]
            inputs = [*mixed, self._mixed(shared(inputs[-1]), found)]
        return tuple(tower(inputs[task]) for task, tower in enumerate(self.towers))

    @staticmethod
    def _mixed(scores: Tensor, experts: list[Tensor]) -> Tensor:
        return (torch.softmax(scores, -1).unsqueeze(-1) * torch.stack(experts, 1)).sum(1)


class _PNN(nn.Module):
    """Qu et al. 2016: inner products of all pairs of fields beside them, with dropout and a norm over the batch."""

    def __init__(self, fields: int = 39, dim: int = 32, hidden: int = 1024) -> None:
        super().__init__()
        self.embedding = Fields(fields, dim)
        left, right = torch.triu_indices(fields, fields, offset=1)
        self.places: Tensor
        self.register_buffer("places", left * fields + right)
        size = fields * dim + fields * (fields - 1) // 2
        self.deep = mlp((size, hidden, hidden, 1), nn.BatchNorm1d, nn.ReLU, dropout=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        products = torch.bmm(x, x.transpose(1, 2)).flatten(1)[:, self.places]
        return self.deep(torch.cat([x.flatten(1), products], 1))


class _AFM(nn.Module):
    """Xiao et al. 2017: elementwise products of all pairs of fields, weighed by attention."""

    def __init__(self, fields: int = 24, dim: int = 32, attention: int = 32) -> None:
        super().__init__()
        self.embedding = Fields(fields, dim)
        left, right = torch.triu_indices(fields, fields, offset=1)
        self.left: Tensor
        self.right: Tensor
        self.register_buffer("left", left)
        self.register_buffer("right", right)
        self.score = nn.Sequential(nn.Linear(dim, attention), nn.ReLU(), nn.Linear(attention, 1, bias=False))
        self.out = nn.Linear(dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        pairs = x[:, self.left] * x[:, self.right]
        return self.out((torch.softmax(self.score(pairs), 1) * pairs).sum(1))


class _DCNMix(nn.Module):
    """Wang et al. 2021: cross layers of low rank in several subspaces, mixed by gates."""

    def __init__(self, fields: int = 26, dim: int = 40, layers: int = 3, experts: int = 4, rank: int = 64) -> None:
        super().__init__()
        size = fields * dim
        self.embedding = Fields(fields, dim)
        self.down = nn.ParameterList(nn.Parameter(torch.empty(experts, size, rank).uniform_(-0.02, 0.02)) for _ in range(layers))
        self.core = nn.ParameterList(nn.Parameter(torch.empty(experts, rank, rank).uniform_(-0.1, 0.1)) for _ in range(layers))
        self.up = nn.ParameterList(nn.Parameter(torch.empty(experts, rank, size).uniform_(-0.1, 0.1)) for _ in range(layers))
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(layers))
        self.gates = nn.ModuleList(nn.Linear(size, experts, bias=False) for _ in range(layers))
        self.deep = mlp((size, 1024, 1024, 1), nn.ReLU)

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embedding(ids).flatten(1)
        for down, core, up, bias, gate in zip(self.down, self.core, self.up, self.bias, self.gates, strict=True):
            low = torch.tanh(torch.matmul(x, down))
            high = torch.matmul(torch.tanh(torch.matmul(low, core)), up) + bias
            mixed = (torch.softmax(gate(x), -1).t().unsqueeze(-1) * high).sum(0)
            x = first * mixed + x
        return self.deep(x)


class _BST(nn.Module):
    """Chen et al. 2019: a transformer over what was seen and the candidate, then a network with leaky units and dropout."""

    def __init__(self, length: int = 64, dim: int = 128, heads: int = 8, fields: int = 12) -> None:
        super().__init__()
        self.items, self.others, self.heads = nn.Embedding(TABLE_ROWS, dim), Fields(fields, 32), heads
        self.places = nn.Parameter(torch.zeros(length, dim))
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = mlp((dim, 4 * dim, dim), nn.LeakyReLU, dropout=0.1)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.deep = mlp((length * dim + fields * 32, 1024, 512, 256, 1), nn.LeakyReLU)

    def forward(self, items: Tensor, ids: Tensor) -> Tensor:
        x = self.items(items) + self.places
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.project(attended))
        x = self.norms[1](x + self.feed(x))
        return self.deep(torch.cat([x.flatten(1), self.others(ids).flatten(1)], 1))


class _EDCN(nn.Module):
    """Chen et al. 2021: a cross and a deep network side by side, that meet after every layer and are gated anew."""

    def __init__(self, fields: int = 39, dim: int = 24, layers: int = 3) -> None:
        super().__init__()
        size = fields * dim
        self.embedding = Fields(fields, dim)
        self.cross = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.deep = nn.ModuleList(nn.Sequential(nn.Linear(size, size), nn.GELU()) for _ in range(layers))
        self.gate = nn.ParameterList(nn.Parameter(torch.zeros(2, size)) for _ in range(layers))
        self.out = nn.Linear(3 * size, 1)

    def forward(self, ids: Tensor) -> Tensor:
        first = one = other = self.embedding(ids).flatten(1)
        meeting = first
        for cross, deep, gate in zip(self.cross, self.deep, self.gate, strict=True):
            one, other = first * cross(one) + one, deep(other)
            meeting = one * other
            one, other = (torch.softmax(weight, -1) * meeting + side for weight, side in zip(gate, (one, other), strict=True))
        return self.out(torch.cat([one, other, meeting], 1))


class _Tagger(nn.Module):
    """A sequence of items summed with weights that fall, RMSNorm, gated linear units, and the next item among sampled ones."""

    def __init__(self, length: int = 50, dim: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.items, self.decay = nn.Embedding(TABLE_ROWS, dim), nn.Parameter(torch.zeros(length))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(dim, 8 * dim) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * dim, dim) for _ in range(layers))

    def forward(self, history: Tensor, candidates: Tensor) -> Tensor:
        x = self.items(history)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            gate, value = up(norm(x)).chunk(2, -1)
            x = x + down(F.silu(gate) * value)
        user = (torch.softmax(self.decay, 0)[:, None] * x).sum(1)
        scores = (self.items(candidates) @ user.unsqueeze(-1)).squeeze(-1)
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device))


KINDS: dict[str, Callable[[int], Made]] = {
    "fibinet": lambda batch: (_FiBiNET(), (ids_of(batch, 26),)),
    "ple": lambda batch: (_PLE(), (ids_of(batch, 32),)),
    "pnn": lambda batch: (_PNN(), (ids_of(batch, 39),)),
    "afm": lambda batch: (_AFM(), (ids_of(batch, 24),)),
    "dcnmix": lambda batch: (_DCNMix(), (ids_of(batch, 26),)),
    "bst": lambda batch: (_BST(), (ids_of(batch, 64), ids_of(batch, 12))),
    "edcn": lambda batch: (_EDCN(), (ids_of(batch, 39),)),
    "tagger": lambda batch: (_Tagger(), (ids_of(batch, 50), ids_of(batch, 100))),
}


def __getattr__(name: str) -> Callable[[], Made]:
    """The function of a model of `KINDS`."""
    if name not in KINDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: KINDS[name](BATCHES[name])

"""Wukong: stacked factorization machines; every layer a factorization machine block and a linear compression block.

Source: Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation" (arXiv 2403.02545), section 3.
The optimized FM multiplies X (X^T Y) with a learned projection Y; LayerNorm stands before the block's MLP and after
the residual addition, as in the paper. The paper names no activation; ReLU is what its public implementations use.
LCB, Y and the residual projection (only where the number of embeddings changes) are plain matrices without bias.
An important feature has several embeddings (paper, section 3.2): `per_field` of them, cut from one wide table row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka_sim.mods.modules import LayerFactory
from loka_sim.zoo.common import MLP, MLPERF_ROWS, SMALL_ROWS, BatchedProduct, InputShape, Tables


@dataclass(frozen=True)
class WukongConfig:
    """Sizes of a Wukong.

    Attributes:
        dim: Elements of an embedding (d).
        per_field: Embeddings per categorical field.
        dense_tokens: Embeddings made from the dense features.
        dense: Widths of the hidden layers of the dense features' MLP.
        layers: Interaction layers (l).
        fmb: Embeddings that a factorization machine block returns (n_F).
        lcb: Embeddings that a linear compression block returns (n_L).
        rank: Columns of the FM's projection (k).
        hidden: Widths of the hidden layers of a block's MLP.
        top: Widths of the hidden layers of the final MLP.
        rows: Rows of the tables.
    """

    dim: int
    per_field: int
    dense_tokens: int
    dense: tuple[int, ...]
    layers: int
    fmb: int
    lcb: int
    rank: int
    hidden: tuple[int, ...]
    top: tuple[int, ...]
    rows: tuple[int, ...]


SMALL = WukongConfig(
    dim=16, per_field=1, dense_tokens=6, dense=(32,), layers=3, fmb=16, lcb=16, rank=8,
    hidden=(128, 128), top=(128, 64), rows=SMALL_ROWS,
)  # fmt: skip
PRODUCTION = WukongConfig(
    dim=128, per_field=9, dense_tokens=22, dense=(512,), layers=16, fmb=64, lcb=192, rank=32,
    hidden=(8192, 4096, 4096, 8192), top=(8192, 4096, 1024), rows=MLPERF_ROWS,
)  # fmt: skip


class FactorizationMachineBlock(nn.Module):
    """Optimized FM, norm, MLP: (B, n, d) to (B, n_F, d)."""

    def __init__(self, config: WukongConfig, tokens: int, factory: LayerFactory) -> None:
        """`tokens` is n, the embeddings that come in."""
        super().__init__()
        self.project = factory.linear(tokens, config.rank, bias=False)
        self.interact = BatchedProduct()
        self.norm = factory.norm(tokens * config.rank)
        self.mlp = MLP(factory, tokens * config.rank, config.hidden, "relu")
        self.out = factory.linear(config.hidden[-1], config.fmb * config.dim)
        self.shape = (config.fmb, config.dim)

    def interactions(self, x: Tensor) -> Tensor:
        """X X^T Y, computed as X (X^T Y): (B, n, d) to (B, n, k)."""
        return self.interact(x, self.project(x.transpose(1, 2)))

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, n_F, d)."""
        return self.out(self.mlp(self.norm(self.interactions(x).flatten(1)))).unflatten(1, self.shape)


class WukongLayer(nn.Module):
    """LayerNorm(concat(FMB(X), LCB(X)) + X): (B, n, d) to (B, n_F + n_L, d)."""

    def __init__(self, config: WukongConfig, tokens: int, factory: LayerFactory) -> None:
        """`tokens` is n, the embeddings that come in."""
        super().__init__()
        self.fmb = FactorizationMachineBlock(config, tokens, factory)
        self.lcb = factory.linear(tokens, config.lcb, bias=False)
        self.tokens_out = config.fmb + config.lcb
        same = tokens == self.tokens_out
        self.residual = None if same else factory.linear(tokens, self.tokens_out, bias=False)
        self.norm = factory.norm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, n_F + n_L, d)."""
        across = x.transpose(1, 2)
        joined = torch.cat((self.fmb(x), self.lcb(across).transpose(1, 2)), dim=1)
        residual = x if self.residual is None else self.residual(across).transpose(1, 2)
        return self.norm(joined + residual)


class Wukong(nn.Module):
    """Dense (B, dense) and ids (B, fields) to logits (B,).

    Args:
        config: Sizes.
        shape: What a sample has.
        factory: Makes the layers.
    """

    def __init__(self, config: WukongConfig, shape: InputShape, factory: LayerFactory) -> None:
        """See the class."""
        super().__init__()
        self.tables = Tables(shape.rows, config.per_field * config.dim)
        self.dense = MLP(factory, shape.dense, (*config.dense, config.dense_tokens * config.dim), "relu")
        tokens = len(shape.rows) * config.per_field + config.dense_tokens
        self.layers = nn.ModuleList()
        for _ in range(config.layers):
            layer = WukongLayer(config, tokens, factory)
            self.layers.append(layer)
            tokens = layer.tokens_out
        self.top = MLP(factory, tokens * config.dim, config.top, "relu")
        self.predict = factory.linear(config.top[-1], 1, last=True)
        self.dim = config.dim

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits (B,)."""
        joined = torch.cat((self.dense(dense), self.tables(ids).flatten(1)), dim=1)
        x = joined.unflatten(1, (-1, self.dim))
        for layer in self.layers:
            x = layer(x)
        return self.predict(self.top(x.flatten(1))).squeeze(1)

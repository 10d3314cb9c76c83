"""DCN V2: a stacked low-rank cross network over all embeddings, then a deep network.

Sources: Wang et al., "DCN V2" (arXiv 2008.13535), low-rank cross layer and stacked structure; MLPerf Training's
DLRM-DCNv2 for the production sizes: embedding dim 128, dense arch 512-256-128, 3 cross layers of rank 512, over
arch 1024-1024-512-256-1. ReLU after every layer but the last; the cross layer's V has no bias; no norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka_sim.mods.modules import LayerFactory
from loka_sim.zoo.common import MLP, MLPERF_ROWS, SMALL_ROWS, InputShape, LowRankCross, Tables


@dataclass(frozen=True)
class DCNv2Config:
    """Sizes of a DCN V2: embedding dim, widths of both MLPs' hidden layers, cross layers and their rank, tables."""

    dim: int
    bottom: tuple[int, ...]
    cross_layers: int
    rank: int
    top: tuple[int, ...]
    rows: tuple[int, ...]


SMALL = DCNv2Config(dim=16, bottom=(64, 32), cross_layers=3, rank=32, top=(128, 64), rows=SMALL_ROWS)
PRODUCTION = DCNv2Config(dim=128, bottom=(512, 256), cross_layers=3, rank=512, top=(1024, 1024, 512, 256), rows=MLPERF_ROWS)


class DCNv2(nn.Module):
    """Dense (B, dense) and ids (B, fields) to logits (B,).

    Args:
        config: Sizes.
        shape: What a sample has.
        factory: Makes the layers.
    """

    def __init__(self, config: DCNv2Config, shape: InputShape, factory: LayerFactory) -> None:
        """See the class."""
        super().__init__()
        self.tables = Tables(shape.rows, config.dim)
        self.bottom = MLP(factory, shape.dense, (*config.bottom, config.dim), "relu")
        features = config.dim * (len(shape.rows) + 1)
        self.cross = nn.ModuleList(LowRankCross(factory, features, config.rank) for _ in range(config.cross_layers))
        self.top = MLP(factory, features, config.top, "relu")
        self.predict = factory.linear(config.top[-1], 1, last=True)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits (B,)."""
        x0 = torch.cat((self.bottom(dense).unsqueeze(1), self.tables(ids)), dim=1).flatten(1)
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        return self.predict(self.top(x)).squeeze(1)

"""DLRM: embeddings and a bottom MLP, dot-product interaction, a top MLP.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(arXiv 1906.00091). Production sizes are those of MLPerf: embedding dim 128, bottom 512-256-128, top
1024-1024-512-256-1. ReLU after every layer but the last, biases everywhere, no norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka_sim.mods.modules import LayerFactory
from loka_sim.zoo.common import MLP, MLPERF_ROWS, SMALL_ROWS, InputShape, PairwiseDot, Tables


@dataclass(frozen=True)
class DLRMConfig:
    """Sizes of a DLRM: embedding dim, widths of the hidden layers of both MLPs, tables."""

    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    rows: tuple[int, ...]


SMALL = DLRMConfig(dim=16, bottom=(64, 32), top=(128, 64), rows=SMALL_ROWS)
PRODUCTION = DLRMConfig(dim=128, bottom=(512, 256), top=(1024, 1024, 512, 256), rows=MLPERF_ROWS)


class DLRM(nn.Module):
    """Dense (B, dense) and ids (B, fields) to logits (B,).

    Args:
        config: Sizes.
        shape: What a sample has.
        factory: Makes the layers.
    """

    def __init__(self, config: DLRMConfig, shape: InputShape, factory: LayerFactory) -> None:
        """See the class."""
        super().__init__()
        self.tables = Tables(shape.rows, config.dim)
        self.bottom = MLP(factory, shape.dense, (*config.bottom, config.dim), "relu")
        self.interaction = PairwiseDot(len(shape.rows) + 1)
        # In production 128 + 351 = 479 features, padded to 480.
        self.top = MLP(factory, config.dim + self.interaction.features_out, config.top, "relu")
        self.predict = factory.linear(config.top[-1], 1, last=True)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits (B,)."""
        bottom = self.bottom(dense)
        tokens = torch.cat((bottom.unsqueeze(1), self.tables(ids)), dim=1)
        joined = torch.cat((bottom, self.interaction(tokens)), dim=1)
        return self.predict(self.top(joined)).squeeze(1)

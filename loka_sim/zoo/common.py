"""Building blocks that the zoo's models share.

Every GEMM of a zoo model is the only GEMM of its own module (an `nn.Linear` or a `BatchedProduct`), which is called
once per forward. A site's name is therefore its module's fully qualified name, for capture and for hooks alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loka_sim.inputs import SMALL_ROWS, InputShape
from loka_sim.mods.modules import LayerFactory

__all__ = [
    "MLP", "MLPERF_ROWS", "SMALL_ROWS", "BatchedProduct", "InputShape", "LowRankCross", "PairwiseDot", "Tables", "pad_to",
]  # fmt: skip

# Rows of the 26 tables of the Criteo 1TB benchmark in MLPerf Training (DLRM-DCNv2), capped at 40 million.
MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip


def pad_to(size: int, multiple: int = 16) -> int:
    """The least multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


class BatchedProduct(nn.Module):
    """One batched product of two activations: (G, M, K) by (G, K, N). No parameters; a site of its own."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns (G, M, N)."""
        return torch.bmm(left, right)


class Tables(nn.ModuleList):
    """One embedding table per categorical field, one lookup each.

    Args:
        rows: Rows of each table.
        dim: Elements of a row.
    """

    def __init__(self, rows: Sequence[int], dim: int) -> None:
        """Initialises a table as DLRM does, uniformly within 1 / sqrt(rows)."""
        super().__init__(nn.Embedding(count, dim) for count in rows)
        for table in self:
            assert isinstance(table, nn.Embedding)
            bound = 1.0 / math.sqrt(table.num_embeddings)
            nn.init.uniform_(table.weight, -bound, bound)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (B, fields) to embeddings (B, fields, dim)."""
        return torch.stack([table(ids[:, field]) for field, table in enumerate(self)], dim=1)


class MLP(nn.Module):
    """Linear layers named `0`, `1`, ..., each followed by the activation.

    Args:
        factory: Makes the layers.
        features: Size of the input.
        widths: Size of each layer's output.
        activation: `relu` or `silu`.
    """

    def __init__(self, factory: LayerFactory, features: int, widths: Sequence[int], activation: str) -> None:
        """See the class."""
        super().__init__()
        self.depth = len(widths)
        for index, width in enumerate(widths):
            self.add_module(str(index), factory.linear(features, width))
            features = width
        self.activation = factory.activation(activation)
        self.features_out = features

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) to (..., last width)."""
        for index in range(self.depth):
            x = self.activation(self.get_submodule(str(index))(x))
        return x


class PairwiseDot(nn.Module):
    """Dot products of all pairs of tokens, the diagonal left out, padded with zeros to a multiple of 16.

    The padding follows NVIDIA's DLRM, whose interaction output is padded so that the next GEMM is aligned.

    Args:
        tokens: Number of tokens.
    """

    def __init__(self, tokens: int) -> None:
        """See the class."""
        super().__init__()
        self.product = BatchedProduct()
        self.pairs = tokens * (tokens - 1) // 2
        self.features_out = pad_to(self.pairs)
        rows, columns = torch.tril_indices(tokens, tokens, offset=-1, device="cpu")
        self.register_buffer("index", torch.tensor((rows * tokens + columns).tolist()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, tokens, dim) to (B, features_out)."""
        gram = self.product(x, x.transpose(1, 2)).flatten(1)
        pairs = gram.index_select(1, self.get_buffer("index"))
        return nn.functional.pad(pairs, (0, self.features_out - self.pairs))


class LowRankCross(nn.Module):
    """One cross layer of DCN V2 in its low-rank form: x_{l+1} = x_0 * (U (V x_l) + b) + x_l.

    Source: DCN V2 (arXiv 2008.13535), section 3; V has no bias.

    Args:
        factory: Makes the layers.
        features: Size of x.
        rank: Rank of U V.
    """

    def __init__(self, factory: LayerFactory, features: int, rank: int) -> None:
        """See the class."""
        super().__init__()
        self.v = factory.linear(features, rank, bias=False)
        self.u = factory.linear(rank, features)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Both (B, features); returns (B, features)."""
        return x0 * self.u(self.v(x)) + x

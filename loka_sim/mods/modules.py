"""Modules of the Mods, and the factory through which zoo models get every linear, norm and activation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from loka_sim.mods import parse_mods

BLOCK = 256
ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "hardswish": nn.Hardswish}


class BlockNorm(nn.Module):
    """RMS norm without parameters over blocks of features, the same in training and inference.

    y_i = x_i / sqrt(mean of x_j^2 over the block of i + eps). The last block is shorter where the features are
    no multiple of the block. Source: LoKA (arXiv 2605.10886), BlockNorm.

    Args:
        features: Size of the last dimension, in elements.
        block: Features per block.
        eps: Added to the mean square.
    """

    def __init__(self, features: int, block: int = BLOCK, eps: float = 1e-5) -> None:
        """See the class."""
        super().__init__()
        self.features, self.block, self.eps = features, min(block, features), eps

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (..., features) in and out."""
        whole = self.features - self.features % self.block
        blocks = x[..., :whole].unflatten(-1, (whole // self.block, self.block))
        head = self._normalize(blocks).flatten(-2)
        if whole == self.features:
            return head
        return torch.cat((head, self._normalize(x[..., whole:])), dim=-1)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"{self.features}, block={self.block}, eps={self.eps}"


class LayerFactory:
    """Makes a model's layers as its paper has them, or as the Mods change them.

    Args:
        mods: Names of Mods (see `loka_sim.mods.MODS`).

    Raises:
        UserError: a Mod's name is unknown.
    """

    def __init__(self, mods: str | Iterable[str] = ()) -> None:
        """See the class."""
        self.mods = parse_mods(mods)

    def linear(self, features_in: int, features_out: int, *, bias: bool = True, last: bool = False) -> nn.Linear:
        """A linear layer; `bias` is the paper's, `last` marks the prediction layer, which keeps it."""
        return nn.Linear(features_in, features_out, bias=bias and (last or "no_bias" not in self.mods))

    def norm(self, features: int) -> nn.Module:
        """LayerNorm over the last dimension, as the papers have it, or BlockNorm."""
        return BlockNorm(features) if "blocknorm" in self.mods else nn.LayerNorm(features)

    def activation(self, name: str) -> nn.Module:
        """`relu`, `silu` (Swish) or `hardswish`; Swish becomes Hard Swish under the Mod."""
        return ACTIVATIONS["hardswish" if name == "silu" and "hardswish" in self.mods else name]()

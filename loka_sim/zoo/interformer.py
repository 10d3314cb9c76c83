"""InterFormer: interaction arch, sequence arch and cross arch, interleaved in every layer.

Source: Zeng et al., "InterFormer: Effective Heterogeneous Interaction Learning for Click-Through Rate Prediction"
(arXiv 2411.09852), sections 3 and 4, appendix A and B. Per layer: the cross arch summarizes both modes (linear
compressed embedding and self-gating; CLS, PMA and recent tokens and self-gating), the interaction arch (DHEN of DOT
and DCN, as in the paper's experiments) learns from the non-sequence tokens and the sequence's summary, the sequence
arch (personalized FFN, multi-head attention with rotary positions) from the sequence and the non-sequence summary.
Swish throughout, as in appendix B.

The paper prints self-gating as sigmoid(X * MLP(X)); taken literally that makes every summary a constant near 1/2 at
the start, with hardly a gradient. Here the sigmoid gates X, as the paper's text describes it.
Where the paper is silent: DHEN's norm is LayerNorm over a token; PFFN and attention are each followed by LayerNorm,
attention with the transformer's residual; PMA's learned queries stand for their own projection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka_sim.mods.modules import LayerFactory
from loka_sim.zoo.common import (
    MLP,
    MLPERF_ROWS,
    SMALL_ROWS,
    BatchedProduct,
    InputShape,
    LowRankCross,
    PairwiseDot,
    Tables,
)


@dataclass(frozen=True)
class InterFormerConfig:
    """Sizes of an InterFormer.

    Attributes:
        dim: Elements of a token (d).
        dense_tokens: Tokens made from the dense features.
        layers: InterFormer layers (L).
        heads: Attention heads.
        cls: Tokens of the non-sequence summary, and CLS tokens of the sequence (n_sum).
        pma: Tokens pooled by multi-head attention.
        recent: Most recent tokens in the sequence's summary.
        dhen_layers: DHEN layers of an interaction arch.
        cross_layers: Cross layers of a DHEN layer's DCN.
        rank: Their rank.
        dot_hidden: Widths of the hidden layers of the MLP behind a DHEN layer's dot products.
        hidden: Widths of the hidden layers of the interaction arch's MLP.
        top: Widths of the classifier's hidden layers.
        rows: Rows of the non-sequence tables.
        sequence_rows: Rows of the sequence table.
        sequence_length: Tokens of the sequence.
    """

    dim: int
    dense_tokens: int
    layers: int
    heads: int
    cls: int
    pma: int
    recent: int
    dhen_layers: int
    cross_layers: int
    rank: int
    dot_hidden: tuple[int, ...]
    hidden: tuple[int, ...]
    top: tuple[int, ...]
    rows: tuple[int, ...]
    sequence_rows: int
    sequence_length: int

    @property
    def summary(self) -> int:
        """Tokens of the sequence's summary."""
        return self.cls + self.pma + self.recent


SMALL = InterFormerConfig(
    dim=16, dense_tokens=2, layers=2, heads=2, cls=4, pma=2, recent=2, dhen_layers=1, cross_layers=2, rank=32,
    dot_hidden=(64,), hidden=(128,), top=(128, 64), rows=SMALL_ROWS, sequence_rows=8_192, sequence_length=44,
)  # fmt: skip
PRODUCTION = InterFormerConfig(
    dim=256, dense_tokens=6, layers=4, heads=4, cls=16, pma=8, recent=8, dhen_layers=3, cross_layers=3, rank=896,
    dot_hidden=(8192,), hidden=(8192, 8192), top=(1024, 512, 256, 128), rows=MLPERF_ROWS,
    sequence_rows=40_000_000, sequence_length=240,
)  # fmt: skip


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) of (B, heads, length, size), base 10,000."""
    length, size = x.shape[-2:]
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angle = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * frequency
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Softmax(Q K^T / sqrt(size) + mask) V over heads, with explicit products, and the output projection."""

    def __init__(self, config: InterFormerConfig, factory: LayerFactory) -> None:
        """See the class."""
        super().__init__()
        self.heads, self.scale = config.heads, 1.0 / math.sqrt(config.dim / config.heads)
        self.scores, self.values = BatchedProduct(), BatchedProduct()
        self.out = factory.linear(config.dim, config.dim)

    def split(self, x: Tensor) -> Tensor:
        """(B, length, dim) to (B, heads, length, dim / heads)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
        """Heads (B, heads, length, size); `padding` (B, length of key) marks keys to leave out; (B, length, dim)."""
        query = query * self.scale
        scores = self.scores(query.flatten(0, 1), key.transpose(2, 3).flatten(0, 1)).unflatten(0, (-1, self.heads))
        scores = scores.masked_fill(padding[:, None, None, :], -1e9)
        mixed = self.values(scores.softmax(dim=-1).flatten(0, 1), value.flatten(0, 1))
        return self.out(mixed.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2))


class Gating(nn.Module):
    """Self-gating: X * sigmoid(MLP(X)), a mask that keeps what matters and filters noise (paper, section 4.4)."""

    def __init__(self, dim: int, factory: LayerFactory) -> None:
        """See the class."""
        super().__init__()
        self.mlp = MLP(factory, dim, (dim,), "silu")
        self.out = factory.linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) in and out."""
        return x * torch.sigmoid(self.out(self.mlp(x)))


class CrossArch(nn.Module):
    """Summaries of both modes, for the other mode to read."""

    def __init__(self, config: InterFormerConfig, tokens: int, factory: LayerFactory) -> None:
        """`tokens` is the number of non-sequence tokens."""
        super().__init__()
        self.compress = factory.linear(tokens, config.cls, bias=False)
        self.gate = Gating(config.dim, factory)
        self.queries = nn.Parameter(torch.randn(config.pma, config.dim))
        self.key_value = factory.linear(config.dim, 2 * config.dim)
        self.attention = Attention(config, factory)
        self.sequence_gate = Gating(config.dim, factory)
        self.cls, self.recent = config.cls, config.recent

    def nonsequence(self, x: Tensor) -> Tensor:
        """X_sum = Gating(LCE(X)): (B, tokens, dim) to (B, cls, dim)."""
        return self.gate(self.compress(x.transpose(1, 2)).transpose(1, 2))

    def sequence(self, s: Tensor, padding: Tensor) -> Tensor:
        """S_sum = Gating(CLS, PMA and recent tokens): (B, cls + length, dim) to (B, summary, dim)."""
        key, value = self.key_value(s).chunk(2, dim=2)
        queries = self.queries.expand(s.shape[0], -1, -1)
        split = self.attention.split
        pooled = self.attention(split(queries), split(key), split(value), padding)
        return self.sequence_gate(torch.cat((s[:, : self.cls], pooled, s[:, -self.recent :]), dim=1))


class DHENLayer(nn.Module):
    """Norm(DOT(X) + DCN(X) + X): an ensemble by addition, the shortcut being X itself (arXiv 2203.11014)."""

    def __init__(self, config: InterFormerConfig, tokens: int, factory: LayerFactory) -> None:
        """`tokens` is the number of tokens that come in and go out."""
        super().__init__()
        features = tokens * config.dim
        self.dot = PairwiseDot(tokens)
        self.dot_mlp = MLP(factory, self.dot.features_out, config.dot_hidden, "silu")
        self.dot_out = factory.linear(self.dot_mlp.features_out, features)
        self.cross = nn.ModuleList(LowRankCross(factory, features, config.rank) for _ in range(config.cross_layers))
        self.norm = factory.norm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, tokens, dim) in and out."""
        flat = x.flatten(1)
        crossed = flat
        for layer in self.cross:
            crossed = layer(flat, crossed)
        ensemble = self.dot_out(self.dot_mlp(self.dot(x))) + crossed + flat
        return self.norm(ensemble.unflatten(1, x.shape[1:]))


class InteractionArch(nn.Module):
    """X' = MLP(DHEN([X || S_sum])): back to the number of non-sequence tokens."""

    def __init__(self, config: InterFormerConfig, tokens: int, factory: LayerFactory) -> None:
        """`tokens` is the number of non-sequence tokens."""
        super().__init__()
        joined = tokens + config.summary
        self.dhen = nn.ModuleList(DHENLayer(config, joined, factory) for _ in range(config.dhen_layers))
        self.mlp = MLP(factory, joined * config.dim, config.hidden, "silu")
        self.out = factory.linear(config.hidden[-1], tokens * config.dim)
        self.shape = (tokens, config.dim)

    def forward(self, x: Tensor, s_sum: Tensor) -> Tensor:
        """(B, tokens, dim) and (B, summary, dim) to (B, tokens, dim)."""
        x = torch.cat((x, s_sum), dim=1)
        for layer in self.dhen:
            x = layer(x)
        return self.out(self.mlp(x.flatten(1))).unflatten(1, self.shape)


class SequenceArch(nn.Module):
    """S' = MHA(PFFN(X_sum, S)); PFFN multiplies every token by W = X_sum W_f, a (dim, dim) matrix per sample."""

    def __init__(self, config: InterFormerConfig, factory: LayerFactory) -> None:
        """See the class."""
        super().__init__()
        self.generate = factory.linear(config.cls, config.dim, bias=False)
        self.personalize = BatchedProduct()
        self.pffn_norm = factory.norm(config.dim)
        self.qkv = factory.linear(config.dim, 3 * config.dim)
        self.attention = Attention(config, factory)
        self.norm = factory.norm(config.dim)

    def forward(self, x_sum: Tensor, s: Tensor, padding: Tensor) -> Tensor:
        """(B, cls, dim) and (B, cls + length, dim) to (B, cls + length, dim)."""
        weight = self.generate(x_sum.transpose(1, 2))
        s = self.pffn_norm(self.personalize(s, weight.transpose(1, 2)))
        query, key, value = (self.attention.split(part) for part in self.qkv(s).chunk(3, dim=2))
        return self.norm(s + self.attention(rotate(query), rotate(key), value, padding))


class InterFormerLayer(nn.Module):
    """One cross, one interaction and one sequence arch."""

    def __init__(self, config: InterFormerConfig, tokens: int, factory: LayerFactory) -> None:
        """`tokens` is the number of non-sequence tokens."""
        super().__init__()
        self.cross = CrossArch(config, tokens, factory)
        self.interaction = InteractionArch(config, tokens, factory)
        self.sequence = SequenceArch(config, factory)

    def forward(self, x: Tensor, s: Tensor, padding: Tensor, first: bool) -> tuple[Tensor, Tensor]:
        """The next X (B, tokens, dim) and S (B, cls + length, dim); the first layer puts the CLS tokens before S."""
        x_sum = self.cross.nonsequence(x)
        if first:
            s = torch.cat((x_sum, s), dim=1)
        s_sum = self.cross.sequence(s, padding)
        return self.interaction(x, s_sum), self.sequence(x_sum, s, padding)


class MaskNet(nn.Module):
    """MLP_lce(S * MLP_mask(S)): filters the sequence's noise (paper, section 4.1)."""

    def __init__(self, dim: int, factory: LayerFactory) -> None:
        """See the class."""
        super().__init__()
        self.mask = MLP(factory, dim, (dim,), "silu")
        self.mask_out = factory.linear(dim, dim)
        self.compress = factory.linear(dim, dim)

    def forward(self, s: Tensor) -> Tensor:
        """(B, length, dim) in and out."""
        return self.compress(s * self.mask_out(self.mask(s)))


class InterFormer(nn.Module):
    """Dense (B, dense), ids (B, fields) and a sequence of ids (B, length), 0 for padding, to logits (B,).

    Args:
        config: Sizes.
        shape: What a sample has.
        factory: Makes the layers.
    """

    def __init__(self, config: InterFormerConfig, shape: InputShape, factory: LayerFactory) -> None:
        """See the class."""
        super().__init__()
        self.tables = Tables(shape.rows, config.dim)
        self.sequence_table = nn.Embedding(shape.sequence_rows, config.dim)
        bound = 1.0 / math.sqrt(config.dim)
        nn.init.uniform_(self.sequence_table.weight, -bound, bound)
        self.dense = factory.linear(shape.dense, config.dense_tokens * config.dim)
        self.masknet = MaskNet(config.dim, factory)
        tokens = len(shape.rows) + config.dense_tokens
        self.layers = nn.ModuleList(InterFormerLayer(config, tokens, factory) for _ in range(config.layers))
        self.cross = CrossArch(config, tokens, factory)
        self.top = MLP(factory, (config.cls + config.summary) * config.dim, config.top, "silu")
        self.predict = factory.linear(config.top[-1], 1, last=True)
        self.config = config

    def forward(self, dense: Tensor, ids: Tensor, sequence: Tensor) -> Tensor:
        """Logits (B,)."""
        x = torch.cat((self.dense(dense).unflatten(1, (-1, self.config.dim)), self.tables(ids)), dim=1)
        s = self.masknet(self.sequence_table(sequence))
        padding = nn.functional.pad(sequence == 0, (self.config.cls, 0), value=False)
        for index, layer in enumerate(self.layers):
            x, s = layer(x, s, padding, index == 0)
        summary = torch.cat((self.cross.nonsequence(x), self.cross.sequence(s, padding)), dim=1)
        return self.predict(self.top(summary.flatten(1))).squeeze(1)

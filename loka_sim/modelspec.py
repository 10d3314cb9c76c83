"""The model specification: what a model's dense part computes, whatever it was built with.

A `ModelSpec` lists every GEMM location (a *site*) of a model with the (M, N, K) of its three passes,
each dimension affine in the batch, so that the batch may change without another capture. It knows
nothing of torch modules: `loka_sim.capture` makes one from a module, `ModelSpec.load` from a file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace

PASSES = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True, order=True)
class Dim:
    """A tensor dimension, affine in the batch: `per_batch * batch + const` elements."""

    const: int = 0
    per_batch: int = 0

    def at(self, batch: int) -> int:
        """Size at a batch, in elements."""
        return self.const + self.per_batch * batch


@dataclass(frozen=True)
class Gemm:
    """One pass of a site: `groups` products of (m, k) by (k, n).

    Attributes:
        m: Rows of the left operand and of the result.
        n: Columns of the right operand and of the result.
        k: The contracted dimension.
        groups: How many such products one call computes (1, or a bmm's leading dimension).
        layout_a: `row` (k contiguous), `column` (m contiguous) or `strided`, as the model stores it.
        layout_b: `row` (n contiguous), `column` (k contiguous) or `strided`, as the model stores it.
    """

    m: Dim
    n: Dim
    k: Dim
    groups: Dim = Dim(1)
    layout_a: str = "row"
    layout_b: str = "column"

    def shape(self, batch: int) -> tuple[int, int, int]:
        """(M, N, K) at a batch, in elements."""
        return self.m.at(batch), self.n.at(batch), self.k.at(batch)

    def flops(self, batch: int) -> int:
        """2 M N K over all groups, as `torch.utils.flop_counter` counts them."""
        m, n, k = self.shape(batch)
        return 2 * m * n * k * self.groups.at(batch)


@dataclass(frozen=True)
class Site:
    """One GEMM location of a model.

    Attributes:
        name: Fully qualified name of the module; `module#2` for the second GEMM of the same module.
        op: What the model called: linear, addmm, mm, bmm, baddbmm, matmul, einsum.
        passes: `output` always; `grad_input` (left operand's gradient) and `grad_weight` (right
            operand's gradient) where the backward computes them.
        weight: Name of the parameter that is the right operand, or None (both are activations).
        bias: A bias is added to the result.
        norm: Norm that follows directly: layernorm, rmsnorm, batchnorm, blocknorm; None if none does.
        activation: Activation that follows (after the norm, if any): relu, silu, hardswish, gelu, sigmoid, tanh, ...; or None.
    """

    name: str
    op: str
    passes: dict[str, Gemm]
    weight: str | None = None
    bias: bool = False
    norm: str | None = None
    activation: str | None = None


@dataclass(frozen=True)
class Table:
    """One embedding table: `rows` x `dim`, pooled `sum`, `mean`, `max` or not (`none`).

    `lookups` is the number of ids a sample looks up, as captured (an average where it varies).
    """

    name: str
    rows: int
    dim: int
    pooling: str = "none"
    lookups: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """What the what-if needs to know of a model.

    Attributes:
        name: What the user calls it.
        batch: Batch per GPU it was captured at (the default of a what-if).
        sites: Every GEMM location, in forward order.
        tables: Embedding tables.
        dense_parameters: Trainable parameters outside embedding tables (all-reduced over GPUs).
        unaccounted: Names of what the capture saw and could not account for, each with why.
        source: Where it came from (zoo name, import path, file).
    """

    name: str
    batch: int
    sites: tuple[Site, ...]
    tables: tuple[Table, ...] = ()
    dense_parameters: int = 0
    unaccounted: tuple[str, ...] = ()
    source: str = ""
    schema_version: int = field(default=1)

    def at_batch(self, batch: int) -> ModelSpec:
        """The same model at another batch per GPU."""
        return replace(self, batch=batch)

    def flops(self, batch: int | None = None) -> int:
        """FLOPs of one training step's GEMMs, all passes."""
        size = self.batch if batch is None else batch
        return sum(gemm.flops(size) for site in self.sites for gemm in site.passes.values())

    @property
    def fingerprint(self) -> str:
        """Identity of the dense part, whatever the batch: sites with their weights' shapes.

        Ignores batch, norms and activations, so that a training job can recompute it from its module.
        """
        rows = sorted((s.name, s.op, s.passes["output"].n.const, s.passes["output"].k.const) for s in self.sites)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

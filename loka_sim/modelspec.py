"""The model specification: what a model's dense part computes, whatever it was built with.

A `ModelSpec` lists every GEMM location (a *site*) of a model with the (M, N, K) of its three passes,
each dimension affine in the batch, so that the batch may change without another capture. It knows
nothing of torch modules: `loka_sim.capture` makes one from a module, `load` from a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PASSES = ("output", "grad_input", "grad_weight")
SCHEMA_VERSION = 3
"""2 adds `fused`, 3 `loops`; files of earlier versions are read."""


@dataclass(frozen=True, order=True)
class Dim:
    """A tensor dimension, affine in the batch: `per_batch * batch + const` elements."""

    const: int = 0
    per_batch: int = 0

    def at(self, batch: int) -> int:
        """Size at a batch, in elements."""
        return self.const + self.per_batch * batch

    def __str__(self) -> str:
        """The dimension as files write it: `64`, `batch`, `26*batch`, `3*batch+1`."""
        if not self.per_batch:
            return str(self.const)
        scaled = "batch" if self.per_batch == 1 else f"{self.per_batch}*batch"
        return f"{scaled}{self.const:+d}" if self.const else scaled

    @classmethod
    def parse(cls, value: int | str) -> Dim:
        """Read an integer or a text such as `26*batch`.

        Raises:
            ValueError: the text is no such dimension.
        """
        if not isinstance(value, str):
            return cls(int(value))
        match = re.fullmatch(r"(?:([1-9][0-9]*)\*)?batch([+-][0-9]+)?", re.sub(r"\s", "", value))
        if not match:
            raise ValueError(f"{value!r} is no dimension; write an integer, 'batch', '26*batch' or '3*batch+1'")
        return cls(int(match[2] or 0), int(match[1] or 1))

    def to_json(self) -> int | str:
        """The dimension as a file holds it."""
        return str(self) if self.per_batch else self.const


def padded(size: int) -> int:
    """The multiple of 8 elements that torch.compile pads a dimension to; one element stays one."""
    return size if size == 1 else -(-size // 8) * 8


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
        padded: torch.compile runs it in bf16 with its sizes padded to multiples of 8.
    """

    m: Dim
    n: Dim
    k: Dim
    groups: Dim = Dim(1)
    layout_a: str = "row"
    layout_b: str = "column"
    padded: bool = False

    def shape(self, batch: int) -> tuple[int, int, int]:
        """(M, N, K) at a batch, in elements."""
        return self.m.at(batch), self.n.at(batch), self.k.at(batch)

    def shape_in_bf16(self, batch: int) -> tuple[int, int, int]:
        """(M, N, K) that bf16 runs with, in elements: padded where torch.compile pads."""
        m, n, k = self.shape(batch)
        return (padded(m), padded(n), padded(k)) if self.padded else (m, n, k)

    def flops(self, batch: int) -> int:
        """2 M N K over all groups, as `torch.utils.flop_counter` counts them."""
        m, n, k = self.shape(batch)
        return 2 * m * n * k * self.groups.at(batch)

    def to_dict(self) -> dict[str, Any]:
        """The pass as a file holds it."""
        dims = {key: getattr(self, key).to_json() for key in ("m", "n", "k", "groups")}
        return {**dims, "layout_a": self.layout_a, "layout_b": self.layout_b, **({"padded": True} if self.padded else {})}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Gemm:
        """The reverse of `to_dict`, of a valid document."""
        m, n, k, groups = (Dim.parse(document.get(key, 1)) for key in ("m", "n", "k", "groups"))
        layouts = document.get("layout_a", cls.layout_a), document.get("layout_b", cls.layout_b)
        return cls(m, n, k, groups, *layouts, document.get("padded", False))


def linear_passes(m: Dim, n: Dim, k: Dim, groups: Dim = Dim(1)) -> dict[str, Gemm]:  # noqa: B008 (frozen)
    """The three passes of a linear layer: x[m, k] by w[n, k], both contiguous along k.

    grad_input is g[m, n] by w, grad_weight is g^T[n, m] by x.
    """
    return {
        "output": Gemm(m, n, k, groups),
        "grad_input": Gemm(m, k, n, groups, layout_b="row"),
        "grad_weight": Gemm(n, k, m, groups, layout_a="column", layout_b="row"),
    }


@dataclass(frozen=True)
class Site:
    """One GEMM location of a model.

    Attributes:
        name: Fully qualified name of the module (`(root)` for the model itself); `module#2` for the second GEMM of
            the same module, `module#recompute` for a forward that checkpointing runs again in the backward.
        op: What the model called: linear, addmm, mm, bmm, baddbmm, matmul, einsum.
        passes: `output` always; `grad_input` (left operand's gradient) and `grad_weight` (right
            operand's gradient) where the backward computes them.
        weight: Name of the parameter that is the right operand, or None (both are activations).
        bias: A bias is added to the result.
        norm: Norm that follows directly: layernorm, rmsnorm, batchnorm, blocknorm; None if none does.
        activation: Activation that follows (after the norm, if any): relu, silu, hardswish, gelu, sigmoid, tanh, ...; or None.
        reads_tables: An operand is made from rows of embedding tables: it must wait for them. True where that is not known.
    """

    name: str
    op: str
    passes: dict[str, Gemm]
    weight: str | None = None
    bias: bool = False
    norm: str | None = None
    activation: str | None = None
    reads_tables: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The site as a file holds it."""
        return {
            "name": self.name,
            "op": self.op,
            "weight": self.weight,
            "bias": self.bias,
            "norm": self.norm,
            "activation": self.activation,
            **({} if self.reads_tables else {"reads_tables": False}),
            "passes": {key: gemm.to_dict() for key, gemm in self.passes.items()},
        }

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Site:
        """The reverse of `to_dict`, of a valid document.

        m, n and k stand for a linear layer's three passes, by the layer's own weight unless the document says otherwise.
        """
        name, op = document["name"], document.get("op", "linear")
        rest = {key: document[key] for key in ("weight", "bias", "norm", "activation", "reads_tables") if key in document}
        if "passes" in document:
            passes = {key: Gemm.from_dict(document["passes"][key]) for key in PASSES if key in document["passes"]}
        else:
            m, n, k, groups = (Dim.parse(document.get(key, 1)) for key in ("m", "n", "k", "groups"))
            passes = linear_passes(m, n, k, groups)
            if op == "linear" and "groups" not in document:
                module = name.partition("#")[0]
                rest.setdefault("weight", "weight" if module == "(root)" else f"{module}.weight")
        return cls(name, op, passes, **rest)


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
class Fused:
    """A memory-bound kernel as a compiler makes it of everything between the GEMMs.

    Attributes:
        phase: `forward` or `backward`.
        kind: `pointwise`, `gather` (pointwise, rows looked up), `row` (reduces along memory), `column` (reduces across
            it), `both` (reduces the same elements both ways), `scatter` (adds at indices), `fill`, `external` (a library's own),
            `attention` and `attention_backward` (torch's own, whose label says the sizes: `perfmodel.attention.label_of`).
        label: The aten operators in it.
        kept: Elements of its result's iteration space.
        reduced: Elements reduced for each of them; 1 for none.
        read_bytes: Bytes read, each buffer once.
        written_bytes: Bytes written.
        unordered_bytes: Of all these bytes, those that are read or written in another order than they lie in.
        uneven: A reduction that reads its input across memory, or together with a mask of another shape.
        count: How many such kernels a step runs.
    """

    phase: str
    kind: str
    label: str
    kept: Dim
    reduced: Dim
    read_bytes: Dim
    written_bytes: Dim
    unordered_bytes: Dim
    uneven: bool = False
    count: int = 1

    def to_dict(self) -> dict[str, Any]:
        """The kernel as a file holds it."""
        plain = {key: value.to_json() if isinstance(value, Dim) else value for key, value in vars(self).items()}
        usual = {"reduced": 1, "unordered_bytes": 0, "uneven": False, "count": 1}
        return {key: value for key, value in plain.items() if key not in usual or value != usual[key]}

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Fused:
        """The reverse of `to_dict`, of a valid document."""
        sizes = ("kept", "reduced", "read_bytes", "written_bytes", "unordered_bytes")
        kept, reduced, read, written, unordered = (Dim.parse(document.get(key, int(key == "reduced"))) for key in sizes)
        uneven, count = document.get("uneven", False), document.get("count", 1)
        head = document["phase"], document["kind"], document.get("label", "")
        return cls(*head, kept, reduced, read, written, unordered, uneven, count)


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
        fused: Every other kernel of a compiled forward and backward, in bf16, tables' gradients left out; empty where it
            is not known.
        loops: What these kernels are made of, and whose operands the GEMMs multiply (see `loka_sim.step_loops`): from it follow
            the kernels of a step with FP8 in it; empty where it is not known.
        untraced: Why a capture found no such kernels; empty where it did.
        source: Where it came from (zoo name, import path, file).
    """

    name: str
    batch: int
    sites: tuple[Site, ...]
    tables: tuple[Table, ...] = ()
    dense_parameters: int = 0
    unaccounted: tuple[str, ...] = ()
    source: str = ""
    fused: tuple[Fused, ...] = ()
    loops: tuple[str, ...] = ()
    untraced: str = ""
    schema_version: int = field(default=SCHEMA_VERSION)

    def at_batch(self, batch: int) -> ModelSpec:
        """The same model at another batch per GPU."""
        return replace(self, batch=batch)

    def flops(self, batch: int | None = None) -> int:
        """FLOPs of one training step's GEMMs, all passes."""
        size = self.batch if batch is None else batch
        return sum(gemm.flops(size) for site in self.sites for gemm in site.passes.values())

    @property
    def left_out(self) -> str:
        """The first of `unaccounted` in words, and how many more there are; empty where there is none."""
        more = len(self.unaccounted) - 3
        return "; ".join(self.unaccounted[:3]) + (f" and {more} more" if more > 0 else "")

    @property
    def fingerprint(self) -> str:
        """Identity of the dense part, whatever the batch: sites with their weights' shapes.

        Ignores batch, norms and activations, so that a training job can recompute it from its module.
        """
        rows = sorted((s.name, s.op, s.passes["output"].n.const, s.passes["output"].k.const) for s in self.sites)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The specification as a file holds it (schemas/model_spec.schema.json)."""
        return {
            "schema_version": self.schema_version,
            "name": self.name,
            "batch": self.batch,
            "source": self.source,
            "dense_parameters": self.dense_parameters,
            "tables": [dict(vars(table)) for table in self.tables],
            "sites": [site.to_dict() for site in self.sites],
            "fused": [kernel.to_dict() for kernel in self.fused],
            "loops": list(self.loops),
            "untraced": self.untraced,
            "unaccounted": list(self.unaccounted),
        }

    @classmethod
    def from_dict(cls, document: Any, where: str = "model spec") -> ModelSpec:
        """The reverse of `to_dict`.

        Args:
            document: What a JSON or YAML file held.
            where: What an error calls the document (a path).

        Raises:
            UserError: the document breaks the schema; one line with the field and the mend.
        """
        from loka_sim.specfile import check

        check(document, where)
        return cls._of(document)

    @classmethod
    def _of(cls, document: dict[str, Any]) -> ModelSpec:
        """The specification that a document holds, which keeps to the schema."""
        return cls(
            name=document["name"],
            batch=int(document["batch"]),
            sites=tuple(Site.from_dict(site) for site in document["sites"]),
            tables=tuple(
                Table(**{**table, "rows": int(table["rows"]), "dim": int(table["dim"])}) for table in document.get("tables", ())
            ),
            dense_parameters=int(document.get("dense_parameters", 0)),
            unaccounted=tuple(document.get("unaccounted", ())),
            fused=tuple(Fused.from_dict(kernel) for kernel in document.get("fused", ())),
            loops=tuple(document.get("loops", ())),
            untraced=document.get("untraced", ""),
            source=document.get("source", ""),
        )


def load(path: str | Path, shipped: bool = False) -> ModelSpec:
    """Read a model specification, `.json` or `.yaml`.

    Args:
        path: The file.
        shipped: It came with the package, whose tests hold it to the schema: looking again takes a sixth of a second.

    Raises:
        UserError: the file is missing, truncated or breaks the schema; one line with the field and the mend.
        DataError: so is one that came with the package.
    """
    from loka_sim.errors import DataError, UserError
    from loka_sim.specfile import read

    if not shipped:
        return ModelSpec.from_dict(read(Path(path)), str(path))
    try:
        document = read(Path(path))
        try:
            return ModelSpec._of(document)
        except Exception:
            ModelSpec.from_dict(document, str(path))
            raise
    except UserError as error:
        raise DataError(f"the package is damaged, install it again: {error}") from error


def save(spec: ModelSpec, path: str | Path) -> None:
    """Write a model specification, as YAML where `path` ends in .yaml or .yml, else as JSON.

    Raises:
        UserError: the folder cannot be written to.
    """
    from loka_sim.files import write_text_atomic
    from loka_sim.specfile import render

    write_text_atomic(Path(path), render(spec.to_dict(), yaml=Path(path).suffix.lower() in (".yaml", ".yml")))

"""What a training step exchanges between GPUs, and how long each exchange takes: embeddings and dense parameters.

Embedding tables are spread over the GPUs, evenly: per step an all-to-all of pooled embeddings forward and one of their
gradients backward. The dense part is replicated (`ddp`: its gradients are all-reduced in DistributedDataParallel's
default buckets), sharded over all GPUs (`fsdp`: layers' parameters are gathered before the forward and again before the
backward, those of the model around them once, gradients reduce-scattered), or sharded inside each host and replicated over
hosts (`hsdp`). Dense parameters and gradients travel in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from loka_sim.cluster import check_gpus
from loka_sim.dense_units import BF16_BYTES, buckets, dense_tensors, shards
from loka_sim.dispatch.cost import Time
from loka_sim.errors import UserError
from loka_sim.modelspec import ModelSpec
from numerics.sizes import is_whole
from perfmodel.topology import Cluster

if TYPE_CHECKING:
    from perfmodel.collectives import CollectiveModel
    from perfmodel.hardware import HardwareSpec
    from perfmodel.model import PerfModel

DENSE = ("ddp", "fsdp", "hsdp")
EXCHANGES = ("bf16", "fp16", "fp8_rowwise")
NVLINK, NETWORK = "nvlink", "network"
"""Streams: what stays inside hosts, and what crosses the network."""


@dataclass(frozen=True)
class Parallel:
    """How a training job is spread.

    Attributes:
        gpus: Ranks, each with a batch of its own.
        cluster: Hosts and network; None where only one host can be asked about.
        dense: One of `DENSE`.
        exchange: What embeddings and their gradients travel in, one of `EXCHANGES`.
    """

    gpus: int = 1
    cluster: Cluster | None = None
    dense: str = "ddp"
    exchange: str = "bf16"

    def __post_init__(self) -> None:
        """Refuse what no job can be.

        Raises:
            UserError: one line with the option and the mend.
        """
        if not is_whole(self.gpus):
            raise UserError(f"--gpus {self.gpus} is no positive whole number; give the number of GPUs of the training job")
        check_gpus(self.gpus, self.cluster)
        for option, value, known in (("--dense", self.dense, DENSE), ("--exchange", self.exchange, EXCHANGES)):
            if value not in known:
                raise UserError(f"{option} {value} is unknown; choose one of {', '.join(known)}")

    @property
    def per_host(self) -> int:
        """GPUs in each host."""
        return self.gpus if self.cluster is None else min(self.gpus, self.cluster.gpus_per_host)

    @property
    def shards(self) -> int:
        """GPUs that share one copy of the dense parameters, and so the optimizer's work on them."""
        return {"ddp": 1, "fsdp": self.gpus, "hsdp": self.per_host}[self.dense]

    @property
    def hosts(self) -> int:
        """Hosts."""
        return self.gpus // self.per_host


class Call(NamedTuple):
    """A collective to ask the time model about."""

    op: str
    ranks: int
    bytes_per_rank: int
    per_host: int
    dtype: str = "bf16"
    dim: int = 0


@dataclass(frozen=True)
class Collective:
    """One collective with its predicted time.

    Attributes:
        call: What it is.
        stream: `NVLINK` or `NETWORK`.
        time: Microseconds with the 90% interval.
        basis: `interpolated`, `extrapolated` or `modelled`, see `perfmodel.collectives.CollectiveModel.basis`.
    """

    call: Call
    stream: str
    time: Time
    basis: str


@dataclass(frozen=True)
class Unit:
    """Dense parameters that travel together.

    Attributes:
        sites: Names of the sites whose weights they are, in forward order; none for what stands at no GEMM.
        size_bytes: Their size in bf16.
        gather: Before their forward, and again before their backward unless `kept`; None where they are replicated.
        reduce: What their gradients go through, in order.
        copy: Reading and writing as many bytes once: gradients into what is reduced, gathered parameters to their places.
            From the bandwidth; None where that is not known.
        kept: Gathered before the forward alone, and held until the backward.
    """

    sites: tuple[str, ...]
    size_bytes: int
    gather: Collective | None
    reduce: tuple[Collective, ...]
    copy: Time | None = None
    kept: bool = False

    @property
    def calls(self) -> tuple[Collective, ...]:
        """Every collective of a step."""
        return (*([self.gather] * (1 if self.kept else 2) if self.gather else []), *self.reduce)


@dataclass(frozen=True)
class Communication:
    """Collectives of one training step on one of several GPUs.

    Attributes:
        parallel: How the job is spread.
        embedding_bytes: What one rank exchanges in one direction, in bf16.
        dense_bytes: Dense gradients, in bf16.
        exchange: The all-to-all of embeddings; that of their gradients is the same. None where there are no tables.
        units: Dense parameters in forward order.
        missing: Why there is no figure, in words; None where there is one.
        like: Name of the GPU whose collectives these are, where none were measured on the job's own.
        timing: The time model that says so, and what collectives and the kernels beside them cost each other.
        tensors: Number of the dense parameters: weights, biases.
    """

    parallel: Parallel
    embedding_bytes: int
    dense_bytes: int
    exchange: Collective | None = None
    units: tuple[Unit, ...] = ()
    missing: str | None = None
    like: str | None = None
    timing: PerfModel | None = field(default=None, compare=False, repr=False)
    tensors: int = 0

    @property
    def calls(self) -> tuple[Collective, ...]:
        """Every collective of a step."""
        exchanges = [self.exchange] * 2 if self.exchange else []
        return (*exchanges, *(call for unit in self.units for call in unit.calls))

    @property
    def exchange_us(self) -> float | None:
        """All-to-alls, forward and backward together; None where there is no figure."""
        return None if self.missing else 2 * self.exchange.time.us if self.exchange else 0.0

    @property
    def dense_us(self) -> float | None:
        """Collectives of dense parameters and gradients, one after the other; None where there is no figure."""
        return None if self.missing else sum(call.time.us for unit in self.units for call in unit.calls)

    @property
    def basis(self) -> str | None:
        """The weakest basis of any collective; None where there is none."""
        found = {call.basis for call in self.calls}
        return next((name for name in ("modelled", "extrapolated", "interpolated") if name in found), None)


def embedding_bytes(spec: ModelSpec) -> int:
    """Bytes of pooled embeddings that one rank's batch needs: one vector a table, or one a look-up without pooling."""
    vectors = ((table.lookups if table.pooling == "none" else 1.0) * table.dim for table in spec.tables)
    return round(sum(vectors) * spec.batch) * BF16_BYTES


def communication(spec: ModelSpec, parallel: Parallel, timing: PerfModel) -> Communication | None:
    """Collectives of one step at the model's batch per GPU; None for one GPU.

    Where nothing was measured that could say, there is no figure, and words why.
    """
    if parallel.gpus == 1:
        return None
    embeddings = embedding_bytes(spec)
    parts = buckets(spec) if parallel.dense == "ddp" else shards(spec)
    dense = sum(part.size_bytes for part in parts)
    try:
        model = timing.collectives
        exchange = [_exchange(spec, parallel, embeddings, model)] if embeddings else []
        calls = [_dense_calls(parallel, part.size_bytes) for part in parts]
        wanted = [*exchange, *(call for gather, reduce in calls for call in (gather, *reduce) if call)]
        known = _predict(list(dict.fromkeys(wanted)), model, parallel)
        # Read here, where a damaged table is named.
        _ = timing.overlap
    except (ValueError, FileNotFoundError) as error:
        return Communication(parallel, embeddings, dense, missing=str(error).rstrip("."))
    made = tuple(
        Unit(
            part.sites, part.size_bytes, known[gather] if gather else None, tuple(known[call] for call in reduce),
            _copied(part.size_bytes, timing.hardware), part.kept,
        )
        for part, (gather, reduce) in zip(parts, calls, strict=True)
    )  # fmt: skip
    whole = known[exchange[0]] if exchange else None
    tensors = len(dense_tensors(spec))
    return Communication(parallel, embeddings, dense, whole, made, like=model.like, timing=timing, tensors=tensors)


def _copied(size: int, hardware: HardwareSpec) -> Time:
    """So many bytes read and written, by the bandwidth of a large copy; 20% either way is assumed."""
    us = 2 * size / (hardware.copy_bandwidth_tbs * 1e6)
    return Time(us, 0.8 * us, 1.2 * us)


def _exchange(spec: ModelSpec, parallel: Parallel, size: int, model: CollectiveModel) -> Call:
    """The all-to-all of embeddings; compressed, a row of a scale is as long as the mean table's, or as near as was measured."""
    call = Call("all_to_all", parallel.gpus, size, parallel.per_host, parallel.exchange)
    dims = [key.dim for key in model.curves if key.op == "all_to_all" and key.dtype == parallel.exchange]
    if not dims or max(dims) == 0:
        return call
    mean = sum(table.dim for table in spec.tables) / len(spec.tables)
    return call._replace(dim=round(min(max(mean, min(dims)), max(dims))))


def _dense_calls(parallel: Parallel, size: int) -> tuple[Call | None, tuple[Call, ...]]:
    """What a unit of so many bytes is gathered by, and what its gradients are reduced by."""
    gpus, island, hosts = parallel.gpus, parallel.per_host, parallel.hosts
    if parallel.dense == "ddp":
        return None, (Call("all_reduce", gpus, size, island),)
    if parallel.dense == "hsdp" and hosts > 1:
        # Between hosts each GPU reduces its own shard, with the GPUs of its place in the others.
        between = Call("all_reduce", hosts, -(-size // island), 1)
        if island == 1:
            return None, (between,)
        return Call("all_gather", island, size, island), (Call("reduce_scatter", island, size, island), between)
    return Call("all_gather", gpus, size, island), (Call("reduce_scatter", gpus, size, island),)


def _predict(calls: list[Call], model: CollectiveModel, parallel: Parallel) -> dict[Call, Collective]:
    import pandas

    frame = pandas.DataFrame(calls, columns=list(Call._fields))
    times = model.predict(frame, parallel.cluster)
    bases = model.basis(frame, parallel.cluster)
    return {
        call: Collective(call, NVLINK if call.ranks == call.per_host else NETWORK, Time(*map(float, entry)), str(basis))
        for call, entry, basis in zip(calls, times.itertuples(index=False), bases, strict=True)
    }


def describe(cluster: Cluster | None) -> dict[str, Any] | None:
    """A cluster as documents hold it."""
    return None if cluster is None else {key: list(v) if isinstance(v, tuple) else v for key, v in vars(cluster).items()}

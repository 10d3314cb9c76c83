"""One training step on several GPUs of a host, part by part: to be held against `loka-sim step MODEL --gpus N --dense ddp`.

    torchrun --nproc-per-node 4 -m benchmarks.step_on_gpus wukong-small --batch 4096 --out DIR
    torchrun --nproc-per-node 4 -m benchmarks.step_on_gpus wukong-production:2048 dlrm-production:8192 --minutes 3 --out DIR

Forward, backward and exchanges of a zoo model in bf16, tables cut to 10,000 rows; no optimizer. Every rank has a batch of
its own. The model is wrapped in DistributedDataParallel, tables left out, and compiled so that Dynamo splits it at DDP's buckets.
One set of parameters serves all variants, which alternate:

    compute        the split form without any exchange (`no_sync`, so that DDP copies no gradients into buckets either)
    exchange       and an all-to-all of each group of embeddings forward, and of its gradients backward
    ddp            compute, and the gradients' all-reduces
    ddp_exchange   both
    whole          with `--whole`: compiled in one piece, as `loka-sim validate` runs it on one GPU

An all-to-all splits evenly, so that embeddings land with wrong samples, which time does not mind. The compute stream waits
for it at once, and it runs on the communicator of the all-reduces, in turn with them. InterFormer's sequence table has one
of its own. DDP broadcasts no buffers. A step of few milliseconds is the host's: compare its `host_ms`, and the profile's
`idle_us`.

Writes `MODEL-BATCH-Ngpus.json` as soon as a model is timed, and once more when it is profiled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import shlex
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from hil.command import Parser
from hil.files import write_atomic
from hil.fingerprint import fingerprint, gpu_state
from loka_sim import resolve, zoo
from loka_sim.communication import BF16_BYTES, embedding_bytes
from loka_sim.errors import UserError
from loka_sim.mods import MODS
from loka_sim.validation.runnable import TABLE_ROWS
from loka_sim.validation.step_time import quantiles
from loka_sim.zoo.common import Tables

SCHEMA_VERSION = 1
COMPUTE, EXCHANGE, DDP, DDP_EXCHANGE, WHOLE = "compute", "exchange", "ddp", "ddp_exchange", "whole"
WARM_UP = 3
STEPS_OF_A_ROUND = 5
PROFILED_STEPS = 3
HOST_STEPS = 3
NCCL_TIMEOUT_S, CONTROL_TIMEOUT_S = 120, 900
MOST_NAMES, LONGEST_NAME = 500, 140
TABLES = "exchanged_tables"
"""Where a module keeps its tables: part of their parameters' names, in a graph too."""
MARKER = "spin_kernel"
"""What `torch.cuda._sleep` launches, between the steps of a profile."""
KINDS = (
    ("allreduce", "all_reduce"), ("sendrecv", "all_to_all"), ("alltoall", "all_to_all"), ("broadcast", "broadcast"),
    ("allgather", "all_gather"), ("reducescatter", "reduce_scatter"),
)  # fmt: skip
T = TypeVar("T")


@torch.library.custom_op("loka_step::all_to_all", mutates_args=(), schema="(Tensor x) -> Tensor")
def all_to_all(x: Tensor) -> Tensor:
    """An equal all-to-all of a tensor's elements; one operator to a compiler, which then neither splits nor reorders it."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dist.all_to_all_single(out.view(-1), x.contiguous().view(-1))
    return out


@all_to_all.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


all_to_all.register_autograd(lambda context, gradient: all_to_all(gradient))


class Exchanged(nn.Module):
    """A module that gives embeddings, sent through an all-to-all where `on`."""

    def __init__(self, inner: nn.Module) -> None:
        """Off."""
        super().__init__()
        self.add_module(TABLES, inner)
        self.on = False

    def forward(self, ids: Tensor) -> Tensor:
        """What the module gives, or what other ranks' gave."""
        out = self.get_submodule(TABLES)(ids)
        return all_to_all(out) if self.on else out


class Wrapped(nn.Module):
    """A model under DDP, whose forward is another function than the model's own: it is compiled apart from that."""

    def __init__(self, model: nn.Module) -> None:
        """See the class."""
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        """The model's."""
        out: Tensor = self.model(*inputs)
        return out


class Asked(NamedTuple):
    """A model and its batch on each rank."""

    model: str
    batch: int

    @property
    def parts(self) -> tuple[str, bool]:
        """The zoo's name, and whether all Mods are asked for."""
        name, modified, _ = self.model.partition(resolve.WITH_MODS)
        return zoo.canonical(name), bool(modified)

    @property
    def label(self) -> str:
        """Its name in full."""
        name, modified = self.parts
        return name + (resolve.WITH_MODS if modified else "")

    @property
    def expected(self) -> tuple[int, int]:
        """Bytes of embeddings and of dense gradients that a prediction has travel."""
        name, modified = self.parts
        spec = resolve.zoo_with_mods(name) if modified else resolve.resolve_model(name)
        assert spec is not None
        return embedding_bytes(spec.at_batch(self.batch)), spec.dense_parameters * BF16_BYTES


class Failed(Exception):
    """A model cannot go on, on any rank; says what happened."""


@dataclasses.dataclass
class World:
    """This rank's place.

    Attributes:
        device: This rank's.
        control: All ranks, over gloo, for decisions.
    """

    device: torch.device
    control: Any

    @property
    def cuda(self) -> bool:
        """Whether this is no dry run."""
        return self.device.type == "cuda"

    @property
    def first(self) -> bool:
        """Whether this rank writes."""
        return dist.get_rank() == 0

    def gathered(self, value: T) -> list[T]:
        """Every rank's value; all ranks wait for each other."""
        box: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(box, value, group=self.control)
        return box

    def together(self, what: str, run: Callable[[], T]) -> T:
        """Have every rank run something.

        Raises:
            Failed: some rank could not.
        """
        result, problem = None, None
        try:
            result = run()
        except Exception as error:  # whatever it is, the next model shall have its turn
            first_line = (str(error).strip().splitlines() or [""])[0]
            problem = f"{what}: {type(error).__name__}: {first_line[:300]}"
            print(f"rank {dist.get_rank()}: {problem}", file=sys.stderr, flush=True)
        problems = [(rank, text) for rank, text in enumerate(self.gathered(problem)) if text]
        if problems:
            rank, text = problems[0]
            raise Failed(f"{text} (on {len(problems)} ranks, rank {rank} first)")
        return result  # type: ignore[return-value]

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """Now, on the compute stream."""
        event: Any = torch.cuda.Event(enable_timing=True) if self.cuda else _HostClock()
        event.record()
        return event


class _HostClock:
    """An event's two methods, for a CPU."""

    def record(self) -> None:
        self.at_ms = 1e3 * time.perf_counter()

    def elapsed_time(self, later: Any) -> float:
        return later.at_ms - self.at_ms


class Trainer:
    """A model on this rank, and a step of it in each variant.

    Args:
        asked: What to build, with the same parameters on all ranks.
        world: Of the run.
        whole: Whether there is that variant.

    Attributes:
        variants: The names of its variants.
        exchanged: Bytes of each all-to-all.
        dense_bytes: Of the gradients that DDP reduces.
    """

    def __init__(self, asked: Asked, world: World, whole: bool) -> None:
        """Builds the model; nothing is compiled yet."""
        name, modified = asked.parts
        shape = zoo.input_shape(name)
        fewer: dict[str, Any] = {"rows": tuple(min(rows, TABLE_ROWS) for rows in shape.rows)}
        if shape.sequence_rows:
            fewer["sequence_rows"] = min(shape.sequence_rows, TABLE_ROWS)
        shape = dataclasses.replace(shape, **fewer)
        torch.manual_seed(0)
        self.model = zoo.build(name, mods=MODS if modified else (), device=world.device, shape=shape).bfloat16()
        tables = [key for key, child in self.model.named_children() if isinstance(child, Tables | nn.Embedding)]
        self.exchanges = [Exchanged(self.model.get_submodule(key)) for key in tables]
        for key, exchange in zip(tables, self.exchanges, strict=True):
            setattr(self.model, key, exchange)
        given = zoo.example_inputs(name, asked.batch, device=world.device, seed=dist.get_rank(), shape=shape)
        self.inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in given)
        with torch.no_grad():
            self.exchanged = [
                exchange(ids[:1]).numel() * asked.batch * BF16_BYTES
                for exchange, ids in zip(self.exchanges, self.inputs[1:], strict=True)
            ]
        self.labels = torch.rand(asked.batch, generator=torch.Generator().manual_seed(1)).round().to(world.device)
        self.variants = (COMPUTE, EXCHANGE, DDP, DDP_EXCHANGE, *([WHOLE] if whole else []))
        self.dense_bytes = sum(p.numel() * p.element_size() for key, p in self.model.named_parameters() if TABLES not in key)

    def wrap(self, bucket_mb: int | None) -> None:
        """Make the forms that will be compiled when they first run; a collective, like the constructor of DDP."""
        wrapped = Wrapped(self.model)
        kept = [key for key, _ in wrapped.named_parameters() if TABLES in key] + [key for key, _ in wrapped.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(wrapped, kept)
        # Without a size, DDP makes its first bucket 1 MiB, as Dynamo always believes that it is.
        self.ddp = DistributedDataParallel(wrapped, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        # In a dry run the same graphs, without the minutes that C++ takes.
        backend = "inductor" if self.labels.is_cuda else "aot_eager"
        self._split = torch.compile(self.ddp, dynamic=False, backend=backend)
        self._whole = torch.compile(self.model, dynamic=False, backend=backend)

    def step(self, variant: str) -> None:
        """Forward and backward."""
        for exchange in self.exchanges:
            exchange.on = variant in (EXCHANGE, DDP_EXCHANGE)
        run = self._whole if variant == WHOLE else self._split
        with contextlib.nullcontext() if variant in (DDP, DDP_EXCHANGE) else self.ddp.no_sync():
            out = run(*self.inputs)
            binary_cross_entropy_with_logits(out.float().flatten(), self.labels).backward()
        self.ddp.zero_grad(set_to_none=True)

    def steps(self, variant: str, number: int, world: World) -> float:
        """So many steps to their end; the seconds that they took."""
        begun = time.monotonic()
        for _ in range(number):
            self.step(variant)
        world.synchronize()
        return time.monotonic() - begun

    def buckets(self) -> list[int]:
        """Bytes of each all-reduce of a step, in order."""
        found = self.ddp._get_ddp_logging_data()
        text = str(found.get("rebuilt_bucket_sizes") or found.get("initial_bucket_sizes") or "")
        return [int(part) for part in text.replace(",", " ").split()]


@contextlib.contextmanager
def splits() -> Iterator[list[list[int]]]:
    """Inside, Dynamo does not count tables when it splits a graph at DDP's buckets; the bytes of each part are kept.

    It means not to, but its fake parameters have lost DDP's mark.
    """
    from torch._dynamo.backends.distributed import DDPOptimizer

    found: list[list[int]] = []
    compile_fn, add_param = DDPOptimizer.compile_fn, DDPOptimizer.add_param

    def compiled(self: Any, *arguments: Any, **named: Any) -> Any:
        result = compile_fn(self, *arguments, **named)
        found.append([bucket.size for bucket in self.buckets])
        return result

    def added(self: Any, bucket: Any, parameter: Any, name: str) -> None:
        if TABLES not in name:
            add_param(self, bucket, parameter, name)

    with mock.patch.object(DDPOptimizer, "compile_fn", compiled), mock.patch.object(DDPOptimizer, "add_param", added):
        yield found


def time_variants(trainer: Trainer, world: World, rounds: int) -> dict[str, dict[str, Any]]:
    """Times of each variant: milliseconds a step on the slowest rank of each step, the variants in turn."""
    token = torch.ones(1, device=world.device)
    samples: dict[str, list[float]] = {variant: [] for variant in trainer.variants}
    host: dict[str, list[float]] = {variant: [] for variant in trainer.variants}
    for _ in range(rounds):
        for variant in trainer.variants:
            # Queued first, so that ranks begin together.
            dist.all_reduce(token, dist.ReduceOp.MAX)
            trainer.step(variant)
            marks = [world.mark()]
            for _ in range(STEPS_OF_A_ROUND):
                trainer.step(variant)
                marks.append(world.mark())
            world.synchronize()
            samples[variant] += [start.elapsed_time(stop) for start, stop in zip(marks, marks[1:], strict=False)]
    for variant in trainer.variants:
        for _ in range(HOST_STEPS):
            world.synchronize()
            begun = time.perf_counter()
            trainer.step(variant)
            host[variant].append(1e3 * (time.perf_counter() - begun))
        world.synchronize()
    found = {}
    for variant, values in samples.items():
        slowest = torch.tensor(values, dtype=torch.float64, device=world.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found[variant] = {
            **quantiles(slowest.tolist()),
            "steps": len(values),
            "host_ms": max(world.gathered(statistics.median(host[variant]))),
            "by_rank_p50_ms": world.gathered(statistics.median(values)),
        }
    return found


class Event(NamedTuple):
    """A kernel, copy or fill on the GPU."""

    name: str
    start: float
    stop: float

    @property
    def us(self) -> float:
        """How long it took."""
        return self.stop - self.start


class Spans:
    """The union of events, as spans that do not touch."""

    def __init__(self, events: Sequence[Event]) -> None:
        """Of events in any order."""
        self.starts: list[float] = []
        self.stops: list[float] = []
        for event in sorted(events, key=lambda e: e.start):
            if self.stops and event.start <= self.stops[-1]:
                self.stops[-1] = max(self.stops[-1], event.stop)
            else:
                self.starts.append(event.start)
                self.stops.append(event.stop)

    @property
    def us(self) -> float:
        """Their sum."""
        return sum(self.stops) - sum(self.starts)

    def beside(self, start: float, stop: float) -> float:
        """How much of a span they cover."""
        covered = 0.0
        for index in range(max(bisect_right(self.starts, start) - 1, 0), len(self.starts)):
            if self.starts[index] >= stop:
                break
            covered += max(min(stop, self.stops[index]) - max(start, self.starts[index]), 0.0)
        return covered


def nccl_kind(name: str) -> str | None:
    """Which collective a kernel is of; None where it is NCCL's not at all."""
    low = name.lower()
    if not low.startswith("nccl"):
        return None
    return next((kind for part, kind in KINDS if part in low), "other")


def markers(events: Sequence[Event]) -> list[float]:
    """When each marker began."""
    return sorted(event.start for event in events if MARKER in event.name)


def by_step(events: Sequence[Event]) -> list[list[Event]]:
    """Events between one marker and the next; those before the first and after the last are left out.

    Raises:
        ValueError: there are not two markers.
    """
    ordered = sorted(events, key=lambda e: e.start)
    at = markers(ordered)
    if len(at) < 2:
        raise ValueError(f"the profile has {len(at)} markers among {len(ordered)} events")
    steps: list[list[Event]] = [[] for _ in at[1:]]
    for event in ordered:
        index = bisect_right(at, event.start) - 1
        if 0 <= index < len(steps) and MARKER not in event.name:
            steps[index].append(event)
    return steps


def summary(steps: Sequence[Sequence[Event]], at: Sequence[float]) -> dict[str, Any]:
    """What steps did, in microseconds a step: `exposed` is communication beside which nothing computes.

    Args:
        steps: Events of each.
        at: When each began, and the last ended.
    """
    spans_us = [stop - start for start, stop in zip(at, at[1:], strict=False)]
    parts: dict[str, float] = {}
    kinds: dict[str, dict[str, float]] = {}
    collectives = []
    for number, events in enumerate(steps):
        computing = [event for event in events if nccl_kind(event.name) is None]
        exchanging = [event for event in events if nccl_kind(event.name)]
        compute, communication = Spans(computing), Spans(exchanging)
        hidden = sum(compute.beside(*span) for span in zip(communication.starts, communication.stops, strict=True))
        touched = [event for event in computing if communication.beside(event.start, event.stop) > event.us / 2]
        for name, value in (
            ("span_us", spans_us[number]),
            ("busy_us", Spans(events).us),
            ("compute_us", sum(event.us for event in computing)),
            ("compute_kernels", len(computing)),
            ("communication_us", communication.us),
            ("exposed_us", communication.us - hidden),
            ("beside_us", sum(event.us for event in touched)),
            ("not_beside_us", sum(event.us for event in computing) - sum(event.us for event in touched)),
        ):
            parts[name] = parts.get(name, 0.0) + value / len(steps)
        for event in exchanging:
            kind = nccl_kind(event.name) or ""
            exposed = event.us - compute.beside(event.start, event.stop)
            row = kinds.setdefault(kind, {"kernels": 0.0, "us": 0.0, "exposed_us": 0.0})
            for name, value in (("kernels", 1.0), ("us", event.us), ("exposed_us", exposed)):
                row[name] += value / len(steps)
            collectives.append([number, kind, round(event.start - at[number], 1), round(event.us, 1), round(exposed, 1)])
    return {
        **parts,
        "idle_us": parts["span_us"] - parts["busy_us"],
        "spans_us": spans_us,
        "by_kind": kinds,
        "collectives": collectives,
    }


def kernel_table(alone: Sequence[Sequence[Event]], beside: Sequence[Sequence[Event]]) -> list[dict[str, Any]]:
    """Computing kernels by name, a step: in steps without exchanges, and in those with, beside NCCL's kernels or not.

    `beside_alone_us` is what those beside took in the steps without exchanges, launch by launch; None where a name has
    not as many launches in every step.
    """
    first, second = _launches(alone), _launches(beside)
    communication = [Spans([event for event in step if nccl_kind(event.name)]) for step in beside]
    rows: list[dict[str, Any]] = []
    for name in sorted({*first, *second}):
        apart, joined = first.get(name, [[]] * len(alone)), second.get(name, [[]] * len(beside))
        touched = [
            (index, event.us)
            for spans, launches in zip(communication, joined, strict=True)
            for index, event in enumerate(launches)
            if spans.beside(event.start, event.stop) > event.us / 2
        ]
        aligned = len({len(launches) for launches in [*apart, *joined]}) == 1
        means = [statistics.fmean(event.us for event in launches) for launches in zip(*apart, strict=True)] if aligned else []
        rows.append(
            {
                "kernel": name[:LONGEST_NAME],
                "launches": _a_step(len, apart), "us": _a_step(_sum_us, apart),
                "ddp_launches": _a_step(len, joined), "ddp_us": _a_step(_sum_us, joined),
                "beside_launches": round(len(touched) / len(beside), 3),
                "beside_us": round(sum(us for _, us in touched) / len(beside), 3),
                "beside_alone_us": round(sum(means[index] for index, _ in touched) / len(beside), 3) if aligned else None,
            }
        )  # fmt: skip
    rows.sort(key=lambda row: -(row["us"] + row["ddp_us"]))
    return rows


def _launches(steps: Sequence[Sequence[Event]]) -> dict[str, list[list[Event]]]:
    found: dict[str, list[list[Event]]] = {}
    for number, events in enumerate(steps):
        for event in events:
            if nccl_kind(event.name) is None:
                found.setdefault(event.name, [[] for _ in steps])[number].append(event)
    return found


def _sum_us(events: Sequence[Event]) -> float:
    return sum(event.us for event in events)


def _a_step(what: Callable[[Sequence[Event]], float], steps: Sequence[Sequence[Event]]) -> float:
    return round(sum(what(events) for events in steps) / len(steps), 3)


def profiled(trainer: Trainer, world: World, variant: str) -> list[Event]:
    """Everything on the GPU in a few steps, with a marker before, between and behind them.

    Every rank profiles, so that all are slowed alike.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    trainer.steps(variant, 1, world)
    events: list[Event] = []
    # What the host does is left out, for it slows the host, unless the profiler gives nothing without.
    for activities in ([ProfilerActivity.CUDA], [ProfilerActivity.CUDA, ProfilerActivity.CPU]):
        with profile(activities=activities) as profiler:
            world.gathered(None)
            # The first is not looked at: ranks do not begin it together.
            trainer.step(variant)
            for _ in range(PROFILED_STEPS):
                torch.cuda._sleep(1)
                trainer.step(variant)
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
        events = [
            Event(event.name, float(event.time_range.start), float(event.time_range.end))
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
            and not event.name.startswith("nccl:")
        ]
        if all(world.gathered(sum(MARKER in event.name for event in events) > PROFILED_STEPS)):
            break
    return events


def profile_document(alone: Sequence[Event], beside: Sequence[Event]) -> dict[str, Any]:
    """Profiles of `compute` and of `ddp_exchange`, as they are written."""
    found: dict[str, Any] = {}
    steps = {COMPUTE: by_step(alone), DDP_EXCHANGE: by_step(beside)}
    for variant, events in ((COMPUTE, alone), (DDP_EXCHANGE, beside)):
        found[variant] = summary(steps[variant], markers(events))
    rows = kernel_table(steps[COMPUTE], steps[DDP_EXCHANGE])
    kept = rows[:MOST_NAMES]
    left_out = {"names": len(rows) - len(kept), "us": sum(row["us"] for row in rows[MOST_NAMES:])}
    return {"steps": PROFILED_STEPS, **found, "kernels": kept, "kernels_left_out": left_out}


def _short(value: Any) -> Any:
    """Floats at six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _short(part) for key, part in value.items()}
    return [_short(part) for part in value] if isinstance(value, list | tuple) else value


def machine(world: World) -> dict[str, Any]:
    """What this runs on."""
    if not world.cuda:
        return {"gpu": "cpu", "torch": torch.__version__}
    return {
        **fingerprint(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nccl_environment": {key: value for key, value in sorted(os.environ.items()) if "NCCL_" in key},
    }


def measure(asked: Asked, world: World, options: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """One model; `write` is called whenever there is something new. The result says in `problem` why it is not whole.

    What exchanges nothing comes first: a rank that fails there does not leave others waiting in a collective.
    """
    found: dict[str, Any] = {}
    try:
        with splits() as split:
            trainer = world.together("build", lambda: Trainer(asked, world, options.whole))
            world.together("DDP", lambda: trainer.wrap(options.bucket_mb))
            embeddings, dense = asked.expected
            found |= {
                "parameters": sum(1 for _ in trainer.ddp.parameters()),
                "dense_bytes": trainer.dense_bytes, "expected_dense_bytes": dense,
                "embedding_bytes": sum(trainer.exchanged), "exchanges_bytes": trainer.exchanged,
                "expected_embedding_bytes": embeddings,
                "compiled_in_s": {},
            }  # fmt: skip
            for variant in (*([WHOLE] if options.whole else []), COMPUTE, DDP, EXCHANGE, DDP_EXCHANGE):
                write(found | {"problem": f"cut off in the first steps of {variant}"})
                warm = WARM_UP if variant in (DDP, DDP_EXCHANGE) else 2
                seconds = world.together(f"first steps of {variant}", lambda: trainer.steps(variant, warm, world))  # noqa: B023
                found["compiled_in_s"][variant] = seconds
        found["split_bytes"] = split
        found["buckets_bytes"] = world.together("DDP's buckets", trainer.buckets)
        found["all_reduces"] = len(found["buckets_bytes"])
        if world.cuda:
            torch.cuda.empty_cache()
        write(found | {"problem": "cut off in timing"})
        found["step"] = world.together("timing", lambda: time_variants(trainer, world, options.rounds))
        if world.cuda:
            found["peak_memory_bytes"] = max(world.gathered(torch.cuda.max_memory_allocated()))
            found["gpu_after"] = world.together("nvidia-smi", gpu_state) if world.first else world.together("", dict)
        write(found)
        if world.cuda and not options.no_profile:
            alone = world.together(f"profile of {COMPUTE}", lambda: profiled(trainer, world, COMPUTE))
            beside = world.together(f"profile of {DDP_EXCHANGE}", lambda: profiled(trainer, world, DDP_EXCHANGE))
            document = world.together("reading profiles", lambda: profile_document(alone, beside))
            keys = ("span_us", "busy_us", "compute_us", "communication_us", "exposed_us")
            found["profile"] = document
            found["profile_by_rank"] = world.gathered({key: document[DDP_EXCHANGE][key] for key in keys})
    except Failed as problem:
        found["problem"] = str(problem)
    write(found)
    return found


def _describe(asked: Asked, found: Mapping[str, Any]) -> str:
    times = [f"{variant} {row['p50_ms']:.3f}" for variant, row in found.get("step", {}).items()]
    words = [f"{asked.label} at {asked.batch}:", ", ".join(times) + " ms" if times else "not timed"]
    if "profile" in found:
        part = found["profile"][DDP_EXCHANGE]
        words.append(f"; exposed {part['exposed_us'] / 1e3:.3f} of {part['communication_us'] / 1e3:.3f} ms of NCCL")
    words.append(f"; {found['problem']}" if "problem" in found else "")
    return " ".join(words)


def run(models: Sequence[Asked], world: World, options: argparse.Namespace) -> bool:
    """Every model in turn; whether all were measured."""
    command = shlex.join(
        ["torchrun", "--nproc-per-node", str(dist.get_world_size()), "-m", "benchmarks.step_on_gpus", *sys.argv[1:]]
    )
    deadline = time.monotonic() + 60 * options.minutes
    complete = True
    for asked in models:
        if not world.gathered(time.monotonic() < deadline)[0]:
            if world.first:
                print(f"{asked.label} and what follows were not begun in {options.minutes:g} minutes", file=sys.stderr)
            return False
        begun = time.monotonic()
        path = options.out / f"{asked.label}-{asked.batch}-{dist.get_world_size()}gpus.json"
        head = {
            "schema_version": SCHEMA_VERSION, "model": asked.label, "batch": asked.batch, "ranks": dist.get_world_size(),
            "bucket_mb": options.bucket_mb, "command": command, "machine": machine(world) if world.first else {},
        }  # fmt: skip

        def write(found: dict[str, Any], head: dict[str, Any] = head, path: Path = path) -> None:
            if world.first:
                text = json.dumps(_short(head | found)) + "\n"
                write_atomic(path, lambda beside: beside.write_text(text))

        found = measure(asked, world, options, write)
        complete = complete and "problem" not in found
        if world.first:
            print(f"{_describe(asked, found)} ({time.monotonic() - begun:.0f} s)", flush=True)
        del found
        torch._dynamo.reset()
        gc.collect()
        if world.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return complete


def _asked(text: str, batch: int) -> Asked:
    """`MODEL` or `MODEL:BATCH`.

    Raises:
        UserError: there is no such model, or the batch is no number.
    """
    model, colon, number = text.partition(":")
    if colon and not (number.isdecimal() and int(number)):
        raise UserError(f"{text}: give MODEL:BATCH, a batch of at least 1")
    asked = Asked(model, int(number) if colon else batch)
    zoo.canonical(asked.parts[0])
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; run under torchrun. Exit codes: 0 done, 1 time ran out or a model failed, 2 bad usage, 3 no GPUs."""
    parser = Parser(prog="python -m benchmarks.step_on_gpus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL[:BATCH]", help="zoo models, +mods behind one for all Mods")
    parser.add_argument("--batch", type=int, default=2048, help="samples a rank, of models that name none (default: 2048)")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no model after this long (default: 30)")
    parser.add_argument("--rounds", type=int, default=4, help=f"rounds of {STEPS_OF_A_ROUND} steps a variant (default: 4)")
    parser.add_argument("--bucket-mb", type=int, help="DDP's bucket_cap_mb (default: DDP's own)")
    parser.add_argument("--whole", action="store_true", help="also the model compiled in one piece")
    parser.add_argument("--no-profile", action="store_true", help="times alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run over gloo, times mean nothing")
    options = parser.parse_args(arguments)
    try:
        models = [_asked(text, options.batch) for text in options.models]
    except UserError as error:
        parser.error(str(error))
    if min(options.batch, options.rounds, options.bucket_mb or 1) < 1:
        parser.error("--batch, --rounds and --bucket-mb are whole numbers of at least 1")
    cuda = options.device == "cuda"
    if (cuda and not torch.cuda.is_available()) or "RANK" not in os.environ:
        print(
            "no GPUs here, or not under torchrun: torchrun --nproc-per-node 4 -m benchmarks.step_on_gpus MODEL", file=sys.stderr
        )
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    torch._dynamo.config.recompile_limit = 512
    _share_cores()
    device = torch.device("cpu")
    timeout = timedelta(seconds=NCCL_TIMEOUT_S)
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    world = World(device, dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_TIMEOUT_S)))
    done = run(models, world, options)
    world.gathered(None)
    dist.destroy_process_group()
    return 0 if done else 1


def _share_cores() -> None:
    """Have each rank compile in its share of the cores."""
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        import torch._inductor.config

        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch._inductor.config.compile_threads = max(1, min(32, len(os.sched_getaffinity(0)) // ranks))


if __name__ == "__main__":
    sys.exit(main())

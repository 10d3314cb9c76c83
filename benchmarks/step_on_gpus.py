"""One training step on several GPUs of a host, part by part: to be held against `loka-sim step MODEL --gpus N --dense ddp`.

    torchrun --nproc-per-node 4 -m benchmarks.step_on_gpus wukong-small --batch 4096 --out DIR
    torchrun --nproc-per-node 4 -m benchmarks.step_on_gpus wukong-production:2048 dlrm-production:8192 --minutes 3 --out DIR
    torchrun --nproc-per-node 2 -m benchmarks.step_on_gpus wukong-production:2048:runs/wukong --dense fsdp --out DIR

Forward, backward and exchanges of a zoo model, in bf16 or as a dispatch table has it, tables cut to 10,000 rows; no optimizer.
Every rank has a batch of its own. The model is wrapped in DistributedDataParallel, tables left out, and compiled so that Dynamo
splits it at DDP's buckets. One set of parameters serves all variants, which alternate:

    compute        the split form without any exchange (`no_sync`, so that DDP copies no gradients into buckets either)
    exchange       and an all-to-all of each group of embeddings forward, and of its gradients backward
    ddp            compute, and the gradients' all-reduces
    ddp_exchange   both
    whole          with `--whole`: compiled in one piece, as `loka-sim validate` runs it on one GPU

With `--dense fsdp` it is sharded by `fully_shard`, each layer of a list of layers one unit and what is left another, tables left
out, and each layer, and each other part with linear layers, is compiled on its own:

    fsdp           gathers and reduce-scatters
    fsdp_exchange  and the all-to-alls

An all-to-all splits evenly, so that embeddings land with wrong samples, which time does not mind. The compute stream waits
for it at once, and it runs on the communicator of the all-reduces, in turn with them. InterFormer's sequence table has one
of its own. DDP broadcasts no buffers. A step of few milliseconds is the host's: compare its `host_ms`, how fast each rank's host
was (`host_step_us`, see `hil.host`), and the profile's `idle_us`. One rank alone tells what a host takes, as it exchanges with
itself.

Writes `MODEL-BATCH-Ngpus.json`, with `-decision` and `-fsdp` in its name where that is so, as soon as a model is timed, and once
more when it is profiled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import library as torch_library
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from benchmarks import gpu_profile
from hil import host
from hil.command import Parser
from hil.fingerprint import fingerprint
from loka_sim import resolve, zoo
from loka_sim.communication import embedding_bytes
from loka_sim.dense_units import BF16_BYTES
from loka_sim.dispatch import table
from loka_sim.document import rounded
from loka_sim.errors import UserError
from loka_sim.files import write_text_atomic
from loka_sim.mods import MODS
from loka_sim.validation.runnable import TABLE_ROWS
from loka_sim.validation.step_time import converted_by_table, quantiles
from loka_sim.zoo.common import Tables

SCHEMA_VERSION = 1
COMPUTE, EXCHANGE, DDP, DDP_EXCHANGE, WHOLE = "compute", "exchange", "ddp", "ddp_exchange", "whole"
FSDP, FSDP_EXCHANGE = "fsdp", "fsdp_exchange"
EXCHANGED, SYNCHRONIZED = (EXCHANGE, DDP_EXCHANGE, FSDP_EXCHANGE), (DDP, DDP_EXCHANGE)
MODELS = "zoo models, +mods behind one for all Mods; with a dispatch table, as `loka-sim whatif --out` writes it, in its kernels"
WARM_UP = 3
STEPS_OF_A_ROUND = 5
HOST_STEPS = 5
NCCL_TIMEOUT_S, CONTROL_TIMEOUT_S = 120, 900
TABLES = "exchanged_tables"
"""Where a module keeps its tables: part of their parameters' names, in a graph too."""
T = TypeVar("T")


@torch_library.custom_op("loka_step::all_to_all", mutates_args=(), schema="(Tensor x) -> Tensor")
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
        return self.model(*inputs)


class Asked(NamedTuple):
    """A model by the zoo's name, whether with all Mods, its batch on each rank, the dispatch table it runs (None: bf16)."""

    name: str
    modified: bool
    batch: int
    table: Path | None = None

    @property
    def label(self) -> str:
        """Its name in full."""
        return self.name + resolve.WITH_MODS * self.modified

    @property
    def expected(self) -> tuple[int, int]:
        """Bytes of embeddings and of dense gradients that a prediction has travel."""
        spec = resolve.zoo_with_mods(self.name) if self.modified else resolve.resolve_model(self.name)
        assert spec is not None
        return embedding_bytes(spec.at_batch(self.batch)), spec.dense_parameters * BF16_BYTES


def asked_for(text: str, batch: int) -> Asked:
    """`MODEL`, `MODEL:BATCH` or `MODEL:BATCH:TABLE`.

    Raises:
        UserError: there is no such model, the batch is no number, or the table is not there.
    """
    model, colon, rest = text.partition(":")
    number, _, folder = rest.partition(":")
    if colon and not (number.isdecimal() and int(number)):
        raise UserError(f"{text}: give MODEL:BATCH, a batch of at least 1")
    if folder and not Path(folder).exists():
        raise UserError(f"{text}: {folder} is not there; make it with `loka-sim whatif MODEL --batch BATCH --out DIR`")
    name = model.removesuffix(resolve.WITH_MODS)
    return Asked(zoo.canonical(name), name != model, int(number) if colon else batch, Path(folder) if folder else None)


class Failed(Exception):
    """A model cannot go on, on any rank; says what happened."""


@dataclasses.dataclass(frozen=True)
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
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, stop: Any) -> float:
        """From one mark to a later one, when both are past."""
        return float(start.elapsed_time(stop)) if self.cuda else 1e3 * (stop - start)


class Trainer:
    """A model on this rank, and a step of it in each variant.

    Args:
        asked: What to build, with the same parameters on all ranks.
        world: Of the run.
        whole: Whether there is that variant.
        sharded: Whether FSDP spreads it, and not DDP.

    Attributes:
        variants: The names of its variants, as they are first run.
        exchanged: Bytes of each all-to-all.
        dense_bytes: Of the gradients that DDP reduces.
        units: Modules that FSDP shards, each by itself; 0 under DDP.
    """

    def __init__(self, asked: Asked, world: World, whole: bool, sharded: bool = False) -> None:
        """Builds the model; nothing is compiled yet."""
        shape = zoo.input_shape(asked.name)
        fewer: dict[str, Any] = {"rows": tuple(min(rows, TABLE_ROWS) for rows in shape.rows)}
        if shape.sequence_rows:
            fewer["sequence_rows"] = min(shape.sequence_rows, TABLE_ROWS)
        shape = dataclasses.replace(shape, **fewer)
        torch.manual_seed(0)
        self.model = zoo.build(asked.name, mods=MODS if asked.modified else (), device=world.device, shape=shape).bfloat16()
        if asked.table is not None:
            self.model = converted_by_table(table.load(asked.table))(self.model)
        self._tables = [key for key, child in self.model.named_children() if isinstance(child, Tables | nn.Embedding)]
        self.exchanges = [Exchanged(self.model.get_submodule(key)) for key in self._tables]
        for key, exchange in zip(self._tables, self.exchanges, strict=True):
            setattr(self.model, key, exchange)
        given = zoo.example_inputs(asked.name, asked.batch, device=world.device, seed=dist.get_rank(), shape=shape)
        self.inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in given)
        with torch.no_grad():
            self.exchanged = [
                exchange(ids[:1]).numel() * asked.batch * BF16_BYTES
                for exchange, ids in zip(self.exchanges, self.inputs[1:], strict=True)
            ]
        self.labels = torch.rand(asked.batch, generator=torch.Generator().manual_seed(1)).round().to(world.device)
        # What exchanges nothing comes first: a rank that fails there does not leave others waiting in a collective.
        of_ddp = (*([WHOLE] if whole else []), COMPUTE, DDP, EXCHANGE, DDP_EXCHANGE)
        self.variants = (FSDP, FSDP_EXCHANGE) if sharded else of_ddp
        # In a dry run the same graphs, without the minutes that C++ takes.
        self._backend = "inductor" if world.cuda else "aot_eager"
        self.units = 0
        self.dense_bytes = sum(p.numel() * p.element_size() for key, p in self.model.named_parameters() if TABLES not in key)

    def wrap(self, bucket_mb: int | None) -> None:
        """Make the forms that will be compiled when they first run; a collective, like the constructor of DDP."""
        wrapped = Wrapped(self.model)
        kept = [key for key, _ in wrapped.named_parameters() if TABLES in key] + [key for key, _ in wrapped.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(wrapped, kept)
        # Without a size, DDP makes its first bucket 1 MiB, as Dynamo always believes that it is.
        self.ddp = DistributedDataParallel(wrapped, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
        self._split = torch.compile(self.ddp, dynamic=False, backend=self._backend)
        self._whole = torch.compile(self.model, dynamic=False, backend=self._backend)
        self._no_sync: Callable[[], contextlib.AbstractContextManager[None]] = self.ddp.no_sync

    def shard(self) -> None:
        """Have FSDP spread the dense parameters, layer by layer; a collective, too."""
        from torch.distributed.fsdp import fully_shard

        parts = [part for key, part in self.model.named_children() if key not in self._tables]
        layers = [layer for part in parts if isinstance(part, nn.ModuleList) for layer in part]
        others = [part for part in parts if not isinstance(part, nn.ModuleList)]
        for part in (*layers, *(part for part in others if any(isinstance(module, nn.Linear) for module in part.modules()))):
            part.compile(dynamic=False, backend=self._backend)
        kept = {parameter for exchange in self.exchanges for parameter in exchange.parameters()}
        for layer in layers:
            fully_shard(layer)
        fully_shard(self.model, ignored_params=kept)
        self.units = len(layers) + 1
        self._split, self._no_sync = self.model, contextlib.nullcontext

    def step(self, variant: str) -> None:
        """Forward and backward."""
        for exchange in self.exchanges:
            exchange.on = variant in EXCHANGED
        run = self._whole if variant == WHOLE else self._split
        with contextlib.nullcontext() if variant in SYNCHRONIZED else self._no_sync():
            out = run(*self.inputs)
            binary_cross_entropy_with_logits(out.float().flatten(), self.labels).backward()
        self.model.zero_grad(set_to_none=True)

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
    host_ms: dict[str, list[float]] = {variant: [] for variant in trainer.variants}
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
            samples[variant] += [world.ms(start, stop) for start, stop in zip(marks, marks[1:], strict=False)]
    for variant in trainer.variants:
        for _ in range(HOST_STEPS):
            begun = time.perf_counter()
            trainer.step(variant)
            host_ms[variant].append(1e3 * (time.perf_counter() - begun))
            world.synchronize()
    found = {}
    for variant, values in samples.items():
        slowest = torch.tensor(values, dtype=torch.float64, device=world.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found[variant] = {
            **quantiles(slowest.tolist()),
            "steps": len(values),
            "host_ms": max(world.gathered(statistics.median(host_ms[variant]))),
            "by_rank_p50_ms": world.gathered(statistics.median(values)),
        }
    return found


def machine(world: World) -> dict[str, Any]:
    """What this runs on."""
    if not world.cuda:
        return {"gpu": "cpu", "torch": torch.__version__}
    return {
        **fingerprint(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nccl_environment": {key: value for key, value in sorted(os.environ.items()) if "NCCL_" in key},
    }


def measure(asked: Asked, world: World, options: argparse.Namespace) -> dict[str, Any]:
    """One model, written whenever there is something new. The result says in `problem` why it is not whole."""
    ranks, sharded = dist.get_world_size(), options.dense == "fsdp"
    precision = "bf16" if asked.table is None else "decision"
    embeddings, dense = asked.expected
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION, "model": asked.label, "batch": asked.batch, "ranks": ranks,
        "precision": precision, "dense": options.dense, "bucket_mb": options.bucket_mb,
        "machine": machine(world) if world.first else {},
        "command": shlex.join(["torchrun", "--nproc-per-node", str(ranks), "-m", "benchmarks.step_on_gpus", *sys.argv[1:]]),
        "expected_dense_bytes": dense, "expected_embedding_bytes": embeddings, "compiled_in_s": {},
    }  # fmt: skip

    def write(cut_off: str = "") -> None:
        if world.first:
            problem = {"problem": f"cut off in {cut_off}"} if cut_off else {}
            what = f"{'-decision' * (asked.table is not None)}{'-fsdp' * sharded}"
            path = options.out / f"{asked.label}-{asked.batch}-{ranks}gpus{what}.json"
            write_text_atomic(path, json.dumps(rounded(found | problem)) + "\n")

    try:
        with splits() as split:
            trainer = world.together("build", lambda: Trainer(asked, world, options.whole, sharded))
            world.together("wrapping", trainer.shard if sharded else lambda: trainer.wrap(options.bucket_mb))
            found |= {"dense_bytes": trainer.dense_bytes, "embedding_bytes": sum(trainer.exchanged)}
            for variant in trainer.variants:
                what = f"first steps of {variant}"
                write(what)
                warm = WARM_UP if variant in SYNCHRONIZED else 2
                found["compiled_in_s"][variant] = world.together(what, lambda: trainer.steps(variant, warm, world))  # noqa: B023
        if not sharded:
            buckets = world.together("DDP's buckets", trainer.buckets)
            found |= {"split_bytes": split, "buckets_bytes": buckets, "all_reduces": len(buckets)}
        else:
            found["units"] = trainer.units
        if world.cuda:
            torch.cuda.empty_cache()
        write("timing")
        found["step"] = world.together("timing", lambda: time_variants(trainer, world, options.rounds))
        if world.cuda:
            found["host_step_us"] = world.gathered(world.together("the host's speed", host.step_us))
            found["peak_memory_bytes"] = max(world.gathered(torch.cuda.max_memory_allocated()))
        write()
        if world.cuda and not options.no_profile:
            profile: dict[str, Any] = {"steps": gpu_profile.STEPS}
            seen: list[list[gpu_profile.Event]] = []
            for variant in (trainer.variants[-1],) if sharded else (COMPUTE, DDP_EXCHANGE):
                what, step = f"profile of {variant}", functools.partial(trainer.step, variant)
                events = world.together(what, lambda: gpu_profile.profiled(step, world.gathered))  # noqa: B023
                profile[variant] = world.together(what, lambda: gpu_profile.summary(events))  # noqa: B023
                seen.append(events)
            if len(seen) == 2:
                profile["kernels"] = world.together("profile of kernels", lambda: gpu_profile.kernels(*seen))
            found["profile"] = profile
    except Failed as problem:
        found["problem"] = str(problem)
    write()
    return found


def _describe(asked: Asked, found: Mapping[str, Any]) -> str:
    times = [f"{variant} {row['p50_ms']:.3f}" for variant, row in found.get("step", {}).items()]
    words = f"{asked.label} at {asked.batch}: {', '.join(times) + ' ms' if times else 'not timed'}"
    if "profile" in found:
        part = found["profile"][next(name for name in EXCHANGED if name in found["profile"])]
        words += f"; exposed {part['exposed_us'] / 1e3:.3f} of {part['communication_us'] / 1e3:.3f} ms of NCCL"
    return words + (f"; {found['problem']}" if "problem" in found else "")


def run(models: Sequence[Asked], world: World, options: argparse.Namespace) -> bool:
    """Every model in turn; whether all were measured."""
    deadline = time.monotonic() + 60 * options.minutes
    complete = True
    for asked in models:
        begun = time.monotonic()
        if not world.gathered(begun < deadline)[0]:
            if world.first:
                print(f"{asked.label} and what follows were not begun in {options.minutes:g} minutes", file=sys.stderr)
            return False
        found = measure(asked, world, options)
        complete = complete and "problem" not in found
        if world.first:
            print(f"{_describe(asked, found)} ({time.monotonic() - begun:.0f} s)", flush=True)
        torch._dynamo.reset()
        gc.collect()
        if world.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return complete


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; run under torchrun. Exit codes: 0 done, 1 time ran out or a model failed, 2 bad usage, 3 no GPUs."""
    parser = Parser(prog="python -m benchmarks.step_on_gpus", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL[:BATCH[:TABLE]]", help=MODELS)
    parser.add_argument("--batch", type=int, default=2048, help="samples a rank, of models that name none (default: 2048)")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no model after this long (default: 30)")
    parser.add_argument("--rounds", type=int, default=4, help=f"rounds of {STEPS_OF_A_ROUND} steps a variant (default: 4)")
    parser.add_argument("--dense", choices=("ddp", "fsdp"), default="ddp", help="how dense parameters are spread (default: ddp)")
    parser.add_argument("--bucket-mb", type=int, help="DDP's bucket_cap_mb (default: DDP's own)")
    parser.add_argument("--whole", action="store_true", help="also the model compiled in one piece")
    parser.add_argument("--no-profile", action="store_true", help="times alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run over gloo, times mean nothing")
    options = parser.parse_args(arguments)
    try:
        models = [asked_for(text, options.batch) for text in options.models]
    except UserError as error:
        parser.error(str(error))
    if min(options.batch, options.rounds, options.bucket_mb or 1) < 1:
        parser.error("--batch, --rounds and --bucket-mb are whole numbers of at least 1")
    cuda = options.device == "cuda"
    if (cuda and not torch.cuda.is_available()) or "RANK" not in os.environ:
        usage = "torchrun --nproc-per-node 4 -m benchmarks.step_on_gpus MODEL"
        print(f"no GPUs here, or not under torchrun: {usage}", file=sys.stderr)
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    torch._dynamo.config.recompile_limit = 512
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        import torch._inductor.config as inductor

        # Each rank compiles in its share of the cores.
        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        inductor.compile_threads = max(1, min(32, share))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=NCCL_TIMEOUT_S)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None, timeout=timeout)
    world = World(device, dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_TIMEOUT_S)))
    done = run(models, world, options)
    world.gathered(None)
    dist.destroy_process_group()
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())

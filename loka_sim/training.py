"""Train a small zoo model on real data on the CPU and collect the statistics of its sites.

`python -m loka_sim.training wukong-small --data criteo --path DIR --out DIR` does so on the command line, `all` instead
of a name for the four small models, each as its paper has it and under all Mods (the shipped statistics). Log loss,
with AdamW for dense parameters and Adagrad for embedding tables; statistics from the last iterations; log loss, AUC
and normalized entropy on held-out samples.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loka_sim import datasets, zoo
from loka_sim.collector import SiteCollector
from loka_sim.datasets.base import Batch, Dataset, FrequentOnly, frequent
from loka_sim.errors import LokaSimError, UserError
from loka_sim.mods import parse_mods
from loka_sim.statistics import SiteStatistics, Statistics, save
from numerics.pair import RECIPES
from numerics.sizes import is_whole

Progress = Callable[[str], None]
SMALL = tuple(name for name in zoo.NAMES if name.endswith("-small"))


@dataclass(frozen=True)
class TrainingConfig:
    """How to train.

    Attributes:
        steps: Iterations.
        batch: Samples per iteration.
        seed: Of the parameters, the order of samples and the rows that statistics look at.
        learning_rate: Of AdamW, for everything but the tables.
        table_learning_rate: Of Adagrad, for the tables.
        weight_decay: Of AdamW.
        collect: Iterations at the end whose activations and gradients enter the statistics; 0 for none.
        rank: Factors of each covariance to keep.
        min_count: Ids seen less often in the training split count as missing; 1 keeps all.
    """

    steps: int = 112
    batch: int = 128
    seed: int = 0
    learning_rate: float = 1e-3
    table_learning_rate: float = 0.01
    weight_decay: float = 0.1
    collect: int = 12
    rank: int = 16
    min_count: int = 30

    def __post_init__(self) -> None:
        """Raises `UserError` naming a field that is out of range."""
        for name in ("steps", "batch"):
            if not is_whole(getattr(self, name)):
                raise UserError(f"{name} = {getattr(self, name)}: give a whole number of at least 1")
        if not 0 <= self.collect <= self.steps:
            raise UserError(f"collect = {self.collect}: give 0 to {self.steps}, the number of steps")


@dataclass(frozen=True)
class Metrics:
    """Quality on held-out samples.

    Attributes:
        log_loss: Mean cross entropy, in nats.
        auc: Area under the ROC curve; ties count half.
        normalized_entropy: Log loss over that of always predicting the training split's click rate.
        samples: How many.
    """

    log_loss: float
    auc: float
    normalized_entropy: float
    samples: int


@dataclass(frozen=True)
class TrainingRun:
    """What a training run leaves."""

    model: nn.Module
    metrics: Metrics
    sites: dict[str, SiteStatistics]
    seconds: float


def tensors(batch: Batch, model: nn.Module) -> tuple[Tensor, ...]:
    """A batch as a zoo model takes it: dense, ids and, for InterFormer, the sequence."""
    inputs = [torch.from_numpy(batch.dense), torch.from_numpy(batch.ids)]
    if hasattr(model, "sequence_table"):
        inputs.append(torch.from_numpy(batch.sequence))
    return tuple(inputs)


def optimizers(model: nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """AdamW for dense parameters; Adagrad for tables, which leaves rows alone that a batch does not look up."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in tables]
    sparse = [parameter for parameter in model.parameters() if id(parameter) in tables]
    return [
        torch.optim.AdamW(dense, lr=config.learning_rate, weight_decay=config.weight_decay),
        torch.optim.Adagrad(sparse, lr=config.table_learning_rate),
    ]


def area_under_curve(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve by ranks, ties counting half; 0.5 where only one class is there."""
    positive = int(labels.sum())
    negative = len(labels) - positive
    if not positive or not negative:
        return 0.5
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[inverse][labels > 0].sum() - positive * (positive + 1) / 2) / (positive * negative))


def evaluate(model: nn.Module, samples: Batch, click_rate: float, batch: int = 1024) -> Metrics:
    """Quality of a model on `samples`; `click_rate` is the training split's, for the normalized entropy."""
    model.eval()
    parts = []
    with torch.no_grad():
        for start in range(0, len(samples), batch):
            parts.append(model(*tensors(samples.take(slice(start, start + batch)), model)))
    model.train()
    logits = torch.cat(parts).double()
    labels = torch.from_numpy(samples.labels).double()
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels).item()
    rate = min(max(click_rate, 1e-6), 1 - 1e-6)
    constant = -float(np.mean(np.where(samples.labels > 0, np.log(rate), np.log1p(-rate))))
    return Metrics(loss, area_under_curve(samples.labels, logits.numpy()), loss / constant, len(samples))


def _endless(dataset: Dataset, config: TrainingConfig) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from dataset.batches(config.batch, seed=config.seed * 1_000_003 + epoch)
        epoch += 1


def train(
    name: str, training: Dataset, held_out: Dataset, config: TrainingConfig | None = None, *,
    mods: Sequence[str] = (), progress: Progress | None = None, recipes: Sequence[str] = RECIPES,
) -> TrainingRun:  # fmt: skip
    """Train a zoo model and collect its statistics.

    Args:
        name: A zoo model that fits into memory.
        training: Samples to learn from.
        held_out: Samples to judge by.
        config: How.
        mods: Names of Mods.
        progress: Told a line now and then.
        recipes: Those whose errors statistics measure on pairs of operands, see `numerics.pair`.

    Raises:
        UserError: unknown model or Mod, or the data do not fit.
        DataError: the data are damaged, or fewer than a batch.
    """
    config = config or TrainingConfig()
    started = time.perf_counter()
    if config.min_count > 1:
        keep = frequent(training, config.min_count)
        training, held_out = FrequentOnly(training, keep), FrequentOnly(held_out, keep)
    torch.manual_seed(config.seed)
    model = zoo.build(name, mods=mods, device="cpu", shape=training.shape)
    both = optimizers(model, config)
    collector = SiteCollector(model, config.rank, config.seed, recipes)
    clicks = seen = running = 0.0
    stream = _endless(training, config)
    for step in range(1, config.steps + 1):
        batch = next(stream)
        collector.enabled = step > config.steps - config.collect
        for optimizer in both:
            optimizer.zero_grad(set_to_none=True)
        logits = model(*tensors(batch, model))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))
        loss.backward()
        for optimizer in both:
            optimizer.step()
        clicks, seen = clicks + float(batch.labels.sum()), seen + len(batch)
        running = loss.item() if step == 1 else 0.95 * running + 0.05 * loss.item()
        if progress and (step == 1 or step % 20 == 0 or step == config.steps):
            progress(f"step {step}/{config.steps}  log loss {running:.4f} (running)")
    collector.close()
    metrics = evaluate(model, held_out.read(), clicks / seen)
    sites = collector.result() if config.collect else {}
    return TrainingRun(model, metrics, sites, time.perf_counter() - started)


def fingerprint(name: str, training: Dataset, mods: Sequence[str]) -> str:
    """Of the `ModelSpec` of the model that `train` builds."""
    from loka_sim.capture import capture

    twin = zoo.build(name, mods=mods, shape=training.shape)
    inputs = zoo.example_inputs(name, 2, shape=training.shape)
    return capture(twin, inputs, name=name).fingerprint


def _parser() -> argparse.ArgumentParser:
    defaults = TrainingConfig()
    parser = argparse.ArgumentParser(prog="python -m loka_sim.training", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help=f"one of {', '.join(SMALL)}; or all, with and without Mods")
    parser.add_argument("--data", default="criteo", help="criteo, movielens or synthetic (default criteo)")
    parser.add_argument("--path", help="its file or folder (default: LOKA_SIM_CRITEO or LOKA_SIM_MOVIELENS)")
    parser.add_argument("--rows", type=int, default=100_000, help="samples of a synthetic dataset")
    parser.add_argument("--mods", default="none", help="all, none, or names separated by commas")
    parser.add_argument("--out", type=Path, help="folder for the statistics")
    parser.add_argument("--threads", type=int, default=1, help="of torch; figures repeat to the bit with the same number")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    for key in ("steps", "batch", "seed", "collect", "rank", "min-count"):
        parser.add_argument(f"--{key}", type=int, default=getattr(defaults, key.replace("-", "_")))
    for key in ("learning-rate", "table-learning-rate", "weight-decay"):
        parser.add_argument(f"--{key}", type=float, default=getattr(defaults, key.replace("-", "_")))
    return parser


def _command(options: argparse.Namespace, config: TrainingConfig, mods: Sequence[str]) -> str:
    """The command that repeats a run, with placeholders for the places."""
    words = ["python", "-m", "loka_sim.training", options.model, "--data", options.data]
    words += ["--path", "DATA_DIR"] if options.data != "synthetic" else ["--rows", str(options.rows)]
    words += ["--mods", ",".join(mods)] if mods else []
    for key, value in asdict(config).items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--threads", str(options.threads), "--out", "OUT_DIR"])


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in ("torch", "numpy", "safetensors")}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One run of the command line: trains, writes `--out`, returns the result document."""
    mods = parse_mods(options.mods)
    config = TrainingConfig(**{key: getattr(options, key) for key in asdict(TrainingConfig())})
    if options.threads < 1:
        raise UserError(f"threads = {options.threads}: give at least 1")
    torch.set_num_threads(options.threads)
    name = zoo.canonical(options.model)
    if not name.endswith("-small"):
        raise UserError(f"'{options.model}' does not fit into memory; train {name.removesuffix('-production')}-small")
    shape = zoo.input_shape(name)
    training, held_out = (
        datasets.open_dataset(options.data, options.path, split, shape=shape, seed=config.seed, rows=options.rows)
        for split in datasets.SPLITS
    )

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = train(name, training, held_out, config, mods=mods, progress=progress)
    document: dict[str, Any] = {
        "schema_version": 1,
        "model": name,
        "mods": list(mods),
        "fingerprint": fingerprint(name, training, mods),
        "dataset": training.provenance(),
        **asdict(config),
        "command": _command(options, config, mods),
        "versions": _versions(),
        "held_out": asdict(result.metrics),
    }
    if options.out is not None:
        facts = {key: value for key, value in document.items() if key not in ("model", "fingerprint")}
        save(options.out, Statistics(name, document["fingerprint"], result.sites, facts))
    progress(f"trained in {result.seconds:.1f} s")
    return document


def _jobs(options: argparse.Namespace) -> list[argparse.Namespace]:
    """The runs that a command line asks for: one, or `all`, each in a folder of its own below `--out`."""
    if options.model != "all":
        return [options]
    jobs = []
    for model in SMALL:
        for mods, suffix in (("none", ""), ("all", "+mods")):
            out = options.out and options.out / f"{model}{suffix}"
            jobs.append(argparse.Namespace(**(vars(options) | {"model": model, "mods": mods, "out": out})))
    return jobs


def _line(document: dict[str, Any]) -> str:
    held = document["held_out"]
    under = f" under {', '.join(document['mods'])}" if document["mods"] else ""
    return (
        f"{document['model']}{under} on {document['dataset']['name']}, {document['steps']} steps of {document['batch']}:"
        f" held-out log loss {held['log_loss']:.4f}, AUC {held['auc']:.4f},"
        f" normalized entropy {held['normalized_entropy']:.4f} ({held['samples']} samples)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        for job in _jobs(options):
            document = run(job)
            print(json.dumps(document, indent=2) if options.json else _line(document), flush=True)
    except LokaSimError as error:
        print(f"loka-sim: {error}", file=sys.stderr)
        return error.exit_code
    if options.out is not None and options.model != "all" and not options.json:
        print(f"statistics in {options.out}; next: loka-sim whatif {options.model} --statistics {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

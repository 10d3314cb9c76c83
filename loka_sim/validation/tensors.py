"""The error of FP8 GEMMs on a model's own tensors: predicted from statistics, emulated, and measured on the GPU.

A zoo model's small size is trained for a few steps on synthetic data; the statistics are of its last batches, the tensors
of a batch that came after. A user's model is run as it is made, on its own inputs, and the statistics are of those.
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any

from loka_sim.dispatch.operands import TORCH, Toolbox
from loka_sim.validation.runnable import Runnable

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor, nn

    from loka_sim.statistics import SiteStatistics

STEPS, COLLECTED, BATCH = 40, 8, 128
# Rows of the held-out batch that enter a GEMM: what one step of the small model has.
MAX_ROWS = 2048
# How often it is asked whether a process has answered.
_POLL_S = 0.1


@dataclass(frozen=True)
class Observed:
    """Tensors of one step: x (M, K), w (N, K) and g (M, N) by site, and the statistics to predict from."""

    tensors: dict[str, tuple[Tensor, Tensor, Tensor]]
    statistics: dict[str, SiteStatistics]
    origin: str


def observe_zoo(name: str, mods: Sequence[str], seed: int) -> Observed:
    """Train the small size of a zoo model on synthetic samples and look at one more batch.

    Args:
        name: Of the zoo.
        mods: Changes to the model.
        seed: Of samples and weights.
    """
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    from loka_sim import datasets, zoo
    from loka_sim.training import TrainingConfig, tensors, train

    small = f"{name.rpartition('-')[0]}-small"
    shape = zoo.input_shape(small)
    training, held_out = (
        datasets.open_dataset("synthetic", None, split, shape=shape, seed=seed, rows=rows)
        # Of the second split a tenth is made.
        for split, rows in zip(datasets.SPLITS, (STEPS * BATCH * 2, 10 * BATCH), strict=True)
    )
    config = TrainingConfig(steps=STEPS, batch=BATCH, seed=seed, collect=COLLECTED, min_count=1)
    run = train(small, training, held_out, config, mods=mods, recipes=recipes())
    batch = held_out.read().take(slice(0, BATCH))
    seen = _hooked(run.model)
    logits = run.model(*tensors(batch, run.model))
    binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels)).backward()
    origin = f"{small}, {STEPS} steps of {BATCH} synthetic samples, seed {seed}; tensors of {len(batch)} held-out samples"
    return Observed(_matrices(seen), run.sites, origin)


def observe_zoo_apart(name: str, mods: Sequence[str], seed: int, stop: Event) -> Observed:
    """`observe_zoo` in a process of its own, on one core; in a thread it would wait for whoever is timing kernels.

    Args:
        name: Of the zoo.
        mods: Changes to the model.
        seed: Of samples and weights.
        stop: Set, it ends the process.

    Raises:
        InterruptedError: it was stopped.
        RuntimeError: the process failed; its own error is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_observe_and_send, args=(theirs, name, tuple(mods), seed), daemon=True)
    child.start()
    theirs.close()
    try:
        while not ours.poll(_POLL_S):
            if stop.is_set():
                raise InterruptedError("training was stopped")
        observed = pickle.loads(ours.recv_bytes())
    except EOFError:
        raise RuntimeError(f"training {name} on the CPU failed; what it printed says why") from None
    finally:
        child.terminate()
        child.join()
    assert isinstance(observed, Observed)
    return observed


def _observe_and_send(pipe: Connection, name: str, mods: Sequence[str], seed: int) -> None:
    import torch

    # Ctrl-C is for the one that waits, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A small model: on cores that compile other things, more threads took ten times as long.
    torch.set_num_threads(1)
    # As bytes: tensors sent as they are stay in memory that ends with this process.
    pipe.send_bytes(pickle.dumps(observe_zoo(name, mods, seed)))


def recipes() -> list[str]:
    """Recipes of the FP8 kernels there are: what else statistics may measure takes four times as long, and is not asked here."""
    from perfmodel.kernels import KERNELS

    operands = {recipe for spec in KERNELS.values() if spec.is_fp8 for recipe in (spec.recipe_a, spec.recipe_b)}
    return sorted(recipe for recipe in operands if recipe is not None)


def observe_users(model: Runnable) -> Observed:
    """Run a user's model twice: for its statistics, then for its tensors."""
    from loka_sim.collector import SiteCollector

    module, inputs = model.make().float(), tuple(x.float() if x.is_floating_point() else x for x in model.inputs())
    module, inputs = module.cpu(), tuple(x.cpu() for x in inputs)
    collector = SiteCollector(module, 16, recipes=recipes())
    collector.enabled = True
    model.loss(module(*inputs)).backward()
    collector.close()
    seen = _hooked(module)
    model.loss(module(*inputs)).backward()
    return Observed(_matrices(seen), collector.result(), "the model as it is made, on its own inputs")


def _hooked(model: nn.Module) -> dict[str, list[Tensor]]:
    """Filled by the next step with x, w and g of every linear layer."""
    from torch import nn

    seen: dict[str, list[Tensor]] = {}

    def remember(name: str, module: nn.Linear) -> None:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = [inputs[0].detach(), module.weight.detach()]
            if output.requires_grad:
                output.register_hook(lambda gradient: seen[name].append(gradient.detach()))

        module.register_forward_hook(hook)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            remember(name, module)
    return seen


def _matrices(seen: dict[str, list[Tensor]]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    return {
        name: (found[0].flatten(0, -2)[:MAX_ROWS], found[1], found[2].flatten(0, -2)[:MAX_ROWS])
        for name, found in seen.items()
        if len(found) == 3
    }


def compare(
    observed: Observed, deadline: float, toolbox: Toolbox = TORCH, lock: AbstractContextManager[Any] | None = None
) -> tuple[list[dict[str, Any]], int]:
    """Measure torch's FP8 kernels and a toolbox's on every pass of every site, until the deadline: document's rows, sites seen.

    Sites take turns from both ends of the model, so that a short time sees its first and its last layers.

    Args:
        observed: Tensors, and the statistics to predict from.
        deadline: Of `time.monotonic()`; one site is seen whatever it says.
        toolbox: Whose kernels.
        lock: Held while the GPU works; others may be timing kernels on it.
    """
    from hil.tensor_errors import MEASURABLE, measure
    from loka_sim.dispatch.accuracy import Errors
    from loka_sim.dispatch.candidates import SiteShape

    errors, rows = Errors(toolbox), list[dict[str, Any]]()
    names = [name for name in observed.tensors if name in observed.statistics]
    ordered = [name for pair in zip(names, reversed(names), strict=True) for name in pair]
    seen = 0
    for name in dict.fromkeys(ordered):
        if seen and time.monotonic() > deadline:
            break
        seen += 1
        x, w, g = (tensor.cuda().bfloat16() for tensor in observed.tensors[name])
        m, k, n = x.shape[0], x.shape[1], w.shape[0]
        shape = SiteShape((("output", m, n, k, 1), ("grad_input", m, k, n, 1), ("grad_weight", n, k, m, 1)))
        predicted = errors.of_site(shape, observed.statistics[name])
        operands = {"output": (x, w), "grad_input": (g, w.t()), "grad_weight": (g.t(), x.t())}
        with lock or nullcontext():
            measured = {
                (which, kernel): measure(kernel, *operands[which])
                for which, kernel in predicted
                # Of an all-zero operand there is no error to speak of.
                if kernel in MEASURABLE and all(bool(operand.any()) for operand in operands[which])
            }
        for (which, kernel), found in measured.items():
            error = predicted[which, kernel]
            if not math.isfinite(found.sqnr_db) or not math.isfinite(found.mere):
                continue
            rows.append(
                {
                    "site": name, "pass": which, "kernel": kernel, "m": found.shape[0], "n": found.shape[1], "k": found.shape[2],
                    "bit_equal": found.equal / found.outputs, "outputs": found.outputs,
                    "measured_sqnr_db": found.sqnr_db, "emulated_sqnr_db": found.emulated_sqnr_db,
                    "predicted_sqnr_db": error.sqnr_db, "measured_mere": found.mere, "predicted_mere": error.mere,
                }
            )  # fmt: skip
    return rows, seen


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per kernel and pass: bit-equal share, gaps in SQNR and MERE between predicted and measured."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["kernel"], row["pass"]].append(row)
    result = []
    for (kernel, which), some in sorted(groups.items()):
        gaps = sorted(abs(row["predicted_sqnr_db"] - row["measured_sqnr_db"]) for row in some)
        meres = [abs(row["predicted_mere"] / row["measured_mere"] - 1) for row in some if row["measured_mere"] > 0]
        result.append(
            {
                "kernel": kernel, "pass": which, "n": len(some),
                "bit_equal": sum(row["bit_equal"] * row["outputs"] for row in some) / sum(row["outputs"] for row in some),
                "sqnr_gap_median_db": statistics.median(gaps), "sqnr_gap_p95_db": gaps[min(len(gaps) - 1, int(0.95 * len(gaps)))],
                "within_half_db": sum(gap <= 0.5 for gap in gaps) / len(gaps),
                "mere_gap_median": statistics.median(meres) if meres else 0.0,
            }
        )  # fmt: skip
    return result


def corrections(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Factor on the predicted MERE per kernel and pass that the measured one asks for.

    The geometric mean of measured over predicted, drawn towards 1 as if eight GEMMs had been predicted right.
    """
    logs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row["predicted_mere"] > 0 and row["measured_mere"] > 0:
            logs[row["kernel"], row["pass"]].append(math.log(row["measured_mere"] / row["predicted_mere"]))
    result: dict[str, dict[str, float]] = defaultdict(dict)
    for (kernel, which), values in sorted(logs.items()):
        result[kernel][which] = math.exp(sum(values) / (len(values) + 8))
    return dict(result)

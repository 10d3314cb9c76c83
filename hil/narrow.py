"""Make a network of cuBLAS's choices narrower: nearly the same answers in less time, without a GPU.

    python -m hil.narrow --out data/h200 --kernels torch/bf16 --width 512

Units of a hidden layer are removed one at a time, always that one without which the next layer, its weights made up for the loss
as well as they can be, sees the least difference (the optimal brain surgeon of Hassibi and Stork, 1993, on each layer's least
squares). What is left is taught the wide network's probabilities on fresh shapes, drawn as `hil.choices` draws them. The network
in `choices/` of the folder is replaced; its sidecar says how often both choose alike, on shapes held out of the teaching and on
those of `gemm.parquet`, and keeps what was said of the wide one.
"""

from __future__ import annotations

import multiprocessing
import shlex
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hil.choices import DECAY, HELD_OUT, KERNELS_ASKED, judged, shapes_to_ask, write
from hil.command import Parser
from perfmodel.calls import columns_of
from perfmodel.choice import Choice, asked, vocabulary
from perfmodel.hardware import HardwareSpec
from perfmodel.judge import SHAPE
from perfmodel.measured import read_choices
from perfmodel.network import Layers, Network, rectified, single_threaded
from perfmodel.saved import read_spec

BATCH, RATE = 2048, 1e-3
# Rows by which it is told what a unit is worth, and what keeps their moments regular.
_WEIGHED, _RIDGE = 40_000, 1e-6
# Of the steps the last share is of full precision; the others multiply in bfloat16.
_PRECISE = 0.05


def drawn(kernel: str, count: int, seed: int, workers: int = 1) -> pd.DataFrame:
    """Distinct shapes of so many draws for a kernel, in no order: columns m, n, k, groups."""
    each, parts = 100_000, -(-count // 100_000)
    jobs = [(kernel, min(each, count - number * each), [seed, number]) for number in range(parts)]
    if workers < 2:
        found = [_drawn(*job) for job in jobs]
    else:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            found = pool.starmap(_drawn, jobs, chunksize=1)
    shapes = np.unique(np.concatenate(found), axis=0)
    return pd.DataFrame(np.random.default_rng(seed).permutation(shapes), columns=SHAPE)


def _drawn(kernel: str, count: int, seed: list[int]) -> npt.NDArray[np.int64]:
    first, found = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]), list[tuple[int, ...]]()
    while len(found) < count:
        found += [(s.m, s.n, s.k, s.groups) for s in shapes_to_ask([kernel], first)]
        first += 10
    return np.array(found[:count], dtype=np.int64)


def pruned(network: Network, matrix: npt.NDArray[np.floating], width: int) -> Network:
    """A network with as many units in each hidden layer, without those that are missed least.

    Args:
        network: The wide one.
        matrix: Features of rows on which they would be missed, (rows, inputs).
        width: Units that are kept; a layer that has no more stays.
    """
    layers: Layers = list(network.layers)
    x = network.normal(matrix)
    for number in range(len(layers) - 1):
        weights, biases = layers[number]
        following, level = layers[number + 1]
        values = rectified(x @ weights + biases)
        kept, makes_up = _least_missed(values.astype(np.float64), np.vstack([following, level]).astype(np.float64), width)
        layers[number] = weights[:, kept].copy(), biases[kept].copy()
        layers[number + 1] = makes_up[:-1].astype(np.float32), makes_up[-1].astype(np.float32)
        x = values[:, kept]
    return Network(network.mean, network.deviation, network.level, network.spread, layers)


def _least_missed(
    values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Which units to keep, and the weights behind them, the last row their bias, as least squares have them."""
    beside_one = np.column_stack([values, np.ones(len(values))])
    inverse = np.linalg.inv(beside_one.T @ beside_one / len(values) + _RIDGE * np.eye(beside_one.shape[1]))
    kept = np.arange(values.shape[1])
    while len(kept) > width:
        least = int(((weights[:-1] ** 2).sum(axis=1) / np.diag(inverse)[:-1]).argmin())
        share = inverse[:, least] / inverse[least, least]
        weights = np.delete(weights - np.outer(share, weights[least]), least, axis=0)
        inverse = inverse - np.outer(share, inverse[least])
        inverse = np.delete(np.delete(inverse, least, axis=0), least, axis=1)
        kept = np.delete(kept, least)
    return kept, weights


def taught(
    choice: Choice, teacher: Choice, matrix: npt.NDArray[np.float32], epochs: int, rate: float = RATE, seed: int = 0
) -> Choice:
    """A network that goes on from one by what a teacher of the same kernels says, its probabilities of tiles and of rests.

    Args:
        choice: The network to teach.
        teacher: Whose kernels and inputs it has.
        matrix: What `perfmodel.choice.asked` makes of the shapes to teach, (rows, inputs).
        epochs: Times that each row is seen.
        rate: The highest learning rate.
        seed: Seeds the order.
    """
    import torch

    torch.manual_seed(seed)
    values = np.empty((len(matrix), teacher.network.layers[-1][1].size), dtype=np.float16)
    with single_threaded():
        for rows, block in teacher.network.blocks(matrix):
            values[rows] = block - block.max(axis=1, keepdims=True)
    x, said = torch.from_numpy(choice.network.normal(matrix)), torch.from_numpy(values)
    tiles = len(vocabulary(teacher.kernels)[0][0])
    linear = [torch.nn.Linear(*weights.shape) for weights, _ in choice.network.layers]
    with torch.no_grad():
        for layer, (weights, biases) in zip(linear, choice.network.layers, strict=True):
            layer.weight.copy_(torch.from_numpy(weights.T.copy()))
            layer.bias.copy_(torch.from_numpy(biases.copy()))
    model = torch.nn.Sequential(*(part for layer in linear[:-1] for part in (layer, torch.nn.Hardswish())), linear[-1])
    batch = min(BATCH, len(x))
    steps = epochs * (len(x) // batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.15, cycle_momentum=False)
    entropy, step = torch.nn.functional.cross_entropy, 0
    for epoch in range(epochs):
        for index in torch.randperm(len(x)).split(batch)[: len(x) // batch]:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step < (1 - _PRECISE) * steps):
                out = model(x[index])
            out, right = out.float(), said[index].float()
            halves = ((out[:, :tiles], right[:, :tiles]), (out[:, tiles:], right[:, tiles:]))
            loss = torch.stack([entropy(one, other.softmax(dim=1)) for one, other in halves]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
        print(f"epoch {epoch + 1} of {epochs}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    layers = [(layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy().copy()) for layer in linear]
    known = choice.network
    return Choice(Network(known.mean, known.deviation, known.level, known.spread, layers), choice.kernels)


def _alike(choice: Choice, other: Choice, matrix: npt.NDArray[np.float32]) -> float:
    """Share of rows of which two networks say the same kernel."""
    one, two = (network.told(matrix)[0] for network in (choice, other))
    return round(float((one == two).all(axis=1).mean()), 4)


def _asked(kernel: str, shapes: pd.DataFrame, hardware: HardwareSpec) -> npt.NDArray[np.float32]:
    return asked(kernel, *columns_of(shapes), hardware)


def narrowed(
    kernel: str,
    teacher: Choice,
    shapes: pd.DataFrame,
    careful: pd.DataFrame | None,
    hardware: HardwareSpec,
    width: int,
    epochs: int,
) -> tuple[Choice, dict[str, Any]]:
    """A narrower network of one kernel's choices, and how often it says what the wide one says.

    Args:
        kernel: Which.
        teacher: The wide network.
        shapes: To teach, columns m, n, k, groups; the first `HELD_OUT` of them, at most a tenth, are held out.
        careful: Shapes of careful timings, to judge by alone; None for none.
        hardware: The GPU.
        width: Units of a hidden layer.
        epochs: Times that each shape is seen.
    """
    held_out = min(HELD_OUT, len(shapes) // 10)
    matrix = _asked(kernel, shapes, hardware)
    small = Choice(pruned(teacher.network, matrix[held_out : held_out + _WEIGHED], width), teacher.kernels)
    choice = taught(small, teacher, matrix[held_out:], epochs)
    rows = {"drawn": matrix[:held_out], **({} if careful is None else {"careful": _asked(kernel, careful, hardware)})}
    found = {
        name: {"shapes": len(some), "alike": _alike(choice, teacher, some), "alike_before_teaching": _alike(small, teacher, some)}
        for name, some in rows.items()
    }
    return choice, {"width": width, "taught": len(shapes) - held_out, "epochs": epochs, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.narrow", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of choices/, choices.json and hardware.json")
    parser.add_argument("--kernels", nargs="+", default=["*"], metavar="PATTERN", help="of those in choices/ (default: all)")
    parser.add_argument("--width", type=int, default=512, help="units of a hidden layer (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=14_000_000, help="of shapes, a half to a third of them distinct")
    parser.add_argument("--epochs", type=int, default=8, help="of teaching")
    parser.add_argument("--workers", type=int, default=2, help="processes that draw")
    parser.add_argument("--seed", type=int, default=77001)
    options = parser.parse_args(arguments)
    try:
        hardware, choices = read_spec(options.out / "hardware.json"), read_choices(options.out)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    wanted = [name for name in KERNELS_ASKED if name in choices and any(fnmatchcase(name, p) for p in options.kernels)]
    if not wanted:
        parser.error(f"--kernels {' '.join(options.kernels)} fits none of {', '.join(choices) or 'the networks: there are none'}")
    if options.width < 1 or options.epochs < 1 or options.draws < 100:
        parser.error("--width and --epochs are at least 1, --draws at least 100")
    began, timings = time.time(), options.out / "gemm.parquet"
    command = f"python -m hil.narrow {shlex.join(arguments if arguments is not None else sys.argv[1:])}"
    careful = pd.read_parquet(timings, columns=["kernel", *SHAPE]) if timings.is_file() else None
    for kernel in wanted:
        widest = max(biases.size for _, biases in choices[kernel].network.layers[:-1])
        if widest <= options.width:
            print(f"{kernel}: {widest} units wide already", file=sys.stderr)
            continue
        shapes = drawn(kernel, options.draws, options.seed, options.workers)
        print(f"{kernel}: {len(shapes)} shapes, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
        mine = None if careful is None else careful[careful["kernel"] == kernel][SHAPE].drop_duplicates()
        choice, scores = narrowed(kernel, choices[kernel], shapes, mine, hardware, options.width, options.epochs)
        print(f"{kernel}: {scores}, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
        write(options.out, kernel, choice, {"command": command, **scores, "wide": judged(options.out).get(kernel)})
    return 0


if __name__ == "__main__":
    sys.exit(main())

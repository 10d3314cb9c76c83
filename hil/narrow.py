"""Make of a wide network of cuBLAS's choices several narrow ones: nearly the same answers in a fraction of the time.

    python -m hil.narrow --out data/h200 --kernels torch/bf16 --experts 8 --width 256

Each is asked for results of some sizes alone, and is taught the wide network's probabilities on fresh shapes, drawn as
`hil.choices` draws them; on a GPU where there is one. The network in `choices/` of the folder is replaced; its sidecar says how
often both choose alike, on shapes held out of the teaching and on those of `gemm.parquet`, and keeps what was said of the wide
one.
"""

from __future__ import annotations

import multiprocessing
import shlex
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hil import teaching
from hil.asking import KERNELS_ASKED, shapes_to_ask
from hil.choices import HELD_OUT, HIDDEN, judged, write
from hil.command import Parser
from perfmodel.calls import columns_of
from perfmodel.choice import Choice, asked, vocabulary
from perfmodel.hardware import HardwareSpec
from perfmodel.judge import SHAPE
from perfmodel.measured import read_choices
from perfmodel.saved import read_spec

if TYPE_CHECKING:
    import torch

# Rows of a step for each network.
BATCH, RATE = 1024, 3e-3


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


def taught(
    teacher: Choice,
    matrix: npt.NDArray[np.float32],
    column: int,
    experts: int,
    width: int,
    epochs: int,
    rate: float = RATE,
    seed: int = 0,
) -> Choice:
    """Networks, each for results of some sizes, that say what a teacher says, its probabilities of tiles and of rests.

    Args:
        teacher: Whose kernels they tell.
        matrix: What `perfmodel.choice.asked` makes of the shapes to teach, (rows, inputs).
        column: The input by which these are shared out.
        experts: How many networks.
        width: Units of a hidden layer.
        epochs: Times that each row is seen.
        rate: The highest learning rate.
        seed: Seeds weights and order.
    """
    import torch

    tiles = len(vocabulary(teacher.kernels)[0][0])
    begun = teaching.untaught(matrix, column, experts, [width] * HIDDEN, teacher.network.values, seed)
    on_device = torch.from_numpy(matrix).to("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        said = teaching.values_of(teacher.network, on_device)
    entropy = torch.nn.functional.cross_entropy

    def loss(out: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out, right = out.flatten(0, 1), said[index.flatten()].float()
        halves = ((out[:, :tiles], right[:, :tiles]), (out[:, tiles:], right[:, tiles:]))
        return torch.stack([entropy(one, other.softmax(dim=1)) for one, other in halves]).sum()

    def on_epoch(number: int, last: float) -> None:
        print(f"epoch {number} of {epochs}: loss {last:.3f}", file=sys.stderr, flush=True)

    kept, batch = teaching.shared_out(begun, matrix), min(BATCH * experts, len(matrix) // 20 + 1)
    network = teaching.taught(begun, on_device, kept, loss, epochs, batch, rate, seed, coarse=True, on_epoch=on_epoch)
    return Choice(teaching.halved(network), teacher.kernels, teacher.largest)


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
    experts: int,
    width: int,
    epochs: int,
) -> tuple[Choice, dict[str, Any]]:
    """Narrower networks of one kernel's choices, and how often they say what the wide one says.

    Args:
        kernel: Which.
        teacher: The wide network.
        shapes: To teach, columns m, n, k, groups; the first `HELD_OUT` of them, at most a tenth, are held out.
        careful: Shapes of careful timings, to judge by alone; None for none.
        hardware: The GPU.
        experts: How many networks.
        width: Units of a hidden layer.
        epochs: Times that each shape is seen.
    """
    held_out = min(HELD_OUT, len(shapes) // 10)
    matrix = _asked(kernel, shapes, hardware)
    column = teaching.deciding(kernel, hardware)
    choice = taught(teacher, matrix[held_out:], column, experts, width, epochs)
    rows = {"drawn": matrix[:held_out], **({} if careful is None else {"careful": _asked(kernel, careful, hardware)})}
    found = {name: {"shapes": len(some), "alike": _alike(choice, teacher, some)} for name, some in rows.items()}
    return choice, {"experts": experts, "width": width, "taught": len(shapes) - held_out, "epochs": epochs, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.narrow", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of choices/, choices.json and hardware.json")
    parser.add_argument("--kernels", nargs="+", default=["*"], metavar="PATTERN", help="of those in choices/ (default: all)")
    parser.add_argument("--experts", type=int, default=8, help="networks, each for results of some sizes (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="units of a hidden layer (default: %(default)s)")
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
    if min(options.width, options.epochs, options.experts) < 1 or options.draws < 100:
        parser.error("--experts, --width and --epochs are at least 1, --draws at least 100")
    began, timings = time.time(), options.out / "gemm.parquet"
    command = f"python -m hil.narrow {shlex.join(arguments if arguments is not None else sys.argv[1:])}"
    careful = pd.read_parquet(timings, columns=["kernel", *SHAPE]) if timings.is_file() else None
    for kernel in wanted:
        widest = max(b.size for one in teaching.networks_of(choices[kernel].network) for _, b in one.layers[:-1])
        if widest <= options.width:
            print(f"{kernel}: {widest} units wide already", file=sys.stderr)
            continue
        shapes = drawn(kernel, options.draws, options.seed, options.workers)
        print(f"{kernel}: {len(shapes)} shapes, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
        mine = None if careful is None else careful[careful["kernel"] == kernel][SHAPE].drop_duplicates()
        form = (options.experts, options.width, options.epochs)
        choice, scores = narrowed(kernel, choices[kernel], shapes, mine, hardware, *form)
        print(f"{kernel}: {scores}, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
        write(options.out, kernel, choice, {"command": command, **scores, "wide": judged(options.out).get(kernel)})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Ask cuBLAS which kernel it chooses for very many GEMMs, and teach a network to tell it from the size.

    python -m hil.choices --out data/h200 --minutes 1 --workers 14 --seed 91001
    python -m hil.choices --out data/h200 --minutes 2 --workers 14 --seed 95001 --kernels torch/bf16 --width 256
    python -m hil.choices --out DIR --hardware-spec FILE --learners 5 --start h200 --epochs 8
    python -m hil.choices --out data/h200 --start h200 --minutes 2.2 --workers 14 --kernels 'torch/bf16_*_*' torch/bf16_bias
    python -m hil.choices --out data/h200 --large --minutes 0.75 --workers 7 --most 200000 --seed 6616001 --width 256 --epochs 50

`hil.asking` asks. Shapes that `gemm.parquet` in the folder has, or `layouts.parquet` timed with care, are left out: what is
learned stays ignorant of the shapes that judge it. The networks, one a kernel, are written as `choices/<kernel>.json.gz`, with a
sidecar that says how often each is right on answers that it has not seen.
`perfmodel.fit` makes features of them (`perfmodel.choice`): by the same specification of the GPU as they learn by, FILE, in the
third form. There they go on from the networks of a shipped GPU, much of whose choices is this one's, too; from this GPU's own
of earlier answers at a lower `--rate`, which keeps what those taught, one network of all sizes as several with `--experts`,
several as more. `--sure 0.2` then asks mostly where they are in doubt; such answers unteach some of what those before taught,
and networks averaged with what they were, `--keep 0.5`, can be right more often than either. In the fourth, products that read
an operand across or add a bias go on from what is known of those that do not. In the fifth, networks of their own learn of the
largest calls (`hil.shapes.large_shapes`), for those in the folder to hand such calls on to.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hil import teaching
from hil.asking import KERNELS_ASKED, LAYOUTS_ASKED, answers, keys_of
from hil.begun import begin
from hil.command import Parser
from hil.files import write_atomic
from hil.fingerprint import shipped
from perfmodel.choice import PARTS, TILE, Choice, Sizes, asked, sizes_in, vocabulary
from perfmodel.data_folder import data_folder
from perfmodel.hardware import DEFAULT, HardwareSpec
from perfmodel.judge import SHAPE
from perfmodel.kernels import KERNELS, of_kernel
from perfmodel.layouts import FILE as LAYOUTS_FILE
from perfmodel.model import PerfModel
from perfmodel.opened import choice_file
from perfmodel.saved import load, read_spec

if TYPE_CHECKING:
    import torch

WIDTH, HIDDEN, BATCH, RATE = 192, 3, 2048, 3e-3
# From so many answers on a batch is four times as large: steps are many enough, and a GPU takes hardly longer for one.
MANY_ANSWERS = 1_000_000
# Calls whose inputs a thread works out at once.
AT_ONCE = 100_000
# A kernel that is a smaller share of the answers is not told apart.
SELDOM = 2e-5
# Of the answers, for the accuracy in the sidecar.
HELD_OUT = 10_000
NETWORKS, SIDECAR = "choices", "choices.json"


def learn(
    kernel: str,
    rows: pd.DataFrame,
    hardware: HardwareSpec,
    epochs: int,
    width: int | None = None,
    start: Choice | None = None,
    rate: float = RATE,
    seed: int = 0,
    experts: int = 1,
    coarse: bool = False,
    keep: float = 0.0,
) -> tuple[Choice, dict[str, Any]]:
    """A network of one kernel's choices, trained on the GPU where there is one, and how often it is right.

    Args:
        kernel: Which.
        rows: What `answers` gives of it.
        hardware: The GPU.
        epochs: Times that each row is seen.
        width: Units of a hidden layer, by default `WIDTH`.
        start: To go on from, whose form is kept, but for fewer networks than there are to be: another GPU's, or this one's of
            earlier answers. What tells it of the largest calls stays as it is.
        rate: The highest learning rate.
        seed: Seeds weights, order and what is held out.
        experts: Networks, each for results of some sizes.
        coarse: Multiply in bfloat16 but for the last steps.
        keep: The weights are so much what they were at the start, and the rest what they became.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    m, n, k, groups = (rows[name].to_numpy(dtype=np.float64) for name in SHAPE)
    matrix = _matrix(kernel, (m, n, k, groups), hardware)
    told, alike = rows[list(PARTS)].to_numpy(), rows.groupby(list(PARTS))
    times = alike.size()
    seldom = times.to_numpy() < SELDOM * len(rows)
    known = times.index.to_frame().to_numpy(dtype=np.int64)[~seldom]
    number = np.where(seldom, -1, np.cumsum(~seldom) - 1)[alike.ngroup().to_numpy()]
    tile, rest = (torch.from_numpy(of_kernel[number]).to(device) for _, of_kernel in vocabulary(known))
    test, order = np.split(np.random.default_rng(seed).permutation(len(rows)), [min(HELD_OUT, len(rows) // 10)])
    order = np.sort(order[number[order] >= 0])
    column = teaching.deciding(kernel, hardware)
    begun, fits = begin(matrix, known, hardware, column, experts, [width or WIDTH] * HIDDEN, start, seed)
    kept = [np.intersect1d(mine, order, assume_unique=True) for mine in teaching.shared_out(begun, matrix)]
    batch = BATCH if len(order) < MANY_ANSWERS else 4 * BATCH
    fits_taught = teaching.FitsTaught(fits, known, [torch.from_numpy(size).to(device) for size in sizes_in(matrix[:, :4])])

    def loss(out: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return fits_taught.loss(out.flatten(0, 1), index.flatten(), tile, rest)

    on_device = torch.from_numpy(matrix).to(device)
    network = teaching.taught(
        begun, on_device, kept, loss, epochs, batch, rate, seed, coarse=coarse, beside=fits_taught.parameters
    )
    if keep:
        network = teaching.between(begun, network, keep)
    choice = Choice(teaching.halved(network), known, fits_taught.fits(keep), start.largest if start else None)
    found = choice.told(matrix[test])[0] == told[test]
    return choice, {
        "rows": len(order),
        "held_out": len(test),
        "right": {part: round(float(share), 4) for part, share in zip(PARTS, found.mean(axis=0), strict=True)},
        "tile_right": round(float(found[:, :TILE].all(axis=1).mean()), 4),
        "all_right": round(float(found.all(axis=1).mean()), 4),
    }


def _matrix(kernel: str, sizes: Sizes, hardware: HardwareSpec) -> npt.NDArray[np.float32]:
    """`asked` of very many calls, by as many threads as there are processors: one takes 0.14 s for 100,000."""
    m, n, k, groups = sizes
    parts = [slice(start, start + AT_ONCE) for start in range(0, len(m), AT_ONCE)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(lambda rows: asked(kernel, m[rows], n[rows], k[rows], groups[rows], hardware), parts)
        return np.concatenate(list(made))


def kept(folder: Path, kernel: str) -> Choice | None:
    """The network of a kernel that a folder holds; None where there is none.

    Raises:
        ValueError: it is damaged.
    """
    path = folder / NETWORKS / choice_file(kernel)
    return Choice.load(gzip.decompress(path.read_bytes())) if path.is_file() else None


def put_together(folder: Path, kernel: str, choice: Choice, entry: dict[str, Any], large: bool) -> tuple[Choice, dict[str, Any]]:
    """A network and what is said of it, with what a folder has of the other calls.

    Args:
        folder: Where `write` is to put both.
        kernel: Which.
        choice: What was learned.
        entry: What is said of it.
        large: Whether it is of the largest calls alone: then the folder's network of all others hands these on to it.
    """
    held = kept(folder, kernel)
    if held is None:
        return choice, entry
    if large:
        return replace(held, largest=choice), {**judged(folder).get(kernel, {}), "largest": entry}
    return replace(choice, largest=held.largest or choice.largest), entry


def judged(folder: Path) -> dict[str, Any]:
    """What a folder's sidecar says of each kernel; nothing where it is not there or damaged."""
    try:
        return dict(json.loads((folder / SIDECAR).read_text())["kernels"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write(folder: Path, kernel: str, choice: Choice, entry: dict[str, Any]) -> None:
    """Put a kernel's network into a folder, in the place of an earlier one, and into the sidecar what is said of it.

    What the sidecar says of the largest calls stays where the network still knows of them.
    """
    said = judged(folder)
    if choice.largest is not None and "largest" in (before := said.get(kernel, {})):
        entry = {"largest": before["largest"], **entry}
    (folder / NETWORKS).mkdir(parents=True, exist_ok=True)
    data = gzip.compress(choice.save(), 9, mtime=0)
    write_atomic(folder / NETWORKS / choice_file(kernel), partial(Path.write_bytes, data=data))
    method = "kernels of captured calls by name, told by networks; see hil/choices.py"
    document = {"schema_version": 2, "method": method, "kernels": {**said, kernel: entry}}
    write_atomic(folder / SIDECAR, partial(Path.write_text, data=json.dumps(document, indent=1) + "\n"))


def timed_with_care(folder: Path) -> list[pd.DataFrame]:
    """Shapes that a folder has careful timings of, which judge."""
    gemms, layouts = folder / "gemm.parquet", folder / LAYOUTS_FILE
    found = [pd.read_parquet(gemms, columns=SHAPE)] if gemms.is_file() else []
    return [*found, pd.read_parquet(layouts, columns=SHAPE, filters=[("careful", "==", True)])] if layouts.is_file() else found


def unanswered(folder: Path) -> tuple[str, ...]:
    """Those of `KERNELS_ASKED` of which a folder has no network, or none that its sidecar knows."""
    known = judged(folder)
    return tuple(name for name in KERNELS_ASKED if name not in known or not (folder / NETWORKS / choice_file(name)).is_file())


def _choice_of(model: PerfModel, kernel: str) -> Choice | None:
    """A shipped GPU's network of a kernel, if it has one; of products in another layout or with a bias, that with K fastest."""
    choice = model.choice(of_kernel(kernel)) if model.knows(kernel) else None
    return replace(choice, largest=None) if choice and KERNELS[kernel].across else choice


def _learned(
    rows: pd.DataFrame, kernels: Sequence[str], start: PerfModel | None, processes: int, teach: Callable[..., Any], large: bool
) -> Iterator[tuple[str, Choice, dict[str, Any]]]:
    """`teach`, which is `learn` but for whom and from where, of each kernel that has answers, in order, so many at a time.

    Those of the `large` calls begin with what `start` knows of these.
    """
    jobs = [
        (kernel, mine, _choice_of(start, kernel) if start else None)
        for kernel in kernels
        if len(mine := rows[rows["kernel"] == kernel])
    ]
    if large:
        jobs = [(kernel, mine, begun and begun.largest) for kernel, mine, begun in jobs]
    if processes < 2 or len(jobs) < 2:
        yield from ((kernel, *teach(kernel, mine, start=begun)) for kernel, mine, begun in jobs)
        return
    # A step is many small launches: a process has the GPU wait for it most of the time.
    with multiprocessing.get_context("spawn").Pool(min(processes, len(jobs))) as pool:
        results = [pool.apply_async(teach, (kernel, mine), {"start": begun}) for kernel, mine, begun in jobs]
        for (kernel, _, _), result in zip(jobs, results, strict=True):
            yield kernel, *result.get()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.choices", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of choices/ and choices.json")
    parser.add_argument("--minutes", type=float, default=1.0, help="of asking")
    parser.add_argument("--epochs", type=int, default=40, help="of learning; 0 only asks, which --answers then keeps")
    parser.add_argument("--width", type=int, default=WIDTH, help="units of a network's hidden layers (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=1, help="networks, each for results of some sizes (default: %(default)s)")
    parser.add_argument("--coarse", action="store_true", help="multiply in bfloat16 but for the last steps: quick on some CPUs")
    parser.add_argument("--start", metavar="NAME", help="shipped hardware whose networks to go on from (default: none)")
    parser.add_argument(
        "--rate", type=float, default=RATE, help="highest learning rate; lower keeps more of --start (default: %(default)s)"
    )
    parser.add_argument(
        "--keep", type=float, default=0.0, metavar="SHARE",
        help="of the weights so much stays as in --start: what its answers taught that these did not (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--sure", type=float, default=1.0, metavar="SHARE",
        help="of the calls of which the networks of --start are sure, ask this share alone (default: all)",
    )  # fmt: skip
    parser.add_argument("--large", action="store_true", help="ask of the largest batches alone (hil.shapes.large_shapes)")
    parser.add_argument("--most", type=int, default=250_000, help="answers of a process")
    parser.add_argument("--seed", type=int, default=91001)
    parser.add_argument("--workers", type=int, default=8, help="processes that ask")
    parser.add_argument("--learners", type=int, default=1, help="processes that learn, a kernel each at a time")
    parser.add_argument("--hardware-spec", type=Path, metavar="FILE", help="of this GPU (default: the nearest of data/)")
    parser.add_argument(
        "--kernels", nargs="+", default=KERNELS_ASKED, metavar="PATTERN",
        help=f"of {', '.join(KERNELS_ASKED)} (default: all of these), {', '.join(LAYOUTS_ASKED)}",
    )  # fmt: skip
    parser.add_argument("--answers", type=Path, help="file of all answers: read where it is there, without asking; else written")
    parser.add_argument(
        "--earlier", type=Path, nargs="+", default=[], metavar="FILE",
        help="answers of earlier runs: not asked again, and learned from together with these",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    every = (*KERNELS_ASKED, *LAYOUTS_ASKED)
    kernels = [name for name in every if any(fnmatchcase(name, pattern) for pattern in options.kernels)]
    if not kernels:
        parser.error(f"--kernels {' '.join(options.kernels)} fits none of {', '.join(every)}")
    if options.experts < 1 or options.width < 1:
        parser.error("--experts and --width are at least 1")
    if not 0 <= options.sure <= 1:
        parser.error(f"--sure {options.sure:g} is no share; give 0 to 1")
    if not 0 <= options.keep < 1:
        parser.error(f"--keep {options.keep:g} is no share; give 0 to below 1")
    if options.keep and not options.start:
        parser.error("--keep is of the networks of --start: name it")
    if options.sure < 1 and not options.start:
        parser.error("--sure is of what the networks of --start know: name it")
    if options.epochs < 1 and options.answers is None:
        parser.error("--epochs 0 learns nothing: give --answers, the file to keep the answers in")
    if absent := [str(path) for path in options.earlier if not path.is_file()]:
        parser.error(f"--earlier {' '.join(absent)} is not there")
    try:
        spec = read_spec(options.hardware_spec or data_folder() / (shipped() or DEFAULT) / "hardware.json")
        start = load(options.start) if options.start else None
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    begun = {name: choice for name in kernels if start and (choice := _choice_of(start, name))}
    for name, choice in begun.items():
        if options.experts > (number := len(teaching.networks_of(choice.network))) and options.experts % number:
            parser.error(f"--experts {options.experts} is no multiple of the {number} networks of {name} in --start")

    import torch

    from hil.fingerprint import fingerprint, has_gpu

    began = time.time()
    earlier = [frame[frame["kernel"].isin(kernels)] for frame in map(pd.read_parquet, options.earlier)]
    if options.answers is not None and options.answers.is_file():
        rows = pd.read_parquet(options.answers)
    else:
        if not has_gpu():
            return 3
        asked_before = [*earlier, *timed_with_care(options.out)]
        known = np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *map(keys_of, asked_before)]))
        told = begun if options.sure < 1 else {}
        asking = (known, 60 * options.minutes, options.most, told, spec, options.sure, options.large)
        jobs = [(kernels, number, options.seed, *asking) for number in range(options.workers)]
        if options.answers is not None:
            # Now: what was told in minutes would be lost.
            options.answers.parent.mkdir(parents=True, exist_ok=True)
        with multiprocessing.get_context("spawn").Pool(options.workers) as processes:
            rows = pd.concat(processes.starmap(answers, jobs, chunksize=1)).drop_duplicates(["kernel", *SHAPE])
        if options.answers is not None:
            write_atomic(options.answers, partial(rows.to_parquet, index=False, compression="zstd"))
    print(f"{len(rows)} answers, {time.time() - began:.0f} s", file=sys.stderr)
    if options.epochs < 1:
        return 0
    rows = pd.concat([rows, *earlier]).drop_duplicates(["kernel", *SHAPE])
    command = f"python -m hil.choices {shlex.join(arguments if arguments is not None else sys.argv[1:])}"
    where = fingerprint() if torch.cuda.is_available() else {}
    teach = partial(
        learn, hardware=spec, epochs=options.epochs, width=options.width, rate=options.rate, experts=options.experts,
        coarse=options.coarse, keep=options.keep,
    )  # fmt: skip
    for kernel, choice, scores in _learned(rows, kernels, start, options.learners, teach, options.large):
        print(f"{kernel}: {scores}, {time.time() - began:.0f} s", file=sys.stderr, flush=True)
        entry = {"command": command, **where, **scores}
        write(options.out, kernel, *put_together(options.out, kernel, choice, entry, options.large))
    return 0


if __name__ == "__main__":
    sys.exit(main())

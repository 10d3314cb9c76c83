"""Predicted against measured error of every linear's three GEMMs on tensors of a held-out batch, beside a plain Gaussian's.

    python benchmarks/error.py --data criteo --path DIR

trains each small zoo model on the training split as the shipped statistics were (`loka_sim.training`), predicts from the
statistics of its last iterations, and measures on batches of the `dev` split, which they never saw: signal and error power
summed over the batches, MERE averaged. A row is one pass over all sites and kernels: the gap in SQNR (median, p90, share
within half a decibel, median with its sign) and in MERE (median); by how much the SQNR of one batch strays from that of all
(median; nothing that is known beforehand predicts it); and the gaps of a prediction from independent normal values of the
same widths. `unpaired` is grad_weight without its `numerics.GradientSignal`, from what either operand shows alone.

Of few batches a weight gradient's size is luck, the same for all sites of a model: with n batches about 6 / sqrt(n) dB. The
Criteo sample's dev split has 409 samples; `--data synthetic` needs no files and has as many as asked for.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loka_sim import datasets, zoo
from loka_sim.datasets.base import Batch, Dataset, FrequentOnly, frequent
from loka_sim.errors import LokaSimError, UserError
from loka_sim.statistics import SiteStatistics
from loka_sim.training import SMALL, TrainingConfig, tensors, train
from numerics import GemmError, gaussian, gemm_error, predict_gemm_error

KERNELS = (
    ("e4m3/tensorwise", "e4m3/tensorwise", "hopper_fast"),
    ("e4m3/rowwise", "e4m3/rowwise", "hopper_split"),
    ("bf16", "bf16", "fp32"),
)
# The last: grad_weight from its operands' statistics alone, as without a `GradientSignal`.
ROWS = ("output", "grad_input", "grad_weight", "  unpaired")
MAX_ROWS = 4096
# Batches for the passes whose outputs are single rows: one batch has many of them already.
FEW = 4


@dataclass(frozen=True)
class Measured:
    """A GEMM over some batches.

    Attributes:
        sqnr_db: Of the batches' summed powers.
        mere: Their mean.
        stray_db: Median over batches of how far a batch's own SQNR is from `sqnr_db`.
    """

    sqnr_db: float
    mere: float
    stray_db: float


@dataclass(frozen=True)
class Comparison:
    """One GEMM: measured, predicted from its site's statistics, predicted from none."""

    model: str
    site: str
    name: str
    kernel: tuple[str, str, str]
    measured: Measured
    ours: GemmError
    plain: GemmError


def held_out_operands(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Of every linear in one step: x (M, K), w (N, K) and g (M, N); of long sequences the first samples that fit."""
    seen: dict[str, list[Tensor]] = {}

    def rows(values: Tensor) -> Tensor:
        each = values[0, ..., 0].numel()
        return values.detach()[: max(MAX_ROWS // each, 1)].flatten(0, -2)

    def remember(name: str, module: nn.Linear) -> None:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = [rows(inputs[0]), module.weight.detach()]
            output.register_hook(lambda gradient: seen[name].append(rows(gradient)))

        handles.append(module.register_forward_hook(hook))

    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            remember(name, module)
    logits = model(*tensors(batch, model))
    nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels)).backward()
    for handle in handles:
        handle.remove()
    return {name: (x, w, g) for name, (x, w, g) in seen.items()}


def of_batches(pairs: list[tuple[Tensor, Tensor]], kernel: tuple[str, str, str]) -> Measured:
    """Measure a GEMM of each batch."""
    errors = [gemm_error(a, b, *kernel, max_rows=100) for a, b in pairs]
    signal = np.array([float((a.double() @ b.double().T).square().mean()) for a, b in pairs])
    sqnr = np.array([error.sqnr_db for error in errors])
    total = 10 * np.log10(signal.sum() / (signal / 10 ** (sqnr / 10)).sum())
    return Measured(float(total), float(np.mean([error.mere for error in errors])), float(np.median(np.abs(sqnr - total))))


def compare(model: str, site: str, batches: list[tuple[Tensor, Tensor, Tensor]], kept: SiteStatistics) -> list[Comparison]:
    """All passes and kernels of one site; passes with fewer than 8 outputs or products to a side, or all zeros, are left out."""
    x, _, g = batches[0]
    gaussians = {features: gaussian(features) for features in (x.shape[1], g.shape[1])}
    k, n = gaussians[x.shape[1]], gaussians[g.shape[1]]
    operands = {
        "output": (lambda x, w, g: (x, w), (kept.activation, kept.weight), (k, k)),
        "grad_input": (lambda x, w, g: (g, w.T), (kept.grad_output, kept.weight_transposed), (n, n)),
        "grad_weight": (
            lambda x, w, g: (g.T, x.T), (kept.grad_output.along_rows(), kept.activation.along_rows()),
            (n.along_rows(), k.along_rows()),
        ),
    }  # fmt: skip
    found = []
    for name, (pick, ours, plain) in operands.items():
        pairs = [tuple(values.contiguous() for values in pick(*batch)) for batch in batches]
        pairs = [(a, b) for a, b in pairs if a.any() and b.any()][: None if name == "grad_weight" else FEW]
        if not pairs:
            continue
        a, b = pairs[0]
        shape = (a.shape[0], b.shape[0], a.shape[1])
        if min(shape) < 8:
            continue
        for kernel in KERNELS:
            measured, independent = of_batches(pairs, kernel), predict_gemm_error(*plain, shape, *kernel)
            predicted = predict_gemm_error(*ours, shape, *kernel)
            if name == "grad_weight":
                found.append(Comparison(model, site, ROWS[-1], kernel, measured, predicted, independent))
                predicted = predict_gemm_error(*ours, shape, *kernel, kept.gradient)
            found.append(Comparison(model, site, name, kernel, measured, predicted, independent))
    return found


def measure(model: str, training: Dataset, held_out: Dataset, config: TrainingConfig, batch: int, most: int) -> list[Comparison]:
    """Train, collect, and compare on the first `most` whole batches of held-out samples."""
    run = train(model, training, held_out, config)
    if config.min_count > 1:
        held_out = FrequentOnly(held_out, frequent(training, config.min_count))
    chunks = [chunk for chunk in itertools.islice(held_out.chunks(batch), most) if len(chunk) == batch]
    if not chunks:
        raise UserError(f"the held-out split has fewer than {batch} samples; give a smaller --batch")
    operands = [held_out_operands(run.model, chunk) for chunk in chunks]
    return [row for site in operands[0] for row in compare(model, site, [each[site] for each in operands], run.sites[site])]


def table(rows: list[Comparison]) -> str:
    """A line per pass."""
    lines = [
        f"{'':18s}{'---- loka-sim: SQNR gap, dB ----':>42s} {'MERE':>6s} {'a batch':>8s}   {'-- Gaussian --':>16s} {'MERE':>6s}",
        f"{'pass':12s}{'GEMMs':>6s}{'median':>10s}{'p90':>8s}{'<0.5 dB':>10s}{'signed':>14s} {'gap':>6s} {'strays':>8s}   "
        f"{'median':>8s}{'p90':>8s} {'gap':>6s}",
    ]
    for name in ROWS:
        some = [row for row in rows if row.name == name]
        if not some:
            continue
        signed = np.array([[r.ours.sqnr_db - r.measured.sqnr_db, r.plain.sqnr_db - r.measured.sqnr_db] for r in some])
        ours, plain = np.abs(signed).T
        mere = np.array([[r.ours.mere / r.measured.mere - 1, r.plain.mere / r.measured.mere - 1] for r in some])
        lines.append(
            f"{name:12s}{len(some):6d}{np.median(ours):10.2f}{np.quantile(ours, 0.9):8.2f}{(ours < 0.5).mean():10.0%}"
            f"{np.median(signed[:, 0]):+14.2f} {np.median(np.abs(mere[:, 0])):6.0%}"
            f" {np.median([row.measured.stray_db for row in some]):8.2f}   "
            f"{np.median(plain):8.2f}{np.quantile(plain, 0.9):8.2f} {np.median(np.abs(mere[:, 1])):6.0%}"
        )
    return "\n".join(lines)


def main() -> int:
    """Train, measure, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=list(SMALL), help=f"some of {', '.join(SMALL)} (default all)")
    parser.add_argument("--data", default="synthetic", help="criteo, movielens or synthetic (default synthetic)")
    parser.add_argument("--path", help="its file or folder")
    parser.add_argument("--batch", type=int, default=128, help="samples in a measured batch (default 128, as in training)")
    parser.add_argument("--batches", type=int, default=40, help="held-out batches, at most (default 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sites", action="store_true", help="print a line per GEMM too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    try:
        for model in options.models:
            print(f"training {model}", file=sys.stderr, flush=True)
            shape = zoo.input_shape(model)
            training, held_out = (
                datasets.open_dataset(options.data, options.path, split, shape=shape, seed=options.seed, rows=100_000)
                for split in datasets.SPLITS
            )
            rows += measure(model, training, held_out, TrainingConfig(seed=options.seed), options.batch, options.batches)
    except LokaSimError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for row in rows if options.sites else ():
        print(
            f"{row.model:18s} {row.site:36s} {row.name:12s} {row.kernel[0]:16s} SQNR predicted {row.ours.sqnr_db:6.2f}"
            f" measured {row.measured.sqnr_db:6.2f} dB, MERE {row.ours.mere:.4f} {row.measured.mere:.4f}"
        )
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

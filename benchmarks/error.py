"""Predicted against measured error of every linear's three GEMMs on tensors of a held-out batch, beside a plain Gaussian's.

    python benchmarks/error.py --data criteo --path DIR

trains each small zoo model on the training split as the shipped statistics were (`loka_sim.training`), predicts from the
statistics of its last iterations, and measures on batches of the `dev` split, which they never saw: signal and error power
summed over the batches, MERE averaged. For each pass a row per prediction:

- `pairs`: all that is collected of the site: either operand's statistics and how they meet (`numerics.pair`, `.gradient`);
- `operands`: the statistics of the two operands alone;
- `same`: `pairs` collected on the very tensors that are measured: the method's own error, without the shift to new samples;
- `sums` (grad_weight): `pairs`, told besides how large the measured batches' sums are, which nobody knows beforehand: what
  is left is the error of the noise;
- `gaussian`: independent normal values of the same widths.

The gap in SQNR: median, 95th percentile, share within half a decibel, median with its sign; the gap in MERE: median, share
within a quarter. `strays` is by how much the SQNR of one batch differs from that of all (median). Of few batches a weight
gradient's size is luck, the same for all sites of a model: with n batches about 6 / sqrt(n) dB. The Criteo sample's dev
split has 409 samples, in order three batches; `--shuffle` draws as many batches as asked for from it, as training does: the
luck of a batch goes, that of the 409 stays. `--data synthetic` needs no files and has as many samples as asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loka_sim import datasets, zoo
from loka_sim.collector import SiteCollector
from loka_sim.datasets.base import Batch, Dataset, FrequentOnly, frequent
from loka_sim.errors import LokaSimError, UserError
from loka_sim.statistics import SiteStatistics
from loka_sim.training import SMALL, TrainingConfig, tensors, train
from numerics import GemmError, GradientSignal, TensorStatistics, gaussian, gemm_error, predict_gemm_error

Kernel = tuple[str, str, str]
KERNELS: tuple[Kernel, ...] = (
    ("e4m3/tensorwise", "e4m3/tensorwise", "hopper_fast"),
    ("e4m3/rowwise", "e4m3/rowwise", "hopper_split"),
    ("bf16", "bf16", "fp32"),
)
MORE: tuple[Kernel, ...] = (
    ("e4m3/block1x128", "e4m3/block128x128", "hopper_split"),
    ("e5m2/tensorwise", "e4m3/tensorwise", "hopper_split"),
    ("e5m2/rowwise", "e4m3/rowwise", "hopper_fast"),
    ("e4m3", "e4m3", "hopper_fast"),
    ("int8/rowwise", "int8/rowwise", "fp32"),
    *((name, name, "fp32") for name in ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "mxint8", "mx9", "mx6", "msfp12")),
)
PASSES = ("output", "grad_input", "grad_weight")
VARIANTS = ("pairs", "operands", "same", "sums", "gaussian")
# Rows of a batch, in whole samples: every output of them is measured, since the luck of a weight is in all of its rows.
MAX_ROWS = 1024
# Batches for the passes whose outputs are single rows: one batch has many of them already.
FEW = 4


@dataclass(frozen=True)
class Measured:
    """A GEMM over some batches.

    Attributes:
        sqnr_db: Of the batches' summed powers.
        mere: Their mean.
        stray_db: Median over batches of how far a batch's own SQNR is from `sqnr_db`.
        sums: Mean square of an output over that of independent products.
    """

    sqnr_db: float
    mere: float
    stray_db: float
    sums: float


@dataclass(frozen=True)
class Comparison:
    """One GEMM: measured, and predicted in each of `VARIANTS`."""

    model: str
    site: str
    name: str
    kernel: Kernel
    measured: Measured
    predicted: dict[str, GemmError]


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
    step(model, batch)
    for handle in handles:
        handle.remove()
    return {name: (x, w, g) for name, (x, w, g) in seen.items()}


def step(model: nn.Module, batch: Batch) -> None:
    """Forward and backward."""
    logits = model(*tensors(batch, model))
    nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels)).backward()


def collected(model: nn.Module, batches: Sequence[Batch], config: TrainingConfig) -> dict[str, SiteStatistics]:
    """Statistics of a model as it is, on some batches."""
    collector = SiteCollector(model, config.rank, config.seed)
    collector.enabled = True
    for batch in batches:
        step(model, batch)
    collector.close()
    return collector.result()


def padded(x: Tensor, rows: bool) -> Tensor:
    """Filled with zeros to whole blocks of 128."""
    return nn.functional.pad(x, (0, -x.shape[1] % 128, 0, -x.shape[0] % 128 if rows else 0))


def of_batches(pairs: list[tuple[Tensor, Tensor]], kernel: Kernel) -> Measured:
    """Measure a GEMM of each batch."""
    errors, signal, independent = [], [], 0.0
    for a, b in pairs:
        independent += a.shape[1] * float(a.double().square().mean() * b.double().square().mean())
        signal.append(float((a.double() @ b.double().T).square().mean()))
        outputs = a.shape[0] * b.shape[0]
        if any(word in name for name in kernel[:2] for word in ("block", "mx", "msfp")):
            a, b = padded(a, "128x128" in kernel[0]), padded(b, "128x128" in kernel[1])
        error = gemm_error(a, b, *kernel)
        # Outputs that are padding have no error, and count in its mean.
        errors.append(dataclasses.replace(error, mere=error.mere * a.shape[0] * b.shape[0] / outputs))
    noise = [power * error.relative_frobenius**2 for power, error in zip(signal, errors, strict=True)]
    total = 10 * np.log10(sum(signal) / sum(noise))
    stray = np.median([abs(error.sqnr_db - total) for error in errors])
    return Measured(float(total), float(np.mean([error.mere for error in errors])), float(stray), sum(signal) / independent)


def oriented(kept: SiteStatistics, name: str) -> tuple[TensorStatistics, TensorStatistics]:
    """The operands of a pass."""
    return {
        "output": (kept.activation, kept.weight),
        "grad_input": (kept.grad_output, kept.weight_transposed),
        "grad_weight": (kept.grad_output.along_rows(), kept.activation.along_rows()),
    }[name]


def predictions(
    name: str, shape: tuple[int, int, int], kernel: Kernel, kept: SiteStatistics, same: SiteStatistics, sums: float
) -> dict[str, GemmError]:
    """One pass under one kernel in each of `VARIANTS`."""

    def with_pairs(statistics: SiteStatistics, signal: GradientSignal | None = None) -> GemmError:
        signal = signal or (statistics.gradient if name == "grad_weight" else None)
        return predict_gemm_error(*oriented(statistics, name), shape, *kernel, signal, pair=statistics.pairs.get(name))

    plain = (
        [gaussian(shape[0]).along_rows(), gaussian(shape[1]).along_rows()] if name == "grad_weight" else [gaussian(shape[2])] * 2
    )
    known = {}
    if name == "grad_weight" and kept.gradient is not None:
        known["sums"] = with_pairs(kept, GradientSignal(kept.gradient.independent, sums, 0.0))
    elif name == "grad_weight":
        known["sums"] = with_pairs(kept)
    return known | {
        "pairs": with_pairs(kept),
        "operands": predict_gemm_error(*oriented(kept, name), shape, *kernel),
        "same": with_pairs(same),
        "gaussian": predict_gemm_error(*plain, shape, *kernel),
    }


def compare(
    model: str, site: str, batches: list[tuple[Tensor, Tensor, Tensor]], kept: SiteStatistics, same: SiteStatistics,
    kernels: Sequence[Kernel],
) -> list[Comparison]:  # fmt: skip
    """All passes and kernels of one site; passes with fewer than 8 outputs or products to a side, or all zeros, are left out."""
    found = []
    for name in PASSES:
        pairs = []
        for x, w, g in batches:
            a, b = {"output": (x, w), "grad_input": (g, w.T), "grad_weight": (g.T, x.T)}[name]
            if a.any() and b.any():
                pairs.append((a.contiguous(), b.contiguous()))
        pairs = pairs if name == "grad_weight" else pairs[:FEW]
        if not pairs:
            continue
        a, b = pairs[0]
        shape = (a.shape[0], b.shape[0], a.shape[1])
        if min(shape) < 8:
            continue
        for kernel in kernels:
            measured = of_batches(pairs, kernel)
            predicted = predictions(name, shape, kernel, kept, same, measured.sums)
            found.append(Comparison(model, site, name, kernel, measured, predicted))
    return found


def measure(
    model: str, training: Dataset, held_out: Dataset, config: TrainingConfig, batch: int, most: int, kernels: Sequence[Kernel],
    shuffle: bool = False,
) -> list[Comparison]:  # fmt: skip
    """Train, collect, and compare on the first `most` whole batches of held-out samples, or on as many drawn from them."""
    run = train(model, training, held_out, config)
    if config.min_count > 1:
        held_out = FrequentOnly(held_out, frequent(training, config.min_count))
    chunks = [chunk for chunk in itertools.islice(held_out.chunks(batch), most) if len(chunk) == batch]
    if not chunks:
        raise UserError(f"the held-out split has fewer than {batch} samples; give a smaller --batch")
    if shuffle:
        epochs = (held_out.batches(batch, seed=config.seed * 1_000_003 + epoch) for epoch in itertools.count())
        chunks = list(itertools.islice(itertools.chain.from_iterable(epochs), most))
    operands = [held_out_operands(run.model, chunk) for chunk in chunks]
    same = collected(run.model, chunks, config)
    return [
        row
        for site in operands[0]
        for row in compare(model, site, [each[site] for each in operands], run.sites[site], same[site], kernels)
    ]


def table(rows: list[Comparison]) -> str:
    """A line per pass and variant."""
    lines = [
        f"{'':24s}{'---------- SQNR gap, dB ----------':>42s}   {'---- MERE gap ----':>18s} {'a batch':>8s}",
        f"{'pass':14s}{'prediction':10s}{'GEMMs':>8s}{'median':>8s}{'p95':>8s}{'<0.5 dB':>10s}{'signed':>8s}"
        f"   {'median':>9s}{'<25%':>9s} {'strays':>8s}",
    ]
    for name in PASSES:
        some = [row for row in rows if row.name == name]
        for variant in (variant for variant in VARIANTS if some and variant in some[0].predicted):
            signed = np.array([row.predicted[variant].sqnr_db - row.measured.sqnr_db for row in some])
            gap = np.abs(signed)
            mere = np.abs([row.predicted[variant].mere / row.measured.mere - 1 for row in some])
            lines.append(
                f"{name if variant == VARIANTS[0] else '':14s}{variant:10s}{len(some):8d}{np.median(gap):8.2f}"
                f"{np.quantile(gap, 0.95):8.2f}{(gap < 0.5).mean():10.0%}{np.median(signed):+8.2f}"
                f"   {np.median(mere):9.0%}{(mere < 0.25).mean():9.0%} {np.median([row.measured.stray_db for row in some]):8.2f}"
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
    parser.add_argument("--shuffle", action="store_true", help="draw batches from the held-out samples, epoch after epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", choices=("few", "all"), default="few", help="three kernels, or every family (default few)")
    parser.add_argument("--by-kernel", action="store_true", help="print a table per kernel too")
    parser.add_argument("--sites", action="store_true", help="print a line per GEMM too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kernels = (*KERNELS, *MORE) if options.kernels == "all" else KERNELS
    rows: list[Comparison] = []
    try:
        for model in options.models:
            print(f"training {model}", file=sys.stderr, flush=True)
            shape = zoo.input_shape(model)
            training, held_out = (
                datasets.open_dataset(options.data, options.path, split, shape=shape, seed=options.seed, rows=100_000)
                for split in datasets.SPLITS
            )
            config = TrainingConfig(seed=options.seed)
            rows += measure(model, training, held_out, config, options.batch, options.batches, kernels, options.shuffle)
    except LokaSimError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for row in rows if options.sites else ():
        ours = row.predicted["pairs"]
        print(
            f"{row.model:18s} {row.site:36s} {row.name:12s} {row.kernel[0]:16s} SQNR predicted {ours.sqnr_db:6.2f}"
            f" measured {row.measured.sqnr_db:6.2f} dB, MERE {ours.mere:.4f} {row.measured.mere:.4f}"
        )
    for kernel in kernels if options.by_kernel else ():
        print(f"{' x '.join(kernel[:2])}, {kernel[2]}\n{table([row for row in rows if row.kernel == kernel])}\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Predicted against measured errors on the real tensors of small zoo models, beside the plain Gaussian's.

`python tests/numerics/measure_prediction.py dlrm-small dcnv2-small wukong-small` trains each model for some steps on
synthetic samples, keeps its statistics, and then multiplies the tensors of a fresh batch. Not a test: it prints a table.
"""

import sys

import numpy as np
import torch
from torch import nn

from loka_sim import zoo
from loka_sim.datasets.synthetic import SyntheticDataset
from loka_sim.training import TrainingConfig, tensors, train
from numerics import gaussian, gemm_error, predict_gemm_error

KERNELS = [("e4m3/tensorwise",) * 2 + ("hopper_fast",), ("e4m3/rowwise",) * 2 + ("hopper_split",), ("bf16",) * 2 + ("fp32",)]
BATCH = 1024


def operands(model, batch):
    """Input, weight and output gradient of every linear layer in one step."""
    seen = {}

    def remember(name):
        def hook(module, inputs, output):
            seen[name] = [inputs[0].detach().flatten(0, -2), module.weight.detach()]
            output.register_hook(lambda gradient: seen[name].append(gradient.flatten(0, -2)))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(remember(name))
    logits = model(*tensors(batch, model))
    nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels)).backward()
    return {name: [x[:4096] if i != 1 else x for i, x in enumerate(values)] for name, values in seen.items()}


def main(names):
    """Print one line per pass."""
    gaps = {"output": [], "grad_input": [], "grad_weight": []}
    for name in names:
        shape = zoo.input_shape(name)
        held_out = SyntheticDataset(2 * BATCH, "dev", shape, 1)
        run = train(name, SyntheticDataset(9000, "train", shape, 1), held_out, TrainingConfig(steps=60, min_count=1))
        for site, (x, w, g) in operands(run.model, next(iter(held_out.chunks(BATCH)))).items():
            kept = run.sites[site]
            passes = {
                "output": (x, w, kept.activation, kept.weight),
                "grad_input": (g, w.T, kept.grad_output, kept.weight_transposed),
                "grad_weight": (g.T, x.T, kept.grad_output.along_rows(), kept.activation.along_rows()),
            }
            for which, (a, b, left, right) in passes.items():
                size = (a.shape[0], b.shape[0], a.shape[1])
                if min(size) < 8 or not a.any() or not b.any():
                    continue
                plain = [gaussian(s.features)._with_contraction(s.contraction) for s in (left, right)]
                for kernel in KERNELS:
                    measured = gemm_error(a.contiguous(), b.contiguous(), *kernel, max_rows=200)
                    ours, theirs = (predict_gemm_error(*pair, size, *kernel) for pair in ((left, right), plain))
                    gaps[which].append(
                        [
                            abs(ours.sqnr_db - measured.sqnr_db),
                            abs(theirs.sqnr_db - measured.sqnr_db),
                            abs(ours.mere / measured.mere - 1),
                            abs(theirs.mere / measured.mere - 1),
                        ]
                    )
    print("pass         of  SQNR gap dB: median   p90  <0.5 dB   gaussian: median   p90   MERE gap: median  gaussian")
    for which, rows in gaps.items():
        table = np.array(rows)
        middle, high = np.median(table, 0), np.quantile(table, 0.9, 0)
        share = (table[:, 0] < 0.5).mean()
        print(
            f"{which:11s} {len(rows):4d} {middle[0]:20.2f} {high[0]:5.2f} {share:8.0%} {middle[1]:18.2f} {high[1]:5.2f}"
            f" {middle[2]:18.0%} {middle[3]:9.0%}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:] or ["dlrm-small"])

"""What stands around a site's GEMMs whatever their precision: norm, activation, gradient of the bias.

Each is one compiled kernel forward and one backward on the output's (M, N). An activation behind a norm fuses
into the norm's kernel, a bias into the GEMM's epilogue; the gradient of a bias is a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka_sim.dispatch.candidates import Row
from loka_sim.modelspec import Site
from perfmodel.kernels import KERNELS

STAND_INS = {
    "batchnorm": "layernorm",
    "groupnorm": "layernorm",
    "instancenorm": "layernorm",
    **dict.fromkeys(("relu6", "leakyrelu", "prelu", "hardtanh"), "relu"),
    **dict.fromkeys(("celu", "elu", "gelu", "mish", "selu", "sigmoid", "softplus", "tanh"), "silu"),
    "hardsigmoid": "hardswish",
}
"""Kernels without a timing of their own, and the measured one that reads and writes the same elements."""


@dataclass(frozen=True)
class Around:
    """Kernels around one site's GEMMs.

    Attributes:
        rows: What is launched in one training step.
        stand_ins: (what, timed as) of those timed by another kernel.
        uncounted: Norms and activations that no measured kernel stands for.
    """

    rows: tuple[Row, ...] = ()
    stand_ins: tuple[tuple[str, str], ...] = ()
    uncounted: tuple[str, ...] = ()


def around(site: Site, batch: int) -> Around:
    """The kernels around a site's GEMMs at a batch per GPU, in samples.

    The backward kernels are counted where the site has a backward pass at all.
    """
    m, n, _ = site.passes["output"].shape(batch)
    height = m * site.passes["output"].groups.at(batch)
    trains = len(site.passes) > 1
    wanted = [site.norm] if site.norm else [site.activation] if site.activation else []
    rows, stand_ins, uncounted = [], [], []
    for what in wanted:
        timed_as = what if f"torch/{what}_forward" in KERNELS else STAND_INS.get(what)
        if timed_as is None:
            uncounted.append(what)
            continue
        if timed_as != what:
            stand_ins.append((what, timed_as))
        rows.append(Row(f"torch/{timed_as}_forward", height, 1, n))
        if trains:
            rows.append(Row(f"torch/{timed_as}_backward", height, 1, n))
    if site.bias and trains:
        rows.append(Row("torch/bias_backward", height, 1, n))
    return Around(tuple(rows), tuple(stand_ins), tuple(uncounted))

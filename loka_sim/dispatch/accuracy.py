"""Predicted error of every legal FP8 kernel of every pass, from the model's statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from loka_sim.dispatch.candidates import SiteShape, legal_fp8
from loka_sim.dispatch.decide import Accuracy
from loka_sim.dispatch.operands import TORCH, Toolbox
from perfmodel.gemm_plan import plan_of
from perfmodel.kernels import KERNELS

if TYPE_CHECKING:
    from loka_sim.statistics import SiteStatistics
    from numerics.distributions import TensorStatistics
    from numerics.gradient import GradientSignal
    from numerics.pair import PairStatistics


class Errors:
    """Predicts GEMM errors, each (distributions, shape, recipes) once."""

    def __init__(self, toolbox: Toolbox = TORCH, mere_factors: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """Start with nothing predicted.

        Args:
            toolbox: Kernels whose errors are asked for; those of torch, which the baselines run, always are.
            mere_factors: Kernel -> pass -> factor on the predicted MERE, from a calibration; the SQNR moves with it.
        """
        self._toolboxes = dict.fromkeys((toolbox, replace(TORCH, capability=toolbox.capability)))
        self._factors = mere_factors or {}
        self._memo: dict[tuple[object, ...], Accuracy] = {}
        self._kept: list[object] = []
        self._normal: TensorStatistics | None = None

    def of_site(self, shape: SiteShape, statistics: SiteStatistics | None) -> dict[tuple[str, str], Accuracy]:
        """Error per (pass, legal FP8 kernel).

        Args:
            shape: The site's GEMMs.
            statistics: Distributions of its tensors; None assumes independent standard normal values.
        """
        result = {}
        for name in shape.names:
            kernels = dict.fromkeys(kernel for some in self._toolboxes for kernel in legal_fp8(shape, name, some))
            if kernels:
                left, right = self._operands(name, statistics)
                signal = statistics.gradient if statistics is not None and name == "grad_weight" else None
                pair = statistics.pairs.get(name) if statistics is not None else None
                for kernel in kernels:
                    found = self._predict(left, right, shape.gemm(name)[:3], kernel, signal, pair)
                    factor = self._factors.get(kernel, {}).get(name, 1.0)
                    if factor != 1.0:
                        found = Accuracy(found.mere * factor, found.sqnr_db - 20 * math.log10(factor))
                    result[name, kernel] = found
        return result

    def _operands(self, name: str, statistics: SiteStatistics | None) -> tuple[TensorStatistics, TensorStatistics]:
        """Left and right operand of a pass, oriented along its contraction, as wide as they were measured."""
        if statistics is None:
            x = g = w = w_transposed = self._gaussian()
        else:
            x, g = statistics.activation, statistics.grad_output
            w, w_transposed = statistics.weight, statistics.weight_transposed
        if name == "output":
            return x.along_features(), w.along_features()
        if name == "grad_input":
            return g.along_features(), w_transposed.along_features()
        return g.along_rows(), x.along_rows()

    def _gaussian(self) -> TensorStatistics:
        """Independent standard normal values; one record for all widths, since all features are alike."""
        if self._normal is None:
            from numerics.distributions import gaussian

            self._normal = gaussian(128)
        return self._normal

    def _predict(
        self, left: TensorStatistics, right: TensorStatistics, shape: tuple[int, int, int], kernel: str,
        signal: GradientSignal | None, pair: PairStatistics | None,
    ) -> Accuracy:  # fmt: skip
        spec = KERNELS[kernel]
        assert spec.recipe_a is not None and spec.recipe_b is not None
        recipes, split_k = (spec.recipe_a, spec.recipe_b, spec.accumulation), parts_of_k(kernel, shape)
        key: tuple[object, ...] = (id(left), id(right), shape, recipes, split_k, signal, pair)
        if key not in self._memo:
            from numerics.predict import predict_gemm_error

            error = predict_gemm_error(left, right, shape, *recipes, signal, pair=pair, split_k=split_k)
            self._memo[key] = Accuracy(float(error.mere), float(error.sqnr_db))
            self._kept += [left, right]  # an id stands for its object only while that object lives
        return self._memo[key]


def parts_of_k(kernel: str, shape: tuple[int, int, int]) -> int:
    """Parts of K that a kernel sums apart, where that changes its error.

    torch's rowwise kernels never split K, FBGEMM's are not known to; where each 128 of K go into FP32 it does not matter.
    """
    if kernel == "torch/fp8_tensorwise_fast":
        from numerics.tensor_core import estimated_split_k

        return estimated_split_k(*shape)
    spec = KERNELS[kernel]
    return plan_of(*shape).parts if spec.library == "loka" and spec.accumulation == "hopper_fast" else 1

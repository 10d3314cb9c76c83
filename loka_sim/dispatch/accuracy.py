"""Predicted error of every legal FP8 kernel of every pass, from the model's statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from loka_sim.dispatch.candidates import SiteShape, legal_fp8
from loka_sim.dispatch.decide import Accuracy
from perfmodel.kernels import KERNELS

if TYPE_CHECKING:
    from loka_sim.statistics import SiteStatistics
    from numerics.distributions import TensorStatistics
    from numerics.gradient import GradientSignal
    from numerics.pair import PairStatistics


class Errors:
    """Predicts GEMM errors, each (distributions, shape, recipes) once."""

    def __init__(
        self, capability: tuple[int, int] = (9, 0), mere_factors: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Start with nothing predicted.

        Args:
            capability: CUDA compute capability that kernels must be legal on.
            mere_factors: Kernel -> pass -> factor on the predicted MERE, from a calibration; the SQNR moves with it.
        """
        self.capability = capability
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
            kernels = legal_fp8(shape, name, self.capability)
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
        key: tuple[object, ...] = (id(left), id(right), shape, kernel, signal, pair)
        if key not in self._memo:
            from numerics.predict import predict_gemm_error
            from numerics.tensor_core import estimated_split_k

            # Rowwise kernels never split K; where each 128 of K go into FP32 anyhow it does not matter.
            split_k = estimated_split_k(*shape) if kernel == "torch/fp8_tensorwise_fast" else 1
            error = predict_gemm_error(
                left, right, shape, spec.recipe_a, spec.recipe_b, spec.accumulation, signal, pair=pair, split_k=split_k
            )
            self._memo[key] = Accuracy(float(error.mere), float(error.sqnr_db))
            self._kept += [left, right]  # an id stands for its object only while that object lives
        return self._memo[key]

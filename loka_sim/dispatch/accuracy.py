"""Predicted error of every legal FP8 kernel of every pass, from the model's statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from loka_sim.dispatch.candidates import SiteShape, legal_fp8
from loka_sim.dispatch.decide import Accuracies, Accuracy
from loka_sim.dispatch.operands import TORCH, Toolbox
from perfmodel.gemm_plan import plan_of
from perfmodel.kernels import KERNELS

if TYPE_CHECKING:
    from loka_sim.statistics import SiteStatistics
    from numerics.distributions import TensorStatistics

_Request = tuple[Any, ...]
"""Arguments of `numerics.predict_gemm_error`."""


class Errors:
    """Predicts GEMM errors, each (distributions, shape, recipes) once."""

    def __init__(self, toolbox: Toolbox = TORCH, mere_factors: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """Start with nothing predicted.

        Args:
            toolbox: Kernels whose errors are asked for; those of torch, which the baselines run, always are.
            mere_factors: Kernel -> pass -> factor on the predicted MERE, from a calibration; the SQNR moves with it.
        """
        self._toolboxes = tuple(dict.fromkeys((toolbox, replace(TORCH, capability=toolbox.capability))))
        self._factors = mere_factors or {}
        self._numbers: dict[_Request, int] = {}
        self._known: list[Accuracy] = []
        self._normal: TensorStatistics | None = None

    def of_site(self, shape: SiteShape, statistics: SiteStatistics | None) -> Accuracies:
        """Error per (pass, legal FP8 kernel).

        Args:
            shape: The site's GEMMs.
            statistics: Distributions of its tensors; None assumes independent standard normal values.
        """
        return self.of_sites([(shape, statistics)])[0]

    def of_sites(self, sites: Sequence[tuple[SiteShape, SiteStatistics | None]]) -> list[Accuracies]:
        """As `of_site` for each; whatever is not known yet is one question to the error model."""
        alike = {(shape, id(statistics)): (shape, statistics) for shape, statistics in sites}
        asked = {key: self._requests(*site) for key, site in alike.items()}
        fresh = list(self._numbers)[len(self._known) :]
        if fresh:
            from numerics.predict import predict_gemm_errors

            self._known += [Accuracy(answer.mere, answer.sqnr_db) for answer in predict_gemm_errors(fresh)]
        found = {
            key: {entry: self._corrected(*entry, self._known[number]) for entry, number in site.items()}
            for key, site in asked.items()
        }
        return [found[shape, id(statistics)] for shape, statistics in sites]

    def _corrected(self, name: str, kernel: str, found: Accuracy) -> Accuracy:
        """An error as the calibration's machine has it."""
        factor = self._factors[kernel].get(name, 1.0) if kernel in self._factors else 1.0
        return found if factor == 1.0 else Accuracy(found.mere * factor, found.sqnr_db - 20 * math.log10(factor))

    def _requests(self, shape: SiteShape, statistics: SiteStatistics | None) -> dict[tuple[str, str], int]:
        """What is asked of `predict_gemm_errors` per (pass, legal FP8 kernel), by number."""
        result: dict[tuple[str, str], int] = {}
        for name in shape.names:
            kernels = dict.fromkeys(kernel for some in self._toolboxes for kernel in legal_fp8(shape, name, some))
            if not kernels:
                continue
            left, right = self._operands(name, statistics)
            sizes = shape.gemm(name)[:3]
            signal = statistics.gradient if statistics is not None and name == "grad_weight" else None
            pair = statistics.pairs.get(name) if statistics is not None else None
            alike: dict[tuple[str, str, str, int], int] = {}
            for kernel in kernels:
                key = *_recipes(kernel), parts_of_k(kernel, sizes)
                if key not in alike:
                    request = left, right, sizes, *key[:3], signal, pair, "bf16", key[3]
                    alike[key] = self._numbers.setdefault(request, len(self._numbers))
                result[name, kernel] = alike[key]
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


@cache
def _recipes(kernel: str) -> tuple[str, str, str]:
    """Recipes of both operands and the accumulation."""
    spec = KERNELS[kernel]
    assert spec.recipe_a is not None and spec.recipe_b is not None
    return spec.recipe_a, spec.recipe_b, spec.accumulation


def parts_of_k(kernel: str, shape: tuple[int, int, int]) -> int:
    """Parts of K that a kernel sums apart, where that changes its error.

    torch's rowwise kernels never split K, FBGEMM's are not known to; where each 128 of K go into FP32 it does not matter.
    """
    if kernel == "torch/fp8_tensorwise_fast":
        from numerics.tensor_core import estimated_split_k

        return estimated_split_k(*shape)
    own_fast = kernel.startswith("loka/") and KERNELS[kernel].accumulation == "hopper_fast"
    return plan_of(*shape).parts if own_fast else 1

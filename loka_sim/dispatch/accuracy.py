"""Predicted error of every legal FP8 kernel of every pass, from the model's statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from loka_sim.dispatch.candidates import SiteShape, legal_fp8
from loka_sim.dispatch.decide import Accuracies, Accuracy
from loka_sim.dispatch.operands import TORCH, Toolbox
from perfmodel.gemm_plan import parts_of_many
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
        self._parts: dict[tuple[str, tuple[int, int, int]], int] = {}

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
        self._cut(shape for shape, _ in alike.values())
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
            modes = _modes(tuple(legal_fp8(shape, name, some) for some in self._toolboxes))
            if not modes:
                continue
            left, right = self._operands(name, statistics)
            sizes = shape.gemm(name)[:3]
            signal = statistics.gradient if statistics is not None and name == "grad_weight" else None
            pair = statistics.pairs.get(name) if statistics is not None else None
            alike: dict[tuple[tuple[str, str, str], int], int] = {}
            for mode in modes:
                parts = self._parts[mode.cut, sizes] if mode.cut else 1
                number = alike.get((mode.recipes, parts))
                if number is None:
                    request = left, right, sizes, *mode.recipes, signal, pair, "bf16", parts
                    number = alike[mode.recipes, parts] = self._numbers.setdefault(request, len(self._numbers))
                for kernel in mode.kernels:
                    result[name, kernel] = number
        return result

    def _cut(self, shapes: Iterable[SiteShape]) -> None:
        """Find the parts of K of every GEMM that a kernel here may cut."""
        cuts = {_cut_by(kernel): kernel for some in self._toolboxes for kernel in some.gemms}
        sizes = {shape.gemm(name)[:3] for shape in shapes for name in shape.names}
        for cut, kernel in cuts.items():
            fresh = [size for size in sizes if (cut, size) not in self._parts] if cut else []
            self._parts.update(zip([(cut, size) for size in fresh], parts_of_k(kernel, fresh), strict=True))

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


class _Mode(NamedTuple):
    """Kernels whose errors are alike.

    Attributes:
        recipes: Of both operands, and the accumulation.
        cut: As of `_cut_by`.
        kernels: Their names.
    """

    recipes: tuple[str, str, str]
    cut: str
    kernels: tuple[str, ...]


@cache
def _modes(some: tuple[tuple[str, ...], ...]) -> tuple[_Mode, ...]:
    """Kernels of several toolboxes by what decides their error."""
    found: dict[tuple[tuple[str, str, str], str], list[str]] = {}
    for kernel in dict.fromkeys(kernel for kernels in some for kernel in kernels):
        spec = KERNELS[kernel]
        assert spec.recipe_a is not None and spec.recipe_b is not None
        found.setdefault(((spec.recipe_a, spec.recipe_b, spec.accumulation), _cut_by(kernel)), []).append(kernel)
    return tuple(_Mode(*key, tuple(kernels)) for key, kernels in found.items())


@cache
def _cut_by(kernel: str) -> str:
    """Whose rule cuts a kernel's K where that changes its error; empty where nothing does.

    torch's rowwise kernels never split K, FBGEMM's are not known to; where each 128 of K go into FP32 it does not matter.
    """
    if kernel == "torch/fp8_tensorwise_fast":
        return "cublas"
    return "own" if kernel.startswith("loka/") and KERNELS[kernel].accumulation == "hopper_fast" else ""


def parts_of_k(kernel: str, shapes: Sequence[tuple[int, int, int]]) -> list[int]:
    """Parts of K that a kernel sums apart in GEMMs (M, N, K), where that changes its error; else 1."""
    cut = _cut_by(kernel)
    if cut == "cublas":
        from numerics.tensor_core import estimated_split_k

        return [estimated_split_k(*shape) for shape in shapes]
    return parts_of_many(shapes) if cut == "own" else [1] * len(shapes)

"""Collecting a zoo model's statistics while it trains, through module hooks.

Every GEMM of a zoo model is the only one of an `nn.Linear` or a `BatchedProduct` that is called once per forward, so
a hook per module sees every site, and the module's name is the site's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loka_sim.statistics import SiteStatistics
from loka_sim.zoo.common import BatchedProduct
from numerics.collect import StatisticsAccumulator
from numerics.distributions import TensorStatistics
from numerics.gradient import SignalAccumulator
from numerics.pair import RECIPES, PairStatistics, measure_pair

# Rows of one update: a slice of consecutive ones, at a seeded place, so that a long sequence costs no more than a batch.
MAX_ROWS = 4096
# How two operands meet is measured on the last batches, and of long sequences on the first samples that fit. What errors
# of different samples have in common takes more of them.
PAIR_BATCHES = 4
GRADIENT_BATCHES = 12
PAIR_ROWS = 1024


class SiteCollector:
    """Accumulates statistics of every site of a model while `enabled`.

    Args:
        model: A zoo model on the CPU.
        rank: Factors of each covariance to keep (see `numerics.distributions`).
        seed: Of the choice of rows where there are more than `MAX_ROWS`.
        recipes: Those under which operands are seen together; others take the average of these.
    """

    def __init__(self, model: nn.Module, rank: int, seed: int = 0, recipes: Sequence[str] = RECIPES) -> None:
        """Registers the hooks."""
        self.enabled = False
        self._rank, self._recipes = rank, tuple(recipes)
        self._generator = torch.Generator().manual_seed(seed)
        self._accumulators: dict[tuple[str, str], StatisticsAccumulator] = {}
        self._signals: dict[str, SignalAccumulator] = {}
        self._latest: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._each: dict[str, int] = {}  # rows of a sample
        self._modules = {
            name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, BatchedProduct))
        }
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(self._hook(name)) for name, module in self._modules.items()
        ]

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def result(self) -> dict[str, SiteStatistics]:
        """Statistics by site; a linear layer's weight is read now.

        Raises:
            ValueError: a site was never seen with a gradient, or its values are too small or too large for statistics.
        """
        for name, module in self._modules.items():
            if isinstance(module, nn.Linear):
                weight = module.weight.detach()
                self._update(name, "weight", weight, whole=True)
                self._update(name, "weight_transposed", weight.T, whole=True)
        sites = {}
        for name in self._modules:
            roles = ("activation", "weight", "weight_transposed", "grad_output")
            if missing := [role for role in roles if (name, role) not in self._accumulators]:
                raise ValueError(f"site {name} has no {missing[0]}; run a step with its gradient while collecting")
            records = {role: self._record(name, role) for role in roles}
            gradient = self._signals[name].result() if name in self._signals else None
            sites[name] = SiteStatistics(**records, gradient=gradient, pairs=self._pairs(name))
        return sites

    def _record(self, name: str, role: str) -> TensorStatistics:
        try:
            return self._accumulators[name, role].result(self._rank)
        except ValueError as error:
            raise ValueError(f"site {name}, {role}: {error}") from None

    def _pairs(self, name: str) -> dict[str, PairStatistics]:
        """How the operands of each pass met in the latest batches, with the weight as it is now."""
        latest = self._latest.get(name)
        if not latest:
            return {}
        module = self._modules[name]
        assert isinstance(module, nn.Linear)
        weight = module.weight.detach()
        operands = {
            "output": [(x, weight) for _, x in latest[-PAIR_BATCHES:]],
            "grad_input": [(g, weight.T) for g, _ in latest[-PAIR_BATCHES:]],
            "grad_weight": [(g.T, x.T) for g, x in latest],
        }
        measured = {
            key: measure_pair(pairs, self._recipes, self._each[name] if key == "grad_weight" else None)
            for key, pairs in operands.items()
        }
        return {key: pair for key, pair in measured.items() if pair is not None}

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not self.enabled:
                return
            self._update(name, "activation", inputs[0])
            if isinstance(module, BatchedProduct):
                self._update(name, "weight", inputs[1].transpose(1, 2))
                self._update(name, "weight_transposed", inputs[1])
            if output.requires_grad:
                # Of all rows, however many: what a batch sums to is not in a slice of it.
                kept = None if isinstance(module, BatchedProduct) else inputs[0].detach()
                output.register_hook(lambda gradient: self._update_gradient(name, gradient, kept))

        return hook

    def _update_gradient(self, name: str, gradient: Tensor, inputs: Tensor | None) -> None:
        self._update(name, "grad_output", gradient)
        if inputs is not None:
            self._signals.setdefault(name, SignalAccumulator()).update(gradient, inputs)
            samples = max(PAIR_ROWS // max(gradient[0, ..., 0].numel(), 1), 1)
            both = gradient.detach()[:samples].flatten(0, -2), inputs[:samples].flatten(0, -2)
            self._each[name] = gradient[0, ..., 0].numel()
            self._latest[name] = [*self._latest.get(name, ()), both][-GRADIENT_BATCHES:]

    def _update(self, name: str, role: str, values: Tensor, whole: bool = False) -> None:
        rows = values.detach().flatten(0, -2)
        if not whole and rows.shape[0] > MAX_ROWS:
            start = int(torch.randint(rows.shape[0] - MAX_ROWS + 1, (1,), generator=self._generator))
            rows = rows[start : start + MAX_ROWS]
        key = (name, role)
        if key not in self._accumulators:
            self._accumulators[key] = StatisticsAccumulator(rows.shape[1])
        try:
            self._accumulators[key].update(rows.contiguous())
        except ValueError as error:
            raise ValueError(f"site {name}, {role}: {error}") from None

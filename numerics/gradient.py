"""What two tensors that share their rows sum to: the weight gradient's signal, which neither tensor shows alone.

A weight gradient y = sum over rows m of g_mn x_mk sums over a batch, and its operands are not independent: the gradient is
what they have in common. Of samples drawn independently, E[y^2] over all outputs is

    (linear k + quadratic k^2) E[g^2] E[x^2]

for k rows: one part adds up like noise, the other coherently, as the mean over samples does. Rounding errors, independent
from row to row, add up like `independent` k E[g^2] E[x^2]: samples with a large gradient and large inputs count most.

E is over batches. In one batch of a model with one logit nearly all of a weight gradient is one pattern times one number,
the batch's sum of (probability - label), so that its power is chi-squared with one degree of freedom, or few: one batch's
SQNR strays from the predicted one by some decibels, at all sites of the model alike, and no statistics can foresee it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from numerics.collect import as_array

# A square of one normal number exceeds its mean this many times over in one of twenty cases.
_CHANCE = 3.84


@dataclass(frozen=True)
class GradientSignal:
    """How large the sums of products over a batch are, relative to E[g^2] E[x^2] of its operands.

    Relative to the operands, so it serves another batch (by the powers of k), another width (whose features are more of
    the same kind: `TensorStatistics.resized` repeats them, and repetition changes no ratio) and another scale of the loss.

    Attributes:
        independent: Mean square of a single product of one row; 1 where the sizes of g's and x's rows are unrelated.
        linear: Power of a sum that grows with its rows, per row. Above `independent` where rows of one sample (positions
            of a sequence, fields) add up, below it by what is in `quadratic`.
        quadratic: Power of a sum that grows with the square of its rows, per pair; zero where the sum over all rows seen was
            no larger than sums of rows without a common part are by chance.
    """

    independent: float
    linear: float
    quadratic: float

    def __post_init__(self) -> None:
        """Refuse what no tensors have.

        Raises:
            ValueError: a value is not finite, or negative (`linear` may be, by less than `quadratic`).
        """
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < (-self.quadratic if name == "linear" else 0.0):
                raise ValueError(f"gradient signal: {name} is {value}; it must be finite and not negative")

    def power(self, rows: int) -> float:
        """Mean square of a sum over so many rows, relative to E[g^2] E[x^2]."""
        return max(rows * self.linear + float(rows) ** 2 * self.quadratic, 0.0)


class SignalAccumulator:
    """Streams pairs of tensors that share their rows into a `GradientSignal`; mergeable over ranks and runs.

    All batches count as one large one: what is coherent shows in the sum over all of them. So the weight gradient's sum is
    held until `result`, (N, K) float64.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._gradient = self._input = self._rows = 0.0
        self._single = self._sample = self._own_pairs = 0.0
        self._whole: Any = 0.0

    def update(self, gradient: Any, inputs: Any) -> None:
        """Take in one batch.

        Args:
            gradient: (samples, ..., N), the output's gradient. Samples are independent, the rows of one sample need not be.
            inputs: (samples, ..., K), the layer's input, with the same rows.

        Raises:
            ValueError: the rows differ.
        """
        g, x = as_array(gradient), as_array(inputs)
        if g.ndim < 2 or g.shape[:-1] != x.shape[:-1]:
            raise ValueError(f"gradient {g.shape} and inputs {x.shape} must agree in all but their last axis")
        if g.size == 0:
            return
        g, x = (values.reshape(len(values), -1, values.shape[-1]) for values in (g, x))
        samples, each = g.shape[:2]
        # Gradients of a large batch are small and their products' squares smaller: float32 is given numbers near one.
        scales = [float(np.abs(values).max()) for values in (g, x)]
        unit = (scales[0] * scales[1]) ** 2 / (g.shape[2] * x.shape[2])
        g, x = (values / np.float32(scale or 1.0) for values, scale in zip((g, x), scales, strict=True))
        squares = [np.square(values, dtype=np.float64).sum(-1) for values in (g, x)]
        single = float((squares[0] * squares[1]).sum())
        # |g^T x|^2 of one sample is the sum of the elementwise product of its two Gram matrices.
        sample = single if each == 1 else float(((g @ g.transpose(0, 2, 1)) * (x @ x.transpose(0, 2, 1))).sum(dtype=np.float64))
        whole = g.reshape(-1, g.shape[2]).T @ x.reshape(-1, x.shape[2])
        self._whole = self._whole + whole.astype(np.float64) * math.sqrt(unit)
        self._gradient += float(squares[0].sum()) * scales[0] ** 2 / g.shape[2]
        self._input += float(squares[1].sum()) * scales[1] ** 2 / x.shape[2]
        self._rows += samples * each
        self._single += single * unit
        self._sample += sample * unit
        self._own_pairs += samples * each**2

    def merge(self, other: SignalAccumulator) -> None:
        """Take in what another accumulator has seen."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def result(self) -> GradientSignal | None:
        """The signal so far; None where nothing, or only zeros, or only one sample at a time was seen."""
        pairs = self._rows**2 - self._own_pairs
        if not pairs or not self._gradient or not self._input:
            return None
        unit = (self._gradient / self._rows) * (self._input / self._rows)
        total = float(np.square(self._whole).sum())
        quadratic = 0.0
        if total > _CHANCE * self._sample:
            # Pairs of different samples only: an estimate without bias.
            quadratic = (total - self._sample) / pairs / unit
        linear = self._sample / self._rows / unit - quadratic * self._own_pairs / self._rows
        return GradientSignal(self._single / self._rows / unit, max(linear, -quadratic), quadratic)

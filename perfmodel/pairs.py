"""What two kernels of one call differ by, learned by itself: for choosing between them.

Two kernels that share most of what they do are off together: where ours, tensorwise, takes longer than expected, ours, rowwise,
does, too. Each learned by itself, their ratio is off by what both forests have for noise; and a choice hangs on nothing but the
ratio. So trees of pairs of kernels learn it from launches that followed one another, whose clock is the same, and from careful
timings of one run. Then each time moves a little, so that the times of a call, as far off as they are by themselves, agree with
the ratios, as far off as these are: least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfmodel.calls import Sizes, of_calls
from perfmodel.hardware import HardwareSpec
from perfmodel.prediction import Seen, baseline_us, octaves_beyond

if TYPE_CHECKING:
    from perfmodel.model import PerfModel

Array = npt.NDArray[np.float64]
Pair = tuple[str, str]

# Chosen by what they bring on shapes held out, two folds of five. Torch's tensorwise and rowwise kernels bring nothing, and those
# of different libraries hardly anything: too few launches of both followed one another, or they have too little in common.
PAIRS: tuple[Pair, ...] = (
    ("torch/bf16", "torch/fp8_tensorwise_fast"),
    ("torch/bf16", "torch/fp8_tensorwise_split"),
    ("torch/bf16", "torch/fp8_rowwise_fast"),
    ("torch/fp8_tensorwise_fast", "torch/fp8_tensorwise_split"),
    ("torch/fp8_rowwise_fast", "torch/fp8_rowwise_split"),
    ("loka/fp8_tensorwise_fast", "loka/fp8_rowwise_fast"),
    ("loka/fp8_tensorwise_split", "loka/fp8_rowwise_split"),
    ("loka/fp8_tensorwise_fast", "loka/fp8_tensorwise_split"),
    ("loka/fp8_rowwise_fast", "loka/fp8_rowwise_split"),
    ("fbgemm/fp8_rowwise_fast", "fbgemm/fp8_rowwise_split"),
)
# How the features begin that may differ between two kernels of one call: what is likely chosen, how ours is cut, the network.
_OF_A_KERNEL = ("chosen", "log2_chosen", "plan", "log2_plan", "network")


def pair_file(pair: Sequence[str]) -> str:
    """File name of a pair's trees inside the models folder."""
    return "__beside__".join(kernel.replace("/", "__") for kernel in pair) + ".ubj.gz"


def pairs_in(manifest: Mapping[str, Any]) -> dict[Pair, float]:
    """Pairs of the kernels that a manifest has, and how far each one's ratio is off; none of a model that knows of none."""
    found = {(str(of), str(beside)): float(off) for of, beside, off in manifest.get("pairs", ())}
    return {pair: off for pair, off in found.items() if set(pair) <= set(manifest["kernels"])}


def both_seen(one: Seen, other: Seen) -> Array:
    """What a pair's trees see of calls: what those of the one kernel do, and what is the other's alone, (calls, features)."""
    columns = [number for number, name in enumerate(other.names) if name.startswith(_OF_A_KERNEL)]
    return np.column_stack([one.matrix, other.matrix[:, columns]])


def smooth_ratio(pair: Sequence[str], seen: Sequence[Seen], sizes: Sizes, hardware: HardwareSpec) -> Array:
    """The logarithm of the ratio of a pair's times that its trees correct, (calls,): of the baselines and the networks."""
    of, beside = (np.log(baseline_us(name, *sizes, hardware)) + each.smooth for name, each in zip(pair, seen, strict=True))
    return np.asarray(of - beside)


@dataclass(frozen=True)
class Agreement:
    """How times of kernels and ratios of pairs of them are brought to agree.

    Attributes:
        kernels: Names.
        pairs: Of which a ratio is known.
        off: How far each kernel's time is off by itself, as a logarithm, (kernels,).
        pairs_off: Likewise each pair's ratio, (pairs,).
    """

    kernels: tuple[str, ...]
    pairs: tuple[Pair, ...]
    off: Array
    pairs_off: Array

    @classmethod
    def of(cls, off: Mapping[str, float], pairs: Mapping[Pair, float]) -> Agreement:
        """From how far kernels, by name, and pairs are off."""
        kernels = tuple(dict.fromkeys(name for pair in pairs for name in pair))
        return cls(kernels, tuple(pairs), np.array([off[name] for name in kernels]), np.array(list(pairs.values())))

    def moved(self, times: Array, ratios: Array) -> Array:
        """By how much each time moves, as a logarithm, (calls, kernels); 0 where no ratio is known.

        The times that minimize the squares of what they moved over `off`, and of what ratios are then off over `pairs_off`.

        Args:
            times: Logarithms of the kernels' times, (calls, kernels); NaN where one was not asked.
            ratios: Logarithms of the pairs' ratios, (calls, pairs); NaN where one is not known.
        """
        number = {name: place for place, name in enumerate(self.kernels)}
        difference = np.zeros((len(self.pairs), len(self.kernels)))
        places = [(number[one], number[other]) for one, other in self.pairs]
        for row, (one, other) in enumerate(places):
            difference[row, one], difference[row, other] = 1.0, -1.0
        result, known = np.zeros_like(times), np.isfinite(ratios)
        patterns, pattern = np.unique(known, axis=0, return_inverse=True)
        for place, some in enumerate(patterns):
            if not some.any():
                continue
            calls, own = np.flatnonzero(pattern.ravel() == place), difference[some]
            spread = own * self.off**2
            gain = np.linalg.solve(spread @ own.T + np.diag(self.pairs_off[some] ** 2), spread)
            # Summed pair after pair: what a call is told does not hang on how many others it came with.
            for row, pair in enumerate(np.flatnonzero(some)):
                one, other = places[pair]
                missing = ratios[calls, pair] - (times[calls, one] - times[calls, other])
                result[calls] += missing[:, None] * gain[row]
        return result


@dataclass(frozen=True)
class Asked:
    """Calls of one kernel that were asked together with others.

    Attributes:
        rows: Their numbers among all that was asked, (calls,).
        seen: What the kernel's trees see of them.
    """

    rows: npt.NDArray[np.int64]
    seen: Seen

    @classmethod
    def of(cls, parts: Sequence[tuple[npt.NDArray[Any], Seen]]) -> Asked:
        """From parts of them, in order."""
        rows, seen = zip(*parts, strict=True)
        matrix, doubt = (np.concatenate([getattr(part, name) for part in seen]) for name in ("matrix", "doubt"))
        smooth = np.concatenate([np.broadcast_to(part.smooth, len(part.matrix)) for part in seen])
        return cls(np.concatenate(rows), Seen(seen[0].names, matrix, doubt, smooth))

    def some(self, numbers: npt.NDArray[np.int64]) -> Seen:
        """What is seen of those calls among them."""
        seen = self.seen
        return Seen(seen.names, seen.matrix[numbers], seen.doubt[numbers], np.asarray(seen.smooth)[numbers])


def agreed_factors(
    model: PerfModel, asked: Mapping[str, Asked], sizes: Sizes, time_us: Array, each: Callable[..., Iterable[Any]] = map
) -> Array:
    """What each time is multiplied by, that those of one call agree with the ratios that pairs of kernels tell, (rows,).

    1 of a call of which no other kernel is asked that it is a pair with, and of one that is larger than what was measured.

    Args:
        model: The time model, with pairs.
        asked: By kernel, calls of kernels that are in a pair, each inside all rows.
        sizes: m, n, k, groups of all rows.
        time_us: Their times by themselves, (rows,).
        each: What makes the ratios of pairs, as `map` does.
    """
    agreement, result = model.agreement, np.ones(len(time_us))
    rows = np.concatenate([mine.rows for mine in asked.values()])
    calls_of, shape = _distinct(np.stack(sizes)[:, rows])
    behind = np.cumsum([len(mine.rows) for mine in asked.values()])
    shapes: Sizes = (calls_of[0], calls_of[1], calls_of[2], calls_of[3])
    of = dict(zip(asked, np.split(shape, behind[:-1]), strict=True))
    place = {name: np.full(len(shapes[0]), -1) for name in asked}
    for name, mine in of.items():
        place[name][mine] = np.arange(len(mine))

    def ratio(pair: Pair) -> tuple[npt.NDArray[np.int64], Array]:
        """Calls of which a pair knows the ratio, and its logarithm."""
        if not all(name in asked for name in pair):
            return np.empty(0, dtype=np.int64), np.empty(0)
        known = np.logical_and.reduce([place[name] >= 0 for name in pair])
        for name in pair:
            known &= octaves_beyond(shapes, model.manifest["kernels"][name]["range"]) == 0
        calls = np.flatnonzero(known)
        seen = [asked[name].some(place[name][calls]) for name in pair]
        smooth = smooth_ratio(pair, seen, of_calls(shapes, calls), model.hardware)
        return calls, smooth + model.pair_trees(pair).predict(both_seen(*seen))

    times = np.full((len(shapes[0]), len(agreement.kernels)), np.nan)
    for column, name in enumerate(agreement.kernels):
        if name in asked:
            there = place[name] >= 0
            times[there, column] = np.log(time_us[asked[name].rows[place[name][there]]])
    ratios = np.full((len(shapes[0]), len(agreement.pairs)), np.nan)
    for column, (calls, values) in enumerate(each(ratio, agreement.pairs)):
        ratios[calls, column] = values
    moved = np.exp(agreement.moved(times, ratios))
    for column, name in enumerate(agreement.kernels):
        if name in asked:
            result[asked[name].rows] = moved[of[name], column]
    return result


def _distinct(columns: Array) -> tuple[Array, npt.NDArray[np.int64]]:
    """Columns in order, each once, and where among them each was: `np.unique` of a second axis takes three times as long."""
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    fresh = np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.cumsum(fresh) - 1
    return ordered[:, fresh], place

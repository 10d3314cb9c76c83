"""What it is worth to measure a kernel: the time that knowing it exactly is expected to save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Half the width of a 90% interval, in standard deviations of a normal variable.
NORMAL_90 = 1.6448536269514722


@dataclass(frozen=True)
class Decision:
    """One choice between ways to compute the same.

    Attributes:
        count: How often it occurs in a step.
        alternatives: Per way, the rows (indices) whose times add up; a row may be named more than once.
        chosen: Index of the way taken now.
    """

    count: int
    alternatives: Sequence[Sequence[int]]
    chosen: int


def value_of_measuring(
    time_us: Array,
    low_us: Array,
    high_us: Array,
    decisions: Sequence[Decision],
    groups: Sequence[Sequence[int]] | None = None,
    draws: int = 1024,
    seed: int = 0,
) -> Array:
    """Expected saving of knowing each group of rows exactly before deciding, in microseconds a step.

    Times are log-normal with median `time_us` and the intervals as their 5% and 95% points (the spread on either side is
    its own). Of a group only its rows are random, independently of each other; all others stand at their medians. The
    saving is the mean of what the way taken now costs less what the best way costs in each draw, over all decisions that
    the group enters. Where another way is already the better one at the medians (and is not taken because it is not
    sure), that gap is divided among the decision's rows by their variances: a row that is known already gets none of it.

    Args:
        time_us: Predicted times, (rows,).
        low_us: Lower ends of their 90% intervals, (rows,).
        high_us: Upper ends, (rows,).
        decisions: What is chosen by these times.
        groups: Rows that one measurement tells together; each row by itself by default.
        draws: Monte Carlo draws.
        seed: Seeds them; a row has the same draws whatever group it is in.

    Returns:
        Saving per group, (groups,), never below 0.

    Raises:
        ValueError: a time is not positive and inside its interval, or a decision names a row or a way that is not there.
    """
    time_us, low_us, high_us = (np.asarray(values, dtype=np.float64) for values in (time_us, low_us, high_us))
    if not (np.isfinite(high_us).all() and (low_us > 0).all() and (low_us <= time_us).all() and (time_us <= high_us).all()):
        raise ValueError("each time must be finite, positive and inside its interval: 0 < low_us <= time_us <= high_us")
    if draws < 1:
        raise ValueError(f"draws is {draws}; it must be at least 1")
    number = len(time_us)
    up, down = np.log(high_us / time_us) / NORMAL_90, np.log(time_us / low_us) / NORMAL_90
    variance = (time_us * 0.5 * (up + down)) ** 2
    # Where each row enters: (decision, way, how often); per decision its ways' costs at the medians and its rows' variance.
    entered: list[list[tuple[int, int, int]]] = [[] for _ in range(number)]
    costs: list[Array] = []
    unsure: list[float] = []
    for index, decision in enumerate(decisions):
        if not 0 <= decision.chosen < len(decision.alternatives):
            raise ValueError(f"decision {index} takes way {decision.chosen} of {len(decision.alternatives)}")
        for way, rows in enumerate(decision.alternatives):
            for row, times in Counter(rows).items():
                if not 0 <= row < number:
                    raise ValueError(f"decision {index} names row {row}; there are {number}")
                entered[row].append((index, way, times))
        costs.append(np.array([time_us[list(rows)].sum() for rows in decision.alternatives]))
        unsure.append(float(variance[sorted({row for way in decision.alternatives for row in way})].sum()))
    groups = [[row] for row in range(number)] if groups is None else groups
    result = np.zeros(len(groups))
    for position, group in enumerate(groups):
        ways: dict[int, dict[int, Array]] = {}
        spread: dict[int, float] = {}
        for row in sorted(set(group)):
            if not 0 <= row < number:
                raise ValueError(f"group {position} names row {row}; there are {number}")
            if not entered[row] or not variance[row]:
                continue
            normal = np.random.default_rng((seed, row)).standard_normal(draws)
            shift = time_us[row] * np.expm1(normal * np.where(normal > 0, up[row], down[row]))
            for index, way, times in entered[row]:
                shifts = ways.setdefault(index, {})
                shifts[way] = shifts.get(way, 0.0) + times * shift
            for index in {index for index, _, _ in entered[row]}:
                spread[index] = spread.get(index, 0.0) + float(variance[row])
        for index, shifts in ways.items():
            decision, cost = decisions[index], costs[index]
            fixed = [cost[way] for way in range(len(cost)) if way not in shifts]
            least = np.full(draws, min(fixed) if fixed else np.inf)
            for way, moved in shifts.items():
                least = np.minimum(least, cost[way] + moved)
            taken = cost[decision.chosen] + shifts.get(decision.chosen, 0.0)
            gap = float(cost[decision.chosen] - cost.min())
            saved = float(np.mean(taken - least)) - gap * (1 - spread[index] / unsure[index])
            result[position] += decision.count * max(saved, 0.0)
    return result

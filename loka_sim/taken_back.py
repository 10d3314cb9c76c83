"""Sites whose FP8 gains by itself, and in the whole step not, or not enough.

A decision goes by each site's own kernels. In a step torch.compile fuses quantization with what stands before it, and unmakes
fusions of bf16 that cannot be so any more; GEMMs between other kernels take otherwise than by themselves. Where that makes it
doubtful whether the whole step gains, it is told anew without the FP8 of each kind of site: what does not make the passes that
it converts so much faster as a decision asks for, is taken back, the least gainful first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from loka_sim.dispatch.candidates import Assignment, Row
from loka_sim.dispatch.decide import PassDecision
from loka_sim.dispatch.steps import Step

Kind = TypeVar("Kind", bound=Hashable)
"""Of sites that are decided alike."""


@dataclass
class _Alike:
    """Sites that launch the same: their converted passes in bf16, and what these gain by themselves, microseconds."""

    bf16_us: float = 0.0
    gain_us: float = 0.0


Launched = tuple[tuple[Row, ...], ...]
"""What each pass of a site launches: sites that launch the same gain the same."""

# Kinds of sites that are looked at one by one: telling a production model's step takes a tenth of a second.
MOST_KINDS = 8


def taken_back(
    kinds: Sequence[Kind],
    decided: Mapping[Kind, Mapping[str, PassDecision]],
    told: Callable[[Sequence[Assignment]], Step],
    min_speedup: float = 1.0,
) -> dict[Kind, float]:
    """Kinds of sites that had better stay in bf16, and what the whole step gains by their FP8, in microseconds.

    That is less than nothing, or less than makes the passes that they convert `min_speedup` times as fast.

    Args:
        kinds: Of each site.
        decided: Per kind, what each pass runs as decided by itself.
        told: Of assignments of all sites, their step.
        min_speedup: As of `dispatch.decide.Policy`.
    """
    chosen = {kind: {name: entry.kernel for name, entry in passes.items()} for kind, passes in decided.items()}
    stays = {kind: {name: entry.stays for name, entry in passes.items()} for kind, passes in decided.items()}
    times, sites = Counter(kinds), dict[Launched, _Alike]()
    launched = {kind: tuple(entry.rows for entry in decided[kind].values()) for kind in decided if chosen[kind] != stays[kind]}
    for kind, rows in launched.items():
        fast = [entry for name, entry in decided[kind].items() if chosen[kind][name] != stays[kind][name]]
        alike = sites.setdefault(rows, _Alike())
        alike.bf16_us += times[kind] * sum(entry.bf16.us for entry in fast)
        alike.gain_us += times[kind] * sum(entry.bf16.us - entry.predicted.us for entry in fast)
    if not sites:
        return {}

    def step(without: Collection[Launched]) -> Step:
        return told([(stays if launched.get(kind) in without else chosen)[kind] for kind in kinds])

    with_all = step(())
    if with_all.whole is None or with_all.whole_speedup is None or with_all.whole_speedup.low_us >= 1:
        return {}
    all_us = with_all.whole.us

    def whole_us(without: Iterable[Launched]) -> float:
        whole = step(set(without)).whole
        assert whole is not None
        return whole.us

    # Where they are many, those that gain most by themselves are looked at together.
    ordered = sorted(sites, key=lambda rows: sites[rows].gain_us)
    left = [[rows] for rows in ordered[: MOST_KINDS - 1]] + ([rest] if (rest := ordered[MOST_KINDS - 1 :]) else [])
    now_us, found = all_us, dict[Launched, float]()
    while left:
        # What gains enough now is not asked again.
        gains_us = [whole_us([*found, *part]) - now_us for part in left]
        wanting = [
            (slowdown, number)
            for number, (part, us) in enumerate(zip(left, gains_us, strict=True))
            if (slowdown := 1 - us / sum(sites[rows].bf16_us for rows in part)) * min_speedup > 1
        ]
        if not wanting:
            break
        _, worst = max(wanting)
        found |= dict.fromkeys(left[worst], gains_us[worst])
        now_us += gains_us[worst]
        left = [left[number] for _, number in sorted(wanting, key=lambda entry: entry[1]) if number != worst]
    if (in_bf16_us := whole_us(ordered)) < now_us:
        found = {rows: found.get(rows, in_bf16_us - all_us) for rows in ordered}
    return {kind: found[rows] for kind, rows in launched.items() if rows in found}

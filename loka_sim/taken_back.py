"""Sites whose FP8 gains by itself, and not in the whole step.

A decision goes by each site's own kernels. In a step torch.compile fuses quantization with what stands before it, and unmakes
fusions of bf16 that cannot be so any more; GEMMs between other kernels take otherwise than by themselves. Where that makes it
doubtful whether the whole step gains, it is told anew without the FP8 of each kind of site, and what does not gain is taken back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from loka_sim.dispatch.candidates import Assignment, Row
from loka_sim.dispatch.decide import PassDecision
from loka_sim.dispatch.steps import Step

Kind = TypeVar("Kind", bound=Hashable)
"""Of sites that are decided alike."""

Launched = tuple[tuple[Row, ...], ...]
"""What each pass of a site launches: sites that launch the same gain the same."""

# Kinds of sites that are looked at one by one: telling a production model's step takes half a second.
MOST_KINDS = 8


def taken_back(
    kinds: Sequence[Kind], decided: Mapping[Kind, Mapping[str, PassDecision]], told: Callable[[Sequence[Assignment]], Step]
) -> dict[Kind, float]:
    """Kinds of sites that had better stay in bf16, and by how many microseconds the whole step is longer with their FP8.

    Args:
        kinds: Of each site.
        decided: Per kind, what each pass runs as decided by itself.
        told: Of assignments of all sites, their step.
    """
    chosen = {kind: {name: entry.kernel for name, entry in passes.items()} for kind, passes in decided.items()}
    stays = {kind: {name: entry.candidates[0].kernel for name, entry in passes.items()} for kind, passes in decided.items()}
    number, gains_us = Counter(kinds), defaultdict[Launched, float](float)
    launched = {kind: tuple(entry.rows for entry in decided[kind].values()) for kind in decided if chosen[kind] != stays[kind]}
    for kind, rows in launched.items():
        gains_us[rows] += number[kind] * sum(entry.bf16.us - entry.predicted.us for entry in decided[kind].values())
    if not launched:
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
    ordered = sorted(gains_us, key=lambda rows: gains_us[rows])
    left = [[rows] for rows in ordered[: MOST_KINDS - 1]] + ([rest] if (rest := ordered[MOST_KINDS - 1 :]) else [])
    least_us, found = all_us, dict[Launched, float]()
    while left:
        # What does not shorten the step now is not asked again.
        shorter = [(us, part) for part in left if (us := whole_us([*found, *part])) < least_us]
        if not shorter:
            break
        us, part = min(shorter, key=lambda entry: entry[0])
        found |= dict.fromkeys(part, least_us - us)
        least_us, left = us, [other for _, other in shorter if other is not part]
    if (in_bf16_us := whole_us(ordered)) < least_us:
        found = {rows: found.get(rows, all_us - in_bf16_us) for rows in ordered}
    return {kind: found[rows] for kind, rows in launched.items() if rows in found}

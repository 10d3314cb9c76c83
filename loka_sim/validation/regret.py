"""What decisions cost as measured: against the measured best, bf16 alone, and what a user would do without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from loka_sim.dispatch.baselines import BASELINES
from loka_sim.dispatch.candidates import Row, SiteShape, launches, legal_fp8
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.decide import flat
from loka_sim.dispatch.operands import TORCH, Toolbox

if TYPE_CHECKING:
    import pandas

    from loka_sim.whatif import WhatIf

Key = tuple[SiteShape, tuple[tuple[str, str, float], ...]]


def measured_times(rows: pandas.DataFrame) -> Times:
    """Measured rows (kernel, m, n, k, groups, p10_us, p50_us, p90_us) as times; of a row measured twice, the last."""
    columns = [rows[name].tolist() for name in ("kernel", "m", "n", "k", "groups", "p50_us", "p10_us", "p90_us")]
    return Times(
        {
            Row(str(kernel), int(m), int(n), int(k), int(groups)): Time(p50, p10, p90)
            for kernel, m, n, k, groups, p50, p10, p90 in zip(*columns, strict=True)
        }
    )


@dataclass(frozen=True)
class Regrets:
    """What policies cost on the sites whose every choice was measured.

    Attributes:
        sites: Sites counted; a site counts where every launch of every legal assignment was measured.
        of_sites: Sites of the model that have a choice at all.
        passes: GEMM passes of those counted.
        best_us: The fastest accurate assignment of each site, as measured, added up.
        policies_us: Cost of each policy on the same sites.
    """

    sites: int
    of_sites: int
    passes: int
    best_us: float
    policies_us: Mapping[str, float]

    def rows(self, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        """A row a policy for the document, the best first."""
        bf16 = self.policies_us["bf16"]
        every = {"best": self.best_us, **self.policies_us}
        return [
            {
                "name": name, "label": labels[name], "measured_us": us, "against_best": us / self.best_us - 1,
                "against_bf16": bf16 / us,
            }
            for name, us in every.items()
        ] if self.sites else []  # fmt: skip


Launched = Sequence[tuple[Row, ...]]
"""What a policy launches, a tuple for each site."""


def policies_of(answers: Mapping[str, WhatIf]) -> dict[str, Launched]:
    """What every site launches under the decisions given and the baselines."""
    first = next(iter(answers.values()))
    result: dict[str, Launched] = {
        name: [tuple(row for entry in site.passes.values() for row in entry.rows) for site in answer.sites]
        for name, answer in answers.items()
    }
    torch = replace(TORCH, capability=first.toolbox.capability)
    for baseline in BASELINES:
        assignments = ((site.shape, baseline.assignment(site.site, site.shape, torch)) for site in first.sites)
        result[baseline.name] = [flat(launches(*entry, torch)) for entry in assignments]
    return result


def regrets(answer: WhatIf, measured: Times, policies: Mapping[str, Launched]) -> Regrets:
    """Price policies with measured times.

    Sites whose FP8 was taken back for the whole step (`loka_sim.taken_back`) are left out: by themselves they would gain.

    Args:
        answer: Whose sites, and predicted errors, are meant.
        measured: Measured launches.
        policies: What each launches, as many tuples as there are sites.
    """
    toolbox = replace(answer.toolbox, us=lambda row: measured.of[row].us if row in measured.of else float("inf"))
    max_mere = answer.settings.max_mere
    best: dict[Key, float | None] = {}
    counted, having, passes, best_us = 0, 0, 0, 0.0
    totals: dict[str, float] = defaultdict(float)
    for index, site in enumerate(answer.sites):
        if site.step_gain_us is not None:
            continue
        legal = {name: legal_fp8(site.shape, name, toolbox) for name in site.shape.names}
        if not any(legal.values()):
            continue
        having += 1
        accurate = {
            (name, candidate.kernel): candidate.accuracy.mere
            for name, decided in site.passes.items()
            for candidate in decided.candidates
            if candidate.accuracy is not None
        }
        key = site.shape, tuple((name, kernel, mere) for (name, kernel), mere in sorted(accurate.items()))
        if key not in best:
            best[key] = _best_us(site.shape, legal, accurate, measured, max_mere, toolbox)
        found = best[key]
        rows = {name: launched[index] for name, launched in policies.items()}
        if found is None or any(row not in measured.of for some in rows.values() for row in some):
            continue
        counted, passes, best_us = counted + 1, passes + len(site.shape.names), best_us + found
        for name, some in rows.items():
            totals[name] += measured.sum(some)
    return Regrets(counted, having, passes, best_us, {name: totals[name] for name in policies})


def _best_us(
    shape: SiteShape,
    legal: Mapping[str, Sequence[str]],
    mere: Mapping[tuple[str, str], float],
    measured: Times,
    most: float,
    toolbox: Toolbox,
) -> float | None:
    """The fastest assignment of accurate kernels, as measured; None where some launch was not measured."""
    bf16 = shape.bf16()
    names = shape.names
    choices = [(bf16[name], *(k for k in legal[name] if mere.get((name, k), most) < most)) for name in names]
    least = None
    for kernels in product(*choices):
        rows = flat(launches(shape, dict(zip(names, kernels, strict=True)), toolbox))
        if any(row not in measured.of for row in rows):
            return None
        us = measured.sum(rows)
        least = us if least is None else min(least, us)
    return least


def changes(before: WhatIf, after: WhatIf, measured: Times) -> list[dict[str, Any]]:
    """Passes whose kernel differs between two decisions, those alike together; by how many sites."""
    found: dict[tuple[Any, ...], list[str]] = {}
    facts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for old, new in zip(before.sites, after.sites, strict=True):
        for name, entry in old.passes.items():
            other = new.passes[name]
            if entry.kernel == other.kernel:
                continue
            key = (old.shape, name, entry.kernel, other.kernel)
            found.setdefault(key, []).append(old.site.name)
            facts[key] = {
                "pass": name, "before": entry.kernel, "after": other.kernel,
                "measured_before_us": _sum(measured, entry.rows), "measured_after_us": _sum(measured, other.rows),
                "reason": other.reason,
            }  # fmt: skip
    return [{"site": sites[0], "sites": len(sites), **facts[key]} for key, sites in found.items()]


def _sum(measured: Times, rows: Sequence[Row]) -> float | None:
    return measured.sum(rows) if all(row in measured.of for row in rows) else None

"""The decision of one site: enumerate, drop the illegal and the inaccurate, cost the rest, take the fastest sure gain.

Costs are joint over a site's passes, because quantized operands are shared between them. An assignment of
kernels to passes is admissible when it is better than bf16 twice over:

- as a whole: the passes that it converts gain `min_speedup`, their quantization included;
- each pass on its own: taking that pass back to bf16, all else equal, would lose `min_speedup` on it.

Each gain must also be sure: there is one even at the bad end of the difference's 90% interval (`Times.difference`), so that it
is sure at 95%. Of the admissible ones the fastest wins; bf16 is always one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from loka_sim.dispatch.candidates import Row, SiteShape, illegal, launches, operand_makers, shared_tensors
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.layout import Place
from loka_sim.dispatch.operands import TORCH, Toolbox
from loka_sim.dispatch.site_costs import SiteCosts, Sites, price
from perfmodel.kernels import KERNELS

FAST, NOT_WORTH_IT, UNSAFE, ILLEGAL = STATUSES = ("fast", "not_worth_it", "unsafe", "illegal")


class Accuracy(NamedTuple):
    """Predicted error of one pass under one kernel."""

    mere: float
    sqnr_db: float


Accuracies = Mapping[tuple[str, str], Accuracy]
"""Predicted error per (pass, FP8 kernel)."""


@dataclass(frozen=True)
class Policy:
    """What a decision must keep to.

    Attributes:
        max_mere: Mean element-wise relative error that an FP8 pass must stay below.
        min_speedup: Least predicted speedup over bf16, quantization included, of a site and of each pass.
    """

    max_mere: float = 0.2
    min_speedup: float = 1.05


class Candidate(NamedTuple):
    """One kernel that a pass was considered for.

    Attributes:
        kernel: Its name.
        illegal: Why the pass cannot run it; None when it can. The figures are None then.
        gemm_us: The GEMM alone.
        total: GEMM and the quantization that choosing it adds, the other passes as decided.
        accuracy: Predicted error; None for bf16.
    """

    kernel: str
    illegal: str | None = None
    gemm_us: float | None = None
    total: Time | None = None
    accuracy: Accuracy | None = None


@dataclass(frozen=True, eq=False)
class Explained:
    """What was considered for a pass, and why it runs what it runs.

    Attributes:
        costs: Of its site's assignments.
        place: What the site runs.
        axis: Which pass it is.
        status: Of its decision.
        added: What each kernel that it may run adds to the site, the other passes as decided.
        accuracies: Predicted errors.
        unsafe: FP8 kernels of passes that are not safe.
        reckless: What it would run were errors no matter.
        step_gain_us: What the whole step gains by the site's FP8, where that is why it has none.
        max_mere: The MERE that it must stay below.
        toolbox: FP8 kernels to choose from.
    """

    costs: SiteCosts
    place: Place
    axis: int
    status: str
    added: Sequence[Time]
    accuracies: Accuracies
    unsafe: frozenset[tuple[str, str]]
    reckless: str
    step_gain_us: float | None
    max_mere: float
    toolbox: Toolbox

    @property
    def _name(self) -> str:
        return self.costs.shape.names[self.axis]

    @property
    def _options(self) -> tuple[str, ...]:
        return self.costs.structure.options[self.axis]

    @property
    def _kernel(self) -> str:
        return self._options[self.place[self.axis]]

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Everything considered for the pass, bf16 first."""
        shape, name = self.costs.shape, self._name
        priced = dict(zip(self._options, zip(self.costs.gemm_us(self.axis), self.added, strict=True), strict=True))
        stays = shape.bf16()[name]
        return tuple(
            Candidate(kernel, None, *priced[kernel], self.accuracies.get((name, kernel)))
            if kernel in priced
            else Candidate(kernel, illegal(shape, name, kernel, self.toolbox))
            for kernel in (stays, *(other for other in self.toolbox.gemms if KERNELS[other].kind == KERNELS[stays].kind))
        )

    @cached_property
    def runner_up(self) -> Candidate | None:
        """The next best choice that is safe; None when there is none."""
        others = [c for c in self.candidates if c.total is not None and c.kernel != self._kernel]
        safe = [c for c in others if (self._name, c.kernel) not in self.unsafe]
        return min(safe, key=lambda c: (c.total, c.kernel), default=None)

    @cached_property
    def reason(self) -> str:
        """Why the pass runs what it runs, in words."""
        by_kernel = {candidate.kernel: candidate for candidate in self.candidates}
        bf16, runner_up = self.candidates[0].total, self.runner_up
        assert bf16 is not None
        if self.status == FAST:
            chosen = by_kernel[self._kernel]
            assert chosen.total is not None and chosen.accuracy is not None
            shared = shared_tensors(self.costs.shape, self.costs.kernels(self.place), self._name, self.toolbox)
            sharing = f"; shares the quantized {' and '.join(shared)} with another pass" if shared else ""
            return (
                f"adds {chosen.total.us:.1f} us with quantization where bf16 takes {bf16.us:.1f} us; "
                f"MERE {chosen.accuracy.mere:.3f} is below {self.max_mere:g}{sharing}"
            )
        if self.status == ILLEGAL:
            reasons = dict.fromkeys(c.illegal for c in self.candidates if c.illegal)
            groups = self.costs.shape.gemm(self._name)[3]
            return next(iter(reasons), f"{groups} GEMMs in one call: there is no FP8 kernel for batched calls to choose")
        if self.status == UNSAFE:
            faster = by_kernel[self.reckless]
            assert faster.accuracy is not None
            return f"{faster.kernel} would be faster, but its MERE {faster.accuracy.mere:.3f} is not below {self.max_mere:g}" + (
                "" if runner_up is None else f"; the best accurate one, {runner_up.kernel}, is not worth it"
            )
        if runner_up is None:
            least = min(c.accuracy.mere for c in self.candidates if c.accuracy is not None)
            return f"no FP8 kernel is surely faster, and none is accurate: the least MERE is {least:.3f}"
        place = list(self.place)
        place[self.axis] = self._options.index(runner_up.kernel)
        shortfall = self.costs.shortfall(tuple(place))
        assert runner_up.total is not None
        if shortfall is None and self.step_gain_us is not None:
            change = "longer" if self.step_gain_us <= 0 else "less, which is not enough,"
            return (
                f"{runner_up.kernel} would take {runner_up.total.us:.1f} us instead of {bf16.us:.1f} us by itself, but as "
                f"torch.compile fuses its quantization the whole step takes {abs(self.step_gain_us):.1f} us {change} with FP8 at "
                "such sites"
            )
        if shortfall is None:
            return f"the site is faster as decided than with {runner_up.kernel} here"
        return f"best FP8 kernel {runner_up.kernel}: {runner_up.total.us:.1f} us against {bf16.us:.1f} us; {shortfall}"


@dataclass(frozen=True)
class PassDecision:
    """What one pass runs, and why.

    Attributes:
        status: `fast`, `not_worth_it`, `unsafe` or `illegal`.
        kernel: What it runs.
        stays: What it would run in bf16.
        rows: What it launches: the GEMM, then its quantization and layout changes.
        makers: The kernel that each quantized tensor of x, w, g comes from, launched by this pass or another.
        predicted: Time of `rows`.
        bf16: Time of its GEMM in bf16.
        accuracy: Predicted error of the kernel; None for bf16.
        explained: Why, and what else was considered; found when it is asked for.
    """

    status: str
    kernel: str
    stays: str
    rows: tuple[Row, ...]
    makers: Mapping[str, str]
    predicted: Time
    bf16: Time
    accuracy: Accuracy | None
    explained: Explained = field(compare=False, repr=False)

    @property
    def speedup(self) -> float:
        """bf16 time over predicted time."""
        return self.bf16.us / self.predicted.us

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Everything considered, bf16 first."""
        return self.explained.candidates

    @property
    def runner_up(self) -> Candidate | None:
        """The next best choice; None when there is no other."""
        return self.explained.runner_up

    @property
    def reason(self) -> str:
        """Why, in words."""
        return self.explained.reason


def flat(launched: Mapping[str, tuple[Row, ...]]) -> tuple[Row, ...]:
    """All launches of a site, whatever the pass."""
    return tuple(row for rows in launched.values() for row in rows)


class Decider:
    """Decides sites; those that are alike but for their errors are priced once."""

    def __init__(self, times: Times, policy: Policy, toolbox: Toolbox = TORCH) -> None:
        """Start with nothing priced.

        Args:
            times: Predicted time of every row of `possible_rows` of the sites to come.
            policy: Limits.
            toolbox: FP8 kernels to choose from.
        """
        self.times, self.policy = times, policy
        self.toolbox = replace(toolbox, us=lambda row: times.of[row].us)
        self._costs: dict[SiteShape, SiteCosts] = {}

    def costs(self, shapes: Iterable[SiteShape]) -> list[SiteCosts]:
        """Costs of sites' assignments."""
        shapes = list(shapes)
        fresh = (shape for shape in shapes if shape not in self._costs)
        self._costs.update(price(fresh, self.times, self.toolbox, self.policy.min_speedup))
        return [self._costs[shape] for shape in shapes]

    def _inaccurate(self, accuracies: Accuracies) -> frozenset[tuple[str, str]]:
        """FP8 kernels of passes that are not safe."""
        most = self.policy.max_mere
        return frozenset(entry for entry, accuracy in accuracies.items() if not accuracy.mere < most)

    def assignments(self, sites: Sequence[tuple[SiteShape, Accuracies]]) -> list[dict[str, str]]:
        """The kernels of the fastest admissible assignment of each site."""
        costs = self.costs(shape for shape, _ in sites)
        places = _best(costs, [self._inaccurate(accuracies) for _, accuracies in sites])
        return [each.kernels(place) for each, place in zip(costs, places, strict=True)]

    def decide(
        self, sites: Sequence[tuple[SiteShape, Accuracies]], step_gain_us: Sequence[float | None] | None = None
    ) -> list[dict[str, PassDecision]]:
        """Decide what each pass of each site runs.

        Args:
            sites: The GEMMs of each at a batch, and the predicted error of every legal FP8 kernel of every pass.
            step_gain_us: Of a site that stays in bf16 for what the whole step gains by its FP8, that; None for others.

        Returns:
            Of each the decision per pass, in the order they run.
        """
        costs = self.costs(shape for shape, _ in sites)
        unsafe = [self._inaccurate(accuracies) for _, accuracies in sites]
        back = step_gain_us or [None] * len(sites)
        places = [
            place if us is None else each.structure.bf16
            for each, place, us in zip(costs, _best(costs, unsafe), back, strict=True)
        ]
        reckless = list(places)
        dared = [number for number, some in enumerate(unsafe) if some]
        for number, place in zip(dared, _best([costs[number] for number in dared]), strict=True):
            reckless[number] = place
        added = _added(costs, places)
        return [
            self._decision(*entry)
            for entry in zip(costs, (accuracies for _, accuracies in sites), unsafe, places, reckless, added, back, strict=True)
        ]

    def _decision(
        self,
        costs: SiteCosts,
        accuracies: Accuracies,
        unsafe: frozenset[tuple[str, str]],
        place: Place,
        dared: Place,
        added: list[Time],
        step_gain_us: float | None,
    ) -> dict[str, PassDecision]:
        """A site's decision per pass.

        Args:
            costs: Of its assignments.
            accuracies: Predicted errors.
            unsafe: FP8 kernels of passes that are not safe.
            place: What it runs.
            dared: What it would run were errors no matter.
            added: What each kernel of each pass adds to it.
            step_gain_us: What the whole step gains by its FP8, where that is why it has none.
        """
        shape, options = costs.shape, costs.structure.options
        decided, reckless, stays = costs.kernels(place), costs.kernels(dared), shape.bf16()
        launched, makers = launches(shape, decided, self.toolbox), operand_makers(shape, decided, self.toolbox)
        result, first = {}, 0
        for axis, name in enumerate(shape.names):
            kernel, number = decided[name], len(options[axis])
            if KERNELS[kernel].is_fp8:
                status = FAST
            elif number == 1:
                status = ILLEGAL
            elif (name, reckless[name]) in unsafe:
                status = UNSAFE
            else:
                status = NOT_WORTH_IT
            explained = Explained(
                costs, place, axis, status, added[first : first + number], accuracies, unsafe, reckless[name], step_gain_us,
                self.policy.max_mere, self.toolbox,
            )  # fmt: skip
            first += number
            result[name] = PassDecision(
                status, kernel, stays[name], launched[name], makers[name], self.times.interval(launched[name]),
                self.times.of[shape.row(name, stays[name])], accuracies.get((name, kernel)), explained,
            )  # fmt: skip
        return result


def decide_site(
    shape: SiteShape, times: Times, accuracies: Accuracies, policy: Policy, toolbox: Toolbox = TORCH
) -> dict[str, PassDecision]:
    """Decide what each pass of one site runs, see `Decider`."""
    return Decider(times, policy, toolbox).decide([(shape, accuracies)])[0]


def _best(costs: Sequence[SiteCosts], without: Sequence[frozenset[tuple[str, str]]] | None = None) -> list[Place]:
    """The fastest admissible assignment of each site, of those that run none of its (pass, kernel) in `without`."""
    result: list[Place] = [()] * len(costs)
    for sites, numbers in _together(costs).items():
        masks = None
        if without is not None and any(without[number] for number in numbers):
            masks = [
                np.array([[(name, kernel) not in without[number] for kernel in kernels] for number in numbers])
                for name, kernels in zip(sites.structure.names, sites.structure.options, strict=True)
            ]
        found = sites.best(np.array([costs[number].number for number in numbers]), masks)
        for number, place in zip(numbers, found.tolist(), strict=True):
            result[number] = tuple(place)
    return result


def _added(costs: Sequence[SiteCosts], places: Sequence[Place]) -> list[list[Time]]:
    """`Sites.added` of each site."""
    result: list[list[Time]] = [[]] * len(costs)
    for sites, numbers in _together(costs).items():
        found = sites.added(np.array([costs[number].number for number in numbers]), np.array([places[n] for n in numbers]))
        for number, each in zip(numbers, found, strict=True):
            result[number] = each
    return result


def _together(costs: Sequence[SiteCosts]) -> dict[Sites, list[int]]:
    """Places of those that are priced together."""
    found: dict[Sites, list[int]] = {}
    for number, each in enumerate(costs):
        found.setdefault(each.sites, []).append(number)
    return found

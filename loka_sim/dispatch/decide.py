"""The decision of one site: enumerate, drop the illegal and the inaccurate, cost the rest, take the fastest sure gain.

Costs are joint over a site's passes, because quantized operands are shared between them. An assignment of
kernels to passes is admissible when it is better than bf16 twice over:

- as a whole: the passes that it converts gain `min_speedup`, their quantization included;
- each pass on its own: taking that pass back to bf16, all else equal, would lose `min_speedup` on it.

Each gain must also be sure, see `Times.surely_less`. Of the admissible ones the fastest wins; bf16 is always one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from loka_sim.dispatch.candidates import FP8_KERNELS, Row, SiteShape, illegal, launches, legal_fp8, shared_tensors
from loka_sim.dispatch.cost import Time, Times
from perfmodel.kernels import KERNELS

FAST, NOT_WORTH_IT, UNSAFE, ILLEGAL = STATUSES = ("fast", "not_worth_it", "unsafe", "illegal")


@dataclass(frozen=True)
class Accuracy:
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
        capability: CUDA compute capability of the hardware.
    """

    max_mere: float = 0.2
    min_speedup: float = 1.05
    capability: tuple[int, int] = (9, 0)


@dataclass(frozen=True)
class Candidate:
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


@dataclass(frozen=True)
class PassDecision:
    """What one pass runs, and why.

    Attributes:
        status: `fast`, `not_worth_it`, `unsafe` or `illegal`.
        kernel: What it runs.
        rows: What it launches: the GEMM, then its quantization and layout changes.
        predicted: Time of `rows`.
        bf16: Time of its GEMM in bf16.
        accuracy: Predicted error of the kernel; None for bf16.
        reason: Why, in words.
        candidates: Everything considered, bf16 first.
        runner_up: The next best choice; None when there is no other.
    """

    status: str
    kernel: str
    rows: tuple[Row, ...]
    predicted: Time
    bf16: Time
    accuracy: Accuracy | None
    reason: str
    candidates: tuple[Candidate, ...]
    runner_up: Candidate | None

    @property
    def speedup(self) -> float:
        """bf16 time over predicted time."""
        return self.bf16.us / self.predicted.us


def flat(launched: Mapping[str, tuple[Row, ...]]) -> tuple[Row, ...]:
    """All launches of a site, whatever the pass."""
    return tuple(row for rows in launched.values() for row in rows)


class _Site:
    """One site's costs, each assignment priced once."""

    def __init__(self, shape: SiteShape, times: Times, accuracies: Accuracies, policy: Policy) -> None:
        self.shape, self.times, self.accuracies, self.policy = shape, times, accuracies, policy
        self.bf16 = shape.bf16()
        self.legal = {name: legal_fp8(shape, name, policy.capability) for name in shape.names}
        self._rows: dict[tuple[str, ...], tuple[Row, ...]] = {}
        self._us: dict[tuple[str, ...], float] = {}

    def rows(self, assignment: Mapping[str, str]) -> tuple[Row, ...]:
        key = tuple(assignment.values())
        if key not in self._rows:
            self._rows[key] = flat(launches(self.shape, assignment))
        return self._rows[key]

    def us(self, assignment: Mapping[str, str]) -> float:
        key = tuple(assignment.values())
        if key not in self._us:
            self._us[key] = self.times.sum(self.rows(assignment))
        return self._us[key]

    def is_accurate(self, name: str, kernel: str) -> bool:
        return not KERNELS[kernel].is_fp8 or self.accuracies[name, kernel].mere < self.policy.max_mere

    def gains(self, assignment: Mapping[str, str], without: Mapping[str, str]) -> tuple[float, bool]:
        """Speedup on the passes where two assignments differ, and whether the gain is sure.

        What the other passes cost is common to both and left out, so that a small pass beside a large one
        must still earn its own conversion.
        """
        saved = self.times.sum(
            Row(kernel, *self.shape.gemm(name)) for name, kernel in without.items() if kernel != assignment[name]
        )
        spent = self.us(assignment) - (self.us(without) - saved)
        speedup = saved / spent if spent > 0 else float("inf")
        return speedup, self.times.surely_less(self.rows(assignment), self.rows(without))

    def taken_back(self, assignment: Mapping[str, str], name: str) -> dict[str, str]:
        return {**assignment, name: self.bf16[name]}

    def shortfall(self, assignment: Mapping[str, str]) -> str | None:
        """Why an assignment is not admissible, in words; None when it is."""
        converted = [name for name, kernel in assignment.items() if KERNELS[kernel].is_fp8]
        tests = [("", self.bf16)] if converted else []
        if len(converted) > 1:
            tests += [(f"{name}: ", self.taken_back(assignment, name)) for name in converted]
        for label, without in tests:
            speedup, sure = self.gains(assignment, without)
            if speedup < 1.0:
                return f"{label}{speedup:.2f}x, slower than bf16 with its quantization"
            if speedup < self.policy.min_speedup:
                return f"{label}{speedup:.2f}x with its quantization is below the least speedup {self.policy.min_speedup:g}"
            if not sure:
                return f"{label}{speedup:.2f}x with its quantization, but the gain does not survive the prediction interval"
        return None

    def best(self, accurate_only: bool = True) -> dict[str, str]:
        """The fastest admissible assignment."""
        names = self.shape.names
        choices = [
            (self.bf16[name], *(k for k in self.legal[name] if not accurate_only or self.is_accurate(name, k))) for name in names
        ]
        # By name where times tie, so that the same costs always give the same decision.
        ranked = sorted((dict(zip(names, kernels, strict=True)) for kernels in product(*choices)),
                        key=lambda a: (self.us(a), tuple(a.values())))  # fmt: skip
        bf16_us = self.us(self.bf16)
        for assignment in ranked:
            if self.us(assignment) >= bf16_us:
                break
            if self.shortfall(assignment) is None:
                return assignment
        return dict(self.bf16)

    def candidate(self, name: str, kernel: str, decided: Mapping[str, str]) -> Candidate:
        reason = illegal(self.shape, name, kernel, self.policy.capability)
        if reason is not None:
            return Candidate(kernel, reason)
        gemm = Row(kernel, *self.shape.gemm(name))
        rest = {other: k for other, k in decided.items() if other != name}
        total = self.times.difference(self.rows({**decided, name: kernel}), flat(launches(self.shape, rest)))
        return Candidate(kernel, None, self.times.of[gemm].us, total, self.accuracies.get((name, kernel)))


def decide_site(shape: SiteShape, times: Times, accuracies: Accuracies, policy: Policy) -> dict[str, PassDecision]:
    """Decide what each pass of a site runs.

    Args:
        shape: The site's GEMMs at a batch.
        times: Predicted time of every row of `possible_rows(shape)`.
        accuracies: Predicted error of every legal FP8 kernel of every pass.
        policy: Limits.

    Returns:
        The decision per pass, in the order they run.
    """
    site = _Site(shape, times, accuracies, policy)
    decided, reckless = site.best(), site.best(accurate_only=False)
    launched = launches(shape, decided)
    result = {}
    for name in shape.names:
        kernel = decided[name]
        candidates = tuple(site.candidate(name, other, decided) for other in dict.fromkeys((site.bf16[name], *FP8_KERNELS)))
        if KERNELS[kernel].is_fp8:
            status = FAST
        elif not site.legal[name]:
            status = ILLEGAL
        elif not site.is_accurate(name, reckless[name]):
            status = UNSAFE
        else:
            status = NOT_WORTH_IT
        others = [c for c in candidates if c.total is not None and c.kernel != kernel and site.is_accurate(name, c.kernel)]
        runner_up = min(others, key=lambda c: (c.total, c.kernel), default=None)
        bf16 = times.of[Row(site.bf16[name], *shape.gemm(name))]
        predicted = times.interval(launched[name])
        result[name] = PassDecision(
            status, kernel, launched[name], predicted, bf16, accuracies.get((name, kernel)),
            _reason(site, name, status, decided, reckless, candidates, runner_up), candidates, runner_up,
        )  # fmt: skip
    return result


def _reason(
    site: _Site,
    name: str,
    status: str,
    decided: Mapping[str, str],
    reckless: Mapping[str, str],
    candidates: tuple[Candidate, ...],
    runner_up: Candidate | None,
) -> str:
    """Why a pass runs what it runs, in words."""
    by_kernel = {candidate.kernel: candidate for candidate in candidates}
    bf16 = by_kernel[site.bf16[name]].total
    assert bf16 is not None
    limit = site.policy.max_mere
    if status == FAST:
        chosen = by_kernel[decided[name]]
        assert chosen.total is not None and chosen.accuracy is not None
        tensors = shared_tensors(site.shape, decided, name)
        shared = f"; shares the quantized {' and '.join(tensors)} with another pass" if tensors else ""
        return (
            f"adds {chosen.total.us:.1f} us with quantization where bf16 takes {bf16.us:.1f} us; "
            f"MERE {chosen.accuracy.mere:.3f} is below {limit:g}{shared}"
        )
    if status == ILLEGAL:
        reasons = dict.fromkeys(c.illegal for c in candidates if c.illegal)
        return next(iter(reasons), "no FP8 kernel for this GEMM")
    if status == UNSAFE:
        chosen = by_kernel[reckless[name]]
        assert chosen.accuracy is not None
        return f"{chosen.kernel} would be faster, but its MERE {chosen.accuracy.mere:.3f} is not below {limit:g}" + (
            "" if runner_up is None else f"; the best accurate one, {runner_up.kernel}, is not worth it"
        )
    if runner_up is None:
        least = min(c.accuracy.mere for c in candidates if c.accuracy is not None)
        return f"no FP8 kernel is surely faster, and none is accurate: the least MERE is {least:.3f}"
    shortfall = site.shortfall({**decided, name: runner_up.kernel})
    assert runner_up.total is not None
    if shortfall is None:
        return f"the site is faster as decided than with {runner_up.kernel} here"
    return f"best FP8 kernel {runner_up.kernel}: {runner_up.total.us:.1f} us against {bf16.us:.1f} us; {shortfall}"

"""The steps of a what-if: bf16, what a user would do without it, the decision, each dense and whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from loka_sim.dispatch.baselines import BASELINES
from loka_sim.dispatch.candidates import operand_makers
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.operands import Toolbox
from loka_sim.dispatch.steps import RECIPE, SiteCost, Step, step
from loka_sim.dispatch.torchao_plan import convertible
from loka_sim.fp8_step import Converted, converted
from loka_sim.modelspec import ModelSpec
from loka_sim.step_plan import DECISION
from loka_sim.whole_step import Other, by_kind

if TYPE_CHECKING:
    from loka_sim.whatif import SiteDecision
    from perfmodel.model import PerfModel


class Runs(NamedTuple):
    """What runs a way of assigning kernels, as far as its launches' times go.

    Attributes:
        times: Of each launch by itself.
        between: Of each as it runs in a whole step; None where that is not known.
        off: By which share GEMMs may be off together there, see `whole_step.gemms_in_step`.
        runner: `dispatch.steps.RECIPE`, `EXPORT` or `RUNTIME`.
    """

    times: Times
    between: Times | None
    off: Mapping[bool, float]
    runner: str


@dataclass(frozen=True)
class StepMaker:
    """Steps of one model under whichever assignment.

    Attributes:
        spec: The model, at the batch asked for.
        costs: Of each site.
        others: What stands beside the GEMMs in bf16; nothing where the specification does not say.
        timing: Times of GEMMs, and the GPU that they are of.
        runs: By step's name, or `recipe` for the baselines.
        max_mere: Limit of a safe pass.
    """

    spec: ModelSpec
    costs: Sequence[SiteCost]
    others: tuple[Other, ...]
    timing: PerfModel
    runs: Mapping[str, Runs]
    max_mere: float

    @cached_property
    def _beside(self) -> Mapping[str, Time] | None:
        return by_kind(self.others) if self.others else None

    def made(
        self, name: str, label: str, description: str, assignments: Sequence[Mapping[str, str]], toolbox: Toolbox
    ) -> tuple[Step, Converted | None]:
        """A step, and what stands beside its GEMMs.

        Args:
            name: Of the step, as the next two.
            label: Of the step.
            description: Of the step.
            assignments: Kernel per pass of each site.
            toolbox: What makes operands.
        """
        key = name, tuple(tuple(assignment.items()) for assignment in assignments)
        if key not in self._made:
            self._made[key] = self._make(name, assignments, toolbox)
        summed, found = self._made[key]
        return replace(summed, label=label, description=description), found

    @cached_property
    def _made(self) -> dict[tuple[str, tuple[tuple[tuple[str, str], ...], ...]], tuple[Step, Converted | None]]:
        return {}

    def _make(self, name: str, assignments: Sequence[Mapping[str, str]], toolbox: Toolbox) -> tuple[Step, Converted | None]:
        found = None
        times, between, off, runner = self.runs.get(name, self.runs[RECIPE])
        if self.others:
            shapes = [cost.shape for cost in self.costs]
            makers = [operand_makers(*entry, toolbox) for entry in zip(shapes, assignments, strict=True)]
            found = converted(self.spec, self.timing.hardware, shapes, assignments, makers, runner)
        inside = [] if found is None else [site.name in found.sites for site in self.spec.sites]
        fp8 = None if found is None else found.by_kind
        summed = step(
            name, "", "", self.costs, assignments, times, self.max_mere, toolbox,
            self._beside, inside, fp8, between, off, runner,
        )  # fmt: skip
        return summed, found

    def told(self, assignments: Sequence[Mapping[str, str]], toolbox: Toolbox) -> Step:
        """The step as what runs the decision has it, under other assignments."""
        return self.made(DECISION, "", "", assignments, toolbox)[0]


def model_steps(
    maker: StepMaker, sites: Sequence[SiteDecision], toolbox: Toolbox, torch: Toolbox
) -> tuple[tuple[Step, ...], Converted | None]:
    """Step times of bf16, the baselines and the decision, and what stands beside the GEMMs of the last.

    Args:
        maker: Of the model's steps.
        sites: Decisions.
        toolbox: What they chose from.
        torch: torch's kernels, which baselines and torchao run.
    """
    steps = [
        maker.made(
            baseline.name, baseline.label, baseline.description,
            [baseline.assignment(site, cost.shape, torch) for site, cost in zip(maker.spec.sites, maker.costs, strict=True)],
            torch,
        )[0]
        for baseline in BASELINES
    ]  # fmt: skip
    if any(site.torchao for site in sites):
        described = "the decision for torchao: among torch's tensorwise and rowwise kernels, linears alone"
        run = [_in_torchao(site) for site in sites]
        steps.append(maker.made("torchao", "decision for torchao", described, run, torch)[0])
    chosen = [{name: entry.kernel for name, entry in site.passes.items()} for site in sites]
    described = "each pass on its own: fastest accurate kernel where the gain is sure, bf16 elsewhere"
    decided, fp8 = maker.made(DECISION, "loka-sim's decision", described, chosen, toolbox)
    return (*steps, decided), fp8


def _in_torchao(site: SiteDecision) -> dict[str, str]:
    """What torchao runs of a decision."""
    if not convertible(site.site.name, site.site.op, site.site.weight):
        return site.shape.bf16()
    return {name: decided.kernel for name, decided in (site.torchao or site.passes).items()}

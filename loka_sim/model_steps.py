"""The steps of a what-if: bf16, what a user would do without it, the decision, each dense and whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from loka_sim.dispatch.baselines import BASELINES
from loka_sim.dispatch.candidates import operand_makers
from loka_sim.dispatch.cost import Times
from loka_sim.dispatch.decide import Decider
from loka_sim.dispatch.operands import Toolbox
from loka_sim.dispatch.steps import RECIPE, SiteCost, Step, step
from loka_sim.dispatch.torchao_plan import convertible
from loka_sim.fp8_step import Converted, converted
from loka_sim.modelspec import ModelSpec
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


def model_steps(
    spec: ModelSpec,
    costs: Sequence[SiteCost],
    sites: Sequence[SiteDecision],
    decider: Decider,
    torch: Toolbox,
    others: tuple[Other, ...],
    timing: PerfModel,
    runs: Mapping[str, Runs],
) -> tuple[tuple[Step, ...], Converted | None]:
    """Step times of bf16, the baselines and the decision, and what stands beside the GEMMs of the last.

    Args:
        spec: The model, at the batch asked for.
        costs: Of each site.
        sites: Decisions.
        decider: That made them.
        torch: torch's kernels, which baselines and torchao run.
        others: What stands beside the GEMMs in bf16; nothing where the specification does not say.
        timing: Times of GEMMs, and the GPU that they are of.
        runs: By step's name, or `recipe` for the baselines.
    """
    beside = by_kind(others) if others else None

    def made(
        name: str, label: str, description: str, assignments: Sequence[Mapping[str, str]], toolbox: Toolbox
    ) -> tuple[Step, Converted | None]:
        found = None
        times, between, off, runner = runs.get(name, runs[RECIPE])
        if others:
            shapes = [cost.shape for cost in costs]
            makers = [operand_makers(*entry, toolbox) for entry in zip(shapes, assignments, strict=True)]
            found = converted(spec, timing.hardware, shapes, assignments, makers, runner)
        inside = [] if found is None else [site.name in found.sites for site in spec.sites]
        fp8 = None if found is None else found.by_kind
        summed = step(
            name, label, description, costs, assignments, times, decider.policy.max_mere, toolbox,
            beside, inside, fp8, between, off, runner,
        )  # fmt: skip
        return summed, found

    steps = [
        made(
            baseline.name, baseline.label, baseline.description,
            [baseline.assignment(site, cost.shape, torch) for site, cost in zip(spec.sites, costs, strict=True)], torch,
        )[0]
        for baseline in BASELINES
    ]  # fmt: skip
    if any(site.torchao for site in sites):
        described = "the decision for torchao: among torch's tensorwise and rowwise kernels, linears alone"
        run = [_in_torchao(site) for site in sites]
        steps.append(made("torchao", "decision for torchao", described, run, torch)[0])
    chosen = [{name: entry.kernel for name, entry in site.passes.items()} for site in sites]
    described = "each pass on its own: fastest accurate kernel where the gain is sure, bf16 elsewhere"
    decided, fp8 = made("decision", "loka-sim's decision", described, chosen, decider.toolbox)
    return (*steps, decided), fp8


def _in_torchao(site: SiteDecision) -> dict[str, str]:
    """What torchao runs of a decision."""
    if not convertible(site.site.name, site.site.op, site.site.weight):
        return site.shape.bf16()
    return {name: decided.kernel for name, decided in (site.torchao or site.passes).items()}

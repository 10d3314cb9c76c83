"""The kernels of a step with FP8 in it: what torch.compile makes of quantization and of what stands beside it.

Of sites whose GEMMs a specification's loops name, and whose operands torch's own quantizers make. Quantizers of other
libraries are kernels of their own, and stay so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from loka_sim import step_loops
from loka_sim.dispatch.candidates import Assignment, SiteShape
from loka_sim.dispatch.cost import Time
from loka_sim.dispatch.steps import EXPORT, RECIPE, RUN_AS, RUNTIME
from loka_sim.fusion import RawGroup, kernels, measured
from loka_sim.loops import Lowered
from loka_sim.modelspec import Dim, Fused, ModelSpec
from loka_sim.quantized_loops import FP32, FP64, ROUNDED, Assigned, Taken, quantized
from loka_sim.whole_step import Other, by_kind, of_step
from perfmodel.kernels import KERNELS, library_of

if TYPE_CHECKING:
    from perfmodel.hardware import HardwareSpec

Makers = Mapping[str, Mapping[str, str]]
"""Per pass and quantized tensor of x, w, g, the kernel that it comes from, see `dispatch.candidates.operand_makers`."""


@dataclass(frozen=True)
class Converted:
    """A step with FP8 in it, beside its GEMMs.

    Attributes:
        others: Every kernel, quantization among them.
        sites: Those whose quantization is among them.
        runner: What runs it, see `taken`.
    """

    others: tuple[Other, ...]
    sites: frozenset[str]
    runner: str = EXPORT

    @property
    def by_kind(self) -> Mapping[str, Time]:
        """Total of the forward's and backward's kernels."""
        return by_kind(self.others)


SCALES = {RECIPE: ROUNDED, EXPORT: FP64, RUNTIME: FP32}
"""How rows' scales are found by what runs a step: torchao's rowwise recipe rounds them, what `export` writes does not."""


def taken(shape: SiteShape, assignment: Assignment, makers: Makers, runner: str = EXPORT) -> dict[str, dict[str, Taken]]:
    """What each FP8 pass of a site takes of x, w and g that torch quantizes.

    Args:
        shape: The site.
        assignment: Kernel per pass.
        makers: What quantizes.
        runner: What runs it: torchao's linears multiply some GEMMs' scales behind them (`RUN_AS`), `dispatch.runtime` none.
    """
    found: dict[str, dict[str, Taken]] = {}
    for name, kernel in assignment.items():
        spec = KERNELS[kernel]
        for (tensor, turned), takes in zip(shape.reads(name), (spec.takes_a, spec.takes_b), strict=True):
            if takes is not None and library_of(makers[name][tensor]) == "torch":
                after = runner != RUNTIME and kernel in RUN_AS
                found.setdefault(name, {})[tensor] = Taken(takes, turned, *shape.tensor(tensor), after, SCALES[runner])
    return found


def converted(
    spec: ModelSpec,
    hardware: HardwareSpec,
    shapes: Sequence[SiteShape],
    assignments: Sequence[Assignment],
    makers: Sequence[Makers],
    runner: str = EXPORT,
) -> Converted | None:
    """What stands beside the GEMMs of a step whose passes run these kernels; None where that is not known, or is bf16's.

    Args:
        spec: The model, at the batch asked for.
        hardware: The GPU.
        shapes: Of each site.
        assignments: Of each site.
        makers: Of each site.
        runner: As `taken` takes it.
    """
    if not spec.loops:
        return None
    step = _loops(spec.loops, spec.batch, writes_more(assignments, runner))
    named = {loop.site for loop in step.scheduled}
    assigned: dict[tuple[str, str], dict[str, Taken]] = {}
    sites = []
    for site, shape, assignment, made in zip(spec.sites, shapes, assignments, makers, strict=True):
        passes = taken(shape, assignment, made, runner)
        if passes and all((site.name, name) in named for name in passes):
            sites.append(site.name)
            assigned |= {(site.name, name): operands for name, operands in passes.items()}
    if not sites:
        return None
    found = of_step(spec, hardware, kernels=fused(step, assigned))
    return Converted(found, frozenset(sites), runner) if found else None


def writes_more(assignments: Iterable[Assignment], runner: str) -> bool:
    """Whether a step's backward is the one of products that are scaled behind them, see `loka_sim.step_loops`."""
    return runner == RECIPE and any(kernel in RUN_AS for assignment in assignments for kernel in assignment.values())


def fused(step: Lowered, assigned: Assigned) -> list[Fused]:
    """The kernels of a step some of whose GEMMs are FP8, those that are alike in one entry."""
    return [
        _fused(phase, raw, count)
        for phase, lowered in step_loops.phases(quantized(step, assigned)).items()
        for raw, count in Counter(measured(lowered, kernels(lowered))).items()
    ]


def _fused(phase: str, raw: RawGroup, count: int) -> Fused:
    kept, reduced = map(Dim, raw.space)
    read, written, unordered = map(Dim, (raw.read_bytes, raw.written_bytes, raw.unordered_bytes))
    return Fused(phase, raw.kind, raw.label, kept, reduced, read, written, unordered, raw.uneven, count)


@lru_cache(maxsize=4)
def _loops(lines: tuple[str, ...], batch: int, scaled: bool) -> Lowered:
    return step_loops.read(lines, batch, scaled)

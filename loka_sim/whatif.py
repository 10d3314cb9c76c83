"""The what-if: where FP8 is safe and fast in a model, and what it is worth, from predictions alone.

A request walks down once and the answer walks up once: the model's GEMMs, every kernel time that a choice
may need in one question to the time model, every error once to the error model, one decision per distinct
site, and the step times of the decision and of what a user would do without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loka_sim.calibration import load as load_calibration
from loka_sim.cluster import cluster_of
from loka_sim.communication import Communication, Parallel, communication
from loka_sim.dispatch.accuracy import Errors
from loka_sim.dispatch.around import Around, around
from loka_sim.dispatch.candidates import Row, SiteShape, possible_rows
from loka_sim.dispatch.cost import Times
from loka_sim.dispatch.decide import Accuracies, Decider, PassDecision, Policy
from loka_sim.dispatch.operands import DEFAULT_LIBRARIES, Toolbox, parse_libraries
from loka_sim.dispatch.steps import EXPORT, RECIPE, RUNTIME, SiteCost, Step
from loka_sim.dispatch.torchao_plan import convertible, expressible
from loka_sim.errors import UserError, expected_of_lower_floors
from loka_sim.fp8_step import Converted
from loka_sim.garbage import uncollected
from loka_sim.model_steps import Runs, StepMaker, model_steps
from loka_sim.modelspec import ModelSpec, Site
from loka_sim.sources import Distributions, distributions, model_spec
from loka_sim.step_plan import timelines
from loka_sim.taken_back import taken_back
from loka_sim.whole_step import Other, as_run_by, borrowed, gemms_in_step, of_step
from numerics.sizes import is_whole
from perfmodel import hardware as hardware_module
from perfmodel.kernels import KERNELS
from perfmodel.timeline import Timeline
from perfmodel.topology import Cluster

if TYPE_CHECKING:
    from perfmodel.model import PerfModel

MAX_SIZE = 2**31 - 1
"""Largest dimension of a GEMM: CUDA libraries take 32-bit sizes."""

MAX_ELEMENTS = 2**37
"""Largest operand or result of a GEMM: 256 GiB in bf16, more than a GPU holds."""


@dataclass(frozen=True)
class Settings:
    """What was asked.

    Attributes:
        model: As given.
        batch: Samples per GPU.
        gpus: Number of GPUs of the training job.
        hardware: Name of the hardware whose timings are used.
        statistics: As given; None for the default.
        mods: Changes to the model.
        max_mere: Mean element-wise relative error that an FP8 pass must stay below.
        min_speedup: Least speedup, quantization included, for FP8.
        calibration: Folder of a calibration; None for the shipped models as they are.
        libraries: Whose FP8 kernels were to choose from.
        cluster: Preset or file of the hosts and the network between them; None for those that the hardware usually stands in.
        dense: How the dense part is spread: ddp, fsdp or hsdp.
        exchange: What embeddings travel in.
    """

    model: str
    batch: int
    gpus: int
    hardware: str
    statistics: str | None
    mods: tuple[str, ...]
    max_mere: float
    min_speedup: float
    calibration: str | None = None
    libraries: tuple[str, ...] = DEFAULT_LIBRARIES
    cluster: str | None = None
    dense: str = "ddp"
    exchange: str = "bf16"


@dataclass(frozen=True)
class SiteDecision:
    """One site with its decisions.

    Attributes:
        site: The site.
        shape: Its GEMMs at the batch.
        passes: Decision per pass, in the order they run.
        around: Kernels around its GEMMs.
        around_us: Their predicted time.
        statistics: Its distributions were found by `exact` name, by `role`, or are `assumed`.
        torchao: What its passes run where torchao's conversion must, decided anew; None where it can run `passes`, or can
            convert no pass of the site.
        step_gain_us: Where FP8 would gain by itself and the site stays in bf16, what the whole step would gain by
            it at such sites (`taken_back`): less than nothing, or not enough; None elsewhere.
    """

    site: Site
    shape: SiteShape
    passes: Mapping[str, PassDecision]
    around: Around
    around_us: float
    statistics: str
    torchao: Mapping[str, PassDecision] | None = None
    step_gain_us: float | None = None

    @property
    def bf16_us(self) -> float:
        """Its passes in bf16."""
        return sum(decided.bf16.us for decided in self.passes.values())

    @property
    def predicted_us(self) -> float:
        """Its passes as decided, quantization included."""
        return sum(decided.predicted.us for decided in self.passes.values())

    @property
    def gain_us(self) -> float:
        """What its decision saves over bf16."""
        return self.bf16_us - self.predicted_us


@dataclass(frozen=True)
class WhatIf:
    """The answer.

    Attributes:
        settings: What was asked.
        spec: The model, at the batch asked for.
        hardware: Name, capability, ceilings, fingerprint of the time model, its held-out error.
        distributions: Where the distributions came from.
        sites: Decisions, in forward order.
        steps: Step times: bf16, the baselines, the decision last.
        communication: Collectives of one step; None for one GPU.
        times: Every kernel time predicted.
        toolbox: FP8 kernels that were to choose from: of the libraries asked for those that the time model knows.
        parallel: How the job is spread over GPUs.
        others: What the step holds beside the sites' GEMMs; nothing where the specification does not say.
        converted: The same of the step as decided, its quantization among them; None where it is not known.
        runs: What runs the decision, and its launches' times then; None for these alone.
        host_step_us: How fast the calibration's host is, or the cluster's, see `host_time.called`; None where that is not known.
        borrowed: What of `others` was measured on another GPU, see `whole_step.borrowed`.
    """

    settings: Settings
    spec: ModelSpec
    hardware: Mapping[str, Any]
    distributions: Distributions
    sites: tuple[SiteDecision, ...]
    steps: tuple[Step, ...]
    communication: Communication | None
    times: Times
    toolbox: Toolbox
    parallel: Parallel = Parallel()
    others: tuple[Other, ...] = ()
    converted: Converted | None = None
    runs: Runs | None = None
    host_step_us: float | None = None
    borrowed: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def run(self) -> Times:
        """Times of launches as what runs the decision has them."""
        return self.times if self.runs is None else self.runs.times

    def as_run(self, times: Times) -> Times:
        """Other times of launches by themselves, as what runs the decision has them."""
        return times if self.runs is None else as_run_by(self.runs.runner, times, hardware_module.load(self.settings.hardware))

    @property
    def decision(self) -> Step:
        """The decision's step time."""
        return self.steps[-1]

    @property
    def pays(self) -> bool:
        """Whether FP8 is worth it anywhere."""
        return self.decision.fp8_passes > 0

    @cached_property
    def timelines(self) -> Mapping[str, Timeline]:
        """One training step on one of the GPUs, compute and communication: `bf16` and as decided (`decision`)."""
        return timelines(self)

    @uncollected()
    def to_dict(self) -> dict[str, Any]:
        """The `--json` document, see schemas/whatif.schema.json."""
        from loka_sim.document import document

        return document(self)


@uncollected()
def whatif(
    model: str | ModelSpec,
    *,
    batch: int | None = None,
    gpus: int = 1,
    hardware: str = "h200",
    statistics: str | None = None,
    mods: str | Sequence[str] = (),
    max_mere: float = 0.2,
    min_speedup: float = 1.05,
    calibration: str | Path | None = None,
    libraries: str | Sequence[str] = DEFAULT_LIBRARIES,
    cluster: str | Path | Cluster | None = None,
    dense: str = "ddp",
    exchange: str = "bf16",
) -> WhatIf:
    """Decide which GEMMs of a model run in FP8, with which kernel, and predict what that is worth.

    Args:
        model: Zoo name, spec file, `package.module:callable`, or a `ModelSpec`.
        batch: Samples per GPU; None for the batch that the model was captured at.
        gpus: GPUs of the training job, `batch` samples on each.
        hardware: Whose timings to use.
        statistics: Shipped name or folder; None for the zoo model's own, and for other models an assumption
            of standard normal values that the answer states.
        mods: Changes to the model: no_bias, blocknorm, hardswish, or all.
        max_mere: Predicted mean element-wise relative error that an FP8 pass must stay below.
        min_speedup: Least predicted speedup over bf16, quantization included.
        calibration: Folder that `loka-sim validate --gpu` or `collect --gpu` wrote: both models as one machine corrected them.
        libraries: Whose FP8 kernels to choose from: names of `dispatch.operands.LIBRARIES`, or `all`. By default torch's, which
            is what `export` can hand to a training job.
        cluster: Hosts and the network between them: a preset of `perfmodel.topology` (hgx_h100, hgx_h200) or a file with its
            fields; None for the preset of the hardware, if there is one.
        dense: How the dense part is spread over GPUs: `ddp` (replicated), `fsdp` (sharded over all), `hsdp` (sharded inside
            each host).
        exchange: What pooled embeddings and their gradients travel in: bf16, fp16 or fp8_rowwise.

    Raises:
        UserError: an argument is wrong; one line that names it and the mend.
        DataError: data are missing or do not fit the model.
    """
    _check(gpus, max_mere, min_speedup)
    chosen = parse_libraries(libraries)
    spec, names = model_spec(model, mods)
    size = spec.batch if batch is None else batch
    _check_sizes(spec, size)
    spec = spec.at_batch(size)
    name = model if isinstance(model, str) else spec.name
    measured = None if calibration is None else load_calibration(calibration)
    if measured is not None:
        hardware = measured.hardware
    folder = None if calibration is None else str(calibration)
    parallel = Parallel(gpus, cluster_of(cluster, hardware), dense, exchange)
    place = cluster.name if isinstance(cluster, Cluster) else None if cluster is None else str(cluster)
    host_step_us = None if measured is None else measured.host_step_us
    if host_step_us is None and parallel.cluster is not None:
        host_step_us = parallel.cluster.host_step_us
    settings = Settings(
        name, size, gpus, hardware, statistics, names, max_mere, min_speedup, folder, chosen, place, dense, exchange
    )
    import perfmodel

    with expected_of_lower_floors():
        timing = perfmodel.load(hardware, None if measured is None else measured.path)
    known = distributions(spec, statistics, names)
    exchanged = communication(spec, parallel, timing)
    major, minor = timing.hardware.capability
    policy = Policy(max_mere, min_speedup)
    toolbox, torch = (Toolbox.of(names, timing.manifest["kernels"], (major, minor)) for names in (chosen, ("torch",)))
    shapes = [SiteShape.of(site, size) for site in spec.sites]
    arounds = [around(site, size) for site in spec.sites]
    rows: dict[Row, None] = {row: None for beside in arounds for row in beside.rows}
    for shape in dict.fromkeys(shapes):
        rows.update(dict.fromkeys(possible_rows(shape, toolbox)))
        if "torch" not in chosen:  # the baselines and torchao run its kernels
            rows.update(dict.fromkeys(possible_rows(shape, torch)))
    times = Times.predict(timing, rows)
    errors = Errors(toolbox, {} if measured is None else measured.mere_factors)
    exported = as_run_by(EXPORT, times, timing.hardware)
    run, runner = (exported, EXPORT) if chosen == DEFAULT_LIBRARIES else (times, RUNTIME)
    decider, torchao = Decider(run, policy, toolbox), Decider(exported, policy, expressible(torch))
    kinds, accuracies = _kinds(spec, shapes, known, errors)
    others = of_step(spec, timing.hardware)
    runs = {RECIPE: _runs(as_run_by(RECIPE, times, timing.hardware), bool(others), timing, RECIPE)}
    runs["decision"] = _runs(run, bool(others), timing, runner)
    runs["torchao"] = runs["decision"] if runner == EXPORT else _runs(exported, bool(others), timing, EXPORT)
    costs = [SiteCost(*entry) for entry in zip(shapes, arounds, accuracies, strict=True)]
    maker = StepMaker(spec, costs, others, timing, runs, max_mere)
    decided = _decide(kinds, accuracies, decider, torchao, maker)
    sites = tuple(
        SiteDecision(site, shape, passes, beside, times.sum(beside.rows), known.how(site.name), anew, step_gain_us)
        for site, shape, (passes, anew, step_gain_us), beside in zip(spec.sites, shapes, decided, arounds, strict=True)
    )
    steps, fp8 = model_steps(maker, sites, decider.toolbox, torch)
    return WhatIf(
        settings, spec, _hardware(timing), known, sites, steps, exchanged, times, decider.toolbox, parallel, others, fp8,
        runs["decision"], host_step_us, borrowed(timing.hardware) if others else {},
    )  # fmt: skip


def _runs(times: Times, beside: bool, timing: PerfModel, runner: str) -> Runs:
    """Times of launches alone, and where what runs beside the GEMMs is known, as they run between these."""
    if not beside:
        return Runs(times, None, {}, runner)
    between, off = gemms_in_step(times.of, timing.hardware)
    return Runs(times, Times(between, times.outside), off, runner)


def _check(gpus: int, max_mere: float, min_speedup: float) -> None:
    if not is_whole(gpus):
        raise UserError(f"--gpus {gpus} is no positive whole number; give the number of GPUs of the training job")
    for name, limit, usual in (("max-mere", max_mere, 0.2), ("min-speedup", min_speedup, 1.05)):
        if isinstance(limit, bool) or not isinstance(limit, Real) or not 0 < limit < float("inf"):
            raise UserError(f"--{name} {limit} is not a positive number; {usual} is the usual limit")


def _check_sizes(spec: ModelSpec, batch: int) -> None:
    if not is_whole(batch):
        raise UserError(f"--batch {batch} is no positive whole number; give the samples per GPU")
    for site in spec.sites:
        for name, gemm in site.passes.items():
            sizes = (*gemm.shape(batch), gemm.groups.at(batch))
            if min(sizes) < 1:
                raise UserError(f"site {site.name}: {name} is {sizes} at batch {batch}; every size must be positive")
            # What is too large whatever the batch is the specification's to mend.
            least = (*gemm.shape(1), gemm.groups.at(1))
            for size, limit, alone, what in (
                (max(sizes), MAX_SIZE, max(least), "a dimension"),
                (_largest(sizes), MAX_ELEMENTS, _largest(least), "an operand or result"),
            ):
                if size > limit:
                    unit = "" if what == "a dimension" else " elements"
                    mend = f"write a smaller size (at most {limit})" if alone > limit else "give a smaller batch"
                    raise UserError(f"--batch {batch}: site {site.name} has {what} of {_short(size)}{unit}; {mend}")
    if not spec.sites:
        without = f" beside what is not accounted for ({spec.left_out})" if spec.unaccounted else " at all"
        raise UserError(f"{spec.name} has no GEMM{without}; nothing can be decided")


def _short(size: int) -> str:
    """A number, by its power of ten where it is too long to be read."""
    return str(size) if size < 10**20 else f"10^{len(str(size)) - 1}"


def _largest(sizes: Sequence[int]) -> int:
    """Elements of the largest matrix of a GEMM of (m, n, k, groups)."""
    m, n, k, groups = sizes
    return groups * max(m * n, m * k, n * k)


_Decisions = tuple[dict[str, PassDecision], dict[str, PassDecision] | None, float | None]
"""Of a site: as decided, as torchao must run it where it cannot run that, and `SiteDecision.step_gain_us`."""


_Kind = tuple[SiteShape, int, bool]
"""What sites are decided by: their shape, statistics, whether torchao can convert them. Those that are alike are decided once."""


def _kinds(
    spec: ModelSpec, shapes: Sequence[SiteShape], known: Distributions, errors: Errors
) -> tuple[list[_Kind], list[Accuracies]]:
    """Of each site its kind, and the predicted errors of its FP8 kernels."""
    distributions = [known.of(site.name) for site in spec.sites]
    accuracies = errors.of_sites(list(zip(shapes, distributions, strict=True)))
    kinds = [
        (shape, id(statistics), convertible(site.name, site.op, site.weight))
        for site, shape, statistics in zip(spec.sites, shapes, distributions, strict=True)
    ]
    return kinds, accuracies


def _decide(
    kinds: Sequence[_Kind], accuracies: Sequence[Accuracies], decider: Decider, torchao: Decider, maker: StepMaker
) -> list[_Decisions]:
    """Decisions per site: each by itself, without what the whole step would be longer for."""
    alike = {kind: (kind[0], found) for kind, found in zip(kinds, accuracies, strict=True)}
    decided = dict(zip(alike, decider.decide(list(alike.values())), strict=True))
    told, least = partial(maker.told, toolbox=decider.toolbox), decider.policy.min_speedup
    back = taken_back(kinds, decided, told, least) if maker.others else {}
    again = [kind for kind in alike if kind in back]
    decided |= zip(again, decider.decide([alike[kind] for kind in again], [back[kind] for kind in again]), strict=True)
    again = [kind for kind, passes in decided.items() if kind[2] and _beyond(passes, torchao.toolbox)]
    anew = dict(zip(again, torchao.decide([alike[kind] for kind in again]), strict=True))
    return [(decided[kind], anew.get(kind), back.get(kind)) for kind in kinds]


def _beyond(passes: Mapping[str, PassDecision], torchao: Toolbox) -> bool:
    """Whether a site's decision is more than torchao can run."""
    gemms = (decided.kernel for decided in passes.values() if KERNELS[decided.kernel].is_fp8)
    launched = (row.kernel for decided in passes.values() for row in decided.rows)
    return any(gemm not in torchao.gemms for gemm in gemms) or not all(kernel.startswith("torch/") for kernel in launched)


def _hardware(timing: PerfModel) -> dict[str, Any]:
    spec = timing.hardware
    return {
        "name": spec.name,
        "capability": list(spec.capability),
        "peak_bf16_tflops": spec.peak_bf16_tflops,
        "peak_fp8_tflops": spec.peak_fp8_tflops,
        "copy_bandwidth_tbs": spec.copy_bandwidth_tbs,
        "perfmodel_fingerprint": timing.fingerprint,
        "held_out": _held_out(timing.manifest),
    }


def _held_out(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """How far the time model was off on shapes that it had not seen, weighted by rows, and what its GEMM choices cost."""
    accuracies = {kernel: entry["held_out"] for kernel, entry in manifest["kernels"].items()}
    rows = sum(entry["n"] for entry in accuracies.values())
    regret = manifest.get("choice_regret")  # a user's own sweep may have one GEMM kernel a shape
    return {
        "mape_percent": 100 * sum(entry["mape"] * entry["n"] for entry in accuracies.values()) / rows,
        "regret_percent": None if regret is None else 100 * regret["geomean"],
        "kernels": {kernel: 100 * entry["mape"] for kernel, entry in accuracies.items()},
        "fresh": {kernel: entry["fresh"] for kernel, entry in manifest["kernels"].items() if "fresh" in entry},
        "command": manifest["command"],
    }

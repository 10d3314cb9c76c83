"""A training step under a dispatch table: the timeline of what a file says, not of what would be decided now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from loka_sim.calibration import load as load_calibration
from loka_sim.dispatch.candidates import Row, illegal, launches, launches_said, operand_makers
from loka_sim.dispatch.cost import Times
from loka_sim.dispatch.operands import LIBRARIES, Toolbox
from loka_sim.dispatch.steps import EXPORT, RUNTIME
from loka_sim.dispatch.table import load
from loka_sim.errors import DataError, expected_of_lower_floors
from loka_sim.fp8_step import converted
from loka_sim.step_plan import pieces_of, timeline
from loka_sim.whole_step import as_run_by, gemms_in_step
from perfmodel.timeline import Timeline

if TYPE_CHECKING:
    from loka_sim.whatif import SiteDecision, WhatIf


def table_timeline(answer: WhatIf, path: str | Path) -> Timeline:
    """The schedule of a step whose sites run what a dispatch table says, at the what-if's batch and on its GPUs.

    Args:
        answer: The what-if of the same model.
        path: The table, or a run folder that holds one.

    Raises:
        DataError: the table is damaged, of another model, or names a kernel that a site cannot run or that has no time.
    """
    import perfmodel

    table = load(path)
    mend = "make one with `loka-sim whatif MODEL --out DIR`"
    if table["model"]["fingerprint"] != answer.spec.fingerprint:
        raise DataError(
            f"--table {path} is of {table['model']['name']} ({table['model']['fingerprint']}), "
            f"not of {answer.spec.name} ({answer.spec.fingerprint}); {mend}"
        )
    said = {site["name"]: site["passes"] for site in table["sites"]}
    settings = answer.settings
    calibration = None if settings.calibration is None else load_calibration(settings.calibration).path
    with expected_of_lower_floors():
        model = perfmodel.load(settings.hardware, calibration)
    major, minor = model.hardware.capability
    torch, every = (Toolbox.of(names, model.manifest["kernels"], (major, minor)) for names in (("torch",), LIBRARIES))
    rows: dict[str, dict[str, tuple[Row, ...]]] = {}
    assignments: list[dict[str, str]] = []
    made: list[dict[str, dict[str, str]]] = []
    for site in answer.sites:
        passes = said.get(site.site.name, {})
        missing = [name for name in site.shape.names if name not in passes]
        if missing:
            raise DataError(f"--table {path} says nothing of site {site.site.name}, {missing[0]}; {mend}")
        kernels = {name: str(passes[name]["kernel"]) for name in site.shape.names}
        # What makes the operands is said too, but by older versions, which knew torch's quantizers alone.
        makers = {name: passes[name].get("quantizers", {}) for name in kernels}
        for name, kernel in kernels.items():
            for one in {kernel, *makers[name].values()} - set(model.manifest["kernels"]):
                raise DataError(f"--table {path}: {one} has no time on {settings.hardware}; choose another calibration")
            if reason := illegal(site.shape, name, kernel, every):
                raise DataError(f"--table {path}: site {site.site.name}, {name} cannot run {kernel} at this batch: {reason}")
        try:
            rows[site.site.name] = launches_said(site.shape, kernels, makers)
        except KeyError:
            rows[site.site.name] = launches(site.shape, kernels, torch)
            makers = operand_makers(site.shape, kernels, torch)
        assignments.append(kernels)
        made.append(makers)
    wanted = {row for passes in rows.values() for launched in passes.values() for row in launched}
    times = {**answer.times.of, **Times.predict(model, sorted(wanted - set(answer.times.of))).of}

    def launched(site: SiteDecision, name: str) -> list[Row]:
        gemm, *quantize = rows[site.site.name][name]
        return [*quantize, gemm]

    shapes = [site.shape for site in answer.sites]
    fp8 = None
    runner = EXPORT if all(row.kernel.startswith("torch/") for row in wanted) else RUNTIME
    times = dict(as_run_by(runner, Times(times), model.hardware).of)
    if answer.others:
        fp8 = converted(answer.spec, model.hardware, shapes, assignments, made, runner)
        times, _ = gemms_in_step(times, model.hardware)
    return timeline(answer, pieces_of(answer, launched, times, fp8))

"""One model's step on several numbers of GPUs, side by side: what communication leaves of the speedup, and of each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import loka_sim
from loka_sim.calibration import load as load_calibration
from loka_sim.communication import communication, describe
from loka_sim.errors import UserError, expected_of_lower_floors
from loka_sim.step_plan import BF16, DECISION, timelines

if TYPE_CHECKING:
    from loka_sim.whatif import WhatIf
    from perfmodel.timeline import Timeline

SCHEMA_VERSION = 1
KIND = "loka-sim/scaling"


def scaling(answer: WhatIf, gpus: Sequence[int]) -> list[WhatIf]:
    """The same decision on other numbers of GPUs, each with the same batch: only what is exchanged changes.

    Args:
        answer: The what-if, on any number of GPUs.
        gpus: Numbers of GPUs.

    Raises:
        UserError: a number that cannot be.
    """
    import perfmodel

    settings = answer.settings
    calibration = None if settings.calibration is None else load_calibration(settings.calibration).path
    with expected_of_lower_floors():
        timing = perfmodel.load(settings.hardware, calibration)
    found = []
    for number in gpus:
        parallel = replace(answer.parallel, gpus=number)
        exchanged = communication(answer.spec, parallel, timing)
        found.append(replace(answer, settings=replace(settings, gpus=number), parallel=parallel, communication=exchanged))
    return found


def scaling_document(answers: Sequence[WhatIf]) -> dict[str, Any]:
    """The document of `loka-sim step --gpus N,N,...` (schemas/scaling.schema.json)."""
    from loka_sim.document import command, rounded
    from loka_sim.statements import statements

    first = answers[0]
    if all(answer.communication is not None and answer.communication.missing for answer in answers):
        raise UserError(f"no number of GPUs has a figure: {answers[0].communication.missing}")  # type: ignore[union-attr]
    words = command(replace(first.settings, gpus=1))
    words[1:2] = ["step"]
    numbers = ",".join(str(answer.settings.gpus) for answer in answers)
    # One GPU whose host launches the kernels one by one, as those of several GPUs do.
    alone = timelines(replace(first, communication=None), called=True)
    return rounded(
        {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "loka_sim_version": loka_sim.__version__,
            "command": " ".join([*words, "--gpus", numbers]),
            "model": {"name": first.spec.name, "fingerprint": first.spec.fingerprint, "batch": first.settings.batch},
            "hardware": first.hardware["name"],
            "cluster": describe(first.parallel.cluster),
            "dense": first.settings.dense,
            "exchange": first.settings.exchange,
            "rows": [_row(answer, alone) for answer in answers],
            "statements": [{"level": level, "text": said} for level, said in statements(answers[-1])],
        }
    )  # fmt: skip


def _row(answer: WhatIf, alone: Mapping[str, Timeline]) -> dict[str, Any]:
    found = answer.communication
    row: dict[str, Any] = {"gpus": answer.settings.gpus, "basis": None if found is None else found.basis}
    if found is not None and found.missing:
        return {**row, "missing": found.missing}
    made = answer.timelines if found else alone
    decided, bf16 = made[DECISION], made[BF16]
    low, high = decided.interval()
    total = decided.total_us
    return {
        **row,
        "step_us": total,
        "step_low_us": low,
        "step_high_us": high,
        "bf16_step_us": bf16.total_us,
        "speedup": bf16.total_us / total,
        "communication_us": sum(call.time.us for call in found.calls) if found else 0.0,
        "exposed_us": decided.exposed_us,
        "slowed_us": decided.slowed_us,
        "efficiency": alone[DECISION].total_us / total,
        "samples_per_s": answer.settings.gpus * answer.settings.batch / total * 1e6,
    }

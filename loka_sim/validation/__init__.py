"""`loka-sim validate --gpu`: what a GPU says of both models, and what it changes.

The model's GEMMs are timed first, while nothing else runs; then numerics, beside the other kernels' times, site by site in the
order in which they would change decisions; what is left goes by the model as refined so far. From all that comes a
calibration, a new decision, and the whole model's step, which compiles meanwhile, under both. Every stage leaves its result in
the folder, so that a killed validation goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.fingerprint import shipped
from loka_sim.dispatch.operands import DEFAULT_LIBRARIES, parse_libraries
from loka_sim.errors import DataError, UserError
from loka_sim.validation.budget import Budget
from loka_sim.validation.measuring import read_json
from loka_sim.validation.request import Request
from loka_sim.validation.run import REQUEST, Validation
from perfmodel.hardware import DEFAULT, available, load


def require_gpu() -> None:
    """Raises `DataError` where there is no GPU that FP8 kernels run on."""
    import torch

    mend = "without one, `loka-sim whatif` predicts, and a folder made on such a machine serves it by --calibration DIR"
    if not torch.cuda.is_available():
        raise DataError(f"no CUDA GPU here: run this on a Hopper machine (H100, H200); {mend}")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        name = torch.cuda.get_device_name()
        raise DataError(f"{name} has compute capability {capability[0]}.{capability[1]}, the kernels need 9.0 (Hopper); {mend}")


def validate(
    model: str = "wukong",
    *,
    out: str | Path,
    batch: int | None = None,
    mods: str | Sequence[str] = (),
    statistics: str | None = None,
    minutes: float = 10.0,
    seed: int = 0,
    hardware: str | None = None,
    command: Sequence[str] = (),
    libraries: str | Sequence[str] = DEFAULT_LIBRARIES,
) -> dict[str, Any]:
    """Measure, compare with both models, refine them, decide again; everything is left in `out`.

    Args:
        model: Zoo name, `package.module:callable`, or a spec file (of which there are no tensors and no step to run).
        out: Folder: a new one, or one that a validation of the same request was begun in.
        batch: Samples per GPU; None for the model's own.
        mods: Changes to a zoo model.
        statistics: As in `whatif`.
        minutes: Time to spend, at least 1.
        seed: Of fresh shapes and samples.
        hardware: Whose shipped timings are validated and refined; None for those of this machine's GPU, or of the nearest
            that there are. A folder that was begun goes on with its own.
        command: The command line, for the record.
        libraries: As in `whatif`; kernels of these and of torch are measured.

    Returns:
        The document, see schemas/validation.schema.json. `out` is a calibration then.

    Raises:
        UserError: an argument is wrong, or the folder holds something else.
        DataError: there is no GPU that can do it, or a measuring process failed.
    """
    if not minutes >= 1:
        raise UserError(f"--minutes {minutes:g} is too short to measure anything; give at least 1, 10 is usual")
    budget = Budget(60 * minutes)
    # Without a GPU the arguments are looked at all the same, before that is said.
    whose = hardware or _begun(Path(out)) or shipped() or DEFAULT
    first = Request(model, batch or 0, (), whose, statistics, minutes, seed, libraries=parse_libraries(libraries))
    from loka_sim.mods import parse_mods

    first = replace(first, mods=parse_mods(mods))
    if batch is None:
        from loka_sim.sources import model_spec

        first = replace(first, batch=model_spec(model, first.mods)[0].batch)
    before = first.answer()
    require_gpu()
    _say_whose(whose, hardware is not None)
    return Validation(first, Path(out), before, list(command), budget).run()


def _begun(out: Path) -> str | None:
    """The hardware of the validation that was begun in a folder."""
    found = (read_json(out / REQUEST) or {}).get("hardware")
    return found if found in available() else None


def _say_whose(hardware: str, asked: bool) -> None:
    """Whose predictions are held against this machine's GPU, on stderr; nothing where they were asked for and are its own."""
    import torch

    gpu, shipped_gpu = torch.cuda.get_device_name(), load(hardware).gpu
    if gpu != shipped_gpu:
        print(f"predictions for {hardware} ({shipped_gpu}) are held against a {gpu}", file=sys.stderr, flush=True)
    elif not asked:
        print(f"predictions for {hardware}, this machine's GPU, are held against it", file=sys.stderr, flush=True)

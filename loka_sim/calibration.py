"""A calibration: what one machine's measurements say of both models, as a folder that `whatif --calibration` takes.

- manifest.json: what it is, of which machine, for which hardware, made by which command
- perfmodel/: the time model, refined (`perfmodel.refine`) or fitted anew (`perfmodel.fit`); collectives.parquet in it, where
  collectives were measured, takes the place of the shipped one
- hardware.json: only of a machine that the package has no data of: its ceilings
- numerics.json: factors on predicted errors, per kernel and pass
- timings/: the rows that it was made from, with their sidecars
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loka_sim.errors import DataError, UserError
from loka_sim.files import write_text_atomic

SCHEMA_VERSION = 1
KIND = "loka-sim/calibration"
MANIFEST, NUMERICS = "manifest.json", "numerics.json"
HOST = "host_step_us"
"""Of a machine's fingerprint."""


@dataclass(frozen=True)
class Calibration:
    """A calibration that was read.

    Attributes:
        path: Its folder.
        hardware: Name of the hardware that it is for.
        machine: Fingerprint of the machine that was measured.
        mere_factors: Kernel -> pass -> factor on the predicted MERE.
    """

    path: Path
    hardware: str
    machine: Mapping[str, Any]
    mere_factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def host_step_us(self) -> float | None:
        """Microseconds that its host took for the step that tells a host's speed (`hil.host.step_us`); None in older ones."""
        found = self.machine.get(HOST)
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) and 0 < found < 1e6 else None


def load(path: str | Path) -> Calibration:
    """Read a calibration folder; its time model is read by `perfmodel.load`.

    Raises:
        UserError: there is no such folder, or it is no calibration.
        DataError: it is damaged, or of another schema version.
    """
    path = Path(path)
    mend = "make one with `loka-sim validate --gpu` or `loka-sim collect --gpu`"
    if not path.is_dir():
        raise UserError(f"--calibration {path} is no folder; {mend}")
    if not (path / MANIFEST).is_file():
        raise UserError(f"--calibration {path} holds no {MANIFEST}; {mend}")
    manifest = _read(path / MANIFEST)
    if manifest.get("kind") != KIND:
        raise UserError(f"--calibration {path} is a {manifest.get('kind', 'folder of something else')}; {mend}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise DataError(f"{path / MANIFEST}: schema_version {manifest.get('schema_version')} is not {SCHEMA_VERSION}; {mend}")
    hardware = manifest.get("hardware")
    if not isinstance(hardware, str):
        raise DataError(f"{path / MANIFEST}: hardware is missing; {mend}")
    machine = manifest.get("machine") or {}
    if not isinstance(machine, dict):
        raise DataError(f"{path / MANIFEST}: machine is no table of what was measured on; {mend}")
    factors = _read(path / NUMERICS).get("mere_factors") if (path / NUMERICS).is_file() else {}
    if not _are_factors(factors):
        raise DataError(f"{path / NUMERICS}: mere_factors is no table of kernel, pass and positive factor; {mend}")
    assert isinstance(factors, dict)
    return Calibration(path, hardware, machine, factors)


def save_manifest(
    path: Path, hardware: str, machine: Mapping[str, Any], command: list[str], made_from: Mapping[str, Any]
) -> None:
    """Write the manifest: last, so that a folder without one is known to be unfinished.

    Args:
        path: The calibration's folder.
        hardware: Name of the hardware that it is for.
        machine: Fingerprint.
        command: As words.
        made_from: Figures about the rows.
    """
    import loka_sim

    document = {
        "schema_version": SCHEMA_VERSION, "kind": KIND, "loka_sim_version": loka_sim.__version__, "hardware": hardware,
        "command": command, "machine": dict(machine), "made_from": dict(made_from),
    }  # fmt: skip
    write_text_atomic(path / MANIFEST, json.dumps(document, indent=1) + "\n")


def save_numerics(path: Path, factors: Mapping[str, Mapping[str, float]], summary: Any) -> None:
    """Write the factors on predicted errors and what they were found on."""
    document = {"schema_version": SCHEMA_VERSION, "mere_factors": factors, "found_on": summary}
    write_text_atomic(path / NUMERICS, json.dumps(document, indent=1) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; check the folder") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is damaged; make the calibration again") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} is damaged; make the calibration again")
    return found


def _are_factors(found: Any) -> bool:
    return isinstance(found, dict) and all(
        isinstance(passes, dict)
        and all(isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6 for value in passes.values())
        for passes in found.values()
    )

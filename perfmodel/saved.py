"""Time models on disk: the shipped ones, and calibration folders that a user's own machine taught."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfmodel import hardware as hardware_module
from perfmodel.data_folder import data_folder
from perfmodel.hardware import HardwareSpec
from perfmodel.model import PerfModel
from perfmodel.pairs import pair_file, pairs_in

SCHEMA_VERSION = 2
# Kinds of the manifests of a calibration folder and of a refinement in it.
CALIBRATION, REFINEMENT = "loka-sim/calibration", "loka-sim/time-refinement"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is missing or is no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; copy the calibration folder whole")
    try:
        document = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError):
        document = None
    if not isinstance(document, dict):
        raise ValueError(f"{path} is truncated or no JSON object; copy the calibration folder again")
    return document


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name first: whoever reads meanwhile, or finds it after a crash, sees the old or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(content)
    os.replace(part, path)


def check_version(path: Path, document: dict[str, Any], version: int) -> None:
    """Refuse a file of another schema version."""
    if document.get("schema_version") != version:
        raise ValueError(
            f"{path} has schema version {document.get('schema_version')!r}, and this loka-sim reads {version}; "
            "make the calibration again, or use the loka-sim that wrote it"
        )


def read_spec(path: Path) -> HardwareSpec:
    """A hardware specification from a file in the layout of `data/<hardware>/hardware.json`.

    Raises:
        ValueError: the file is missing, damaged or lacks a field.
    """
    try:
        return HardwareSpec.of(read_json(path))
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}; see data/h200/hardware.json for the layout") from None


def _open(spec: HardwareSpec, folder: Path) -> PerfModel:
    """The fit in a folder; every file that its manifest names must be there."""
    path = folder / "manifest.json"
    manifest = read_json(path)
    check_version(path, manifest, SCHEMA_VERSION)
    if manifest.get("hardware") != spec.name or "kernels" not in manifest:
        raise ValueError(f"{path} is no time model of {spec.name}; it says hardware {manifest.get('hardware')!r}")
    model = PerfModel(spec, folder, manifest)
    for name in [*map(pair_file, pairs_in(manifest)), *model.kernel_files]:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing; copy the folder whole")
    return model


def load(hardware: str = "h200", calibration: Path | None = None) -> PerfModel:
    """The performance model of a GPU.

    Args:
        hardware: A name of `perfmodel.hardware.available()`, or with a calibration that holds a full fit its hardware's.
        calibration: A folder with what the user's own machine taught: `perfmodel/` in it is either a refinement
            (`perfmodel.refinement.Refinement.save`) or a full fit (`python -m perfmodel.fit --timings`), which comes with
            `hardware.json` beside it.

    Raises:
        ValueError: there are no data for that hardware; or the calibration is none, is for other hardware, of another
            schema version, incomplete or damaged.
        FileNotFoundError: the models folder is incomplete.
    """
    if calibration is not None:
        return replace(_calibrated(hardware, Path(calibration)), calibration=Path(calibration))
    spec = hardware_module.load(hardware)
    folder = data_folder() / hardware / "models"
    if not (folder / "manifest.json").is_file():
        raise FileNotFoundError(
            f"{folder / 'manifest.json'} is missing; fit it with: python -m perfmodel.fit --hardware {hardware}"
        )
    return _open(spec, folder)


def _calibrated(hardware: str, calibration: Path) -> PerfModel:
    """The model of a calibration folder, of either kind."""
    folder = calibration / "perfmodel"
    top = calibration / "manifest.json"
    if not (folder / "manifest.json").is_file():
        raise ValueError(
            f"{calibration} is no calibration: {folder / 'manifest.json'} is missing; "
            "make one with: loka-sim validate --gpu --out DIR"
        )
    if top.is_file() and read_json(top).get("kind") != CALIBRATION:
        raise ValueError(f"{top} is no calibration's manifest; its kind is {read_json(top).get('kind')!r}, not {CALIBRATION!r}")
    document, own = read_json(folder / "manifest.json"), calibration / "hardware.json"
    spec = read_spec(own) if own.is_file() or document.get("kind") != REFINEMENT else None
    if spec is not None and spec.name != hardware:
        raise ValueError(f"{calibration} was made for {spec.name}, not {hardware}; name it with --hardware {spec.name}")
    if document.get("kind") == REFINEMENT:
        from perfmodel.refinement import Refinement

        # Another GPU's times may be those of a known one, corrected: it keeps its own name and ceilings.
        base = load(hardware if spec is None else str(document.get("hardware")))
        refined = Refinement.load(calibration, base).model
        return refined if spec is None else replace(refined, hardware=spec)
    assert spec is not None
    return _open(spec, folder)

"""Hardware specifications, read from `data/<name>/hardware.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from perfmodel.data_folder import data_folder

FILE = "hardware.json"
DEFAULT = "h200"
"""The hardware that is meant where none is named."""


@dataclass(frozen=True)
class HardwareSpec:
    """What a GPU can reach, as measured; each figure's origin stands in the file's `sources`.

    Attributes:
        name: Key, also the folder under `data/`.
        gpu: As `nvidia-smi` names it.
        capability: CUDA compute capability, (major, minor).
        peak_bf16_tflops: Dense bf16 GEMM ceiling in TFLOP/s.
        peak_fp8_tflops: Dense FP8 GEMM ceiling in TFLOP/s.
        copy_bandwidth_tbs: Read plus written bytes of a large copy, in TB/s.
        l2_bytes: L2 cache size in bytes.
        multiprocessors: Streaming multiprocessors.
        like: A shipped GPU by whose costs of a launch (`perfmodel.memory_costs`) this one's kernels are learned.
    """

    name: str
    gpu: str
    capability: tuple[int, int]
    peak_bf16_tflops: float
    peak_fp8_tflops: float
    copy_bandwidth_tbs: float
    l2_bytes: int
    multiprocessors: int
    like: str | None = None

    @classmethod
    def of(cls, document: dict[str, Any]) -> HardwareSpec:
        """From a file's content.

        Raises:
            KeyError: a field is missing; it is named.
        """
        values = {field.name: document[field.name] for field in fields(cls) if field.default is MISSING}
        return cls(**{**values, "capability": tuple(values["capability"])}, like=document.get("like"))


def available() -> list[str]:
    """Hardware names that have data."""
    return sorted(path.parent.name for path in data_folder().glob(f"*/{FILE}"))


def load(name: str) -> HardwareSpec:
    """The specification called `name`.

    Raises:
        ValueError: there are no data for it; the message lists what there is.
    """
    if name not in available():
        raise ValueError(f"hardware {name!r} has no data; choose one of: {', '.join(available())}")
    return HardwareSpec.of(json.loads((data_folder() / name / FILE).read_text()))


def nearest(
    capability: Sequence[int], *, name: str = "", gpu: str = "", copy_bandwidth_tbs: float | None = None, having: str = FILE
) -> str | None:
    """The shipped GPU whose data serve another GPU best, by name; None where none of its compute capability has any.

    Of those of its capability that of the same name, or that `nvidia-smi` names alike; else the one whose memory is nearest in
    speed, or the first where that is not known.

    Args:
        capability: Of the other GPU, as in `HardwareSpec`, as all that follows.
        name: Of it.
        gpu: Of it.
        copy_bandwidth_tbs: Of it.
        having: A file below `data/<name>/` without which a GPU's data are of no use.
    """
    shipped = [load(known) for known in available() if (data_folder() / known / having).is_file()]
    alike = [spec for spec in shipped if spec.capability == tuple(capability)]
    same = [spec for spec in alike if spec.name == name] or [spec for spec in alike if spec.gpu == gpu]
    alike = same or alike
    if copy_bandwidth_tbs is not None:
        alike.sort(key=lambda spec: abs(math.log(spec.copy_bandwidth_tbs / copy_bandwidth_tbs)))
    return alike[0].name if alike else None


def serving(spec: HardwareSpec, having: str) -> str | None:
    """The shipped GPU whose file of this name serves a GPU: itself where it has one, else the `nearest`."""
    return nearest(spec.capability, name=spec.name, gpu=spec.gpu, copy_bandwidth_tbs=spec.copy_bandwidth_tbs, having=having)


def fitted(spec: HardwareSpec, file: str, version: int) -> tuple[dict[str, Any], str] | None:
    """What the file of `data/<name>/models` says that serves a GPU, and which GPU it is of; None where there is none.

    Args:
        spec: The GPU.
        file: Name of a JSON file.
        version: Its schema version.

    Raises:
        ValueError: the file is of another schema version.
    """
    like = serving(spec, f"models/{file}")
    if like is None:
        return None
    path = data_folder() / like / "models" / file
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("schema_version") != version:
        raise ValueError(f"{path} has schema version {document.get('schema_version')!r}; this loka-sim reads {version}")
    return document, like

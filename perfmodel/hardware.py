"""Hardware specifications, read from `data/<name>/hardware.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from perfmodel.data_folder import data_folder


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
    """

    name: str
    gpu: str
    capability: tuple[int, int]
    peak_bf16_tflops: float
    peak_fp8_tflops: float
    copy_bandwidth_tbs: float
    l2_bytes: int
    multiprocessors: int


def available() -> list[str]:
    """Hardware names that have data."""
    return sorted(path.parent.name for path in data_folder().glob("*/hardware.json"))


def load(name: str) -> HardwareSpec:
    """The specification called `name`.

    Raises:
        ValueError: there are no data for it; the message lists what there is.
    """
    path = data_folder() / name / "hardware.json"
    if name not in available():
        raise ValueError(f"hardware {name!r} has no data; choose one of: {', '.join(available())}")
    document = json.loads(path.read_text())
    values = {field.name: document[field.name] for field in fields(HardwareSpec)}
    return HardwareSpec(**{**values, "capability": tuple(values["capability"])})

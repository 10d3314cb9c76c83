"""Which machine a measurement was made on: GPU, driver, clocks, power, library versions."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

_QUERY = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


def gpu_state(index: int = 0) -> dict[str, float | str]:
    """What `nvidia-smi` reports now: name, driver, clocks in MHz, power in W, temperature in C.

    Raises:
        FileNotFoundError: there is no `nvidia-smi`, hence no NVIDIA driver.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits", "-i", str(index)]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    units = {
        "name": "gpu", "driver_version": "driver", "clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz",
        "clocks.max.sm": "max_sm_mhz", "power.draw": "power_w", "power.limit": "power_limit_w",
        "temperature.gpu": "temperature_c",
    }  # fmt: skip
    state: dict[str, float | str] = {}
    for key, value in zip(_QUERY, line.split(", "), strict=True):
        try:
            state[units[key]] = float(value) if key not in ("name", "driver_version") else value
        except ValueError:
            state[units[key]] = value
    return state


def has_gpu() -> bool:
    """Whether there is a CUDA GPU; where there is none stderr says so."""
    import torch

    found = torch.cuda.is_available()
    if not found:
        print("no CUDA GPU here: run this on a Hopper machine", file=sys.stderr)
    return found


def shipped() -> str | None:
    """The hardware whose shipped data serve this machine's GPU best, by name; None without a GPU or data of any like it."""
    import torch

    from perfmodel.hardware import nearest

    if not torch.cuda.is_available():
        return None
    return nearest(torch.cuda.get_device_capability(), gpu=torch.cuda.get_device_name())


def fingerprint() -> dict[str, Any]:
    """GPU, driver, clocks, and the versions of everything that chooses or runs a kernel."""
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        **gpu_state(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }

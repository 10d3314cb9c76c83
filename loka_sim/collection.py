"""`loka-sim collect --gpu`: a GPU's own sweep and time model, from nothing, for a GPU that the package has no data of.

GEMMs, memory-bound kernels and, on a host of several GPUs, collectives are measured; the time model is fitted to them. Each
part goes on where a killed run left it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loka_sim import calibration
from loka_sim.errors import DataError, UserError
from loka_sim.files import write_text_atomic
from loka_sim.validation import measuring, require_gpu

if TYPE_CHECKING:
    import pandas

# Parts of the time that the sweeps may take; the fit has the rest.
SHARES = {"gemm": 0.4, "memory": 0.35, "collectives": 0.1}
HARDWARE = "hardware.json"


def collect(out: str | Path, *, minutes: float = 28.0, name: str | None = None, command: Sequence[str] = ()) -> dict[str, Any]:
    """Measure this machine's GPU and fit the time model to it.

    Args:
        out: Folder of the calibration: a new one, or one that was begun.
        minutes: Time to spend, at least 3.
        name: What to call the hardware; None for the GPU's own name (`NVIDIA H100 80GB HBM3` -> `h100-80gb-hbm3`).
        command: The command line, for the record.

    Returns:
        What was made: hardware, rows per family, and the model's accuracy on held-out shapes.

    Raises:
        UserError: an argument is wrong, or the folder holds something else.
        DataError: there is no GPU that can do it, or a measuring process failed.
    """
    out = Path(out)
    if not minutes >= 3:
        raise UserError(f"--minutes {minutes:g} is too short for a sweep; give at least 3, 28 is usual")
    timings = out / "timings"
    if out.is_dir() and any(out.iterdir()) and not timings.is_dir():
        raise UserError(f"--out {out} holds other files; choose a new folder")
    require_gpu()
    import torch

    from hil.fingerprint import fingerprint

    machine = fingerprint()
    hardware = name or _slug(machine["gpu"])
    started = time.monotonic()
    timings.mkdir(parents=True, exist_ok=True)
    workers = min(measuring.MOST_WORKERS, max(1, (os.cpu_count() or 1) - 1))
    for family, some in (("gemm", 1), ("memory", workers)):
        _say(f"sweep of {family} kernels ...")
        share = f"{minutes * SHARES[family]:.3f}"
        arguments = [family, "--out", str(timings), "--minutes", share, "--workers", str(some), "--kernels", "torch/*", "loka/*"]
        measuring.run("hil.collect", arguments, accept=(0, 1))
    if torch.cuda.device_count() > 1:
        _say("collectives ...")
        count, share = torch.cuda.device_count(), f"{minutes * SHARES['collectives']:.3f}"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        measuring.run("hil.collectives", ["--out", str(timings), "--minutes", share], launcher=launcher)
    rows = measuring.timings(timings)
    if rows.empty:
        raise DataError(f"nothing was measured within {minutes:g} minutes; give more with --minutes")
    spec = hardware_of(hardware, machine, rows)
    write_text_atomic(out / HARDWARE, json.dumps(spec, indent=1) + "\n")
    _say("fitting the time model ...")
    shutil.rmtree(out / "perfmodel", ignore_errors=True)
    arguments = ["--timings", str(timings), "--hardware-spec", str(out / HARDWARE), "--out", str(out / "perfmodel")]
    measuring.run("perfmodel.fit", arguments)
    calibration.save_manifest(out, hardware, machine, list(command), {"timings": len(rows)})
    manifest = measuring.read_json(out / "perfmodel" / "manifest.json") or {}
    return {
        "schema_version": 1, "kind": "loka-sim/collection", "hardware": hardware, "folder": str(out), "machine": machine,
        "seconds": time.monotonic() - started, "rows": {str(k): int(v) for k, v in rows["kernel"].value_counts().items()},
        "held_out": {kernel: entry["held_out"] for kernel, entry in manifest.get("kernels", {}).items()},
    }  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def hardware_of(name: str, machine: dict[str, Any], rows: pandas.DataFrame) -> dict[str, Any]:
    """A GPU's specification from what was measured on it, each figure with its source (see `perfmodel.hardware`).

    Args:
        name: What to call it.
        machine: Its fingerprint.
        rows: Measured rows.

    Raises:
        DataError: no bf16 or FP8 GEMM, or no memory-bound kernel, was measured.
    """
    import numpy as np

    from perfmodel.kernels import KERNELS
    from perfmodel.roofline import flops, moved_bytes

    def best(what: str, kernels: list[str], amount: Any, among: pandas.DataFrame = rows) -> float:
        some = among[among["kernel"].isin(kernels)]
        if some.empty:
            raise DataError(f"no {what} kernel was measured; run the sweep again with more --minutes")
        rates = [
            amount(KERNELS[str(kernel)], *(np.array([float(size)]) for size in sizes))[0] / us / 1e6
            for kernel, *sizes, us in some[["kernel", "m", "n", "k", "groups", "p50_us"]].itertuples(index=False)
        ]
        return float(max(rates))

    fp8 = [n for n, spec in KERNELS.items() if spec.kind == "gemm" and spec.is_fp8]
    pointwise = [n for n, spec in KERNELS.items() if spec.kind == "pointwise"]
    major, minor = machine["capability"].split(".")
    # What stays in the L2 moves faster than memory does: a bandwidth is of what does not fit.
    large = rows[rows["m"] * rows["k"] * 4 > 2 * machine["l2_bytes"]]
    bandwidth = best("pointwise", pointwise, moved_bytes, large if large["kernel"].isin(pointwise).any() else rows)
    return {
        "schema_version": 1, "name": name, "gpu": machine["gpu"], "capability": [int(major), int(minor)],
        "peak_bf16_tflops": round(best("bf16 GEMM", ["torch/bf16"], flops), 1),
        "peak_fp8_tflops": round(best("FP8 GEMM", fp8, flops), 1), "copy_bandwidth_tbs": round(bandwidth, 2),
        "l2_bytes": machine["l2_bytes"], "multiprocessors": machine["multiprocessors"],
        "sources": {
            "peak_bf16_tflops": "fastest torch/bf16 row of the sweep", "peak_fp8_tflops": "fastest FP8 row of the sweep",
            "copy_bandwidth_tbs": "fastest pointwise row of the sweep beyond twice the L2, or of all where none is",
            "l2_bytes": "reported by the CUDA driver", "multiprocessors": "reported by the CUDA driver",
        },
    }  # fmt: skip

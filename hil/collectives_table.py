"""The table of measured collectives and its sidecar, written whole or not at all after every series."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from hil.collectives_calls import Case
from hil.files import write_atomic

NAME = "collectives"
METHOD = "the slowest rank's CUDA-graph replay, less the spacers; results checked in the same run; see hil/collectives.py"
_KEYS = [field.name for field in fields(Case)]


class Table:
    """Rows measured so far, and the runs that measured them; column `run` says which, from 0."""

    def __init__(self, folder: Path, rows: pd.DataFrame, runs: list[dict[str, Any]]) -> None:
        """Keep them; `open` reads them."""
        self._folder, self._rows, self._runs = folder, rows, runs

    @classmethod
    def open(cls, folder: Path, device: torch.device, arguments: list[str], spacer_us: float) -> Table:
        """What the folder holds, with a run of this machine begun.

        Args:
            folder: Where the table is or will be.
            device: What is measured on.
            arguments: The command line's.
            spacer_us: What was taken off every sample of a collective.

        Raises:
            ValueError: the table there is of another layout or of another GPU.
        """
        rows, runs = pd.DataFrame(columns=_KEYS), []
        path = folder / f"{NAME}.parquet"
        if path.is_file():
            rows = pd.read_parquet(path)
            if not {*_KEYS, "run"} <= set(rows.columns):
                raise ValueError(f"{path} is of an older layout; move it away or give another --out")
            runs = json.loads((folder / f"{NAME}.json").read_text())["runs"]
        run = {**describe(device, arguments), "spacer_us": spacer_us}
        for earlier in runs:
            if earlier["gpu"] != run["gpu"]:
                raise ValueError(f"{path} was measured on {earlier['gpu']}, this is {run['gpu']}; give another --out")
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, rows, [*runs, run])

    @property
    def keys(self) -> set[Case]:
        """Cases that have a row."""
        return {Case(**{str(key): value for key, value in row.items()}) for row in self._rows[_KEYS].to_dict("records")}

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Append rows of the present run, and write."""
        added = pd.DataFrame([{**row, "run": len(self._runs) - 1} for row in rows])
        self._rows = pd.concat([self._rows, added], ignore_index=True) if len(self._rows) else added
        self._runs[-1]["rows"] = int((self._rows["run"] == len(self._runs) - 1).sum())
        sidecar = {"schema_version": 2, "method": METHOD, "runs": self._runs}
        # The sidecar first: a row without its run would be worse than a run without rows.
        write_atomic(self._folder / f"{NAME}.json", lambda path: path.write_text(json.dumps(sidecar, indent=1) + "\n"))
        write_atomic(self._folder / f"{NAME}.parquet", lambda path: self._rows.to_parquet(path, index=False, compression="zstd"))


def describe(device: torch.device, arguments: list[str], module: str = "hil.collectives") -> dict[str, Any]:
    """The present run of a module: command, time, machine, NCCL and how GPUs are linked."""
    run: dict[str, Any] = {
        "command": f"torchrun --nproc-per-node {dist.get_world_size()} -m {module} {shlex.join(arguments)}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rows": 0,
    }
    if device.type != "cuda":
        return {**run, "gpu": "none: a dry run on a CPU", "torch": torch.__version__, "python": platform.python_version()}
    from hil.fingerprint import fingerprint

    topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
    return {
        **run,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nccl_environment": {key: value for key, value in os.environ.items() if key.startswith("NCCL_")},
        "topology": re.sub(r"\x1b\[\d*m", "", topology.stdout) if topology.returncode == 0 else None,
        **fingerprint(),
    }

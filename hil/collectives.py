"""Time collectives between the GPUs of one host, into `collectives.parquet` with a sidecar.

    torchrun --nproc-per-node 8 -m hil.collectives --out data/h200

Every op runs on the first 2, 4 and 8 ranks, captured in a CUDA graph of several calls; a sample is the slowest rank's
replay divided by the calls. `bytes_per_rank` is the larger of a rank's two buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

SIZES = tuple(2**exponent for exponent in range(12, 31))
RANKS = (2, 4, 8)
CALLS = 8
REPLAYS = 15


def _operations(elements: int, ranks: int, group: Any) -> dict[str, Callable[[], object]]:
    whole = torch.randn(elements, device="cuda").bfloat16()
    other = torch.empty_like(whole)
    part = torch.empty(elements // ranks, dtype=torch.bfloat16, device="cuda")
    return {
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(other, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(other, part, group=group),
    }


def _time(operation: Callable[[], object], group: Any) -> torch.Tensor:
    """Samples in microseconds, each the slowest rank's."""
    for _ in range(3):
        operation()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            operation()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples = torch.empty(REPLAYS, dtype=torch.float64, device="cuda")
    for index in range(REPLAYS + 2):
        dist.barrier(group=group)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        samples[max(index - 2, 0)] = 1e3 * start.elapsed_time(stop) / CALLS
    dist.all_reduce(samples, dist.ReduceOp.MAX, group=group)
    return samples.cpu()


def _check(operations: dict[str, Callable[[], object]], elements: int, ranks: int, group: Any) -> None:
    """All-reduce of ones on every rank gives the number of ranks: the group is the one that is meant.

    Raises:
        RuntimeError: it does not.
    """
    ones = torch.ones(64, device="cuda")
    dist.all_reduce(ones, group=group)
    if not bool((ones == ranks).all()):
        raise RuntimeError(f"all-reduce over {ranks} ranks gave {ones[0].item()}")


def measure(ranks: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of every op and size on the first `ranks` ranks; empty on the others."""
    group = dist.new_group(list(range(ranks)))
    rows: list[dict[str, Any]] = []
    if dist.get_rank() < ranks:
        for size in sizes:
            operations = _operations(size // 2, ranks, group)
            _check(operations, size // 2, ranks, group)
            for name, operation in operations.items():
                samples = _time(operation, group)
                p10, p50, p90 = samples.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
                rows.append(
                    {"op": name, "dtype": "bf16", "ranks": ranks, "groups": 1, "bytes_per_rank": size,
                     "p10_us": p10, "p50_us": p50, "p90_us": p90, "samples": REPLAYS}
                )  # fmt: skip
            del operations
            torch.cuda.empty_cache()
    dist.barrier()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; run under torchrun."""
    parser = argparse.ArgumentParser(prog="python -m hil.collectives", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or "RANK" not in os.environ:
        print("no GPUs here, or not under torchrun: torchrun --nproc-per-node 8 -m hil.collectives --out DIR", file=sys.stderr)
        return 3
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rows: list[dict[str, Any]] = []
    for ranks in (r for r in RANKS if r <= dist.get_world_size()):
        rows += measure(ranks, SIZES)
        if dist.get_rank() == 0:
            print(f"{ranks} ranks: {len(rows)} rows so far", file=sys.stderr)
    if dist.get_rank() == 0:
        from hil.fingerprint import fingerprint

        options.out.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_parquet(options.out / "collectives.parquet", index=False, compression="zstd")
        sidecar = {
            "schema_version": 1,
            "method": "median over replays of the slowest rank's CUDA-graph replay; see hil/collectives.py",
            "runs": [
                {
                    "command": f"torchrun --nproc-per-node {dist.get_world_size()} -m hil.collectives --out data/h200",
                    "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "rows": len(rows),
                    "nccl": ".".join(map(str, torch.cuda.nccl.version())),
                    "nccl_environment": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")},
                    **fingerprint(),
                }
            ],
        }
        (options.out / "collectives.json").write_text(json.dumps(sidecar, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

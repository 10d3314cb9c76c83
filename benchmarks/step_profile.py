"""Where a compiled training step goes on this GPU: every kernel with its time, and of fused kernels the bytes.

    python benchmarks/step_profile.py wukong-production --batch 2048 --out profiles
    python benchmarks/step_profile.py dlrm --variant filter_tensorwise
    python benchmarks/step_profile.py benchmarks.other_widths:dlrm
    python benchmarks/step_profile.py wukong-production+mods        # with all Mods

Forward and backward of the model as `loka-sim validate` runs it (bf16, tables cut to 10,000 rows), the step timed as it
is called and as one CUDA graph, then profiled. Writes `MODEL-BATCH-VARIANT.json`: step times, a row per kernel name
(launches a step, microseconds a step, kind, torch.compile's account of its bytes), one step's launches in order, and what of
a step's time is the host's (`benchmarks/host_times.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

from benchmarks.host_times import host_times
from hil.candidates import locked_autotune
from hil.compiled import Kernel, kernel_launches, recorded
from hil.fingerprint import fingerprint
from hil.lock import GpuLock
from loka_sim.mods import MODS
from loka_sim.resolve import WITH_MODS
from loka_sim.validation.runnable import Runnable, runnable
from loka_sim.validation.step_time import (
    Convert,
    as_it_is,
    converted_by_table,
    converted_by_torchao,
    graphed,
    step_of,
    time_steps,
)

ITERATIONS = 4
KINDS = (
    ("triton_poi", r"^triton_poi"),
    ("triton_reduction", r"^triton_(red|per|mix)"),
    ("triton_other", r"^triton_"),
    ("gemm", r"nvjet|gemm|gemv|cutlass|cublas|splitK|device_kernel|dot_kernel|reduce_1Block"),
    ("copy", r"[Mm]emcpy|[Mm]emset|copy"),
    ("elementwise", r"elementwise|Fill|index|scatter|gather|embedding"),
)


def kind(name: str) -> str:
    """What a kernel's name says that it is."""
    return next((what for what, pattern in KINDS if re.search(pattern, name)), "other")


def converter(variant: str, table: Path | None) -> Convert:
    """How a variant converts the model."""
    if variant == "bf16":
        return as_it_is
    return converted_by_torchao(variant) if table is None else converted_by_table(json.loads(table.read_text()))


def _median_ms(step: Callable[[], None], turns: int) -> float:
    return statistics.median(time_steps({"step": step}, turns)["step"])


def tensors_of(model: Runnable) -> dict[str, int]:
    """Parameters, modules and inputs of a model, which a host looks after in every step."""
    made = model.make()
    return {
        "parameters": sum(1 for _ in made.parameters()), "modules": sum(1 for _ in made.modules()), "inputs": len(model.inputs()),
    }  # fmt: skip


def profiled(step: Callable[[], None], kernels: dict[str, Kernel]) -> dict[str, Any]:
    """Kernel table and one step's launches."""
    launches = kernel_launches(step, ITERATIONS, 1)
    names: dict[str, list[float]] = {}
    for name, time_us in launches:
        names.setdefault(name, []).append(time_us)
    rows = [
        {
            "kernel": name,
            "kind": kind(name),
            "launches": len(samples) / ITERATIONS,
            "total_us": sum(samples) / ITERATIONS,
            "median_us": statistics.median(samples),
            **(kernels[name].to_dict() if name in kernels else {}),
        }
        for name, samples in names.items()
    ]
    rows.sort(key=lambda row: -row["total_us"])
    index = {row["kernel"]: position for position, row in enumerate(rows)}
    last = launches[len(launches) - len(launches) // ITERATIONS :]
    by_kind: dict[str, float] = {}
    for row in rows:
        by_kind[row["kind"]] = by_kind.get(row["kind"], 0.0) + row["total_us"]
    return {
        "kernels_ms": sum(by_kind.values()) / 1e3,
        "by_kind_us": by_kind,
        "kernels": rows,
        "launches": [[index[name], round(time_us, 3)] for name, time_us in last],
    }


def wait(file: Path) -> None:
    """Say that the step is compiled, and sleep until it may run: the GPU is for one process at a time."""
    torch.cuda.empty_cache()
    file.touch()
    while file.exists():
        time.sleep(0.05)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "model", help="zoo model, with +mods behind it for all Mods, or package.module:function, which has a batch of its own"
    )
    parser.add_argument("--batch", type=int, help="2,048 of a zoo model")
    parser.add_argument("--variant", default="bf16", help="bf16, naive_tensorwise, filter_tensorwise, ... (needs torchao)")
    parser.add_argument("--table", type=Path, help="dispatch table, for `--variant decision` (needs torchao)")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--no-profile", action="store_true", help="times of the step alone")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--wait", type=Path, metavar="FILE", help="write FILE when compiled, and measure when it is gone")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="that whoever uses this GPU locks (see hil.lock)")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 512
    asked, modified, _ = options.model.partition(WITH_MODS)
    model = runnable(asked, options.batch or 2048, MODS if modified else ())
    assert model is not None, "a zoo model or a function"
    name = (model.zoo or asked) + modified
    batch = int(model.inputs()[0].shape[0])
    if not model.zoo and options.batch not in (None, batch):
        parser.error(f"{asked} has a batch of its own, {batch:,}: leave --batch {options.batch} out, or say {batch}")
    convert = converter(options.variant, options.table)
    started = time.monotonic()
    # torch.compile times a kernel's candidates: beside others' work it takes the wrong ones.
    with recorded() as kernels, locked_autotune(GpuLock(options.lock) if options.lock else None):
        torch._dynamo.reset()
        step = step_of(model, convert)
    compiled_in = time.monotonic() - started
    if options.wait:
        wait(options.wait)
    result: dict[str, Any] = {
        "schema_version": 1,
        "model": name,
        "batch": batch,
        "variant": options.variant,
        "command": shlex.join(["python", "benchmarks/step_profile.py", *sys.argv[1:]]),
        "machine": fingerprint(),
        "compiled_in_s": compiled_in,
        "step_ms": _median_ms(step, options.turns),
        "host": host_times(step),
        "tensors": tensors_of(model),
    }
    if not options.no_profile:
        result |= profiled(step, kernels)
    try:
        result["graph_ms"] = _median_ms(graphed(step), options.turns)
    except RuntimeError as error:
        result["graph_ms"], result["graph_problem"] = None, str(error).splitlines()[0]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{name.replace(':', '-')}-{batch}-{options.variant}.json"
    path.write_text(json.dumps(result))
    print(f"{path.stem}: step {result['step_ms']:.3f} ms, as a graph {result['graph_ms']} ms, compiled in {compiled_in:.0f} s")
    print(json.dumps(result.get("by_kind_us", {})))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Steps as called, again and again in turn on one host, beside how fast the host was meanwhile.

    python benchmarks/host_steps.py dlrm-small:512:bf16 wukong-small:512:naive_tensorwise --out data/h200/host_steps.json

Each is MODEL:BATCH:VARIANT as `benchmarks/step_profile.py` takes them, compiled in a process of its own, all side by side. Then
the processes have the machine in turn, round after round. In a visit alternate: the step with the GPU idle when it begins (and
the parts of it, see `benchmarks/host_times.py`), three steps one after the other, the step of a reference network, compiled
and eager, and quick calls (`hil/host.py`). A step that is not compiled in time is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS_IN_A_ROW = 3


def compile_step(text: str, folder: Path) -> None:
    """The process of one step: compiles it, and measures whenever it is told to."""
    import torch
    import torch._dynamo
    import torch._inductor.config

    from benchmarks.host_times import graph_calls, written
    from benchmarks.step_profile import converter, tensors_of
    from hil import host
    from hil.compiled import kernel_launches
    from loka_sim.validation.runnable import runnable
    from loka_sim.validation.step_time import step_of

    name, batch, variant = text.rsplit(":", 2)
    torch._dynamo.config.recompile_limit = 512
    model = runnable(name, int(batch), ())
    assert model is not None, "a zoo model or a function"
    step = step_of(model, converter(variant, None))
    references = {"reference": host.reference(), "eager": host.reference(compiled=False)}
    with graph_calls() as calls:
        step()
    launches = kernel_launches(step, 2, 1)
    result: dict[str, Any] = {
        "model": model.zoo or name, "batch": int(model.inputs()[0].shape[0]), "variant": variant, "tensors": tensors_of(model),
        "graphs": [{**written(graph.source_code or ""), "inputs": number} for graph, number, _, _ in calls],
        "launches": len(launches) / 2, "kernels_us": round(sum(us for _, us in launches) / 2, 1), "visits": [],
    }  # fmt: skip
    # The network that all hosts are compared by, counted once.
    with graph_calls() as calls:
        references["reference"]()
    result["reference"] = [{**written(graph.source_code or ""), "inputs": number} for graph, number, _, _ in calls]
    quick, ready, go = host.quick(), folder / "ready", folder / "go"
    ready.touch()
    while True:
        while not go.exists():
            if (folder / "stop").exists():
                return
            time.sleep(0.005)
        result["visits"].append(visit(step, references, quick, float(go.read_text())))
        beside = folder / "beside.json"
        beside.write_text(json.dumps(result))
        beside.replace(folder / "result.json")
        go.unlink()


def visit(step: Any, references: dict[str, Any], quick: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One process's turn of so many seconds: p10, p50 and p90 in microseconds of what is timed."""
    import torch

    from benchmarks.host_times import graph_calls
    from hil import host

    for _ in range(3):
        step()
        for reference in references.values():
            reference()
    samples: dict[str, list[float]] = {}

    def add(name: str, taken: float) -> None:
        samples.setdefault(name, []).append(1e6 * taken)

    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        torch.cuda.synchronize()
        with graph_calls() as calls:
            first = time.perf_counter()
            step()
            last = time.perf_counter()
        add("host", last - first)
        add("before", calls[0][2] - first)
        add("after", last - calls[-1][3])
        for number, (_, _, start, end) in enumerate(calls):
            add(f"graph{number}", end - start)
        torch.cuda.synchronize()
        first = time.perf_counter()
        for _ in range(STEPS_IN_A_ROW):
            step()
        torch.cuda.synchronize()
        add("step", (time.perf_counter() - first) / STEPS_IN_A_ROW)
        for name, reference in references.items():
            reference()
            add(name, host.seconds_of(reference))
        for name, call in quick.items():
            add(name, host.seconds_of(call, host.QUICK_CALLS[name]))
    found: dict[str, Any] = {"at": round(time.time(), 1), "turns": len(samples["host"])}
    for name, values in samples.items():
        values.sort()
        found[name] = [round(values[int(share * (len(values) - 1))], 3) for share in (0.1, 0.5, 0.9)]
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="+", metavar="MODEL:BATCH:VARIANT")
    parser.add_argument("--out", type=Path, default=Path("host_steps.json"))
    parser.add_argument("--folder", type=Path, default=Path("host_steps"), help="where the processes are told what to do")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--compile-seconds", type=float, default=150, help="what is not compiled by then is left out")
    parser.add_argument("--visit-seconds", type=float, default=1.2)
    parser.add_argument("--threads", type=int, default=2, help="of each compilation")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        compile_step(options.steps[0], options.folder)
        return 0
    begun = time.monotonic()
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(options.threads)}
    jobs: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    for text in options.steps:
        folder = options.folder / text.replace(":", "-")
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, text, "--worker", "--folder", str(folder)]
        with (folder / "log").open("wb") as log:
            jobs.append((text, folder, subprocess.Popen(command, stdout=log, stderr=log, env=environment)))
    try:
        rounds(jobs, begun, options)
    finally:
        for _, folder, process in jobs:
            (folder / "stop").touch()
            if process.poll() is None:
                process.kill()
        write(options, [folder for _, folder, _ in jobs])
    return 0


def rounds(jobs: list[tuple[str, Path, subprocess.Popen[bytes]]], begun: float, options: argparse.Namespace) -> None:
    """Wait until all is compiled or the time for that is over; then let each measure in turn."""

    def compiling() -> list[subprocess.Popen[bytes]]:
        return [process for _, folder, process in jobs if process.poll() is None and not (folder / "ready").exists()]

    while compiling() and time.monotonic() < begun + options.compile_seconds:
        time.sleep(0.2)
    for process in compiling():
        process.send_signal(signal.SIGKILL)
    ready = [(text, folder, process) for text, folder, process in jobs if (folder / "ready").exists()]
    print(f"{time.monotonic() - begun:.0f} s: {len(ready)} of {len(jobs)} compiled", flush=True)
    time.sleep(0.5)
    while True:
        for job in list(ready):
            text, folder, process = job
            if time.monotonic() + options.visit_seconds + 1 > begun + options.seconds:
                return
            (folder / "told").write_text(str(options.visit_seconds))
            (folder / "told").replace(folder / "go")
            while (folder / "go").exists() and process.poll() is None:
                time.sleep(0.005)
            if process.poll() is not None:
                print(f"{text}: ended with code {process.returncode}", flush=True)
                ready.remove(job)
        if not ready:
            return


def write(options: argparse.Namespace, folders: list[Path]) -> None:
    """Everything that was measured, in one file."""
    from benchmarks.host_times import machine
    from hil.files import write_atomic
    from hil.fingerprint import fingerprint

    steps = [json.loads((folder / "result.json").read_text()) for folder in folders if (folder / "result.json").exists()]
    document = {
        "schema_version": 1, "command": shlex.join(["python", "benchmarks/host_steps.py", *sys.argv[1:]]),
        "machine": {**fingerprint(), **machine()}, "steps": steps,
    }  # fmt: skip
    text = json.dumps(document, indent=1) + "\n"
    write_atomic(options.out, lambda path: path.write_text(text))
    print(f"{len(steps)} steps in {options.out}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Whole training steps measured under what Dispatch chooses among torch's kernels, and among all libraries': does it pay?

    python benchmarks/library_steps.py [--models wukong interformer] [--batch 2048] [--out FILE]

Forward and backward of zoo models as `loka-sim validate` runs them (bf16, tables cut to 10,000 rows, compiled): in bf16, under
the decision among torch's kernels (as torchao runs it; with `--control` also as `loka_sim.dispatch.runtime` does), and under that
among `--libraries`. Every variant is compiled in a process of its own; then all are timed in turn, one at a time, as called from
Python, and with `--graphs` as CUDA graphs, which a step that the host bounds needs. Beside them what the time model predicts for
the whole step, and the sum of its kernels' times by torch's profiler. A loss far from bf16's would show a wrong kernel.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIBRARIES = "torch,loka,fbgemm"
CONTROL = "torch, own runtime"
TURNS = 8
# Milliseconds that one sample takes at least.
SAMPLE_MS = 100.0
Table = dict[str, Any]


def tables_of(model: str, batch: int, libraries: str) -> tuple[dict[str, Table], dict[str, Any]]:
    """The decisions' dispatch tables, and what is predicted for each and for bf16: milliseconds with their 90% interval."""
    from whole_step import around, predicted

    import loka_sim
    from loka_sim.dispatch.table import from_whatif

    tables: dict[str, Table] = {}
    expected: dict[str, Any] = {}
    for label, some in (("torch", "torch"), ("all", libraries)):
        answer = loka_sim.whatif(model, batch=batch, libraries=some)
        found = predicted(model, batch, {(model, batch): (answer, *around(answer))})
        expected["bf16"], expected[label] = found["bf16"], found["decision"]
        tables[label] = from_whatif(answer.to_dict())
    tables[CONTROL], expected[CONTROL] = tables["torch"], expected["torch"]
    return tables, expected


def compiled_step(model: Any, convert: Callable[[Any], Any], lock: Any) -> Callable[[], None]:
    """As `step_time.step_of`, holding the lock from the first run on until it is ready.

    Compiling needs none: while many processes compile, one at a time runs, alone with its activations and benchmarks of kernels.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx

    waiting = [lock]

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        run = compile_fx(graph, inputs)

        def gated(*arguments: Any) -> Any:
            while waiting:
                waiting.pop().__enter__()
            return run(*arguments)

        return gated

    # Parameters are drawn in FP32: of one model at a time, too.
    with lock:
        module = convert(model.make())
        torch.cuda.empty_cache()
    compiled = torch.compile(module, dynamic=False, backend=backend)
    inputs = model.inputs()

    def step() -> None:
        model.loss(compiled(*inputs)).backward()
        module.zero_grad(set_to_none=True)

    try:
        step()
        step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    finally:
        if not waiting:
            lock.__exit__()
    return step


def sample(call: Callable[[], None]) -> float:
    """Milliseconds of a call, over so many that they take `SAMPLE_MS`."""
    import torch

    def timed(times: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / times

    return timed(max(2, round(SAMPLE_MS / max(timed(1), 1e-3))))


def serve(
    pipe: Connection, model: str, batch: int, variant: str, table: Table | None, lock: str, threads: int, graphs: bool
) -> None:
    """Compile one variant, say so, and time it whenever asked."""
    warnings.filterwarnings("ignore")
    try:
        import torch
        from step_profile import graphed, profiled

        from hil.candidates import locked_autotune
        from hil.lock import GpuLock
        from loka_sim.dispatch import runtime
        from loka_sim.validation.runnable import runnable
        from loka_sim.validation.step_time import as_it_is, converted_by_table

        torch._dynamo.config.recompile_limit = 512
        torch._inductor.config.compile_threads = threads
        made = runnable(model, batch, ())
        assert made is not None, f"{model} is no model that can be run"
        if table is None:
            convert = as_it_is
        elif variant == CONTROL:
            convert = partial(runtime.convert, table=table)
        else:
            convert = converted_by_table(table)
        started = time.monotonic()
        last: list[torch.Tensor] = []

        def loss(out: Any) -> torch.Tensor:
            value = made.loss(out)
            last[:] = [value.detach()]
            return value

        gpu = GpuLock(lock)
        with locked_autotune(gpu):
            step = compiled_step(replace(made, loss=loss), convert, gpu)
        calls = {"called": step}
        ready = {"compiled_in_s": time.monotonic() - started, "loss": float(last[0])}
        if graphs:
            with gpu:
                calls["graph"] = graphed(step)
                torch.cuda.synchronize()
        pipe.send(ready)
        for kind in iter(pipe.recv, None):
            if kind == "profile":
                found = profiled(step, {})
                pipe.send({name: found[name] for name in ("kernels_ms", "by_kind_us", "kernels")})
            else:
                pipe.send(sample(calls[kind]))
            # What the next one may need.
            torch.cuda.empty_cache()
    except Exception:
        pipe.send({"failed": traceback.format_exc()[-2000:]})


class Variant:
    """A step in a process of its own.

    Attributes:
        name: Of the variant.
        state: What the process said when it was ready: seconds of compiling and the loss, or how it failed.
        samples: Milliseconds, by kind.
    """

    def __init__(self, *, model: str, batch: int, name: str, table: Table | None, lock: str, threads: int, graphs: bool) -> None:
        """Starts to compile."""
        context = multiprocessing.get_context("spawn")
        self.name, self.state, self.samples = name, dict[str, Any](), dict[str, list[float]]()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, model, batch, name, table, lock, threads, graphs), daemon=True
        )
        self._process.start()
        theirs.close()

    def ready(self, deadline: float) -> bool:
        """Whether it can be timed, waiting for it until the deadline at most."""
        if not self.state:
            late = not self._pipe.poll(max(0.0, deadline - time.monotonic()))
            try:
                self.state = {"failed": "not compiled in time"} if late else self._pipe.recv()
            except EOFError:
                self.state = {"failed": "its process died"}
            if "failed" in self.state:
                print(f"{self.name}: {self.state['failed']}", file=sys.stderr)
        return "failed" not in self.state

    def sample(self, kind: str) -> None:
        """Time it once."""
        self._pipe.send(kind)
        self.samples.setdefault(kind, []).append(self._pipe.recv())

    def profile(self) -> dict[str, Any]:
        """Its kernels by kind and by name, from torch's profiler."""
        self._pipe.send("profile")
        found: dict[str, Any] = self._pipe.recv()
        return found

    def end(self) -> None:
        """Ends it."""
        self._process.terminate()


def measured(model: str, variants: list[Variant], expected: dict[str, Any], kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of one model's variants, timed in turn; prints them."""
    live = [variant for variant in variants if "failed" not in variant.state]
    for _ in range(TURNS):
        for kind in kinds:
            for variant in live:
                variant.sample(kind)
    rows = []
    for variant in variants:
        medians = {f"{kind}_ms": statistics.median(samples) for kind, samples in variant.samples.items()}
        samples = {f"{kind}_samples_ms": some for kind, some in variant.samples.items()}
        row = {"model": model, "variant": variant.name, "predicted_ms": expected[variant.name], **variant.state}
        rows.append({**row, **medians, **samples})
    key = f"{kinds[-1]}_ms"
    base = next((row for row in rows if row["variant"] == "bf16" and key in row), None)
    for row in rows:
        if key not in row or base is None:
            print(f"{model:14s}{row['variant']:20s} not measured", flush=True)
            continue
        predicted = row["predicted_ms"][0]
        row["speedup"], row["predicted_speedup"] = base[key] / row[key], base["predicted_ms"][0] / predicted
        print(f"{model:14s}{row['variant']:20s}{row[key]:10.3f}{row['speedup']:8.3f}x{predicted:11.3f}"
              f"{row['predicted_speedup']:8.3f}x{predicted / row[key] - 1:+8.1%}{row['loss']:10.5f}", flush=True)  # fmt: skip
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["wukong", "interformer"])
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--libraries", default=LIBRARIES)
    parser.add_argument("--control", action="store_true", help="torch's decision by our runtime, too")
    parser.add_argument("--graphs", action="store_true", help="time CUDA graphs, too")
    parser.add_argument("--minutes", type=float, default=6.0, help="when what is not compiled is given up")
    parser.add_argument("--tables", type=Path, help="folder for the dispatch tables")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    import torch

    from hil.fingerprint import fingerprint

    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 3
    warnings.filterwarnings("ignore")
    deadline = time.monotonic() + 60 * options.minutes
    rows: list[dict[str, Any]] = []
    print(f"{'model':14s}{'decision among':20s}{'step ms':>10s}{'over bf16':>9s}{'predicted':>11s}{'over bf16':>9s}{'off':>8s}"
          f"{'loss':>10s}")  # fmt: skip
    kinds = ("called", *["graph"] * options.graphs)

    def keep() -> None:
        document = {
            "schema_version": 1, "machine": fingerprint(), "batch": options.batch, "libraries": options.libraries,
            "command": "python benchmarks/library_steps.py --out data/h200/library_steps.json", "steps": rows,
        }  # fmt: skip
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")

    with tempfile.NamedTemporaryFile() as lock:
        running: list[tuple[str, list[Variant], dict[str, Any]]] = []
        threads = max(2, len(os.sched_getaffinity(0)) // (3 * len(options.models)))
        start = partial(Variant, batch=options.batch, lock=lock.name, threads=threads, graphs=options.graphs)
        plain = {model: start(model=model, name="bf16", table=None) for model in options.models}
        for model in options.models:
            tables, expected = tables_of(model, options.batch, options.libraries)
            if not options.control:
                tables.pop(CONTROL, None)
            variants = [plain[model], *(start(model=model, name=name, table=table) for name, table in tables.items())]
            running.append((model, variants, expected))
            if options.tables:
                options.tables.mkdir(parents=True, exist_ok=True)
                (options.tables / f"{model}.json").write_text(json.dumps(tables) + "\n")
        # Nothing is timed while anything compiles.
        for _, variants, _ in running:
            for variant in variants:
                variant.ready(deadline)
        for model, variants, expected in running:
            rows += measured(model, variants, expected, kinds)
            keep()
        for row, variant in zip(rows, [variant for _, variants, _ in running for variant in variants], strict=True):
            if "failed" not in variant.state:
                row.update(variant.profile())
                keep()
                print(f"{row['model']:14s}{row['variant']:20s} kernels {row['kernels_ms']:.3f} ms", flush=True)
            variant.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The whole model's step, compiled in a process of its own while kernels are measured, and timed when all else is quiet.

    python -m loka_sim.validation.stepper MODEL --batch N --folder DIR --deadline UNIX

compiles bf16 at once, then the decision as it stands before anything is measured, then the new one as soon as its table lies
in the folder, where it runs otherwise, and last what a user would run without any. It times the variants in turn when it is told
to, and writes `medians.json`. A step of few milliseconds is timed as one CUDA graph, too: what its host takes to launch
it kernel by kernel may be all that is seen of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loka_sim.calibration import HOST
from loka_sim.errors import LokaSimError
from loka_sim.files import write_text_atomic
from loka_sim.validation.measuring import Child, read_json

BASELINES = ("filter_tensorwise", "naive_tensorwise")
TURNS, FEW_TURNS = 10, 3
# How long past the deadline the decision's step may still be begun to compile, as a part of what bf16's took.
OVERTIME = 0.35
# Longer steps seldom wait for the host, and take memory that a graph would hold once more.
MOST_GRAPHED_MS = 60.0
FIRST, TABLE, GO, RESULT = "first.json", "table.json", "go.json", "medians.json"
BEFORE, AFTER = "decision_before", "decision"
# What timing takes, and what its process may take to write and to leave.
TIMING_S = 6.0


class Stepper:
    """The process, as a validation starts it and talks to it through a folder.

    Args:
        model: As `validation.runnable` takes it.
        batch: Samples.
        mods: Of a zoo model.
        folder: Emptied.
        deadline: Seconds from now until the timings shall be there.
        lock: File of the GPU's lock.
        first: The dispatch table of the decision as it stands; None where that is bf16 everywhere.
    """

    def __init__(
        self,
        model: str,
        batch: int,
        mods: Sequence[str],
        folder: Path,
        deadline: float,
        lock: Path,
        first: dict[str, Any] | None,
    ) -> None:
        """Starts it."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        lock.parent.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        write_text_atomic(folder / FIRST, json.dumps({"table": first}) + "\n")
        arguments = [model, "--batch", str(batch), "--mods", ",".join(mods), "--folder", str(folder), "--lock", str(lock)]
        self.child = Child("loka_sim.validation.stepper", [*arguments, "--deadline", f"{time.time() + deadline:.1f}"])

    def decide(self, table: dict[str, Any] | None, as_before: bool) -> None:
        """Hand over the new decision, or None where it is bf16 everywhere, and whether it runs what the first one did."""
        write_text_atomic(self.folder / TABLE, json.dumps({"table": table, "as_before": as_before}) + "\n")

    def result(self, seconds: float) -> dict[str, Any]:
        """Have all that is compiled timed; at most about so many seconds later: medians and what was left out.

        A process that failed or was too slow left what it had timed before.
        """
        write_text_atomic(self.folder / GO, "{}\n")
        with self.child as child:
            code = child.wait(range(256), seconds)
        found = {"medians": {}, "graphs": {}, "left_out": [], **(read_json(self.folder / RESULT) or {})}
        if code is None:
            found["left_out"].append("what was being compiled when the time was over")
        elif code:
            found["left_out"].append(f"the process that runs the steps ended with code {code}; its last lines say why")
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The process."""
    parser = argparse.ArgumentParser(prog="python -m loka_sim.validation.stepper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--mods", default="")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True, help="Unix time")
    parser.add_argument("--lock", type=Path, required=True)
    options = parser.parse_args(arguments)

    import torch

    from hil.candidates import locked_autotune
    from hil.lock import GpuLock
    from loka_sim.validation.runnable import runnable

    torch._dynamo.config.recompile_limit = 512
    model = runnable(options.model, options.batch, [mod for mod in options.mods.split(",") if mod])
    if model is None:
        parser.error(f"of {options.model} there is only a specification; a step needs the model")
    lock = GpuLock(options.lock)
    with locked_autotune(lock):
        Variants(model, options.folder, options.deadline, lock).run()
    return 0


class Variants:
    """The steps of one model, compiled in the order of their worth.

    Args:
        model: What to run.
        folder: Where the decision comes from, and the result goes.
        deadline: Unix time.
        lock: Of the GPU.
    """

    def __init__(self, model: Any, folder: Path, deadline: float, lock: contextlib.AbstractContextManager[Any]) -> None:
        """Nothing runs yet."""
        self.model, self.folder, self.deadline, self.lock = model, folder, deadline, lock
        self.steps: dict[str, Callable[[], None]] = {}
        self.medians: dict[str, dict[str, float]] = {}
        self.graphs: dict[str, dict[str, float]] = {}
        self.host_step_us: float | None = None
        self.left_out: list[str] = []
        self.slowest = 0.0

    def run(self) -> None:
        """Compile what there is, as it comes; time all when told to."""
        from loka_sim.validation import step_time

        self._compile("bf16", lambda: step_time.as_it_is)
        self._time(FEW_TURNS)
        first = (read_json(self.folder / FIRST) or {}).get("table")
        if self.steps and first is not None and self._fits(BEFORE, (1 - OVERTIME) * self.slowest):
            self._compile(BEFORE, lambda: step_time.converted_by_table(first))
            self._time(FEW_TURNS)
        waiting = [AFTER, *BASELINES] if self.steps else []
        while waiting:
            decided = read_json(self.folder / TABLE)
            if not decided:
                # Nothing else is begun meanwhile that the decision would have to wait for in vain.
                if (self.folder / GO).exists() or time.time() > self.deadline:
                    break
                time.sleep(0.1)
                continue
            name = waiting.pop(0)
            if name != AFTER:
                if self._fits(name, self.slowest):
                    self._compile(name, lambda: step_time.converted_by_torchao(name))  # noqa: B023
            elif decided["as_before"] and BEFORE in self.steps:
                self.steps = {AFTER if kept == BEFORE else kept: step for kept, step in self.steps.items()}
            elif (table := decided["table"]) is not None and self._fits(name, (1 - OVERTIME) * self.slowest):
                self._compile(name, lambda: step_time.converted_by_table(table))  # noqa: B023
                self._time(FEW_TURNS)
        while not (self.folder / GO).exists() and time.time() < self.deadline:
            time.sleep(0.1)
        self._time(TURNS)
        self._time_graphs()

    def _fits(self, name: str, seconds: float) -> bool:
        fits = time.time() + seconds + TIMING_S <= self.deadline
        if not fits:
            self.left_out.append(f"{name}: no time was left to compile it")
        return fits

    def _compile(self, name: str, conversion: Callable[[], Any]) -> None:
        from loka_sim.validation.step_time import step_of

        started = time.monotonic()
        try:
            self.steps[name] = step_of(self.model, conversion())
        except ImportError:
            self.left_out.append(f"{name}: torchao is not installed; pip install 'torchao>=0.17'")
        except (LokaSimError, RuntimeError, ValueError, TypeError, AssertionError) as error:
            self.left_out.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
        else:
            self.slowest = max(self.slowest, time.monotonic() - started)
            print(f"  step, {name}: compiled in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    def _time(self, turns: int) -> None:
        from hil import host
        from loka_sim.validation.step_time import quantiles, time_steps

        with self.lock:
            with contextlib.suppress(RuntimeError):  # no memory left beside the steps: then it is not known
                self.host_step_us = host.step_us()
            self.medians = {name: quantiles(values) for name, values in time_steps(self.steps, turns).items()}
        self._write(turns)

    def _time_graphs(self) -> None:
        """Short steps as one CUDA graph each; last, for a capture that fails may leave a GPU that runs nothing more."""
        from loka_sim.validation.step_time import graphed, quantiles, time_steps

        for name, step in self.steps.items():
            if self.medians[name]["p50_ms"] > MOST_GRAPHED_MS:
                continue
            try:
                with self.lock:
                    self.graphs[name] = quantiles(time_steps({name: graphed(step)}, TURNS)[name])
            except RuntimeError as error:
                self.left_out.append(f"{name} as one CUDA graph: {(str(error).splitlines() or [''])[0][:200]}")
            self._write(TURNS)

    def _write(self, turns: int) -> None:
        found = {
            "medians": self.medians, "graphs": self.graphs, HOST: self.host_step_us, "left_out": self.left_out, "turns": turns
        }  # fmt: skip
        write_text_atomic(self.folder / RESULT, json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.exit(main())

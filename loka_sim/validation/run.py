"""One validation under way: its stages against one deadline, what each leaves in the folder, and what is made of it all."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.lock import GpuLock
from loka_sim import calibration
from loka_sim.dispatch.operands import Toolbox
from loka_sim.errors import UserError
from loka_sim.files import write_text_atomic
from loka_sim.validation import measuring
from loka_sim.validation.budget import WRITING_S, Budget
from loka_sim.validation.document import Findings, finish
from loka_sim.validation.measuring import read_json
from loka_sim.validation.request import Request
from perfmodel.kernels import KERNELS, library_of

if TYPE_CHECKING:
    from loka_sim.validation.runnable import Runnable
    from loka_sim.validation.stepper import Stepper
    from loka_sim.validation.tensors import Observed
    from loka_sim.whatif import WhatIf

REQUEST = "request.json"
TITLES = {
    "times_gemms": "times of the model's GEMMs", "sampled": "numerics, sampled", "tensors": "numerics, the model's tensors",
    "times_first": "times of the model's shapes, first half", "times_second": "times of the model's shapes, second half",
    "times_fresh": "times of fresh shapes", "step": "the whole model's step",
}  # fmt: skip
# What ending the training of a model may take.
STOPPING_S = 15.0
# What the step's process may take beyond its deadline, as a part of the whole time.
OVERTIME = 0.1


class Validation:
    """One validation.

    Args:
        request: What is asked.
        folder: Of everything that it leaves.
        before: The what-if of the shipped models.
        command: For the record.
        budget: The time that is left.
    """

    def __init__(self, request: Request, folder: Path, before: WhatIf, command: list[str], budget: Budget) -> None:
        """Nothing runs yet."""
        self.request, self.folder, self.before, self.command, self.budget = request, folder, before, command, budget
        self.stages: list[dict[str, Any]] = []
        self._staged_s = 0.0  # in this run
        self.timings = folder / "timings"

    def run(self) -> dict[str, Any]:
        """Measure, compare, refine, decide again, write; the document."""
        import torch

        from hil.fingerprint import fingerprint

        torch.set_num_threads(min(torch.get_num_threads(), measuring.MOST_THREADS))
        machine = fingerprint()
        self._claim(machine)
        machine[calibration.HOST] = measuring.host_step_us(self.folder)
        model = self._runnable()
        observed = _Later(lambda stop: self._observe(model, stop)) if model and not self._left("tensors") else None
        stepper = None
        try:
            with self._sweeps() as sweeps:
                # Before any other process uses the GPU: see `measuring.Sweeps`.
                self._stage("times_gemms", lambda s: self._gemms(sweeps, s))
                stepper = self._stepper() if model and not self._left("step") else None
                # They compile while the numerics are measured, and take turns with them on the GPU.
                asked = None if self._left("times_first") else self._ask(sweeps)
                sampled = self._stage("sampled", self._sampled)
                self._stage("times_first", lambda _: asked() if asked else None)
                tensors = self._stage("tensors", lambda s: self._tensors(observed, s)) if model else None
                self._stage("times_second", lambda s: self._second(sweeps, s))
                numerics = self._numerics(sampled, tensors)
                after, refinement = self._refine(machine, numerics)
                self.budget.reserve_s = WRITING_S
                if stepper:
                    stepper.decide(_table(after), _runs_alike(self.before, after))
                self._stage("times_fresh", lambda s: self._fresh(sweeps, s))
            step = self._stage("step", lambda s: self._step(stepper)) if model else None
        finally:
            if stepper:
                stepper.child.stop()
            if observed:
                observed.stop()
        found = Findings(self.request, self.folder, self.before, after, machine, self.command, self._between_s)
        return finish(found, numerics, refinement, measuring.timings(self.timings), step, self.stages)

    def _between_s(self) -> float:
        return 60 * self.request.minutes - self.budget.left() - self._staged_s

    def _claim(self, machine: dict[str, Any]) -> None:
        """Take the folder, or go on in it where it holds the same request on the same kind of machine."""
        wanted = {**self.request.to_dict(), "gpu": machine["gpu"], "torch": machine["torch"]}
        path = self.folder / REQUEST
        if self.folder.is_dir() and any(self.folder.iterdir()):
            found = read_json(path)
            if found is None:
                raise UserError(f"--out {self.folder} holds other files; choose a new folder")
            differing = [key for key in wanted if found.get(key) != wanted[key] and key != "minutes"]
            if differing:
                key = differing[0]
                other = f"a validation with {key} {found.get(key)!r}, not {wanted[key]!r}"
                raise UserError(f"--out {self.folder} holds {other}; choose a new folder")
            self._say(f"going on in {self.folder}")
        write_text_atomic(path, json.dumps(wanted, indent=1) + "\n")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _left(self, name: str) -> dict[str, Any] | None:
        """What an earlier run left of a stage."""
        return read_json(self.folder / "stages" / f"{name}.json")

    def _stage(self, name: str, work: Callable[[float], Any]) -> Any:
        """The stage's result: as left by an earlier run, or worked out and left now; None where no time was left for it."""
        found = self._left(name)
        if found is not None:
            self.budget.done(name)
        else:
            seconds = self.budget.begin(name)
            if seconds is None:
                self._say(f"{TITLES[name]}: cut, {max(self.budget.left(), 0):.0f} s are left")
                self.stages.append({"name": TITLES[name], "seconds": 0.0, "complete": False, "note": "no time was left for it"})
                return None
            self._say(f"{TITLES[name]}, {seconds:.0f} s of {self.budget.left():.0f} s ...")
            started = time.monotonic()
            result = work(seconds)
            if result is None:
                note = "what it needs was not there in time"
                took = time.monotonic() - started
                self._staged_s += took
                self.stages.append({"name": TITLES[name], "seconds": took, "complete": False, "note": note})
                return None
            found = {"seconds": time.monotonic() - started, "result": result}
            self._staged_s += found["seconds"]
            write_text_atomic(self.folder / "stages" / f"{name}.json", json.dumps(found) + "\n")
        told = found["result"] if isinstance(found["result"], dict) else {}
        self.stages.append({
            "name": TITLES[name], "seconds": found["seconds"], "complete": told.get("complete", True), "note": told.get("note"),
        })  # fmt: skip
        return found["result"]

    def _runnable(self) -> Runnable | None:
        from loka_sim.validation.runnable import runnable

        found = runnable(self.request.model, self.request.batch, self.request.mods)
        if found is None:
            self.budget.done("tensors")
            self.budget.done("step")
        return found

    def _stepper(self) -> Stepper:
        """Starts to compile at once: what is measured until the step's turn needs the GPU, and other cores."""
        from loka_sim.validation.stepper import Stepper

        request = self.request
        seconds = self.budget.left()
        lock = self.timings / measuring.LOCK
        return Stepper(request.model, request.batch, request.mods, self.folder / "step", seconds, lock, _table(self.before))

    def _sweeps(self) -> AbstractContextManager[Any]:
        if all(self._left(f"times_{part}") for part in ("gemms", "first", "second", "fresh")):
            return nullcontext()
        return measuring.Sweeps(self.timings, self._known())

    def _sampled(self, seconds: float) -> dict[str, Any]:
        """Bit for bit on sampled distributions, every recipe in turn; at least once each."""
        target = self.folder / "stages"
        arguments = ["--out", str(target), "--until", f"{time.time() + seconds:.2f}", "--seed", str(self.request.seed + 1)]
        arguments += ["--lock", str(self.timings / measuring.LOCK)]
        arguments += ["--kernels", "torch/*", "triton*", *(f"{library}/*" for library in self.request.libraries)]
        (target / "exactness.json").unlink(missing_ok=True)
        # 1: some outputs are unequal, or it failed; then it left no result.
        measuring.run("hil.exactness", arguments, accept=(0, 1))
        found = read_json(target / "exactness.json")
        rows = [
            {
                "kernel": row["kernel"], "gemms": row["shapes"], "outputs": row["outputs"], "unequal": row["unequal"],
                "bit_equal": 1 - row["unequal"] / row["outputs"],
            }
            for row in (found or {"rows": []})["rows"]
        ]  # fmt: skip
        note = None if found else "python -m hil.exactness failed; its last lines say why"
        return {"rows": rows, "note": note, "complete": bool(found)}

    def _observe(self, model: Runnable, stop: threading.Event) -> Observed | str:
        """Tensors of the model's own, or why there are none; on the CPU."""
        from loka_sim.validation import tensors

        if model.zoo is not None:
            return tensors.observe_zoo_apart(model.zoo, self.request.mods, self.request.seed, stop)
        try:
            return tensors.observe_users(model)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            return f"the model's own tensors could not be taken: {type(error).__name__}: {reason}"

    def _tensors(self, later: _Later | None, seconds: float) -> dict[str, Any] | None:
        from loka_sim.validation import tensors

        deadline = time.monotonic() + seconds
        assert later is not None  # or there would be a result already
        if not later.done(seconds):
            return None
        observed = later.result()
        # However long the tensors were waited for: half of the time is for measuring.
        deadline = max(deadline, time.monotonic() + seconds / 2)
        if isinstance(observed, str):
            return {"rows": [], "note": observed, "complete": False}
        lock = GpuLock(self.timings / measuring.LOCK)
        rows, seen = tensors.compare(observed, deadline, Toolbox.of(self.request.libraries), lock)
        note = f"{observed.origin}; {seen} of {len(observed.tensors)} sites"
        return {"rows": rows, "note": note, "complete": seen == len(observed.tensors)}

    def _numerics(self, sampled: dict[str, Any] | None, tensors: dict[str, Any] | None) -> dict[str, Any]:
        from loka_sim.validation.tensors import summary

        rows = tensors["rows"] if tensors else []
        note = tensors["note"] if tensors else "none of the model's own tensors"
        return {"sampled": sampled["rows"] if sampled else [], "tensors": rows, "summary": summary(rows), "note": note}

    def _gemms(self, sweeps: measuring.Sweeps, seconds: float) -> dict[str, Any]:
        """Measure the model's GEMMs."""
        from loka_sim.validation.plan import measured_rows, model_work

        work = model_work(self.before, self._known())
        sweeps.measure("model", {"gemm": work.wanted["gemm"]}, seconds)
        rows = measured_rows(measuring.timings(self.timings))
        return {"note": f"{len(rows)} times of {len({row[1:] for row in rows})} shapes"}

    def _ask(self, sweeps: measuring.Sweeps) -> Callable[[], dict[str, Any]]:
        """Have the rest of the model's shapes measured from now on; what waits until the first half's time is over, and tells."""
        from loka_sim.validation.plan import measured_rows, model_work

        before = measured_rows(measuring.timings(self.timings))
        work = model_work(self.before, self._known())
        seconds = max(self.budget.until("times_first"), measuring.WARMING_S)
        wait = sweeps.ask("model", {"memory": work.wanted["memory"]}, seconds)

        def told() -> dict[str, Any]:
            wait()
            found = work.progress(before, measured_rows(measuring.timings(self.timings)))
            # What did not fit is left to the second half.
            return {**found, "complete": True}

        return told

    def _second(self, sweeps: measuring.Sweeps, seconds: float) -> dict[str, Any]:
        """Measure what is left of the model's shapes, in the order in which they would change a decision as it is known now."""
        from loka_sim.validation.plan import measured_rows, model_work

        until = time.monotonic() + seconds
        before = measured_rows(measuring.timings(self.timings))
        work = model_work(self._refined_answer(), self._known())
        if not work.rows() <= before:
            sweeps.measure("model", work.wanted, until - time.monotonic())
        return work.progress(before, measured_rows(measuring.timings(self.timings)))

    def _fresh(self, sweeps: measuring.Sweeps, seconds: float) -> dict[str, Any]:
        from loka_sim.validation.plan import fresh_work

        sweeps.measure("fresh", fresh_work(self.request.seed + 104_729, self._known()), seconds)
        rows = measuring.timings(self.timings)
        some = rows[rows["sweep"] == "fresh"]
        return {"note": f"{len(some)} times of {len(some[['m', 'n', 'k', 'groups']].drop_duplicates())} shapes"}

    def _known(self) -> list[str]:
        """Kernels that the time model knows and a decision may take: of others there is no prediction to judge."""
        import perfmodel

        wanted, model = {"torch", *self.request.libraries}, perfmodel.load(self.request.hardware)
        return [name for name in KERNELS if model.knows(name) and library_of(name) in wanted]

    def _refined_answer(self) -> WhatIf:
        """Decide with the time model as refined so far."""
        refinement = self._refinement()
        if refinement is None:
            return self.before
        refinement.save(self.folder)
        calibration.save_manifest(self.folder, self.request.hardware, {}, self.command, {"complete": False})
        return self.request.answer(self.folder)

    def _refinement(self) -> Any:
        import perfmodel
        from perfmodel.refine import refine

        base = perfmodel.load(self.request.hardware)
        rows = measuring.timings(self.timings)
        rows = rows[(rows["sweep"] == "model") & rows["kernel"].map(base.knows).astype(bool)]
        return refine(base, rows) if len(rows) else None

    def _refine(self, machine: dict[str, Any], numerics: dict[str, Any]) -> tuple[WhatIf, Any]:
        """The calibration, and the decision that it gives."""
        from loka_sim.validation.tensors import corrections

        self._say("refining both models ...")
        calibration.save_numerics(self.folder, corrections(numerics["tensors"]), numerics["summary"])
        refinement = self._refinement()
        if refinement is None:
            calibration.save_manifest(self.folder, self.request.hardware, machine, self.command, {"timings": 0})
            return self.before, None
        refinement.save(self.folder)
        made_from = {"timings": len(refinement.rows), "gemms_compared": len(numerics["tensors"])}
        calibration.save_manifest(self.folder, self.request.hardware, machine, self.command, made_from)
        return self.request.answer(self.folder), refinement

    def _step(self, stepper: Stepper | None) -> dict[str, Any]:
        assert stepper is not None  # or there would be a result already
        found = stepper.result(max(self.budget.left(), 0.0) + OVERTIME * 60 * self.request.minutes)
        note = "; ".join(found["left_out"]) or None
        known = {name: found.get(name) for name in ("medians", "graphs", calibration.HOST)}
        return {**known, "note": note, "complete": not note}


class _Later:
    """Work that goes on while others are waited for; it is called with what tells it to stop."""

    def __init__(self, work: Callable[[threading.Event], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[threading.Event], Any]) -> None:
        try:
            self._result = work(self._stop)
        except BaseException as error:  # whoever asks for the result has it
            self._error = error

    def done(self, seconds: float) -> bool:
        """Whether it has ended, or does within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def stop(self) -> None:
        """End it: a thread that computes while the interpreter ends would take it down."""
        self._stop.set()
        self._thread.join(STOPPING_S)


def _table(answer: WhatIf) -> dict[str, Any] | None:
    from loka_sim.dispatch.table import from_whatif

    return from_whatif(answer.to_dict()) if answer.pays else None


def _runs_alike(before: WhatIf, after: WhatIf) -> bool:
    """Whether two decisions are one where a training job runs them: the same kernels for every pass of every site."""
    kernels = [
        [[(decided.kernel, decided.rows) for decided in site.passes.values()] for site in answer.sites]
        for answer in (before, after)
    ]
    return kernels[0] == kernels[1]

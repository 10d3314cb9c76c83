"""`loka-sim validate --gpu`: what a GPU says of both models, and what it changes.

Numerics first, then times in the order in which they would change a decision, twice: once as the shipped model sees it,
once refined by the first half. From all that comes a calibration, a new decision, and the whole model's step under it.
Every stage leaves its result in the folder, so that a killed validation goes on where it was.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import loka_sim
from loka_sim import calibration
from loka_sim.errors import DataError, UserError
from loka_sim.files import write_text_atomic
from loka_sim.validation import measuring
from loka_sim.validation.measuring import read_json
from perfmodel.kernels import KERNELS

if TYPE_CHECKING:
    from hil.kernels.base import Shape
    from loka_sim.validation.runnable import Runnable
    from loka_sim.whatif import WhatIf

KIND = "loka-sim/validation"
SCHEMA_VERSION = 1
DOCUMENT, REPORT, REQUEST = "validation.json", "report.html", "request.json"
# Parts of the time: what the numerics, the model's shapes (in two rounds) and fresh shapes may take. The step has the rest.
SHARES = {"sampled": 0.08, "tensors": 0.12, "model_gemm": 0.16, "model_memory": 0.26, "fresh_gemm": 0.06, "fresh_memory": 0.10}
LABELS = {
    "best": "measured best", "before": "decision before", "after": "decision after",
    "cross_validated": "decision, cross-validated",
    "bf16": "bf16", "naive_tensorwise": "all FP8, tensorwise", "naive_rowwise": "all FP8, rowwise",
    "filter_tensorwise": "torchao filter, tensorwise", "filter_rowwise": "torchao filter, rowwise",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What is validated; a folder holds one.

    Attributes:
        model: As `whatif` takes it.
        batch: Samples per GPU.
        mods: Changes to the model.
        hardware: Whose shipped timings are validated.
        statistics: As given; None for the default.
        minutes: Time to spend.
        seed: Of the fresh shapes and samples.
        max_mere: As in `whatif`.
        min_speedup: As in `whatif`.
    """

    model: str
    batch: int
    mods: tuple[str, ...]
    hardware: str
    statistics: str | None
    minutes: float
    seed: int
    max_mere: float = 0.2
    min_speedup: float = 1.05

    def answer(self, calibration: Path | None = None) -> WhatIf:
        """The what-if of this request."""
        from loka_sim.whatif import whatif

        return whatif(
            self.model, batch=self.batch, hardware=self.hardware, statistics=self.statistics, mods=self.mods,
            max_mere=self.max_mere, min_speedup=self.min_speedup, calibration=calibration,
        )  # fmt: skip


def require_gpu() -> None:
    """Raises `DataError` where there is no GPU that FP8 kernels run on."""
    import torch

    mend = "without one, `loka-sim whatif` predicts, and a folder made on such a machine serves it by --calibration DIR"
    if not torch.cuda.is_available():
        raise DataError(f"no CUDA GPU here: run this on a Hopper machine (H100, H200); {mend}")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        name = torch.cuda.get_device_name()
        raise DataError(f"{name} has compute capability {capability[0]}.{capability[1]}, the kernels need 9.0 (Hopper); {mend}")


def validate(
    model: str = "wukong",
    *,
    out: str | Path,
    batch: int | None = None,
    mods: str | Sequence[str] = (),
    statistics: str | None = None,
    minutes: float = 10.0,
    seed: int = 0,
    hardware: str = "h200",
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure, compare with both models, refine them, decide again; everything is left in `out`.

    Args:
        model: Zoo name, `package.module:callable`, or a spec file (of which there are no tensors and no step to run).
        out: Folder: a new one, or one that a validation of the same request was begun in.
        batch: Samples per GPU; None for the model's own.
        mods: Changes to a zoo model.
        statistics: As in `whatif`.
        minutes: Time to spend, at least 1.
        seed: Of fresh shapes and samples.
        hardware: Whose shipped timings are validated and refined.
        command: The command line, for the record.

    Returns:
        The document, see schemas/validation.schema.json. `out` is a calibration then.

    Raises:
        UserError: an argument is wrong, or the folder holds something else.
        DataError: there is no GPU that can do it, or a measuring process failed.
    """
    if not minutes >= 1:
        raise UserError(f"--minutes {minutes:g} is too short to measure anything; give at least 1, 10 is usual")
    first = Request(model, batch or 0, (), hardware, statistics, minutes, seed)
    from loka_sim.mods import parse_mods

    first = replace(first, mods=parse_mods(mods))
    if batch is None:
        from loka_sim.sources import model_spec

        first = replace(first, batch=model_spec(model, first.mods)[0].batch)
    before = first.answer()
    require_gpu()
    return _Validation(first, Path(out), before, list(command)).run()


class _Validation:
    """One validation under way."""

    def __init__(self, request: Request, folder: Path, before: WhatIf, command: list[str]) -> None:
        self.request, self.folder, self.before, self.command = request, folder, before, command
        self.stages: list[dict[str, Any]] = []
        self.timings = folder / "timings"

    def run(self) -> dict[str, Any]:
        from hil.fingerprint import fingerprint

        machine = fingerprint()
        self._claim(machine)
        parts = {"sampled": self._stage("numerics, sampled", "sampled", self._sampled)}
        model = self._runnable()
        tensors = self._stage("numerics, the model's tensors", "tensors", lambda s: self._tensors(model, s)) if model else None
        for name in ("first", "second"):
            self._stage(f"times of the model's shapes, {name} half", f"times_{name}", lambda s, n=name: self._times(n))  # type: ignore[misc]
        self._stage("times of fresh shapes", "times_fresh", lambda s: self._fresh())
        numerics = self._numerics(parts["sampled"], tensors)
        after, timed, refinement = self._refine(machine, numerics)
        dispatch = self._dispatch(after, refinement)
        step = self._stage("the whole model's step", "step", lambda s: self._step(model, after)) if model else None
        return self._finish(machine, numerics, timed, dispatch, step, after)

    def _claim(self, machine: dict[str, Any]) -> None:
        """Take the folder, or go on in it where it holds the same request on the same kind of machine."""
        wanted = {**asdict(self.request), "mods": list(self.request.mods), "gpu": machine["gpu"], "torch": machine["torch"]}
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

    def _stage(self, title: str, name: str, work: Callable[[float], Any]) -> Any:
        """The stage's result: as left by an earlier run, or worked out and left now."""
        path = self.folder / "stages" / f"{name}.json"
        found = read_json(path)
        if found is None:
            self._say(f"{title} ...")
            started = time.monotonic()
            result = work(SHARES.get(name, 0.0) * 60 * self.request.minutes)
            found = {"seconds": time.monotonic() - started, "result": result}
            write_text_atomic(path, json.dumps(found) + "\n")
        note = (found["result"] or {}).get("note") if isinstance(found["result"], dict) else None
        self.stages.append({"name": title, "seconds": found["seconds"], "complete": True, "note": note})
        return found["result"]

    def _runnable(self) -> Runnable | None:
        from loka_sim.validation.runnable import runnable

        return runnable(self.request.model, self.request.batch, self.request.mods)

    def _sampled(self, seconds: float) -> list[dict[str, Any]]:
        """Bit for bit on sampled distributions, every recipe in turn; at least once each."""
        target = self.folder / "stages"
        arguments = ["--out", str(target), "--minutes", f"{seconds / 60:.3f}", "--seed", str(self.request.seed + 1)]
        measuring.run("hil.exactness", arguments, accept=(0, 1))
        rows = (read_json(target / "exactness.json") or {}).get("rows", [])
        return [
            {
                "kernel": row["kernel"], "gemms": row["shapes"], "outputs": row["outputs"], "unequal": row["unequal"],
                "bit_equal": 1 - row["unequal"] / row["outputs"],
            }
            for row in rows
        ]  # fmt: skip

    def _tensors(self, model: Runnable, seconds: float) -> dict[str, Any]:
        from loka_sim.validation import tensors

        if model.zoo is not None:
            observed = tensors.observe_zoo(model.zoo, self.request.mods, self.request.seed)
        else:
            try:
                observed = tensors.observe_users(model)
            except (RuntimeError, ValueError, TypeError) as error:
                reason = (str(error).splitlines() or [""])[0][:200]
                return {"rows": [], "note": f"the model's own tensors could not be taken: {type(error).__name__}: {reason}"}
        return {"rows": tensors.compare(observed, time.monotonic() + seconds), "note": observed.origin}

    def _numerics(self, sampled: list[dict[str, Any]], tensors: dict[str, Any] | None) -> dict[str, Any]:
        from loka_sim.validation.tensors import summary

        rows = tensors["rows"] if tensors else []
        note = tensors["note"] if tensors else "only a specification of the model: no tensors of its own"
        return {"sampled": sampled, "tensors": rows, "summary": summary(rows), "note": note}

    def _times(self, half: str) -> dict[str, Any]:
        """Measure the model's shapes, in the order in which they would change a decision as it is known now."""
        from loka_sim.validation.plan import model_shapes

        answer = self.before if half == "first" else self._refined_answer(("model",))
        wanted = model_shapes(answer)
        for family in ("gemm", "memory"):
            seconds = SHARES[f"model_{family}"] * 60 * self.request.minutes / 2
            self._sweep(family, "model", wanted[family], seconds)
        found = measuring.timings(self.timings)
        shapes = found[["m", "n", "k", "groups"]].drop_duplicates()
        return {"note": f"{len(shapes)} of {sum(map(len, wanted.values()))} shapes measured"}

    def _fresh(self) -> None:
        from loka_sim.validation.plan import fresh_shapes

        for family, shapes in fresh_shapes(self.request.seed + 104_729).items():
            self._sweep(family, "fresh", shapes, SHARES[f"fresh_{family}"] * 60 * self.request.minutes)

    def _sweep(self, family: str, name: str, shapes: Sequence[Shape], seconds: float) -> None:
        """Under every kernel that the time model knows: of others there is no prediction to judge."""
        import perfmodel
        from loka_sim.validation.plan import FAMILIES

        known = [k for k in perfmodel.load(self.request.hardware).manifest["kernels"] if FAMILIES[KERNELS[k].kind] == family]
        measuring.sweep(self.timings, family, name, shapes, seconds, known)

    def _refined_answer(self, sweeps: Sequence[str]) -> WhatIf:
        """Decide with the time model as refined so far."""
        refinement = self._refinement(sweeps)
        if refinement is None:
            return self.before
        refinement.save(self.folder)
        calibration.save_manifest(self.folder, self.request.hardware, {}, self.command, {"complete": False})
        return self.request.answer(self.folder)

    def _refinement(self, sweeps: Sequence[str]) -> Any:
        import perfmodel
        from perfmodel.refine import refine

        base = perfmodel.load(self.request.hardware)
        rows = measuring.timings(self.timings)
        rows = rows[rows["sweep"].isin(list(sweeps)) & rows["kernel"].isin(list(base.manifest["kernels"]))]
        return refine(base, rows) if len(rows) else None

    def _refine(self, machine: dict[str, Any], numerics: dict[str, Any]) -> tuple[WhatIf, dict[str, Any] | None, Any]:
        """The calibration, the decision that it gives, and how far off the time model is before and after."""
        from loka_sim.validation.tensors import corrections
        from loka_sim.validation.times import time_part

        factors = corrections(numerics["tensors"])
        calibration.save_numerics(self.folder, factors, numerics["summary"])
        refinement = self._refinement(("model",))
        if refinement is None:
            calibration.save_manifest(self.folder, self.request.hardware, machine, self.command, {"timings": 0})
            return self.before, None, None
        refinement.save(self.folder)
        made_from = {"timings": len(refinement.rows), "gemms_compared": len(numerics["tensors"])}
        calibration.save_manifest(self.folder, self.request.hardware, machine, self.command, made_from)
        after = self.request.answer(self.folder)
        timed = time_part(self.request.hardware, self.folder, measuring.timings(self.timings), refinement)
        return after, timed, refinement

    def _dispatch(self, after: WhatIf, refinement: Any) -> dict[str, Any] | None:
        from loka_sim.validation.regret import changes, measured_times, policies_of, regrets
        from loka_sim.validation.times import decided_unseen

        if refinement is None:
            return None
        rows = measuring.timings(self.timings)
        measured = measured_times(rows[rows["sweep"] == "model"])
        unseen = decided_unseen(after, refinement)
        policies = policies_of({"before": self.before, "after": after})
        found = regrets(self.before, measured, {**policies, "cross_validated": unseen})
        order = ["best", "before", "cross_validated", "after", *list(policies)[2:]]
        by_name = {row["name"]: row for row in found.rows(LABELS)}
        note = "`cross-validated` decides every site by times predicted without its own shapes; `after` knows them"
        return {
            "sites": found.sites, "of_sites": found.of_sites, "passes": found.passes,
            "policies": [by_name[name] for name in order if name in by_name],
            "changes": changes(self.before, after, measured), "note": note,
        }  # fmt: skip

    def _step(self, model: Runnable, after: WhatIf) -> dict[str, Any]:
        from loka_sim.dispatch.table import from_whatif
        from loka_sim.validation import step_time

        converts: dict[str, step_time.Convert] = {"bf16": step_time.as_it_is}
        notes = []
        try:
            if after.pays:
                converts["decision"] = step_time.converted_by_table(from_whatif(after.to_dict()))
            else:
                notes.append("the decision is bf16 everywhere")
            converts["filter_tensorwise"] = step_time.converted_by_torchao("filter_tensorwise")
            converts["naive_tensorwise"] = step_time.converted_by_torchao("naive_tensorwise")
        except ImportError:
            notes.append("torchao is not installed: only bf16 was run; pip install 'torchao>=0.17'")
        share = 1 - sum(SHARES.values())
        deadline = time.monotonic() + share * 60 * self.request.minutes
        medians, left_out = step_time.measure_steps(model, converts, deadline)
        return {"medians": medians, "note": "; ".join([*notes, *left_out]) or None}

    def _step_part(self, step: dict[str, Any] | None, after: WhatIf) -> dict[str, Any] | None:
        if not step or "bf16" not in step["medians"]:
            return None
        predicted = [{s.name: s.speedup for s in answer.steps} for answer in (self.before, after)]
        bf16 = step["medians"]["bf16"]["p50_ms"]
        variants = [
            {
                "name": name, "label": "decision, exported" if name == "decision" else LABELS[name],
                "measured_ms": found["p50_ms"], "speedup": bf16 / found["p50_ms"],
                **{
                    f"predicted_{when}": {"speedup": some[name].us, "low": some[name].low_us, "high": some[name].high_us}
                    for when, some in zip(("before", "after"), predicted, strict=True)
                },
            }
            for name, found in step["medians"].items()
        ]  # fmt: skip
        return {"variants": variants, "predicted_bf16_ms": after.steps[0].total.us / 1e3, "note": step["note"]}

    def _finish(
        self, machine: dict[str, Any], numerics: dict[str, Any], timed: dict[str, Any] | None,
        dispatch: dict[str, Any] | None, step: dict[str, Any] | None, after: WhatIf,
    ) -> dict[str, Any]:  # fmt: skip
        """The document, the report and the new dispatch table."""
        from loka_sim.cli.output import render_json
        from loka_sim.dispatch import table
        from loka_sim.report.validation_view import render_validation
        from loka_sim.validation import judge
        from loka_sim.validation.libraries import libraries

        step_part = self._step_part(step, after)
        found = judge.tolerances(numerics, timed, dispatch, step_part)
        settings = {**asdict(self.request), "mods": list(self.request.mods)}
        document = {
            "schema_version": SCHEMA_VERSION, "kind": KIND, "loka_sim_version": loka_sim.__version__, "command": self.command,
            "settings": settings, "machine": machine, "libraries": libraries(), "stages": self.stages,
            "numerics": numerics, "time": timed, "dispatch": dispatch, "step": step_part,
            "whatif": {"before": _headline(self.before), "after": _headline(after)},
            "tolerances": found, "verdict": judge.verdict(found),
        }  # fmt: skip
        write_text_atomic(self.folder / table.FILE_NAME, render_json(table.from_whatif(after.to_dict())) + "\n")
        write_text_atomic(self.folder / REPORT, render_validation(document))
        write_text_atomic(self.folder / DOCUMENT, render_json(document) + "\n")
        return document


def _headline(answer: WhatIf) -> dict[str, Any]:
    decision = answer.decision
    return {
        "step_us": decision.total.us, "speedup": decision.speedup.us, "low": decision.speedup.low_us,
        "high": decision.speedup.high_us, "fp8_passes": decision.fp8_passes,
    }  # fmt: skip

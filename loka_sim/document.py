"""A what-if as its JSON document (schemas/whatif.schema.json): what `--json`, the report and `compare` read."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any

import loka_sim
from loka_sim.dispatch.candidates import Row
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.decide import STATUSES, Accuracy, Candidate, PassDecision
from loka_sim.dispatch.operands import DEFAULT_LIBRARIES
from loka_sim.dispatch.steps import Step
from loka_sim.statements import statements
from loka_sim.step_document import communication_document
from perfmodel.hardware import DEFAULT
from perfmodel.kernels import KERNELS

if TYPE_CHECKING:
    from loka_sim.whatif import Settings, SiteDecision, WhatIf
    from loka_sim.whole_step import Other

SCHEMA_VERSION = 1
KIND = "loka-sim/whatif"
BF16_BYTES = 2


def document(answer: WhatIf) -> dict[str, Any]:
    """The document of an answer: plain JSON values, figures rounded to six significant digits."""
    spec, settings, decision = answer.spec, answer.settings, answer.decision
    result = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "loka_sim_version": loka_sim.__version__,
        "command": shlex.join(command(settings)),
        "settings": {
            "model": settings.model,
            "batch": settings.batch,
            "gpus": settings.gpus,
            "hardware": settings.hardware,
            "statistics": settings.statistics,
            "mods": list(settings.mods),
            "max_mere": settings.max_mere,
            "min_speedup": settings.min_speedup,
            "calibration": settings.calibration,
            "libraries": list(settings.libraries),
            "cluster": settings.cluster,
            "dense": settings.dense,
            "exchange": settings.exchange,
        },
        "model": {
            "name": spec.name,
            "source": spec.source,
            "fingerprint": spec.fingerprint,
            "batch": settings.batch,
            "sites": len(spec.sites),
            "passes": sum(len(site.passes) for site in spec.sites),
            "flops": spec.flops(settings.batch),
            "dense_parameters": spec.dense_parameters,
            "tables": len(spec.tables),
            "table_bytes": sum(table.rows * table.dim for table in spec.tables) * BF16_BYTES,
            "unaccounted": list(spec.unaccounted),
        },
        "hardware": dict(answer.hardware),
        "statistics": {
            "origin": answer.distributions.origin,
            "name": answer.distributions.name,
            "model": answer.distributions.model,
            "fingerprint": answer.distributions.fingerprint,
            "provenance": answer.distributions.provenance,
            "sites": {how: sum(s.statistics == how for s in answer.sites) for how in ("exact", "role", "assumed")},
        },
        "verdict": {
            "pays": answer.pays,
            "speedup": decision.speedup.us,
            "speedup_low": decision.speedup.low_us,
            "speedup_high": decision.speedup.high_us,
            "gemm_speedup": decision.gemm_speedup,
            "text": verdict(answer),
        },
        "counts": _counts(answer),
        "steps": [_step(step, settings.batch) for step in answer.steps],
        "communication": communication_document(answer),
        "others": [_other(other) for other in answer.others],
        "sites": [_site(site, answer.run) for site in answer.sites],
        "times": [[*row, *answer.times.of[row]] for row in sorted(answer.times.of)],
        "statements": [{"level": level, "text": text} for level, text in statements(answer)],
        "next": next_command(answer),
    }
    return rounded(result)


def command(settings: Settings) -> list[str]:
    """The command line that repeats an answer; defaults are left out."""
    words = ["loka-sim", "whatif", settings.model, "--batch", str(settings.batch)]
    for option, value, default in (
        ("--gpus", settings.gpus, 1),
        ("--hardware", settings.hardware, DEFAULT),
        ("--statistics", settings.statistics, None),
        ("--mods", ",".join(settings.mods), ""),
        ("--max-mere", settings.max_mere, 0.2),
        ("--min-speedup", settings.min_speedup, 1.05),
        ("--calibration", settings.calibration, None),
        ("--libraries", ",".join(settings.libraries), ",".join(DEFAULT_LIBRARIES)),
        ("--cluster", settings.cluster, None),
        ("--dense", settings.dense, "ddp"),
        ("--exchange", settings.exchange, "bf16"),
    ):
        if value != default:
            words += [option, str(value)]
    return words


def verdict(answer: WhatIf) -> str:
    """The answer in one line."""
    batch = f"{answer.settings.batch:,}"
    ratio = answer.decision.speedup
    if answer.pays:
        return f"FP8 pays: dense step {ratio.us:.2f}x [{ratio.low_us:.2f}, {ratio.high_us:.2f}] faster than bf16 at batch {batch}"
    counts = Counter(decided.status for site in answer.sites for decided in site.passes.values())
    if counts["unsafe"]:
        return f"FP8 does not pay at batch {batch}: where it would be faster, it is too inaccurate"
    if any(site.step_gain_us is not None for site in answer.sites):
        return f"FP8 does not pay at batch {batch}: where it would be faster by itself, the whole step is not, or not enough"
    if counts["not_worth_it"]:
        return f"FP8 does not pay at batch {batch}: no GEMM is surely faster once its operands are quantized"
    return f"FP8 does not pay at batch {batch}: no GEMM can run in it"


def next_command(answer: WhatIf) -> str:
    """What to run next."""
    words = command(answer.settings)
    if answer.pays:
        settings = answer.settings
        name = re.sub(r"[^\w.-]+", "-", answer.spec.name).strip("-.") or "model"
        gpus = [f"{settings.gpus}gpus"] if settings.gpus > 1 else []
        where = [settings.hardware] if settings.hardware != DEFAULT else []
        return shlex.join([*words, "--out", "runs/" + "-".join([name, str(settings.batch), *settings.mods, *where, *gpus])])
    words[words.index("--batch") + 1] = str(answer.settings.batch * 4)
    return shlex.join(words)


def _counts(answer: WhatIf) -> dict[str, dict[str, int]]:
    passes: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    for site in answer.sites:
        for name, decided in site.passes.items():
            passes[decided.status] += 1
            flops[decided.status] += site.site.passes[name].flops(answer.settings.batch)
    return {key: {status: counts[status] for status in STATUSES} for key, counts in (("passes", passes), ("flops", flops))}


def _step(step: Step, batch: int) -> dict[str, Any]:
    return {
        "name": step.name,
        "label": step.label,
        "description": step.description,
        **_three("step", step.total),
        "gemm_us": step.gemm_us,
        "quantize_us": step.quantize_us,
        "around_us": step.around_us,
        "per_sample_us": step.total.us / batch,
        "speedup": step.speedup.us,
        "speedup_low": step.speedup.low_us,
        "speedup_high": step.speedup.high_us,
        "gemm_speedup": step.gemm_speedup,
        "fp8_sites": step.fp8_sites,
        "fp8_passes": step.fp8_passes,
        "unsafe_passes": step.unsafe_passes,
        **_whole(step),
    }


def _whole(step: Step) -> dict[str, Any]:
    """The step with everything in it; nothing where the specification does not say what that is."""
    if step.whole is None or step.whole_speedup is None:
        return {}
    ratio = step.whole_speedup
    ends = {"whole_speedup": ratio.us, "whole_speedup_low": ratio.low_us, "whole_speedup_high": ratio.high_us}
    return {**_three("whole", step.whole), **ends}


def _other(other: Other) -> dict[str, Any]:
    return {
        "phase": other.phase,
        "kind": other.kind,
        "operators": other.label,
        "bytes": other.moved_bytes,
        "count": other.count,
        **_three("time", other.time),
        "measured": other.measured,
    }


def _site(decision: SiteDecision, times: Times) -> dict[str, Any]:
    site = decision.site
    return {
        "name": site.name,
        "op": site.op,
        "weight": site.weight,
        "bias": site.bias,
        "norm": site.norm,
        "activation": site.activation,
        "statistics": decision.statistics,
        "bf16_us": decision.bf16_us,
        "predicted_us": decision.predicted_us,
        "gain_us": decision.gain_us,
        "speedup": decision.bf16_us / decision.predicted_us,
        "around_us": decision.around_us,
        "stored_transposed": sorted(decision.shape.stored_transposed),
        **({} if decision.step_gain_us is None else {"step_gain_us": decision.step_gain_us}),
        "passes": {
            name: {
                **_pass(
                    decided,
                    decision.shape.gemm(name),
                    decision.shape.row(name, decision.shape.bf16()[name]),
                    times,
                ),
                **({"torchao": _anew(decision.torchao[name])} if decision.torchao else {}),
            }
            for name, decided in decision.passes.items()
        },
    }


def _pass(decided: PassDecision, gemm: tuple[int, int, int, int], bf16: Row, times: Times) -> dict[str, Any]:
    m, n, k, groups = gemm
    launched, *quantize = decided.rows
    return {
        "m": m,
        "n": n,
        "k": k,
        "groups": groups,
        **({"padded": bf16[1:4]} if bf16[1:] != gemm else {}),
        "flops": 2 * m * n * k * groups,
        "status": decided.status,
        **_kernel(decided.kernel),
        **_three("predicted", decided.predicted),
        **_three("bf16", decided.bf16),
        "gemm_us": times.of[launched].us,
        "quantize_us": times.sum(quantize),
        "quantize": [{"kernel": r.kernel, "rows": r.m, "columns": r.k, "time_us": times.of[r].us} for r in quantize],
        "quantizers": dict(sorted(decided.makers.items())),
        "speedup": decided.speedup,
        **_accuracy(decided.accuracy),
        "in_sweep": not {launched, bf16} & times.outside,
        "reason": decided.reason,
        "runner_up": None if decided.runner_up is None else _runner_up(decided.runner_up),
        "candidates": [_candidate(candidate, decided.bf16) for candidate in decided.candidates],
    }


def _kernel(name: str) -> dict[str, Any]:
    spec = KERNELS[name]
    return {"kernel": name, "recipe_a": spec.recipe_a, "recipe_b": spec.recipe_b, "accumulation": spec.accumulation}


def _anew(decided: PassDecision) -> dict[str, Any]:
    """What a pass runs where torchao cannot run the decision."""
    mere = _accuracy(decided.accuracy)["mere"]
    return {**_kernel(decided.kernel), "predicted_us": decided.predicted.us, "mere": mere}


def _runner_up(candidate: Candidate) -> dict[str, Any]:
    assert candidate.total is not None
    mere = None if candidate.accuracy is None else candidate.accuracy.mere
    return {"kernel": candidate.kernel, "total_us": max(candidate.total.us, 0.0), "mere": mere}


def _candidate(candidate: Candidate, bf16: Time) -> dict[str, Any]:
    total = candidate.total
    ends = (None, None, None) if total is None else (max(total.us, 0.0), max(total.low_us, 0.0), max(total.high_us, 0.0))
    return {
        "kernel": candidate.kernel,
        "illegal": candidate.illegal,
        "gemm_us": candidate.gemm_us,
        "total_us": ends[0],
        "total_low_us": ends[1],
        "total_high_us": ends[2],
        "speedup": bf16.us / total.us if total is not None and total.us > 0 else None,
        **_accuracy(candidate.accuracy),
    }


def _accuracy(accuracy: Accuracy | None) -> dict[str, float | None]:
    """Error figures; a signal that vanishes altogether has no finite ratio in decibel, and JSON no infinity."""
    if accuracy is None:
        return {"mere": None, "sqnr_db": None}
    mere, sqnr_db = accuracy
    return {"mere": mere if math.isfinite(mere) else None, "sqnr_db": sqnr_db if math.isfinite(sqnr_db) else None}


def _three(prefix: str, time: Time) -> dict[str, float]:
    return {f"{prefix}_us": time.us, f"{prefix}_low_us": time.low_us, f"{prefix}_high_us": time.high_us}


_WHOLE = frozenset({str, int, bool, type(None)})


def rounded(value: Any) -> Any:
    """Figures at six significant digits: more than any prediction holds, and the same on every machine."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    # Of half a million values most are plain: a call for each takes longer than all else here.
    if isinstance(value, dict):
        return {
            key: float(f"{entry:.6g}") if (kind := type(entry)) is float else entry if kind in _WHOLE else rounded(entry)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            float(f"{entry:.6g}") if (kind := type(entry)) is float else entry if kind in _WHOLE else rounded(entry)
            for entry in value
        ]
    return value

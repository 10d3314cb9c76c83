"""What a what-if's figures rest on and leave out, in words: part of every answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from loka_sim.dispatch.candidates import launches
from loka_sim.dispatch.decide import flat
from loka_sim.dispatch.operands import DEFAULT_LIBRARIES
from loka_sim.dispatch.steps import torch_makes
from loka_sim.dispatch.torchao_plan import convertible
from loka_sim.host_time import called
from loka_sim.report.words import hardware as written
from loka_sim.step_document import in_words
from loka_sim.step_plan import DECISION, slowest
from loka_sim.whole_step import CALLED_GAP_US, by_kind, launches_of_step
from perfmodel.kernels import KERNELS, LIBRARIES, library_of
from perfmodel.timeline import HOST

if TYPE_CHECKING:
    from loka_sim.communication import Communication
    from loka_sim.whatif import WhatIf

Statement = tuple[str, str]
"""Level (`warning` or `note`) and text."""


def statements(answer: WhatIf) -> list[Statement]:
    """Everything a reader must know before trusting the figures: warnings first."""
    found = [*_statistics(answer), *_sweep(answer), *_libraries(answer), *_no_linears(answer), *_left_out(answer)]
    found += _step(answer)
    if answer.settings.calibration is not None:
        found.append(("note", f"Times and errors as the calibration {answer.settings.calibration} corrects them."))
    found.append(("note", _quantization(answer)))
    return sorted(found, key=lambda statement: statement[0] != "warning")


def _quantization(answer: WhatIf) -> str:
    """Where quantization is a kernel of its own, and where it is fused."""
    apart = "Quantization counts as kernels of its own, not fused into the norm or activation before it"
    fused = answer.converted
    if fused is None:
        return f"{apart}."
    rows = [row for s in answer.sites if s.site.name in fused.sites for entry in s.passes.values() for row in entry.rows]
    alone = answer.times.sum(row for row in rows if torch_makes(row))
    more, bf16 = (sum(time.us for time in kinds.values()) for kinds in (fused.by_kind, by_kind(answer.others)))
    return (
        f"{apart}, where kernels are chosen and in the dense step. The whole step has that of {len(fused.sites)} sites as "
        f"torch.compile fuses it: it adds {more - bf16:,.0f} us there, where its own kernels take {alone:,.0f} us."
    )


def _statistics(answer: WhatIf) -> Iterable[Statement]:
    known = answer.distributions
    how = Counter(site.statistics for site in answer.sites)
    if known.origin == "assumed":
        yield "warning", "No statistics: errors assume independent standard normal values. Give --statistics DIR."
        return
    origin = f" ({known.provenance})" if known.provenance else ""
    text = f"Errors from the statistics {known.name}{origin}: {how['exact']} sites by name"
    if how["role"]:
        text += f", {how['role']} by role from the nearest layer, at the width of this model"
    yield "note", f"{text}."
    if set(known.mods) != set(answer.settings.mods):
        theirs, asked = (", ".join(names) or "none" for names in (known.mods, answer.settings.mods))
        yield "warning", f"The statistics were collected with other mods ({theirs}) than asked for ({asked})."
    if how["assumed"]:
        yield "warning", f"{how['assumed']} sites have no statistics: standard normal values are assumed there."


def _sweep(answer: WhatIf) -> Iterable[Statement]:
    """Rows outside the measured sweep, among those that the step times are made of."""
    counts: Counter[object] = Counter()
    outside_us = 0.0
    for site in answer.sites:
        decided = [row for entry in site.passes.values() for row in entry.rows]
        bf16 = flat(launches(site.shape, site.shape.bf16()))
        counts.update(row for row in (*decided, *bf16, *site.around.rows) if row in answer.times.outside)
        outside_us += answer.times.sum(row for row in (*decided, *site.around.rows) if row in answer.times.outside)
    if counts:
        share = outside_us / answer.decision.total.us
        kernels = f"{len(counts)} kernel time{'s' if len(counts) > 1 else ''}"
        yield "warning", f"{kernels} outside the measured sweep ({share:.0%} of the decided step): extrapolated."


def _libraries(answer: WhatIf) -> Iterable[Statement]:
    """What there was to choose from, where that is not torch alone, and what of it has no time."""
    asked, toolbox = answer.settings.libraries, answer.toolbox
    known = {*toolbox.gemms, *toolbox.quantizers}
    timed = set(map(library_of, known))
    for library in asked:
        if library not in timed:
            mend = "measure them with `loka-sim collect --gpu`"
            yield (
                "warning",
                f"The time model of {answer.hardware['name']} knows no kernel of {library}: none was considered; {mend}.",
            )
    if asked == DEFAULT_LIBRARIES:
        return
    untimed = []
    for library in (library for library in LIBRARIES if library in asked and library in timed):
        specs = [spec for name, spec in KERNELS.items() if library_of(name) == library]
        untimed += [spec.name for spec in specs if spec.is_fp8 and spec.kind == "gemm" and spec.name not in known]
        quantizers = [spec.name for spec in specs if spec.makes]
        missing = [name for name in quantizers if name not in known]
        untimed += [f"every quantizer of {library}"] if missing and missing == quantizers else missing
    if untimed:
        yield "note", f"Not considered, the time model does not know them: {', '.join(untimed)}."
    makers = Counter(row.kernel for site in answer.sites for entry in site.passes.values() for row in entry.rows[1:])
    if makers:
        listed = ", ".join(
            f"{count} x {kernel}" for kernel, count in sorted(makers.items(), key=lambda pair: (-pair[1], pair[0]))
        )
        yield "note", f"Quantization and transposition in a step: {listed}."
    beyond = sorted({library_of(k) for k in (*makers, *(p.kernel for s in answer.sites for p in s.passes.values()))} - {"torch"})
    if beyond:
        step = next((step for step in answer.steps if step.name == "torchao"), None)
        instead = "" if step is None else f": its step is {step.total.us:,.0f} us instead of {answer.decision.total.us:,.0f} us"
        yield (
            "note",
            f"The export to torchao cannot run kernels of {' and '.join(beyond)} and decides anew without them{instead}.",
        )


def _no_linears(answer: WhatIf) -> Iterable[Statement]:
    """FP8 that a job has to bring itself: of GEMMs that no linear layer makes."""
    found = [
        decided
        for decided in answer.sites
        if any(KERNELS[entry.kernel].is_fp8 for entry in decided.passes.values())
        and not convertible(decided.site.name, decided.site.op, decided.site.weight)
    ]
    if found:
        gain, more = sum(decided.gain_us for decided in found), len(found) - 3
        names = ", ".join(decided.site.name for decided in found[:3]) + (f" and {more} more" if more > 0 else "")
        yield "warning", (f"No torch.nn.Linear makes {names}: neither the export nor dispatch.runtime runs them in FP8, which "
                          f"is {gain:,.0f} us of what the decision gains; make them linear layers.")  # fmt: skip


def _step(answer: WhatIf) -> Iterable[Statement]:
    dense = "Dense step: GEMMs, quantization, norms, activations and bias gradients, kernel after kernel."
    if answer.others:
        yield "note", (f"{dense} Whole: every kernel of the compiled forward and backward as one CUDA graph, in bf16 but for "
                       "what FP8 takes; tables' rows updated in place; update with AdamW in bf16.")  # fmt: skip
        yield from _taken_back(answer)
        yield from _unsure(answer)
        yield from _host(answer)
        here = written(answer.hardware["name"])
        for name, parts in answer.borrowed.items():
            there = written(name)
            yield "note", (f"Not measured on the {here}: {', '.join(parts)}. They are the {there}'s, and where memory "
                           "is the bound in the ratio of the two bandwidths.")  # fmt: skip
        unknown = [other for other in answer.others if not other.measured]
        if unknown:
            labels = ", ".join(dict.fromkeys(other.label for other in unknown))
            yield "note", f"Timed by their bytes at the copy bandwidth, for want of measured kernels of the kind: {labels}."
        return
    why = f" ({answer.spec.untraced})" if answer.spec.untraced else ""
    yield "note", (f"{dense} Copies, concatenations, the loss, the optimizer and embedding look-ups are not in it, and the whole "
                   f"step is not predicted: the model's specification does not list its other kernels{why}.")  # fmt: skip


def _taken_back(answer: WhatIf) -> Iterable[Statement]:
    """Sites that stay in bf16 for what the whole step would gain by their FP8."""
    found = [site for site in answer.sites if site.step_gain_us is not None]
    if found:
        names = ", ".join(site.site.name for site in found[:3]) + (", ..." if len(found) > 3 else "")
        number = f"{len(found)} site{'s' if len(found) > 1 else ''}"
        yield "note", (f"In bf16 though FP8 would gain there by itself: {number} ({names}). As torch.compile fuses their "
                       "quantization the whole step is longer with it, or not enough shorter.")  # fmt: skip


def _unsure(answer: WhatIf) -> Iterable[Statement]:
    """Whether FP8 that pays in the dense step may cost in the whole one."""
    ratio = answer.decision.whole_speedup
    if ratio is not None and ratio.low_us < 1:
        yield "warning", (f"Of the whole step the gain is not sure: {ratio.us:.2f}x [{ratio.low_us:.2f}, {ratio.high_us:.2f}]. "
                          "Where torch.compile fuses quantization otherwise than told it may cost: time both.")  # fmt: skip


def _host(answer: WhatIf) -> Iterable[Statement]:
    """Whether the host that launches the kernels is the bound, or may be."""
    if answer.communication is None:
        launched = answer.others if answer.converted is None else answer.converted.others
        whole, host = answer.decision.whole, called(launches_of_step(answer.spec, launched), answer.host_step_us)
        if whole is not None and host.us > whole.us:
            yield "warning", ("Without a CUDA graph the host is the bound: it launches the step's kernels in some "
                              f"{host.us:,.0f} us ({host.low_us:,.0f} to {host.high_us:,.0f}, as busy as it is), the GPU runs "
                              "them in less, and no kernel's gain is seen.")  # fmt: skip
    elif not answer.communication.missing:
        made = answer.timelines[DECISION]
        op = next(op for op in made.ops if op.stream == HOST)
        gpus = made.gpu_us
        takes = f"some {op.us:,.0f} us ({op.low_us:,.0f} to {op.high_us:,.0f}, as fast and busy as it is)"
        if op.low_us > gpus:
            yield "warning", (f"The host is the bound: it launches the step's kernels in {takes}, the GPUs run them in "
                              f"{gpus:,.0f}, and no kernel's gain is seen. A larger batch per GPU mends that.")  # fmt: skip
        elif op.us > gpus:
            yield "warning", (f"The host is the bound, unless it is a fast one: it launches the step's kernels in {takes}, the "
                              f"GPUs run them in {gpus:,.0f}. A larger batch per GPU mends that.")  # fmt: skip
        elif op.high_us > gpus:
            yield "note", (f"The host launches the step's kernels in {takes}, the GPUs run them in {gpus:,.0f}: a slow host is "
                           "the bound.")  # fmt: skip


def _left_out(answer: WhatIf) -> Iterable[Statement]:
    if answer.spec.unaccounted:
        yield "warning", f"Seen in the model and not accounted for: {answer.spec.left_out}."
    stand_ins = dict.fromkeys(entry for site in answer.sites for entry in site.around.stand_ins)
    if stand_ins:
        yield "note", f"Without a timing of their own: {', '.join(f'{a} timed as {b}' for a, b in stand_ins)}."
    uncounted = Counter(what for site in answer.sites for what in site.around.uncounted)
    if uncounted:
        listed = ", ".join(f"{what} ({count} sites)" for what, count in uncounted.items())
        yield "warning", f"Not in the step time, no measured kernel stands for it: {listed}."
    if answer.communication is not None:
        measured = answer.communication.basis in ("interpolated", None) and not answer.communication.missing
        yield ("note" if measured else "warning"), in_words(answer.communication)
        if answer.settings.exchange.startswith("fp8"):
            yield "warning", "Embeddings and their gradients travel in FP8: what that costs in accuracy is not predicted."
        if not answer.communication.missing:
            share = slowest(answer.parallel.gpus) - 1
            gaps = f"A host launches the kernels one by one, {CALLED_GAP_US:.0f} us between two. " if answer.others else ""
            yield "note", ("On several GPUs tables are spread evenly, what reads them waits for the embeddings, and the step "
                           f"ends with the last reduction. {_sharded(answer.communication)}{gaps}The slowest GPU is waited "
                           f"for, {share:.1%} slower than the mean. {_overlap(answer)}")  # fmt: skip


def _sharded(found: Communication) -> str:
    """What FSDP is taken to shard."""
    if found.parallel.dense == "ddp":
        return ""
    layers = sum(not unit.kept for unit in found.units)
    if layers < len(found.units):
        return f"FSDP shards {layers} layers, and the model around them. "
    return "FSDP shards parts of 25 MiB, since no sites' names are those of layers. "


def _overlap(answer: WhatIf) -> str:
    """What is taken of kernels and collectives that run at once."""
    found = answer.communication
    model = found.timing.overlap if found and found.timing else None
    if found is None or model is None:
        return "Collectives are taken not to slow what runs beside them: that was not measured."
    across = (
        " Collectives across hosts are taken to slow kernels as much, which was not measured." if found.parallel.hosts > 1 else ""
    )
    ranks = " and ".join(map(str, model.ranks))
    return (
        f"Kernels and collectives that run at once slow each other, as measured between {ranks} GPUs of the "
        f"{written(model.measured_on.name)}.{across} Copies of gradients and gathered parameters count by the bandwidth."
    )

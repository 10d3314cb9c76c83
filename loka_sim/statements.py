"""What a what-if's figures rest on and leave out, in words: part of every answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from loka_sim.dispatch.candidates import launches

if TYPE_CHECKING:
    from loka_sim.whatif import WhatIf

Statement = tuple[str, str]
"""Level (`warning` or `note`) and text."""


def statements(answer: WhatIf) -> list[Statement]:
    """Everything a reader must know before trusting the figures: warnings first."""
    found = [*_statistics(answer), *_sweep(answer), *_left_out(answer)]
    found.append(("note", "Dense step: GEMMs, quantization, norms, activations and bias gradients, kernel after kernel. "
                  "Copies, concatenations, the loss, the optimizer and embedding look-ups are not in it."))  # fmt: skip
    if answer.settings.calibration is not None:
        found.append(("note", f"Times and errors as the calibration {answer.settings.calibration} corrects them."))
    found.append(("note", "Quantization runs as kernels of its own, not fused into the norm or activation before it."))
    return sorted(found, key=lambda statement: statement[0] != "warning")


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
        assignment = {name: decided.kernel for name, decided in site.passes.items()}
        bf16 = site.shape.bf16()
        for launched in (launches(site.shape, assignment), launches(site.shape, bf16)):
            for rows in launched.values():
                counts.update(row for row in rows if row in answer.times.outside)
        counts.update(row for row in site.around.rows if row in answer.times.outside)
        decided = [row for rows in launches(site.shape, assignment).values() for row in rows]
        outside_us += answer.times.sum(row for row in (*decided, *site.around.rows) if row in answer.times.outside)
    if counts:
        share = outside_us / answer.decision.total.us
        kernels = f"{len(counts)} kernel time{'s' if len(counts) > 1 else ''}"
        yield "warning", f"{kernels} outside the measured sweep ({share:.0%} of the decided step): extrapolated."


def _left_out(answer: WhatIf) -> Iterable[Statement]:
    if answer.spec.unaccounted:
        names = list(answer.spec.unaccounted)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield "warning", f"Seen in the model and not accounted for: {'; '.join(names[:3])}{more}."
    stand_ins = dict.fromkeys(entry for site in answer.sites for entry in site.around.stand_ins)
    if stand_ins:
        yield "note", f"Without a timing of their own: {', '.join(f'{a} timed as {b}' for a, b in stand_ins)}."
    uncounted = Counter(what for site in answer.sites for what in site.around.uncounted)
    if uncounted:
        listed = ", ".join(f"{what} ({count} sites)" for what, count in uncounted.items())
        yield "warning", f"Not in the step time, no measured kernel stands for it: {listed}."
    if answer.communication is not None:
        yield ("note" if answer.communication.exposed_us is not None else "warning"), answer.communication.text

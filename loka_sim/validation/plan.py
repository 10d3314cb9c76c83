"""What to measure, and in which order: site by site, first those of which knowing more would change decisions most."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hil.kernels.base import Shape
from hil.shapes import gemm_shapes, memory_shapes
from loka_sim.dispatch.candidates import Row, SiteShape, launches, possible_rows
from loka_sim.dispatch.decide import flat
from loka_sim.dispatch.operands import TORCH, Toolbox
from perfmodel.kernels import KERNELS

if TYPE_CHECKING:
    import pandas

    from loka_sim.whatif import WhatIf

Key = tuple[str, Shape]
FRESH_GEMMS, FRESH_OPERANDS = 400, 120


# Which sweep measures a kind of kernel; whole layers enter no decision.
FAMILIES = {
    "gemm": "gemm", "batched_gemm": "gemm", "quantize": "memory", "layout": "memory", "pointwise": "memory", "linear": "linear",
}  # fmt: skip


def family_of(row: Row) -> str:
    """`gemm` or `memory`: which sweep measures a launch."""
    return FAMILIES[KERNELS[row.kernel].kind]


def shape_of(row: Row) -> Shape:
    """A launch's size."""
    return Shape(row.m, row.n, row.k, row.groups)


@dataclass(frozen=True)
class Work:
    """What to measure of a model.

    Attributes:
        wanted: Per family, shapes in the order in which to measure them, with the kernels to measure on each; what enters no
            decision comes last, and may name a shape once more.
        worth_us: Per family and shape, microseconds a step that knowing its times exactly is expected to save.
    """

    wanted: Mapping[str, Sequence[tuple[Shape, tuple[str, ...]]]]
    worth_us: Mapping[Key, float]

    def rows(self) -> set[Row]:
        """Every launch that there is a kernel here for."""
        from hil.collect import FAMILIES as KINDS
        from hil.collect import legal_runners

        return {
            Row(runner.name, shape.m, shape.n, shape.k, shape.groups)
            for family, some in self.wanted.items()
            for shape, kernels in some
            for runner in legal_runners(shape, KINDS[family], kernels)
        }

    def progress(self, before: set[Row], after: set[Row]) -> dict[str, Any]:
        """How far a stage came that found launches measured `before` and left those `after`, in words, and whether to the end."""
        every = self.rows()
        note = f"{len(every & after - before)} measured, {len(every & after)} of {len(every)} in all"
        parts: dict[Key, list[Row]] = defaultdict(list)
        for row in every:
            parts[family_of(row), shape_of(row)].append(row)

        def known(key: Key, rows: set[Row]) -> float:
            return sum(row in rows for row in parts[key]) / max(len(parts[key]), 1)

        whole = sum(worth * (1 - known(key, before)) for key, worth in self.worth_us.items())
        saved = sum(worth * (known(key, after) - known(key, before)) for key, worth in self.worth_us.items())
        if whole > 0:
            note += f", worth {saved:.1f} of {whole:.1f} us a step"
        return {"note": note, "complete": every <= after}


def model_work(answer: WhatIf, known: Sequence[str]) -> Work:
    """Everything that a decision or the step may need, whole sites one after another.

    What a decision costs can be told of a site alone that is measured whole. Sites come in the order of their worth: the time
    that knowing their kernels' times exactly would save in a step (`perfmodel.information`); where that is equal, the time that
    is spent on them as decided. A GEMM's shape is measured under every one of its family's kernels, an operand's under those
    that a decision or the step may launch, and so are bf16 products that read an operand across.

    Args:
        answer: The decisions as they stand.
        known: Kernels that may be measured.
    """
    worth = value_of_shapes(answer)
    spent: dict[Key, float] = defaultdict(float)
    for site in answer.sites:
        for row in (*(row for decided in site.passes.values() for row in decided.rows), *site.around.rows):
            spent[family_of(row), shape_of(row)] += answer.times.of[row].us
    gemms = {name for name in known if FAMILIES[KERNELS[name].kind] == "gemm"}
    across = {name for name in gemms if KERNELS[name].across}
    kernels: dict[Key, set[str]] = defaultdict(set)
    for row in answer.times.of:
        kernels[family_of(row), shape_of(row)].add(row.kernel)

    def first(keys: Iterable[Key]) -> list[Key]:
        return sorted(keys, key=lambda key: (-worth.get(key, 0.0), -spent[key], key[1].m, key[1].n, key[1].k))

    needed = {site.shape: _keys_of(site.shape, answer.toolbox) & set(kernels) for site in answer.sites}
    sites = sorted(
        needed.items(), key=lambda item: (-sum(worth.get(key, 0.0) for key in item[1]), -sum(spent[key] for key in item[1]))
    )
    ordered = dict.fromkeys(key for _, keys in sites for key in first(keys))
    ordered |= dict.fromkeys(first(set(kernels) - set(ordered)))
    wanted: dict[str, list[tuple[Shape, tuple[str, ...]]]] = {"gemm": [], "memory": []}
    last: list[tuple[Shape, tuple[str, ...]]] = []
    for family, shape in ordered:
        if family == "gemm":
            wanted[family].append((shape, tuple(sorted(gemms - (across - kernels[family, shape])))))
            continue
        around = sorted(name for name in kernels[family, shape] if KERNELS[name].kind == "pointwise")
        choices = sorted(kernels[family, shape] - set(around))
        wanted[family] += [(shape, tuple(choices))] if choices else []
        last += [(shape, tuple(around))] if around else []
    return Work({**wanted, "memory": [*wanted["memory"], *last]}, worth)


def _keys_of(shape: SiteShape, toolbox: Toolbox) -> set[Key]:
    """What must be measured of a site to know what decisions about it cost: those are compared with torch's kernels."""
    rows = possible_rows(shape, toolbox) | possible_rows(shape, replace(TORCH, capability=toolbox.capability))
    return {(family_of(row), shape_of(row)) for row in rows}


def measured_rows(rows: pandas.DataFrame) -> set[Row]:
    """Launches of the model's that rows of a sweep (kernel, m, n, k, groups, sweep) are of."""
    some = rows[rows["sweep"] == "model"][["kernel", "m", "n", "k", "groups"]].drop_duplicates()
    return {Row(str(k), int(m), int(n), int(depth), int(groups)) for k, m, n, depth, groups in some.itertuples(index=False)}


def value_of_shapes(answer: WhatIf) -> dict[Key, float]:
    """Microseconds a step that knowing a shape's times exactly is expected to save."""
    from perfmodel.information import Decision, value_of_measuring

    rows = sorted(answer.times.of)
    index = {row: number for number, row in enumerate(rows)}
    counts: Counter[tuple[SiteShape, tuple[tuple[str, str], ...]]] = Counter()
    for site in answer.sites:
        counts[site.shape, tuple((name, decided.kernel) for name, decided in site.passes.items())] += 1
    decisions = []
    for (shape, chosen), count in counts.items():
        alternatives = _alternatives(answer, shape, dict(chosen))
        if len(alternatives) > 1:
            decisions.append(Decision(count, [[index[row] for row in some] for some in alternatives], 0))
    groups: dict[Key, list[int]] = {}
    for row, number in index.items():
        groups.setdefault((family_of(row), shape_of(row)), []).append(number)
    time, low, high = np.array([answer.times.of[row] for row in rows]).T
    values = value_of_measuring(time, low, high, decisions, list(groups.values()))
    return dict(zip(groups, values.tolist(), strict=True))


def _alternatives(answer: WhatIf, shape: SiteShape, chosen: dict[str, str]) -> list[tuple[Row, ...]]:
    """What the decision launches, then what it would with one pass run by each other accurate kernel, and all in bf16."""
    site = next(site for site in answer.sites if site.shape == shape)
    options = [chosen, shape.bf16()]
    for name, decided in site.passes.items():
        for candidate in decided.candidates:
            safe = candidate.accuracy is None or candidate.accuracy.mere < answer.settings.max_mere
            if candidate.illegal is None and safe and candidate.kernel != chosen[name]:
                options.append({**chosen, name: candidate.kernel})
    found = dict.fromkeys(flat(launches(shape, option, answer.toolbox)) for option in options)
    return [some for some in found if all(row in answer.times.of for row in some)]


def fresh_work(seed: int, known: Sequence[str]) -> dict[str, list[tuple[Shape, tuple[str, ...]]]]:
    """Random shapes as LRMs have them, under every known kernel, to judge by and never to refine on.

    Of memory-bound kernels, quantization and transposition of all shapes come first: they enter decisions.
    """
    rows = memory_shapes(FRESH_OPERANDS, seed)

    def of(*kinds: str) -> tuple[str, ...]:
        return tuple(sorted(name for name in known if KERNELS[name].kind in kinds))

    choices, around = of("quantize", "layout"), of("pointwise")
    ahead = max(1, FRESH_OPERANDS // 4)
    operands = [(shape, choices) for shape in rows[:ahead]] + [(shape, choices + around) for shape in rows]
    return {"gemm": [(shape, of("gemm", "batched_gemm")) for shape in gemm_shapes(FRESH_GEMMS, seed)], "memory": operands}

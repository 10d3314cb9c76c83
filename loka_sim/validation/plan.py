"""What to measure, and in which order: first what would change a decision most."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from hil.kernels.base import Shape
from hil.shapes import gemm_shapes, memory_shapes
from loka_sim.dispatch.candidates import Row, SiteShape, launches
from loka_sim.dispatch.decide import flat
from perfmodel.kernels import KERNELS

if TYPE_CHECKING:
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


def model_shapes(answer: WhatIf) -> dict[str, list[Shape]]:
    """Every shape that a decision or the step may need, by family; what would change a decision most comes first.

    A shape's worth is the time that knowing its kernels' times exactly would save in a step (`perfmodel.information`); where
    that is equal, the time that is spent on it as decided.
    """
    worth = value_of_shapes(answer)
    spent: dict[Key, float] = defaultdict(float)
    for site in answer.sites:
        for row in (*(row for decided in site.passes.values() for row in decided.rows), *site.around.rows):
            spent[family_of(row), shape_of(row)] += answer.times.of[row].us
    keys = {(family_of(row), shape_of(row)) for row in answer.times.of}
    ordered = sorted(keys, key=lambda key: (-worth.get(key, 0.0), -spent[key], key[1].m, key[1].n, key[1].k))
    result: dict[str, list[Shape]] = {"gemm": [], "memory": []}
    for family, shape in ordered:
        result[family].append(shape)
    return result


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
    found = dict.fromkeys(flat(launches(shape, option)) for option in options)
    return [some for some in found if all(row in answer.times.of for row in some)]


def fresh_shapes(seed: int) -> dict[str, list[Shape]]:
    """Random shapes as LRMs have them, to judge by and never to refine on."""
    return {"gemm": gemm_shapes(FRESH_GEMMS, seed), "memory": memory_shapes(FRESH_OPERANDS, seed)}

"""What a validation measures first, and how far it says that it came."""

from dataclasses import replace

import numpy as np
import pytest

import loka_sim
from loka_sim.dispatch.candidates import possible_rows
from loka_sim.dispatch.cost import Time, Times
from loka_sim.validation import plan
from perfmodel.kernels import KERNELS


@pytest.fixture(scope="module")
def answer():
    return loka_sim.whatif("wukong", batch=1024)


def known_exactly(answer, keys):
    """The same decisions, with the times of some shapes known."""
    times = {
        row: Time(t.us, t.us * 0.999, t.us * 1.001) if (plan.family_of(row), plan.shape_of(row)) in keys else t
        for row, t in answer.times.of.items()
    }
    return replace(answer, times=Times(times))


def test_what_is_known_is_worth_nothing_more(answer):
    before = plan.value_of_shapes(answer)
    first = sorted(before, key=lambda key: -before[key])[:5]
    after = plan.value_of_shapes(known_exactly(answer, set(first)))
    assert all(after[key] < 0.02 * before[key] for key in first)


def test_whole_sites_come_one_after_another_the_most_valuable_first(answer):
    """What a decision costs can be told of sites that were measured whole: what is cut short shall have as many as it can."""
    work = plan.model_work(answer, list(KERNELS))
    needed = {
        site.shape: {(plan.family_of(row), plan.shape_of(row)) for row in possible_rows(site.shape, answer.toolbox)}
        for site in answer.sites
    }
    value = {shape: sum(work.worth_us[key] for key in keys) for shape, keys in needed.items()}
    sites = sorted((shape for shape in value if value[shape] > 0), key=lambda shape: -value[shape])
    # Of sites that are worth as much, as where all that is worth knowing is an operand of both, either may come first.
    ends = [number for number in range(1, len(sites)) if value[sites[number]] < value[sites[number - 1]]]
    assert len(ends) > 3
    for number in (*ends, len(sites)):
        keys = set().union(*(needed[shape] for shape in sites[:number]))
        for family in ("gemm", "memory"):
            some = {shape for kind, shape in keys if kind == family}
            assert {shape for shape, _ in work.wanted[family][: len(some)]} == some
    assert set().union(*(possible_rows(site.shape, answer.toolbox) for site in answer.sites)) <= work.rows()
    # The second half goes by what is left to learn: what is known by then stands no longer first.
    known = known_exactly(answer, needed[sites[0]])
    again = {("gemm", shape) for shape, _ in plan.model_work(known, list(KERNELS)).wanted["gemm"][:1]}
    assert not again & needed[sites[0]] or again & needed[sites[1]]


def test_the_worth_is_that_of_a_search_of_its_own(answer):
    """Draw a shape's times, decide anew among the same ways, and see what is saved."""
    worth = plan.value_of_shapes(answer)
    key = max((key for key in worth if key[0] == "memory"), key=lambda key: worth[key])
    rows = [row for row in answer.times.of if (plan.family_of(row), plan.shape_of(row)) == key]
    rng, saved = np.random.default_rng(5), []
    ways = [
        plan._alternatives(answer, site.shape, {name: decided.kernel for name, decided in site.passes.items()})
        for site in answer.sites
    ]
    ways = [some for some in ways if any(row in rows for way in some for row in way)]
    for _ in range(400):
        drawn = dict(answer.times.of)
        for row in rows:
            time = answer.times.of[row]
            normal = rng.standard_normal()
            up, down = np.log(time.high_us / time.us) / 1.6449, np.log(time.us / time.low_us) / 1.6449
            drawn[row] = Time(time.us * np.exp(normal * (up if normal > 0 else down)), 0.0, 0.0)
        gain = 0.0
        for some in ways:
            costs = [sum(drawn[row].us for row in way) for way in some]
            now = [sum(answer.times.of[row].us for row in way) for way in some]
            gain += costs[0] - min(costs) - (now[0] - min(now))
        saved.append(gain)
    # The plan credits a shape with part of a gap that is there at the medians already: no less than the drawn saving.
    assert worth[key] >= np.mean(saved) - 3 * np.std(saved) / 20
    assert worth[key] > 0


def test_progress_in_words(answer):
    work = plan.model_work(answer, list(KERNELS))
    every = work.rows()
    best = max(work.worth_us, key=lambda key: work.worth_us[key])
    some = {row for row in every if (plan.family_of(row), plan.shape_of(row)) == best}
    found = work.progress(set(), some)
    whole = sum(work.worth_us.values())
    said = f"{len(some)} measured, {len(some)} of {len(every)} in all, worth {work.worth_us[best]:.1f} of {whole:.1f} us a step"
    assert found["note"] == said and not found["complete"]
    # One kernel of several is not the shape.
    part = work.progress(set(), {next(iter(some))})
    assert part["note"].startswith(f"1 measured, 1 of {len(every)} in all, worth ") and len(some) > 1 and said not in part["note"]
    assert work.progress(some, every)["complete"]

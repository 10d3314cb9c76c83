"""Which sites' FP8 is taken back: against every subset of the kinds of sites, on made-up steps; and of a real model's."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest

from loka_sim.dispatch.candidates import Row
from loka_sim.dispatch.cost import Time
from loka_sim.dispatch.decide import PassDecision
from loka_sim.taken_back import MOST_KINDS, taken_back
from loka_sim.whatif import whatif

BF16, FP8 = "torch/bf16", "torch/fp8_rowwise_fast"
BF16_STEP_US = 1000.0


@dataclass
class Whole:
    """A step as `taken_back` sees it."""

    whole: Time | None
    whole_speedup: Time | None


def sure(us):
    return Time(us, us, us)


def decision(number, gain_us, kernel=FP8):
    rows = (Row(kernel, 64, 64, 64 * (number + 1)),)
    return {"output": PassDecision("fast", kernel, BF16, rows, {}, sure(10.0), sure(10.0 + gain_us), None, explained=None)}


class Model:
    """Sites of some kinds, and what the whole step takes by which of them are in FP8."""

    def __init__(self, saves, together=(), each=2, half_width=0.05):
        """Of each kind what a step saves by its FP8, of pairs what they save together beyond that."""
        self.saves, self.together, self.half_width = saves, dict(together), half_width
        self.kinds = [kind for kind in range(len(saves)) for _ in range(each)]
        self.decided = {kind: decision(kind, 1.0 + kind) for kind in range(len(saves))}
        self.asked = []

    def us(self, fast):
        pairs = sum(us for pair, us in self.together.items() if set(pair) <= set(fast))
        return BF16_STEP_US - sum(self.saves[kind] for kind in fast) - pairs

    def told(self, assignments):
        fast = frozenset(kind for kind, entry in zip(self.kinds, assignments, strict=True) if entry["output"] == FP8)
        slow = frozenset(kind for kind, entry in zip(self.kinds, assignments, strict=True) if entry["output"] == BF16)
        assert not fast & slow, "sites of a kind are decided alike"
        self.asked.append(fast)
        ratio = BF16_STEP_US / self.us(fast)
        return Whole(sure(self.us(fast)), Time(ratio, ratio - self.half_width, ratio + self.half_width))

    def taken_back(self):
        return taken_back(self.kinds, self.decided, self.told)


@pytest.mark.parametrize("seed", range(20))
def test_of_kinds_that_do_not_touch_each_other_what_does_not_gain_is_taken_back(seed):
    """The best of all subsets."""
    saves = np.random.default_rng(seed).uniform(-20, 10, 5).round(1).tolist()
    model = Model(saves, half_width=1.0)
    subsets = [frozenset(some) for number in range(6) for some in combinations(range(5), number)]
    best = min(subsets, key=model.us)
    found = model.taken_back()
    assert set(range(5)) - set(found) == best
    assert all(us == pytest.approx(saves[kind]) for kind, us in found.items())


def test_of_two_that_cost_only_together_one_stays():
    """Each alone gains 4 us, both cost 6: taking both back for either being in the other's way would lose all."""
    model = Model([4.0, 3.0], {(0, 1): -13.0})
    assert model.us({0, 1}) > BF16_STEP_US > model.us({1}) > model.us({0})
    assert set(model.taken_back()) == {1}


def test_two_that_gain_only_together_stay():
    assert Model([-1.0, -1.0], {(0, 1): 5.0}).taken_back() == {}


def test_where_nothing_less_than_all_helps_all_are_taken_back():
    """Any one left keeps what all of them cost."""
    model = Model([-1.0, -1.0, -1.0], {(0, 1): 1.5, (0, 2): 1.5, (1, 2): 1.5, (0, 1, 2): -4.0})
    assert model.us({0, 1, 2}) > BF16_STEP_US
    assert set(model.taken_back()) == {0, 1, 2}


@pytest.mark.parametrize(("least", "back"), [(1.0, set()), (1.05, {0}), (1.3, {0, 1})])
def test_what_gains_less_than_a_decision_asks_for_is_taken_back(least, back):
    """Two sites of 11 us in bf16 gain 1 us in all, 1.048 times as fast; two of 12 us gain 4 us, 1.2 times."""
    model = Model([1.0, 4.0])
    found = taken_back(model.kinds, model.decided, model.told, least)
    assert set(found) == back and all(us == pytest.approx(model.saves[kind]) for kind, us in found.items())


def test_a_step_that_surely_gains_is_left_as_it_is():
    model = Model([60.0, -1.0], half_width=0.05)
    assert model.taken_back() == {} and len(model.asked) == 1


def test_without_fp8_or_without_a_whole_step_nothing_is_taken_back():
    model = Model([-1.0])
    model.decided = {0: decision(0, 0.0, BF16)}
    assert model.taken_back() == {} and model.asked == []
    assert taken_back([0], {0: decision(0, 1.0)}, lambda assignments: Whole(None, None)) == {}


def test_of_many_kinds_those_that_gain_most_are_one():
    number = MOST_KINDS + 4
    model = Model([1.0] * (MOST_KINDS - 1) + [-5.0] * (number - MOST_KINDS + 1), half_width=1.0)
    assert set(model.taken_back()) == set(range(MOST_KINDS - 1, number))
    assert len(model.asked) <= 2 * MOST_KINDS


def test_kinds_that_launch_the_same_are_asked_once():
    model = Model([-2.0, -3.0], half_width=1.0)
    model.decided[1] = model.decided[0]
    model.told = lambda assignments, told=model.told: told(assignments)
    assert set(model.taken_back()) == {0, 1} and all(len(fast) in (0, 2) for fast in model.asked)


@pytest.fixture(scope="module")
def answer():
    """A site that is 1.04 times as fast by itself, and costs the whole step 2%."""
    return whatif("dcnv2-production", batch=8192)


def test_a_model_is_told_what_it_would_lose(answer):
    (back,) = (site for site in answer.sites if site.step_gain_us is not None)
    assert back.step_gain_us < 0 and {entry.kernel for entry in back.passes.values()} == {BF16}
    assert not answer.pays and answer.decision.whole_speedup == sure(1.0)
    said = [entry.reason for entry in back.passes.values() if "the whole step takes" in entry.reason]
    assert said and f"{-back.step_gain_us:.1f} us longer" in said[0]
    document = answer.to_dict()
    assert [site["name"] for site in document["sites"] if "step_gain_us" in site] == [back.site.name]
    assert "where it would be faster by itself, the whole step is not, or not enough" in document["verdict"]["text"]
    assert any(back.site.name in entry["text"] for entry in document["statements"] if "by itself" in entry["text"])


def test_what_gains_in_the_whole_step_is_kept():
    found = whatif("dcnv2-production", batch=32768)
    assert found.pays and not any(site.step_gain_us for site in found.sites) and found.decision.whole_speedup.us > 1

"""What a host takes to launch a step: what it launches, counted, and times held to steps as they were called on H200s."""

import json

import pytest

from loka_sim.host_time import LAUNCH, STEP, USUAL_US, called, called_on_several
from loka_sim.whatif import whatif
from loka_sim.whole_step import LOSS_LAUNCHES, TABLE_LAUNCHES, batched_products, launched, launches_of_step
from perfmodel.data_folder import data_folder

RANKS = [step for step in json.loads((data_folder() / "h200" / "gpu_steps.json").read_text())["steps"] if step["ranks"] == 1]
STEPS = json.loads((data_folder() / "h200" / "host_steps.json").read_text())["steps"]


@pytest.mark.parametrize(("model", "slower"), [("interformer-small", set()), ("dcnv2", {"scatter"})])
def test_a_host_launches_every_stage_of_every_kernel_and_nothing_for_what_is_none(model, slower):
    """As many as the specification's kernels are: nothing for gaps, nor for adds that meet."""
    answer = whatif(model, batch=4096)
    gemms = sum(len(site.passes) for site in answer.spec.sites)
    number = launched(answer.spec.fused, answer.spec.batch)
    assert number > sum(kernel.count for kernel in answer.spec.fused)
    assert {other.kind for other in answer.others if other.launches == 0} == {"gap"} | slower
    number += gemms + batched_products(answer.spec)
    assert launches_of_step(answer.spec, answer.others) == number
    assert called(number).us == pytest.approx(USUAL_US * (STEP + LAUNCH * number))
    assert called(number, 5000.0).us == pytest.approx(5000 * (STEP + LAUNCH * number))


@pytest.mark.parametrize("step", [step for step in STEPS if step["variant"] == "bf16" and ":" not in step["model"]],
                         ids=lambda step: step["model"])  # fmt: skip
def test_steps_as_called_given_how_fast_the_host_was(step):
    """Each visit's step on an H200's host, within the interval and a tenth; without the host's speed a wider one holds it."""
    answer = whatif(step["model"], batch=step["batch"])
    number = launches_of_step(answer.spec, answer.others) + TABLE_LAUNCHES * len(answer.spec.tables)
    unknown = called(number)
    off = []
    for visit in step["visits"]:
        measured, eager = visit["step"][1], visit["eager"][1]
        found = called(number, eager)
        assert found.low_us <= measured <= found.high_us
        assert unknown.low_us <= measured <= unknown.high_us
        assert found.high_us / found.low_us < unknown.high_us / unknown.low_us
        off.append(found.us / measured - 1)
    assert abs(sum(off)) / len(off) < 0.1


@pytest.mark.parametrize("step", RANKS, ids=lambda step: f"{step['model']}-{step['dense']}")
def test_steps_of_a_rank_that_exchanges_with_itself(step):
    """Under DDP and FSDP, of an H200's host whose speed was measured beside them: within a third; and as of any host."""
    answer = whatif(step["model"], batch=step["batch"], gpus=2, dense=step["dense"])
    tables = TABLE_LAUNCHES * len(answer.spec.tables) + LOSS_LAUNCHES
    number = launches_of_step(answer.spec, answer.others) + tables
    found = called_on_several(number, answer.communication, max(step["host_step_us"]))
    measured = 1e3 * step["step"][f"{step['dense']}_exchange"]["p50_ms"]
    assert abs(found.us / measured - 1) < 0.34
    unknown = called_on_several(number, answer.communication)
    assert unknown.low_us <= measured <= unknown.high_us

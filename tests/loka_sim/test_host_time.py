"""What a host takes to launch a step: what it launches, counted, and times held to steps as they were called on H200s."""

import pytest

from loka_sim.host_time import CALL_US, STEP_CALL_US, called
from loka_sim.whatif import whatif
from loka_sim.whole_step import launched


@pytest.mark.parametrize(("model", "slower"), [("interformer-small", "uneven"), ("dcnv2", "scatter")])
def test_a_host_launches_every_stage_of_every_kernel_and_nothing_for_what_is_none(model, slower):
    """As many as the specification's kernels are: nothing for gaps, adds that meet, weight gradients that take longer."""
    answer = whatif(model, batch=4096)
    gemms = sum(len(site.passes) for site in answer.spec.sites)
    number = launched(answer.spec.fused, answer.spec.batch)
    assert number > sum(kernel.count for kernel in answer.spec.fused)
    assert {other.kind for other in answer.others if other.launches == 0} == {"gap", slower}
    assert called(answer.others, gemms).us == pytest.approx(STEP_CALL_US + CALL_US * (gemms + number))

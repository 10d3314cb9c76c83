"""An optimizer's step: launches as torch cuts them, and times held to those measured on an H200."""

import json

import pytest

from perfmodel.data_folder import data_folder
from perfmodel.optimizers import BLOCKS, CHUNK, LAUNCH_US, OPTIMIZERS, step_us

ROWS = json.loads((data_folder() / "h200" / "eager_ops.json").read_text())["rows"]
# Layers with their biases, as `python -m hil.fused eager` lists them: not fitted to.
LAYERS = {
    10_506_240: (512 * 512, 512) * 40, 28_319_744: (3456 * 1024, 1024) * 8, 268_566_528: (8192 * 2048, 8192) * 16,
    526_336: (256 * 512, 512) * 4,
}  # fmt: skip


def measured(name, elements):
    (row,) = [r for r in ROWS if (r["operation"], r.get("elements"), r.get("dtype")) == (name, elements, "bfloat16")]
    return row["kernels_us"]


@pytest.mark.parametrize(("optimizer", "worst"), [("adamw", 0.10), ("sgd", 0.20), ("sgd_momentum", 0.20)])
@pytest.mark.parametrize("elements", LAYERS)
def test_layers_that_were_not_fitted_to(optimizer, worst, elements):
    assert step_us(LAYERS[elements], optimizer) == pytest.approx(measured(f"{optimizer}_fused", elements), rel=worst)


def test_few_chunks_take_as_long_as_one():
    one = step_us([CHUNK], "adamw")
    assert step_us([CHUNK] * 30, "adamw") == one
    assert step_us([CHUNK] * 40, "adamw") == pytest.approx(2 * (one - LAUNCH_US) + LAUNCH_US)  # 36 tensors a launch


def test_a_large_tensor_runs_at_its_bandwidth():
    kind, size = OPTIMIZERS["sgd"], 8 * BLOCKS * CHUNK
    assert step_us([size], "sgd") == pytest.approx(8 * LAUNCH_US + 6 * size / (kind.bandwidth_tbs * 1e6))


def test_nothing_takes_no_time_but_the_count():
    assert step_us([], "sgd") == 0

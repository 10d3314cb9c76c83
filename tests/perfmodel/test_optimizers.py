"""An optimizer's step: launches as torch cuts them, and times held to those measured on H200s."""

import math

import numpy as np
import pytest

from perfmodel.fit_optimizers import errors, fitted, measured, split
from perfmodel.optimizers import BLOCKS, CHUNK, COUNTED, OPTIMIZERS, UNCERTAINTY, launches, step_us

# Layers with their biases, and microseconds of a step over them in bf16 (adamw, sgd, sgd with momentum): sums of torch.profiler's
# durations on another machine's H200 than those that were fitted to, driver 580.159.04, torch 2.11.
LAYERS = {
    (512 * 512, 512) * 40: (120.70, 44.80, 52.89), (3456 * 1024, 1024) * 8: (157.15, 60.03, 98.91),
    (8192 * 2048, 8192) * 16: (1387.14, 463.10, 883.33), (256 * 512, 512) * 4: (37.98, 17.60, 19.97),
}  # fmt: skip


@pytest.mark.parametrize("sizes", LAYERS, ids=sum)
def test_layers_timed_on_another_machine(sizes):
    found = [step_us(sizes, optimizer) for optimizer in ("adamw", "sgd", "sgd_momentum")]
    assert found == pytest.approx(LAYERS[sizes], rel=0.1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lists_that_were_not_fitted_to(optimizer):
    known, held_out = split(measured("h200"))
    assert not {tuple(r["sizes"]) for r in known} & {tuple(r["sizes"]) for r in held_out}
    off = np.abs(np.expm1(errors(optimizer, held_out)))
    assert off.mean() < 0.05
    # The constants are what the fit gives.
    again = fitted(optimizer, known)
    assert [step_us(r["sizes"], optimizer, again) for r in held_out] == pytest.approx(
        [step_us(r["sizes"], optimizer) for r in held_out], rel=0.01
    )


def test_nine_of_ten_are_as_close_as_is_said():
    _, held_out = split(measured("h200"))
    off = np.abs(np.expm1(np.concatenate([errors(name, held_out) for name in OPTIMIZERS])))
    assert (off < UNCERTAINTY).mean() >= 0.9


def test_launches_are_as_many_as_torch_makes():
    for row in measured("h200"):
        if row["optimizer"] == "adagrad":  # five kernels, each of which cuts its lists otherwise
            continue
        kind, number = OPTIMIZERS[row["optimizer"]], len(row["sizes"])
        counting = math.ceil(number / COUNTED) if kind.counts else 0
        assert len(row["launch_us"]) == len(list(launches(row["sizes"], kind.tensors))) + counting, row["sizes"]


def test_a_full_launch_is_cut_at_its_blocks():
    assert list(launches([8 * BLOCKS * CHUNK], 36)) == [(CHUNK, BLOCKS * CHUNK)] * 8
    assert list(launches([CHUNK] * 40, 36)) == [(CHUNK, 36 * CHUNK), (CHUNK, 4 * CHUNK)]
    assert list(launches([5, 7], 36)) == [(7, 12)]


def test_tensors_without_elements_are_left_out():
    assert list(launches([0, 5, 0, 7, 0, 9], 2)) == [(7, 12), (9, 9)]


def test_fewer_lists_than_four_are_all_fitted_to():
    rows = [{"sizes": [size]} for size in (1, 2, 3)]
    assert split(rows) == (rows, [])


def test_nothing_takes_no_time():
    assert [step_us([], name) for name in OPTIMIZERS] == [0.0] * len(OPTIMIZERS)

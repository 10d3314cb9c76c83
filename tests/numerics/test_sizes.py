"""Sizes of launches are those that Triton's own functions give; sizes that callers give are whole numbers, or refused."""

import numpy as np
import pytest
import torch
import triton

import numerics
from numerics import gaussian
from numerics.noise import operand_noise
from numerics.sizes import cdiv, next_power_of_2, unit_of


@pytest.mark.parametrize("size", [1, 2, 3, 127, 128, 129, 2**20, 2**20 + 1, 2**31])
def test_as_triton_has_them(size):
    assert next_power_of_2(size) == triton.next_power_of_2(size)
    assert all(cdiv(size, divisor) == triton.cdiv(size, divisor) for divisor in (1, 2, 3, 16, 1000))


def test_the_unit_of_sizes():
    for sizes in ((1, 16), (24, 40), (12, 64), (6, 8), (48,), (96, 80), (1 << 40, 3 << 30)):
        assert unit_of(*sizes) == max(unit for unit in (1, 2, 4, 8, 16) if not any(size % unit for size in sizes))


# Sizes as callers give them

NORMAL = gaussian(64)
MATRIX = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
CODES = MATRIX.to(torch.float8_e4m3fn)
E4M3 = "e4m3/rowwise"
TAKES_A_SIZE = {
    "predict_gemm_error m": lambda size: numerics.predict_gemm_error(NORMAL, NORMAL, (size, 64, 64), E4M3, E4M3, "fp32"),
    "predict_gemm_error k": lambda size: numerics.predict_gemm_error(NORMAL, NORMAL, (64, 64, size), E4M3, E4M3, "fp32"),
    "predict_gemm_errors n": lambda size: numerics.predict_gemm_errors([(NORMAL, NORMAL, (64, size, 64), E4M3, E4M3, "fp32")]),
    "predict_gemm_error split_k": lambda size: numerics.predict_gemm_error(
        NORMAL, NORMAL, (64, 64, 64), E4M3, E4M3, "hopper_fast", split_k=size
    ),
    "sample_gemm_error k": lambda size: numerics.sample_gemm_error(
        NORMAL, NORMAL, (2, 2, size), E4M3, E4M3, "fp32", pairs=2, least_pairs=2
    ),
    "gemm_error max_rows": lambda size: numerics.gemm_error(MATRIX, MATRIX, E4M3, E4M3, "fp32", max_rows=size),
    "fp8_matmul split_k": lambda size: numerics.fp8_matmul(CODES, CODES, accumulation="hopper_fast", split_k=size),
    "estimated_split_k": lambda size: numerics.estimated_split_k(16, size, 16),
    "fidelity": lambda size: numerics.fidelity("torch/bf16", (16, size, 16)),
    "gaussian": gaussian,
    "uniform": numerics.uniform,
    "resized": NORMAL.resized,
    "sample": lambda size: numerics.sample(NORMAL, size, np.random.default_rng(0)),
    "truncated": lambda size: numerics.matrix_normal(np.zeros((64, 64)), np.eye(64), np.eye(64)).truncated(size),
    "StatisticsAccumulator": numerics.StatisticsAccumulator,
    "PairStatistics": lambda size: numerics.PairStatistics((1, size, 1), 1.0, 1.0, 1.0, (), (), ()),
    "PairStatistics.from_dict": lambda size: numerics.PairStatistics.from_dict(
        {"shape": [1, size, 1], "power": 1.0, "nearness": 1.0, "rounding": 1.0, "noise": {}}
    ),
    "measure_pair": lambda size: numerics.measure_pair([(MATRIX, MATRIX)], (E4M3,), each=size),
    "operand_noise": lambda size: operand_noise(NORMAL, numerics.Recipe.parse(E4M3), 64, size),
}


@pytest.mark.parametrize("name", TAKES_A_SIZE)
def test_a_size_is_a_whole_number(name):
    call = TAKES_A_SIZE[name]
    for size in (2, np.int64(2)):
        call(size)
    # An answer for 1 that is remembered is not one for True.
    call(1)
    for size in (2.5, 2.0, np.float32(2.5), True, np.True_, "2", -1):
        with pytest.raises((ValueError, TypeError)) as error:
            call(size)
        message = str(error.value)
        assert "\n" not in message and (repr(size) in message or str(size) in message)
        assert error.type is ValueError or name == "fp8_matmul split_k"


def test_rows_of_a_sample_divide_those_of_a_batch():
    with pytest.raises(ValueError, match="each = 3 does not divide the 64 rows of a batch"):
        numerics.measure_pair([(MATRIX, MATRIX)], (E4M3,), each=3)

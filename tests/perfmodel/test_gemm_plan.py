"""How our FP8 GEMM cuts many shapes at once, against the plan of each."""

import numpy as np
import pytest

from perfmodel.gemm_plan import parts_of_many, plan_of


@pytest.mark.parametrize("fast", [True, False])
def test_parts_of_many_are_those_of_each_plan(fast):
    generator = np.random.default_rng(0)
    large = np.exp(generator.uniform(0, np.log(60_000), (1500, 3))).astype(int) + 1
    small = generator.integers(1, 300, (500, 3))
    shapes = [tuple(map(int, shape)) for shape in (*large, *small, (1, 1, 1), (64, 64, 2**20), (16, 16, 8192))]
    parts = parts_of_many(shapes, fast)
    assert parts == [plan_of(*shape, fast).parts for shape in shapes]
    assert len(set(parts)) > 10 and all(type(part) is int for part in parts)


def test_of_no_shapes_there_are_no_parts():
    assert parts_of_many([]) == []

"""Sizes of launches are those that Triton's own functions give."""

import pytest
import triton

from numerics.sizes import cdiv, next_power_of_2


@pytest.mark.parametrize("size", [1, 2, 3, 127, 128, 129, 2**20, 2**20 + 1, 2**31])
def test_as_triton_has_them(size):
    assert next_power_of_2(size) == triton.next_power_of_2(size)
    assert all(cdiv(size, divisor) == triton.cdiv(size, divisor) for divisor in (1, 2, 3, 16, 1000))

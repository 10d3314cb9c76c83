"""What the trees see of a batched or grouped GEMM beyond the sizes: a product's last tiles, and its tiles."""

import numpy as np
import pytest

from perfmodel import hardware
from perfmodel.features import PLANNED, features
from perfmodel.gemm_plan import plan_of

SIZES = (
    np.array([192.0, 4096.0, 1.0]),
    np.array([2048.0, 4096, 129]),
    np.array([64.0, 100, 2048]),
    np.array([4.0, 2, 9]),
)


def seen(kernel: str, planned: int = PLANNED) -> dict[str, list[float]]:
    names, matrix = features(kernel, *SIZES, hardware.load("h200"), planned)
    return {name: matrix[:, number].tolist() for number, name in enumerate(names)}


@pytest.mark.parametrize("kernel", ["torch/bf16_batched", "torch/fp8_grouped_rowwise_split"])
def test_what_is_left_for_the_last_tile_of_a_product(kernel):
    found = seen(kernel)
    assert found["last_m"] == [64, 128, 1] and found["last_n"] == [128, 128, 1] and found["last_k"] == [64, 36, 64]
    assert found["log2_less_of_mn"][0] == pytest.approx(np.log2(192))
    assert found["log2_more_of_mn"][2] == pytest.approx(np.log2(129))


def test_tiles_of_one_product_of_a_grouped_gemm():
    found = seen("torch/fp8_grouped_rowwise_fast")
    np.testing.assert_allclose(np.exp2(found["log2_tiles_64x32"]), [3 * 64, 64 * 128, 5])
    np.testing.assert_allclose(np.exp2(found["log2_tiles_128x256"]), [2 * 8, 32 * 16, 1])
    assert found["large_sizes"] == [0, 1, 0]
    assert "large_sizes" not in seen("torch/bf16_batched")


def test_models_fitted_before_see_what_they_saw():
    single = seen("torch/bf16")
    assert list(seen("torch/bf16_batched", 0)) == list(single) == list(seen("torch/bf16", 0))
    assert list(seen("torch/bf16_batched"))[: len(single)] == list(single)
    ours = [list(seen("loka/fp8_rowwise_fast", planned)) for planned in (0, 1, PLANNED)]
    assert ours[0] == ours[1] == list(single) == ours[2][: len(single)] and len(ours[2]) > len(single)


def test_how_our_gemm_is_cut():
    """192 x 2,048 of K = 64 and the rest, as `plan_of` says of each."""
    found = seen("loka/fp8_rowwise_split")
    plans = [plan_of(*(int(size) for size in shape), fast=False) for shape in zip(*SIZES[:3], strict=True)]
    for name in ("rows", "columns", "stages", "swapped"):
        assert found[f"plan_{name}"] == [getattr(plan, name) for plan in plans]
    assert np.exp2(found["log2_plan_parts"]).tolist() == [plan.parts for plan in plans]
    assert found["plan_last_step"] == [64, 100, 128] and plans[2].swapped
    programs = [plan.parts * -(-high // plan.rows) * -(-wide // plan.columns)
                for plan, (high, wide) in zip(plans, ((192, 2048), (4096, 4096), (129, 1)), strict=True)]  # fmt: skip
    np.testing.assert_allclose(np.exp2(found["log2_plan_programs"]), programs)
    np.testing.assert_allclose(np.exp2(found["log2_plan_each"]), [-(-number // 132) for number in programs])
    np.testing.assert_allclose(found["plan_wave_fill"], [number / 132 / -(-number // 132) for number in programs])

"""What accumulation costs, predicted from statistics, against the emulated tensor core: also where K is summed in parts."""

import pytest
import torch

import numerics

K = 16384


@pytest.fixture(scope="module")
def operands():
    generator = torch.Generator().manual_seed(3)

    def draw(rows):
        return torch.randn(rows, 64, generator=generator).abs()

    statistics = []
    for _ in range(2):
        accumulator = numerics.StatisticsAccumulator(64)
        for _ in range(4):
            accumulator.update(draw(1024).numpy())
        statistics.append(accumulator.result().along_rows())
    return statistics, [draw(K).T.contiguous() for _ in range(2)]


@pytest.mark.parametrize("split_k", [1, 3, 6])
def test_shorter_chains_of_one_sign_lose_less(operands, split_k):
    statistics, tensors = operands
    left, right = (numerics.quantize(x, "e4m3/tensorwise") for x in tensors)
    y = numerics.fp8_matmul(
        left.codes, right.codes, accumulation="hopper_fast", scale_a=left.scales, scale_b=right.scales,
        format_a="e4m3", format_b="e4m3", split_k=split_k, out_dtype=torch.bfloat16,
    ).double()  # fmt: skip
    exact = tensors[0].double() @ tensors[1].double().T
    measured = float(10 * torch.log10(exact.square().sum() / (y - exact).square().sum()))
    predicted = numerics.predict_gemm_error(
        *statistics, (64, 64, K), "e4m3/tensorwise", "e4m3/tensorwise", "hopper_fast", split_k=split_k
    )
    assert predicted.sqnr_db == pytest.approx(measured, abs=0.6)


def test_accumulations_that_keep_fp32_bits_add_nothing(operands):
    statistics, _ = operands
    plain, mma = (
        numerics.predict_gemm_error(*statistics, (64, 64, K), "e4m3/tensorwise", "e4m3/tensorwise", accumulation)
        for accumulation in ("fp32", "hopper_mma")
    )
    assert mma == plain
    with pytest.raises(ValueError, match="split_k = 0; give the number of parts"):
        numerics.predict_gemm_error(*statistics, (64, 64, K), "e4m3", "e4m3", "hopper_fast", split_k=0)

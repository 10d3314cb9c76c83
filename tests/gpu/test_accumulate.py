"""The emulated tensor core against the real one: equal to the last bit on fresh shapes, distributions and scales."""

import itertools
import random

import pytest
import torch

from numerics import fp8_matmul

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = pytest.importorskip("hil.exactness_cases", reason="hil.exactness_cases imports without triton").CASES


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_last_bit(name):
    from hil.exactness import compare, draw_shape

    if name.startswith("fbgemm/"):
        pytest.importorskip("fbgemm_gpu")
    first = random.SystemRandom().getrandbits(40)
    for seed in range(first, first + 6):
        result = compare(name, *draw_shape(CASES[name], seed), seed)
        # FBGEMM's rowwise kernels now and then round one last bit otherwise.
        most = result.outputs // 1000 if name.startswith("fbgemm/fp8_rowwise") else 0
        assert result.unequal <= most, result


def same(x, y):
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "split"])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=lambda pair: "x".join(map(str, pair)))
def test_nan_and_infinities(formats, fast):
    generator = torch.Generator().manual_seed(random.SystemRandom().getrandbits(40))
    codes = [torch.randint(0, 256, (64, 256), generator=generator, dtype=torch.uint8).cuda() for _ in formats]
    for x, dtype in zip(codes, formats, strict=True):
        # NaN of either sign; of e5m2 infinities too, alone and against each other; zeros meet them.
        special = ~torch.isfinite(x.view(dtype).float())
        x[special] = 0
        x[:4, 7] = torch.tensor([0x7F, 0xFF, 0x7C, 0xFC])[: 4 if dtype is E5M2 else 2].repeat(2)[:4]
        x[4, 200], x[4, 3] = x[2, 7], x[3, 7]
    a, b = (x.view(dtype) for x, dtype in zip(codes, formats, strict=True))
    one = torch.ones((), device="cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        real = torch._scaled_mm(a, b.t(), one, one, out_dtype=dtype, use_fast_accum=fast)
        ours = fp8_matmul(a, b, accumulation="hopper_fast" if fast else "hopper_split", out_dtype=dtype)
        assert same(real, ours)
        assert real.isnan().any() and torch.isfinite(real).any()


SCALES = [0.0, -1.5, 2.0**-149, 2.0**-130 * 1.3, 2.0**-126, 2.0**-100 * 1.7, 1.1, 2.0**100 * 1.3, 3e38, torch.inf, torch.nan]


@pytest.mark.parametrize("rowwise", [False, True], ids=["tensorwise", "rowwise"])
def test_scales_of_any_size(rowwise):
    """Zero, negative, subnormal, huge, infinite, NaN: products and roundings in the order that the kernels take."""
    generator = torch.Generator().manual_seed(random.SystemRandom().getrandbits(40))
    a, b = (torch.randn(128, 256, generator=generator).cuda().to(E4M3) for _ in range(2))
    for left, right in itertools.product(SCALES, SCALES):
        shapes = ((128, 1), (128, 1)) if rowwise else ((), ())
        scale_a, scale_b = (torch.full(shape, value, device="cuda") for shape, value in zip(shapes, (left, right), strict=True))
        for dtype in (torch.bfloat16,) if rowwise else (torch.float32, torch.bfloat16):
            real = torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=dtype, use_fast_accum=True)
            ours = fp8_matmul(a, b, accumulation="hopper_fast", scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)
            assert same(real, ours), (left, right, dtype)


@pytest.mark.parametrize(("name", "shape"), [("torch/fp8_tensorwise_fast", (288, 32, 82960)), ("torch/bf16", (32, 48, 38416))])
def test_a_rest_of_k_that_cublas_leaves_out(name, shape):
    """Where cuBLAS' parts fall short of K, its result lacks the last of K; the emulated parts show it."""
    from hil.exactness import compare, draw_operands, measured_parts

    case = CASES[name]
    parts = measured_parts(case, *shape)
    if parts[-1].stop == shape[2]:
        pytest.skip("this version of cuBLAS leaves nothing out")
    draw = draw_operands(case, *shape, seed=1)
    draw.a.view(torch.uint8)[:, : parts[-1].stop * draw.a.element_size()] = 0
    assert not case.run(draw).any() and draw.a.float().abs().max() > 0
    assert compare(name, *shape, seed=2).unequal == 0

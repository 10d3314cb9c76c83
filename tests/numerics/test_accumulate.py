"""The emulated tensor core against the scalar reference, mmasim, and the figures measured on an H200."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from numerics.accumulate import bf16_matmul, fp8_matmul
from numerics.formats import FORMATS
from numerics.reference import hopper_dot
from numerics.tensor_core import estimated_split_k, split_parts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}


def draw(rows, k, dtype, seed, kind="normal"):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    if kind == "positive":
        x = x.abs()
    elif kind == "wide":
        x = x * torch.exp2(4 * torch.randn(rows, k, generator=generator))
    elif kind == "subnormal":
        x = x * 2.0**-8
    elif kind == "sparse":
        x = x * (torch.rand(rows, k, generator=generator) < 0.03)
    elif kind == "codes":
        codes = torch.randint(0, 256, (rows, k), generator=generator).to(torch.uint8)
        x = codes.view(dtype).float()
        x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    return x.clamp(-FORMATS[NAMES[dtype]].max, FORMATS[NAMES[dtype]].max).to(dtype)


KINDS = ("normal", "positive", "wide", "subnormal", "sparse", "codes")
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]


@pytest.mark.parametrize("accumulation", ["hopper_fast", "hopper_split", "hopper_mma"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_scalar_reference(kind, accumulation):
    for seed, (left, right) in enumerate(PAIRS):
        for k in (32, 416, 7):  # whole groups, a last promotion that is short, less than a group
            a, b = draw(5, k, left, seed, kind), draw(4, k, right, seed + 50, kind)
            y = fp8_matmul(a, b, accumulation=accumulation)
            for i in range(5):
                for j in range(4):
                    formats = FORMATS[NAMES[left]], FORMATS[NAMES[right]]
                    expected = hopper_dot(a[i].float().tolist(), b[j].float().tolist(), *formats, accumulation)
                    assert float(y[i, j]) == expected, (kind, left, right, k, i, j)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_mmasim(kind):
    sim = pytest.importorskip("mmasim.nv_ptx.sim", reason="mmasim is a development dependency")
    for seed, (left, right) in enumerate(PAIRS):
        a, b = draw(16, 512, left, seed, kind), draw(24, 512, right, seed + 50, kind)
        operation = sim.WGMMA("Hopper", f"m64n24k32.f32.{NAMES[left]}.{NAMES[right]}")
        zero = torch.zeros(16, 24)
        assert torch.equal(fp8_matmul(a, b, accumulation="hopper_fast"), operation(a, b.T, zero))
        chunks = [operation(a[:, i : i + 128], b.T[i : i + 128], zero) for i in range(0, 512, 128)]
        assert torch.equal(fp8_matmul(a, b, accumulation="hopper_split"), chunks[0] + chunks[1] + chunks[2] + chunks[3])


def test_losses_measured_on_an_h200():
    def loss(k, accumulation):
        a, b = draw(64, k, E4M3, 1, "positive"), draw(64, k, E4M3, 2, "positive")
        exact = fp8_matmul(a, b, accumulation="exact").double()
        return float(1 - (fp8_matmul(a, b, accumulation=accumulation) / exact).mean())

    def relative(accumulation):
        a, b = draw(64, 4096, E4M3, 3), draw(64, 4096, E4M3, 4)
        exact = fp8_matmul(a, b, accumulation="exact")
        return float((fp8_matmul(a, b, accumulation=accumulation) - exact).norm() / exact.norm())

    assert loss(4096, "hopper_fast") == pytest.approx(0.070, abs=0.002)
    assert loss(8192, "hopper_fast") == pytest.approx(0.13, abs=0.005)
    assert loss(4096, "hopper_split") == pytest.approx(0.0006, abs=0.0001)
    assert relative("hopper_fast") == pytest.approx(1.3e-3, rel=0.1)
    assert relative("hopper_split") == pytest.approx(1.3e-4, rel=0.1)


def test_tiles_do_not_show():
    a, b = draw(130, 96, E4M3, 5), draw(70, 96, E4M3, 6)
    whole = fp8_matmul(a, b, accumulation="hopper_fast")
    assert torch.equal(whole[100:103, 60:], fp8_matmul(a[100:103], b[60:], accumulation="hopper_fast"))


def test_scales_are_applied_in_fp32():
    a, b = draw(128, 256, E4M3, 7), draw(256, 256, E4M3, 8)
    raw = fp8_matmul(a, b, accumulation="hopper_split").numpy()
    rows = np.random.default_rng(0).random((128, 1), "f4"), np.random.default_rng(1).random((256, 1), "f4")
    scaled = fp8_matmul(
        a, b, accumulation="hopper_split", scale_a=torch.from_numpy(rows[0]), scale_b=torch.from_numpy(rows[1]),
        out_dtype=torch.bfloat16,
    )  # fmt: skip
    assert torch.equal(scaled, torch.from_numpy(raw * rows[1].T * rows[0]).bfloat16())
    one = fp8_matmul(a, b, accumulation="hopper_split", scale_a=0.3, scale_b=torch.tensor(0.7))
    np.testing.assert_array_equal(one.numpy(), raw * (np.float32(0.3) * np.float32(0.7)))


def nearest_float32(value: Fraction) -> float:
    """The float32 nearest to an exact value, ties to even."""
    guess = np.float32(float(value))
    near = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return float(min(near, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.int32)) & 1)))


@pytest.mark.parametrize("rows", [128, 1], ids=["128x128", "1x128"])
def test_block_scales_join_at_the_promotion_with_one_rounding(rows):
    a, b = draw(8, 512, E4M3, 9), draw(128, 512, E4M3, 10)
    # What is added cancels what is there, so that the last bits of a product decide.
    b = torch.cat([b[:, :256].float(), -b[:, :256].float()], 1).to(E4M3)
    a = torch.cat([a[:, :256].float()] * 2, 1).to(E4M3)
    left, right = torch.rand(8, 4) + 0.5, torch.rand(128 // rows, 4) + 0.5
    left[:, 2:], right[:, 2:] = left[:, :2] * (1 + 2**-9), right[:, :2]
    y = fp8_matmul(a, b, accumulation="hopper_split", scale_a=left, scale_b=right)
    for i in range(8):
        for j in range(0, 128, 9):
            total = 0.0
            for block in range(4):
                s = slice(128 * block, 128 * block + 128)
                chain = hopper_dot(
                    a[i, s].float().tolist(), b[j, s].float().tolist(), FORMATS["e4m3"], FORMATS["e4m3"], "hopper_fast"
                )
                one, other = np.float32(left[i, block]), np.float32(right[j // rows, block])
                scaled = (chain, one * other) if rows == 128 else (np.float32(chain) * one, other)
                total = nearest_float32(Fraction(float(scaled[0])) * Fraction(float(scaled[1])) + Fraction(total))
            assert float(y[i, j]) == total, (i, j)


def test_a_split_k_is_summed_from_its_first_part():
    a, b = draw(6, 1000, E4M3, 20), draw(5, 1000, E4M3, 21)
    # Eight blocks of 128, the last not whole, in three parts.
    parts = [fp8_matmul(a[:, s], b[:, s], accumulation="hopper_fast") for s in (slice(0, 384), slice(384, 768), slice(768, 1000))]
    assert torch.equal(fp8_matmul(a, b, accumulation="hopper_fast", split_k=3), (parts[0] + parts[1]) + parts[2])
    assert split_parts(25024, 3, 128)[1] == slice(66 * 128, 132 * 128)  # as on an H200
    assert split_parts(7296, 2, 128, align=4) == [slice(0, 4096), slice(4096, 7296)]
    with pytest.raises(ValueError, match="split_k = 0; give the number of parts"):
        fp8_matmul(a, b, accumulation="hopper_fast", split_k=0)


def test_estimated_split_k_is_one_where_tiles_fill_the_gpu():
    assert estimated_split_k(16, 16, 8192) == 3 and estimated_split_k(64, 64, 65536) == 25  # as on an H200
    assert estimated_split_k(64, 64, 5120) == 1 and estimated_split_k(1024, 1024, 65536) == 1


def test_bf16_equals_mmasim_and_the_scalar_reference():
    sim = pytest.importorskip("mmasim.nv_ptx.sim", reason="mmasim is a development dependency")
    operation = sim.WGMMA("Hopper", "m64n24k16.f32.bf16.bf16")
    for kind in ("normal", "positive", "wide", "tiny", "huge"):
        generator = torch.Generator().manual_seed(len(kind))
        a, b = (torch.randn(rows, 256, generator=generator) for rows in (16, 24))
        if kind == "positive":
            a, b = a.abs(), b.abs()
        elif kind == "wide":
            a = a * torch.exp2(8 * torch.randn(16, 256, generator=generator))
        elif kind != "normal":
            a, b = (x * (2.0**-68 if kind == "tiny" else 2.0**62) for x in (a, b))
        a, b = a.bfloat16(), b.bfloat16()
        y = bf16_matmul(a, b)
        assert torch.equal(y, operation(a, b.T, torch.zeros(16, 24))), kind
        if kind != "huge":
            fmt = FORMATS["bf16"]
            for i, j in ((0, 0), (7, 11), (15, 23)):
                assert float(y[i, j]) == hopper_dot(a[i].tolist(), b[j].tolist(), fmt, fmt, "hopper_bf16"), kind


@pytest.mark.parametrize("kind", KINDS)
def test_fp8_through_fp16_mma_equals_mmasim(kind):
    sim = pytest.importorskip("mmasim.nv_ptx.sim", reason="mmasim is a development dependency")
    operation = sim.MMA("Hopper", "m16n8k16.f32.f16.f16.f32")
    a, b = draw(16, 256, E4M3, 30, kind), draw(8, 256, E5M2, 31, kind)
    expected = torch.zeros(16, 8)
    for start in range(0, 256, 32):
        for first in (0, 2):
            places = [start + four + pair for four in range(0, 32, 4) for pair in (first, first + 1)]
            expected = operation(a.half()[:, places], b.half().T[places], expected)
    assert torch.equal(fp8_matmul(a, b, accumulation="hopper_mma"), expected)


def test_codes_and_tensors_are_the_same():
    a, b = draw(16, 64, E4M3, 11), draw(16, 64, E5M2, 12)
    codes = fp8_matmul(a.view(torch.uint8), b.view(torch.uint8), accumulation="hopper_fast", format_a="e4m3", format_b="e5m2")
    assert torch.equal(codes, fp8_matmul(a, b, accumulation="hopper_fast"))


def test_nan_and_infinity_follow_ieee():
    a, b = draw(4, 64, E5M2, 13).float(), draw(4, 64, E4M3, 14)
    clean = fp8_matmul(a.to(E5M2), b, accumulation="hopper_fast")
    b = b.float().abs().clamp(min=1).to(E4M3)
    a[0, 0], a[1, 3] = torch.nan, torch.inf
    y = fp8_matmul(a.to(E5M2), b, accumulation="hopper_fast")
    assert torch.isnan(y[0]).all() and (y[1] == torch.inf).all() and torch.isfinite(y[2:]).all()
    assert torch.isfinite(clean).all()


def test_gradients_are_left_behind():
    a = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(bf16_matmul(a.clone().requires_grad_(), a), bf16_matmul(a, a))
    scale = torch.ones(8, requires_grad=True)
    assert not fp8_matmul(a.to(E4M3), a.to(E4M3), accumulation="exact", scale_a=scale).requires_grad


def test_results_beyond_the_type_are_infinite():
    a = torch.full((1, 32), 448.0).to(E4M3)
    assert fp8_matmul(a, a, accumulation="hopper_fast") == 448 * 448 * 32
    assert fp8_matmul(a, a, accumulation="hopper_fast", out_dtype=torch.float16) == torch.inf


def test_bf16_refuses_in_one_line():
    a = torch.ones(4, 32).bfloat16()
    for x, error, message in (
        (None, TypeError, "a must be a torch tensor"),
        (a.float(), TypeError, r"convert with .bfloat16\(\)"),
        (a[0], ValueError, "a must be a matrix"),
        (a[:, :5], ValueError, "last axis"),
    ):
        with pytest.raises(error, match=message):
            bf16_matmul(x, a)


def test_shapes_of_no_size_have_no_parts():
    with pytest.raises(ValueError, match=r"shape \(0, 1, 1\) must be three positive whole numbers \(M, N, K\)"):
        estimated_split_k(0, 1, 1)


CODES = torch.full((16, 64), 255, dtype=torch.uint8)
LONG = torch.ones(8, 256).to(E4M3)


def test_infinities_meet_the_scale_of_their_block_and_no_part_that_is_left_out():
    a, b = torch.ones(128, 256), torch.ones(1, 256).to(E4M3)
    a[0, 5], a[1, 200] = torch.inf, torch.nan
    a = a.to(E5M2)
    left = torch.ones(128, 2)
    for scale, expected in ((-1.0, -torch.inf), (0.0, torch.nan)):
        left[0, 0] = scale
        y = fp8_matmul(a, b, accumulation="hopper_split", scale_a=left, scale_b=torch.ones(1, 2))
        np.testing.assert_array_equal(y[:3, 0].numpy(), np.float32([expected, np.nan, 256]))
    y = fp8_matmul(a, b, accumulation="hopper_fast", split_k=[slice(0, 128)])
    assert y[:3, 0].tolist() == [torch.inf, 128, 128]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accumulation": "fast"}, ValueError, "unknown accumulation 'fast'; choose one of hopper_fast"),
        ({"accumulation": "exact", "scale_a": torch.ones(3)}, ValueError, r"scale_a has shape \(3,\)"),
        ({"accumulation": "exact", "scale_a": torch.ones(16, 1), "scale_b": torch.ones(16, 2)}, ValueError, "scale_b"),
        ({"accumulation": "exact", "b": torch.ones(16, 96).to(E4M3)}, ValueError, "last axis"),
        ({"accumulation": "exact", "b": torch.ones(16, 64)}, TypeError, "b must be float8"),
        ({"accumulation": "exact", "b": torch.ones(64).to(E4M3)}, ValueError, "b must be a matrix"),
        ({"accumulation": "exact", "b": None}, TypeError, "b must be a torch tensor, got NoneType"),
        ({"accumulation": "exact", "b": torch.ones(16, 64, device="meta").to(E4M3)}, ValueError, "b is a meta tensor"),
        ({"accumulation": "exact", "format_a": "e5m2"}, ValueError, "format_a = 'e5m2', and a is torch.float8_e4m3fn; leave"),
        ({"accumulation": "exact", "a": CODES, "format_a": "e2m1"}, ValueError, "a holds codes over 15, the greatest of e2m1"),
        ({"accumulation": "exact", "a": CODES, "format_a": "bf16"}, TypeError, "got torch.uint8, 'bf16'"),
        ({"accumulation": "exact", "scale_a": "1"}, TypeError, "scale_a must be a number or a tensor of them, got str"),
        ({"accumulation": "exact", "scale_a": torch.ones(16, dtype=torch.complex64)}, TypeError, "scale_a must hold real"),
        ({"accumulation": "exact", "out_dtype": torch.int8}, TypeError, "out_dtype = torch.int8; choose one of torch.float32"),
        ({"accumulation": "exact", "out_dtype": "bf16"}, TypeError, "out_dtype = 'bf16'; choose"),
        ({"accumulation": "hopper_fast", "split_k": []}, TypeError, r"split_k = \[\]; give a number of parts, or a list"),
        ({"accumulation": "hopper_fast", "split_k": 2.0}, TypeError, "split_k = 2.0; give a number of parts"),
        ({"accumulation": "hopper_fast", "split_k": [slice(0, 99)]}, ValueError, r"slice\(0, 99, None\) is no part of K = 64"),
        ({"accumulation": "hopper_fast", "split_k": [slice(None)]}, ValueError, "is no part of K = 64"),
        (
            {
                "accumulation": "hopper_split",
                "a": LONG,
                "b": LONG,
                "scale_a": torch.ones(8, 2),
                "scale_b": torch.ones(8, 2),
                "split_k": [slice(0, 64), slice(64, 256)],
            },
            ValueError,
            "cuts a block that has one scale; use multiples of 128",
        ),
        ({"accumulation": "hopper_fast", "b": torch.ones(16, 64).to(torch.float8_e4m3fnuz)}, ValueError, "not for e4m3fnuz"),
    ],
)
def test_errors_are_one_line(options, error, message):
    arguments = {"a": torch.ones(16, 64).to(E4M3), "b": torch.ones(16, 64).to(E4M3), **options}
    with pytest.raises(error, match=message) as caught:
        fp8_matmul(arguments.pop("a"), arguments.pop("b"), **arguments)
    assert "\n" not in str(caught.value)


def test_a_single_tile_is_a_block_too():
    """N = K = 128: the (1, 1) scale of b is its only block's, so that columns get what they get beside a second tile."""
    generator = torch.Generator().manual_seed(11)
    a, b = (torch.randn(size, 128, generator=generator).to(torch.float8_e4m3fn) for size in (40, 256))
    scale_a = torch.rand(40, 1, generator=generator) * 1e-6
    scale_b = torch.rand(2, 1, generator=generator) * 1e-2
    how = {"accumulation": "hopper_split", "scale_a": scale_a}
    both = fp8_matmul(a, b, scale_b=scale_b, **how)
    assert torch.equal(fp8_matmul(a, b[:128], scale_b=scale_b[:1], **how), both[:, :128])
    chain = fp8_matmul(a, b[:128], accumulation="hopper_split")
    assert torch.equal(both[:, :128], chain * (scale_a * scale_b[0]))
    rowwise = fp8_matmul(a, b[:128], scale_b=scale_b[0, 0], **how)
    assert torch.equal(rowwise, chain * scale_b[0] * scale_a) and not torch.equal(rowwise, both[:, :128])

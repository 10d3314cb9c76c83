import pytest
import torch
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from hil.kernels import RUNNERS, torch_memory
from hil.kernels.base import Shape
from hil.shapes import SWEEPS
from hil.timing import BufferPool, launches_for
from perfmodel import KERNELS
from perfmodel.kernels import library_of


def test_one_registry_for_all_names():
    assert set(RUNNERS) == set(KERNELS)
    assert all(name == runner.name for name, runner in RUNNERS.items())


def x(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return (torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator).exp2()).bfloat16()


@pytest.mark.parametrize(("quantize", "granularity"), [("quantize_tensorwise", "TENSORWISE"), ("quantize_rowwise", "AXISWISE")])
def test_quantizers_follow_torchao(quantize, granularity):
    from torchao.float8.config import ScalingGranularity

    value = x(256, 384)
    codes, scale = getattr(torch_memory, quantize)(value)
    axis = None if granularity == "TENSORWISE" else -1
    reference = tensor_to_scale(
        value, torch.float8_e4m3fn, scaling_granularity=getattr(ScalingGranularity, granularity), axiswise_dim=axis
    )
    torch.testing.assert_close(scale, reference.reciprocal().view(scale.shape), rtol=1e-6, atol=0)
    expected = to_fp8_saturated(value.float() * reference, torch.float8_e4m3fn)
    # The scale is computed in FP32 here and in FP64 there: a value on a rounding boundary may fall either way.
    assert (codes.float() == expected.float()).float().mean() > 0.999


@pytest.mark.parametrize("name", [n for n in KERNELS if KERNELS[n].kind == "quantize" and library_of(n) == "torch"])
def test_quantized_values_lie_within_half_an_ulp(name):
    """Each value, read back through its own block's scale, is the nearest point of the scaled grid."""
    value = x(256, 384)
    function = RUNNERS[name].bind.args[0]
    codes, scale = function(value)
    transposed = name.endswith("_transposed")
    source = value.t() if transposed else value
    assert codes.is_contiguous() and codes.shape == source.shape
    full = torch.as_tensor(scale).double()
    if full.dim() == 2 and full.shape[0] not in (1, codes.shape[0]):
        full = full.repeat_interleave(codes.shape[0] // full.shape[0], 0)
    if full.dim() == 2 and full.shape[1] not in (1, codes.shape[1]):
        full = full.repeat_interleave(codes.shape[1] // full.shape[1], 1)
    scaled = source.double() / full
    ulp = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - 3)
    # The stored scale is a rounded reciprocal: a value near a boundary may sit 2^-22 of its size on its other side.
    assert ((codes.double() - scaled).abs() <= 0.5 * ulp + 2.0**-22 * scaled.abs()).all()
    assert codes.float().abs().max() == 448.0


def test_blocknorm_against_a_loop():
    value = x(5, 512).double()
    got = torch_memory.blocknorm(value, width=256)
    for row in range(5):
        for start in (0, 256):
            block = value[row, start : start + 256].float()
            expected = block / (block.square().mean() + 1e-5).sqrt()
            torch.testing.assert_close(got[row, start : start + 256].float(), expected, rtol=1e-5, atol=1e-6)


def test_operands_of_one_launch_never_overlap():
    pool = BufferPool("cpu", elements=2**16)
    for index in range(40):
        first, second = pool.view((100, 100), index, 0), pool.view((60, 100), index, 1)
        assert first.data_ptr() + first.nbytes <= second.data_ptr()
    with pytest.raises(ValueError, match="exceeds half the pool"):
        pool.view((2**8, 2**8), 0, 0)


def test_a_wrong_result_is_seen():
    """The check of a kernel's result fails when the result belongs to other operands."""
    pool, shape = BufferPool("cpu", elements=2**18), Shape(128, 64, 256)
    runner = RUNNERS["torch/bf16"]
    launch = runner.bind(shape, pool)
    assert runner.error(shape, pool, launch(0)) < runner.limit < runner.error(shape, pool, launch(1))


def test_rotation_exceeds_the_l2_unless_launches_run_out():
    l2 = 60 * 2**20
    assert launches_for(2**20) * 2**20 > 2 * l2
    assert launches_for(2**30) == 4 and launches_for(2**32) == 1
    assert launches_for(1) == 192


@pytest.mark.parametrize(("family", "sweep"), SWEEPS)
def test_sweeps_are_seeded_distinct_and_bounded(family, sweep):
    draw, _ = SWEEPS[family, sweep]
    shapes = draw(120, 7)
    assert shapes == draw(120, 7) != draw(120, 8)
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert min(shape.m, shape.n, shape.k, shape.groups) >= 1
        assert shape.groups * max(shape.m * shape.k, shape.n * shape.k) <= (2**31 if sweep == "large" else 2**29)
    if family == "memory":
        assert all(shape.n == 1 for shape in shapes)

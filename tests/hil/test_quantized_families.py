"""Quantization with what makes its input: the values, and the kernels' account in the table."""

import pytest
import torch

from hil import quantized_families
from hil.fused_table import tabulated
from hil.quantized_families import SIZES


@pytest.fixture(scope="module")
def families():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_families, "_random", lambda *size: torch.randn(*size, dtype=torch.bfloat16))
        patch.setattr(quantized_families, "SIZES", ((48, 32),))
        torch.manual_seed(0)
        yield dict(quantized_families.quantized_families())


@pytest.mark.parametrize(("family", "granularity"), [("tensorwise_same_rt", "TENSORWISE"), ("rowwise_same_r", "AXISWISE")])
def test_the_values_are_torchaos(families, family, granularity):
    config = pytest.importorskip("torchao.float8.config")
    utils = pytest.importorskip("torchao.float8.float8_utils")
    ((computation, (x,)),) = families[family]
    scale, q, *turned = computation(x)
    wanted = utils.tensor_to_scale(x, q.dtype, scaling_granularity=config.ScalingGranularity[granularity], axiswise_dim=-1)
    assert torch.equal(scale, wanted)
    assert torch.equal(q.float(), utils.to_fp8_saturated(x.to(torch.float32) * wanted, q.dtype).float())
    assert all(torch.equal(t.float(), q.float().t()) for t in turned)


def test_columns_of_a_transposed_rowwise_tensor_have_scales_of_their_own(families):
    ((computation, operands),) = families["rowwise_relu_backward_rt"]
    gradient, y = operands
    x = torch.where(y > 0, gradient, 0)
    row_scale, q, column_scale, turned = computation(*operands)
    assert torch.equal(row_scale, (448.0 / x.abs().amax(1, keepdim=True).double().clamp(1e-12)).float())
    assert torch.equal(column_scale, (448.0 / x.abs().amax(0, keepdim=True).double().clamp(1e-12)).float())
    assert torch.equal(turned.float(), (x.float() * column_scale).clamp(-448, 448).to(q.dtype).float().t())


def entry(family, sizes, read, written):
    row = {
        "family": family, "kernel": "triton_x", "sizes": sizes, "read_bytes": read, "written_bytes": written,
        "operators": {"aten.abs.default": 1}, "problem": "", "time_us": 10.0,
    }  # fmt: skip
    found = tabulated([row]).to_dict("records")
    return found[0] if found else None


def test_magnitudes_are_reductions_along_memory_in_stages():
    first = entry("tensorwise_relu_r", {"x": 512, "r0_": 32768}, 2**25, 2048)
    assert (first["kind"], first["kept"], first["reduced"], first["unordered_bytes"]) == ("row", 512, 32768, 0)
    assert entry("tensorwise_relu_r", {"x": 1, "r0_": 512}, 2048, 4)["kind"] == "row"


def test_a_transposed_copy_lies_across_memory():
    assert entry("tensorwise_same_rt", {"y": 256, "x": 2048}, 2**20, 2**20)["unordered_bytes"] == 2**19
    assert entry("tensorwise_same_t", {"y": 256, "x": 2048}, 2**20, 2**19)["unordered_bytes"] == 2**20
    assert entry("tensorwise_same_r", {"x": 2**19}, 2**20, 2**19)["unordered_bytes"] == 0


def test_a_stage_of_the_columns_magnitudes_is_left_out():
    assert entry("rowwise_same_t", {"x": 131072, "r0_": 128}, 2**25, 2**19) is None
    kept, reduced = SIZES[0]
    turned = entry("rowwise_relu_backward_rt", {"x": kept, "r0_": reduced}, 4 * kept * reduced, 2 * kept * reduced)
    assert (turned["kind"], turned["unordered_bytes"]) == ("row", kept * reduced)

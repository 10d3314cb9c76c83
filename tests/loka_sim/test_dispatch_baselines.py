"""The baselines' filters against torchao's own."""

import pytest

from loka_sim.dispatch.around import STAND_INS, around
from loka_sim.dispatch.baselines import BASELINES, filter_rowwise, filter_tensorwise, is_linear
from loka_sim.dispatch.candidates import Row, SiteShape
from loka_sim.modelspec import Dim, Gemm, Site, linear_passes
from perfmodel.kernels import KERNELS

SIZES = (8, 16, 512, 1000, 1008, 1024, 1040, 2048, 2064, 4096, 4112, 8192)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "ours"), [("tensorwise", filter_tensorwise), ("rowwise", filter_rowwise)])
def test_filters_equal_torchao(recipe, ours):
    import torch

    linear_utils = pytest.importorskip("torchao.float8.float8_linear_utils")
    theirs = linear_utils._auto_filter_for_recipe(recipe, filter_fqns=[])
    for n in SIZES:
        for k in SIZES:
            with torch.device("meta"):
                module = torch.nn.Linear(k, n)
            assert ours(n, k) == theirs(module, "some.layer"), (n, k)


def linear(n, k, name="mlp.0", **fields):
    return Site(name, "linear", linear_passes(Dim(0, 1), Dim(n), Dim(k)), **{"weight": "mlp.0.weight", **fields})


def assignments(site, batch=2048):
    return {b.name: b.assignment(site, SiteShape.of(site, batch)) for b in BASELINES}


def test_recipes_accumulate_as_torchao_does():
    found = assignments(linear(4096, 8192))
    for scaling in ("tensorwise", "rowwise"):
        fast, split = f"torch/fp8_{scaling}_fast", f"torch/fp8_{scaling}_split"
        expected = {"output": fast, "grad_input": split, "grad_weight": split}
        assert found[f"naive_{scaling}"] == found[f"filter_{scaling}"] == expected
    assert set(found["bf16"].values()) == {"torch/bf16"}


def test_filters_leave_small_layers():
    found = assignments(linear(512, 512))
    assert set(found["filter_tensorwise"].values()) == set(found["filter_rowwise"].values()) == {"torch/bf16"}
    assert found["naive_rowwise"]["output"] == "torch/fp8_rowwise_fast"


@pytest.mark.parametrize("site, batch", [(linear(1, 512), 2048), (linear(512, 512), 2047)])
def test_a_module_with_an_illegal_pass_stays_bf16(site, batch):
    assert set(assignments(site, batch)["naive_tensorwise"].values()) == {"torch/bf16"}


def test_only_linear_modules_are_converted():
    assert is_linear(linear(64, 64)) and is_linear(linear(64, 64, name="mlp.0#2"))
    assert not is_linear(linear(64, 64, weight="mlp.in_proj_weight"))
    assert not is_linear(linear(64, 64, weight=None))
    site = Site("attention", "bmm", {"output": Gemm(Dim(64), Dim(64), Dim(64), Dim(0, 1))})
    assert set(assignments(site)["naive_tensorwise"].values()) == {"torch/bf16_batched"}


def test_kernels_around_a_site():
    site = linear(512, 256, bias=True, norm="layernorm", activation="relu")
    # The activation fuses into the norm; the bias into the GEMM, its gradient is a kernel of its own.
    assert around(site, 2048).rows == (
        Row("torch/layernorm_forward", 2048, 1, 512),
        Row("torch/layernorm_backward", 2048, 1, 512),
        Row("torch/bias_backward", 2048, 1, 512),
    )
    plain = around(linear(512, 256, activation="gelu"), 64)
    assert plain.rows == (Row("torch/silu_forward", 64, 1, 512), Row("torch/silu_backward", 64, 1, 512))
    assert plain.stand_ins == (("gelu", "silu"),)
    odd = around(linear(512, 256, activation="wiggle"), 64)
    assert odd.rows == () and odd.uncounted == ("wiggle",)


def test_inference_has_no_backward_kernels():
    passes = {"output": linear_passes(Dim(0, 1), Dim(512), Dim(256))["output"]}
    site = Site("mlp.0", "linear", passes, weight="mlp.0.weight", bias=True, activation="relu")
    assert [row.kernel for row in around(site, 64).rows] == ["torch/relu_forward"]


def test_every_stand_in_is_a_kernel():
    for timed_as in STAND_INS.values():
        assert f"torch/{timed_as}_forward" in KERNELS and f"torch/{timed_as}_backward" in KERNELS

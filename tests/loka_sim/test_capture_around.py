"""What a capture finds around the products: bias, norm and activation, tables, inputs; and what it leaves alone."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import loka_sim
from loka_sim.capture import capture
from loka_sim.errors import UserError
from loka_sim.modelspec import PASSES, Dim


def mlp():
    return nn.Sequential(nn.Linear(13, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())


def sites(model, inputs, **options):
    return {site.name: site for site in capture(model, inputs, **options).sites}


def test_a_bias_is_seen_however_it_is_added():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(8, 4)), nn.Parameter(torch.empty(4))
            self.plain = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.plain(x @ self.weight + self.bias) + x[:, :4]

    found = sites(Biased(), torch.randn(8, 8))
    assert found["(root)"].bias and not found["plain"].bias
    assert sites(nn.Linear(4, 5), torch.randn(8, 3, 4).transpose(1, 2).contiguous().transpose(1, 2))["(root)"].bias


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.ReLU(inplace=True), "relu"),
        (nn.SiLU(), "silu"),
        (nn.Hardswish(), "hardswish"),
        (nn.GELU(approximate="tanh"), "gelu"),
        (nn.Tanh(), "tanh"),
        (nn.LeakyReLU(), "leakyrelu"),
        (nn.PReLU(), "prelu"),
        (nn.Identity(), None),
    ],
)
def test_the_activation_that_follows(activation, name):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), activation, nn.Linear(4, 4))
    assert sites(model, torch.randn(8, 4))["0"].activation == name


class BlockNorm(nn.Module):
    def forward(self, x):
        blocks = x.unflatten(-1, (-1, 4))
        return (blocks * torch.rsqrt(blocks.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2)


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


@pytest.mark.parametrize(
    ("norm", "name"),
    [(nn.LayerNorm(8), "layernorm"), (nn.RMSNorm(8), "rmsnorm"), (nn.BatchNorm1d(8), "batchnorm"), (BlockNorm(), "blocknorm")],
)
def test_the_norm_that_follows_and_the_activation_after_it(norm, name):
    found = sites(nn.Sequential(nn.Linear(4, 8), norm, Swish(), nn.Linear(8, 4)), torch.randn(8, 4))
    assert (found["0"].norm, found["0"].activation) == (name, "silu")
    assert (found["3"].norm, found["3"].activation) == (None, None)


def test_a_norm_is_found_behind_a_residual_and_not_where_it_is_ambiguous():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.branch, self.one, self.two = (nn.Linear(8, 8) for _ in range(4))
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            x = self.enter(x)
            x = self.norm(self.branch(x) + x)
            return self.norm(self.one(x) + self.two(x))

    found = sites(Residual(), torch.randn(8, 8))
    assert {name: site.norm for name, site in found.items()} == {"enter": None, "branch": "layernorm", "one": None, "two": None}


def test_a_norm_behind_a_concatenation_follows_all_its_parts():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(8, 4) for _ in range(3))
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            y = self.norm(torch.cat([self.one(x), self.two(x)], 1) + x)
            return torch.stack([self.three(y), self.three(x)]).relu()

    found = sites(Joined(), torch.randn(6, 8))
    assert {name: (site.norm, site.activation) for name, site in found.items()} == {
        "one": ("layernorm", None),
        "two": ("layernorm", None),
        "three": (None, "relu"),
        "three#2": (None, "relu"),
    }


def test_two_different_activations_of_one_result_are_none():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x)
            return torch.tanh(y) * torch.sigmoid(y) * y.relu()

    assert sites(Gated(), torch.randn(8, 8))["linear"].activation is None


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.single, self.unused = nn.Embedding(100, 8, sparse=True, max_norm=1.0), nn.Embedding(7, 8)
        self.bag = nn.EmbeddingBag(200, 8, mode="mean", sparse=True)
        self.raw = nn.ParameterList([nn.Parameter(torch.empty(50, 8))])
        self.top = nn.Linear(32, 2)

    def forward(self, ids, values, offsets, pairs):
        parts = [self.single(ids), self.bag(values, offsets), F.embedding(ids, self.raw[0]), self.bag(pairs)]
        return self.top(torch.cat(parts, 1))


def test_tables_rows_dims_pooling_and_lookups():
    inputs = (
        torch.zeros(8, dtype=torch.long),
        torch.zeros(24, dtype=torch.long),
        torch.arange(0, 24, 3),
        torch.zeros(8, 2, dtype=torch.long),
    )
    spec = capture(Tables(), inputs)
    assert {table.name: (table.rows, table.dim, table.pooling, table.lookups) for table in spec.tables} == {
        "single": (100, 8, "none", 1.0),
        "bag": (200, 8, "mean", 5.0),
        "raw.0": (50, 8, "none", 1.0),
        "unused": (7, 8, "none", 0.0),
    }
    assert spec.dense_parameters == 32 * 2 + 2
    assert spec.sites[0].passes["output"].m == Dim(0, 1)


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.u, self.v = nn.Linear(10, 3, bias=False), nn.Linear(3, 10)

    def forward(self, dense, ids=None):
        return {"out": dense * self.v(self.u(dense)) + dense, "ids": ids}


def test_inputs_may_be_nested_and_named():
    model = Cross()
    expected = capture(model, torch.randn(8, 10)).sites
    ids = torch.zeros(8, dtype=torch.int32)
    for inputs in ({"dense": torch.randn(8, 10), "ids": {"deep": [ids]}}, [torch.randn(8, 10), ids > 0]):
        assert capture(model, inputs).sites == expected

    class OneDictionary(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(10, 2)

        def forward(self, features):
            return [self.linear(features["dense"])]

    assert sites(OneDictionary(), {"dense": torch.randn(8, 10)})["linear"].passes["output"].m == Dim(0, 1)


def test_another_batch_dimension():
    (site,) = sites(nn.Linear(4, 5), torch.randn(3, 8, 4), batch_dim=1).values()
    assert site.passes["output"].m == Dim(0, 3)


def test_the_batch_may_be_said():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, scale, x):
            return self.linear(x) * scale

    inputs = (torch.randn(4), torch.randn(8, 4))
    assert sites(Constant(), inputs, batch=8)["linear"].passes["output"].m == Dim(0, 1)
    with pytest.raises(UserError, match=re.escape("batch 9: no input tensor has it as dimension 0 (there are [8, 4])")):
        capture(Constant(), inputs, batch=9)


def test_a_checkpoint_does_not_look_up_twice():
    class Looked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Embedding(10, 4), nn.Linear(4, 4)

        def forward(self, ids):
            return checkpoint(lambda i: self.linear(self.table(i)).tanh(), ids, use_reentrant=False)

    assert capture(Looked(), torch.zeros(8, 3, dtype=torch.long)).tables[0].lookups == 3.0


def test_a_loss_decides_which_outputs_have_gradients():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.one(x), self.two(x)

    found = sites(Two(), torch.randn(8, 4), loss=lambda out: out[0].square().mean())
    assert set(found["one"].passes) == {"output", "grad_weight"} and set(found["two"].passes) == {"output"}


def test_a_model_without_gradients_has_outputs_only():
    (site,) = capture(nn.Linear(4, 5).requires_grad_(False), torch.randn(8, 4)).sites
    assert set(site.passes) == {"output"}


def test_the_callers_modes_do_not_matter():
    with torch.no_grad():
        assert set(sites(mlp(), torch.randn(8, 13))["3"].passes) == set(PASSES)
    with torch.inference_mode():
        assert set(sites(mlp(), torch.randn(8, 13))["3"].passes) == set(PASSES)


def test_five_hundred_billion_parameters_need_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.EmbeddingBag(3_000_000_000, 128), nn.Linear(128, 500_000), nn.Linear(500_000, 300_000))
    spec = capture(model, torch.zeros(8, 2, dtype=torch.long))
    assert sum(parameter.numel() for parameter in model.parameters()) > 500e9
    assert spec.tables[0].rows == 3_000_000_000 and spec.flops() == 2 * 8 * 3 * (128 * 500_000 + 500_000 * 300_000)


def test_the_model_and_its_inputs_stay_as_they_are():
    model, x = mlp(), torch.randn(8, 13)
    model(x).sum().backward()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    kept = x.clone()
    capture(model, x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(x, kept) and not any(module._forward_hooks for module in model.modules())
    assert all(not parameter.is_meta for parameter in model.parameters())


class Allocations(TorchDispatchMode):
    """The largest tensor with data that any operator makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not (tensor.is_meta or isinstance(tensor, FakeTensor)):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_a_real_model_is_not_copied():
    model = mlp()
    model.extra = torch.randn(1000)  # neither parameter nor buffer
    x = torch.randn(8, 13)
    with Allocations() as seen:
        assert len(capture(model, x).sites) == 2
        assert seen.largest == 0
        model(x)
        assert seen.largest >= 8 * 32  # the watch does see what a real run makes


def test_captures_agree_with_each_other():
    assert capture(mlp(), torch.randn(8, 13)) == loka_sim.capture(mlp(), (torch.randn(8, 13),))


def test_a_compiled_model_is_captured_as_written():
    model = mlp()
    assert capture(torch.compile(model, backend="eager"), torch.randn(8, 13)).sites == capture(model, torch.randn(8, 13)).sites


def test_half_precision_weights_cast_on_the_fly_are_still_weights():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x):
            return F.linear(x.bfloat16(), self.linear.weight.bfloat16())

    (site,) = capture(Cast(), torch.randn(8, 8)).sites
    assert site.weight == "linear.weight" and site.op == "linear"


def test_constants_and_devices_written_in_the_model():
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = x.to("cuda").cuda() if x.dim() == 2 else x
            mask = torch.tensor([1.0, 0.0] * 4, device=x.device) * torch.ones(8, device="cuda")
            steps = int(torch.tensor(3).item()) - 1
            for _ in range(steps):
                x = self.linear(x * mask + torch.arange(8))
            return x

    assert list(sites(Constants(), torch.randn(4, 8))) == ["linear", "linear#2"]


def test_sizes_that_no_affine_function_gives_are_said_by_name():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs, self.linear, self.fine = nn.Linear(1, 3), nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return self.pairs((x @ x.T).reshape(-1, 1)).sum() + self.linear(x[: x.shape[0] // 3]).sum() + self.fine(x).sum()

    spec = capture(Pairs(), torch.randn(8, 8))
    assert [site.name for site in spec.sites] == ["(root)", "fine"]
    assert spec.unaccounted == (
        "pairs: output: m is 64, 256, 576 at batch 8, 16, 24, which is not affine in the batch (768 FLOPs at batch 8)",
        "linear: output: m is 2, 5, 8 at batch 8, 16, 24, which is not affine in the batch (256 FLOPs at batch 8)",
    )
    with FlopCounterMode(display=False) as counter:
        Pairs()(torch.randn(8, 8)).backward()
    assert spec.flops() + 768 + 256 == counter.get_total_flops()
    root = spec.sites[0].passes["output"]
    assert (root.m, root.n, root.k) == (Dim(0, 1), Dim(0, 1), Dim(8))


def test_what_the_flop_counter_leaves_out_is_said_by_name():
    class Vector(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8))

        def forward(self, x):
            return torch.linalg.qr(x)[0] @ self.weight

    spec = capture(Vector(), torch.randn(16, 8))
    assert spec.sites == ()
    assert {"(root): mv (its FLOPs are not known)", "(root): linalg_qr (its FLOPs are not known)"} <= set(spec.unaccounted)


def test_what_multiplies_no_matrices_is_nothing_to_list():
    class Light(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = F.normalize(self.linear(x)).softmax(1).cumsum(1).sort(1).values
            return F.interpolate(x[:, None], scale_factor=2, mode="linear").logsumexp(2)

    assert capture(Light(), torch.randn(16, 8)).unaccounted == ()

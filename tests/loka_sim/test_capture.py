"""Capture against independent references: FlopCounterMode for the FLOPs, layer sizes for the shapes of the passes."""

import math
import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import loka_sim
from loka_sim.capture import capture
from loka_sim.errors import UserError
from loka_sim.modelspec import PASSES, Dim


class Checkpointed(nn.Module):
    def __init__(self, reentrant, twice=False):
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 3)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16))
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x):
        x = self.first(x)
        for _ in range(1 + self.twice):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


class CheckpointedFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.empty(8, 8))

    def forward(self, x):
        return checkpoint(lambda y: (y @ self.weight).relu() @ self.weight, self.first(x), use_reentrant=False)


class CheckpointedPart(nn.Module):
    """A checkpoint whose recomputation stops early, inside a module."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.outer(checkpoint(self.inner, x, use_reentrant=False)).relu()


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.again = self.inner

    def forward(self, ids):
        return F.linear(self.again(self.inner(self.embedding(ids)).relu()), self.embedding.weight)


class Interaction(nn.Module):
    """DLRM's: pairwise products of the features, of a tensor with itself."""

    def __init__(self, square=False):
        super().__init__()
        self.features, self.width = 6, 6 if square else 10
        self.project, self.top = nn.Linear(4, self.features * self.width), nn.Linear(self.features**2, 1)

    def forward(self, x):
        x = self.project(x).view(-1, self.features, self.width)
        return self.top(torch.bmm(x, x.transpose(1, 2)).flatten(1))


class Einsums(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.mix = nn.Parameter(torch.empty(5, 7)), nn.Parameter(torch.empty(3, 4))

    def forward(self, x):  # (batch, 4, 7)
        y = torch.einsum("bfk,nk->bfn", x, self.weight)
        z = torch.einsum("gf,bfn->bgn", self.mix, y)
        return torch.einsum("bgn,bhn->bgh", z, z)


class LeftWeight(nn.Module):
    """Wukong's linear compression: the weight is the left operand."""

    def __init__(self):
        super().__init__()
        self.compress = nn.Parameter(torch.empty(3, 6))

    def forward(self, x):
        return self.compress @ (x * 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.square, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.square.requires_grad_(False)
        self.middle = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            x = self.last(x)
        return self.last(self.square(self.middle(self.frozen(x))))


class HandWritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Nested(HandWritten):
    """A function that calls another one before its product."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return Doubled.apply(x).mul(0.5) @ w.t()


class NestedFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.empty(8, 8)), nn.Parameter(torch.empty(8, 8))

    def forward(self, x):
        return Nested.apply(Nested.apply(x, self.one).relu(), self.two)


class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.empty(8, 8)), nn.Parameter(torch.empty(4, 8))

    def forward(self, x):
        return HandWritten.apply(HandWritten.apply(x.relu(), self.one), self.two)


class InPlace(nn.Module):
    """In-place changes of results and of their views' bases."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x):
        y = F.dropout(self.one(x), 0.0, inplace=True)
        half = y[:, :4]
        y.mul_(2)
        y = y + self.three(half)
        return self.two(y).add_(x).sigmoid_()


class Penalty(nn.Module):
    """A gradient inside the forward, differentiated again."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, x):
        x = x.clone().requires_grad_()
        out = self.two(self.one(x).tanh())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.squeeze(1) + slope.square().sum(1)


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.u, self.v = nn.Linear(10, 3, bias=False), nn.Linear(3, 10)

    def forward(self, dense, ids=None):
        return {"out": dense * self.v(self.u(dense)) + dense, "ids": ids}


class Sliced(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(x[1:])


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(8, 6)

    def forward(self, x):
        out = self.cell(x)
        return out[0] if isinstance(out, tuple) else out


def mlp():
    return nn.Sequential(nn.Linear(13, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())


def floats(*sizes):
    return lambda: (torch.empty(*sizes, device="meta"),)


def ids(*sizes):
    return lambda: (torch.empty(*sizes, dtype=torch.long, device="meta"),)


# name: (model, inputs, sites in forward order)
MODELS = {
    "mlp": (mlp, floats(8, 13), "0 3"),
    "bare linear": (lambda: nn.Linear(4, 5), floats(8, 4), "(root)"),
    "three dimensions": (lambda: nn.Linear(4, 5, bias=False), floats(8, 3, 4), "(root)"),
    "shared": (Shared, ids(8, 3), "inner inner#2 (root)"),
    "interaction": (Interaction, floats(8, 4), "project (root) top"),
    "square interaction": (lambda: Interaction(True), floats(6, 4), "project (root) top"),
    "einsum": (Einsums, floats(8, 4, 7), "(root) (root)#2 (root)#3"),
    "left weight": (LeftWeight, floats(8, 6, 5), "(root)"),
    "sdpa": (Attention, floats(8, 3, 16), "qkv (root) (root)#2"),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        floats(8, 5, 16),
        "self_attn self_attn#2 self_attn#3 self_attn#4 linear1 linear2",
    ),
    "frozen": (Frozen, floats(8, 8), "last frozen middle square last#2"),
    "custom function": (CustomFunction, floats(8, 8), "(root) (root)#2"),
    "nested function": (NestedFunction, floats(8, 8), "(root) (root)#2"),
    "in place": (InPlace, floats(8, 8), "one three two"),
    "cross": (Cross, floats(8, 10), "u v"),
    "sliced": (Sliced, floats(8, 8), "linear"),
    "lstm cell": (lambda: Recurrent(nn.LSTMCell), floats(8, 8), "cell cell#2"),
    "gru cell": (lambda: Recurrent(nn.GRUCell), floats(8, 8), "cell cell#2"),
    "lstm": (lambda: Recurrent(partial(nn.LSTM, batch_first=True)), floats(8, 2, 8), None),
    "checkpoint": (
        lambda: Checkpointed(False),
        floats(8, 12),
        "first block.0 block.2 last block.0#recompute block.2#recompute",
    ),
    "reentrant checkpoint": (
        lambda: Checkpointed(True),
        floats(8, 12),
        "first block.0 block.2 last block.0#recompute block.2#recompute",
    ),
    "checkpoint twice": (
        lambda: Checkpointed(False, True),
        floats(8, 12),
        "first block.0 block.2 block.0#2 block.2#2 last"
        " block.0#2#recompute block.2#2#recompute block.0#recompute block.2#recompute",
    ),
    "checkpointed function": (CheckpointedFunction, floats(8, 8), "first (root) (root)#2 (root)#recompute"),
    "checkpointed part": (CheckpointedPart, floats(8, 8), "inner outer"),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.Linear(48, 4)), floats(8, 4, 8), "2"),
}


def counted(model, inputs):
    """FLOPs of a forward and backward, by FlopCounterMode alone."""
    with FlopCounterMode(display=False) as counter, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = model(*inputs)
        while isinstance(outputs, dict | tuple):
            outputs = next(iter(outputs.values() if isinstance(outputs, dict) else outputs))
        outputs.sum().backward()
    return counter.get_total_flops()


def left_out(spec):
    return sum(int(number) for text in spec.unaccounted for number in re.findall(r"\((\d+) FLOPs", text))


@pytest.mark.parametrize("name", MODELS)
def test_flops_agree_exactly_with_the_flop_counter(name):
    build, inputs, names = MODELS[name]
    with torch.device("meta"):
        model = build()
    spec = capture(model, inputs(), name=name)
    assert spec.flops() + left_out(spec) == counted(model, inputs())
    assert names is None or " ".join(site.name for site in spec.sites) == names
    if name != "convolution":
        assert spec.unaccounted == ()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "convolution"])
@pytest.mark.parametrize("batch", [5, 17, 64])
def test_another_batch_needs_no_other_capture(name, batch):
    build, inputs, _ = MODELS[name]
    with torch.device("meta"):
        model = build()
    spec = capture(model, inputs(), name=name)
    resized = tuple(torch.empty(batch, *tensor.shape[1:], dtype=tensor.dtype, device="meta") for tensor in inputs())
    assert spec.flops(batch) == spec.at_batch(batch).flops() == counted(model, resized)


@pytest.mark.parametrize("name", MODELS)
def test_every_pass_has_its_sites_sizes(name):
    build, inputs, _ = MODELS[name]
    with torch.device("meta"):
        model = build()
    for site in capture(model, inputs()).sites:
        out = site.passes["output"]
        sizes = {"output": (out.m, out.n, out.k), "grad_input": (out.m, out.k, out.n), "grad_weight": (out.n, out.k, out.m)}
        for key, gemm in site.passes.items():
            assert (gemm.m, gemm.n, gemm.k) == sizes[key]
            assert gemm.groups == out.groups
        assert list(site.passes) == [key for key in PASSES if key in site.passes]


def sites(model, inputs, **options):
    return {site.name: site for site in capture(model, inputs, **options).sites}


def test_a_mlp_in_full():
    first, last = capture(mlp(), torch.randn(8, 13)).sites
    assert {key: tuple(map(str, (g.m, g.n, g.k, g.groups, g.layout_a, g.layout_b))) for key, g in first.passes.items()} == {
        "output": ("batch", "32", "13", "1", "row", "column"),
        "grad_weight": ("32", "13", "batch", "1", "column", "row"),  # and no grad_input: the data needs none
    }
    assert last.passes["grad_input"].shape(8) == (8, 32, 1)
    assert (first.op, first.weight, first.bias, first.norm, first.activation) == ("linear", "0.weight", True, "batchnorm", "relu")
    assert (last.op, last.weight, last.bias, last.norm, last.activation) == ("linear", "3.weight", True, None, "sigmoid")


def test_square_layers_tell_their_passes_by_what_needs_a_gradient():
    found = sites(Frozen(), torch.randn(8, 8))
    assert set(found["last"].passes) == {"output"}  # under no_grad
    assert set(found["frozen"].passes) == {"output"}
    assert set(found["middle"].passes) == {"output", "grad_weight"}
    assert set(found["square"].passes) == {"output", "grad_input"}
    assert set(found["last#2"].passes) == set(PASSES)


def test_square_passes_keep_their_layouts():
    """Square in every size: only the operands tell grad_input from grad_weight, and their layouts show which is which."""
    passes = sites(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8))["1"].passes
    layouts = {key: (gemm.layout_a, gemm.layout_b) for key, gemm in passes.items()}
    assert layouts == {"output": ("row", "column"), "grad_input": ("row", "row"), "grad_weight": ("column", "row")}


def test_checkpointing_runs_the_forward_again_and_the_passes_stay_with_their_site():
    for reentrant in (False, True):
        found = sites(Checkpointed(reentrant), torch.randn(8, 12))
        assert set(found["block.2"].passes) == set(PASSES)
        assert set(found["block.2#recompute"].passes) == {"output"}
        assert (found["block.2"].norm, found["block.0"].activation) == ("layernorm", "relu")


def test_the_operation_is_named_as_it_was_called():
    assert [site.op for site in capture(Einsums(), torch.randn(8, 4, 7)).sites] == ["einsum"] * 3
    assert sites(LeftWeight(), torch.randn(8, 6, 5))["(root)"].op == "matmul"
    assert sites(Interaction(), torch.randn(8, 4))["(root)"].op == "bmm"
    found = sites(nn.MultiheadAttention(8, 2, batch_first=True), {key: torch.randn(8, 3, 8) for key in ("query", "key", "value")})
    assert [site.op for site in found.values()] == ["linear"] * 3 + ["bmm", "bmm", "linear"]


def test_a_weight_on_the_left_is_a_site_like_any_other():
    site = sites(LeftWeight(), torch.randn(8, 6, 5))["(root)"]
    assert site.weight == "compress"
    (n, k) = (site.passes["output"].n, site.passes["output"].k)
    assert (n, k) == (Dim(3), Dim(6))  # w[N, K], whatever the model's order


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


def test_a_gradient_inside_the_forward_and_its_gradient():
    """Outputs and weight gradients of both layers, the inner gradient's two products, and what is made of these."""
    spec = capture(Penalty(), torch.randn(8, 8))
    assert list(sites(Penalty(), torch.randn(8, 8))) == ["one", "two"]
    assert set(spec.sites[0].passes) == set(spec.sites[1].passes) == set(PASSES)
    # Layer one: forward, input gradient, its two gradients, and the outer input and weight gradients; layer two: one less.
    assert spec.flops() + left_out(spec) == 6 * (2 * 8 * 8 * 6) + 5 * (2 * 8 * 6 * 1)
    assert len(spec.unaccounted) == 5 and all(
        "GEMM of the backward that is no pass of a site" in text for text in spec.unaccounted
    )


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
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
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
    assert spec.flops() + left_out(spec) == counted(Pairs().to("meta"), floats(8, 8)())
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


def test_convolutions_are_counted_beside_the_sites():
    build, inputs, _ = MODELS["convolution"]
    spec = capture(build(), inputs())
    assert spec.unaccounted == ("0: convolution (9216 FLOPs at batch 8)", "0: convolution_backward (9216 FLOPs at batch 8)")
    assert math.prod((2, 8, 6, 8, 4, 3)) == 9216  # batch, length and channels out, channels in, width

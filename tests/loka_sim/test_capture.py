"""Capture against independent references: FlopCounterMode for the FLOPs, layer sizes for the shapes of the passes."""

import math
import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from loka_sim.capture import capture
from loka_sim.modelspec import PASSES, Dim

pytestmark = pytest.mark.usefixtures("gemms_alone")


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
    "sdpa": (Attention, floats(8, 3, 16), "qkv"),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        floats(8, 5, 16),
        "self_attn self_attn#2 linear1 linear2",
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


def attention(name, batch):
    """FLOPs of attention that is a kernel of its own: two products forward, four backward, over tokens of 16 features."""
    return 3 * 4 * batch * {"encoder layer": 5, "sdpa": 3}.get(name, 0) ** 2 * 16


def left_out(spec):
    return sum(int(number) for text in spec.unaccounted for number in re.findall(r"\((\d+) FLOPs", text))


@pytest.mark.parametrize("name", MODELS)
def test_flops_agree_exactly_with_the_flop_counter(name):
    build, inputs, names = MODELS[name]
    with torch.device("meta"):
        model = build()
    spec = capture(model, inputs(), name=name)
    assert spec.flops() + attention(name, spec.batch) + left_out(spec) == counted(model, inputs())
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
    assert spec.flops(batch) == spec.at_batch(batch).flops() == counted(model, resized) - attention(name, batch)


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


def test_convolutions_are_counted_beside_the_sites():
    build, inputs, _ = MODELS["convolution"]
    spec = capture(build(), inputs())
    assert spec.unaccounted == ("0: convolution (9216 FLOPs at batch 8)", "0: convolution_backward (9216 FLOPs at batch 8)")
    assert math.prod((2, 8, 6, 8, 4, 3)) == 9216  # batch, length and channels out, channels in, width

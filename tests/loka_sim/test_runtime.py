"""A dispatch table at work on the CPU: our kernels in Triton's interpreter, against products of `numerics`' quantized operands.

The interpreter must be chosen before triton is imported, so this file runs itself once more with TRITON_INTERPRET=1.
"""

import copy
import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import library, nn
from torch._dynamo.backends.common import aot_autograd

from hil import operators
from loka_sim.dispatch.runtime import Kernels, TableLinear, _Products, convert, libraries, plan
from loka_sim.errors import DataError
from loka_sim.validation.step_time import converted_by_table
from numerics.quantization import quantize
from perfmodel.kernels import KERNELS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter, with TRITON_INTERPRET=1")

BF16, TURN = "torch/bf16", "torch/transpose_e4m3"
M, N, K = 128, 64, 96
# bf16 rounds a result by 0.0017 of its size; another scale of an operand, or none, moves it by 0.02 or more. torch's quantizers
# multiply by a rounded reciprocal, so that some codes are a step off.
LIMIT, TORCHS_LIMIT = 0.005, 0.012


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's run")
def test_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


def makers(scaling, how):
    """What makes a tensor's two readings."""
    ours = f"loka/quantize_{scaling}"
    return {
        "dual": (f"{ours}_dual", f"{ours}_dual"),
        "apart": (ours, f"{ours}_transposed"),
        "torch's": (f"torch/quantize_{scaling}", f"torch/quantize_{scaling}_transposed"),
        "turned": (ours, TURN),
        "turned back": (TURN, f"{ours}_transposed"),
    }[how]


MIXES = {
    "rowwise, dual": Kernels(*["loka/fp8_rowwise_fast"] * 3, *[makers("rowwise", "dual")] * 3),
    "tensorwise, dual": Kernels(*["loka/fp8_tensorwise_split"] * 3, *[makers("tensorwise", "dual")] * 3),
    "each in its way": Kernels(*["loka/fp8_tensorwise_fast"] * 3, makers("tensorwise", "turned"), makers("tensorwise", "apart"),
                               makers("tensorwise", "turned back")),
    "torch quantizes": Kernels(*["loka/fp8_rowwise_split"] * 3, *[makers("rowwise", "torch's")] * 3),
    "two scalings": Kernels("loka/fp8_rowwise_fast", "loka/fp8_tensorwise_fast", "loka/fp8_rowwise_split",
                            makers("rowwise", "apart"), ("loka/quantize_rowwise", "loka/quantize_tensorwise_transposed"),
                            ("loka/quantize_tensorwise", "loka/quantize_rowwise_transposed")),
    "output alone": Kernels("loka/fp8_rowwise_fast", BF16, BF16, ("loka/quantize_rowwise", ""), ("loka/quantize_rowwise", ""),
                            ("", "")),
    "grad_input alone": Kernels(BF16, "loka/fp8_tensorwise_fast", BF16, ("", ""), ("", "loka/quantize_tensorwise_transposed"),
                                ("loka/quantize_tensorwise", "")),
    "grad_weight alone": Kernels(BF16, BF16, "loka/fp8_rowwise_split", ("", "loka/quantize_rowwise_transposed"), ("", ""),
                                 ("", "torch/quantize_rowwise_transposed")),
    # A tensor that the model stores transposed: its quantizers read it so.
    "stored the other way": Kernels("loka/fp8_rowwise_fast", BF16, BF16, ("loka/quantize_rowwise_transposed", ""),
                                    ("torch/quantize_rowwise_transposed", ""), ("", "")),
}  # fmt: skip


def drawn(*shape):
    # Rows and columns of different sizes, so that their scales differ.
    x = torch.randn(shape) * torch.logspace(-1, 1, shape[-1]) * torch.logspace(-1, 1, shape[-2])[:, None]
    return x.bfloat16()


def product(kernel, a, b):
    """FP64 product of a (M, K) and b (N, K) as the kernel's recipe has them."""
    spec = KERNELS[kernel]
    parts = (
        x.double() if not spec.is_fp8 else quantize(x.contiguous(), recipe).dequantize().double()
        for x, recipe in ((a, spec.recipe_a), (b, spec.recipe_b))
    )  # fmt: skip
    left, right = parts
    return left @ right.t()


def assert_near(got, wanted, limit):
    assert got.dtype == torch.bfloat16
    assert (got.double() - wanted).norm() <= limit * wanted.norm()


def stepped(layer, x, g):
    x = x.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad


@interpreted
@pytest.mark.parametrize("mix", MIXES)
def test_all_three_products_are_of_the_operands_that_the_recipes_make(mix):
    torch.manual_seed(len(mix))
    kernels, x, g = MIXES[mix], drawn(M, K), drawn(M, N)
    layer = TableLinear(nn.Linear(K, N, bias=False).bfloat16(), kernels)
    layer.weight.data = drawn(N, K)
    y, of_x, of_w = stepped(layer, x, g)
    w = layer.weight.detach()
    limit = TORCHS_LIMIT if any(maker.startswith("torch/quantize") for pair in kernels[3:] for maker in pair) else LIMIT
    assert_near(y, product(kernels.output, x, w), limit)
    assert_near(of_x, product(kernels.grad_input, g, w.t()), limit)
    assert_near(of_w, product(kernels.grad_weight, g.t(), x.t()), limit)


def graphs_of(layer, x, g):
    """Operators of the forward's and of the backward's graph, and the compiled step's results."""
    called = []

    def keep(graph, _):
        called.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(layer, dynamic=False, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    return stepped(compiled, x, g), called


@interpreted
@pytest.mark.parametrize("mix", ["rowwise, dual", "each in its way", "two scalings"])
def test_torch_compile_keeps_the_operators_and_the_bits(mix):
    torch.manual_seed(1)
    kernels, x, g = MIXES[mix], drawn(M, K), drawn(M, N)
    layer = TableLinear(nn.Linear(K, N, bias=False).bfloat16(), kernels)
    results, (forward, backward) = graphs_of(layer, x, g)
    for got, wanted in zip(results, stepped(layer, x, g), strict=True):
        assert torch.equal(got, wanted)
    multiply, dual, one = (getattr(torch.ops.loka, name).default for name in ("product", "quantized_both", "quantized"))
    assert (forward.count(multiply), backward.count(multiply)) == (1, 2)
    # One launch makes both readings, the gradient's in the backward.
    wanted = {"rowwise, dual": (2, 1, 0), "each in its way": (0, 0, 4), "two scalings": (0, 0, 6)}[mix]
    assert (forward.count(dual), backward.count(dual), (forward + backward).count(one)) == wanted


@interpreted
@pytest.mark.parametrize("form", ["", "_transposed", "_dual"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "block1x128", "block128x128"])
def test_the_operators_say_what_they_return(scaling, form):
    operator = torch.ops.loka.quantized_both if form == "_dual" else torch.ops.loka.quantized
    library.opcheck(
        operator.default, (drawn(128, 256), f"loka/quantize_{scaling}{form}"), test_utils=("test_schema", "test_faketensor")
    )


@interpreted
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_scales_of_both_readings_lie_where_cublas_takes_them(scaling):
    x = drawn(M, K)
    for reading, source in zip(operators.both(x, f"loka/quantize_{scaling}_dual"), (x, x.t().contiguous()), strict=True):
        codes, scales = reading
        wanted = quantize(source, f"e4m3/{scaling}")
        assert torch.equal(codes.view(torch.uint8), wanted.codes) and torch.equal(scales, wanted.scales)
        assert scales.storage_offset() * 4 % 16 == 0


@interpreted
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_the_products_say_what_they_return(scaling):
    (a, scale_a), (b, scale_b) = (torch.ops.loka.quantized(drawn(n, K), f"loka/quantize_{scaling}") for n in (M, N))
    arguments = (a, b, scale_a, scale_b, f"loka/fp8_{scaling}_split")
    # `test_schema` compares inputs, and FP8 has no arithmetic on a CPU.
    library.opcheck(torch.ops.loka.product.default, arguments, test_utils="test_faketensor")


@interpreted
@pytest.mark.parametrize(("scaling", "shapes"), [("tensorwise", ((1, 1), (1, 1))), ("rowwise", ((M, 1), (1, N)))])
def test_torchs_gemm_is_given_matrices_of_scales(scaling, shapes, monkeypatch):
    """torch.compile prepares the operands for a template that may follow, and fails on the view of a scalar."""
    given = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, scale_a, scale_b, **_: given.append((a, b, scale_a, scale_b)) or a)
    dual = (f"loka/quantize_{scaling}_dual",) * 2
    layer = TableLinear(
        nn.Linear(K, N, bias=False).bfloat16(), Kernels(f"torch/fp8_{scaling}_fast", BF16, BF16, dual, dual, ("", ""))
    )
    _Products.forward(SimpleNamespace(save_for_backward=lambda *_: None), drawn(M, K), layer.weight.detach(), *layer.kernels)
    ((a, b, scale_a, scale_b),) = given
    assert (scale_a.shape, scale_b.shape) == shapes and scale_a.is_contiguous() and scale_b.is_contiguous()
    assert a.shape == (M, K) and b.shape == (K, N) and a.stride(1) == b.stride(0) == 1


class Odd(nn.Linear):
    """A class of its own."""


class Twice(nn.Module):
    """Layers `first` and `last`, and `shared`, which is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.shared = nn.Linear(K, N), nn.Linear(N, N, bias=False), nn.Linear(N, N)

    def forward(self, x):
        return self.last(self.shared(self.shared(self.first(x))))


def table_of(**sites):
    """A table's part that the runtime reads: by site, kernels of the three passes and what makes the operands."""

    def site(name, kernels, module):
        readers = {"output": ("xw", 0, 0), "grad_input": ("gw", 0, 1), "grad_weight": ("gx", 1, 1)}
        passes = {}
        for (which, (tensors, *turned)), kernel in zip(readers.items(), kernels[:3], strict=True):
            quantizers = {t: getattr(kernels, t)[i] for t, i in zip(tensors, turned, strict=True)} if kernel != BF16 else {}
            passes[which] = {"kernel": kernel, "quantizers": quantizers}
        return {
            "name": name,
            "op": "linear",
            "weight": "weight" if module == "(root)" else f"{module}.weight",
            "n": N,
            "k": K if module == "first" else N,
            "passes": passes,
        }

    return {"sites": [site(name.replace("_2", "#2"), kernels, name.removesuffix("_2")) for name, kernels in sites.items()]}


DUAL = MIXES["rowwise, dual"]
PLAIN = Kernels(BF16, BF16, BF16, *[("", "")] * 3)


def test_a_table_says_what_a_layer_runs():
    table = table_of(first=DUAL, last=PLAIN, shared=MIXES["two scalings"], shared_2=MIXES["two scalings"])
    assert plan(table) == {"first": (DUAL, N, K), "shared": (MIXES["two scalings"], N, N)}
    assert libraries(table) == {"loka", "torch"}
    # Calls of one module that were decided differently: it has one set of kernels, or none.
    assert "shared" not in plan(table_of(shared=DUAL, shared_2=PLAIN))
    # Older tables do not name torch's quantizers.
    old = Kernels("torch/fp8_rowwise_fast", BF16, "torch/fp8_tensorwise_fast", *[("", "")] * 3)
    table = table_of(first=old)
    for decided in table["sites"][0]["passes"].values():
        del decided["quantizers"]
    (kernels, _, _) = plan(table)["first"]
    assert kernels.x == ("torch/quantize_rowwise", "torch/quantize_tensorwise_transposed")
    assert kernels.w == ("torch/quantize_rowwise", "") and kernels.g == ("", "torch/quantize_tensorwise_transposed")


def test_what_multiplies_is_no_module_and_stays():
    table = table_of(first=DUAL, last=PLAIN, shared=PLAIN)
    table["sites"][0]["weight"] = "elsewhere.weight"
    model = Twice()
    assert plan(table) == {} and convert(model, table) is model and type(model.first) is nn.Linear


def test_converting_keeps_parameters_and_names():
    model = Twice().bfloat16()
    parameters, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    assert convert(model, table_of(first=DUAL, last=PLAIN, shared=DUAL, shared_2=DUAL)) is model
    assert isinstance(model.first, TableLinear) and isinstance(model.shared, TableLinear) and type(model.last) is nn.Linear
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys() and model.load_state_dict(state)
    assert "loka/fp8_rowwise_fast" in repr(model)


def test_a_validation_runs_other_libraries_kernels_by_it():
    table = table_of(first=DUAL, last=PLAIN, shared=PLAIN)
    assert isinstance(converted_by_table(table)(Twice()).first, TableLinear)


@interpreted
def test_a_converted_model_trains_in_three_dimensions_with_biases():
    model = convert(Twice().bfloat16(), table_of(first=DUAL, shared=DUAL, shared_2=DUAL, last=DUAL))
    exact = Twice().bfloat16()
    exact.load_state_dict(model.state_dict())
    x = torch.randn(4, 32, K).bfloat16()
    results = []
    for each in (model, exact):
        y = each(x)
        y.float().square().mean().backward()
        results.append([y, *(parameter.grad for parameter in each.parameters())])
    for got, wanted in zip(*results, strict=True):
        assert got.shape == wanted.shape
        assert (got.double() - wanted.double()).norm() < 0.15 * wanted.double().norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "first", nn.Linear(K, N + 1)), "first is Linear.96, 64. in the table, and Linear.in_fea"),
        (lambda model: delattr(model, "last"), "last is Linear.64, 64. in the table, and not there in the model"),
        (lambda model: setattr(model, "first", nn.Bilinear(K, K, N)), "first is .* and Bilinear"),
        (lambda model: setattr(model, "more", nn.Linear(2, 2)), "more is not in the table"),
        (lambda model: setattr(model, "first", Odd(K, N)), "first is .* and Odd"),
    ],
)
def test_another_model_is_refused_whole(change, message):
    model = Twice()
    change(model)
    with pytest.raises(DataError, match=f"{message}.*Make a table of this model"):
        convert(model, table_of(shared=DUAL, last=PLAIN, first=DUAL))
    assert type(model.shared) is nn.Linear


def test_a_layer_of_several_names_is_one_afterwards():
    model = Twice()
    model.last = model.shared
    convert(model, table_of(first=PLAIN, shared=DUAL))
    assert isinstance(model.last, TableLinear) and model.last is model.shared
    assert isinstance(convert(nn.Linear(N, N), table_of(**{"(root)": DUAL})), TableLinear)


def test_a_table_that_is_not_there():
    with pytest.raises(DataError, match="nowhere"):
        convert(Twice(), "nowhere")


def test_a_kernel_without_an_operator_is_refused():
    kernels = Kernels(
        "deepgemm/fp8_block128", BF16, BF16, ("loka/quantize_block1x128", ""), ("loka/quantize_block128x128", ""), ("", "")
    )
    with pytest.raises(DataError, match="no operator runs deepgemm/fp8_block128"):
        convert(Twice(), table_of(first=kernels, last=PLAIN, shared=PLAIN))
    assert not operators.runs("deepgemm/fp8_block128") and operators.runs("fbgemm/quantize_rowwise")


@interpreted
def test_rows_that_a_kernel_cannot_take_are_refused():
    layer = TableLinear(nn.Linear(K, N, bias=False).bfloat16(), DUAL)
    with pytest.raises(ValueError, match="20 rows: loka/fp8_rowwise_fast cannot run them: K = 20"):
        layer(drawn(20, K))

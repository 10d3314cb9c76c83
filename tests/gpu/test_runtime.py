"""A dispatch table at work on a Hopper GPU: every kernel that has an operator, in layers, compiled and in a CUDA graph."""

import importlib.util
import itertools
import random

import pytest
import torch
from torch import nn

from loka_sim.dispatch.operands import TRANSPOSE
from loka_sim.dispatch.runtime import BF16, Kernels, TableLinear
from numerics.quantization import quantize
from perfmodel.kernels import KERNELS

FBGEMM = importlib.util.find_spec("fbgemm_gpu") is not None
# bf16 rounds a result by 0.0017 of its size, fast accumulation of these K by 0.003. Other libraries' quantizers multiply by a
# rounded reciprocal, so that values between two codes fall otherwise.
LIMIT, OTHERS_LIMIT = 0.012, 0.025
# Few: of every other one, Triton would compile its kernels anew.
SHAPES = (256, 384, 640), (640, 128, 512)
SCALED = [f"{library}/fp8_{scaling}_{how}" for library in ("torch", "loka", "fbgemm") for scaling in ("tensorwise", "rowwise")
          for how in ("fast", "split") if (library, scaling) != ("fbgemm", "tensorwise")]  # fmt: skip


def ways(scaling):
    """Every pair of kernels that makes both readings of a tensor."""
    ours, torchs, theirs = (f"{library}/quantize_{scaling}" for library in ("loka", "torch", "fbgemm"))
    plain, turned = [ours, torchs, *[theirs] * FBGEMM], [f"{ours}_transposed", f"{torchs}_transposed"]
    pairs = [(f"{ours}_dual", f"{ours}_dual"), *itertools.product(plain, turned)]
    return pairs + [(one, TRANSPOSE) for one in plain] * (scaling == "tensorwise")


def layers():
    """Mixes that between them run every kernel, in every pass, and every way to quantize."""
    for kernel in SCALED:
        if kernel.startswith("fbgemm/") and not FBGEMM:
            continue
        pairs = ways(str(KERNELS[kernel].takes_a))
        for place, first in enumerate(pairs):
            yield Kernels(kernel, kernel, kernel, first, pairs[place - 1], pairs[place - 2])
    one = ("torch/quantize_block1x128", ""), ("torch/quantize_block128x128", ""), ("", "")
    yield Kernels("torch/fp8_block128", BF16, BF16, *one)
    if FBGEMM:
        both = ("loka/quantize_block128x128_dual",) * 2
        yield Kernels(*["fbgemm/fp8_block128"] * 3, both, ("torch/quantize_block128x128", TRANSPOSE), both)


def product(kernel, a, b):
    """Product of a (M, K) and b (N, K) in FP64, their operands as the recipe has them."""
    spec = KERNELS[kernel]
    left, right = (
        x.double() if not spec.is_fp8 else quantize(x.contiguous().cpu(), recipe).dequantize().double().cuda()
        for x, recipe in ((a, spec.recipe_a), (b, spec.recipe_b))
    )
    return left @ right.t()


def drawn(*shape):
    spread = torch.logspace(-1, 1, shape[-1], device="cuda") * torch.logspace(-1, 1, shape[-2], device="cuda")[:, None]
    return (torch.randn(shape, device="cuda") * spread).bfloat16()


def stepped(layer, weight, x, g):
    weight.grad = None
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_compiled_and_captured(scaling):
    """torch.compile's step, and its CUDA graph, return what the eager one does, on operands that change."""
    m, n, k = 512, 384, 640
    dual = (f"loka/quantize_{scaling}_dual",) * 2
    other = (
        ("torch/quantize_tensorwise", TRANSPOSE)
        if scaling == "tensorwise"
        else ("loka/quantize_rowwise", "torch/quantize_rowwise_transposed")
    )
    kernels = Kernels(f"loka/fp8_{scaling}_fast", f"torch/fp8_{scaling}_split", f"loka/fp8_{scaling}_split", dual, other, dual)
    layer = TableLinear(nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16), kernels)
    model = nn.Sequential(nn.LayerNorm(k, device="cuda", dtype=torch.bfloat16), layer, nn.Hardswish())
    compiled = torch.compile(model, dynamic=False, fullgraph=True)
    x, g = drawn(m, k).requires_grad_(), drawn(m, n)

    def step(which):
        x.grad = layer.weight.grad = None
        y = which(x)
        y.backward(g)
        return y.detach(), x.grad, layer.weight.grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(compiled)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(compiled)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(drawn(m, k))
            g.copy_(drawn(m, n))
            layer.weight.copy_(drawn(n, k))
        graph.replay()
        torch.cuda.synchronize()
        found = [part.clone() for part in captured]
        for got, near, wanted in zip(found, step(compiled), step(model), strict=True):
            assert torch.equal(got, near)
            # Fused, torch.compile rounds a norm's result once instead of twice: some codes are a step off.
            assert (got.double() - wanted.double()).norm() <= 0.03 * wanted.double().norm()


@pytest.mark.parametrize("kernels", list(layers()), ids=lambda kernels: "-".join((kernels.output, kernels.x[0], kernels.x[1])))
def test_all_three_products(kernels):
    m, n, k = random.SystemRandom().choice(SHAPES)
    x, g = drawn(m, k), drawn(m, n)
    layer = TableLinear(nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16), kernels)
    layer.weight.data = drawn(n, k)
    w = layer.weight.detach()
    wanted = (
        product(kernels.output, x, w), product(kernels.grad_input, g, w.t()), product(kernels.grad_weight, g.t(), x.t()),
    )  # fmt: skip
    own = all(maker.startswith("loka/") or maker in ("", TRANSPOSE) for pair in kernels[3:] for maker in pair)
    for got, right in zip(stepped(layer, layer.weight, x, g), wanted, strict=True):
        assert (got.double() - right).norm() <= (LIMIT if own else OTHERS_LIMIT) * right.norm()

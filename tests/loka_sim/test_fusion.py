"""The kernels that a capture finds between the GEMMs: against bytes counted by hand, and against torch.compile's account.

`torch_compile_kernels.json` holds torch.compile's own account: of `benchmarks/fusion.py` (torch 2.13), and of kernels that
ran on an H200 (torch 2.11, `benchmarks/step_profile.py`).
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.ir import Layout

from loka_sim.capture import capture
from loka_sim.capture.lowering import Lowering
from loka_sim.capture.operators import repeated_within
from loka_sim.capture.results import MOST_OPERATIONS, MOST_READS_AT_ALL
from loka_sim.capture.views import laid
from loka_sim.modelspec import Fused, ModelSpec
from loka_sim.resolve import zoo_with_mods
from loka_sim.zoo import build, example_inputs

REFERENCE = json.loads((Path(__file__).parent / "torch_compile_kernels.json").read_text())
B = 4096


def found(model: nn.Module, *inputs: torch.Tensor) -> list[tuple[str, str, int, int, int]]:
    """(phase, kind, read, written, unordered bytes) of every kernel at batch `B`, the loss's gradient left out."""
    spec = capture(model, inputs)
    assert not spec.untraced
    sizes = ("read_bytes", "written_bytes", "unordered_bytes")
    return [
        (kernel.phase, kernel.kind, *(getattr(kernel, name).at(B) for name in sizes))
        for kernel in spec.fused
        for _ in range(kernel.count)
    ]


def test_a_layer_has_an_activation_its_gradient_and_a_bias_sum():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32, bias=False))
    y, rows = 2 * B * 128, ("forward", "backward")
    assert found(model, torch.randn(B, 64)) == [
        (rows[0], "pointwise", y, y, 0),
        (rows[1], "pointwise", 2 * y, y, 0),  # the gradient where the result is positive
        (rows[1], "column", y, 2 * 128, 0),
    ]


def test_pointwise_operations_in_a_row_are_one_kernel():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.out = nn.Linear(64, 8, bias=False)

        def forward(self, x):
            return self.out(x + torch.sigmoid(self.a(x)) * self.b(x).square())

    forward = [kernel for kernel in found(Gate(), torch.randn(B, 64)) if kernel[0] == "forward"]
    assert forward == [("forward", "pointwise", 3 * 2 * B * 64, 2 * B * 64, 0)]


class Normed(nn.Module):
    """A residual and a norm between two GEMMs."""

    def __init__(self, width: int):
        super().__init__()
        self.inner, self.norm, self.out = (
            nn.Linear(width, width, bias=False),
            nn.LayerNorm(width),
            nn.Linear(width, 8, bias=False),
        )

    def forward(self, x):
        return self.out(self.norm(x + self.inner(x)))


def test_a_norm_takes_the_residual_in():
    forward, *backward = found(Normed(256), torch.randn(B, 256))
    x, vector, statistic = 2 * B * 256, 2 * 256, 4 * B
    assert forward[:3] == ("forward", "row", 2 * x + 2 * vector)
    # The result; the mean and the deviation for the backward; and the sum itself, unless the backward adds anew.
    assert forward[3] in (x + 2 * statistic, 2 * x + 2 * statistic)
    assert sorted(kernel[1] for kernel in backward) == ["column", "row"]


def test_a_large_norm_sums_its_parameters_gradients_in_the_same_kernel():
    kinds = [kernel[1] for kernel in found(Normed(2048), torch.randn(B, 2048)) if kernel[0] == "backward"]
    assert kinds == ["both"]


def test_a_transposition_is_read_or_written_across_memory():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(32, 8, bias=False)

        def forward(self, x):  # (B, 16, 32)
            return self.second(torch.relu(self.first(x.transpose(1, 2))).transpose(1, 2))

    x = torch.randn(B, 16, 32)
    spec = capture(Mixer(), (x,))
    size = 2 * B * 16 * 32
    forward = [kernel for kernel in spec.fused if kernel.phase == "forward"]
    across = sum(kernel.unordered_bytes.at(B) * kernel.count for kernel in forward)
    assert across == 2 * size  # into the first layer's order, and back behind the activation


def test_slices_of_one_step_are_fetched_once():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(64, 64, bias=False), nn.Linear(32, 8, bias=False)

        def forward(self, x):
            y = self.inner(x)
            return self.out(y[:, 0::2] * y[:, 1::2])

    forward = [kernel for kernel in found(Pairs(), torch.randn(B, 64)) if kernel[0] == "forward"]
    assert forward == [("forward", "pointwise", 2 * B * 64, 2 * B * 32, 0)]


def rotated(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x between two GEMMs, scaled, and x padded on both sides."""
    y = (x @ first).unflatten(1, (8, -1))
    size = y.shape[-1]
    frequency = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.arange(8, dtype=torch.float32)[:, None] * frequency
    cosine, sine = angle.cos().to(y.dtype), angle.sin().to(y.dtype)
    even, odd = y[..., 0::2], y[..., 1::2]
    both = 0.25 * (even * cosine - odd * sine) + torch.sqrt(even * sine + odd * cosine + 2)
    padded = torch.nn.functional.pad(x.detach(), (2, 3))[:, 5:]
    return (both.flatten(1) + 3 * padded) @ second


def test_operations_are_torch_compiles():
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor import config, ir
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    theirs: dict[str, int] = {}
    ours: dict[str, int] = {}

    class Theirs(GraphLowering):
        def run_node(self, node):
            result = box = super().run_node(node)
            while isinstance(box, ir.MutableBox | ir.BaseView):
                box = box.data
            if isinstance(box, ir.Pointwise):
                theirs[node.name] = box.inner_fn_opcount().num_ops
            return result

    class Ours(Lowering):
        def _call(self, node):
            super()._call(node)
            view = self._views[node]
            if not isinstance(view, list) and view.root.buffer is None:
                ours[node.name] = len(view.root.computed)

    def compiler(graph, example):
        lowering = Theirs(graph, example)
        with V.set_graph_handler(lowering), V.set_fake_mode(lowering.fake_mode):
            lowering.run(*example)
        Ours(graph.graph).run()
        return make_boxed_func(graph.forward)

    tensors = [torch.rand(*size, requires_grad=True) for size in ((16, 32), (32, 64), (32, 16))]
    options = {"decompositions": select_decomp_table(), "partition_fn": min_cut_rematerialization_partition}
    with config.patch(realize_opcount_threshold=MOST_OPERATIONS, realize_acc_reads_threshold=MOST_READS_AT_ALL):
        aot_function(rotated, fw_compiler=compiler, bw_compiler=compiler, **options)(*tensors).sum().backward()
    both = ours.keys() & theirs.keys()
    assert len(both) > 30 and max(ours[name] for name in both) > 25
    assert {name: theirs[name] for name in both} == {name: ours[name] for name in both}


class Powers(nn.Module):
    """A power between two GEMMs."""

    def __init__(self, exponent: float):
        super().__init__()
        self.inner, self.out, self.exponent = nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False), exponent

    def forward(self, x):
        return self.out(self.inner(x) ** self.exponent)


@pytest.mark.parametrize(("exponent", "forward"), [(3, "mul"), (0.5, "sqrt"), (-2, "reciprocal"), (1.5, "pow")])
def test_small_powers_are_multiplications(exponent, forward):
    """As torch.compile lowers them: a norm's square is no `pow`, which takes 58 instructions."""
    found = capture(Powers(exponent), (torch.randn(B, 64),)).fused
    assert [kernel.label for kernel in found if kernel.phase == "forward"] == [forward]


class TurnedNorm(nn.Module):
    """An RMS norm of concatenated tokens, one part of them turned, that is multiplied both as it lies and turned."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.mix, self.out = nn.Linear(tokens, tokens // 2, bias=False), nn.Linear(width, 8, bias=False)
        self.last = nn.Linear(tokens, 4, bias=False)

    def forward(self, x):
        joined = torch.cat((x[:, : x.shape[1] // 2], self.mix(x.transpose(1, 2)).transpose(1, 2)), dim=1) + x
        y = joined * torch.rsqrt(joined.square().mean(dim=-1, keepdim=True) + 1e-5)
        return self.out(y), self.last(y.transpose(1, 2))


def test_a_norm_writes_what_is_read_turned_in_its_own_kernel():
    """As torch.compile does in Wukong with its norms replaced: one kernel of the norm, its result and its turned copy."""
    found = [kernel for kernel in capture(TurnedNorm(16, 64), (torch.randn(B, 16, 64),)).fused if kernel.phase == "forward"]
    (norm,) = [kernel for kernel in found if kernel.kind == "row"]
    size, statistic = 2 * B * 16 * 64, 2 * B * 16
    # The sum stays for the backward.
    assert norm.written_bytes.at(B) == 3 * size + statistic
    assert not any({"mul", "rsqrt"} <= set(kernel.label.split()) for kernel in found if kernel is not norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_rows_are_padded_as_torch_compile_pads_them(dtype):
    """torch 2.13's own function on drawn sizes, most of them with rows of more than 1,024 values."""
    generator = torch.Generator().manual_seed(0)
    for dims in (0, 1, 2, 3, 4):
        for _ in range(40):
            sizes = torch.randint(2, {4: 40, 3: 150}.get(dims, 5000), (dims,), generator=generator).tolist()
            strides = torch.empty(sizes, device="meta").stride()
            assert laid(sizes, dtype.itemsize) == list(Layout._pad_strides(strides, sizes, dtype))


class Tokens(nn.Module):
    """Two layers over each token, an activation between."""

    def __init__(self, tokens: int, width: int, hidden: int):
        super().__init__()
        self.tokens = tokens
        self.a, self.b = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, 8, bias=False)

    def forward(self, x):
        return self.b(torch.nn.functional.silu(self.a(x)))


@pytest.mark.parametrize(("tokens", "hidden", "copies"), [(26, 80, 1), (26, 64, 0), (12, 80, 0)])
def test_padded_rows_are_copied_for_products(tokens, hidden, copies):
    """Rows of 2,080 values begin at multiples of 64, and are no matrix of 26 x B rows of 80: a copy forward, a copy backward.

    Those of 1,664 need no padding, those of 960 get none. As an H200 ran a drawn model's mixer (torch 2.11): its SiLU, its
    gradient, and a kernel behind each that moves as many bytes as it reads and writes.
    """
    y = 2 * B * tokens * hidden
    assert found(Tokens(tokens, 40, hidden), torch.randn(B, tokens, 40)) == [
        *[("forward", "pointwise", y, y, 0)] * (1 + copies),
        ("backward", "pointwise", 2 * y, y, 0),
        *[("backward", "pointwise", y, y, 0)] * copies,
    ]


class Picked(nn.Module):
    """Pairs of fields picked by two indices, put together with what is computed, or with what a norm made, and multiplied."""

    def __init__(self, norm: bool):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(256) if norm else nn.Tanh(), nn.Linear(256 + 120, 8, bias=False)
        self.register_buffer("pairs", torch.triu_indices(16, 16, 1))

    def forward(self, x):
        products = torch.bmm(x, x.transpose(1, 2))
        return self.out(torch.cat((self.norm(x.flatten(1)), products[:, self.pairs[0], self.pairs[1]]), dim=1))


@pytest.mark.parametrize(("norm", "apart"), [(True, True), (False, False)])
def test_what_is_picked_is_written_apart_where_torch_compile_joins_what_a_norm_made(norm, apart):
    """`lowering.cat` computes none where it is used that reads a reduction's results (drawn models on an H200, torch 2.11)."""
    labels = [set(kernel.label.split()) for kernel in capture(Picked(norm), (torch.randn(B, 16, 16),)).fused]
    (picked,) = [label for label in labels if "picked" in label]
    assert ("cat" not in picked) == apart


@pytest.mark.parametrize(("mask", "uneven"), [((64, 1, 1, 24), True), ((1, 1, 1, 24), False), ((64, 1, 24, 24), True)])
def test_a_mask_that_heads_share_makes_a_softmax_uneven(mask, uneven):
    """Its index is none that runs along with the scores, so that torch.compile takes rows in pieces."""
    scores, loop = torch.empty(mask, device="meta"), torch.empty(64, 4, 24, 24, device="meta")
    assert repeated_within(scores, loop) == uneven


def test_with_mods_kernels_and_bytes_are_torch_compiles():
    """Wukong at batch 2,048 on an H100, torch 2.11, but for gradients of tables (`benchmarks/step_profile.py`)."""
    own = [kernel for kernel in zoo_with_mods("wukong-production").fused if kernel.kind != "scatter"]
    assert sum(kernel.count for kernel in own) == pytest.approx(247, rel=0.02)
    moved = sum(kernel.count * (kernel.read_bytes.at(2048) + kernel.written_bytes.at(2048)) for kernel in own)
    assert moved == pytest.approx(40_572_874_754, rel=0.10)


def test_look_ups_scale_with_the_ids_and_not_with_the_table():
    class Looked(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.table, self.out = nn.Embedding(rows, 64), nn.Linear(64, 8, bias=False)

        def forward(self, ids):
            return self.out(self.table(ids) * 2)

    few, many = (found(Looked(rows), torch.randint(0, 100, (B,))) for rows in (100, 100_000))
    assert few == many
    assert [kernel[1] for kernel in few] == ["gather", "scatter"]
    assert few[0] == ("forward", "gather", B * (8 + 128), B * 128, 0)


def test_a_model_that_cannot_be_traced_keeps_its_sites_and_says_why():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x)[x[:, 0] > 0].sum()

    spec = capture(Counts(), (torch.randn(16, 8),))
    assert [site.name for site in spec.sites] == ["inner"]
    assert spec.fused == () and "nonzero" in spec.untraced
    assert ModelSpec.from_dict(spec.to_dict()) == spec


def test_another_batch_needs_no_other_capture():
    model = Normed(256)
    small, large = (capture(model, (torch.randn(batch, 256),)) for batch in (1024, 4096))
    assert [dataclasses.astuple(k) for k in small.fused] == [dataclasses.astuple(k) for k in large.fused]


def test_a_specification_without_kernels_still_loads():
    document = capture(Normed(32), (torch.randn(64, 32),)).to_dict()
    old = {key: value for key, value in document.items() if key not in ("fused", "untraced")} | {"schema_version": 1}
    assert ModelSpec.from_dict(old).fused == ()
    assert all(isinstance(kernel, Fused) for kernel in ModelSpec.from_dict(document).fused)


@pytest.mark.parametrize("reference", REFERENCE, ids=lambda row: f"{row['model']}, torch {row['torch'][:4]}")
def test_kernels_and_bytes_are_torch_compiles(reference):
    name, batch = reference["model"], reference["batch"]
    spec = capture(build(name), example_inputs(name, batch))
    own = [kernel for kernel in spec.fused if kernel.kind != "scatter"]
    theirs = reference["but_gradients_of_tables"]
    moved = sum(kernel.count * (kernel.read_bytes.at(batch) + kernel.written_bytes.at(batch)) for kernel in own)
    if not name.startswith("dlrm"):  # of which torch.compile does not count the pairs that it looks up, and pads the products
        assert moved == pytest.approx(theirs["bytes"], rel=0.10)
    # A reduction across memory is two launches there: of parts, and of their sums.
    launches = sum(kernel.count * (2 if kernel.kind == "column" else 1) for kernel in own)
    assert launches == pytest.approx(theirs["kernels"], rel=0.15)


@pytest.mark.parametrize("before", [torch.float32, torch.float64])
def test_a_mask_of_torchs_default_type_counts_as_one_of_the_activations(before, capfd):
    """Masked scores against values in bf16, which a product of a float32 mask would refuse."""

    class Attention(nn.Module):
        def __init__(self, dtype=None):
            super().__init__()
            self.q, self.v, self.dtype = nn.Linear(64, 64), nn.Linear(64, 64), dtype

        def forward(self, x):
            mask = torch.ones(8, 8, dtype=self.dtype, device=x.device).tril()
            scores = torch.einsum("bnd,bmd->bnm", self.q(x), x) * mask
            return torch.einsum("bnm,bmd->bnd", scores, self.v(x))

    torch.set_default_dtype(before)
    try:
        x = torch.randn(B, 8, 64)
        of_default, of_bf16 = (capture(Attention(dtype), x) for dtype in (None, torch.bfloat16))
        assert torch.get_default_dtype() == before
    finally:
        torch.set_default_dtype(torch.float32)
    assert not of_default.untraced
    assert (of_default.fused, of_default.loops) == (of_bf16.fused, of_bf16.loops)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda:0"), None, "cpu"])
def test_a_device_written_in_the_model_does_not_cost_the_whole_step(device):
    """As research code has it: no GPU is needed to know what that step holds."""

    class Positions(nn.Module):
        def __init__(self, device="its input's"):
            super().__init__()
            self.embedding, self.linear, self.device = nn.Embedding(16, 64), nn.Linear(64, 64), device

        def forward(self, x):
            device = x.device if self.device == "its input's" else self.device
            places = torch.arange(x.shape[1], device=device)
            x = x if device is None or self.device == "its input's" else x.to(device)
            return self.linear(x + self.embedding(places))

    x = torch.randn(B, 8, 64)
    fixed, usual = capture(Positions(device), x), capture(Positions(), x)
    assert not fixed.untraced
    assert (fixed.fused, fixed.loops) == (usual.fused, usual.loops)


def test_a_sum_over_few_experts_is_no_loop():
    """torch.compile unrolls reductions of under eight elements (`unroll_reductions_threshold`) into what uses them."""

    class Experts(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.experts, self.out = nn.Parameter(torch.empty(number, 64, 128)), nn.Linear(128, 8, bias=False)

        def forward(self, x):
            return self.out(torch.tanh(torch.matmul(x, self.experts)).sum(0))

    y = 2 * B * 128
    few, many = (found(Experts(number), torch.randn(B, 64)) for number in (4, 8))
    assert [kernel for kernel in few if kernel[0] == "forward"] == [("forward", "pointwise", 4 * y, y, 0)]
    assert [kernel for kernel in many if kernel[0] == "forward"] == [("forward", "column", 8 * y, y, 0)]

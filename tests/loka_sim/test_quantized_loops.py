"""Quantization in a step: against bytes counted by hand, against torch.compile's cuts, and its account of whole models.

`torch_compile_fp8_kernels.json` holds that account for models converted by torchao: of `benchmarks/fusion.py --variant`
(torch 2.13), and of kernels that ran on an H200 (torch 2.11, `benchmarks/step_profile.py`).
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from loka_sim import modelspec, step_loops
from loka_sim.capture import capture
from loka_sim.dispatch.baselines import BASELINES
from loka_sim.dispatch.candidates import SiteShape, operand_makers
from loka_sim.dispatch.steps import RECIPE
from loka_sim.errors import UserError
from loka_sim.fp8_step import fused, taken
from loka_sim.fusion import measured
from loka_sim.loops import Lowered
from loka_sim.quantized_loops import FP64, RESCALE, ROUNDED, Taken, pieces, quantized
from loka_sim.resolve import resolve_model
from perfmodel.data_folder import data_folder
from perfmodel.fused import instructions_of

REFERENCE = json.loads((Path(__file__).parent / "torch_compile_fp8_kernels.json").read_text())
B, N = 8192, 512
BYTES = 2 * B * N


@pytest.fixture(scope="module")
def spec():
    model = nn.Sequential(nn.Linear(64, N), nn.ReLU(), nn.Linear(N, 256, bias=False))
    return capture(model, (torch.randn(B, 64),))


def assigned(spec, passes, scaling="tensorwise"):
    """The second layer's passes in FP8."""
    shape = SiteShape.of(spec.sites[1], B)
    found = {}
    for name in passes:
        found[spec.sites[1].name, name] = {
            tensor: Taken(scaling, turned, *shape.tensor(tensor)) for tensor, turned in shape.reads(name)
        }
    return found


def kernels(spec, which):
    """(phase, kind, iteration space, bytes read, bytes written) of every kernel of the step."""
    step = step_loops.read(spec.loops, B)
    return [
        (k.phase, k.kind, (k.kept.at(B), k.reduced.at(B)), k.read_bytes.at(B), k.written_bytes.at(B))
        for k in fused(step, which)
        for _ in range(k.count)
    ]


def test_nothing_assigned_is_bf16(spec):
    bf16 = [
        (k.phase, k.kind, (k.kept.at(B), k.reduced.at(B)), k.read_bytes.at(B), k.written_bytes.at(B))
        for k in spec.fused
        for _ in range(k.count)
    ]
    assert sorted(kernels(spec, {})) == sorted(bf16)


def test_an_fp8_product_reads_no_padding_away():
    """torch.compile pads nothing that `_scaled_mm` needs: of the copies for products of 26 x 80 values a sample none is left."""
    silu = nn.Sequential(nn.Linear(48, 80, bias=False), nn.SiLU(), nn.Linear(80, 16, bias=False))
    spec = capture(silu, (torch.randn(B, 26, 48),))
    y = 2 * B * 26 * 80
    copies = [kernel for kernel in kernels(spec, {}) if kernel[3:] == (y, y)]
    assert len(copies) == 3  # the activation too
    found = kernels(spec, assigned(spec, ("output", "grad_input", "grad_weight")))
    assert not any(kernel[3:] == (y, y) and kernel[0] == "forward" for kernel in found)
    # The first layer's gradient stays bf16, and what it reads is copied.
    assert sum(kernel[3:] == (y, y) for kernel in found) == 1


def test_an_activation_is_computed_in_the_magnitudes_and_in_the_cast(spec):
    found = kernels(spec, assigned(spec, ("output", "grad_input", "grad_weight")))
    forward = [kernel for kernel in found if kernel[0] == "forward" and kernel[3] >= BYTES // 2]
    # bf16 wrote the activation; now it is read twice, and written in 8 bits.
    assert forward == [
        ("forward", "row", (512, 8192), BYTES, 4 * 512),
        ("forward", "pointwise", (B * N, 1), BYTES + 4, BYTES // 2),
    ]
    # The backward reads it again for the weight's gradient, transposed, beside the mask of the activation's gradient.
    assert any(kernel[0] == "backward" and kernel[4] >= BYTES // 2 for kernel in found)


def test_a_bf16_pass_keeps_the_activation_written(spec):
    found = kernels(spec, assigned(spec, ("output",)))
    assert sum(written for phase, _, _, _, written in found if phase == "forward") >= BYTES + BYTES // 2


def test_rowwise_magnitudes_and_cast_are_one_kernel(spec):
    found = kernels(spec, assigned(spec, ("output", "grad_input", "grad_weight"), "rowwise"))
    assert ("forward", "row", (B, N), BYTES, BYTES // 2 + 4 * B) in found


def test_scales_behind_a_gemm_are_a_kernel_over_its_output(spec):
    """torchao runs a rowwise GEMM without fast accumulation by tensors, and multiplies what it returns."""
    passes = assigned(spec, ("grad_weight",), "rowwise")
    after, rounded = (
        {
            key: {name: how._replace(after=True, scales=scales) for name, how in operands.items()}
            for key, operands in passes.items()
        }
        for scales in (FP64, ROUNDED)
    )
    plain, scaled = (kernels(spec, which) for which in (passes, after))
    size = 2 * 256 * N  # of the weight's gradient
    more = [kernel for kernel in scaled if kernel not in plain]
    assert more == [("backward", "pointwise", (256 * N, 1), size, size)]
    step = step_loops.read(spec.loops, B)
    label, slower = ([k.label for k in fused(step, some) if "rescale" in k.label] for some in (after, rounded))
    assert 50 < instructions_of(label[0].split()) < instructions_of(slower[0].split())


def test_scales_of_several_gemms_in_one_kernel_are_each_computed(spec):
    step = quantized(step_loops.read(spec.loops, B), {})
    loops = [
        replace(loop, reads={}, operators=RESCALE[FP64], kind="pointwise", space=(64, 1), writes={10_000 + number: 128})
        for number, loop in enumerate(step.scheduled[:3])
    ]
    (kernel,) = measured(Lowered(loops, step.sizes, set()), [[0, 1, 2]])
    assert "rescale*3" in kernel.label.split()
    assert instructions_of(["rescale*3"]) == 3 * instructions_of(["rescale"])


def test_torchaos_rowwise_gradients_are_scaled_behind_their_gemms():
    site = modelspec.load(data_folder() / "specs" / "dlrm-small.json").sites[1]
    shape = SiteShape.of(site, 2048)
    chosen = {name: f"torch/fp8_rowwise_{'fast' if name == 'output' else 'split'}" for name in shape.names}
    found = taken(shape, chosen, operand_makers(shape, chosen))
    assert {name: {how.after for how in operands.values()} for name, operands in found.items()} == {
        "output": {False}, "grad_input": {True}, "grad_weight": {True},
    }  # fmt: skip


def test_what_another_library_quantizes_is_written_for_it(spec):
    """torch quantizes the weight alone: the activation stays as in bf16."""
    only = {key: {"w": operands["w"]} for key, operands in assigned(spec, ("output",)).items()}
    step = quantized(step_loops.read(spec.loops, B), only)
    (gemm,) = [loop for loop in step.scheduled if loop.site == (spec.sites[1].name, "output")]
    reads = {access.read_bytes for access in gemm.reads.values()}
    assert reads == {BYTES, 256 * N, 4}  # and the weight's scale


def test_every_gemm_of_the_step_is_a_pass_of_a_site(spec):
    named = [loop.site for loop in step_loops.read(spec.loops, B).scheduled if loop.kind == "gemm"]
    assert sorted(named) == sorted((site.name, name) for site in spec.sites for name in site.passes)


@pytest.mark.parametrize(
    ("elements", "parts"),
    [
        (8192, 1), (1_769_472, 216), (2_097_152, 256), (3_538_944, 432), (4_194_304, 512), (8_388_608, 1024),
        (28_311_552, 512), (33_554_432, 512), (50_331_648, 512), (67_108_864, 512), (268_435_456, 2048),
    ],
)  # fmt: skip
def test_reductions_are_cut_as_on_an_h200(elements, parts):
    assert pieces(elements) == parts


@pytest.mark.parametrize(
    "line", ["forward", "forward row 1 x | add | 1:2:w | 2:4", "forward gemm 0 0 | mm |  | 1:2 | x=1:2 | none s"]
)
def test_a_damaged_loop_is_named(line):
    with pytest.raises(UserError, match=r"loops\[0\].*capture the model again"):
        step_loops.read((line,), 1)


@pytest.mark.parametrize("reference", REFERENCE, ids=lambda row: f"{row['model']}, {row['variant']}, torch {row['torch'][:4]}")
def test_kernels_and_bytes_are_those_of_a_converted_model(reference):
    batch = reference["batch"]
    spec = modelspec.load(data_folder() / "specs" / f"{reference['model']}.json").at_batch(batch)
    baseline = next(b for b in BASELINES if b.name == reference["variant"])
    every = {}
    for site in spec.sites:
        shape = SiteShape.of(site, batch)
        assignment = baseline.assignment(site, shape)
        found = taken(shape, assignment, operand_makers(shape, assignment))
        every |= {(site.name, name): operands for name, operands in found.items()}
    own = [kernel for kernel in fused(step_loops.read(spec.loops, batch), every) if kernel.kind != "scatter"]
    moved = sum(k.count * (k.read_bytes.at(batch) + k.written_bytes.at(batch)) for k in own)
    assert moved == pytest.approx(reference["but_gradients_of_tables"]["bytes"], rel=0.15)
    launches = sum(k.count * (2 if k.kind == "column" else 1) for k in own)
    assert launches == pytest.approx(reference["but_gradients_of_tables"]["kernels"], rel=0.25)


def normed(batch, columns=512):
    """A norm whose result one FP8 layer alone reads, behind a layer whose output it normalizes."""
    model = nn.Sequential(nn.Linear(64, columns), nn.LayerNorm(columns), nn.Linear(columns, 256, bias=False))
    found = capture(model, (torch.randn(batch, 64),))
    shape = SiteShape.of(found.sites[1], batch)
    site = found.sites[1].name

    def both(*passes):
        taken = {
            (site, name): {tensor: Taken("tensorwise", turned, *shape.tensor(tensor)) for tensor, turned in shape.reads(name)}
            for name in passes
        }
        step = fused(step_loops.read(found.loops, batch), taken)
        return [kernel for kernel in step if kernel.kind == "both"]

    return both


def test_a_backward_makes_a_norms_result_anew_that_fp8_products_alone_read():
    """As torch 2.11 did on an H200 (wukong at drawn sizes): one kernel of the norm's gradient and the turned 8-bit copy."""
    both = normed(16384)
    (kernel,) = both("output", "grad_input", "grad_weight")
    (plain,) = both("output")  # whose weight's gradient reads the result itself, which the forward keeps
    size = 16384 * 512
    assert "cast" in kernel.label.split() and "cast" not in plain.label.split()
    assert kernel.written_bytes.at(16384) - plain.written_bytes.at(16384) == kernel.unordered_bytes.at(16384) == size
    assert kernel.read_bytes.at(16384) - plain.read_bytes.at(16384) < 0.01 * size


@pytest.mark.parametrize(
    ("columns", "behind", "copies"),
    [(1096, "linear", 1), (1152, "linear", 0), (1000, "linear", 0), (1096, "output", 1), (1096, "relu", 1)],
)
def test_a_bias_is_copied_to_padded_rows_of_a_product(columns, behind, copies):
    """Not where the rows are dense; whatever stands behind, as an H200 ran it (torch 2.11); nor in FP8."""
    tail = {"linear": [nn.Linear(columns, 64)], "relu": [nn.ReLU()], "output": []}[behind]
    found = capture(nn.Sequential(nn.Linear(64, columns), *tail), (torch.randn(512, 64),))
    assert sum(kernel.count for kernel in found.fused if kernel.kind == "copy") == copies


class Joined(nn.Module):
    """A layer of heads' results put together, one of them turned."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 128, bias=False) for _ in range(3))
        self.out = nn.Linear(384, 128, bias=False)

    def forward(self, x):
        first, second, third = (head(x) for head in self.heads)
        turned = first.view(-1, 32, 4, 32).transpose(2, 3).reshape(-1, 32, 128)
        return self.out(torch.cat((turned, second, third), -1))


@pytest.mark.parametrize(("batch", "finds_places"), [(4096, True), (512, False)])
def test_magnitudes_of_what_is_put_together_turned_find_every_elements_place(batch, finds_places):
    """Where a block of threads takes more than the fewest elements; and that is most of what they take."""
    spec = capture(Joined(), (torch.randn(batch, 32, 64),)).at_batch(batch)
    site = spec.sites[-1]
    shape = SiteShape.of(site, batch)
    passes = {
        (site.name, name): {tensor: Taken("tensorwise", turned, *shape.tensor(tensor)) for tensor, turned in shape.reads(name)}
        for name in shape.names
    }
    labels = [k.label for k in fused(step_loops.read(spec.loops, batch), passes)]
    magnitudes = [label for label in labels if "amax" in label and "cat" in label]
    assert magnitudes and all(("turned_cat" in label) == finds_places for label in magnitudes)
    assert instructions_of(["abs", "amax", "cat", "turned_cat"]) > 10 * instructions_of(["abs", "amax", "cat"])


class Compared(nn.Module):
    """What was seen, what is asked, their difference and their product, side by side, as attention over items has them."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.seen, self.asked, self.out = nn.Linear(64, width), nn.Linear(64, width), nn.Linear(4 * width, 128)

    def forward(self, x):
        seen, asked = torch.relu(self.seen(x)), self.asked(x)
        return self.out(torch.cat((seen, asked, seen - asked, seen * asked), 1))


def test_what_is_put_together_of_many_reads_is_written_and_kept_in_8_bits():
    """As torch.compile had it in steps on an H200: six reads, more than are computed for two uses; one cast, both ways.

    A backward never puts tensors together anew (`torch/_functorch/partitioners.py`): it keeps what its FP8 product reads.
    """
    spec = capture(Compared(), (torch.randn(B, 64),))
    shape = SiteShape.of(spec.sites[2], B)
    passes = {
        (spec.sites[2].name, name): {tensor: Taken("tensorwise", turned, *shape.tensor(tensor)) for tensor, turned in reads}
        for name, reads in ((name, shape.reads(name)) for name in ("output", "grad_weight"))
    }
    found, size = fused(step_loops.read(spec.loops, B), passes), B * 4 * 256
    (joined,) = [kernel for kernel in found if "cat" in kernel.label.split()]
    assert joined.phase == "forward" and joined.written_bytes.at(B) == pytest.approx(2 * size, rel=0.001)
    casts = [kernel for kernel in found if "cast" in kernel.label.split() and kernel.kept.at(B) == size]
    assert [(kernel.phase, kernel.read_bytes.at(B), kernel.written_bytes.at(B)) for kernel in casts] == [
        ("forward", 2 * size + 4, 2 * size)
    ]


@pytest.mark.parametrize(("rows", "uneven"), [(B, False), (B + 8, True)])
def test_magnitudes_in_pieces_that_are_not_even_are_uneven(rows, uneven):
    spec = capture(nn.Sequential(nn.Linear(64, N), nn.ReLU(), nn.Linear(N, 256)), (torch.randn(rows, 64),))
    shape = SiteShape.of(spec.sites[1], rows)
    passes = {
        (spec.sites[1].name, "output"): {
            tensor: Taken("tensorwise", turned, *shape.tensor(tensor)) for tensor, turned in shape.reads("output")
        }
    }
    found = [k for k in fused(step_loops.read(spec.loops, rows), passes) if k.kind == "row" and k.reduced.at(rows) > N]
    assert {kernel.uneven for kernel in found if kernel.kept.at(rows) == pieces(rows * N)} == {uneven}


def test_a_turned_copy_is_written_where_torch_compile_writes_it():
    """Where loops share most: in the kernel of the norm's gradient, not of a gate's (torch 2.11, H200, its log)."""
    batch, size = 2176, 3840
    found = resolve_model("benchmarks.drawn_models:drawn_10").at_batch(batch)
    passes = {}
    for site in found.sites:
        shape = SiteShape.of(site, batch)
        baseline = next(baseline for baseline in BASELINES if baseline.name == "naive_tensorwise")
        kernels = baseline.assignment(site, shape)
        taken_of = taken(shape, kernels, operand_makers(shape, kernels), RECIPE)
        passes |= {(site.name, name): operands for name, operands in taken_of.items()}
    step = fused(step_loops.read(found.loops, batch), passes)
    sums = [
        k for k in step if k.phase == "backward" and k.kind == "row" and k.kept.at(batch) * k.reduced.at(batch) == batch * size
    ]
    (kernel,) = (kernel for kernel in sums if "cast" in kernel.label.split())
    assert (kernel.kept.at(batch), kernel.reduced.at(batch)) == (batch, size)
    assert kernel.unordered_bytes.at(batch) == batch * size


def biased(bias, behind):
    """What stands beside an FP8 layer whose output is read by what its bias cannot be added in."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(256, 3 * 64, bias=bias), nn.Linear(64, 64)

        def forward(self, x):
            return self.last(behind(self.first(x)))

    batch = 512
    found = capture(Model(), (torch.randn(batch, 16, 256),))
    (site,) = (site for site in found.sites if site.name == "first")
    shape = SiteShape.of(site, batch)
    passes = {
        (site.name, "output"): {
            tensor: Taken("tensorwise", turned, *shape.tensor(tensor)) for tensor, turned in shape.reads("output")
        }
    }
    size = 2 * batch * 16 * 3 * 64
    return [
        kernel
        for kernel in fused(step_loops.read(found.loops, batch), passes)
        if kernel.phase == "forward" and kernel.kind == "pointwise" and kernel.written_bytes.at(batch) == size
    ]


def attended(x):
    return torch.nn.functional.scaled_dot_product_attention(*(part.unsqueeze(1) for part in x.chunk(3, 2))).squeeze(1)


def activated(x):
    return torch.relu(x)[..., :64]


@pytest.mark.parametrize(("bias", "behind", "kernels"), [(True, attended, 1), (False, attended, 0), (True, activated, 0)])
def test_a_bias_behind_an_fp8_product_is_a_kernel_where_its_reader_is_called(bias, behind, kernels):
    """torchao adds it behind the product: attention cannot, a loop can (torch 2.11, H200, drawn models)."""
    found = biased(bias, behind)
    assert len(found) == kernels
    assert all(kernel.label == "add" and kernel.read_bytes.at(512) > kernel.written_bytes.at(512) for kernel in found)

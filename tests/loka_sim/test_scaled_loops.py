"""Products that are scaled where they are read: against torch.compile's own counts, and against kernels that an H200 ran."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from loka_sim import step_loops
from loka_sim.capture import capture
from loka_sim.capture.results import BIAS, MOST_OPERATIONS, SCALING, Root
from loka_sim.dispatch.baselines import BASELINES
from loka_sim.dispatch.candidates import SiteShape, operand_makers
from loka_sim.dispatch.steps import RECIPE
from loka_sim.fp8_step import fused, taken
from loka_sim.resolve import resolve_model

ROWWISE = next(baseline for baseline in BASELINES if baseline.name == "naive_rowwise")


def rowwise(spec, batch):
    """The step with every linear by torchao's rowwise recipe: (phase, kernel) of each kernel."""
    passes = {}
    for site in spec.sites:
        shape = SiteShape.of(site, batch)
        chosen = ROWWISE.assignment(site, shape)
        found = taken(shape, chosen, operand_makers(shape, chosen), RECIPE)
        passes |= {(site.name, name): operands for name, operands in found.items()}
    return fused(step_loops.read(spec.loops, batch, scaled=True), passes)


@pytest.mark.filterwarnings("ignore")  # of torch and torchao, as they are imported
def test_a_scaling_is_as_much_as_torch_compile_counts(monkeypatch):
    """Its operations, and its reads, of a product in bf16 by torchao's own scales of rows and columns."""
    float8_utils = pytest.importorskip("torchao.float8.float8_utils")
    from torch._inductor import graph, ir

    counted = []
    decide = ir.StorageBox.has_exceeded_max_reads

    def spy(self):
        if isinstance(self.data, ir.Pointwise):
            counted.append((self.num_reads(), self.data.inner_fn_opcount().num_ops))
        return decide(self)

    monkeypatch.setattr(ir, "is_cpu", lambda _: False)  # else what is costly on a CPU is written at once
    monkeypatch.setattr(ir.StorageBox, "has_exceeded_max_reads", spy)

    def stop(_):
        raise InterruptedError

    monkeypatch.setattr(graph.GraphLowering, "codegen", stop)  # what is counted is then

    def scale(amax):
        return float8_utils.amax_to_scale(amax, torch.float8_e4m3fn, round_scales_to_power_of_2=True).reciprocal()

    def scaled(product, rows, columns):
        output = (product * (scale(rows) * scale(columns))).to(torch.bfloat16)
        return output + 1, (output * 2).sum(0)

    some = torch.rand(64, 1, dtype=torch.bfloat16), torch.rand(1, 32, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="InterruptedError"):
        torch.compile(scaled, backend="inductor")(torch.rand(64, 32, dtype=torch.bfloat16), *some)
    assert (1 + SCALING.readings, 1 + SCALING.operations) in counted


def test_what_computes_much_counts_what_is_behind_products():
    few = frozenset({("", number) for number in range(MOST_OPERATIONS - SCALING.operations)})
    root = Root(1, 2, "mul", computed=few)
    assert not root.computes_much
    root.computed_behind = frozenset({("", 0, SCALING)})
    assert not root.computes_much
    assert root.readings == SCALING.readings
    for more in (("", 1, BIAS), ("", 1, SCALING)):
        assert replace(root, computed_behind=root.computed_behind | {more}).computes_much


def test_a_product_that_only_loops_read_is_scaled_in_each():
    """Of two residual blocks: torch.compile has no kernel that only scales a product."""
    batch, width = 4096, 512

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(width, width, bias=False), nn.LayerNorm(width)

        def forward(self, x):
            return x + self.inner(self.norm(x))

    spec = capture(nn.Sequential(nn.Linear(64, width), Residual(), Residual(), nn.Linear(width, 16)), (torch.randn(batch, 64),))
    labels = [kernel.label.split() for kernel in rowwise(spec, batch) if "rescale_rounded" in kernel.label]
    gradients_of_weights = [label for label in labels if set(label) == {"mul", "rescale_rounded"}]
    assert len(labels) > len(gradients_of_weights)
    inside = [label for label in labels if "sum" in label]
    assert inside  # the norm's gradient scales what it reads


def test_gradients_of_scaled_products_are_written_as_an_h200_wrote_them():
    """GELU's of a scaled product is more than is computed anew: written, in FP32, beside a cast of as many bytes (drawn_2's
    rowwise step, torch 2.11). Rows of matrices do not join a loop over three dimensions: they read what it wrote.
    """
    batch, fields, width = 1408, 28, 128
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    spec = capture(model, (torch.randn(batch, fields, width),))
    assert "scaled" in [line.split()[0] for line in spec.loops]
    found = [(k.kind, k.read_bytes.at(batch), k.written_bytes.at(batch)) for k in rowwise(spec, batch) if k.phase == "backward"]
    for ran in (("pointwise", 40.45e6, 50.46e6), ("row", 40.37e6, 20.26e6)):
        assert ran in [(kind, pytest.approx(read, rel=0.01), pytest.approx(written, rel=0.01)) for kind, read, written in found]
    size = 4 * batch * fields * 2 * width
    assert all(size not in loop.writes.values() for loop in step_loops.read(spec.loops, batch).scheduled)


def test_what_the_backward_reads_and_never_computes_anew_is_written():
    """DCN V2's inputs side by side, beside their copy in 8 bits: an H200 read 14.7 MB of parts and wrote 21.2 in one kernel."""
    batch, width = 2048, 3456
    spec = resolve_model("dcnv2-production").at_batch(batch)
    found = [k for k in rowwise(spec, batch) if (k.phase, k.kept.at(batch), k.reduced.at(batch)) == ("forward", batch, width)]
    assert [k.written_bytes.at(batch) for k in found if "cat" in k.label.split()] == [pytest.approx(21.24e6, rel=0.01)]


def test_a_step_without_products_to_scale_has_one_backward():
    spec = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), (torch.randn(24, 8),))
    assert not any(line.startswith("scaled") for line in spec.loops)

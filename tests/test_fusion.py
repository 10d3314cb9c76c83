"""Which loops run as one kernel, and what they move, held to torch.compile itself, which compiles the same graphs for an H200."""

import copy
import importlib.util
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loka_sim.capture.lowering import lower
from loka_sim.fusion import kernels, measured
from loka_sim.loops import Lowered


class Wide(nn.Module):
    """The gradient of a bias so wide that its sum is not cut."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 16384), nn.Linear(16384, 512)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class Pooled(nn.Module):
    """Activations that go on and are summed over tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        hidden = F.gelu(self.up(x))
        return self.down(hidden), hidden.sum(1)


class Dropped(nn.Module):
    """Random numbers are drawn once for all that use them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 512))

    def forward(self, x):
        return self.layers(x)


class Learned(nn.Module):
    """The gradient of a slope sums all elements."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 1024), nn.PReLU(), nn.Linear(1024, 512))

    def forward(self, x):
        return self.layers(x)


class Classes(nn.Module):
    """A loss over classes, scaled: one kernel forward that keeps two numbers a row, one backward."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(128, 4096)

    def forward(self, x):
        return F.cross_entropy(self.out(x) / 0.05, torch.arange(len(x), device=x.device))


class Experts(nn.Module):
    """Layers of several experts as einsums: their gradients' products read views that need copies, one each."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.empty(4, *sizes)) for sizes in ((256, 512), (512, 128)))

    def forward(self, x):
        hidden = F.relu(torch.einsum("bi,eij->ebj", x, self.first))
        return F.relu(torch.einsum("ebi,eij->ebj", hidden, self.second))


MODELS = {
    "wide": (Wide, (2048, 512)), "pooled": (Pooled, (2048, 50, 64)), "dropped": (Dropped, (8192, 512)),
    "learned": (Learned, (8192, 512)), "classes": (Classes, (2048, 128)), "experts": (Experts, (4096, 256)),
}  # fmt: skip
LARGE = 2**20  # bytes of a kernel that counts


@pytest.fixture(scope="module")
def benchmark():
    pytest.importorskip("triton")
    path = Path(__file__).parents[1] / "benchmarks" / "fusion.py"
    spec = importlib.util.spec_from_file_location("fusion", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own modules
        spec.loader.exec_module(module)
    return module


def own_and_theirs(benchmark, model, inputs, batch):
    """What a graph's loops are as kernels, and torch.compile's kernels with their names and counts."""
    graphs = []

    def keep(graph, scaled_at=0):
        if not scaled_at:
            graphs.append(copy.deepcopy(graph.owning_module))
        return Lowered()

    with (
        mock.patch.object(benchmark.trace, "lower", keep),
        mock.patch.object(benchmark.trace, "_marked_tables", lambda model: model),
    ):
        benchmark.trace.traced(model, inputs, None, batch, batch, 0)
    own = [group for graph in graphs for lowered in [lower(graph.graph)] for group in measured(lowered, kernels(lowered))]
    with warnings.catch_warnings(), torch._inductor.config.patch(compile_threads=1):
        warnings.simplefilter("ignore")
        theirs = benchmark.by_torch_compile(dict(zip(("forward", "backward"), graphs, strict=True)))
    return own, theirs


@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_torch_compiles(benchmark, name):
    kind, size = MODELS[name]
    with torch.device("meta"):
        model, x = kind(), torch.empty(size)
    own, theirs = own_and_theirs(benchmark, model, (x,), size[0])
    here = sorted(group.read_bytes + group.written_bytes for group in own)
    there = sorted(size for _, count, kernel in theirs for size in [kernel.read_bytes + kernel.written_bytes] * count)
    here, there = ([size for size in sizes if size > LARGE] for sizes in (here, there))
    assert here == pytest.approx(there, rel=0.05)


class Pairs(nn.Module):
    """Products of all pairs of fields: two look-ups of what is made here, whose gradients take in the same elements."""

    def __init__(self):
        super().__init__()
        self.fields = nn.Embedding(1000, 32)
        left, right = torch.triu_indices(24, 24, offset=1)
        self.register_buffer("left", left)
        self.register_buffer("right", right)
        self.out = nn.Linear(32, 64)

    def forward(self, ids):
        x = self.fields(ids)
        return self.out(x[:, self.left] * x[:, self.right])


class Tables(nn.Module):
    """Rows of several tables side by side: each table's gradient takes in elements of its own."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, 64) for _ in range(4))
        self.out = nn.Linear(256, 64)

    def forward(self, ids):
        return self.out(torch.cat([table(ids[:, field]) for field, table in enumerate(self.tables)], 1))


@pytest.mark.parametrize(("kind", "fields"), [(Pairs, 24), (Tables, 4)])
def test_gradients_of_look_ups_are_as_many_kernels_as_torch_compiles(benchmark, kind, fields):
    with torch.device("meta"):
        model, ids = kind(), torch.zeros(2048, fields, dtype=torch.long)
    own, theirs = own_and_theirs(benchmark, model, (ids,), 2048)
    added = sum(count for _, count, kernel in theirs if kernel.read_bytes and "index_put" in str(kernel.operators))
    assert sum(group.kind == "scatter" for group in own) == added


def test_what_a_graph_gives_back_and_uses_too_is_written_once(benchmark):
    with torch.device("meta"):
        model, ids = Pairs(), torch.zeros(2048, 24, dtype=torch.long)
    own, theirs = own_and_theirs(benchmark, model, (ids,), 2048)
    written = 2048 * 24 * 32 * 2
    (made,) = [group for group in own if group.kind == "gather" and group.written_bytes == written]
    (pairs,) = [group for group in own if group.kind == "gather" and group.written_bytes > written]
    # The look-ups read what was written, again and again out of the L2; nothing of the table.
    there = [kernel for _, _, kernel in theirs if kernel.written_bytes == pairs.written_bytes and "mul" in str(kernel.operators)]
    assert pairs.read_bytes == pytest.approx(written, rel=0.05) and made.read_bytes < 2 * written
    assert any(pairs.read_bytes == pytest.approx(kernel.read_bytes, rel=0.05) for kernel in there)

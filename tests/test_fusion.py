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


MODELS = {
    "wide": (Wide, (2048, 512)), "pooled": (Pooled, (2048, 50, 64)), "dropped": (Dropped, (8192, 512)),
    "learned": (Learned, (8192, 512)), "classes": (Classes, (2048, 128)),
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


@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_torch_compiles(benchmark, name):
    kind, size = MODELS[name]
    with torch.device("meta"):
        model, x = kind(), torch.empty(size)
    graphs = []

    def keep(graph):
        graphs.append(copy.deepcopy(graph.owning_module))
        return Lowered()

    with mock.patch.object(benchmark.trace, "lower", keep):
        benchmark.trace.traced(model, (x,), None, size[0], size[0], 0)
    own = [group for graph in graphs for lowered in [lower(graph.graph)] for group in measured(lowered, kernels(lowered))]
    with warnings.catch_warnings(), torch._inductor.config.patch(compile_threads=1):
        warnings.simplefilter("ignore")
        theirs = benchmark.by_torch_compile(dict(zip(("forward", "backward"), graphs, strict=True)))
    here = sorted(group.read_bytes + group.written_bytes for group in own)
    there = sorted(size for _, count, kernel in theirs for size in [kernel.read_bytes + kernel.written_bytes] * count)
    here, there = ([size for size in sizes if size > LARGE] for sizes in (here, there))
    assert here == pytest.approx(there, rel=0.05)

"""Products in every layout of their operands, on the CPU: what is launched is the product, and its operands lie as said."""

import json

import pandas as pd
import pytest
import torch

from hil import layouts
from hil.kernels.base import Shape
from hil.timing import BufferPool
from perfmodel.layouts import FILE, LAYOUTS, column


@pytest.fixture(scope="module")
def pool():
    return BufferPool(device="cpu", elements=2**16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 3])
def test_operands_lie_as_the_layout_says(layout, groups, pool, monkeypatch):
    m, n, k = 24, 16, 40
    seen = []

    def multiply(kind):
        def call(a, b):
            seen.append((a, b))
            return kind(a, b)

        return call

    for name in ("mm", "bmm"):
        monkeypatch.setattr(torch, name, multiply(getattr(torch, name)))
    shape = Shape(m, n, k, groups)
    runner = layouts.runners(shape)[LAYOUTS.index(layout)]
    result = runner.bind(shape, pool)(0)
    ((a, b),) = seen
    assert a.shape[-2:] == (m, k) and b.shape[-2:] == (k, n) and result.shape == (*((groups,) if groups > 1 else ()), m, n)
    assert a.stride()[-2:] == ((k, 1) if layout[0] == "row" else (1, m))
    assert b.stride()[-2:] == ((n, 1) if layout[1] == "row" else (1, k))
    torch.testing.assert_close(result.double(), a.double() @ b.double(), rtol=0.02, atol=0.02)
    assert runner.error(shape, pool, result) < runner.limit < runner.error(shape, pool, result.flip(-1))


def test_the_first_layout_is_the_one_that_kernels_are_learned_in():
    assert [runner.name for runner in layouts.runners(Shape(24, 16, 40))][:2] == ["torch/bf16", "torch/bf16_row_row"]
    assert layouts.runners(Shape(24, 16, 40, 3))[0].name == "torch/bf16_batched"


def test_runs_are_added_and_a_product_that_failed_is_left_out(tmp_path):
    times = [3.0, 4.0, 5.0, 6.0]
    assert list(layouts._row(Shape(8, 8, 8), [*times[:3], None], careful=False)) == []
    for m, careful in ((8, False), (16, True)):
        rows = pd.DataFrame(layouts._row(Shape(m, 24, 32, 2), times, careful))
        layouts.add(rows, {"command": "made up", "rows": 1}, tmp_path)
    table = pd.read_parquet(tmp_path / FILE)
    assert table["m"].tolist() == [8, 16] and table["careful"].tolist() == [False, True]
    assert table.iloc[1][[column(layout) for layout in LAYOUTS]].tolist() == times
    assert len(json.loads((tmp_path / "layouts.json").read_text())["runs"]) == 2


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert layouts.main(["--out", str(tmp_path)]) == 3 and "GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())

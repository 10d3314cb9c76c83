"""Products in every layout of their operands, on the CPU: what is launched is the product, and its operands lie as said."""

import json

import pandas as pd
import pytest
import torch

from hil import layouts
from hil.kernels.base import Shape
from hil.timing import BufferPool
from perfmodel.kernels import ACROSS, BIASED, K_FASTEST
from perfmodel.layouts import FILE, LAYOUTS, column

ALL = (K_FASTEST, *ACROSS)
"""That products in groups may have."""


@pytest.fixture(scope="module")
def pool():
    return BufferPool(device="cpu", elements=2**16)


@pytest.mark.parametrize(("layout", "groups"), [(layout, 1) for layout in LAYOUTS] + [(layout, 3) for layout in ALL])
def test_operands_lie_as_the_layout_says(layout, groups, pool, monkeypatch):
    m, n, k = 24, 16, 40
    seen = []

    def multiply(kind):
        def call(*operands):
            seen.append(operands)
            return kind(*operands)

        return call

    for name in ("mm", "bmm", "addmm"):
        monkeypatch.setattr(torch, name, multiply(getattr(torch, name)))
    shape = Shape(m, n, k, groups)
    (runner,) = layouts.runners(shape, [layout])
    result = runner.bind(shape, pool)(0)
    ((*bias, a, b),) = seen
    assert [added.shape for added in bias] == [(n,)] * (layout == BIASED)
    assert a.shape[-2:] == (m, k) and b.shape[-2:] == (k, n) and result.shape == (*((groups,) if groups > 1 else ()), m, n)
    assert a.stride()[-2:] == ((k, 1) if layout[0] == "row" else (1, m))
    assert b.stride()[-2:] == ((n, 1) if layout[1] == "row" else (1, k))
    torch.testing.assert_close(result.double(), a.double() @ b.double(), rtol=0.02, atol=0.02)
    assert runner.error(shape, pool, result) < runner.limit < runner.error(shape, pool, result.flip(-1))


def test_the_first_layout_is_the_one_that_kernels_are_learned_in():
    names = [runner.name for runner in layouts.runners(Shape(24, 16, 40), LAYOUTS)]
    assert names[:2] == ["torch/bf16", "torch/bf16_row_row"] and names[-1] == "torch/bf16_bias"
    assert layouts.runners(Shape(24, 16, 40, 3), ALL)[0].name == "torch/bf16_batched"


def test_runs_are_added_and_a_product_that_failed_is_left_out(tmp_path):
    times = [3.0, 4.0, 5.0, 6.0]
    assert list(layouts._row(Shape(8, 8, 8), ALL, [*times[:3], None], careful=False)) == []
    for m, careful in ((8, False), (16, True)):
        rows = pd.DataFrame(layouts._row(Shape(m, 24, 32, 2), ALL, times, careful))
        layouts.add(rows, {"command": "made up", "rows": 1}, tmp_path)
    table = pd.read_parquet(tmp_path / FILE)
    assert table["m"].tolist() == [8, 16] and table["careful"].tolist() == [False, True]
    assert table.iloc[1][[column(layout) for layout in ALL]].tolist() == times and table[column(BIASED)].isna().all()
    layouts.add(pd.DataFrame(layouts._row(Shape(24, 24, 32), (K_FASTEST, BIASED), [3.0, 4.0], True)), {"rows": 1}, tmp_path)
    last = pd.read_parquet(tmp_path / FILE).iloc[-1]
    assert last[column(BIASED)] == 4.0 and last[[column(layout) for layout in ACROSS]].isna().all()
    assert len(json.loads((tmp_path / "layouts.json").read_text())["runs"]) == 3


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert layouts.main(["--out", str(tmp_path)]) == 3 and "GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())

import time
from types import SimpleNamespace

import pytest

from hil import collect as room
from hil.kernels.base import Shape
from hil.warm import chunks, compile_ahead, compiled

WORK = [(Shape(rows, 1, columns), ["b", "a"]) for rows, columns in ((64, 512), (32, 128), (8, 512))]


def test_alike_ones_lie_together_and_each_is_there_once():
    found = chunks(WORK, 2)
    alike = [(Shape(64, n, 32), ["torch/bf16"]) for n in (48, 16, 32)]
    assert [shape.n for chunk in chunks(alike) for _, shape in chunk] == [16, 32, 48]
    assert [len(chunk) for chunk in found] == [2, 2, 2]
    assert [(name, shape.k) for chunk in found for name, shape in chunk] == [
        ("a", 128), ("a", 512), ("a", 512), ("b", 128), ("b", 512), ("b", 512),
    ]  # fmt: skip


def test_a_kernel_that_fails_is_named_and_the_rest_are_compiled():
    ran = []

    def bind(shape, pool):
        if shape.m == 32:
            raise OSError("undefined symbol")
        return lambda index: ran.append((shape.m, index))

    runners = {"a": SimpleNamespace(bind=bind)}
    failed = compiled([("a", Shape(32, 1, 128)), ("a", Shape(64, 1, 128))], runners, None)
    assert len(failed) == 1 and "a on Shape(m=32" in failed[0] and "OSError" in failed[0]
    assert ran == [(64, 0)]


def _counts(tasks, done, elements, deadline):
    assert elements >= 2 * 64 * 512
    while tasks.get() is not None and time.time() < deadline:
        done.put(1)


def _dies(tasks, done, elements, deadline):
    raise SystemExit(3)


def test_real_processes_do_all_of_it_and_are_gone():
    work = [(Shape(number, 1, 128), ["a"]) for number in range(1, 30)] + WORK
    started = time.time()
    assert compile_ahead(work, 2, started + 60, serve=_counts) == len(chunks(work))
    assert compile_ahead(work, 2, started + 60, serve=_dies) == 0
    assert time.time() - started < 55


def _large_enough(tasks, done, elements, deadline):
    if elements == 2 * 40 * 2048 * 2048:
        done.put(1)


@pytest.mark.parametrize("shape", [Shape(2048, 8, 2048, 40), Shape(8, 2048, 2048, 40)])
def test_operands_of_every_side_and_group_fit_the_pool(shape):
    assert compile_ahead([(shape, ["a"])], 1, time.time() + 60, serve=_large_enough) == 1


@pytest.fixture
def ahead(monkeypatch):
    order = []
    monkeypatch.setattr(room, "compile_ahead", lambda work, number, deadline: order.append((number, deadline, work)))
    monkeypatch.setattr(room, "attempt", lambda shape, names, *_: order.append((shape, names)) or [])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("hil.fingerprint.fingerprint", lambda: {"gpu": "made up"})
    monkeypatch.setattr("hil.timing.BufferPool", lambda elements: None)
    return order


# Loading torch's compiler here warns of torch.jit.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_sweep_by_one_process_is_compiled_by_others_first(ahead, tmp_path, capsys):
    (tmp_path / "shapes.csv").write_text("m,n,k\n256,1,128\n")
    arguments = ["memory", "--out", str(tmp_path), "--shapes", str(tmp_path / "shapes.csv"), "--kernels", "torch/relu_*"]
    assert room.main([*arguments, "--ahead", "3", "--until", f"{time.time() + 100:.1f}"]) == 1
    (number, deadline, work), measured = ahead
    shape, names = Shape(256, 1, 128), ["torch/relu_forward", "torch/relu_backward"]
    assert number == 3 and work == [(shape, names)] and measured == (shape, names)
    assert 30 < deadline - time.time() < 50
    with pytest.raises(SystemExit):
        room.main([*arguments, "--ahead", "3", "--workers", "2"])
    assert "leave out --workers" in capsys.readouterr().err


def test_narrow_operands_are_what_other_sweeps_lack():
    draw, count = room.SWEEPS["memory", "narrow"]
    shapes = draw(count, 0)
    assert len(set(shapes)) == count and shapes == draw(count, 0)
    assert all(s.n == s.groups == 1 and s.m * s.k <= 2**28 for s in shapes)
    assert sum(s.k < 16 for s in shapes) > count / 8 and sum(s.m < 256 for s in shapes) > count / 8
    assert sum(s.k % 16 > 0 for s in shapes) > count / 3

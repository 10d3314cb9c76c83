"""What a call launches, by its captured graph, against what runs, by torch's profiler."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hil import choices, teaching
from hil.asking import KERNELS_ASKED, LAYOUTS_ASKED, Recorder, answers
from hil.kernels import RUNNERS
from hil.kernels.base import Shape
from hil.timing import BufferPool
from perfmodel import hardware
from perfmodel.choice import PARTS, asked
from perfmodel.kernels import KERNELS


@pytest.mark.parametrize("name", [*KERNELS_ASKED, *LAYOUTS_ASKED])
def test_captured_names_are_those_of_the_kernels_that_run(name):
    draw, pool, recorder = random.SystemRandom(), BufferPool(elements=2**27), Recorder()
    for _ in range(4):
        m, n, k = (max(16, KERNELS[name].multiple_n) * draw.randint(1, 30) for _ in range(3))
        shape = Shape(m, n, k) if KERNELS[name].kind == "gemm" else Shape(draw.randint(1, 100), 24, 64, draw.randint(2, 500))
        launch = RUNNERS[name].bind(shape, pool)
        with torch.cuda.stream(recorder.stream):
            launch(0)
            torch.cuda.synchronize()
            captured = recorder.names(lambda call=launch: call(0))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            launch(0)
            torch.cuda.synchronize()
        events = [e for e in profiler.profiler.kineto_results.events() if "CUDA" in str(e.device_type())]
        ran = [e.name() for e in sorted(events, key=lambda e: e.start_ns()) if "Sync" not in e.name()]
        # The profiler writes C++ names out, so that only cuBLAS' own are the same in both.
        assert len(captured) == len(ran), (shape, captured, ran)
        for told, real in zip(captured, ran, strict=True):
            assert told == real if "nvjet" in real else ("Memset" in real) == (told == "memset"), (shape, captured, ran)


def test_calls_captured_together_are_named_as_each_by_itself():
    draw, pool, recorder = random.SystemRandom(), BufferPool(elements=2**27), Recorder()
    for name in (*KERNELS_ASKED, *LAYOUTS_ASKED):
        products = 1 if KERNELS[name].kind == "gemm" else 7
        step = max(16, KERNELS[name].multiple_n)
        shapes = [Shape(*(step * draw.randint(1, 40) for _ in range(3)), products) for _ in range(20)]
        calls = [partial(RUNNERS[name].bind(shape, pool), 0) for shape in shapes]
        with torch.cuda.stream(recorder.stream):
            calls[0]()
            torch.cuda.synchronize()
            assert recorder.names_of_each(calls) == [recorder.names(call) for call in calls]


def test_a_call_that_fails_does_not_take_its_neighbours_along():
    def fails():
        raise RuntimeError

    pool, recorder = BufferPool(elements=2**22), Recorder()
    call = RUNNERS["torch/bf16"].bind(Shape(256, 256, 256), pool)
    with torch.cuda.stream(recorder.stream):
        call(0)
        torch.cuda.synchronize()
        alone = recorder.names(lambda: call(0))
        assert recorder.names_of_each([lambda: call(0), fails, lambda: call(0)]) == [alone, None, alone]
        with pytest.raises(RuntimeError, match="cannot be captured"):
            recorder.names(fails)


def test_compiled_steps_teach_what_others_teach(monkeypatch):
    rows, spec = answers(("torch/bf16",), 0, 7, np.empty(0, np.uint64), 60.0, 24_000), hardware.load("h200")
    matrix = asked("torch/bf16", *(rows[name].to_numpy(float) for name in ("m", "n", "k", "groups")), spec)
    compiled, told = [], []
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compiled.append(args) or compile_it(*args, **options))
    for least in (1, 10**9):
        monkeypatch.setattr(teaching, "LEAST_STEPS", least)
        choice, judged = choices.learn("torch/bf16", rows, spec, epochs=30, width=64, experts=2)
        told.append(choice.told(matrix)[0])
        assert judged["tile_right"] > 0.3
    assert len(compiled) == 1
    assert (told[0] == told[1]).all(axis=1).mean() > 0.8  # sums in another order, over some hundred steps
    assert (told[0] == rows[list(PARTS)].to_numpy()).all(axis=1).mean() > 0.5

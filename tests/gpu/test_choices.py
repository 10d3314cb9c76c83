"""What a call launches, by its captured graph, against what runs, by torch's profiler."""

import random
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hil.asking import KERNELS_ASKED, Recorder
from hil.kernels import RUNNERS
from hil.kernels.base import Shape
from hil.timing import BufferPool
from perfmodel.kernels import KERNELS


@pytest.mark.parametrize("name", KERNELS_ASKED)
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
    for name in KERNELS_ASKED:
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

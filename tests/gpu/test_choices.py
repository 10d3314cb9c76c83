"""What a call launches, by its captured graph, against what runs, by torch's profiler."""

import random

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

"""Which of its candidates torch.compile takes: the fastest by a clock of the GPU alone, chosen anew; or none yet."""

import time
from types import SimpleNamespace

import pytest
import torch

from hil import candidates
from hil.candidates import left_open, locked_autotune, queued_ms


@pytest.fixture
def inductor(monkeypatch):
    """torch.compile's autotuner, whose candidates are told by numbers: how many milliseconds each takes."""
    from torch._inductor.runtime import triton_heuristics

    def times(self, *args, **kwargs):
        benchmark = triton_heuristics.benchmarker.benchmark
        return {launcher: benchmark(fn=lambda one=launcher: one, device="cuda", rep=40) for launcher in self.launchers}

    monkeypatch.setattr(triton_heuristics.CachingAutotuner, "benchmark_all_configs", times)
    return triton_heuristics


class Lock:
    held = False

    def __enter__(self):
        self.held = True

    def __exit__(self, *_):
        self.held = False


TUNER = SimpleNamespace(launchers=[3.0, 1.0, 2.0])


def test_candidates_are_timed_by_the_gpu_alone_under_the_lock_and_chosen_anew(inductor, monkeypatch):
    lock, held = Lock(), []
    monkeypatch.setattr(candidates, "queued_ms", lambda call: held.append(lock.held) or call())
    tuner, cache = inductor.CachingAutotuner, inductor.AutotuneCache
    before = tuner.benchmark_all_configs, inductor.benchmarker, cache.create, torch._inductor.config.autotune_local_cache
    with locked_autotune(lock):
        assert tuner.benchmark_all_configs(TUNER) == {3.0: 3.0, 1.0: 1.0, 2.0: 2.0}
        assert held == [True] * 3 and not lock.held
        assert cache.create({}, "file", "hash") is None and not torch._inductor.config.autotune_local_cache
        # What runs elsewhere is timed as it was.
        assert inductor.benchmarker.benchmark(lambda: 1, device="cpu") > 0 and len(held) == 3
    after = tuner.benchmark_all_configs, inductor.benchmarker, cache.create, torch._inductor.config.autotune_local_cache
    assert before == after


def test_what_cannot_be_launched_takes_forever_and_other_errors_are_told(inductor, monkeypatch):
    def fails(message):
        def call():
            raise RuntimeError(message)

        return call

    monkeypatch.setattr(candidates, "queued_ms", lambda call: call())
    with locked_autotune():
        assert inductor.benchmarker.benchmark(fn=fails("CUDA error: invalid configuration argument"), device="cuda") == float(
            "inf"
        )
        with pytest.raises(RuntimeError, match="illegal"):
            inductor.benchmarker.benchmark_gpu(fails("an illegal memory access"))


def test_ahead_of_the_timing_the_first_is_run_and_nothing_is_chosen(inductor, monkeypatch):
    monkeypatch.setattr(candidates, "queued_ms", lambda call: pytest.fail("nothing is timed"))
    with left_open():
        timings = inductor.CachingAutotuner.benchmark_all_configs(TUNER)
        assert min(timings, key=timings.get) == 3.0 and list(timings) == TUNER.launchers
        assert inductor.AutotuneCache.create({}, "file", "hash") is None


@pytest.fixture
def gpu(monkeypatch):
    """A made-up GPU: what is asked of it waits while it sleeps, and a call takes 20 ms of its time."""
    state = SimpleNamespace(sleeps=[], free_at=0.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = max(state.free_at, time.perf_counter())

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    def sleep(cycles):
        state.sleeps.append(cycles)
        state.free_at = max(state.free_at, time.perf_counter()) + cycles / 2e9

    def work(seconds):
        state.free_at = max(state.free_at, time.perf_counter()) + seconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: time.sleep(max(0.0, state.free_at - time.perf_counter())))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=64))
    flushed = SimpleNamespace(zero_=lambda: work(1e-4))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: flushed)
    state.work = work
    return state


def test_a_call_that_the_cpu_needs_longer_for_than_the_gpu_takes_what_the_gpu_takes(gpu):
    def call():
        time.sleep(2e-3)  # the CPU's part: fifteen calls outlast the first wait
        gpu.work(5e-4)

    assert queued_ms(call) == pytest.approx(0.5, rel=0.02)
    assert len(gpu.sleeps) >= 2 and gpu.sleeps[-1] > gpu.sleeps[0]


def test_where_the_first_wait_suffices_there_is_no_second(gpu):
    assert queued_ms(lambda: gpu.work(1e-3)) == pytest.approx(1.0, rel=0.02)
    assert len(gpu.sleeps) == 1


def test_paddings_are_timed_by_torchs_own_clock_under_the_lock(inductor, monkeypatch):
    from torch._inductor.fx_passes import pad_mm

    lock, held = Lock(), []
    monkeypatch.setattr(pad_mm, "should_pad", lambda *asked: held.append(lock.held) or asked)
    own = pad_mm.should_pad
    with locked_autotune(lock):
        assert pad_mm.should_pad("match", "left", "right") == ("match", "left", "right")
        assert held == [True] and not lock.held
    assert pad_mm.should_pad is own

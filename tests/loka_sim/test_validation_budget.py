"""Which stage may take how long, which are cut, and what the step's process compiles in which order."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hil.host
from loka_sim.errors import DataError
from loka_sim.validation import measuring, step_time
from loka_sim.validation.budget import PARTS, Budget, Part
from loka_sim.validation.stepper import FIRST, GO, RESULT, TABLE, Variants


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def spent(minutes, overhead, clock=None):
    """Seconds per stage where each takes `overhead` seconds more than it was given."""
    clock = Clock()
    budget = Budget(60 * minutes, clock=clock)
    found = {}
    for name in PARTS:
        found[name] = budget.begin(name)
        clock.now += (found[name] or -overhead) + overhead
    return found, budget.left()


@pytest.mark.parametrize("minutes", [2, 4, 10])
def test_a_stage_that_takes_too_long_is_made_up_for(minutes):
    exact, left = spent(minutes, 0)
    assert None not in exact.values() and left == pytest.approx(10, abs=0.1)
    shares = [exact[name] / PARTS[name].share for name in PARTS]
    if minutes > 2:
        assert max(shares) == pytest.approx(min(shares))
    late, left = spent(minutes, 8)
    # Only the last one's overhead is left to overrun the deadline, and the reserve takes that.
    assert left == pytest.approx(2, abs=0.1) or None in late.values()
    assert all((late[name] or 0) <= exact[name] + 1e-9 for name in PARTS)


def test_the_lowest_in_rank_is_cut_first():
    found, left = spent(0.8, 0)
    assert found["times_second"] is None and found["times_first"] and found["step"]
    assert left >= 0
    parts = {"a": Part(0.5, 5, 2), "b": Part(0.25, 5, 1), "c": Part(0.25, 5, 3)}
    clock = Clock()
    budget = Budget(12, parts, 0, clock)
    assert budget.begin("a") == pytest.approx(12 * 0.5 / 0.75)
    clock.now += 8
    assert budget.begin("b") is None
    # What is left is less than the least, and still worth trying for the highest rank.
    assert budget.begin("c") == pytest.approx(4)
    clock.now += 5
    assert budget.left() == pytest.approx(-1)


def test_what_is_there_already_leaves_its_time_to_others():
    clock = Clock()
    budget = Budget(100, {"a": Part(0.5, 1, 1), "b": Part(0.5, 1, 1)}, 0, clock)
    budget.done("a")
    assert budget.begin("b") == pytest.approx(100)


def test_when_a_stage_ends_if_all_take_their_shares():
    clock = Clock()
    budget = Budget(110, {"a": Part(0.1, 1, 1), "b": Part(0.3, 1, 1), "c": Part(0.6, 1, 1)}, 10, clock)
    assert [budget.until(name) for name in "abc"] == pytest.approx([10, 40, 100])
    clock.now += budget.begin("a")
    assert budget.until("b") == pytest.approx(30)
    clock.now += 200
    assert budget.until("c") == 0


def test_how_fast_the_host_is_comes_from_a_process_that_has_ended(tmp_path, monkeypatch):
    """Without a GPU there is no figure, and one that an earlier run left is none."""
    (tmp_path / "host.json").write_text('{"host_step_us": 1.0}')
    found = measuring.host_step_us(tmp_path)
    assert found is None if not torch.cuda.is_available() else 1000 < found < 100_000

    def wrote(module, arguments, **kwargs):
        assert (module, arguments[0]) == ("hil.host", "--out")
        Path(arguments[1]).write_text('{"host_step_us": 4321.5}')

    monkeypatch.setattr(measuring, "run", wrote)
    assert measuring.host_step_us(tmp_path) == 4321.5


def test_a_child_that_is_past_its_time_is_ended(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time; time.sleep(60)")
    started = time.monotonic()
    with measuring.Child("timeit", ["-n", "1", "-r", "1", "import time; time.sleep(60)"]) as child:
        assert child.wait(seconds=0.5) is None
    assert time.monotonic() - started < 10 and not child.alive
    with pytest.raises(DataError, match="python -m timeit ended with code 2"):
        measuring.run("timeit", ["--no-such-option"])


@pytest.fixture
def steps(monkeypatch):
    """Compiling takes as long as it is told to, and every variant a time of its own."""
    order, takes = [], {"seconds": 0.01, "broken": (), "no_graph": (), "scale": 1.0}

    def step_of(model, convert):
        name = convert
        order.append(name)
        time.sleep(takes["seconds"])
        if name in takes["broken"]:
            raise RuntimeError("no kernel image\nand more")
        return name

    monkeypatch.setattr(step_time, "step_of", step_of)
    monkeypatch.setattr(step_time, "as_it_is", "bf16")
    monkeypatch.setattr(step_time, "converted_by_table", lambda table: table.get("name", "decision"))
    monkeypatch.setattr(step_time, "converted_by_torchao", lambda name: name)

    def graphed(step):
        if step in takes["no_graph"]:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return f"graph of {step}"

    def time_steps(steps, turns):
        return {name: [takes["scale"] * len(step)] * turns for name, step in steps.items()}

    monkeypatch.setattr(step_time, "graphed", graphed)
    monkeypatch.setattr(step_time, "time_steps", time_steps)
    monkeypatch.setattr(hil.host, "step_us", lambda: 4321.0)
    return order, takes


def run(folder, seconds=60.0, decide=None, go=0.5, first=None):
    (folder / FIRST).write_text(json.dumps({"table": first}))
    variants = Variants(None, folder, time.time() + seconds, nullcontext())
    thread = threading.Thread(target=variants.run)
    thread.start()
    if decide is not None:
        time.sleep(decide[0])
        (folder / TABLE).write_text(json.dumps({"table": decide[1], "as_before": decide[1] == first}))
    time.sleep(go)
    (folder / GO).write_text("{}")
    thread.join(20)
    assert not thread.is_alive()
    return json.loads((folder / RESULT).read_text())


def test_the_decision_comes_before_what_needs_none(steps, tmp_path):
    order, takes = steps
    takes["seconds"] = 0.3
    found = run(tmp_path, decide=(0.1, {"sites": {}}))
    assert order == ["bf16", "decision", "filter_tensorwise", "naive_tensorwise"]
    assert list(found["medians"]) == order and found["left_out"] == [] and found["host_step_us"] == 4321.0
    assert found["medians"]["decision"]["p50_ms"] == len("decision") and found["turns"] == 10


def test_steps_are_timed_where_the_hosts_own_finds_no_memory(steps, tmp_path, monkeypatch):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hil.host, "step_us", full)
    found = run(tmp_path, decide=(0.1, {"sites": {}}))
    assert "decision" in found["medians"] and found["host_step_us"] is None and found["left_out"] == []


def test_short_steps_are_timed_as_graphs_too(steps, tmp_path):
    _, takes = steps
    takes["no_graph"] = ("filter_tensorwise",)
    found = run(tmp_path, decide=(0.1, {"sites": {}}))
    names = ["bf16", "decision", "naive_tensorwise"]
    assert {name: times["p50_ms"] for name, times in found["graphs"].items()} == {name: len(f"graph of {name}") for name in names}
    # One that cannot be captured is named, and its time as launched is kept.
    assert found["left_out"] == ["filter_tensorwise as one CUDA graph: operation not permitted when stream is capturing"]
    assert set(found["medians"]) == {*names, "filter_tensorwise"}
    # A long step is the GPU's, whoever launches it.
    takes["scale"] = 20.0
    (tmp_path / "long").mkdir()
    found = run(tmp_path / "long", decide=(0.1, {"sites": {}}))
    assert set(found["medians"]) == {*names, "filter_tensorwise"} and found["graphs"] == {}


def test_it_waits_for_the_decision_before_all_else(steps, tmp_path):
    order, _ = steps
    run(tmp_path, decide=(0.5, {"sites": {}}))
    assert order == ["bf16", "decision", "filter_tensorwise", "naive_tensorwise"]
    order.clear()
    (tmp_path / "none").mkdir()
    found = run(tmp_path / "none")
    assert order == ["bf16"] and list(found["medians"]) == ["bf16"]


FIRST_TABLE = {"name": "first"}


def test_the_decision_is_compiled_before_anything_is_measured(steps, tmp_path):
    order, _ = steps
    found = run(tmp_path, decide=(0.5, {"sites": {}}), first=FIRST_TABLE)
    assert order == ["bf16", "first", "decision", "filter_tensorwise", "naive_tensorwise"]
    assert {name: times["p50_ms"] for name, times in found["medians"].items()} == {
        "bf16": 4.0, "decision_before": 5.0, "decision": 8.0, "filter_tensorwise": 17.0, "naive_tensorwise": 16.0
    }  # fmt: skip
    order.clear()
    (tmp_path / "cut").mkdir()
    # It is there whatever happens to the other one.
    assert set(run(tmp_path / "cut", first=FIRST_TABLE)["medians"]) == {"bf16", "decision_before"} and order == ["bf16", "first"]


def test_a_decision_that_stays_is_compiled_once(steps, tmp_path):
    order, _ = steps
    found = run(tmp_path, decide=(0.3, FIRST_TABLE), first=FIRST_TABLE)
    assert order == ["bf16", "first", "filter_tensorwise", "naive_tensorwise"]
    assert found["medians"]["decision"]["p50_ms"] == len("first") and "decision_before" not in found["medians"]


def test_without_a_decision_there_is_none_to_run(steps, tmp_path):
    found = run(tmp_path, decide=(0.5, None))
    assert list(found["medians"]) == ["bf16", "filter_tensorwise", "naive_tensorwise"]


def test_what_no_time_is_left_for_is_said(steps, tmp_path):
    order, takes = steps
    takes["seconds"] = 1.0
    found = run(tmp_path, seconds=7.9, decide=(0.1, {"sites": {}}), go=2.5)
    # The decision may begin a little late, the others not.
    assert order == ["bf16", "decision"]
    assert found["left_out"] == [f"{name}: no time was left to compile it" for name in ("filter_tensorwise", "naive_tensorwise")]


def test_a_variant_that_fails_is_named_and_the_others_run(steps, tmp_path):
    _, takes = steps
    takes["broken"] = ("filter_tensorwise",)
    found = run(tmp_path, decide=(0.1, {"sites": {}}))
    assert found["left_out"] == ["filter_tensorwise: RuntimeError: no kernel image"]
    assert set(found["medians"]) == {"bf16", "decision", "naive_tensorwise"}


def test_what_a_terminated_process_started_ends_with_it(tmp_path):
    script = f"""
import os, signal, time
from pathlib import Path
from loka_sim.validation import measuring
with measuring.ending_children():
    with measuring.Child("timeit", ["-n", "1", "-r", "1", "import time; time.sleep(60)"]) as child:
        Path({str(tmp_path / "pid")!r}).write_text(str(child._process.pid))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
"""
    found = subprocess.run([sys.executable, "-c", script], timeout=30)
    assert found.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_sweeps_ask_their_processes_one_after_another(tmp_path, monkeypatch):
    started, stopped = [], []

    class Server:
        """Answers every request at once."""

        alive = True

        def __init__(self, module, arguments):
            self.family, self.folder = arguments[0], Path(arguments[arguments.index("--requests") + 1])
            started.append((module, *arguments))

        def stop(self):
            stopped.append(self.family)

    asked = []

    def write(path, text):
        asked.append((path.name, json.loads(text)))
        path.with_suffix(".done").write_text("1")

    monkeypatch.setattr(measuring, "Child", Server)
    monkeypatch.setattr(measuring, "write_text_atomic", write)
    shape = SimpleNamespace(m=1, n=2, k=3, groups=4)
    gemm, memory = [(shape, ("torch/bf16",))], [(shape, ("torch/x",))]
    with measuring.Sweeps(tmp_path, ["torch/bf16"]) as sweeps:
        sweeps.measure("model", {"gemm": gemm, "memory": []}, 60)
        # What compiles and runs other kernels is not there yet.
        assert [words[:2] for words in started] == [("hil.collect", "gemm")]
        sweeps.measure("fresh", {"gemm": gemm, "memory": memory}, 60)
        sweeps.measure("fresh", {"memory": memory}, 60)
    assert [(name, request["sweep"], request["items"]) for name, request in asked] == [
        ("gemm-0.json", "model", [[1, 2, 3, 4, ["torch/bf16"]]]), ("gemm-1.json", "fresh", [[1, 2, 3, 4, ["torch/bf16"]]]),
        ("memory-0.json", "fresh", [[1, 2, 3, 4, ["torch/x"]]]), ("memory-1.json", "fresh", [[1, 2, 3, 4, ["torch/x"]]]),
    ]  # fmt: skip
    # GEMMs alone have all of the time, and half of it at most where others follow.
    assert [request["until"] - time.time() for _, request in asked] == pytest.approx([60, 30, 60, 60], abs=3)
    assert [words[:2] for words in started] == [("hil.collect", "gemm"), ("hil.collect", "memory")]
    assert all(words[-2:] == ("--kernels", "torch/bf16") for words in started) and stopped == ["gemm", "memory"]


def test_sweeps_that_are_asked_go_on_meanwhile(tmp_path, monkeypatch):
    class Server:
        alive = True

        def __init__(self, module, arguments):
            self.folder = Path(arguments[arguments.index("--requests") + 1])

        def stop(self):
            pass

    monkeypatch.setattr(measuring, "Child", Server)
    shape = SimpleNamespace(m=1, n=2, k=3, groups=1)
    with measuring.Sweeps(tmp_path, ["torch/bf16"]) as sweeps:
        begun = time.time()
        wait = sweeps.ask("model", {"gemm": [(shape, ("torch/bf16",))]}, 30)
        request = json.loads((tmp_path / "asked" / "gemm-0.json").read_text())
        assert request["until"] == pytest.approx(begun + 30, abs=2) and time.time() - begun < 2
        threading.Timer(0.4, lambda: (tmp_path / "asked" / "gemm-0.done").write_text("1")).start()
        wait()
        assert 0.3 < time.time() - begun < 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_a_measuring_process_that_fails_is_an_expected_error(tmp_path):
    shape = SimpleNamespace(m=64, n=64, k=64, groups=1)
    with measuring.Sweeps(tmp_path / "timings", ["torch/bf16", "torch/quantize_rowwise"]) as sweeps:
        with pytest.raises(DataError, match="python -m hil.collect ended with code 3"):
            sweeps.measure("model", {"gemm": [(shape, ("torch/bf16",))], "memory": []}, 60)
    assert not (tmp_path / "timings" / "asked").exists()

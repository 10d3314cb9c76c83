import gc
import importlib
import json
import math
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from hil import collect as room
from hil import measure as measuring
from hil.collect import COLUMNS, SWEEPS, Timings, legal_runners, main, matching, read_shapes
from hil.kernels import availability as kernels_room
from hil.kernels.base import Shape
from hil.shapes import (
    any_memory_shapes,
    any_shapes,
    broad_memory_shapes,
    gemm_shapes,
    grouped_shapes,
    large_memory_shapes,
    large_shapes,
    memory_shapes,
    odd_shapes,
    short_shapes,
    tower_shapes,
)
from hil.timing import Timing, eager_call_us
from perfmodel.kernels import KERNELS

GEMMS = {"torch/bf16", "torch/fp8_block128"} | {
    f"torch/fp8_{scaling}_{how}" for scaling in ("tensorwise", "rowwise") for how in ("fast", "split")
}
OLD_COLUMNS = [c for c in COLUMNS if c not in ("least_us", "most_us", "outliers", "eager_us", "temperature_c")]


def names(shape, kinds, patterns=("torch/*",)):
    return {runner.name for runner in legal_runners(shape, kinds, patterns)}


def test_legal_runners():
    kinds = ("gemm", "batched_gemm")
    assert names(Shape(256, 128, 128), kinds) == GEMMS
    assert names(Shape(256, 100, 128), kinds) == {"torch/bf16"}
    assert names(Shape(255, 128, 128), kinds) == GEMMS - {"torch/fp8_block128"}
    assert names(Shape(27, 27, 128, 2048), kinds) == {"torch/bf16_batched"}
    assert names(Shape(256, 128, 128), kinds, ("torch/fp8_*_fast", "torch/bf16")) == {
        "torch/bf16",
        "torch/fp8_tensorwise_fast",
        "torch/fp8_rowwise_fast",
    }
    memory = names(Shape(256, 1, 384), ("quantize", "layout", "pointwise"))
    assert "torch/quantize_rowwise" in memory and "torch/blocknorm_forward" not in memory
    assert "torch/blocknorm_forward" in names(Shape(256, 1, 128), ("pointwise",))


def test_absent_kernels_are_left_out(monkeypatch):
    monkeypatch.setattr(room, "available_kernels", lambda names: tuple(n for n in names if n != "torch/fp8_block128"))
    assert names(Shape(256, 128, 128), ("gemm",)) == GEMMS - {"torch/fp8_block128"}
    assert "torch/fp8_block128" in matching(("gemm",))


def test_shapes_from_a_file(tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text("m,n,k,groups\n1,2,3,4\n5,6,7,1\n")
    assert read_shapes(path) == [(Shape(1, 2, 3, 4), ("*",)), (Shape(5, 6, 7), ("*",))]
    path.write_text("m,n,k\n1,2,3\n")
    assert read_shapes(path) == [(Shape(1, 2, 3), ("*",))]
    path.write_text("m,n,k,kernels\n1,2,3,torch/bf16 loka/*\n")
    assert read_shapes(path) == [(Shape(1, 2, 3), ("torch/bf16", "loka/*"))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m,n\n1,2\n", "lacks the columns ['k']"),
        ("m,n,k\n1,2.5,3\n", "has n = 2.5; sizes are whole numbers, 1 or more"),
        ("m,n,k,groups\n1,2,3,1\n4,5,6,0\n", "has groups = 0; sizes are whole numbers, 1 or more"),
        ("m,n,k\n1,2,\n", "has k = nan"),
        ("", "is no CSV of shapes"),
        ("m,n,k\n1,2,3\n4,5,6,7,8\n", "is no CSV of shapes"),
        (None, "is no CSV of shapes"),
    ],
)
def test_shapes_that_are_none_are_refused_in_one_line(tmp_path, capsys, text, message):
    path = tmp_path / "shapes.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["gemm", "--out", str(tmp_path), "--shapes", str(path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith("python -m hil.collect: --shapes: ") and message in line


@pytest.mark.parametrize(
    "name", ["choices", "collect", "collectives", "exactness", "fused", "fused_table", "host", "launches", "optimizers"]
)
def test_a_wrong_command_line_is_answered_in_one_line(monkeypatch, capsys, name):
    module = importlib.import_module(f"hil.{name}")
    monkeypatch.setattr("sys.argv", [name, "--no-such-option"])
    with pytest.raises(SystemExit) as stop:
        module.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert line.startswith(f"python -m hil.{name}: ") and line.endswith(f"; see `python -m hil.{name} --help`")


def test_layers_to_draw_are_legal_in_fp8():
    draw, count = SWEEPS["linear", "lrm"]
    shapes = draw(count, 0)
    assert len(shapes) == len(set(shapes)) == count and shapes == draw(count, 0)
    assert all(extent % 16 == 0 for s in shapes for extent in (s.m, s.n, s.k))
    assert len({s.m for s in shapes}) > 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    assert main(["gemm", "--out", str(tmp_path / "out")]) == 3
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_pattern_that_fits_nothing_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["memory", "--out", str(tmp_path), "--kernels", "torch/fp8_*"])
    assert stopped.value.code == 2
    assert "--kernels torch/fp8_* fits none of: " in capsys.readouterr().err


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose GPU is made up: the sweep's own machinery runs, and every kernel takes as long as its name is."""
    asked = []

    def measure(shape, runners, pool, lock=None, deadline=math.inf):
        for runner in runners:
            if runner.name in broken:
                raise OSError("undefined symbol\nand more")
        asked.extend((runner.name, shape) for runner in runners)
        times = dict.fromkeys(set(COLUMNS) - {"kernel", "m", "n", "k", "groups", "sweep"}, 1.0)
        size = {"m": shape.m, "n": shape.n, "k": shape.k, "groups": shape.groups}
        return [{"kernel": r.name, **size, **times, "p50_us": float(len(r.name))} for r in runners]

    broken = set()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("hil.fingerprint.fingerprint", lambda: {"gpu": "made up"})
    monkeypatch.setattr("hil.timing.BufferPool", lambda elements: None)
    monkeypatch.setattr(measuring, "measure_shape", measure)
    return SimpleNamespace(asked=asked, broken=broken)


def run(folder, *more):
    return main(["gemm", "--out", str(folder), "--shapes", str(folder / "shapes.csv"), *more])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shapes.csv").write_text("m,n,k\n256,128,128\n256,100,128\n")
    return tmp_path


def test_new_kernels_are_added_over_the_shapes_of_the_old(gpu, folder):
    assert run(folder, "--kernels", "torch/bf16") == 0
    assert gpu.asked == [("torch/bf16", Shape(256, 128, 128)), ("torch/bf16", Shape(256, 100, 128))]
    gpu.asked.clear()
    assert run(folder, "--kernels", "torch/bf16", "torch/fp8_rowwise_*") == 0
    assert gpu.asked == [
        ("torch/fp8_rowwise_fast", Shape(256, 128, 128)),
        ("torch/fp8_rowwise_split", Shape(256, 128, 128)),
    ]
    # All of it is there now, but another sweep's rows are its own.
    assert run(folder, "--kernels", "torch/bf16", "torch/fp8_rowwise_*") == 1
    assert run(folder, "--kernels", "torch/bf16", "--sweep", "again") == 0
    frame = pd.read_parquet(folder / "gemm.parquet")
    assert list(frame.columns) == list(COLUMNS)
    assert frame["sweep"].tolist() == ["lrm"] * 4 + ["again"] * 2
    runs = json.loads((folder / "gemm.json").read_text())["runs"]
    assert [r["rows"] for r in runs] == [2, 2, 2]
    assert "--kernels torch/bf16 'torch/fp8_rowwise_*'" in runs[1]["command"] and str(folder) not in runs[1]["command"]


def test_a_shape_that_a_list_has_twice_is_measured_once(gpu, folder):
    (folder / "shapes.csv").write_text("m,n,k,kernels\n256,128,128,torch/bf16\n256,128,128,torch/*\n")
    assert run(folder, "--kernels", "torch/bf16", "torch/fp8_rowwise_fast") == 0
    assert gpu.asked == [("torch/bf16", Shape(256, 128, 128)), ("torch/fp8_rowwise_fast", Shape(256, 128, 128))]


def test_a_kernel_that_fails_is_named_and_costs_no_other(gpu, folder, capsys):
    gpu.broken.add("torch/fp8_rowwise_fast")
    assert run(folder, "--kernels", "torch/bf16", "torch/fp8_rowwise_*") == 0
    assert set(pd.read_parquet(folder / "gemm.parquet")["kernel"]) == {"torch/bf16", "torch/fp8_rowwise_split"}
    lines = capsys.readouterr().err.splitlines()
    left_out = [line for line in lines if line.startswith("left out")]
    assert left_out == ["left out: torch/fp8_rowwise_fast on Shape(m=256, n=128, k=128, groups=1): OSError: undefined symbol"]
    # It is tried again, and the others are not.
    gpu.asked.clear(), gpu.broken.clear()
    assert run(folder, "--kernels", "torch/bf16", "torch/fp8_rowwise_*") == 0
    assert gpu.asked == [("torch/fp8_rowwise_fast", Shape(256, 128, 128))]


def test_absent_libraries_are_told_of_once(gpu, folder, capsys, monkeypatch):
    def version(name):
        raise kernels_room.metadata.PackageNotFoundError(name)

    kernels_room._check.cache_clear()
    monkeypatch.setattr(kernels_room.metadata, "version", version)
    try:
        assert main(["linear", "--out", str(folder), "--shapes", str(folder / "shapes.csv"), "--kernels", "torchao/*"]) == 3
    finally:
        kernels_room._check.cache_clear()
    err = capsys.readouterr().err
    assert err.count("torchao is not installed; pip install 'torchao>=0.17'") == 1 and "Traceback" not in err
    assert not (folder / "linear.parquet").exists()


def test_the_sidecar_says_which_versions_of_libraries_ran(gpu, folder, monkeypatch):
    monkeypatch.setattr(room, "availability", lambda spec: kernels_room.Availability(True, "1.6.0", ""))
    assert run(folder, "--kernels", "torch/*") == 0
    (sweep,) = json.loads((folder / "gemm.json").read_text())["runs"]
    assert sweep["libraries"] == {"torch": "1.6.0"}


def test_files_of_before_the_new_columns_are_extended(gpu, folder):
    old = {c: [1.0] for c in OLD_COLUMNS} | {"kernel": ["torch/bf16"], "sweep": ["lrm"]}
    old |= {"m": [256], "n": [128], "k": [128], "groups": [1]}
    pd.DataFrame(old, columns=OLD_COLUMNS).to_parquet(folder / "gemm.parquet")
    (folder / "gemm.json").write_text(json.dumps({"schema_version": 1, "runs": [{"command": "old", "rows": 1}]}))
    assert run(folder, "--kernels", "torch/bf16") == 0
    assert gpu.asked == [("torch/bf16", Shape(256, 100, 128))]
    frame = pd.read_parquet(folder / "gemm.parquet")
    assert np.isnan(frame["eager_us"][0]) and frame["eager_us"][1] == 1.0
    assert frame["p50_us"].tolist() == [1.0, 10.0]


RUN = {"sweep": "lrm", "command": "a command"}


def row(kernel="torch/bf16"):
    return {"kernel": kernel, "m": 1, "n": 2, "k": 3, "groups": 1, "p50_us": 4.0}


def test_rows_are_saved_while_the_sweep_goes_on(tmp_path, monkeypatch):
    timings = Timings(tmp_path, "gemm")
    timings.add([row()], RUN)
    assert not timings.path.exists()
    monkeypatch.setattr(room, "SAVE_SECONDS", -1.0)
    timings.add([row("torch/fp8_rowwise_fast")], RUN)
    # Killed here, the next one goes on from there.
    again = Timings(tmp_path, "gemm")
    assert again.measured("lrm") == {("torch/bf16", 1, 2, 3, 1), ("torch/fp8_rowwise_fast", 1, 2, 3, 1)}
    assert not list(tmp_path.glob(".*"))


def test_a_kill_between_both_files_leaves_a_pair_that_can_be_read(tmp_path, monkeypatch):
    first = Timings(tmp_path, "gemm")
    first.add([row()], RUN)
    first.save(RUN)
    second = Timings(tmp_path, "gemm")
    second.add([row("torch/fp8_rowwise_fast")], RUN)

    def killed(self, *args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_parquet", killed)
        with pytest.raises(KeyboardInterrupt):
            second.save(RUN)
    assert [r["rows"] for r in json.loads(second.sidecar.read_text())["runs"]] == [1, 1]
    third = Timings(tmp_path, "gemm")
    assert len(third.rows) == 1
    third.add([row("torch/fp8_rowwise_split")], RUN)
    third.save(RUN)
    assert [r["rows"] for r in json.loads(third.sidecar.read_text())["runs"]] == [1, 1]
    assert len(pd.read_parquet(third.path)) == 2
    assert not list(tmp_path.glob(".*"))


def test_a_kill_before_the_first_rows_leaves_nothing_to_trip_over(tmp_path, monkeypatch):
    first = Timings(tmp_path, "gemm")
    first.add([row()], RUN)
    monkeypatch.setattr(pd.DataFrame, "to_parquet", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        first.save(RUN)
    assert first.sidecar.exists() and not first.path.exists()
    again = Timings(tmp_path, "gemm")
    assert again.rows == [] and again._runs == []


def test_outliers_are_counted_and_kept():
    steady = (10.0, 10.1, 9.9, 10.05, 9.95, 10.0, 10.1, 9.9, 10.0, 10.02, 9.98, 10.0)
    assert Timing(steady, 4).outliers == 0
    timing = Timing((*steady, 30.0), 4)
    assert timing.outliers == 1 and max(timing.samples_us) == 30.0


def test_an_eager_call_is_timed_by_the_wall(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    import time

    calls = []

    def launch(index):
        calls.append(index)
        time.sleep(0.002)

    assert 2000 <= eager_call_us(launch, kernel_us=2000.0, turns=3) < 10000
    assert calls == [0, 1, 2, 3] * 4


def test_a_deadline_and_a_lock_shared_with_others(gpu, folder):
    (folder / "shapes.csv").write_text(
        "m,n,k,groups,kernels\n256,128,128,1,torch/bf16 torch/fp8_rowwise_*\n256,100,128,1,loka/*\n"
    )
    lock = ("--lock", str(folder / "gpu.lock"))
    assert run(folder, *lock, "--until", f"{time.time() - 1:.1f}") == 1 and gpu.asked == []
    assert run(folder, *lock, "--until", f"{time.time() + 60:.1f}") == 0
    asked = {name for name, shape in gpu.asked if shape == Shape(256, 128, 128)}
    assert asked == {"torch/bf16", "torch/fp8_rowwise_fast", "torch/fp8_rowwise_split"}


def test_kernels_not_compiled_by_the_deadline_are_left_out(monkeypatch):
    from contextlib import nullcontext

    from hil import timing

    bound, clock = [], SimpleNamespace(now=0.0)

    def runner(name):
        def bind(shape, pool):
            bound.append(name)
            clock.now += 10
            return lambda index: None

        return SimpleNamespace(name=name, bind=bind, error=lambda *_: 0.0, limit=0.1, moved_bytes=lambda shape: 1)

    monkeypatch.setattr(measuring.time, "time", lambda: clock.now)
    monkeypatch.setattr(timing, "capture", lambda launch, launches: (None, []))
    monkeypatch.setattr(timing, "time_interleaved", lambda graphs: [Timing((1.0, 2.0), 1)] * len(graphs))
    monkeypatch.setattr(timing, "eager_call_us", lambda *_: 1.0)
    for name in ("clock_rate", "power_draw", "temperature"):
        monkeypatch.setattr(torch.cuda, name, lambda: 1)
    rows = measuring.measure_shape(Shape(1, 1, 1), [runner(name) for name in "abcd"], None, nullcontext(), deadline=15.0)
    assert bound == ["a", "b"] and [row["kernel"] for row in rows] == ["a", "b"]


@pytest.fixture
def rests(monkeypatch):
    found = []
    monkeypatch.setattr(measuring.time, "sleep", found.append)
    return found


def takes(clocks):
    """A measurement that is its number, each at the next of these clocks."""
    left = iter(enumerate(clocks))
    return lambda: next(left)


SMALL, LARGE = Shape(64, 64, 64), Shape(8192, 8192, 4096)


def test_a_shape_is_timed_again_when_the_clock_is_back(rests):
    clock = measuring.FullClock()
    assert clock.settle(SMALL, takes([1980.0])) == (0, 1980.0) and not rests
    assert clock.settle(SMALL, takes([1935.0])) == (0, 1935.0) and not rests
    assert clock.settle(SMALL, takes([1425.0, 1965.0])) == (1, 1965.0) and rests == [measuring.REST_S]
    assert clock.settle(SMALL, takes([1425.0, 1500.0, 1965.0])) == (2, 1965.0) and len(rests) == 3


def test_a_large_gemm_keeps_the_clock_that_it_makes(rests):
    clock = measuring.FullClock()
    clock.settle(SMALL, takes([1980.0]))
    assert clock.settle(LARGE, takes([1425.0])) == (0, 1425.0) and not rests


def test_a_clock_that_stays_low_is_waited_for_once(rests):
    """As where a machine's owner limits it in the middle of a sweep; when it rises again, that is the full one."""
    clock = measuring.FullClock()
    clock.settle(SMALL, takes([1980.0]))
    assert clock.settle(SMALL, takes([1500.0, 1500.0, 1500.0])) == (2, 1500.0) and len(rests) == 2
    assert clock.settle(SMALL, takes([1500.0])) == (0, 1500.0) and len(rests) == 2
    clock.settle(SMALL, takes([1980.0]))
    assert clock.settle(SMALL, takes([1500.0, 1980.0])) == (1, 1980.0) and len(rests) == 3


def test_what_is_asked_for_in_a_folder_is_measured_until_who_asked_is_gone(gpu, folder, monkeypatch):
    asked = folder / "asked"
    asked.mkdir()
    shape = [256, 128, 128, 1]
    for number, (sweep, kernels) in enumerate([("model", ["torch/bf16"]), ("fresh", ["torch/fp8_rowwise_*"])]):
        request = {"sweep": sweep, "until": time.time() + 60, "items": [[*shape, kernels]]}
        (asked / f"gemm-{number}.json").write_text(json.dumps(request))
    parents = iter([1] * 4 + [2])
    monkeypatch.setattr(room.os, "getppid", lambda: next(parents))
    assert main(["gemm", "--out", str(folder), "--requests", str(asked), "--kernels", "torch/*"]) == 0
    assert [(asked / f"gemm-{number}.done").read_text() for number in (0, 1)] == ["1", "2"]
    rows = pd.read_parquet(folder / "gemm.parquet")
    assert sorted(zip(rows["sweep"], rows["kernel"], strict=True)) == [
        ("fresh", "torch/fp8_rowwise_fast"), ("fresh", "torch/fp8_rowwise_split"), ("model", "torch/bf16"),
    ]  # fmt: skip
    assert [run["sweep"] for run in json.loads((folder / "gemm.json").read_text())["runs"]] == ["model", "fresh"]


def test_several_sweeps_go_through_the_same_workers(monkeypatch, capsys):
    """Workers of threads: tasks in order, a late one is not begun, one that is lost is not waited for."""
    import queue
    import threading

    class Process(threading.Thread):
        def __init__(self, target, args, daemon):
            super().__init__(target=target, args=args, daemon=daemon)

        def terminate(self):
            pass

    done, dies = [], set()

    def serve(index, lock, tasks, results):
        while (task := tasks.get()) is not None:
            key, shape, names, deadline = task
            if shape in dies:
                return
            done.append((shape, names))
            results.put((key, [{"kernel": name} for name in names] if time.time() <= deadline else []))

    class Queue(queue.Queue):
        def cancel_join_thread(self):
            pass

    context = SimpleNamespace(Queue=Queue, Lock=threading.Lock, Process=Process)
    monkeypatch.setattr(measuring.multiprocessing, "get_context", lambda kind: context)
    rows = []
    work = [(Shape(number, 1, 1), ["a", "b"]) for number in range(1, 6)]
    with measuring.Workers(2, serve=serve) as workers:
        workers.run(work, time.time() + 60, rows.extend)
        assert len(rows) == 10 and [shape.m for shape, _ in done] == [1, 2, 3, 4, 5]
        assert "out of time" not in capsys.readouterr().err
        workers.run(work, time.time() - 1, rows.extend)
        assert len(rows) == 10
        assert capsys.readouterr().err == "out of time after 0 of 5 parts of shapes; run again to go on\n"
        dies.add(Shape(2, 1, 1))
        workers.run(work, time.time() + 60, rows.extend)
        assert len(rows) == 18


def test_grouped_shapes_are_legal_for_the_grouped_kernels():
    shapes = grouped_shapes(300, 5)
    assert len(set(shapes)) == 300
    for name in ("torch/fp8_grouped_rowwise_fast", "torch/bf16_batched"):
        assert not any(KERNELS[name].illegal(s.m, s.n, s.k) for s in shapes)
    assert {s.groups for s in shapes} >= {2, 26, 512}
    assert all(s.groups * max(s.m * s.k, s.n * s.k, s.m * s.n) <= 2**29 for s in shapes)


def test_large_shapes_begin_where_the_others_end():
    shapes = large_shapes(300, 5)
    assert len(set(shapes)) == 300 and large_shapes(300, 5) == shapes != large_shapes(300, 6)

    def large(shape):
        return 2 * shape.m * shape.n * shape.k * shape.groups > 2.2e12 or shape.largest_operand > 2**29

    assert all(map(large, shapes)) and not any(map(large, gemm_shapes(300, 5)))
    assert max(shape.largest_operand for shape in shapes) <= 2**31
    # As M, as K, and many products.
    assert any(s.m > 2**20 for s in shapes) and any(s.k > 2**20 for s in shapes) and any(s.groups > 2**13 for s in shapes)


def test_short_shapes_have_large_results():
    shapes = short_shapes(2000, 5)
    assert len(set(shapes)) == 2000 and short_shapes(2000, 5) == shapes != short_shapes(2000, 6)
    assert all(s.groups == 1 and s.k <= 512 and 2**20 <= s.m * s.n <= 2**29 for s in shapes)
    # Many an N that FP8 takes and 64 does not divide, where cuBLAS changes its kernel often: more than layers have.
    between, usual = (
        sum(s.k <= 512 and s.m * s.n >= 2**20 and s.n % 16 == 0 and s.n % 64 != 0 for s in some)
        for some in (shapes, gemm_shapes(2000, 5))
    )
    assert between > 300 and between > 1.5 * usual
    # Wide results, tall ones, and such as neither is.
    for some in ((s.m > 8 * s.n for s in shapes), (s.n > 8 * s.m for s in shapes), (s.m < 8 * s.n < 64 * s.m for s in shapes)):
        assert sum(some) > 0.1 * len(shapes)


def test_large_operands_begin_where_the_others_end():
    shapes = large_memory_shapes(200, 5)
    assert len(set(shapes)) == 200 and large_memory_shapes(200, 5) == shapes != large_memory_shapes(200, 6)
    sizes = np.array([(shape.m, shape.k) for shape in shapes])
    values = sizes.prod(axis=1)
    assert ((sizes[:, 0] > 524288) | (values > 2**28)).all() and values.max() <= 2**30 and sizes[:, 0].max() <= 2**23
    # Tall ones, and wide ones.
    assert 100 < (sizes[:, 0] > 524288).sum() < 180 and (values > 2**28).sum() > 50
    assert (sizes[:, 1] > 8192).any() and all(shape.n == shape.groups == 1 for shape in shapes)


def test_any_shapes_are_as_people_write_them():
    shapes = any_shapes(1000, 5)
    assert len(set(shapes)) == 1000 and any_shapes(1000, 5) == shapes != any_shapes(1000, 6)
    single = [s for s in shapes if s.groups == 1]
    assert 0.6 < len(single) / len(shapes) < 0.8
    # Half of them FP8 takes, and more by chance; and many are round numbers, as hardly any of another draw.
    assert 0.5 < sum(s.n % 16 == 0 and s.k % 16 == 0 for s in shapes) / len(shapes) < 0.7
    round_share = [
        np.mean([s.m == float(f"{s.m:.1e}") for s in some if s.m >= 1000 and s.groups == 1])
        for some in (shapes, odd_shapes(1000, 5), gemm_shapes(1000, 5))
    ]
    assert round_share[0] > 0.2 and max(round_share[1:]) < 0.1
    assert all(s.largest_operand <= 2**28 and 2 * s.m * s.n * s.k * s.groups <= 2.2e12 for s in shapes)


def test_any_operands_are_as_people_write_them():
    shapes = any_memory_shapes(400, 5)
    assert len(set(shapes)) == 400 and any_memory_shapes(400, 5) == shapes != any_memory_shapes(400, 6)
    assert all(s.n == s.groups == 1 and s.m * s.k <= 2**28 for s in shapes)
    # Round decimals, as operands of layers seldom are, and columns that 16 does not divide.
    written, usual = (
        np.mean([s.m == float(f"{s.m:.1e}") for s in some if s.m >= 1000]) for some in (shapes, memory_shapes(400, 5))
    )
    assert written > 0.2 > 0.1 > usual
    assert 0.3 < np.mean([s.k % 16 > 0 for s in shapes]) < 0.7
    # What teaches such has other sizes: hardly any is written so.
    teaching = broad_memory_shapes(400, 5)
    assert len(set(teaching)) == 400 and broad_memory_shapes(400, 5) == teaching != broad_memory_shapes(400, 6)
    assert np.mean([s.m == float(f"{s.m:.1e}") for s in teaching if s.m >= 1000]) < 0.1 and len(set(teaching) & set(shapes)) < 8
    assert all(s.n == s.groups == 1 and s.m * s.k <= 2**28 for s in teaching)
    # Rows and columns of every divisor up to 128.
    for size in ([s.m for s in teaching], [s.k for s in teaching]):
        for power in range(7):
            assert 0.07 < np.mean([x % 2**power == 0 and x % 2 ** (power + 1) > 0 for x in size]) < 0.25


def test_towers_have_few_groups_of_any_sizes():
    """What no other sweep has: long sums, many rows and sizes that 8 does not divide, in few groups."""
    shapes = tower_shapes(2000, 5)
    assert len(set(shapes)) == 2000 and tower_shapes(2000, 5) == shapes != tower_shapes(2000, 6)
    assert min(s.groups for s in shapes) == 2 and 500 < max(s.groups for s in shapes) <= 512
    assert all(s.groups * max(s.m * s.k, s.n * s.k, s.m * s.n) <= 2**29 for s in shapes)
    for size in ("m", "n", "k"):
        of = [getattr(s, size) for s in shapes]
        for divisor in (1, 2, 4, 8):
            assert sum(x % divisor == 0 and x % (2 * divisor) != 0 for x in of) > 0.04 * len(of)
        assert min(of) <= 4
    odd = [s for s in shapes if s.n % 8 or s.k % 8]
    assert len(odd) > 0.7 * len(shapes)
    for size in ("m", "k"):
        assert sum(getattr(s, size) > 4096 for s in odd) > 0.1 * len(odd)


def _measures(index, lock, tasks, results):
    while (task := tasks.get()) is not None:
        key, shape, names, _ = task
        with lock:
            results.put((key, [{"kernel": name, "m": shape.m} for name in names]))


def _dies(index, lock, tasks, results):
    raise SystemExit(3)


def test_workers_of_processes_share_a_lock_of_their_own():
    rows, work = [], [(Shape(number, 1, 1), ["a"]) for number in range(1, 9)]
    with measuring.Workers(2, serve=_measures) as workers:
        gc.collect()
        workers.run(work, time.time() + 60, rows.extend)
    assert sorted(row["m"] for row in rows) == list(range(1, 9))


def test_a_sweep_whose_processes_all_died_says_so():
    work = [(Shape(number, 1, 1), ["a"]) for number in range(1, 5)]
    with measuring.Workers(2, serve=_dies) as workers, pytest.raises(RuntimeError, match="every measuring process died"):
        workers.run(work, time.time() + 60, lambda rows: None)

"""What can be tried of `hil.overlap` without GPUs."""

import json
from collections import Counter

import pandas as pd
import pytest
import torch

from hil import overlap
from hil.launches import takes
from perfmodel.kernels import KERNELS


def test_what_ended_inside_counts():
    assert overlap.inside([1.0, 2.5, 4.0, 7.0, 9.0], 1.0, 7.5) == [1.5, 1.5, 3.0]
    assert overlap.inside([1.0, 2.5], 1.1, 7.5) == overlap.inside([1.0], 0.0, 9.0) == overlap.inside([], 0.0, 1.0) == []


def test_a_draw_has_all_kinds_and_every_collective():
    works = overlap.drawn(120, seed=5)
    kernels = Counter(work.kernel for work in works)
    assert set(kernels) == {*overlap.GEMMS, *overlap.MEMORY, "torch/bf16_batched"}
    beside = Counter(op for work in works for op, _ in work.beside)
    assert beside["all_reduce"] == 120 and set(beside) == set(overlap.OPS) and min(beside.values()) == 40
    assert {size for work in works for _, size in work.beside} == set(overlap.SIZES)
    for work in works:
        if "gemm" in KERNELS[work.kernel].kind:
            assert takes(work.kernel, work.shape)
    assert works == overlap.drawn(120, seed=5) != overlap.drawn(120, seed=6)
    # One kernel stands beside messages of either size, and beside any collective.
    for kernel in overlap.GEMMS:
        assert {size for work in works if work.kernel == kernel for _, size in work.beside} == set(overlap.SIZES)


def test_what_a_table_holds_is_not_measured_again(tmp_path):
    works = overlap.drawn(20, seed=5)
    assert overlap.without(works, table_of(tmp_path, []), 2) == works
    pairs = [(work, pair) for work in works for pair in work.beside]
    kept = [works[0].beside[1], works[7].beside[0]]
    table = table_of(tmp_path, [pair for pair in pairs if pair not in ((works[0], kept[0]), (works[7], kept[1]))])
    left = overlap.without(works, table, 2)
    assert [(work.kernel, work.shape, work.beside) for work in left] == [
        (works[0].kernel, works[0].shape, (kept[0],)), (works[7].kernel, works[7].shape, (kept[1],)),
    ]  # fmt: skip
    # Between other GPUs they are other pairs.
    assert overlap.without(works, table, 4) == works
    with pytest.raises(ValueError, match="measured on NVIDIA H100, this is NVIDIA H200; give another --out"):
        overlap.known(tmp_path, "NVIDIA H200")
    assert len(overlap.known(tmp_path / "none", "NVIDIA H200")[0]) == 0


def table_of(folder, pairs):
    rows = [
        {"kernel": work.kernel, "m": work.shape.m, "n": work.shape.n, "k": work.shape.k, "groups": work.shape.groups,
         "ranks": 2, "op": op, "bytes_per_rank": size} for work, (op, size) in pairs
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(folder / "overlap.parquet")
    (folder / "overlap.json").write_text(json.dumps({"runs": [{"gpu": "NVIDIA H100"}]}))
    return overlap.known(folder, "NVIDIA H100")[0]


def test_without_gpus_it_says_what_to_do(capsys):
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    assert overlap.main(["--out", "unused"]) == 3
    assert "torchrun --nproc-per-node" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        overlap.main(["--out", "unused", "--count", "0"])
    assert stopped.value.code == 2


def test_large_gemms_are_bound_by_the_tensor_cores_and_stand_beside_ddps_buckets():
    works = overlap.drawn_large(60, seed=5)
    assert Counter(work.kernel for work in works)["torch/bf16"] == 30
    for work in works:
        s = work.shape
        assert min(s.m, s.n, s.k) >= 384 and 2e10 <= s.m * s.n * s.k <= 1e12 and takes(work.kernel, s)
        assert work.beside[0][0] == "all_reduce" != work.beside[1][0]
    assert {size for work in works for _, size in work.beside} == set(overlap.LARGE_SIZES)
    assert works == overlap.drawn_large(60, seed=5) != overlap.drawn_large(60, seed=6)


def test_blocks_of_a_collective_are_read_from_a_trace():
    class Profiler:
        def __init__(self, events):
            self.events = events

        def export_chrome_trace(self, path):
            with open(path, "w") as file:
                json.dump({"traceEvents": self.events}, file)

    def kernel(name, grid):
        return {"cat": "kernel", "name": name, "args": {"grid": grid}}

    others = [kernel("copy", [900, 1, 1]), {"name": "ncclDevKernel", "args": {"grid": [77, 1, 1]}}]
    assert overlap.grid_of(Profiler([*others, kernel("ncclDevKernel_Ring", [24, 1, 1]), kernel("nccl", [2, 3, 1])]), "nccl") == 24
    assert overlap.grid_of(Profiler(others), "nccl") == 0

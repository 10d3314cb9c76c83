"""A step on several GPUs: dry runs of `benchmarks/step_on_gpus.py` over gloo on the CPU, and made-up profiles read."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import loka_sim

ROOT = Path(__file__).resolve().parent.parent
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def profile():
    return load("gpu_profile")


ON_EVERY_RANK = """
import sys, torch, torch.distributed as dist
from benchmarks import step_on_gpus as benchmark
dist._DEFAULT_FIRST_BUCKET_BYTES = 30_000 # so that a small model has several

def check_all_to_all(rank):
    x = torch.arange(12.0).reshape(2, 6).T.requires_grad_() # not contiguous
    sent = x + 100 * rank
    out = benchmark.all_to_all(sent)
    gathered = [torch.empty(6, 2) for _ in range(2)]
    dist.all_gather(gathered, sent.detach().contiguous())
    assert torch.equal(out.flatten(), torch.cat([part.flatten().chunk(2)[rank] for part in gathered]))
    weight = torch.arange(12.0).reshape(6, 2) * (1 + rank)
    (out * weight).sum().backward()
    # Element i came from the rank that it is half of, and its gradient goes back there.
    expected = torch.cat([torch.arange(12.0).chunk(2)[rank] * (1 + there) for there in range(2)]).reshape(6, 2)
    assert torch.equal(x.grad, expected), (x.grad, expected)

def check_gradients(trainer):
    gradients = {}
    trainer.model.zero_grad = lambda set_to_none: None
    for variant in trainer.variants:
        trainer.step(variant)
        gradients[variant] = {key: p.grad.float().clone() for key, p in trainer.model.named_parameters()}
        for p in trainer.model.parameters():
            p.grad = None
    del trainer.model.zero_grad
    assert any(benchmark.TABLES in key for key in gradients["compute"])
    for plain, reduced in (("compute", "ddp"), ("exchange", "ddp_exchange")):
        for key, own in gradients[plain].items():
            mean = own.clone()
            dist.all_reduce(mean)
            expected = own if benchmark.TABLES in key else mean / 2
            torch.testing.assert_close(gradients[reduced][key], expected, rtol=0.02, atol=1e-4)
    for key, own in gradients["compute"].items():
        torch.testing.assert_close(own, gradients["whole"][key])
    assert any(not torch.equal(own, gradients["exchange"][key]) for key, own in gradients["compute"].items())

def check(trainer, world, rounds):
    check_all_to_all(dist.get_rank())
    check_gradients(trainer)
    try:
        world.together("half", lambda: 1 / dist.get_rank())
    except benchmark.Failed as problem:
        assert str(problem) == "half: ZeroDivisionError: division by zero (on 1 ranks, rank 0 first)"
    else:
        raise AssertionError("a rank failed, and others went on")
    asked = benchmark.asked_for("interformer-small+mods", 5)
    other = benchmark.Trainer(asked, world, False)
    assert other.exchanged == [5 * 26 * 16 * 2, 5 * 44 * 16 * 2]
    assert asked.expected == (sum(other.exchanged), other.dense_bytes)
    return time_variants(trainer, world, rounds)

time_variants, benchmark.time_variants = benchmark.time_variants, check
sys.exit(benchmark.main())
"""


def test_a_dry_run_does_what_it_says(tmp_path):
    script, out = tmp_path / "on_every_rank.py", tmp_path / "out"
    script.write_text(ON_EVERY_RANK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(script), "dlrm-small:3", "--whole", "--rounds", "1", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (path,) = out.iterdir()
    found = json.loads(path.read_text())
    assert path.name == "dlrm-small-3-2gpus.json" and "problem" not in found and "profile" not in found
    assert [found["model"], found["batch"], found["ranks"]] == ["dlrm-small", 3, 2]
    assert found["command"].startswith("torchrun --nproc-per-node 2 -m benchmarks.step_on_gpus dlrm-small:3 ")
    assert set(found["step"]) == set(found["compiled_in_s"]) == {"compute", "exchange", "ddp", "ddp_exchange", "whole"}
    for times in found["step"].values():
        assert times["p10_ms"] <= times["p50_ms"] <= times["p90_ms"] and times["host_ms"] > 0
        assert times["steps"] == 5 and len(times["by_rank_p50_ms"]) == 2
    # Everything travels that a prediction has travel, and no table with the gradients.
    assert found["dense_bytes"] == found["expected_dense_bytes"] == sum(found["buckets_bytes"])
    assert found["all_reduces"] == len(found["buckets_bytes"]) > 1
    assert found["embedding_bytes"] == found["expected_embedding_bytes"] == 3 * 26 * 16 * 2
    assert len(found["split_bytes"]) == 2  # with and without the exchange
    assert all(sum(parts) == found["dense_bytes"] and len(parts) > 1 for parts in found["split_bytes"])


def dry_run(tmp_path, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "benchmarks.step_on_gpus", *arguments, "--rounds", "1", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (path,) = tmp_path.glob("*2gpus*.json")
    return path.name, json.loads(path.read_text())


def test_a_dry_run_under_fsdp(tmp_path):
    name, found = dry_run(tmp_path, "wukong-small:4", "--dense", "fsdp")
    assert name == "wukong-small-4-2gpus-fsdp.json" and "problem" not in found
    assert set(found["step"]) == set(found["compiled_in_s"]) == {"fsdp", "fsdp_exchange"}
    assert [found["precision"], found["dense"]] == ["bf16", "fsdp"] and "all_reduces" not in found
    assert found["dense_bytes"] == found["expected_dense_bytes"]


def test_a_dry_run_of_a_dispatch_table(tmp_path):
    pytest.importorskip("torchao")
    loka_sim.save_run(loka_sim.whatif("dlrm-small", batch=16), tmp_path / "run")
    name, found = dry_run(tmp_path, f"dlrm-small:16:{tmp_path / 'run'}")
    assert name == "dlrm-small-16-2gpus-decision.json" and "problem" not in found
    assert [found["precision"], found["dense"]] == ["decision", "ddp"]
    assert set(found["step"]) == {"compute", "ddp", "exchange", "ddp_exchange"}


def test_wrong_arguments_and_no_gpus_are_one_line(capsys):
    benchmark = load("step_on_gpus")
    for wrong, said in (
        ("dlrm-small:many", "MODEL:BATCH"),
        ("dlmr", "unknown zoo model 'dlmr'"),
        ("dlrm-small:16:nowhere", "nowhere is not there; make it with `loka-sim whatif"),
    ):
        with pytest.raises(SystemExit) as left:
            benchmark.main([wrong])
        said_so = capsys.readouterr().err
        assert left.value.code == 2 and said in said_so and said_so.count("\n") == 1
    if not torch.cuda.is_available():
        assert benchmark.main(["dlrm:64"]) == 3
        assert "torchrun --nproc-per-node" in capsys.readouterr().err


def test_exposed_communication_of_a_profile_made_up(profile):
    """Two equal steps of 100 us: a GEMM alone, one beside a reduction that it does not cover, a copy beside an exchange."""
    times = [("gemm", 10, 20), ("gemm", 20, 40), (REDUCE, 18, 50), (SEND, 60, 70), ("copy", 65, 80)]
    events = [profile.Event(name, at + start, at + stop) for at in (0, 100) for name, start, stop in [(MARK, 0, 1), *times]]
    around = [profile.Event("early", -9, -2), profile.Event(MARK, 200, 201), profile.Event("late", 210, 220)]
    found = profile.summary([*around, *events[::-1]])
    assert found == {
        "spans_us": [100, 100], "span_us": 100, "busy_us": 60, "idle_us": 40, "compute_us": 45, "compute_kernels": 3,
        "communication_us": 42, "exposed_us": 10 + 5, "beside_us": 20, "not_beside_us": 10 + 15,
        "by_kind": {
            "all_reduce": {"kernels": 1, "us": 32, "exposed_us": 10}, "all_to_all": {"kernels": 1, "us": 10, "exposed_us": 5},
        },
    }  # fmt: skip
    table = {row["kernel"]: row for row in profile.kernels([*around, *events], [*around, *events])}
    for name, row in table.items():
        own = [event.us for event in events if event.name == name]
        assert row["us"] == row["ddp_us"] == pytest.approx(sum(own) / 2) and row["launches"] == len(own) / 2
        assert row["beside_us"] == row["beside_alone_us"] <= row["ddp_us"]
    assert not any(profile.nccl_kind(name) or name == MARK for name in table)
    assert sum(row["beside_us"] for row in table.values()) == pytest.approx(found["beside_us"])
    alone = profile.summary([event for event in [*events, *around] if profile.nccl_kind(event.name) is None])
    assert alone["compute_us"] == alone["not_beside_us"] == alone["busy_us"] == 45
    assert alone["communication_us"] == alone["exposed_us"] == alone["beside_us"] == 0 and alone["by_kind"] == {}


def test_a_profile_without_markers_is_no_profile(profile):
    with pytest.raises(ValueError, match="1 markers"):
        profile.summary([profile.Event(MARK, 0, 1), profile.Event("gemm", 1, 2)])

"""A step on several GPUs: dry runs of `benchmarks/step_on_gpus.py` over gloo on the CPU, and its reading of profiles made up."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("step_on_gpus", ROOT / "benchmarks" / "step_on_gpus.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["step_on_gpus"] = module
    spec.loader.exec_module(module)
    return module


def torchrun(*arguments, ranks=2):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT)


def test_a_dry_run_measures_every_model_it_can(tmp_path):
    # Of a batch of 1, the three ranks cannot share what the 16 x 26 elements of a sample are.
    done = torchrun(
        "-m", "benchmarks.step_on_gpus", "dlrm-small:1", "dcnv2-small:3", "--rounds", "1",
        "--out", str(tmp_path), "--device", "cpu", ranks=3,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcnv2-small-3-3gpus.json", "dlrm-small-1-3gpus.json"]
    failed = json.loads((tmp_path / "dlrm-small-1-3gpus.json").read_text())
    assert failed["problem"].startswith("first steps of exchange: ") and "step" not in failed
    assert set(failed["compiled_in_s"]) == {"compute", "ddp"}
    found = json.loads((tmp_path / "dcnv2-small-3-3gpus.json").read_text())
    assert "problem" not in found and "profile" not in found
    assert set(found["step"]) == {"compute", "exchange", "ddp", "ddp_exchange"}
    for times in found["step"].values():
        assert times["p10_ms"] <= times["p50_ms"] <= times["p90_ms"]
        assert times["steps"] == 5 and len(times["by_rank_p50_ms"]) == 3
    # Everything travels that a prediction has travel, in one bucket, and no table with the gradients.
    assert found["dense_bytes"] == found["expected_dense_bytes"] == sum(found["buckets_bytes"])
    assert found["embedding_bytes"] == found["expected_embedding_bytes"] == sum(found["exchanges_bytes"])
    assert found["exchanges_bytes"] == [3 * 26 * 16 * 2]
    assert all(sum(parts) == found["dense_bytes"] for parts in found["split_bytes"])


STEP = """
import sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from benchmarks import step_on_gpus as benchmark
dist.init_process_group("gloo")
rank = dist.get_rank()
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
world = benchmark.World(torch.device("cpu"), dist.new_group(backend="gloo"))
asked = benchmark.Asked("interformer-small+mods", 5)
trainer = benchmark.Trainer(asked, world, False)
assert trainer.exchanged == [5 * 26 * 16 * 2, 5 * 44 * 16 * 2]
assert asked.expected == (sum(trainer.exchanged), trainer.dense_bytes)
trainer = benchmark.Trainer(benchmark.Asked("dlrm-production", 4), world, True)
with benchmark.splits() as split:
    trainer.wrap(1)
    gradients = {}
    trainer.ddp.zero_grad = lambda set_to_none: None
    for variant in ("whole", "compute", "ddp", "exchange"):
        trainer.step(variant)
        gradients[variant] = {key: p.grad.float().clone() for key, p in trainer.model.named_parameters()}
        for p in trainer.model.parameters():
            p.grad = None
assert len(split) == 2 and len(split[0]) > 2, split
for key, own in gradients["compute"].items():
    torch.testing.assert_close(own, gradients["whole"][key])
    mean = own.clone()
    dist.all_reduce(mean)
    reduced = gradients["ddp"][key]
    torch.testing.assert_close(reduced, own if benchmark.TABLES in key else mean / 2, rtol=0.02, atol=1e-4)
assert any(not torch.equal(own, gradients["exchange"][key]) for key, own in gradients["compute"].items())
dist.destroy_process_group()
"""


def test_exchanges_and_reductions_do_what_they_say(tmp_path):
    script = tmp_path / "step.py"
    script.write_text(STEP)
    done = torchrun(str(script))
    assert done.returncode == 0, done.stderr[-3000:]


def test_wrong_arguments_and_no_gpus_are_one_line(benchmark, capsys):
    with pytest.raises(SystemExit) as left:
        benchmark.main(["dlrm-small:many"])
    assert left.value.code == 2 and "MODEL:BATCH" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        benchmark.main(["dlmr"])
    assert left.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    if not torch.cuda.is_available():
        assert benchmark.main(["dlrm:64"]) == 3
        assert "torchrun --nproc-per-node" in capsys.readouterr().err


def test_exposed_communication_of_a_profile_made_up(benchmark):
    """Two equal steps of 100 us: a GEMM alone, one half as fast beside a reduction that it does not cover, an exchange."""

    def step(start, times):
        return [benchmark.Event(MARK, start, start + 1)] + [benchmark.Event(n, start + a, start + b) for n, a, b in times]

    beside = [("gemm", 10, 20), ("gemm", 20, 40), (REDUCE, 18, 50), (SEND, 60, 70), ("copy", 65, 80)]
    alone = [("gemm", 10, 20), ("gemm", 20, 30), ("copy", 40, 55)]
    events = {
        name: [*step(0, times), *step(100, times), benchmark.Event(MARK, 200, 201), benchmark.Event("late", 210, 220)]
        for name, times in (("alone", alone), ("beside", beside))
    }
    document = benchmark.profile_document(events["alone"][::-1], events["beside"][::-1])
    found = document["ddp_exchange"]
    assert found["spans_us"] == [100, 100] and found["span_us"] == 100
    assert found["compute_us"] == 45 and found["compute_kernels"] == 3
    assert found["busy_us"] == 60 and found["idle_us"] == 40
    assert found["communication_us"] == 42 and found["exposed_us"] == 10 + 5
    assert found["beside_us"] == 20 and found["not_beside_us"] == 25
    assert found["by_kind"]["all_reduce"] == {"kernels": 1, "us": 32, "exposed_us": 10}
    assert found["by_kind"]["all_to_all"] == {"kernels": 1, "us": 10, "exposed_us": 5}
    assert found["collectives"][0] == [0, "all_reduce", 18, 32, 10] and len(found["collectives"]) == 4
    assert document["compute"]["exposed_us"] == 0 and document["compute"]["compute_us"] == 35
    rows = {row["kernel"]: row for row in document["kernels"]}
    assert set(rows) == {"gemm", "copy"}
    assert rows["gemm"] == {
        "kernel": "gemm", "launches": 2, "us": 20, "ddp_launches": 2, "ddp_us": 30,
        "beside_launches": 1, "beside_us": 20, "beside_alone_us": 10,
    }  # fmt: skip
    assert rows["copy"]["beside_us"] == 0


def test_kernels_that_only_one_profile_has_are_not_compared(benchmark):
    Event = benchmark.Event
    alone = [[Event("gemm", 0, 10)], [Event("gemm", 0, 10)]]
    beside = [[Event("gemm", 0, 10), Event("gemm", 10, 20), Event("divide", 20, 24), Event(REDUCE, 0, 30)]] * 2
    rows = {row["kernel"]: row for row in benchmark.kernel_table(alone, beside)}
    assert rows["gemm"]["beside_alone_us"] is None and rows["gemm"]["beside_us"] == 20
    assert rows["divide"]["launches"] == 0 and rows["divide"]["ddp_us"] == 4


def test_a_profile_without_markers_is_no_profile(benchmark):
    with pytest.raises(ValueError, match="1 markers"):
        benchmark.by_step([benchmark.Event(MARK, 0, 1), benchmark.Event("gemm", 1, 2)])

"""Predictions of steps on several GPUs, as benchmarks/gpu_steps.py holds them against measured ones."""

import argparse
import json

import pytest

from benchmarks import gpu_steps, whole_step
from loka_sim.dense_units import BUCKET_BYTES
from loka_sim.step_plan import GPUS_DEVIATION
from loka_sim.whole_step import CALLED_GAP_US, launched
from perfmodel.data_folder import data_folder


@pytest.fixture(scope="module")
def predicted():
    return gpu_steps.predicted("dcnv2-production", 8192, 2, "bf16", "ddp", "h100")


def test_one_gpu_takes_what_its_graph_takes_and_more_between_kernels(predicted):
    answers = {}
    graph = whole_step.both("dcnv2-production", 8192, answers, "h100")["bf16"].graph_ms
    spec = answers["dcnv2-production", 8192][0].spec
    # GEMMs and fused kernels of the step, then the loss and both kernels of each table's gradient.
    kernels = sum(len(site.passes) for site in spec.sites) + launched(spec.fused, 8192) + 14 + 2 * len(spec.tables)
    answer, _, gaps_us = answers["dcnv2-production", 8192]
    gaps_us += next(step.gaps_us for step in answer.steps if step.name == "bf16")
    called = graph[0] + (kernels * CALLED_GAP_US - gaps_us) / 1e3
    # The slower of two is 0.56 deviations above the mean.
    assert predicted["one_ms"] == pytest.approx(called * (1 + 0.56 * GPUS_DEVIATION), rel=1e-3)


def test_several_take_longer_by_copies_and_what_is_slowed_or_exposed(predicted):
    several, low, high = predicted["several_ms"]
    assert low < several < high
    # The host takes longer than that to launch it.
    assert several == pytest.approx(predicted["host_ms"][0]) and several > predicted["gpus_ms"]
    assert predicted["one_ms"] < predicted["unslowed_ms"] < predicted["gpus_ms"]
    # No more than everything slowed, exposed and copied: gradients fill less than two buckets.
    copied = 2 * 2 * BUCKET_BYTES / 3.06e9
    assert predicted["gpus_ms"] <= predicted["one_ms"] + predicted["slowed_ms"] + predicted["exposed_ms"] + copied + 1e-6


def test_measured_steps_take_the_place_of_earlier_ones(tmp_path, capsys):
    step = {name: {"p50_ms": 10.0, "host_ms": 10.9} for name in ("compute", "ddp_exchange")}
    document = {**dict.fromkeys(gpu_steps.KEPT), "model": "dcnv2-production", "batch": 8192, "ranks": 2}
    document |= {"precision": "bf16", "dense": "ddp", "step": step}
    for ms in (10.0, 11.0):
        step["ddp_exchange"]["p50_ms"] = ms
        (tmp_path / "one.json").write_text(json.dumps(document))
        gpu_steps.add(tmp_path / "steps.json", [tmp_path / "one.json"])
    steps = json.loads((tmp_path / "steps.json").read_text())["steps"]
    assert [entry["step"]["ddp_exchange"]["p50_ms"] for entry in steps] == [11.0]
    # The host takes 10.9 ms of 11 to launch it.
    assert gpu_steps.is_of_the_host(steps[0])
    gpu_steps.show(steps, "h100")
    assert "the host was the bound\n" in capsys.readouterr().out
    # A host half as fast takes twice as long.
    gpu_steps.show([{**steps[0], "host_step_us": [1000.0, unit]} for unit in (4000.0, 8000.0)], "h100")
    told = [float(line.partition("how fast it was ")[2].split(",")[0]) for line in capsys.readouterr().out.splitlines()[1:3]]
    assert told[1] == pytest.approx(2 * told[0], rel=1e-3)
    # Unless its GPUs were seen not to wait: then the queue of launches was full.
    for idle_us, of_the_host in ((300.0, False), (3000.0, True)):
        profile = {"ddp_exchange": {"idle_us": idle_us, "span_us": 11_000.0}}
        assert gpu_steps.is_of_the_host({**steps[0], "profile": profile}) == of_the_host


def test_what_steps_lost_to_collectives_is_told(capsys):
    """Of what was profiled on H200s: kernels with DDP's exchanges over the same without, copies into buckets left out."""
    steps = json.loads((data_folder() / "h200" / "gpu_steps.json").read_text())["steps"]
    wukong = next(step for step in steps if (step["model"], step["batch"], step["dense"]) == ("wukong-production", 3072, "ddp"))
    rows = wukong["profile"]["kernels"]
    assert any(not row["launches"] for row in rows)
    assert gpu_steps.lost_ms(wukong) == pytest.approx(sum(row["ddp_us"] - row["us"] for row in rows if row["us"]) / 1e3)
    gpu_steps.show_lost([wukong, {**wukong, "profile": None}, {**wukong, "ranks": 1}], "h200")
    told = predicted_lost(capsys.readouterr().out)
    assert len(told) == 1 and abs(told[0] - 1) < 0.1


def predicted_lost(text):
    """Told over measured of each line that `show_lost` prints of a step."""
    lines = [line.split() for line in text.splitlines() if line.startswith("wukong")]
    return [float(line[-2]) / float(line[-3]) for line in lines]


def test_a_step_is_asked_for_in_full_or_in_short():
    assert gpu_steps.asked_for("wukong-production:2048:2") == ("wukong-production", 2048, 2, "bf16", "ddp")
    assert gpu_steps.asked_for("dlrm:64:4:decision:fsdp") == ("dlrm", 64, 4, "decision", "fsdp")
    for wrong in ("dlrm:64", "dlrm:many:2", "dlrm:64:2:fp4:ddp", "dlrm:64:2:bf16:hsdp"):
        with pytest.raises(argparse.ArgumentTypeError, match="give MODEL:BATCH:GPUS"):
            gpu_steps.asked_for(wrong)


def test_as_decided_and_under_fsdp():
    """Dense parameters of 32 MB are gathered once more and reduced alike; nothing of the model pays in FP8 at such a size."""
    ddp, sharded = (gpu_steps.predicted("dcnv2-production", 2048, 2, "bf16", dense, "h200") for dense in ("ddp", "fsdp"))
    assert sharded["one_ms"] == pytest.approx(ddp["one_ms"]) and sharded["several_ms"][0] > ddp["several_ms"][0]
    bf16, decided = (gpu_steps.predicted("wukong-production", 2048, 2, way, "ddp", "h200") for way in ("bf16", "decision"))
    assert 1.05 < bf16["several_ms"][0] / decided["several_ms"][0] < 1.25

"""Training and collecting: what is collected is what passed by, and training learns."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from loka_sim import statistics, training, zoo
from loka_sim.collector import SiteCollector
from loka_sim.datasets import Batch, Dataset, open_dataset
from loka_sim.errors import UserError
from loka_sim.training import TrainingConfig, area_under_curve, evaluate, train

CRITEO = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "criteo_sample"
MODELS = ["dlrm-small", "dcnv2-small", "wukong-small", "interformer-small"]
needs_criteo = pytest.mark.skipif(not CRITEO.is_dir(), reason="no Criteo sample beside the checkout")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["dlrm-small", "wukong-small"])
def test_collected_moments_are_those_of_the_tensors(name):
    torch.manual_seed(0)
    model = zoo.build(name, device="cpu")
    collector = SiteCollector(model, rank=64)
    collector.enabled = True
    seen: dict[str, list[torch.Tensor]] = {}
    site = "interaction.product" if name == "dlrm-small" else "layers.1.fmb.interact"

    def keep(module, inputs, output):
        seen.setdefault("left", []).append(inputs[0].detach())
        seen.setdefault("right", []).append(inputs[1].detach())
        output.register_hook(lambda gradient: seen.setdefault("gradient", []).append(gradient))

    def keep_head(module, inputs, output):
        seen.setdefault("head", []).append(inputs[0].detach())

    model.get_submodule(site).register_forward_hook(keep)
    model.get_submodule("top.0").register_forward_hook(keep_head)
    for seed in range(3):
        logits = model(*zoo.example_inputs(name, 16, device="cpu", seed=seed))
        nn.functional.binary_cross_entropy_with_logits(logits, torch.arange(16) % 2.0).backward()
    sites = collector.result()

    def moments(tensors: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
        rows = torch.cat([tensor.flatten(0, -2) for tensor in tensors]).double()
        return rows.mean(0).numpy(), torch.cov(rows.T).numpy()

    product = sites[site]
    right = [tensor.transpose(1, 2) for tensor in seen["right"]]
    for record, tensors in (
        (product.activation, seen["left"]), (product.weight, right), (product.weight_transposed, seen["right"]),
        (product.grad_output, seen["gradient"]), (sites["top.0"].activation, seen["head"]),
    ):  # fmt: skip
        mean, covariance = moments(tensors)
        np.testing.assert_allclose(record.mean, mean, rtol=1e-4, atol=1e-5 * np.abs(mean).max())
        np.testing.assert_allclose(np.diag(record.covariance), np.diag(covariance), rtol=1e-3, atol=1e-5 * covariance.max())
        assert record.rows_seen == sum(tensor[..., 0].numel() for tensor in tensors)
    weight = model.get_submodule("top.0").weight.detach().numpy()
    np.testing.assert_allclose(sites["top.0"].weight.mean, weight.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sites["top.0"].weight_transposed.amax, np.abs(weight).max(1), rtol=1e-6)
    # What the batch at hand sums to is what autograd left: three batches without zero_grad.
    head, signal = sites["top.0"], sites["top.0"].gradient
    rows = head.activation.rows_seen
    total = (signal.linear * rows + signal.quadratic * rows**2) * head.activation.mean_square * head.grad_output.mean_square
    summed = float(model.get_submodule("top.0").weight.grad.square().mean())
    assert total == pytest.approx(summed, rel=1e-3) if signal.quadratic else summed <= 4 * total
    assert product.gradient is None
    collector.close()


def test_a_site_without_a_gradient_is_named():
    collector = SiteCollector(zoo.build("dlrm-small", device="cpu"), rank=4)
    with pytest.raises(ValueError, match=r"^site bottom.0 has no activation; run a step with its gradient while collecting$"):
        collector.result()


class Plain(Dataset):
    """Synthetic samples whose label is one dense feature's, so that a few steps learn it."""

    def __init__(self, rows: int, split: str) -> None:
        self._data = open_dataset("synthetic", rows=rows, split=split)
        self.name, self.shape = "plain", self._data.shape

    def provenance(self) -> dict[str, str | int]:
        return {"name": self.name}

    def chunks(self, rows: int) -> Iterator[Batch]:
        for batch in self._data.chunks(rows):
            yield replace(batch, labels=(batch.dense[:, 0] > 0).astype(np.float32))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tensors_that_statistics_cannot_hold_are_named(size):
    model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    collector = SiteCollector(model, rank=4)
    collector.enabled = True
    with pytest.raises(ValueError, match="site 0, activation: values go up to .* power of two"):
        model(torch.full((32, 16), size)).sum().backward()
        collector.result()
    collector.close()


@pytest.mark.parametrize("mods", [(), ("no_bias", "blocknorm", "hardswish")])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns_and_is_collected(model, mods):
    config = TrainingConfig(steps=40, batch=64, collect=1, rank=2, learning_rate=5e-3)
    run = train(model, Plain(2_560, "train"), Plain(5_000, "dev"), config, mods=mods)
    assert run.metrics.auc > 0.8 and run.metrics.normalized_entropy < 0.9
    names = {n for n, m in run.model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "BatchedProduct"}
    assert set(run.sites) == names


def test_training_repeats_with_its_seed():
    data = [open_dataset("synthetic", rows=2_000, split=split) for split in ("train", "dev")]
    runs = [train("dlrm-small", *data, TrainingConfig(steps=8, collect=2, seed=seed)) for seed in (1, 1, 2)]
    assert runs[0].metrics == runs[1].metrics != runs[2].metrics
    first, second = (run.sites["top.0"].grad_output for run in runs[:2])
    np.testing.assert_array_equal(first.second_moment, second.second_moment)


def test_metrics_against_definitions():
    rng = np.random.default_rng(0)
    labels = (rng.random(300) < 0.3).astype(np.float32)
    scores = np.round(rng.normal(labels, 1.0), 1)  # rounded, so that there are ties
    positive, negative = scores[labels > 0], scores[labels == 0]
    pairs = (positive[:, None] > negative[None]) + 0.5 * (positive[:, None] == negative[None])
    assert area_under_curve(labels, scores) == pytest.approx(pairs.mean())
    assert area_under_curve(np.ones(3), np.arange(3)) == 0.5
    batch = open_dataset("synthetic", rows=500).read()

    class Constant(nn.Module):
        def forward(self, dense, ids):
            return torch.full((len(dense),), float(np.log(0.2 / 0.8)))

    metrics = evaluate(Constant(), batch, click_rate=0.2)
    share = batch.labels.mean()
    assert metrics.log_loss == pytest.approx(-(share * np.log(0.2) + (1 - share) * np.log(0.8)), rel=1e-6)
    assert metrics.normalized_entropy == pytest.approx(1.0, rel=1e-6) and metrics.auc == 0.5


def test_the_command_line_writes_what_the_manifest_repeats(tmp_path, capsys):
    first = ["dlrm-small", "--data", "synthetic", "--rows", "3000", "--steps", "6", "--collect", "2", "--mods", "no_bias"]
    assert training.main([*first, "--out", str(tmp_path / "a"), "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["model"] == "dlrm-small" and document["mods"] == ["no_bias"] and "step 6/6" in captured.err
    loaded = statistics.load(tmp_path / "a")
    assert loaded.fingerprint == document["fingerprint"] and str(tmp_path) not in json.dumps(loaded.manifest)
    words = shlex.split(loaded.manifest["command"])
    assert words[:3] == ["python", "-m", "loka_sim.training"]
    again = [str(tmp_path / "b") if word == "OUT_DIR" else word for word in words[3:]]
    assert training.main(again) == 0
    assert "held-out log loss" in capsys.readouterr().out
    for name in (statistics.ARRAYS, statistics.MANIFEST):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["wukon-small"], 2, "loka-sim: unknown zoo model 'wukon-small'; choose from"),
        (["wukong"], 2, "loka-sim: 'wukong' does not fit into memory; train wukong-small"),
        (["dlrm-small", "--path", "/nowhere"], 3, "loka-sim: Criteo data not found at /nowhere; pass another path or set"),
        (["dlrm-small", "--data", "synthetic", "--mods", "x"], 2, "loka-sim: unknown mod 'x'; choose from"),
        (["dlrm-small", "--data", "synthetic", "--steps", "0"], 2, "loka-sim: steps = 0: give a whole number of at least 1"),
        (["dlrm-small", "--data", "synthetic", "--collect", "999"], 2, "loka-sim: collect = 999: give 0 to 112"),
        (["dlrm-small", "--data", "synthetic", "--threads", "0"], 2, "loka-sim: threads = 0: give at least 1"),
        (["dlrm-small", "--data", "synthetic", "--rows", "50"], 3, "loka-sim: synthetic has fewer samples than one batch"),
    ],
)
def test_bad_input_is_one_line(arguments, code, complaint, capsys):
    assert training.main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(complaint) and captured.err.count("\n") == 1


def test_a_config_out_of_range_is_refused():
    with pytest.raises(UserError, match="batch = -1: give a whole number of at least 1"):
        TrainingConfig(batch=-1)


@needs_criteo
@pytest.mark.parametrize("model", MODELS)
def test_real_data_train(model):
    data = [open_dataset("criteo", CRITEO, split) for split in ("train", "dev")]
    metrics = train(model, *data, TrainingConfig(steps=40, collect=0)).metrics
    assert metrics.auc > 0.6 and metrics.normalized_entropy < 1.0 and metrics.samples == 409


@pytest.mark.skipif(not (CRITEO.parent / "ml-100k").is_dir(), reason="no MovieLens-100k beside the checkout")
def test_movielens_trains_models_of_its_own_shape():
    data = [open_dataset("movielens", CRITEO.parent / "ml-100k", split) for split in ("train", "dev")]
    run = train("dlrm-small", *data, TrainingConfig(steps=150, collect=0, batch=256, table_learning_rate=0.05))
    assert run.metrics.auc > 0.66 and run.metrics.normalized_entropy < 0.97
    few = open_dataset("movielens", CRITEO.parent / "ml-100k", "dev").read().take(slice(0, 64))
    model = zoo.build("interformer-small", device="cpu", shape=data[0].shape)
    assert torch.isfinite(model(*training.tensors(few, model))).all()


def test_all_means_every_small_model_with_and_without_mods(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(training, "run", lambda job: asked.append((job.model, job.mods, job.out.name)) or {})
    monkeypatch.setattr(training, "_line", lambda document: "done")
    assert training.main(["all", "--data", "synthetic", "--out", str(tmp_path)]) == 0
    assert asked[:3] == [("dlrm-small", "none", "dlrm-small"), ("dlrm-small", "all", "dlrm-small+mods"),
                         ("dcnv2-small", "none", "dcnv2-small")]  # fmt: skip
    assert sorted(folder for _, _, folder in asked) == list(statistics.shipped())
    assert capsys.readouterr().out == "done\n" * 8

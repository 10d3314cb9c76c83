"""What travels together: against the modules that torch's own wrappers would make, and by hand."""

import json

import pytest
from torch import nn

from loka_sim import resolve, zoo
from loka_sim.dense_units import BUCKET_BYTES, buckets, dense_tensors, layer_of, shards
from loka_sim.zoo.common import Tables
from perfmodel.data_folder import data_folder

NAMES = ("dlrm-production", "dcnv2-production", "wukong-production", "interformer-production", "wukong-small")


def modules(name):
    """Layers of a zoo model's lists of layers by name, as `benchmarks/step_on_gpus.py` shards them, and its dense parameters."""
    model = zoo.build(name, device="meta")
    tables = [key for key, child in model.named_children() if isinstance(child, Tables | nn.Embedding)]
    dense = {key: p for key, p in model.named_parameters() if key.split(".")[0] not in tables}
    parts = {key: part for key, part in model.named_children() if isinstance(part, nn.ModuleList) and key not in tables}
    layers = {f"{key}.{i}": layer for key, part in parts.items() for i, layer in enumerate(part)}
    return layers, dense


@pytest.mark.parametrize("name", NAMES)
def test_fsdp_shards_each_layer_and_the_model_around_them(name):
    spec = resolve.resolve_model(name)
    layers, dense = modules(name)
    found = shards(spec)
    assert sum(part.size_bytes for part in found) == 2 * spec.dense_parameters == 2 * sum(p.numel() for p in dense.values())
    if not layers:
        assert not any(part.kept for part in found)
        return
    root, *own = found
    assert root.kept and not root.sites and not any(part.kept for part in own)
    assert [layer_of(part.sites[0]) for part in own] == list(layers)
    for part, layer in zip(own, layers.values(), strict=True):
        assert {layer_of(site) for site in part.sites} == {layer_of(part.sites[0])}
        # Biases and norms of layers, of which only the sum is known, count for the model around them.
        assert part.size_bytes == pytest.approx(2 * sum(p.numel() for p in layer.parameters()), rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_buckets_hold_everything_once_and_all_but_one_are_full(name):
    spec = resolve.resolve_model(name)
    found = buckets(spec)
    assert sum(part.size_bytes for part in found) == 2 * spec.dense_parameters
    sites = [site for part in found for site in part.sites]
    assert len(sites) == len(set(sites)) and sites == [site.name for site in spec.sites if site.name in set(sites)]
    assert all(part.size_bytes >= BUCKET_BYTES for part in found[1:-1]) and not any(part.kept for part in found)


STEPS = [step for name in ("h100", "h200") for step in json.loads((data_folder() / name / "gpu_steps.json").read_text())["steps"]]
MEASURED = {step["model"]: step["all_reduces"] for step in STEPS if step["dense"] == "ddp"}


@pytest.mark.parametrize(("name", "all_reduces"), MEASURED.items())
def test_as_many_buckets_as_ddp_reduced_on_gpus(name, all_reduces):
    assert len(buckets(resolve.resolve_model(name))) == all_reduces


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_counted_but_for_norms(name):
    _, dense = modules(name)
    spec = resolve.resolve_model(name)
    weights = sum(p.ndim > 1 for p in dense.values())
    assert weights <= len(dense_tensors(spec)) <= len(dense) + 1
    assert len(dense_tensors(spec)) >= 0.75 * len(dense)


def test_a_layers_name():
    expected = {
        "layers.3.mlp.0": "layers.3", "encoder.blocks.12.attention": "encoder.blocks.12", "top.0": None, "predict": None,
        "h.0.1.x": "h.0", "layer12.mlp": None,
    }  # fmt: skip
    assert {name: layer_of(name) for name in expected} == expected

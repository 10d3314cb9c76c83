"""The statistics store: round trip, matching by role, and what it says of a bad folder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from loka_sim import statistics, zoo
from loka_sim.capture import capture
from loka_sim.errors import DataError, UserError
from loka_sim.modelspec import Dim, ModelSpec, Site, linear_passes
from loka_sim.statistics import ROLES, SiteStatistics, Statistics
from numerics.collect import StatisticsAccumulator
from numerics.gradient import GradientSignal

pytestmark = pytest.mark.usefixtures("gemms_alone")

NAMES = [f"{model}-small{mods}" for model in zoo.MODELS for mods in ("", "+mods")]


def record(features: int, seed: int, relu: bool = False):
    rng = np.random.default_rng(seed)
    values = rng.normal(0.3, 1.0, (400, features)).astype(np.float32) * rng.lognormal(0, 1, features).astype(np.float32)
    accumulator = StatisticsAccumulator(features)
    accumulator.update(np.maximum(values, 0) if relu else values)
    return accumulator.result(rank=4)


def site(n: int, k: int, seed: int) -> SiteStatistics:
    records = record(k, seed, relu=True), record(k, seed + 1), record(n, seed + 2), record(n, seed + 3)
    return SiteStatistics(*records, gradient=GradientSignal(1.25, 1.5, seed / 1000) if seed < 9 else None)


@pytest.fixture
def made() -> Statistics:
    sites = {"top.0": site(16, 40, 1), "top.1": site(3, 16, 5), "layers.0.mix": site(8, 8, 9), "layers.2.mix": site(8, 8, 20)}
    return Statistics("made", "0123456789abcdef", sites, {"dataset": {"name": "none"}, "steps": 3, "seed": 7})


@pytest.fixture
def folder(made, tmp_path):
    statistics.save(tmp_path / "made", made)
    return tmp_path / "made"


def spec_of(*names: str) -> ModelSpec:
    passes = linear_passes(Dim(0, 1), Dim(8), Dim(8))
    return ModelSpec("other", 32, tuple(Site(name, "linear", passes, weight=f"{name}.weight") for name in names))


def test_what_is_written_is_read(made, folder):
    loaded = statistics.load(folder)
    assert (loaded.model, loaded.fingerprint, list(loaded.sites)) == ("made", made.fingerprint, list(made.sites))
    assert loaded.manifest["dataset"] == {"name": "none"} and loaded.manifest["seed"] == 7
    for name, expected in made.sites.items():
        for role in ROLES:
            one, other = getattr(expected, role), getattr(loaded.sites[name], role)
            assert one.rows_seen == other.rows_seen and one.spiked == other.spiked
            for part in ("mean", "second_moment", "amax", "quantiles", "residual"):
                np.testing.assert_array_equal(getattr(one, part), getattr(other, part))
            for part in ("profile_counts", "profile_energy", "profile_phase", "row_rms", "zero_share"):
                np.testing.assert_allclose(getattr(one, part), getattr(other, part), rtol=1e-3, atol=1e-7)
            np.testing.assert_allclose(one.covariance, other.covariance, rtol=2e-3, atol=2e-3 * one.covariance.max())
    assert [site.gradient for site in loaded.sites.values()] == [site.gradient for site in made.sites.values()]
    assert loaded.sites["top.1"].gradient == GradientSignal(1.25, 1.5, 0.005) and loaded.sites["layers.0.mix"].gradient is None
    summary = loaded.manifest["sites"]["top.0"]["activation"]
    assert summary["features"] == 40 and summary["rank"] == 4 and summary["rows_seen"] == 400
    assert 0.3 < summary["zero_share"] < 0.45  # a normal around 0.3 behind a ReLU: 38% zeros


def test_writing_again_gives_the_same_bytes(made, folder, tmp_path):
    statistics.save(tmp_path / "again", made)
    for name in (statistics.ARRAYS, statistics.MANIFEST):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == [statistics.MANIFEST, statistics.ARRAYS]


def test_a_feature_that_hardly_varies_can_be_stored(made, tmp_path):
    steady = made.sites["top.0"].activation
    mean = np.full(40, 1000.0, np.float32)
    odd = replace(steady, mean=mean, second_moment=mean**2, _views={})
    sites = {"top.0": replace(made.sites["top.0"], activation=odd)}
    statistics.save(tmp_path / "odd", replace(made, sites=sites))
    assert np.isfinite(statistics.load(tmp_path / "odd").sites["top.0"].activation.factor).all()


def test_sites_are_matched_by_name_then_by_role(made):
    found = statistics.match(spec_of("top.1", "top.3", "layers.1.mix", "layers.7.mix"), made)
    expected = {"top.1": "top.1", "top.3": "top.1", "layers.1.mix": "layers.0.mix", "layers.7.mix": "layers.2.mix"}
    for name, source in expected.items():
        assert found[name][0] is made.sites[source]
    assert [how for _, how in found.values()] == ["exact", "role", "role", "role"]


def test_statistics_of_an_unrelated_model_are_refused(made):
    names = [f"tower.{i}" for i in range(5)]
    with pytest.raises(
        UserError,
        match=r"^statistics of 'made' do not fit model 'other': nothing for tower.0, tower.1, tower.2 and 2 more; give [^\n]*$",
    ):
        statistics.match(spec_of("top.0", *names), made)
    with pytest.raises(UserError, match="nothing for top.0#2;"):
        statistics.match(spec_of("top.0#2"), made)


def damage_manifest(folder, **changes):
    path = folder / statistics.MANIFEST
    manifest = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))


def damage_gradient(folder, value):
    sites = json.loads((folder / statistics.MANIFEST).read_text())["sites"]
    sites["top.0"]["gradient"] = value
    damage_manifest(folder, sites=sites)


def damage_rank(folder, value):
    sites = json.loads((folder / statistics.MANIFEST).read_text())["sites"]
    sites["top.0"]["activation"]["rank"] = value
    damage_manifest(folder, sites=sites)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda f: (f / statistics.MANIFEST).unlink(), r"manifest.json is missing; give a folder that"),
        (lambda f: (f / statistics.MANIFEST).write_text("{"), r"manifest.json cannot be read"),
        (lambda f: (f / statistics.MANIFEST).write_text("[]"), r"manifest.json is no manifest of statistics"),
        (lambda f: (f / statistics.ARRAYS).unlink(), r"statistics.safetensors is missing; collect"),
        (lambda f: (f / statistics.ARRAYS).write_bytes((f / statistics.ARRAYS).read_bytes()[:-100]), r"is truncated, damaged or"),
        (lambda f: (f / statistics.ARRAYS).write_bytes(b""), r"is truncated, damaged or of another run"),
        (lambda f: damage_manifest(f, schema_version=9), r"schema_version is 9, expected 1"),
        (lambda f: damage_manifest(f, sites=None), r"sites is missing or no dict"),
        (lambda f: damage_manifest(f, model=3), r"model is missing or no str"),
        (lambda f: damage_manifest(f, sites={"top.0": {}}), r"does not fit its manifest"),
        (lambda f: damage_manifest(f, sites={}), r"does not fit its manifest"),
        (lambda f: damage_manifest(f, layout={}), r"does not fit its manifest"),
        (lambda f: damage_rank(f, -2), r"does not fit its manifest"),
        (lambda f: damage_rank(f, float("inf")), r"does not fit its manifest"),
        (lambda f: damage_rank(f, 1e300), r"does not fit its manifest"),
        (lambda f: damage_gradient(f, {"linear": 1.0}), r"gradient of top.0 is damaged .*; collect the statistics again"),
        (lambda f: damage_gradient(f, {"independent": -1, "linear": 1, "quadratic": 0}), r"gradient of top.0 is damaged"),
        (lambda f: damage_gradient(f, 3), r"gradient of top.0 is damaged"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_one_line(folder, damage, complaint):
    damage(folder)
    with pytest.raises(DataError, match=complaint) as caught:
        statistics.load(folder)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_unknown_names_and_unwritable_folders(made, tmp_path):
    with pytest.raises(UserError, match=r"^no statistics named 'wukon' and no such folder; shipped: dcnv2-small, "):
        statistics.load("wukon")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^cannot write "):
        statistics.save(tmp_path / "file", made)


def test_shipped_statistics_cover_the_zoo():
    assert sorted(NAMES) == list(statistics.shipped())
    size = sum(path.stat().st_size for path in statistics.folder_of_shipped().rglob("*") if path.is_file())
    assert size <= 10_000_000
    assert statistics.default_name("wukong-production") == "wukong-small"
    assert statistics.default_name("wukong-small", ("hardswish",)) == "wukong-small+mods"
    assert statistics.default_name("mine") is None


@pytest.mark.parametrize("name", NAMES)
def test_shipped_statistics_fit_their_models(name):
    loaded = statistics.load(name)
    model, _, mods = name.partition("+")
    small = capture(zoo.build(model, mods="all" if mods else ()), zoo.example_inputs(model, 8), name=model)
    assert loaded.fingerprint == small.fingerprint
    assert {how for _, how in statistics.match(small, loaded).values()} == {"exact"}
    for spec_site in small.sites:
        gemm, found = spec_site.passes["output"], loaded.sites[spec_site.name]
        assert (found.activation.features, found.weight.features) == (gemm.k.const, gemm.k.const)
        assert (found.weight_transposed.features, found.grad_output.features) == (gemm.n.const, gemm.n.const)
    production = model.replace("small", "production")
    spec = capture(zoo.build(production), zoo.example_inputs(production, 8), name=production)
    assert len(statistics.match(spec, loaded)) == len(spec.sites)
    manifest = loaded.manifest
    assert manifest["mods"] == (["no_bias", "blocknorm", "hardswish"] if mods else [])
    assert manifest["command"].startswith(f"python -m loka_sim.training {model} --data criteo --path DATA_DIR ")
    assert manifest["held_out"]["normalized_entropy"] < 0.96


def test_loading_needs_no_torch():
    code = "import sys; from loka_sim import statistics; statistics.load('dlrm-small'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

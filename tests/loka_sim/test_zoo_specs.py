"""The shipped specifications are those of the zoo's models, and their FLOPs are what FlopCounterMode counts."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from loka_sim import modelspec
from loka_sim.errors import UserError
from loka_sim.modelspec import PASSES
from loka_sim.mods import apply_to_spec
from loka_sim.resolve import resolve_model, zoo_names, zoo_with_mods
from loka_sim.sources import model_spec
from loka_sim.zoo import DEFAULT_BATCH, NAMES, build, example_inputs
from loka_sim.zoo.specs import capture_zoo_model, main

MEND = "the shipped spec is stale: run `python -m loka_sim.zoo.specs`"
WRITTEN = "dlrm-small"  # by `test_the_command_writes_what_ships`


def counted(name, batch):
    with FlopCounterMode(display=False) as counter:
        build(name)(*example_inputs(name, batch)).sum().backward()
    return counter.get_total_flops()


def test_every_zoo_model_has_a_shipped_spec_and_nothing_else_has():
    assert set(zoo_names()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_specs_keep_to_the_schema(name):
    assert modelspec.load(zoo_names()[name]) == resolve_model(name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != WRITTEN])
def test_shipped_specs_are_fresh_captures(name):
    assert resolve_model(name) == capture_zoo_model(name), MEND


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-small") and name != WRITTEN])
def test_shipped_specs_with_mods_are_fresh_captures(name):
    assert zoo_with_mods(name) == capture_zoo_model(name, "all"), MEND


@pytest.mark.parametrize("name", NAMES)
def test_with_all_mods_a_model_is_the_one_that_was_captured_with_them(name):
    """The same GEMMs as Mods applied to the plain specification make, and what its step holds beside them."""
    spec, _ = model_spec(name, "all")
    assert spec.sites == apply_to_spec(resolve_model(name), "all").sites
    assert spec.fused and spec.loops and spec.loops != resolve_model(name).loops
    model = build(name, mods="all")
    tables = sum(table.rows * table.dim for table in spec.tables)
    assert spec.dense_parameters + tables == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [None, 48])
def test_flops_agree_exactly_with_the_flop_counter(name, batch):
    spec = resolve_model(name)
    assert spec.unaccounted == ()
    assert spec.batch == DEFAULT_BATCH[name]
    assert spec.flops(batch) == counted(name, batch or DEFAULT_BATCH[name])


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_modules(name):
    spec, model = resolve_model(name), build(name)
    tables = {table.name: table.rows * table.dim for table in spec.tables}
    assert spec.dense_parameters + sum(tables.values()) == sum(parameter.numel() for parameter in model.parameters())
    modules = dict(model.named_modules())
    assert all(modules[site.name.partition("#")[0]] is not None for site in spec.sites)
    assert set(tables) <= set(modules)


@pytest.mark.parametrize("name", NAMES)
def test_linear_sites_are_the_models_linear_layers(name):
    """Sizes, bias and passes of every site that a linear layer is, from the layers themselves."""
    modules = dict(build(name).named_modules())
    for site in resolve_model(name).sites:
        if site.op == "linear" and site.weight == f"{site.name}.weight":
            layer, out = modules[site.name], site.passes["output"]
            assert (out.n.at(1), out.k.at(1)) == (layer.out_features, layer.in_features)
            assert site.bias == (layer.bias is not None)
            # Only a layer that reads the dense features makes no gradient of its input.
            assert set(site.passes) == set(PASSES) or layer.in_features == 13


def test_the_paper_sizes_of_production():
    for name, expected in (("wukong", 24), ("interformer", 28)):
        spec = resolve_model(name)
        assert spec.flops() / spec.batch / 1e9 == pytest.approx(expected, rel=0.05)


def test_the_command_writes_what_ships(tmp_path, monkeypatch, capsys):
    """What ships is a fresh capture of this model, too."""
    monkeypatch.setattr("loka_sim.zoo.specs.NAMES", (WRITTEN,))
    assert main(["--out", str(tmp_path)]) == 0
    assert modelspec.load(tmp_path / "dlrm-small.json") == resolve_model("dlrm-small"), MEND
    assert modelspec.load(tmp_path / "dlrm-small+mods.json") == zoo_with_mods("dlrm-small"), MEND
    assert "dlrm-small: 7 sites" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file")]) == UserError.exit_code

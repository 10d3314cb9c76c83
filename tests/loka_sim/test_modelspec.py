"""Model specification records and files: what is written is what is read, and what is wrong is said in one line."""

import json
import subprocess
import sys

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_sim import modelspec
from loka_sim.errors import UserError
from loka_sim.modelspec import PASSES, Dim, Gemm, ModelSpec, Site, Table
from loka_sim.specfile import SCHEMA_PATH

SMALL = {"name": "two-layers", "batch": 512, "sites": [{"name": "fc1", "m": "batch", "n": 64, "k": 13}]}


def write(tmp_path, document, name="spec.json"):
    path = tmp_path / name
    path.write_text(json.dumps(document) if name.endswith("json") else yaml.safe_dump(document))
    return path


def refusal(tmp_path, document, name="spec.json"):
    path = write(tmp_path, document, name)
    with pytest.raises(UserError) as caught:
        modelspec.load(path)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


dims = st.builds(Dim, st.integers(1, 10**6), st.integers(0, 10**4))
layouts = st.sampled_from(["row", "column", "strided"])
gemms = st.builds(Gemm, dims, dims, dims, dims, layouts, layouts)
passes = st.builds(
    lambda output, rest: {"output": output, **{key: rest[key] for key in PASSES if key in rest}},
    gemms,
    st.dictionaries(st.sampled_from(PASSES[1:]), gemms),
)
texts = st.none() | st.text(min_size=1, max_size=8)
sites = st.builds(Site, st.text(min_size=1), st.sampled_from(["linear", "bmm"]), passes, texts, st.booleans(), texts, texts)
tables = st.builds(
    Table, st.text(min_size=1), st.integers(1, 10**9), st.integers(1, 512), st.sampled_from(["none", "sum"]), st.floats(0, 1e3)
)
specs = st.builds(
    ModelSpec,
    st.text(min_size=1),
    st.integers(1, 65536),
    st.lists(sites, max_size=3, unique_by=lambda site: site.name).map(tuple),
    st.lists(tables, max_size=3, unique_by=lambda table: table.name).map(tuple),
    st.integers(0, 10**12),
    st.lists(st.text(), max_size=2).map(tuple),
    st.text(),
)


@settings(max_examples=60, deadline=None)
@given(spec=specs, suffix=st.sampled_from([".json", ".yaml", ".yml"]))
def test_what_is_saved_is_what_is_loaded(tmp_path_factory, spec, suffix):
    path = tmp_path_factory.mktemp("specs") / f"spec{suffix}"
    modelspec.save(spec, path)
    assert modelspec.load(path) == spec
    jsonschema.validate(spec.to_dict(), json.loads(SCHEMA_PATH.read_text()))


@pytest.mark.parametrize(
    ("dim", "text"),
    [(Dim(64), 64), (Dim(0, 1), "batch"), (Dim(0, 26), "26*batch"), (Dim(1, 3), "3*batch+1"), (Dim(-2, 1), "batch-2")],
)
def test_dimensions_are_written_for_people(dim, text):
    assert dim.to_json() == text
    assert Dim.parse(text) == dim


def test_dimensions_may_hold_blanks():
    assert Dim.parse(" 3 * batch + 1 ") == Dim(1, 3)


@pytest.mark.parametrize("text", ["", "Batch", "batch*26", "26batch", "-1*batch", "batch+", "2**batch", "0*batch"])
def test_other_texts_are_no_dimension(text):
    with pytest.raises(ValueError, match="no dimension"):
        Dim.parse(text)


def test_a_site_of_m_n_k_is_a_linear_layer(tmp_path):
    (site,) = modelspec.load(write(tmp_path, SMALL)).sites
    assert site.op == "linear" and site.weight == "fc1.weight"
    shapes = {key: gemm.shape(512) for key, gemm in site.passes.items()}
    assert shapes == {"output": (512, 64, 13), "grad_input": (512, 13, 64), "grad_weight": (64, 13, 512)}
    assert [site.passes[key].layout_b for key in PASSES] == ["column", "row", "row"]
    assert [site.passes[key].layout_a for key in PASSES] == ["row", "row", "column"]


@pytest.mark.parametrize(
    ("changes", "weight"),
    [
        ({"name": "fc1#2"}, "fc1.weight"),
        ({"name": "(root)"}, "weight"),
        ({"weight": "shared"}, "shared"),
        ({"weight": None}, None),
        ({"op": "mm"}, None),
        ({"groups": 4}, None),
    ],
)
def test_a_hand_written_linear_layer_multiplies_by_its_own_weight(tmp_path, changes, weight):
    (site,) = modelspec.load(write(tmp_path, with_site(**changes))).sites
    assert site.weight == weight


@pytest.mark.parametrize("name", ["spec.json", "spec.yaml"])
def test_a_bottomless_file_is_refused_in_one_line(tmp_path, name):
    path = tmp_path / name
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match="nested too deeply"):
        modelspec.load(path)


def test_yaml_and_json_say_the_same(tmp_path):
    assert modelspec.load(write(tmp_path, SMALL)) == modelspec.load(write(tmp_path, SMALL, "spec.yaml"))


LOOP = {"phase": "forward", "kind": "pointwise", "kept": "batch", "read_bytes": 8, "written_bytes": 8}


def with_site(**changes):
    return {**SMALL, "sites": [{**SMALL["sites"][0], **changes}]}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({**SMALL, "batchsize": 1}, "unknown key 'batchsize'; did you mean 'batch'?"),
        ({**SMALL, "colour": 1}, "unknown key 'colour'; known keys: schema_version, name"),
        (with_site(n=-64), "sites[0].n: -64 is less than 1; write 1 or more"),
        (with_site(n=0), "sites[0].n: 0 is less than 1"),
        (with_site(m="batc"), "sites[0].m: 'batc' is no dimension; write an integer, 'batch'"),
        (with_site(m="batch-512"), "sites[0].m: 'batch-512' is 0 at batch 512; it must be positive"),
        (with_site(m=2.5), "sites[0].m: found 2.5; write a value of type integer or string"),
        (with_site(m=True), "sites[0].m: found a boolean; write a value of type integer or string"),
        (with_site(bias="yes"), "sites[0].bias: found a text; write a value of type boolean"),
        (with_site(op="conv"), "sites[0].op: 'conv' is not one of linear, addmm"),
        (with_site(weigth="w"), "sites[0]: unknown key 'weigth'; did you mean 'weight'?"),
        (with_site(passes={"output": {"m": 1, "n": 1, "k": 1}}), "sites[0]: a site takes either 'passes' or"),
        (with_site(name=""), "sites[0].name: the text is empty; write a name"),
        ({**SMALL, "sites": [{"name": "fc1", "m": 1, "n": 1}]}, "sites[0]: a site takes either 'passes' or"),
        ({**SMALL, "sites": SMALL["sites"] * 2}, "sites[1].name: 'fc1' stands twice"),
        ({**SMALL, "sites": {}}, "sites: found an object; write a list"),
        ({**SMALL, "batch": 0}, "batch: 0 is less than 1"),
        ({**SMALL, "schema_version": 4}, "schema_version: version 4 is not known here; write 3"),
        ({**SMALL, "loops": ["sideways"]}, "loops[0]"),
        ({**SMALL, "tables": [{"name": "t", "rows": 0, "dim": 4}]}, "tables[0].rows: 0 is less than 1"),
        ({**SMALL, "tables": [{"name": "t", "rows": 2, "dim": 4}] * 2}, "tables[1].name: 't' stands twice"),
        ({**SMALL, "tables": [{"name": "t", "rows": 2, "dim": 10**30}]}, f"tables[0].dim: {10**30}; no GPU holds that"),
        ({**SMALL, "fused": [{**LOOP, "read_bytes": 10**20}]}, f"fused[0].read_bytes: {10**20} at batch 512; no GPU holds that"),
        ({**SMALL, "fused": [{**LOOP, "kept": f"{10**15}*batch"}]}, "fused[0].kept: 512000000000000000 at batch 512; no GPU"),
        ({"batch": 4, "sites": []}, "'name' is missing; add it"),
        ([1], "found a list; write an object with keys"),
    ],
)
@pytest.mark.parametrize("name", ["spec.json", "spec.yaml"])
def test_a_wrong_file_is_refused_in_one_line(tmp_path, document, said, name):
    assert refusal(tmp_path, document, name).startswith(said)


@pytest.mark.parametrize("name", ["spec.json", "spec.yaml"])
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path, name):
    whole = write(tmp_path, with_site(), name).read_text()
    path = tmp_path / name
    for end in range(0, len(whole.rstrip()) - 1):
        path.write_text(whole[:end])
        if name.endswith("yaml") and isinstance(yaml_or_none(whole[:end]), dict) and "sites" in yaml_or_none(whole[:end]):
            continue  # a YAML file cut between two lines can be whole
        with pytest.raises(UserError) as caught:
            modelspec.load(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def yaml_or_none(text):
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def test_a_key_said_twice_is_refused(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text('{"name": "a", "name": "b", "batch": 1, "sites": []}')
    with pytest.raises(UserError, match="key 'name' stands twice"):
        modelspec.load(path)
    path = tmp_path / "spec.yaml"
    path.write_text("name: a\nname: b\nbatch: 1\nsites: []\n")
    with pytest.raises(UserError, match="key 'name' stands twice"):
        modelspec.load(path)


def test_a_number_that_is_none_is_refused(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text('{"name": "a", "batch": NaN, "sites": []}')
    with pytest.raises(UserError, match="NaN is no JSON number"):
        modelspec.load(path)


def test_a_missing_file_a_folder_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        modelspec.load(tmp_path / "none.json")
    with pytest.raises(UserError, match="give a readable model spec file"):
        modelspec.load(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        modelspec.load(tmp_path / "binary.json")


def test_every_error_of_the_schema_itself_is_explained(tmp_path):
    """Any one value of a valid file replaced by any plain value: a spec, or one line; never a traceback."""
    spec = ModelSpec.from_dict(with_site(weight="fc1.weight"))
    whole = ModelSpec(**{**vars(spec), "tables": (Table("t", 4, 2),), "unaccounted": ("x",)}).to_dict()

    def places(value, path=()):
        yield path
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            yield from places(item, (*path, key))

    tried = 0
    for path in places(whole):
        for bad in (None, True, -1, 0.5, "", "nonsense", [], {}, [None], {"a": 1}):
            document = json.loads(json.dumps({"": whole}))
            holder = document
            for step in ("", *path)[:-1]:
                holder = holder[step]
            holder[("", *path)[-1]] = bad
            try:
                ModelSpec.from_dict(document[""], "file")
            except UserError as error:
                assert str(error).startswith("file: ") and "\n" not in str(error)
                tried += 1
    assert tried > 300


def test_reading_a_spec_needs_no_torch():
    code = "import sys, loka_sim.modelspec, loka_sim.specfile, jsonschema, yaml; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The exported torchao module, by loading it from a file and converting models with it."""

import importlib.util
import itertools
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import loka_sim
from loka_sim.capture import capture
from loka_sim.dispatch import torchao_plan
from loka_sim.dispatch.export import export, export_with_notes
from loka_sim.dispatch.table import from_whatif
from loka_sim.errors import DataError, UserError
from loka_sim.zoo import build, example_inputs
from perfmodel.kernels import KERNELS

pytestmark = pytest.mark.usefixtures("gemms_alone")

BF16, BLOCK = "torch/bf16", "torch/fp8_block128"
EXPRESSIBLE = (*(k for k, spec in KERNELS.items() if k.startswith("torch/fp8_") and k != BLOCK and spec.kind == "gemm"), BF16)
PASSES = ("output", "grad_input", "grad_weight")


def decision(kernel, m, n, k, runner_up=None):
    spec = KERNELS[kernel]
    return {
        "m": m, "n": n, "k": k, "groups": 1, "status": "fast" if spec.is_fp8 else "not_worth_it", "kernel": kernel,
        "recipe_a": spec.recipe_a, "recipe_b": spec.recipe_b, "accumulation": spec.accumulation,
        "predicted_us": 6.0 if spec.is_fp8 else 10.0, "predicted_low_us": 5.0, "predicted_high_us": 11.0,
        "bf16_us": 10.0, "bf16_low_us": 9.0, "bf16_high_us": 11.0, "speedup": 1.6, "mere": 0.05 if spec.is_fp8 else None,
        "sqnr_db": None, "reason": "for a test", "runner_up": runner_up,
    }  # fmt: skip


def site(name, n, k, kernels, op="linear", weight="", m=64, runner_up=None):
    shapes = dict(zip(PASSES, ((m, n, k), (m, k, n), (n, k, m)), strict=True))
    passes = {name: decision(kernel, *shapes[name], runner_up) for name, kernel in zip(PASSES, kernels, strict=False) if kernel}
    weight = f"{name.partition('#')[0]}.weight".removeprefix("(root).") if weight == "" else weight
    return {"name": name, "op": op, "weight": weight, "n": n, "k": k, "passes": passes}


def table_of(sites, name="a-model"):
    return {
        "schema_version": 1, "kind": "loka-sim/dispatch_table", "loka_sim_version": "0.1.0",
        "model": {"name": name, "source": "a test", "fingerprint": "0123456789abcdef", "batch": 64, "mods": []},
        "hardware": {"name": "NVIDIA H200", "capability": [9, 0], "perfmodel_fingerprint": "feed"},
        "policy": {"max_mere": 0.2, "min_speedup": 1.05, "statistics": "dlrm-small"},
        "sites": sites,
    }  # fmt: skip


def linears(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def table_for(model, kernels_of):
    """A table as the what-if would write it for a model of plain linear layers."""
    return table_of([site(name, *module.weight.shape, kernels_of(name, module)) for name, module in linears(model).items()])


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Import an exported table from a file of its own."""

    def from_file(table):
        path = tmp_path_factory.mktemp("export") / "fp8_training.py"
        path.write_text(export(table))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return from_file


def configured(module):
    """(kernel of each pass) as a converted module's torchao configuration says it; the test's own reading of it."""
    config = module.config
    casts = (
        (config.cast_config_input, config.cast_config_weight, config.gemm_config_output),
        (config.cast_config_grad_output, config.cast_config_weight_for_grad_input, config.gemm_config_grad_input),
        (
            config.cast_config_grad_output_for_grad_weight,
            config.cast_config_input_for_grad_weight,
            config.gemm_config_grad_weight,
        ),
    )
    found = []
    for left, right, gemm in casts:
        assert left.scaling_type == right.scaling_type and left.scaling_granularity == right.scaling_granularity
        assert left.target_dtype == right.target_dtype == torch.float8_e4m3fn
        if left.scaling_type.value == "disabled":
            found.append(BF16)
        else:
            scaling = {"tensorwise": "tensorwise", "axiswise": "rowwise"}[left.scaling_granularity.value]
            found.append(f"torch/fp8_{scaling}_{'fast' if gemm.use_fast_accum else 'split'}")
    return tuple(found)


class Tower(nn.Module):
    """A user's model: nested, one layer called twice, a custom parameter, odd names."""

    def __init__(self, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(width, 64), "down": nn.Linear(64, width)}) for _ in range(2))
        self.shared = nn.Linear(width, width)
        self.mix = nn.Parameter(torch.randn(width, width) / 6)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 16, bias=False))

    def forward(self, x):
        for block in self.blocks:
            x = x + block["down"](block["up"](x).relu())
        return self.head(self.shared(self.shared(x)) @ self.mix)


MIXED = ("torch/fp8_rowwise_fast", BF16, "torch/fp8_tensorwise_split")
ROWWISE = ("torch/fp8_rowwise_split",) * 3


def tower_kernels(name, module):
    return {"blocks.0.up": MIXED, "blocks.1.up": MIXED, "shared": ROWWISE}.get(name, (BF16,) * 3)


def test_exactly_the_tables_modules_are_converted(load):
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    model = Tower()
    table = table_for(model, tower_kernels)
    table["sites"].insert(5, site("(root)", 32, 32, (BF16,) * 3, op="matmul", weight="mix"))
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    exported = load(table)
    assert exported.convert(model) is model
    found = {name: configured(m) for name, m in model.named_modules() if isinstance(m, Float8Linear)}
    assert found == {"blocks.0.up": MIXED, "blocks.1.up": MIXED, "shared": ROWWISE}
    assert len(exported.GROUPS) == 2
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters


def captured(model, inputs, kernels_of):
    """A table whose sites are those that capture finds."""
    spec = capture(model, inputs, name="captured")
    sites = []
    for found in spec.sites:
        m, n, k = found.passes["output"].shape(spec.batch)
        kernels = kernels_of(found.name) if found.weight else (BF16,) * 3
        kept = [kernel if name in found.passes else None for name, kernel in zip(PASSES, kernels, strict=True)]
        sites.append(site(found.name, n, k, kept, op=found.op, weight=found.weight, m=m))
    return table_of(sites)


def test_captured_sites_are_found_again(load):
    """Names, shapes and parameters as capture writes them: a layer called twice, a parameter of the model itself."""
    from torchao.float8.float8_linear import Float8Linear

    model = Tower()
    exported = load(captured(model, (torch.randn(64, 32),), lambda _: ROWWISE))
    assert set(exported.SITES) == set(linears(model))
    exported.convert(model)
    converted = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert converted == set(exported.SITES)
    # The first layer's input needs no gradient, and the model computes none.
    assert configured(model.blocks[0]["up"]) == (ROWWISE[0], BF16, ROWWISE[2])

    single = nn.Linear(32, 16)
    exported = load(captured(single, (torch.randn(64, 32),), lambda _: ROWWISE))
    assert isinstance(exported.convert(single), Float8Linear)

    attention = nn.MultiheadAttention(32, 2)
    exported = load(captured(attention, (torch.randn(64, 5, 32),) * 3, lambda _: ROWWISE))
    assert exported.SITES == {} and exported.convert(attention) is attention


@pytest.mark.parametrize("name", ["dlrm-small", "dcnv2-small", "wukong-small", "interformer-small"])
def test_a_zoo_model_gets_what_its_table_says(load, name):
    from torchao.float8.float8_linear import Float8Linear

    model = build(name)
    cycle = itertools.cycle([MIXED, (BF16,) * 3, ROWWISE])
    wanted = {layer: next(cycle) for layer in linears(model)}
    table = captured(model, example_inputs(name, 512), lambda site: wanted.get(site, (BF16,) * 3))
    computed = {site["name"]: set(site["passes"]) for site in table["sites"]}
    load(table).convert(model)
    found = {layer: configured(m) for layer, m in linears(model).items() if isinstance(m, Float8Linear)}
    assert len(found) >= 4
    for layer, kernels in wanted.items():
        kernels = tuple(k if p in computed[layer] else BF16 for p, k in zip(PASSES, kernels, strict=True))
        assert found.get(layer, (BF16,) * 3) == kernels


def test_every_mix_of_kernels_is_expressed_and_runs(load):
    """All 5 x 5 x 5 mixes, each in its own layer: a pass is exact in bf16 mode and off by FP8's rounding otherwise."""
    torch.manual_seed(1)
    mixes = list(itertools.product(EXPRESSIBLE, repeat=3))
    assert len(mixes) == 125
    model = nn.ModuleList(nn.Linear(48, 32) for _ in mixes).bfloat16()
    reference = nn.ModuleList(nn.Linear(48, 32) for _ in mixes).bfloat16()
    reference.load_state_dict(model.state_dict())
    load(table_for(model, lambda name, _: mixes[int(name)])).convert(model, emulate=True)
    x, gradient = torch.randn(64, 48, dtype=torch.bfloat16), torch.randn(64, 32, dtype=torch.bfloat16)
    for kernels, layer, plain in zip(mixes, model, reference, strict=True):
        if kernels != (BF16,) * 3:
            assert configured(layer) == kernels
        results = []
        for module in (layer, plain):
            leaf = x.clone().requires_grad_()
            out = module(leaf)
            out.backward(gradient)
            results.append((out.detach(), leaf.grad, module.weight.grad))
        for kernel, got, expected in zip(kernels, *results, strict=True):
            error = ((got - expected).float().norm() / expected.float().norm()).item()
            # 3 bits of mantissa on both operands: about 0.036 for normal data; bf16 results round at 0.002.
            assert error < 0.004 if kernel == BF16 else 0.02 < error < 0.06, (kernels, kernel, error)


@pytest.mark.parametrize("mixed", [False, True])
def test_an_input_that_lies_transposed(load, mixed):
    """What fails in torchao by itself: rows of such an input are scaled, and then to be laid out anew."""
    kernels = tuple(BF16 if mixed and name == "grad_input" else f"torch/fp8_rowwise_{how}" for name, how in
                    zip(PASSES, ("fast", "split", "split"), strict=True))  # fmt: skip
    torch.manual_seed(3)
    x, weight = torch.randn(8, 32, 16).bfloat16(), torch.randn(48, 32).bfloat16()
    results = []
    for given in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):
        model = nn.Sequential(nn.Linear(32, 48, bias=False)).bfloat16()
        with torch.no_grad():
            model[0].weight.copy_(weight)
        load(table_for(model, lambda name, _: kernels)).convert(model, emulate=True)
        given = given.detach().requires_grad_()
        out = model(given)
        out.float().square().sum().backward()
        results.append((out, given.grad, model[0].weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_float32_weights_under_autocast(load):
    """What fails in torchao by itself: a backward GEMM in bf16 beside float32 weights."""
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))
    load(table_for(model, lambda name, _: MIXED)).convert(model, emulate=True)
    x = torch.randn(64, 32, requires_grad=True)
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        out = model(x)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_a_loss_falls_as_it_does_in_bf16(load):
    """Twenty steps of a user's model: the same loss within FP8's noise, and every parameter learns."""

    def train(convert):
        torch.manual_seed(2)
        model = Tower().bfloat16()
        if convert:
            table = table_for(model, lambda name, _: ROWWISE)
            table["sites"].append(site("(root)", 32, 32, (BF16,) * 3, op="matmul", weight="mix"))
            load(table).convert(model, emulate=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, target = torch.randn(64, 32, dtype=torch.bfloat16), torch.randn(64, 16, dtype=torch.bfloat16)
        losses = []
        for _ in range(20):
            loss = (model(x) - target).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain, converted = train(False), train(True)
    assert converted[-1] < 0.95 * converted[0]
    assert converted[-1] == pytest.approx(plain[-1], rel=0.02)
    assert converted != plain


def test_wrapped_models(load):
    exported = load(table_for(Tower(), tower_kernels) | {"model": table_of([])["model"] | {"name": "tower"}})
    exported.SITES.pop("mix", None)

    class Engine(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    half = Tower()
    half.blocks[0] = torch.compile(half.blocks[0], backend="eager")
    for wrapped in (
        torch.compile(Tower(), backend="eager"),
        nn.DataParallel(Tower()),
        Engine(Tower()),
        Engine(torch.compile(Tower(), backend="eager")),
        half,
    ):
        exported.convert(wrapped)
        converted = [name for name, m in wrapped.named_modules() if type(m).__name__.endswith("Float8Linear")]
        assert len(converted) == 3, converted


def test_a_module_under_two_names_stays_one(load):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.b = self.a
            self.inner = nn.Sequential(self.a, nn.ReLU())

    model = Twice()
    load(table_of([site("a", 32, 32, ROWWISE)])).convert(model)
    assert type(model.a).__name__.endswith("Float8Linear")
    assert model.a is model.b is model.inner[0]


def refused(exported, model, **arguments):
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(exported.TableMismatchError) as caught:
        exported.convert(model, **arguments)
    assert {name: type(module) for name, module in model.named_modules()} == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_another_model_is_refused_before_anything_is_converted(load):
    exported = load(table_for(Tower(), tower_kernels))
    message = refused(exported, Tower(width=48))
    assert "a-model (0123456789abcdef)" in message
    assert "blocks.0.up has (out, in) features (64, 48), the table (64, 32)" in message

    model = Tower()
    model.head[1] = nn.Identity()
    assert "head.1 is Identity, not torch.nn.Linear" in refused(exported, model)
    model = Tower()
    del model.shared
    assert "shared is missing" in refused(exported, model)
    model = Tower()
    model.extra = nn.Linear(4, 4)
    assert "extra is not in the table" in refused(exported, model)
    assert "nowhere" in refused(exported, Tower(), leave=["nowhere"])
    message = refused(exported, build("dlrm-small"))
    assert " more. Nothing was converted" in message


def test_leave_keeps_a_module_out(load):
    exported = load(table_for(Tower(), tower_kernels))
    model = Tower()
    model.extra = nn.Linear(4, 4)
    exported.convert(model, leave=("extra", "shared"))
    assert type(model.shared) is nn.Linear and type(model.blocks[0]["up"]) is not nn.Linear


class OwnForward(nn.Linear):
    """A linear layer with something of its own, which torchao's conversion would lose."""

    def forward(self, x):
        return super().forward(x) * 2


def hooked():
    layer = nn.Linear(32, 32)
    layer.register_forward_hook(lambda *_: None)
    return layer


def parametrized():
    return nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))


@pytest.mark.parametrize(
    ("make", "said"), [(lambda: OwnForward(32, 32), "own forward"), (hooked, "hooks"), (parametrized, "parametrized")]
)
def test_what_the_conversion_would_lose_is_refused(load, make, said):
    exported = load(table_for(Tower(), tower_kernels))
    model = Tower()
    model.shared = make()
    assert said in refused(exported, model)
    model.shared = nn.Linear(32, 32)
    model.blocks[0]["down"] = nn.Linear(64, 32)
    exported.convert(model)
    assert "Float8Linear" in refused(exported, model), "a second conversion is refused"


def anew(entry, kernels, us):
    """A site with what it runs instead through torchao, each pass in so many microseconds."""
    for (_, decided), kernel in zip(entry["passes"].items(), kernels, strict=True):
        spec = KERNELS[kernel]
        decided["torchao"] = {
            "kernel": kernel, "recipe_a": spec.recipe_a, "recipe_b": spec.recipe_b, "accumulation": spec.accumulation,
            "predicted_us": us, "mere": None,
        }  # fmt: skip
    return entry


def test_many_sites_that_differ_in_their_indices_alone_are_one_name_in_a_note():
    names = [f"layers.{i}.towers.{j}.up" for i in range(2) for j in range(3)] + ["layers.0.down", "layers.1.down", "top"]
    losses = tuple(torchao_plan.Loss(name, "output", "torch/fp8_block128", BF16, "so", 1.5) for name in names)
    (note,) = torchao_plan.Plan({}, frozenset(), {}, losses).notes()
    assert note == (
        "output of layers.*.towers.*.up (6 sites), layers.0.down, layers.1.down, top: torch/bf16 instead of torch/fp8_block128, "
        "13.5 us a step slower as predicted (so)"
    )
    # A star stands where they differ, and nowhere else.
    fixed = tuple(torchao_plan.Loss(f"layers.2.towers.{j}.up", "output", "a", BF16, "so", 0.0) for j in range(5))
    assert list(torchao_plan.Plan({}, frozenset(), {}, fixed).notes()) == [
        "output of layers.2.towers.*.up (5 sites): torch/bf16 instead of a (so)"
    ]


def test_what_torchao_cannot_run_is_what_was_decided_for_it(load):
    row, other = "torch/fp8_rowwise_split", "torch/fp8_tensorwise_fast"
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    sites = [
        anew(site("0", 128, 128, (BLOCK, other, BF16)), (row, row, BF16), 8.0),
        anew(site("1", 128, 128, ("loka/fp8_rowwise_fast", BF16, BF16)), (BF16, BF16, BF16), 10.0),
        anew(site("2", 128, 128, (other, BF16, BF16)), (other, BF16, BF16), 7.5),
        site("3", 128, 128, (BLOCK, BF16, BF16)),  # of a version that did not decide for torchao
    ]
    sites[2]["passes"]["output"]["quantizers"] = {"x": "loka/quantize_tensorwise_dual", "w": "torch/quantize_tensorwise"}
    result = export_with_notes(table_of(sites))
    load(table_of(sites)).convert(model)
    assert configured(model[0]) == (row, row, BF16) and configured(model[2]) == (other, BF16, BF16)
    assert type(model[1]) is nn.Linear and type(model[3]) is nn.Linear
    assert result.modules == 2
    blocks = "torchao's training scales whole tensors or rows, no blocks"
    assert result.notes == (
        "grad_input of 0: torch/fp8_rowwise_split instead of torch/fp8_tensorwise_fast, 2.0 us a step slower as predicted "
        "(its layer is decided anew among torchao's kernels)",
        "output of 1: torch/bf16 instead of loka/fp8_rowwise_fast, 4.0 us a step slower as predicted "
        "(torchao runs torch's GEMMs)",
        "output of 2: torch's quantization instead of loka/quantize_tensorwise_dual, 1.5 us a step slower as predicted "
        "(torchao casts with torch's kernels)",
        f"output of 3: torch/bf16 instead of torch/fp8_block128, 4.0 us a step slower as predicted ({blocks})",
        f"output of 0: torch/fp8_rowwise_split instead of torch/fp8_block128, 2.0 us a step slower as predicted ({blocks})",
    )
    for note in result.notes:
        assert note in " ".join(result.text.replace("\n#  ", "").split()), note


def test_what_is_no_module_stays_bf16_with_a_note(load):
    sites = [
        site("attention", 96, 32, ROWWISE, weight="attention.in_proj_weight"),
        site("attention#2", 32, 32, ROWWISE, weight="attention.out_proj.weight"),
        site("interaction", 32, 32, ("torch/fp8_rowwise_fast", None, None), op="bmm", weight=None),
        site("first", 32, 32, ROWWISE),
        site("first#2", 32, 32, ("torch/fp8_rowwise_split", BF16, "torch/fp8_rowwise_split")),
    ]
    result = export_with_notes(table_of(sites))
    text = "\n".join(result.notes)
    assert "output of attention: torch/bf16" in text and "in_proj_weight" in text
    assert "output of interaction: torch/bf16" in text and "bmm of two activations" in text
    assert "grad_input of first: torch/bf16" in text and "one configuration" in text
    assert "output of first" not in text

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 2)
            self.first = nn.Linear(32, 32)

    model = Attends()
    load(table_of(sites)).convert(model)
    assert configured(model.first) == ("torch/fp8_rowwise_split", BF16, "torch/fp8_rowwise_split")
    assert not [m for m in model.attention.modules() if type(m).__name__.endswith("Float8Linear")]


def test_one_format_per_operand(load):
    sites = [site("0", 32, 32, ROWWISE)]
    for name, key in (("grad_input", "recipe_a"), ("grad_weight", "recipe_a")):
        sites[0]["passes"][name][key] = "e5m2/rowwise"
    model = nn.Sequential(nn.Linear(32, 32))
    load(table_of(sites)).convert(model)
    assert model[0].config.cast_config_grad_output.target_dtype == torch.float8_e5m2
    assert model[0].config.cast_config_input.target_dtype == torch.float8_e4m3fn
    sites[0]["passes"]["grad_weight"]["recipe_a"] = "e4m3/rowwise"
    result = export_with_notes(table_of(sites))
    assert len(result.notes) == 1 and "grad_weight of 0: torch/bf16" in result.notes[0]


def test_one_linear_layer_is_a_model_too(load):
    model = nn.Linear(32, 32)
    converted = load(table_of([site("(root)", 32, 32, ROWWISE)])).convert(model)
    assert configured(converted) == ROWWISE and converted.weight is model.weight


def test_a_table_without_fp8_converts_nothing(load):
    model = Tower()
    exported = load(table_for(model, lambda *_: (BF16,) * 3))
    assert exported.GROUPS == () and exported.convert(model) is model
    assert {type(module) for module in linears(model).values()} == {nn.Linear}


def test_names_cannot_break_out_of_the_module(load):
    name = "a\"\"\"\n'''\\import os{}"
    table = table_of([site(name, 32, 32, ROWWISE)], name="evil\nimport sys; raise SystemExit")
    exported = load(table)
    assert list(exported.SITES) == [name] and exported.MODEL == table["model"]["name"]


def test_the_module_is_deterministic_silent_and_free_of_loka_sim(tmp_path):
    table = table_for(Tower(), tower_kernels)
    text = export(table)
    assert text == export(json.loads(json.dumps(table)))
    for fact in ("a-model", "0123456789abcdef", "batch 64", "NVIDIA H200", "feed", "0.2", "1.05", "loka-sim 0.1.0", "torchao"):
        assert fact in text.partition("\nfrom ")[0], fact
    path = tmp_path / "run" / "dispatch_table.json"
    path.parent.mkdir()
    path.write_text(json.dumps(table))
    assert export(path) == export(path.parent) == text
    assert str(tmp_path) not in text
    (tmp_path / "fp8.py").write_text(text)
    code = "import sys; import fp8; assert not [m for m in sys.modules if m.startswith(('loka_sim', 'numerics', 'perfmodel'))]"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""


def test_bad_tables_are_refused_in_one_line(tmp_path):
    table = table_for(Tower(), tower_kernels)
    path = tmp_path / "dispatch_table.json"
    path.write_text(json.dumps(table)[:-40])
    with pytest.raises(DataError, match="truncated") as caught:
        export(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="not there"):
        export(tmp_path / "none.json")
    with pytest.raises(UserError, match="unknown export target 'nccl': choose one of torchao"):
        export(table, "nccl")
    del table["sites"][1]["passes"]["output"]["kernel"]
    with pytest.raises(DataError, match=r"sites\[1\].passes.output.*kernel") as caught:
        export(table)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kernel", "torch/fp8_frobwise_fast", "'torch/fp8_frobwise_fast' is not known"),
        ("recipe_a", "e4m3/columnwise", "recipe_a is columnwise, but torch/fp8_"),
        ("accumulation", "exact", "accumulation is exact, but torch/fp8_"),
    ],
)
def test_a_table_whose_kernel_is_not_what_it_says_is_refused(field, value, message):
    table = from_whatif(loka_sim.whatif("wukong", batch=8192).to_dict())
    assert export(table)
    chosen = next(p for site in table["sites"] for p in site["passes"].values() if p["status"] == "fast")
    chosen[field] = value
    with pytest.raises(DataError, match=message):
        export(table)

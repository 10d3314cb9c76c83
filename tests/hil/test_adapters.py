"""Other libraries' kernels without the libraries and without a GPU: who is here, and how each is called."""

import logging
import subprocess
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from hil.kernels import availability as room
from hil.kernels import fbgemm
from hil.kernels.availability import absences, availability, available_kernels
from hil.kernels.base import E4M3, Shape, product_error, relative_error
from hil.kernels.deepgemm import DEEPGEMM_RUNNERS
from hil.kernels.fbgemm import FBGEMM_RUNNERS
from hil.kernels.linear import linear_runner
from hil.kernels.torch_grouped import GROUPED_RUNNERS
from hil.kernels.torchao_linear import TORCHAO_RUNNERS
from hil.kernels.transformer_engine import TE_RUNNERS
from hil.timing import BufferPool
from perfmodel.kernels import KERNELS, KernelSpec

RUNNERS = {r.name: r for r in (*FBGEMM_RUNNERS, *DEEPGEMM_RUNNERS, *GROUPED_RUNNERS, *TORCHAO_RUNNERS, *TE_RUNNERS)}
SPEC = KernelSpec("some/kernel", "gemm", requires="some-library>=1.2", module="some_library.deep")


@pytest.fixture(scope="module")
def pool() -> BufferPool:
    return BufferPool("cpu", elements=2**19)


@pytest.fixture
def installed(monkeypatch):
    """Distributions and modules that appear to be installed."""
    versions, modules = {}, set()

    def version(name):
        if name not in versions:
            raise room.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(room.metadata, "version", version)
    monkeypatch.setattr(room, "find_spec", lambda name: object() if name in modules else None)
    room._check.cache_clear()
    yield SimpleNamespace(versions=versions, modules=modules)
    room._check.cache_clear()


def test_what_needs_nothing_is_always_here(installed):
    assert availability(KERNELS["torch/bf16"]) == room.Availability(True, None, "")


@pytest.mark.parametrize(
    ("version", "module", "available", "reason"),
    [
        (None, False, False, "some-library is not installed; pip install 'some-library>=1.2'"),
        ("1.1.9", True, False, "some-library 1.1.9 is installed, some-library>=1.2 is needed; pip install 'some-library>=1.2'"),
        (
            "1.3",
            False,
            False,
            "some-library 1.3 is installed, but its module some_library.deep is not found; "
            "pip install --force-reinstall 'some-library>=1.2'",
        ),
        ("1.2", True, True, ""),
        ("2.0.dev20260101+cu130", True, True, ""),
    ],
)
def test_availability(installed, version, module, available, reason):
    if version:
        installed.versions["some-library"] = version
    if module:
        installed.modules.add("some_library")
    assert availability(SPEC) == room.Availability(available, version, reason)


def test_the_absent_are_named_once_for_each_reason(installed):
    names = ("torch/bf16", "fbgemm/fp8_rowwise_fast", "fbgemm/fp8_block128", "torchao/linear_rowwise")
    assert available_kernels(names) == ("torch/bf16",)
    lines = absences(names)
    assert len(lines) == 2
    assert "fbgemm/fp8_rowwise_fast, fbgemm/fp8_block128: fbgemm-gpu-genai is not installed" in lines[0]
    installed.versions["fbgemm-gpu-genai"] = "1.6.0"
    installed.modules.add("fbgemm_gpu")
    room._check.cache_clear()
    assert available_kernels(names) == names[:3]


def test_every_adapter_has_a_spec_that_says_what_it_needs():
    for name in RUNNERS:
        assert name in KERNELS
        assert (KERNELS[name].requires is None) == name.startswith("torch/"), name


def test_adapters_import_without_their_libraries():
    """And binding one says what is missing, as an ImportError."""
    code = """
import sys
for name in ("fbgemm_gpu", "torchao", "deep_gemm", "transformer_engine"):
    sys.modules[name] = None
from hil.kernels.base import Shape
from hil.kernels import deepgemm, fbgemm, torch_grouped, torchao_linear, transformer_engine
from hil.timing import BufferPool
pool = BufferPool("cpu", elements=2**16)
runners = fbgemm.FBGEMM_RUNNERS + deepgemm.DEEPGEMM_RUNNERS + torchao_linear.TORCHAO_RUNNERS[1:] + transformer_engine.TE_RUNNERS
for runner in runners:
    try:
        runner.bind(Shape(128, 128, 128), pool)
    except ImportError as error:
        print(runner.name, error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert len(out.splitlines()) == len(RUNNERS) - len(GROUPED_RUNNERS) - 1


def product(a, b, scale_a, scale_b):
    return ((a.double() * scale_a) @ (b.double() * scale_b).t()).bfloat16()


def spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(E4M3)


def test_fbgemm_is_loaded_without_its_warning_and_other_warnings_go_on(tmp_path, monkeypatch, caplog):
    package = tmp_path / "fbgemm_gpu" / "experimental" / "gen_ai"
    package.mkdir(parents=True)
    for folder in (package.parent.parent, package.parent):
        (folder / "__init__.py").touch()
    (package / "__init__.py").write_text("import logging\nlogging.warning('no entry for 1.6.0')\nlogging.error('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("fbgemm_gpu", "fbgemm_gpu.experimental", "fbgemm_gpu.experimental.gen_ai")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    fbgemm.load()
    for name in names:
        del sys.modules[name]
    logging.warning("mine")
    assert [record.message for record in caplog.records] == ["broken", "mine"]


@pytest.fixture
def fbgemm_operators(monkeypatch):
    """`torch.ops.fbgemm` as its source has it: what it checks of its arguments, and what it computes."""

    def rowwise(a, b, scale_a, scale_b, bias=None, use_fast_accum=True):
        assert a.dtype is b.dtype is E4M3 and a.is_contiguous() and b.is_contiguous()
        assert scale_a.shape == (a.shape[0],) and scale_b.shape == (b.shape[0],)
        assert scale_a.dtype is scale_b.dtype is torch.float32
        return product(a, b, scale_a[:, None], scale_b[:, None])

    def blockwise(a, b, scale_a, scale_b, block_m=128, block_n=128, block_k=128):
        assert (block_m, block_n, block_k) == (128, 128, 128)
        for x, scale in ((a, scale_a), (b, scale_b)):
            assert x.dtype is E4M3 and scale.dtype is torch.float32
            assert scale.shape == tuple(-(-extent // 128) for extent in x.shape)
            assert scale.is_contiguous() and scale.stride(1) == 1
        rows, columns = a.shape[0], b.shape[0]
        return product(a, b, spread(scale_a, 128, 128)[:rows], spread(scale_b, 128, 128)[:columns])

    def quantize(per_row):
        def run(x, bs=None, scale_ub=None):
            assert x.dtype is torch.bfloat16 and x.is_contiguous()
            amax = x.double().abs().amax(1) if per_row else x.double().abs().amax()
            scale = (amax / 448).float()
            return [(x.double() / (scale[:, None] if per_row else scale)).to(E4M3), scale]

        return run

    operators = SimpleNamespace(
        f8f8bf16_rowwise=rowwise,
        f8f8bf16_blockwise=blockwise,
        quantize_fp8_per_row=quantize(True),
        quantize_fp8_per_tensor=quantize(False),
    )
    monkeypatch.setattr(torch.ops, "fbgemm", operators, raising=False)
    for name in ("fbgemm_gpu", "fbgemm_gpu.experimental", "fbgemm_gpu.experimental.gen_ai"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.mark.parametrize("name", [n for n in RUNNERS if n.startswith("fbgemm/")])
def test_fbgemm_is_called_as_its_source_asks(name, fbgemm_operators, pool):
    shape = Shape(200, 256, 384)
    runner = RUNNERS[name]
    launch = runner.bind(shape, pool)
    assert runner.error(shape, pool, launch(0)) < runner.limit < runner.error(shape, pool, launch(1))


@pytest.mark.parametrize("k", [384, 128])
def test_fbgemm_scales_reach_their_operands(k, fbgemm_operators):
    shape = Shape(200, 256, k)
    a, b = e4m3(shape.m, shape.k), e4m3(shape.n, shape.k)
    scale_a, scale_b = (torch.rand(size) + 0.1 for size in fbgemm.scale_shapes(shape, block=True))
    if k == 128:
        # One column, which torch calls contiguous whatever its stride.
        scale_a, scale_b = (scale.as_strided((2, 1), (1, 2)) for scale in (scale_a, scale_b))
        assert scale_a.is_contiguous() and scale_a.stride(1) == 2
    meant = [spread(scale, 128, 128)[: x.shape[0]] * x.double() for x, scale in ((a, scale_a), (b, scale_b))]
    assert product_error(fbgemm.block128(a, b, scale_a, scale_b), *meant) < 0.01


def test_deepgemm_is_called_as_its_documentation_asks(monkeypatch, pool):
    stub, calls = ModuleType("deep_gemm"), []

    def aligned(scale):
        rows, blocks = scale.shape
        assert scale.dtype is torch.float32
        padded = torch.empty_strided((rows, blocks), (1, -(-rows // 4) * 4))
        return padded.copy_(scale)

    def fp8_gemm_nt(left, right, y, c=None, recipe=None, compiled_dims="nk", disable_ue8m0_cast=False):
        (a, scale_a), (b, scale_b) = left, right
        (m, k), n = a.shape, b.shape[0]
        assert a.dtype is b.dtype is E4M3 and a.is_contiguous() and b.is_contiguous() and b.shape == (n, k)
        assert scale_a.shape == (m, k // 128) and scale_a.stride() == (1, -(-m // 4) * 4)
        assert scale_b.shape == (-(-n // 128), k // 128) and scale_b.is_contiguous()
        assert scale_a.dtype is scale_b.dtype is torch.float32
        assert y.shape == (m, n) and y.dtype is torch.bfloat16 and y.is_contiguous()
        y.copy_(product(a, b, spread(scale_a, 1, 128), spread(scale_b, 128, 128)[:n]))
        calls.append((m, n, k))

    stub.get_mn_major_tma_aligned_tensor, stub.fp8_gemm_nt = aligned, fp8_gemm_nt
    monkeypatch.setitem(sys.modules, "deep_gemm", stub)
    runner, shape = RUNNERS["deepgemm/fp8_block128"], Shape(202, 256, 384)
    launch = runner.bind(shape, pool)
    assert runner.error(shape, pool, launch(0)) < runner.limit < runner.error(shape, pool, launch(1))
    assert calls == [(202, 256, 384)] * 2


@pytest.mark.parametrize("autocast_name", ["autocast", "fp8_autocast"])
@pytest.mark.parametrize(
    ("name", "recipe_name"),
    [("delayed", "DelayedScaling"), ("current", "Float8CurrentScaling"), ("block", "Float8BlockScaling")],
)
def test_transformer_engine_is_called_as_its_documentation_asks(monkeypatch, pool, autocast_name, name, recipe_name):
    active, used = [], []

    class Linear(nn.Linear):
        def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
            assert isinstance(device, str) and bias is False and params_dtype is torch.bfloat16
            super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)

        def forward(self, x):
            used.append(type(active[-1]).__name__)
            return super().forward(x)

    @contextmanager
    def entered(recipe):
        active.append(recipe)
        yield
        active.pop()

    parts = {part: ModuleType(part) for part in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common")}
    recipes = ModuleType("transformer_engine.common.recipe")
    for each in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"):
        setattr(recipes, each, type(each, (), {}))
    te = parts["transformer_engine.pytorch"]
    te.Linear = Linear
    if autocast_name == "autocast":
        te.autocast = lambda enabled, recipe: entered(recipe) if enabled else None
    else:
        te.fp8_autocast = lambda enabled, fp8_recipe: entered(fp8_recipe) if enabled else None
    parts["transformer_engine"].pytorch, parts["transformer_engine"].common = te, parts["transformer_engine.common"]
    parts["transformer_engine.common"].recipe = recipes
    for part, module in {**parts, "transformer_engine.common.recipe": recipes}.items():
        monkeypatch.setitem(sys.modules, part, module)
    runner, shape = RUNNERS[f"transformer_engine/linear_fp8_{name}"], Shape(64, 48, 32)
    launch = runner.bind(shape, pool)
    assert runner.error(shape, pool, launch(0)) < runner.limit < runner.error(shape, pool, launch(1))
    assert used == [recipe_name] * 2 and not active
    delattr(recipes, recipe_name)
    with pytest.raises(ImportError, match=f"no recipe {recipe_name}"):
        runner.bind(shape, pool)


def test_a_layer_returns_three_products_and_each_is_checked(pool):
    shape = Shape(64, 48, 32)
    runner = linear_runner("torch/linear_bf16", lambda layer: (layer, layer.weight))
    launch = runner.bind(shape, pool)
    first = launch(0)
    assert [tuple(t.shape) for t in first] == [(64, 48), (64, 32), (48, 32)]
    assert not any(t.requires_grad for t in first)
    assert runner.error(shape, pool, first) < 0.01
    # A second launch accumulates nothing.
    assert all(torch.equal(*pair) for pair in zip(first, launch(0), strict=True))
    other = launch(1)
    for wrong in range(3):
        mixed = [other[i] if i == wrong else first[i] for i in range(3)]
        assert runner.error(shape, pool, mixed) > runner.limit


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [n for n in RUNNERS if n.startswith("torchao/")])
def test_torchao_layers_are_converted_by_recipe(name):
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    recipe = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_gw_hp": "rowwise_with_gw_hp"}
    layer = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    compiled, parameter = RUNNERS[name].bind.args[0](layer)
    module = compiled._orig_mod
    assert isinstance(module, Float8Linear) and parameter is module.weight
    assert torch.equal(parameter, layer.weight)
    assert module.config == Float8LinearConfig.from_recipe_name(recipe[name.removeprefix("torchao/linear_")])


def test_reference_sees_transposed_and_scaled_results():
    a, b = e4m3(64, 96), e4m3(65, 96)[1:]
    right = a.double() @ b.double().t()
    assert product_error(right, a, b) == 0
    assert product_error(right.t(), a, b) > 0.5
    assert product_error(right * 1.5, a, b) == pytest.approx(0.5)
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0

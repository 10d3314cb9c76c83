"""The compiled loops are equal to the last bit to the torch code, for every recipe and every kind of number."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from numerics import cpu, quantization
from numerics.recipe import Recipe

WIDE = ("bf16", "tf32")
NAMES = [name for name in Recipe.names() if name not in WIDE]
VARIANTS = [
    "e4m3/tensorwise;scale_format=e8m0",
    "e4m3/rowwise;scale_format=e8m0;scale_rounding=ceil",
    "e5m2/columnwise;scale_format=e8m0;scale_rounding=nearest_even",
    "e4m3/block128x128;scale_format=e8m0;scale_rounding=ceil",
    *(f"{name};scale_rounding={rounding}" for name in ("mxfp8_e4m3", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")
      for rounding in ("ceil", "nearest_even")),
    "mxfp8_e4m3;scale_format=fp32",
    "mxfp8_e4m3;overflow=nonfinite",
    "mxfp8_e5m2;overflow=nonfinite",
    "e4m3;overflow=nonfinite", "e5m2;overflow=nonfinite", "e4m3fnuz;overflow=nonfinite", "fp16;overflow=nonfinite",
]  # fmt: skip
GIVEN = [f"{name};amax=given" for name in NAMES if Recipe.parse(name).block and not Recipe.parse(name).shared]
GIVEN += [f"{fmt}/rowwise;amax=given;overflow=nonfinite" for fmt in ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")]


def any_finite(rows, columns, seed):
    """Every exponent alike, both signs, subnormals, zeros of both signs, a zero row, and rows of very even size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, (rows, columns), generator=generator).to(torch.int32).view(torch.float32)
    x = torch.where(torch.isfinite(x), x, torch.full_like(x, -0.0))
    x[1] = 0
    x[2] = -0.0
    x[3] *= 2.0**-120
    normal = torch.randn(rows, columns, generator=generator) * torch.exp2(8 * torch.randn(rows, 1, generator=generator))
    x[rows // 4 : rows // 2] = normal[rows // 4 : rows // 2]
    # Halves and quarters of whole numbers: ties of every format.
    ties = torch.randint(-4096, 4096, (rows, columns), generator=generator) / 8
    x[rows // 2 : 3 * rows // 4] = ties[rows // 2 : 3 * rows // 4]
    x[rows // 2, 0] = 448  # and under a scale of one
    x[rows - 1] = 2.0**-149
    return x


@pytest.fixture
def torch_only(monkeypatch):
    """Call with the torch code alone."""

    def run(function, *args, **keywords):
        with monkeypatch.context() as patched:
            patched.setattr(cpu, "supports", lambda x, recipe: False)
            # torch's own threads spin while they wait, which takes seconds where cores are shared.
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                return function(*args, **keywords)
            finally:
                torch.set_num_threads(before)

    return run


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    assert cpu._jit() is not None
    monkeypatch.setattr(cpu, "_WORTH_IMPORTING", 0)


def same_bits(left, right):
    nan = torch.isnan(left) & torch.isnan(right)
    return torch.equal(left.view(torch.int32).where(~nan, 0), right.view(torch.int32).where(~nan, 0))


def assert_equal_paths(x, name, torch_only, **keywords):
    recipe = Recipe.parse(name)
    assert cpu.supports(x, recipe)
    made, expected = quantization.quantize(x, recipe, **keywords), torch_only(quantization.quantize, x, recipe, **keywords)
    assert same_bits(made.scales, expected.scales)
    assert torch.equal(made.codes, expected.codes)
    values = torch_only(quantization.fake_quantize, x, recipe, **keywords)
    assert same_bits(quantization.fake_quantize(x, recipe, **keywords), values)
    assert same_bits(made.dequantize(), values)
    if not keywords:
        codes, scales, both = quantization.codes_and_values(x, recipe, codes=True)
        assert torch.equal(codes, made.codes) and same_bits(scales, made.scales) and same_bits(both, values)


@pytest.mark.parametrize("name", NAMES + VARIANTS)
def test_every_recipe(name, torch_only):
    for seed in range(2):
        assert_equal_paths(any_finite(128, 384, seed), name, torch_only)
    assert_equal_paths(any_finite(256, 128, 2)[128:] * 2.0**-100, name, torch_only)
    assert_equal_paths(torch.randn(128, 256, generator=torch.Generator().manual_seed(3)), name, torch_only)


@pytest.mark.parametrize("name", GIVEN)
def test_given_amax(name, torch_only):
    x = any_finite(128, 256, 7)
    shape = quantization.scales_shape(Recipe.parse(name), *x.shape)
    generator = torch.Generator().manual_seed(1)
    for amax in (0.0, 1e-42, 3.7, 3e38, torch.exp2(40 * torch.randn(shape, generator=generator)).clamp(max=3e38)):
        assert_equal_paths(x, name, torch_only, amax=amax)


@given(hnp.arrays(np.int32, (2, 32), elements=st.integers(-(2**31), 2**31 - 1)), st.sampled_from(NAMES + VARIANTS))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_bits(patterns, name):
    if "128" in name:
        patterns = np.tile(patterns, (64, 4))
    x = torch.from_numpy(patterns).view(torch.float32)
    x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    recipe = Recipe.parse(name)
    values, expected = torch.empty_like(x), torch.empty_like(x)
    assert cpu.quantize_into(x, recipe, None, None, values=values)
    assert quantization._run_torch(x, recipe, None, None, None, None, expected)
    assert same_bits(values, expected)


@pytest.mark.parametrize("name", ["e4m3/rowwise", "e5m2/columnwise", "e4m3/block128x128", "mxfp4", "mx6", "msfp12", "e4m3"])
@pytest.mark.parametrize("threads", [1, 2])
def test_other_types_strides_and_threads(name, threads, torch_only, monkeypatch):
    monkeypatch.setattr(cpu, "_PIECE", 4096)  # many pieces
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            assert_equal_paths(x.to(dtype), name, torch_only)
        for view in (x.T, x[:, :256], x[::2], x[:1].expand(128, -1), x.view(128, 2, 384)[:, 0], x[:, ::3]):
            assert_equal_paths(view, name, torch_only)
        assert_equal_paths(torch.randn(1, 128, 2, 384)[0, :, 1], name, torch_only)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["e4m3", "e4m3/tensorwise", "e4m3/rowwise", "e4m3/columnwise", "mxfp8_e4m3", "mx9", "msfp12"])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(name):
    for value in (torch.inf, -torch.inf, torch.nan):
        for row, column in ((0, 0), (63, 95), (31, 17)):
            x = torch.ones(64, 96)
            x[row, column] = value
            with pytest.raises(ValueError, match="1 of 6144 values are not finite"):
                quantization.fake_quantize(x, name)
    x = torch.ones(64, 96, dtype=torch.float64)
    x[5, 5] = 1e300  # infinite as a float32
    with pytest.raises(ValueError, match="1 of 6144"):
        quantization.fake_quantize(x, name)


def run_python(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


SMALL_THEN_LARGE = """
import sys, torch, numerics
numerics.quantize(torch.ones(64, 64), "e4m3/rowwise")
print("numba" in sys.modules)
numerics.quantize(torch.ones(1024, 1024), "e4m3/rowwise")
print("numba" in sys.modules, "numerics.jit" in sys.modules)
"""


def test_numba_is_imported_for_large_matrices_only():
    assert run_python(SMALL_THEN_LARGE) == ["False", "True", "True"]


def test_it_works_without_numba_and_without_compilation():
    blocked = "import sys; sys.modules['numba'] = None\n"
    assert run_python(blocked + SMALL_THEN_LARGE) == ["True", "True", "False"]
    assert run_python(SMALL_THEN_LARGE, NUMBA_DISABLE_JIT="1") == ["False", "True", "False"]


def test_it_works_where_nothing_can_be_kept_on_disk():
    code = (
        "import numba.core.caching as caching\n"
        "for locator in caching.CacheImpl._locator_classes: locator.from_function = classmethod(lambda *args: None)\n"
    )
    assert run_python(code + SMALL_THEN_LARGE) == ["True", "True", "True"]


def test_it_works_where_the_disk_is_full(tmp_path):
    code = (
        "import numba.core.caching as caching\n"
        "def save(*args): raise OSError(28, 'No space left on device')\n"
        "caching.IndexDataCacheFile.save = save\n"
    )
    assert run_python(code + SMALL_THEN_LARGE, NUMBA_CACHE_DIR=str(tmp_path)) == ["True", "True", "True"]


FIRST_USED_IN_THREADS = """
import atexit, concurrent.futures, multiprocessing, os
import torch, numerics

def work(seed):
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(seed))
    return [numerics.fake_quantize(x, name).numpy().tobytes() for name in ("e4m3/rowwise", "mx9")]

if __name__ == "__main__":
    torch.set_num_threads(2)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first, other, again, _ = pool.map(work, (0, 1, 0, 1))
    print(first == again != other)
    if os.fork() == 0:
        os._exit(0 if work(0) == first else 1)
    print(os.wait()[1])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [0]) == [first])
    atexit.register(lambda: print(work(0) == first))
"""


def test_threads_processes_and_the_interpreters_end(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FIRST_USED_IN_THREADS)
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()}, timeout=120)
    assert done.stdout.split() == ["True", "0", "True", "True"], done.stderr


def test_a_second_process_reads_what_the_first_compiled(tmp_path):
    code = (
        "import torch, numerics, numerics.jit as jit\n"
        "numerics.fake_quantize(torch.ones(1024, 1024), 'e4m3/rowwise')\n"
        "stats = jit.quantize_blocks.stats\n"
        "print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))\n"
    )
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["0", "1"]
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["1", "0"]


def test_what_is_not_compiled_goes_through_torch():
    x = torch.ones(2, 32)
    for name in (*WIDE, "e4m3;rounding=stochastic", "mx9;rounding=toward_zero"):
        assert not cpu.supports(x, Recipe.parse(name))
    assert cpu.supports(x, replace(Recipe.parse("e4m3"), name="mine"))

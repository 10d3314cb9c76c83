"""What tests of several floors share."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perfmodel import data_folder


def pytest_configure() -> None:
    """Let Triton's interpreter make its functions of triton.language once a launch, not again in every function called in it."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton import language
    from triton.runtime import interpreter

    make, look_up, found = interpreter._patch_lang, interpreter._get_np_dtype, dict[str, Any]()
    nothing = interpreter._LangPatchScope()

    def make_once(function: Any) -> Any:
        seen = (language, *(value for value in function.__globals__.values() if value is language.core))
        return make(function) if any(language.core.is_builtin(module.load) for module in seen) else nothing

    def look_up_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = look_up(kind)
        return found[name]

    interpreter._patch_lang, interpreter._get_np_dtype = make_once, look_up_once


@pytest.fixture
def run_interpreted() -> Callable[[str], None]:
    """Run a test file once more in a process of its own, under Triton's interpreter: there the kernels need no GPU."""

    def run(file: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "default", file],
            env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

    return run


H100 = {
    "schema_version": 1, "name": "h100", "gpu": "NVIDIA H100 80GB HBM3", "capability": [9, 0], "peak_bf16_tflops": 829.5,
    "peak_fp8_tflops": 1551.4, "copy_bandwidth_tbs": 3.06, "l2_bytes": 50 * 2**20, "multiprocessors": 132,
}  # fmt: skip


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Data of two GPUs in place of what ships: the H200's, and an H100 of which a specification and GEMMs alone are known."""
    from loka_sim import whole_step
    from perfmodel import attention, layouts, memory_costs

    shipped, folder = data_folder() / "h200", tmp_path / "two_gpus"
    (folder / "h100" / "models").mkdir(parents=True)
    (folder / "h200").symlink_to(shipped)
    (folder / "h100" / "hardware.json").write_text(json.dumps(H100))
    for path in (shipped / "models").iterdir():
        if not path.name.startswith(("fused", "in_step", "manifest", "attention", "layouts")):
            (folder / "h100" / "models" / path.name).symlink_to(path)
    manifest = json.loads((shipped / "models" / "manifest.json").read_text())
    (folder / "h100" / "models" / "manifest.json").write_text(json.dumps({**manifest, "hardware": "h100"}))
    (folder / "h100" / "memory_costs.json").symlink_to(shipped / "memory_costs.json")
    for name in ("hardware", "fused", "collectives", "saved", "memory_costs", "layouts"):
        monkeypatch.setattr(importlib.import_module(f"perfmodel.{name}"), "data_folder", lambda: folder)
    caches = (whole_step._times, layouts.load, memory_costs.known, attention.load)
    for cache in caches:
        cache.cache_clear()
    yield folder
    for cache in caches:
        cache.cache_clear()

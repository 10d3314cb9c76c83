"""OpenBLAS is told of a processor that it does not know, and of no other."""

import os
import subprocess
import sys

import pytest

from loka_sim.processor import tell_openblas

FLAGS = "fpu sse avx2 avx512f avx512cd avx512bw avx512dq avx512vl avx512_bf16"
ZEN_5 = f"processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nflags\t\t: {FLAGS}\n\n"


@pytest.fixture
def processor(tmp_path, monkeypatch):
    """A file that describes a processor, and a process that has neither imported numpy nor set the variable."""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    return tmp_path / "cpuinfo"


def test_zen_5_is_told(processor):
    processor.write_text(ZEN_5 + ZEN_5.replace("processor\t: 0", "processor\t: 1"))
    tell_openblas(str(processor))
    assert os.environ.pop("OPENBLAS_CORETYPE") == "SkylakeX"


@pytest.mark.parametrize(
    "description",
    [
        ZEN_5.replace("26", "25"),
        ZEN_5.replace("AuthenticAMD", "GenuineIntel"),
        # A host may hide what the processor has.
        ZEN_5.replace(" avx512bw", ""),
        "",
        "no colon\n",
    ],
)
def test_others_are_left_to_it(processor, description):
    processor.write_text(description)
    tell_openblas(str(processor))
    assert "OPENBLAS_CORETYPE" not in os.environ


def test_what_the_user_says_stands_and_too_late_is_too_late(processor, monkeypatch):
    processor.write_text(ZEN_5)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    tell_openblas(str(processor))
    assert os.environ["OPENBLAS_CORETYPE"] == "Haswell"
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    monkeypatch.setitem(sys.modules, "numpy", os)
    tell_openblas(str(processor))
    tell_openblas(str(processor.with_name("none")))
    assert "OPENBLAS_CORETYPE" not in os.environ


def test_the_command_line_has_the_kernels_that_it_named():
    """On a Zen 5 numpy's library then says so; on any other processor nothing is named."""
    code = (
        "import os; from loka_sim.processor import tell_openblas; tell_openblas(); import numpy, threadpoolctl;"
        "print(os.environ.get('OPENBLAS_CORETYPE'), {one.get('architecture') for one in threadpoolctl.threadpool_info()})"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    told, _, found = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).partition(" ")
    assert told in ("None", "SkylakeX")
    assert told == "None" or "SkylakeX" in found

"""The flat API: every name is there, and what must stay light stays light."""

import subprocess
import sys

import pytest

import numerics


def test_every_name_is_found_and_is_not_a_module():
    for name in numerics.__all__:
        assert type(getattr(numerics, name)).__name__ != "module", name
    assert set(numerics.__all__) <= set(dir(numerics))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = numerics.nothing


def test_fidelity_of_no_shape():
    for shape in ((1, 2), (0, 1, 1)):
        with pytest.raises(ValueError, match="three positive whole numbers"):
            numerics.fidelity("torch/bf16", shape)


def test_light_names_bring_no_torch():
    code = (
        "import sys, numerics\n"
        "names = ('gaussian', 'sample', 'TensorStatistics', 'StatisticsAccumulator', 'GemmError', 'Recipe', 'FORMATS')\n"
        "for name in names: getattr(numerics, name)\n"
        "print([heavy for heavy in ('torch', 'scipy', 'sklearn', 'pandas') if heavy in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

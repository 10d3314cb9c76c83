"""The model that a user names: zoo, file or function; and every way to name it wrongly, in one line."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from loka_sim import modelspec
from loka_sim.capture import capture
from loka_sim.errors import UserError
from loka_sim.resolve import resolve_model, zoo_names

MODULE = """
import torch
from torch import nn
from loka_sim.modelspec import ModelSpec

CALLS = []

def small():
    return nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 1)), (torch.randn(32, 13),)

def huge():
    CALLS.append(torch.empty(0).device.type)
    return nn.Linear(1_000_000, 700_000), torch.empty(8, 1_000_000)

def reads_values():
    width = int(torch.tensor([4.0]).sum())
    return nn.Linear(width, 2), [torch.randn(8, width)]

def spec():
    return ModelSpec("mine", 4, ())

def raises():
    raise RuntimeError("no such checkpoint\\nsecond line")

def needs(argument):
    return argument

def exits():
    raise SystemExit(3)

def model_only():
    return nn.Linear(4, 4)

def branch():
    return Branch(), (torch.randn(8, 4),)

class Branch(nn.Module):
    def forward(self, x):
        return [x] * int(x.sum())

class Factory:
    @staticmethod
    def make():
        return small()

VALUE = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_models.py").write_text(MODULE)
    (tmp_path / "broken_syntax.py").write_text("def f(:\n")
    (tmp_path / "broken_import.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / "broken_body.py").write_text("1 / 0\n")
    yield tmp_path
    for name in ("user_models", "broken_syntax", "broken_import", "broken_body"):
        sys.modules.pop(name, None)


def refusal(text):
    with pytest.raises(UserError) as caught:
        resolve_model(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_zoo_models_by_name_and_a_bare_name_is_production():
    assert {"dlrm", "dcnv2", "wukong", "interformer"} == {name.rpartition("-")[0] for name in zoo_names()}
    for name in zoo_names():
        assert resolve_model(name).name == name
    assert resolve_model("wukong") == resolve_model("wukong-production")


def test_a_zoo_name_is_not_shadowed_by_a_folder(folder):
    (folder / "dlrm").mkdir()
    assert resolve_model("dlrm").name == "dlrm-production"


@pytest.mark.parametrize("name", ["spec.json", "spec.yaml", "spec.yml", "spec"])
def test_a_spec_file(folder, name):
    spec = capture(nn.Linear(4, 5), torch.randn(8, 4), name="mine")
    modelspec.save(spec, folder / name)
    assert resolve_model(name) == resolve_model(str(folder / name)) == spec


def test_a_function_of_ones_own(folder):
    spec = resolve_model("user_models:small")
    assert [site.name for site in spec.sites] == ["0", "2"]
    assert (spec.batch, spec.source, spec.name) == (32, "user_models:small", "Sequential")
    assert spec.sites[0].activation == "relu"
    assert resolve_model("user_models:Factory.make").sites == spec.sites
    assert resolve_model("user_models:spec").name == "mine"
    assert str(folder) not in sys.path


def test_a_function_in_a_package(folder):
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "pack" / "inner.py").write_text("from user_models import small\n")
    assert len(resolve_model("pack.inner:small").sites) == 2
    for name in ("pack", "pack.inner"):
        sys.modules.pop(name)


def test_a_huge_model_is_built_without_memory(folder):
    spec = resolve_model("user_models:huge")
    assert spec.dense_parameters == 1_000_000 * 700_000 + 700_000
    assert sys.modules["user_models"].CALLS == ["meta"]


def test_a_function_that_reads_values_is_called_as_written(folder):
    assert resolve_model("user_models:reads_values").sites[0].passes["output"].shape(8) == (8, 2, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wukon", "unknown model 'wukon': did you mean wukong"),
        ("gpt", "unknown model 'gpt': zoo models: dcnv2, dcnv2-production"),
        ("", "unknown model ''"),
        ("none.yaml", "none.yaml: no such file; check the path"),
        ("no_module_here:f", "no_module_here:f: no module named 'no_module_here'; run in the folder that holds"),
        ("user_models.inner:f", "user_models.inner:f: no module named 'user_models.inner'"),
        ("user_models.py:small", "user_models.py:small: no module named 'user_models.py'; write the module's name, not its file"),
        ("broken_import:f", "broken_import:f: broken_import imports 'no_such_package_anywhere', which is not installed"),
        ("broken_syntax:f", "broken_syntax:f: importing broken_syntax fails (SyntaxError:"),
        ("broken_body:f", "broken_body:f: importing broken_body fails (ZeroDivisionError: division by zero)"),
        ("user_models:smal", "user_models:smal: user_models has no 'smal'; did you mean 'small'?"),
        ("user_models:zzzz", "user_models:zzzz: user_models has no 'zzzz'; name one of its functions:"),
        ("user_models:VALUE", "user_models:VALUE: VALUE is 3, not a function"),
        ("user_models:raises", "user_models:raises: the call fails (RuntimeError: no such checkpoint)"),
        ("user_models:needs", "user_models:needs: the call fails (TypeError: needs() missing 1 required"),
        ("user_models:exits", "user_models:exits: the call fails (SystemExit: 3)"),
        ("user_models:model_only", "user_models:model_only: returned a Linear; return (model, inputs)"),
        ("user_models:branch", "user_models:branch: Branch, module (root), operation "),
        (":small", "':small': write package.module:callable"),
        ("user_models:", "'user_models:': write package.module:callable"),
    ],
)
def test_a_wrong_name_is_refused_in_one_line(folder, text, said):
    assert refusal(text).startswith(said)


def test_a_python_file_is_named_as_a_module(folder):
    assert "as in mine.model:make" in refusal("mine/model.py")
    assert "as in model:make" in refusal(str(folder / "model.py"))


def test_what_the_users_code_prints_is_no_part_of_the_answer(folder, capsys):
    (folder / "chatty.py").write_text(f"print('imported')\n{MODULE}\ndef make():\n    print('called')\n    return small()\n")
    resolve_model("chatty:make")
    assert capsys.readouterr() == ("", "imported\ncalled\n")


def test_a_current_directory_that_is_gone(folder, monkeypatch):
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "current directory is gone" in refusal("mine:small")


def test_zoo_models_and_files_need_no_torch():
    code = "import sys; from loka_sim.resolve import resolve_model; resolve_model('wukong'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0


def test_the_callers_default_device_is_left_alone(folder):
    resolve_model("user_models:small")
    assert torch.empty(0).device.type == "cpu"

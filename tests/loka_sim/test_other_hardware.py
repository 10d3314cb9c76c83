"""Answers for a GPU of which not everything was measured, and which GPU a validation is of."""

import json
from dataclasses import replace

import pytest
import torch

import loka_sim
from hil import fingerprint
from loka_sim import validation
from loka_sim.cli import main
from loka_sim.errors import DataError
from loka_sim.whole_step import borrowed, of_step
from perfmodel import hardware


def texts(answer):
    return [statement["text"] for statement in answer.to_dict()["statements"]]


def test_what_was_measured_on_another_gpu_is_said(two_gpus):
    here, there = (loka_sim.whatif("dlrm-production", gpus=16, hardware=name) for name in ("h100", "h200"))
    (said,) = [text for text in texts(here) if text.startswith("Not measured on the H100")]
    assert "fused kernels" in said and "the optimizer" in said and "They are the H200's" in said
    (travels,) = [text for text in texts(here) if text.startswith("Communication")]
    assert "hosts (hgx_h100, 400 Gb/s a GPU)" in travels and "as measured on the H200" in travels
    assert not [text for text in texts(there) if "Not measured on the" in text or "as measured on" in text]
    document = here.to_dict()
    assert "--hardware h100" in document["command"] and document["next"].count("h100") == 1 + document["verdict"]["pays"]
    # Every part of the whole step is there, and longer.
    assert [other.label for other in here.others] == [other.label for other in there.others]
    assert sum(o.time.us for o in here.others) > 1.03 * sum(o.time.us for o in there.others)


def test_a_gpu_of_the_users_own_has_its_own_bandwidth(two_gpus):
    spec, h100 = loka_sim.resolve_model("dlrm-production").at_batch(4096), hardware.load("h100")
    shipped = of_step(spec, h100)
    own = replace(h100, name="mine", gpu="Mine")
    assert of_step(spec, own) == shipped and borrowed(own) == borrowed(h100)
    assert set(borrowed(h100)) == {"h200"} and borrowed(hardware.load("h200")) == {}
    slow = of_step(spec, replace(own, copy_bandwidth_tbs=1.53))
    assert 1.1 < sum(o.time.us for o in slow) / sum(o.time.us for o in shipped) < 2
    assert of_step(spec, replace(own, capability=(10, 0))) == () == tuple(borrowed(replace(own, capability=(10, 0))))


def test_two_gpus_are_compared(two_gpus, tmp_path, capsys):
    for name in ("h100", "h200"):
        loka_sim.save_run(loka_sim.whatif("wukong-small", batch=65536, hardware=name), tmp_path / name)
    found = loka_sim.compare(tmp_path / "h100", tmp_path / "h200")
    assert found.differences["hardware"] == ("h100", "h200") and set(found.differences) == {"hardware", "time model"}
    assert main(["compare", str(tmp_path / "h100"), str(tmp_path / "h200")]) == 0
    said = capsys.readouterr().out
    assert any(line.split() == ["hardware", "h100", "h200"] for line in said.splitlines())
    bf16 = next(step for step in found.to_dict()["steps"] if step["name"] == "bf16")
    assert bf16["per_sample_ratio"] > 1.05
    page = (tmp_path / "h100" / "report.html").read_text()
    assert "H100" in page and page.count("H200") == page.count("They are the H200&#39;s") == 1


@pytest.mark.parametrize("words", [["whatif", "dlrm-small"], ["step", "dlrm-small"], ["validate", "--gpu", "dlrm-small"]])
def test_hardware_without_data_is_refused_with_what_there_is(two_gpus, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--hardware", "a100"]) == 2
    assert capsys.readouterr().err == "loka-sim: hardware 'a100' has no data; choose one of: h100, h200\n"


GPUS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200", "other": "NVIDIA H100 PCIe"}


def gpu(monkeypatch, name, capability=(9, 0)):
    """As on a machine with this GPU; with None, as on one without any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_the_shipped_gpu_of_a_machine(two_gpus, monkeypatch):
    for key, name in GPUS.items():
        gpu(monkeypatch, name)
        assert fingerprint.shipped() == ("h100" if key == "other" else key)
    gpu(monkeypatch, "NVIDIA A100-SXM4-80GB", (8, 0))
    assert fingerprint.shipped() is None
    gpu(monkeypatch, None)
    assert fingerprint.shipped() is None


class Asked:
    """In place of a validation: what it is asked."""

    def __init__(self, request, folder, before, command, budget):
        self.request, self.before = request, before

    def run(self):
        return self.request.hardware, self.before.hardware["name"]


@pytest.mark.parametrize(
    ("name", "hardware", "expected", "said"),
    [
        (GPUS["h100"], None, "h100", "predictions for h100, this machine's GPU, are held against it"),
        (GPUS["h200"], None, "h200", "predictions for h200, this machine's GPU, are held against it"),
        (GPUS["h200"], "h200", "h200", ""),
        (GPUS["h100"], "h200", "h200", "predictions for h200 (NVIDIA H200) are held against a NVIDIA H100 80GB HBM3"),
        (GPUS["other"], None, "h100", "predictions for h100 (NVIDIA H100 80GB HBM3) are held against a NVIDIA H100 PCIe"),
    ],
)
def test_a_validation_is_of_the_gpu_that_is_there(two_gpus, monkeypatch, tmp_path, capsys, name, hardware, expected, said):
    gpu(monkeypatch, name)
    monkeypatch.setattr(validation, "Validation", Asked)
    found = loka_sim.validate("dlrm-small", out=tmp_path / "new", hardware=hardware)
    assert found == (expected, expected)
    assert capsys.readouterr().err.strip() == said


def test_a_validation_that_was_begun_goes_on_with_its_own(two_gpus, monkeypatch, tmp_path, capsys):
    gpu(monkeypatch, GPUS["h100"])
    monkeypatch.setattr(validation, "Validation", Asked)
    (tmp_path / "request.json").write_text(json.dumps({"hardware": "h200"}))
    assert loka_sim.validate("dlrm-small", out=tmp_path) == ("h200", "h200")
    assert "held against a NVIDIA H100" in capsys.readouterr().err
    assert loka_sim.validate("dlrm-small", out=tmp_path, hardware="h100") == ("h100", "h100")
    (tmp_path / "request.json").write_text(json.dumps({"hardware": "gone"}))
    assert loka_sim.validate("dlrm-small", out=tmp_path) == ("h100", "h100")


def test_arguments_are_looked_at_before_the_gpu(two_gpus, monkeypatch, tmp_path, capsys):
    gpu(monkeypatch, None)
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "--gpu", "dlrm-small", "--batch", "0"]) == 2
    assert "--batch 0" in capsys.readouterr().err
    for name, capability in ((None, (9, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0))):
        gpu(monkeypatch, name, capability)
        with pytest.raises(DataError, match="no CUDA GPU here|compute capability 8.0"):
            loka_sim.validate("dlrm-small", out=tmp_path / "new")
    assert list(tmp_path.iterdir()) == [two_gpus]

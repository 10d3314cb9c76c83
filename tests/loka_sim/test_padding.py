"""Products that torch.compile pads: against its own decisions on a GPU, and what a capture and a what-if make of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from loka_sim.capture import capture
from loka_sim.capture.padding import Operand, pays, timed
from loka_sim.compare import compare
from loka_sim.modelspec import Gemm, ModelSpec, padded
from loka_sim.whatif import whatif

DECISIONS = Path(__file__).parents[2] / "data" / "h200" / "padding.json"


def operands(row):
    sides = zip((row["left"], row["right"]), row["turned"], row["written_padded"], strict=True)
    return [Operand(*s[-2:], s[0] if len(s) == 3 else 1, turned, written) for s, turned, written in sides]


def test_what_torch_decided_on_a_gpu_is_mostly_told():
    rows = json.loads(DECISIONS.read_text())["rows"]
    decided = np.array([row["padded"] for row in rows])
    told = np.array([pays(*operands(row), row["bias"]) for row in rows])
    assert len(rows) > 1000 and np.mean(told == decided) > 0.92
    # Most are not padded: those that are must be found, too.
    assert (told & decided).sum() > 0.55 * max(decided.sum(), told.sum())
    # Where it was wrong to tell otherwise by a lot, torch itself found both ways close or hung on its host.
    clear = np.array([abs(np.log(row["us"][0] / row["us"][1] / 1.1)) > np.log(2) for row in rows])
    assert np.mean((told == decided)[clear]) > 0.97


def test_times_are_what_torch_found_to_a_half():
    rows = json.loads(DECISIONS.read_text())["rows"]
    off = np.abs(np.log([timed(*operands(row), row["bias"]) for row in rows]) - np.log([row["us"] for row in rows]))
    assert np.all(np.median(off, axis=0) < np.log(1.5))


@pytest.mark.parametrize("size", [1, 8, 24, 1992])
def test_what_16_bytes_divide_is_not_padded(size):
    assert padded(size) == size and not pays(Operand(4096, size), Operand(size, 1024))


@pytest.mark.parametrize(("size", "whole"), [(2, 8), (9, 16), (1989, 1992)])
def test_a_dimension_is_padded_to_16_bytes(size, whole):
    assert padded(size) == whole


class Uneven(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(256, width), nn.Linear(width, 1024)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def wide():
    return capture(Uneven(3989), (torch.empty(4096, 256, device="meta"),), name="uneven")


def test_a_capture_says_which_passes_run_padded_and_has_the_copies(wide):
    assert not wide.untraced
    second = next(site for site in wide.sites if site.name == "second")
    assert {name for name, gemm in second.passes.items() if gemm.padded} == {"output", "grad_input", "grad_weight"}
    output = second.passes["output"]
    assert output.shape(4096) == (4096, 1024, 3989) and output.shape_in_bf16(4096) == (4096, 1024, 3992)
    # The weight of 3,989 columns is copied for the forward; what makes the other operand writes it padded.
    copies = [kernel for kernel in wide.fused if "constant_pad_nd" in kernel.label]
    assert any(kernel.kept.at(4096) == 1024 * 3992 for kernel in copies)
    assert any(kernel.kept.at(4096) == 4096 * 3992 for kernel in copies)


def test_a_file_keeps_what_is_padded(wide, tmp_path):
    document = wide.to_dict()
    again = ModelSpec.from_dict(json.loads(json.dumps(document)))
    assert again.sites == wide.sites
    assert Gemm.from_dict(Gemm.to_dict(wide.sites[1].passes["output"])).padded


def test_small_products_are_not_padded():
    spec = capture(Uneven(61), (torch.empty(512, 256, device="meta"),))
    assert not spec.untraced and not any(gemm.padded for site in spec.sites for gemm in site.passes.values())


def test_a_batch_that_8_does_not_divide_is_traced_at_two_batches_like_it():
    spec = capture(Uneven(3989), (torch.empty(4100, 256, device="meta"),))
    assert not spec.untraced
    gemm = next(site for site in spec.sites if site.name == "second").passes["output"]
    assert gemm.padded and gemm.shape_in_bf16(4100) == (4104, 1024, 3992)


def test_bf16_takes_the_time_of_the_padded_product(wide, tmp_path):
    answer = whatif(wide, batch=4096)
    site = next(site for site in answer.sites if site.site.name == "second")
    (row,) = [row for row in site.shape.bf16_rows if row[1:3] == (4096, 1024)]
    assert row[1:] == (4096, 1024, 3992, 1)
    assert site.passes["output"].bf16.us == answer.times.of[row].us
    document = answer.to_dict()
    entry = next(entry for entry in document["sites"] if entry["name"] == "second")
    assert entry["passes"]["output"]["padded"] == [4096, 1024, 3992] and entry["passes"]["output"]["k"] == 3989
    file = tmp_path / "whatif.json"
    file.write_text(json.dumps(document))
    assert not compare(file, file).changes

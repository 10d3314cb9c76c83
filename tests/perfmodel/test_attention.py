"""Times of torch's fused attention: against timed calls, and what must hold whatever was timed."""

import json

import numpy as np
import pandas as pd
import pytest

from hil.attention import drawn, tabulated
from perfmodel import attention, hardware
from perfmodel.attention import BACKWARD, FORWARD, KINDS, PADDED, label_of, sizes_of
from perfmodel.data_folder import data_folder
from perfmodel.fit_attention import held_out, matrix_of

H200 = hardware.load("h200")
MODEL = attention.load(H200)
TABLE = pd.read_parquet(data_folder() / "h200" / "attention.parquet")


@pytest.mark.parametrize(("padded", "most", "p90"), [("", 0.07, 0.13), (PADDED, 0.15, 0.33)])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_the_costs_never_saw_are_near(kind, padded, most, p90):
    rows = TABLE[(TABLE["kind"] == kind) & (TABLE["padded"] == bool(padded))]
    us = rows["p50_us"].to_numpy()
    error = np.abs(held_out(matrix_of(kind + padded, rows), us) / us - 1)
    assert error.mean() < most and np.quantile(error, 0.9) < p90
    said = json.loads((data_folder() / "h200" / "models" / attention.FILE).read_text())["kinds"][kind + padded]
    assert said["mape"] == pytest.approx(error.mean(), rel=1e-6) and said["n"] == len(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_more_takes_longer_and_half_of_it_less(kind):
    def us(samples, tokens, features, causal=False):
        return MODEL.times(kind, label_of(tokens, tokens, features, causal), samples * tokens)[0]

    assert us(512, 256, 64) < us(1024, 256, 64) < us(1024, 512, 64) < us(1024, 512, 128)
    assert 0.45 * us(1024, 1024, 64) < us(1024, 1024, 64, causal=True) < 0.75 * us(1024, 1024, 64)
    low, high = (MODEL.times(kind, label_of(256, 256, 64, False), 256 * 512)[end] for end in (1, 2))
    assert low < us(512, 256, 64) < high


@pytest.mark.parametrize("kind", KINDS)
def test_padded_heads_take_longer(kind):
    """As on an H200: 150 tokens in 12 features, padded to 16, ran in 729 us forward, cuDNN's of 16 in about half."""
    plain, padded = (MODEL.times(kind, label_of(150, 150, 16, True, which), 9344 * 150)[0] for which in (False, True))
    assert 1.1 * plain < padded < 3 * plain


def test_names_say_the_sizes_and_others_are_refused():
    assert sizes_of(label_of(200, 100, 64, True)) == (200, 100, 64, True) and sizes_of("attention:8x9x16") == (8, 9, 16, False)
    assert sizes_of(label_of(20, 20, 16, True, padded=True)) == (20, 20, 16, True) and label_of(8, 8, 8, False, True).endswith(
        PADDED
    )
    for wrong in ("attention", "softmax:8x8x8", "attention:8x8", "attention:8x8x8:whole"):
        with pytest.raises(ValueError, match="write it as attention:"):
            sizes_of(wrong)


def test_a_file_of_another_version_is_refused(tmp_path, monkeypatch):
    (tmp_path / "h200" / "models").mkdir(parents=True)
    (tmp_path / "h200" / "hardware.json").write_text((data_folder() / "h200" / "hardware.json").read_text())
    (tmp_path / "h200" / "models" / attention.FILE).write_text('{"schema_version": 99}')
    monkeypatch.setattr(hardware, "data_folder", lambda: tmp_path)
    attention.load.cache_clear()
    try:
        with pytest.raises(ValueError, match="schema version 99"):
            attention.load(H200)
    finally:
        attention.load.cache_clear()


def test_what_was_timed_is_tabulated():
    sizes = {"x": 16 * 4 * 200, "r0_": 100 * 64}
    row = {"family": "attention_backward:200x200x64:causal", "sizes": sizes, "time_us": 12.5, "problem": ""}
    (found,) = tabulated([row, {**row, "family": "partials"}]).to_dict("records")
    assert found == {
        "kind": BACKWARD, "groups": 64, "queries": 200, "keys": 200, "features": 64, "causal": True, "padded": False,
        "p50_us": 12.5,
    }  # fmt: skip
    assert len(set(drawn(50))) == 50 and drawn(50) == drawn(50) and {FORWARD, BACKWARD} == set(TABLE["kind"])

"""What kernels and collectives that run at once cost each other."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import hardware, overlap
from perfmodel.gemm_plan import plan_of
from perfmodel.overlap import HELD, Kernels, OverlapModel
from perfmodel.topology import OPS

H100 = hardware.load("h100")


def shipped():
    return overlap.load(H100)


def some_kernels(us, peak=0.3, bandwidth=0.5, tiles=0.0):
    us = np.atleast_1d(np.asarray(us, dtype=float))
    return Kernels(us, *(np.full(len(us), value) for value in (peak, bandwidth, tiles)))


def planted(rows=400, seed=3):
    """A table in which memory-bound kernels take 1.2 times as long, longer ones less, and collectives the square of that."""
    rng = np.random.default_rng(seed)
    m = rng.integers(2**10, 2**20, rows)
    alone = m / 2.0**10
    slower = np.exp(0.4 - 0.03 * np.log2(alone))
    size = rng.choice([2**24, 2**27], rows)
    return pd.DataFrame(
        {
            "kernel": "loka/quantize_rowwise", "m": m, "n": 1, "k": 1024, "groups": 1, "op": rng.choice(OPS, rows), "ranks": 2,
            "bytes_per_rank": size, "tiles": 0.0, "alone_us": alone, "beside_us": alone * slower, "exchange_alone_us": 100.0,
            "exchange_beside_us": 100.0 * slower**2,
        }
    )  # fmt: skip


def test_a_planted_law_is_found():
    model = OverlapModel(H100, planted(), H100)
    for us in (2.0, 30.0, 700.0):
        known = model.table[(model.table["alone_us"] / us - 1).abs() < 0.2].iloc[0]
        share = 3 * known["m"] * 1024 / (known["alone_us"] * H100.copy_bandwidth_tbs * 1e6)
        own, exchange = model.slower(some_kernels(known["alone_us"], 0.0, share), known["op"], 100.0)
        assert own.item() == pytest.approx(known["beside_us"] / known["alone_us"], rel=0.01)
        assert exchange.item() == pytest.approx(known["exchange_beside_us"] / 100, rel=0.02)
    errors = (model.held_out["told_slower"] / model.held_out["slower"] - 1).abs()
    # The shortest and the longest are left out, too, and nothing lies beyond them.
    assert errors.quantile(0.99) < 0.01 and errors.max() < 0.05


@pytest.mark.parametrize(("gpu", "ranks"), [("h100", {2, 4}), ("h200", {2})])
def test_pairs_that_were_not_seen_are_told(gpu, ranks):
    """Held out by whole shapes; measured pairs slow by 1.02 to 2.1 and 1.03 to 30 times, so that one figure for all is worse."""
    found = overlap.load(hardware.load(gpu)).held_out
    for name, most in (("slower", 0.06), ("exchange_slower", 0.115)):
        off = (found[f"told_{name}"] / found[name] - 1).abs()
        one = (found[name].median() / found[name] - 1).abs()
        assert off.mean() < min(most, 0.55 * one.mean())
    assert set(found["ranks"]) == ranks


def test_a_collective_waits_for_a_long_kernel():
    """While a GEMM of many waves holds every multiprocessor a collective that is called waits for its end."""
    model = overlap.load(hardware.load("h200"))
    long, short = (model.slower(some_kernels(us, 0.9, 0.2, tiles), "all_reduce", 90.0) for us, tiles in ((2000, 3500), (60, 100)))
    assert long[1] > 10 > 3 > short[1]
    assert long[0] < 1.1 < short[0]


def test_nothing_runs_faster_beside_another():
    rng = np.random.default_rng(0)
    asked = Kernels(10.0 ** rng.uniform(-2, 5, 500), rng.uniform(0, 2, 500), rng.uniform(0, 3, 500), rng.integers(0, 10**6, 500))
    for op in OPS:
        for us in (1e-3, 300.0, 1e9):
            own, exchange = shipped().slower(asked, op, us)
            assert (own >= 1).all() and (exchange >= 1).all() and np.isfinite([own, exchange]).all()
            assert own.max() < 4 and exchange.max() < 40


def test_beyond_what_was_measured_the_nearest_counts():
    model = shipped()
    longest = float(model.table["alone_us"].max())
    for a, b in ((longest, 100 * longest), (1e-3, 1e-2)):
        assert model.slower(some_kernels([a, b]), "all_reduce", 500.0)[0].std() == 0
    longest = float(model.table["exchange_alone_us"].max())
    first, second = (model.slower(some_kernels(50.0), "all_reduce", us)[1].item() for us in (longest, 50 * longest))
    assert first == second


def test_one_wave_that_becomes_two_takes_longer_than_many_that_become_more():
    processors = H100.multiprocessors
    full, left = (some_kernels(60.0, 0.7, 0.3, tiles) for tiles in (processors, processors - HELD["all_reduce"]))
    assert shipped().slower(full, "all_reduce", 500.0)[0] > 1.1 * shipped().slower(left, "all_reduce", 500.0)[0]


def test_a_collective_holds_as_many_multiprocessors_as_its_table_says():
    """GEMMs take longer by the waves that they become on what 60 blocks leave of a GPU; shapes that were not there follow."""
    rng = np.random.default_rng(5)
    tiles = rng.integers(1, 600, 300).astype(float)
    waves = [np.ceil(tiles / (H100.multiprocessors - held)) for held in (0, 60)]
    table = planted(300).assign(kernel="torch/bf16", n=1024, tiles=tiles, op="all_reduce", blocks=60)
    table["alone_us"] = 20 * waves[0]
    table["beside_us"] = 20 * waves[1]
    knowing, not_knowing = OverlapModel(H100, table, H100), OverlapModel(H100, table.drop(columns="blocks"), H100)
    off = [(model.held_out["told_slower"] / model.held_out["slower"] - 1).abs().mean() for model in (knowing, not_knowing)]
    assert off[0] < 0.5 * off[1]


def test_tiles_are_those_of_the_kernel():
    one = [np.array([float(size)]) for size in (4096, 1024, 512, 1)]
    assert overlap.tiles("loka/quantize_rowwise", *one).item() == 0
    assert overlap.tiles("fbgemm/fp8_rowwise_fast", *one).item() == 32 * 8
    plan = plan_of(4096, 1024, 512, True)
    programs = -(-4096 // plan.rows) * -(-1024 // plan.columns) * plan.parts
    assert programs / overlap.tiles("loka/fp8_rowwise_fast", *one).item() in (1, 2, 3, 4)
    # 256 along N and 128 along M, in clusters of 1 x 2.
    parts = np.array([[256, 128, 12, 1, 0, 1, 0, 0]])
    assert overlap.tiles("torch/bf16", *one, parts).item() == 4 * 32
    told = overlap.told_tiles(perfmodel.load("h100"), "torch/bf16", *one).item()
    assert 4096 * 1024 / (320 * 256) <= told <= 4096 * 1024 / (64 * 64)


def test_whose_pairs_serve(tmp_path):
    h200 = hardware.load("h200")
    assert overlap.load(h200).measured_on == h200
    assert overlap.load(replace(h200, name="h20", copy_bandwidth_tbs=3.0)).measured_on in (H100, h200)
    assert overlap.load(hardware.HardwareSpec("b", "B", (10, 0), 1.0, 2.0, 3.0, 4, 5)) is None
    (tmp_path / "perfmodel").mkdir()
    planted().to_parquet(tmp_path / "perfmodel" / overlap.FILE_NAME)
    assert len(overlap.load(H100, tmp_path).table) == 400
    assert perfmodel.load("h100").overlap.ranks == [2, 4]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda table, path: path.write_bytes(b"no parquet"), "is no table of pairs"),
        (lambda table, path: table.drop(columns="tiles").to_parquet(path), "lacks the column tiles"),
        (lambda table, path: table.iloc[:0].to_parquet(path), "holds no row"),
    ],
)
def test_a_damaged_table_is_named(tmp_path, damage, message):
    (tmp_path / "perfmodel").mkdir()
    damage(planted(), tmp_path / "perfmodel" / overlap.FILE_NAME)
    with pytest.raises(ValueError, match=message):
        overlap.load(H100, tmp_path)


def test_what_is_no_collective_is_named():
    with pytest.raises(ValueError, match="'pack' is no collective; give one of all_to_all"):
        shipped().slower(some_kernels(10.0), "pack", 100.0)

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import collectives
from perfmodel.collectives import LARGE_BYTES, CollectiveModel, half_width
from perfmodel.topology import Cluster, preset


@pytest.fixture(scope="module")
def measured() -> CollectiveModel:
    return collectives.load("h200")


def one(model: CollectiveModel, op: str, ranks: int, size: float, cluster=None, **columns) -> tuple[float, float, float]:
    frame = pd.DataFrame([{"op": op, "ranks": ranks, "bytes_per_rank": size, **columns}])
    return tuple(model.predict(frame, cluster).iloc[0])


def test_measured_rows_come_back(measured):
    rows = measured.table
    rows = rows[rows["op"].isin(["all_to_all", "all_reduce", "reduce_scatter", "all_gather"])]
    predicted = measured.predict(rows)
    assert list(predicted.columns) == ["time_us", "low_us", "high_us"]
    assert predicted.index.equals(rows.index)
    off = np.abs(predicted["time_us"] / rows["p50_us"] - 1)
    # All but the few that were measured faster than a smaller size of theirs.
    assert (off < 1e-9).mean() > 0.9 and off.max() < 0.1
    assert (measured.basis(rows) == "interpolated").all()


def test_held_out_sizes_are_within_what_is_stated():
    """Each whole message size taken out of the table, and predicted by what the rest of it says."""
    rows = collectives.load("h200").table
    rows = rows[rows["op"].isin(["all_to_all", "all_reduce", "reduce_scatter", "all_gather"])]
    errors, inside, large = [], [], []
    for size in sorted(set(rows["bytes_per_rank"])):
        out = rows["bytes_per_rank"] == size
        predicted = CollectiveModel("h200", rows[~out]).predict(rows[out])
        truth = rows.loc[out, "p50_us"]
        errors.append(np.abs(predicted["time_us"] / truth - 1))
        inside.append((predicted["low_us"] <= truth) & (truth <= predicted["high_us"]))
        large.append(np.full(len(truth), size >= LARGE_BYTES))
    error, covered, is_large = (np.concatenate(parts) for parts in (errors, inside, large))
    assert error[is_large].mean() <= 0.05
    assert error[~is_large].mean() <= 0.15
    assert 0.8 <= covered.mean() <= 0.98


def test_intervals_widen_beyond_the_largest_size_with_distance(measured):
    frame = pd.DataFrame([{"op": "all_to_all", "ranks": 4, "bytes_per_rank": 2.0**exponent} for exponent in range(29, 37)])
    found = measured.predict(frame)
    widths = np.log(found["high_us"] / found["low_us"]).tolist()
    assert widths == sorted(widths) and widths[-1] > 2 * widths[0]


def test_the_largest_size_lies_in_the_interval_of_a_table_that_ends_below_it(measured):
    rows = measured.table
    rows = rows[rows["op"].isin(["all_to_all", "all_reduce", "reduce_scatter", "all_gather"])]
    top = rows.groupby(["op", "dtype"])["bytes_per_rank"].transform("max")
    asked = rows[rows["bytes_per_rank"] == top]
    found = CollectiveModel("h200", rows[rows["bytes_per_rank"] <= top / 4]).predict(asked)
    truth = asked["p50_us"]
    assert ((found["low_us"] <= truth) & (truth <= found["high_us"])).mean() >= 0.85
    assert (found["time_us"] / truth - 1).abs().mean() < 0.06


def test_half_width_is_the_conformal_quantile():
    assert half_width(np.arange(1, 20)) == 18  # ceil(20 * 0.9) = 18th of 19
    assert half_width([1.0, 2.0]) == 2.0  # too few for 90%: the widest


def test_unmeasured_ranks_take_as_long_for_as_many_bytes_and_say_so(measured):
    """2 and 4 ranks were measured. 8 send 7/8 of the buffer, 4 send 3/4; more ranks never take less for equal wire bytes."""
    for op in ("all_to_all", "all_reduce", "reduce_scatter", "all_gather"):
        for size in (2.0**16, 2.0**24, 2.0**28):
            time, low, high = one(measured, op, 8, size)
            of_four = one(measured, op, 4, size * (7 / 8) / (3 / 4))[0]
            assert of_four <= time <= of_four + 20
            four = one(measured, op, 4, size)
            assert np.log(high / low) > np.log(four[2] / four[1])
            frame = pd.DataFrame([{"op": op, "ranks": 8, "bytes_per_rank": size}])
            assert measured.basis(frame).tolist() == ["extrapolated"]


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_eight_ranks_against_nccls_published_bandwidth(measured, op):
    """370 GB/s of the bus on eight H100 of a host with rings (github.com/NVIDIA/nccl-tests, issue 212), in the interval."""
    size = 2.0**32
    on_the_bus = size * (2 if op == "all_reduce" else 1) * 7 / 8
    time, low, high = one(measured, op, 8, size)
    assert on_the_bus / time / 1e3 == pytest.approx(370, rel=0.15)
    assert low <= on_the_bus / 370e3 <= high


def test_four_ranks_from_two_alone_lie_in_the_interval_that_their_difference_makes(measured):
    """The interval of unmeasured ranks is made from the step between measured ones: it must hold that step."""
    rows = measured.table
    rows = rows[(rows["dtype"] == "bf16") & (rows["split"] == "equal") & (rows["op"] != "copy")]
    four = rows[(rows["ranks"] == 4) & (rows["bytes_per_rank"] >= 2**20)]
    without = CollectiveModel("h200", rows[rows["ranks"] == 2])
    # It has one number of ranks alone: it cannot know how far another may be.
    with pytest.raises(ValueError, match="between one number of ranks only"):
        without.predict(four)
    inside = []
    for row in four.itertuples():
        key = next(key for key in without.curves if (key.op, key.groups) == (row.op, 1))
        ratio = without.curves[key](row.bytes_per_rank * 1.5)[0] / row.p50_us
        # The table of both says how wide eight ranks must be told: what the step from two to four was off by.
        time, low, high = one(measured, row.op, 8, row.bytes_per_rank)
        inside.append(low / time <= ratio <= high / time)
    assert np.mean(inside) >= 0.85


def test_the_further_the_ranks_from_measured_ones_the_wider(measured):
    cluster = Cluster("island", nic_gbps=400, gpus_per_host=64)
    widths = [np.log(high / low) for _, low, high in (one(measured, "all_gather", r, 2.0**26, cluster) for r in (4, 8, 16, 64))]
    assert widths == sorted(widths) and widths[3] > 2 * widths[1]


def test_groups_never_measured_are_as_those_that_were(measured):
    frame = {"op": "all_gather", "ranks": 4, "bytes_per_rank": 2.0**22}
    alone = one(measured, "all_gather", 4, 2.0**22)
    assert one(measured, "all_gather", 4, 2.0**22, groups=2)[0] == alone[0]
    assert measured.basis(pd.DataFrame([{**frame, "groups": 2}])).tolist() == ["extrapolated"]


@pytest.mark.parametrize("dtype", ["fp8_rowwise", "fp8_rowwise_unfused"])
def test_compressed_between_measured_dims(measured, dtype):
    rows = measured.table
    rows = rows[(rows["op"] == "all_to_all") & (rows["dtype"] == dtype) & (rows["ranks"] == 4) & (rows["groups"] == 1)]
    by_dim = rows[rows["bytes_per_rank"] == 2**24].set_index("dim")["p50_us"]
    share = np.log(96 / 64) / np.log(2)
    expected = by_dim[64] ** (1 - share) * by_dim[128] ** share
    assert one(measured, "all_to_all", 4, 2**24, dtype=dtype, dim=96)[0] == pytest.approx(expected)


def test_codec_and_plain_exchange_add_up_to_the_compressed_one(measured):
    """What stands for unmeasured settings, held against the measured ones: quantize, send fewer bytes, dequantize."""
    rows = measured.table
    rows = rows[(rows["dtype"] == "fp8_rowwise") & (rows["op"] == "all_to_all") & (rows["bytes_per_rank"] >= LARGE_BYTES)]
    parts = measured.table[measured.table["dtype"] == "fp8_rowwise"].set_index(["op", "dim", "bytes_per_rank"])["p50_us"]
    ratios = []
    for row in rows.itertuples():
        codec = parts["pack", row.dim, row.bytes_per_rank].item() + parts["unpack", row.dim, row.bytes_per_rank].item()
        travels = row.bytes_per_rank * (row.dim + 4) / row.dim / 2
        ratios.append((codec + one(measured, "all_to_all", row.ranks, travels, groups=row.groups)[0]) / row.p50_us)
    assert np.mean(np.abs(np.array(ratios) - 1)) < 0.05
    eight = one(measured, "all_to_all", 8, 2.0**24, dtype="fp8_rowwise", dim=128)[0]
    plain = one(measured, "all_to_all", 8, 2.0**24 * 132 / 256)[0]
    assert eight == pytest.approx(parts["pack", 128, 2**24].item() + parts["unpack", 128, 2**24].item() + plain, rel=1e-9)


def test_beyond_the_largest_size_bandwidth_goes_on(measured):
    top = one(measured, "all_reduce", 4, 2**30)[0]
    twice = one(measured, "all_reduce", 4, 2**31)[0]
    assert 1.8 * top < twice < 2.05 * top
    frame = pd.DataFrame([{"op": "all_reduce", "ranks": 4, "bytes_per_rank": size} for size in (2**30, 2**31)])
    assert measured.basis(frame).tolist() == ["interpolated", "extrapolated"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"op": "broadcast"}, "broadcast/bf16 was not measured on h200; there are: all_gather/bf16"),
        ({"op": "pack", "dtype": "fp8_rowwise", "dim": 64}, "pack/fp8_rowwise was not measured"),
        ({"op": "all_reduce", "dtype": "fp8_rowwise"}, "all_reduce/fp8_rowwise was not measured"),
        ({"dtype": "fp8_rowwise"}, "give dim, 64 to 512"),
        ({"dtype": "fp8_rowwise", "dim": 32}, "dim 32: .* from dim 64 to 512"),
        ({"split": "random"}, "split random: .* with split equal, uneven"),
        ({"split": "uneven", "ranks": 16}, "known with split equal only"),
        ({"ranks": 1}, "ranks = 1; give a whole number, 2 or more"),
        ({"ranks": 2.5}, "ranks = 2.5; give a whole number, 2 or more"),
        ({"ranks": True}, "ranks = True; give a whole number, 2 or more"),
        ({"groups": True}, "groups = True; give a whole number, 1 or more"),
        ({"groups": 1.5}, "groups = 1.5; give a whole number, 1 or more"),
        ({"dim": 64.5}, "dim = 64.5; give a whole number, 0 or more"),
        ({"per_host": True}, "per_host = True; give a whole number, 0 or more"),
        ({"bytes_per_rank": True}, "bytes_per_rank must be positive and finite"),
        ({"bytes_per_rank": 1e300}, "bytes_per_rank must be positive and finite, and below"),
        ({"ranks": 1e30}, "ranks = 1e[+]30; give a whole number, 2 or more, below"),
        ({"groups": 1e19}, "groups = 1e[+]19; give a whole number, 1 or more, below"),
        ({"ranks": 12}, "ranks 12: hosts of hgx_h200 hold 8 of them each; give a multiple of 8"),
        ({"ranks": 8192}, "at most 4,096 GPUs"),
        ({"groups": 0}, "groups = 0; give a whole number, 1 or more"),
        ({"groups": 3}, "groups 3: a host of 8 GPUs has room for 2 with 4 each"),
        ({"groups": 2, "ranks": 16}, "groups 2: a host of 8 GPUs has room for 1 with 8 each"),
        ({"groups": 5, "ranks": 16, "per_host": 2}, "groups 5: a host of 8 GPUs has room for 4 with 2 each"),
        ({"per_host": 16, "ranks": 16}, "per_host 16: hosts of hgx_h200 have 8 GPUs"),
        ({"bytes_per_rank": 0}, "bytes_per_rank must be positive"),
        ({"bytes_per_rank": float("nan")}, "bytes_per_rank must be positive"),
    ],
)
def test_what_cannot_be_said_is_named(measured, columns, message):
    frame = pd.DataFrame([{"op": "all_to_all", "ranks": 4, "bytes_per_rank": 2**20, **columns}])
    with pytest.raises(ValueError, match=message):
        measured.predict(frame)


def test_a_frame_without_what_is_needed(measured):
    with pytest.raises(ValueError, match=r"lacks the columns \['ranks'\]"):
        measured.predict(pd.DataFrame({"op": ["all_reduce"], "bytes_per_rank": [1]}))
    assert len(measured.predict(pd.DataFrame({"op": [], "ranks": [], "bytes_per_rank": []}))) == 0
    frame = pd.DataFrame({"op": ["all_reduce"], "ranks": [4], "bytes_per_rank": [1]})
    with pytest.raises(ValueError, match="has the column 'ranks' more than once"):
        measured.predict(pd.concat([frame, frame[["ranks"]]], axis=1))
    with pytest.raises(ValueError, match="by a DataFrame, not a dict"):
        measured.predict(frame.to_dict("list"))


def test_what_a_column_leaves_open_is_the_default_whatever_its_type(measured):
    frame = pd.DataFrame({"op": pd.Categorical(["all_to_all"] * 2), "ranks": 4, "bytes_per_rank": 2**20})
    usual = measured.predict(frame)
    for kind in ("category", "object", "string"):
        asked = frame.assign(dtype=pd.Series(["fp16", None], dtype=kind), groups=pd.array([None, 1], dtype="Int64"))
        assert measured.predict(asked).iloc[1].equals(usual.iloc[1])
        assert not measured.predict(asked).iloc[0].equals(usual.iloc[0])


def test_a_gpu_without_a_known_cluster_stays_inside_a_host(measured):
    other = CollectiveModel("my-gpu", measured.table)
    assert one(other, "all_reduce", 8, 2**20)[0] > 0
    with pytest.raises(ValueError, match="ranks 16: no cluster is known for my-gpu; give hgx_h100, hgx_h200 or"):
        one(other, "all_reduce", 16, 2**20)
    assert one(other, "all_reduce", 16, 2**20, preset("hgx_h200"))[0] > 0


def test_a_table_of_the_older_layout_is_read(tmp_path, monkeypatch, measured):
    (tmp_path / "old").mkdir()
    rows = measured.table
    rows = rows[(rows["dtype"] == "bf16") & (rows["split"] == "equal") & (rows["groups"] == 1) & (rows["op"] != "copy")]
    rows.drop(columns=["split", "dim"]).to_parquet(tmp_path / "old" / "collectives.parquet")
    monkeypatch.setattr(collectives, "data_folder", lambda: tmp_path)
    assert one(collectives.load("old"), "all_reduce", 4, 2**20)[0] == one(measured, "all_reduce", 4, 2**20)[0]


def test_a_calibrations_own_table_comes_first(tmp_path, measured):
    (tmp_path / "perfmodel").mkdir()
    assert collectives.load("h200", tmp_path).table.equals(measured.table)
    measured.table.assign(p50_us=2 * measured.table["p50_us"]).to_parquet(tmp_path / "perfmodel" / "collectives.parquet")
    own = collectives.load("h200", tmp_path)
    assert one(own, "all_gather", 4, 2**22)[0] == pytest.approx(2 * one(measured, "all_gather", 4, 2**22)[0])
    (tmp_path / "perfmodel" / "collectives.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="is no table of collectives"):
        collectives.load("h200", tmp_path)
    measured.table.drop(columns="ranks").to_parquet(tmp_path / "perfmodel" / "collectives.parquet")
    with pytest.raises(ValueError, match="lacks the column ranks"):
        collectives.load("h200", tmp_path)


def test_the_time_model_answers_for_collectives(measured):
    model = perfmodel.load("h200")
    frame = pd.DataFrame(
        {"op": "all_to_all", "dtype": ["bf16", "fp8_rowwise"], "ranks": 4, "groups": 1, "bytes_per_rank": 2**24, "dim": 128}
    )
    pd.testing.assert_frame_equal(model.predict_collective(frame), measured.predict(frame))


def test_hardware_without_collectives():
    with pytest.raises(FileNotFoundError, match="no collective was measured on mi300"):
        collectives.load("mi300")

import numpy as np
import pytest

from perfmodel import collectives
from perfmodel.step import COMMON_DEVIATION, combine


def test_combine_against_sampling():
    """Independent kernel errors plus one in common, sampled: the 90% interval of the sum."""
    generator = np.random.default_rng(0)
    times = np.exp(generator.uniform(1, 6, 30))
    deviation = 0.05 * times
    low, high = times - 1.6449 * deviation, times + 1.6449 * deviation
    draws = times + deviation * generator.standard_normal((200_000, 30))
    sums = draws.sum(axis=1) * (1 + COMMON_DEVIATION * generator.standard_normal(200_000))
    total, below, above = combine(times, low, high)
    assert total == pytest.approx(times.sum())
    assert below == pytest.approx(np.quantile(sums, 0.05), rel=2e-3)
    assert above == pytest.approx(np.quantile(sums, 0.95), rel=2e-3)


def test_combine_of_nothing_is_nothing():
    assert combine(np.array([]), np.array([]), np.array([])) == (0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def measured() -> collectives.CollectiveModel:
    return collectives.load("h200")


def test_collectives_at_and_between_measured_sizes(measured):
    rows = measured.table
    for op in ("all_to_all", "all_reduce", "reduce_scatter", "all_gather"):
        kind = (rows["op"] == op) & (rows["dtype"] == "bf16") & (rows["split"] == "equal")
        series = rows[kind & (rows["ranks"] == 4)].sort_values("bytes_per_rank")
        for row in series.itertuples():
            assert measured.predict(op, 4, row.bytes_per_rank) == pytest.approx(row.p50_us)
        first, second = series.iloc[-2], series.iloc[-1]
        middle = measured.predict(op, 4, np.sqrt(first.bytes_per_rank * second.bytes_per_rank))
        assert middle == pytest.approx(np.sqrt(first.p50_us * second.p50_us))
    assert measured.predict("all_reduce", 2, 1) == measured.predict("all_reduce", 2, rows["bytes_per_rank"].min())


@pytest.mark.parametrize(
    ("op", "ranks", "size", "dtype", "message"),
    [
        ("all_to_all", 3, 1024, "bf16", "not 3"),
        ("all_to_all", 4096, 1024, "bf16", "of one host, not 4096"),
        ("all_to_all", 4, 2**40, "bf16", "beyond the 1,024 MiB"),
        ("broadcast", 4, 1024, "bf16", "broadcast/bf16 was not measured"),
        ("all_reduce", 4, 1024, "fp8_rowwise", "all_reduce/fp8_rowwise was not measured"),
        ("all_to_all", 4, 1024, "fp8_rowwise", "give dim, 64 to 512"),
    ],
)
def test_what_was_not_measured_has_no_figure(measured, op, ranks, size, dtype, message):
    with pytest.raises(ValueError, match=message):
        measured.predict(op, ranks, size, dtype)


@pytest.mark.parametrize("dtype", ["fp8_rowwise", "fp8_rowwise_unfused"])
def test_compressed_at_and_between_measured_dims(measured, dtype):
    rows = measured.table
    rows = rows[(rows["op"] == "all_to_all") & (rows["dtype"] == dtype) & (rows["ranks"] == 4) & (rows["groups"] == 1)]
    size = 2**24
    by_dim = rows[rows["bytes_per_rank"] == size].set_index("dim")["p50_us"]
    assert set(by_dim.index) == {64, 128, 256, 512}
    for dim, time in by_dim.items():
        assert measured.predict("all_to_all", 4, size, dtype, dim=dim) == pytest.approx(time)
    between = measured.predict("all_to_all", 4, size, dtype, dim=96)
    share = np.log(96 / 64) / np.log(2)
    assert between == pytest.approx(by_dim[64] ** (1 - share) * by_dim[128] ** share)


def test_groups_and_splits_are_told_apart(measured):
    rows = measured.table
    for groups, split in ((1, "equal"), (2, "equal"), (1, "uneven"), (2, "uneven")):
        kind = (rows["op"] == "all_to_all") & (rows["dtype"] == "bf16") & (rows["ranks"] == 2) & (rows["bytes_per_rank"] == 2**26)
        row = rows[kind & (rows["groups"] == groups) & (rows["split"] == split)]
        assert len(row) == 1
        assert measured.predict("all_to_all", 2, 2**26, groups=groups, split=split) == pytest.approx(row["p50_us"].item())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 3}, "groups 3: all_to_all between 2 GPUs was measured on h200 in 1, 2 groups"),
        ({"split": "random"}, "split random: .* with split equal, uneven"),
        ({"dtype": "fp8_rowwise", "dim": 32}, "dim 32: .* from dim 64 to 512"),
        ({"dtype": "fp8_rowwise", "dim": 1024}, "dim 1024"),
        ({"dtype": "fp8_rowwise", "dim": 64, "split": "uneven"}, "split uneven: all_to_all/fp8_rowwise"),
    ],
)
def test_settings_not_measured_are_named(measured, options, message):
    with pytest.raises(ValueError, match=message):
        measured.predict("all_to_all", 2, 2**20, **options)


def test_a_dim_is_of_no_effect_where_no_scale_is(measured):
    assert measured.predict("all_to_all", 4, 2**20, dim=128) == measured.predict("all_to_all", 4, 2**20)


def test_a_table_of_the_older_layout_is_read(tmp_path, monkeypatch, measured):
    (tmp_path / "old").mkdir()
    rows = measured.table
    rows = rows[(rows["dtype"] == "bf16") & (rows["split"] == "equal") & (rows["groups"] == 1)]
    rows.drop(columns=["split", "dim"]).to_parquet(tmp_path / "old" / "collectives.parquet")
    monkeypatch.setattr(collectives, "data_folder", lambda: tmp_path)
    assert collectives.load("old").predict("all_reduce", 4, 2**20) == measured.predict("all_reduce", 4, 2**20)


def test_hardware_without_collectives():
    with pytest.raises(FileNotFoundError, match="no collective was measured on mi300"):
        collectives.load("mi300")

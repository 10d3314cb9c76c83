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
        series = rows[(rows["op"] == op) & (rows["ranks"] == 4)].sort_values("bytes_per_rank")
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
        ("all_to_all", 4, 1024, "fp8_rowwise", "fp8_rowwise was not measured"),
    ],
)
def test_what_was_not_measured_has_no_figure(measured, op, ranks, size, dtype, message):
    with pytest.raises(ValueError, match=message):
        measured.predict(op, ranks, size, dtype)


def test_hardware_without_collectives():
    with pytest.raises(FileNotFoundError, match="no collective was measured on mi300"):
        collectives.load("mi300")

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from perfmodel import collectives
from perfmodel.compression import SIZES, gain, pays_from, pays_up_to_gbps
from perfmodel.topology import preset


@pytest.fixture(scope="module")
def model():
    return collectives.load("h200")


def test_inside_a_host_it_pays_where_the_measured_rows_say(model):
    rows = model.table[(model.table["op"] == "all_to_all") & (model.table["ranks"] == 4) & (model.table["split"] == "equal")]
    times = rows.pivot_table(index="bytes_per_rank", columns=["dtype", "dim"], values="p50_us")
    for dim in (64, 128, 256, 512):
        ratio = times["bf16", 0] / times["fp8_rowwise", dim]
        last_loss = max(size for size, value in ratio.dropna().items() if value <= 1)
        assert last_loss < pays_from(model, 4, dim) <= 2 * last_loss


def test_from_the_size_on_it_is_faster_and_just_below_it_is_not(model):
    size = pays_from(model, 64, 128)
    assert (gain(model, SIZES[size <= SIZES], 64, 128) > 1).all()
    assert gain(model, np.array([SIZES[size > SIZES][-1]]), 64, 128)[0] <= 1


def test_slow_links_pay_from_smaller_sizes(model):
    slow, fast = (replace(preset("hgx_h200"), nic_gbps=gbps) for gbps in (50.0, 3200.0))
    assert pays_from(model, 64, 128, slow) < pays_from(model, 64, 128) < pays_from(model, 64, 128, fast)


def test_the_fastest_link_that_pays_by_hand(model):
    """Where the network bounds both: the codec takes as long as the link gains on the bytes that need not travel."""
    cluster = replace(preset("hgx_h200"), nic_efficiency=1.0)
    size, dim, ranks = 2.0**20, 128, 64
    speed = pays_up_to_gbps(model, ranks, dim, size, cluster)
    halves = model.table[(model.table["dtype"] == "fp8_rowwise") & (model.table["dim"] == dim)]
    codec = halves[halves["bytes_per_rank"].eq(size) & halves["op"].isin(["pack", "unpack"])]["p50_us"].sum()
    saved = size * (ranks - 8) / ranks * (1 - (dim + 4) / (2 * dim))
    assert speed == pytest.approx(saved / codec / 125, rel=0.01)
    at = [gain(model, np.array([size]), ranks, dim, replace(cluster, nic_gbps=speed * factor))[0] for factor in (0.99, 1.01)]
    assert at[0] > 1 > at[1]


def test_where_the_network_does_not_decide(model):
    assert pays_up_to_gbps(model, 8, 128, 2.0**26) is None  # inside one host
    assert pays_up_to_gbps(model, 64, 128, 2.0**27) == float("inf")  # NVLink alone is slow enough
    # A few bytes at any speed: the codec's launches take longer than the bytes.
    assert pays_up_to_gbps(model, 64, 128, 1.0) is None


def test_without_a_known_cluster(model):
    other = collectives.CollectiveModel("my-gpu", model.table)
    with pytest.raises(ValueError, match="no cluster is known for my-gpu"):
        pays_up_to_gbps(other, 64, 128, 2.0**24)
    with pytest.raises(ValueError, match="give dim"):
        gain(model, np.array([1e6]), 4, 0)


def test_gain_is_the_ratio_of_predictions(model):
    frame = pd.DataFrame(
        [{"op": "all_to_all", "ranks": 16, "bytes_per_rank": 2.0**22, "dtype": d, "dim": 64} for d in ("bf16", "fp8_rowwise")]
    )
    plain, compressed = model.predict(frame)["time_us"]
    assert gain(model, np.array([2.0**22]), 16, 64)[0] == plain / compressed

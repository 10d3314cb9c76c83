"""Collectives over hosts against closed forms: bytes over the narrowest link, steps times latency, and limits."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import collectives
from perfmodel.topology import PRESETS, Cluster, from_dict, preset, route, wire

OPS = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")
HUGE = 2.0**36
"""Bytes per rank beside which no latency counts."""


@cache
def loaded():
    return collectives.load("h200")


@pytest.fixture
def model():
    return loaded()


def time_us(model, op, ranks, size, cluster, **columns):
    frame = pd.DataFrame([{"op": op, "ranks": ranks, "bytes_per_rank": size, **columns}])
    return model.predict(frame, cluster)["time_us"].item()


@pytest.mark.parametrize("ranks", [16, 64, 512, 4096])
def test_a_large_all_to_all_takes_what_leaves_the_host_over_one_card(model, ranks):
    cluster = preset("hgx_h100")
    card = 400e9 / 8 * 0.94 / 1e6  # bytes per us
    expected = HUGE * (ranks - 8) / ranks / card
    assert time_us(model, "all_to_all", ranks, HUGE, cluster) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("hosts", "measured_gbs"), [(2, 90.0), (4, 61.0)])
def test_all_to_all_against_deepeps_published_bandwidth(model, hosts, measured_gbs):
    """H100-class hosts with ConnectX-7 400 Gb/s: DeepEP's README states the buffer's bytes over time, local ones included."""
    size = 2.0**31
    found = size / time_us(model, "all_to_all", 8 * hosts, size, preset("hgx_h100")) / 1e3
    assert found == pytest.approx(measured_gbs, rel=0.07)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_large_reduction_on_a_slow_network_takes_its_bytes_over_all_cards_of_a_host(model, op):
    cluster = replace(preset("hgx_h200"), nic_gbps=50.0, nic_efficiency=1.0, algorithms=("ring",))
    for ranks in (16, 128, 1024):
        bytes_on_a_ring = HUGE * (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
        all_cards = 8 * 50e9 / 8 / 1e6
        assert time_us(model, op, ranks, HUGE, cluster) == pytest.approx(bytes_on_a_ring / all_cards, rel=2e-3)


@pytest.mark.parametrize("op", OPS)
def test_an_infinitely_fast_network_leaves_the_hosts_own_time(model, op):
    cluster = replace(preset("hgx_h200"), nic_gbps=1e12, hop_us=0.0, host_hop_us=0.0, message_us=0.0, algorithms=("ring",))
    for ranks in (16, 4096):
        for size in (2.0**20, 2.0**26, HUGE):
            # As many bytes as cross NVLink: every rank's share of a ring of all ranks; all of the exchange goes by rail.
            inside = size if op == "all_to_all" else size * ((ranks - 1) / ranks) / (7 / 8)
            assert time_us(model, op, ranks, size, cluster) == pytest.approx(time_us(model, op, 8, inside, cluster), rel=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_one_host_needs_no_network(model, op):
    slow = replace(preset("hgx_h200"), nic_gbps=0.001, hop_us=1e6)
    for ranks in (2, 4, 8):
        assert time_us(model, op, ranks, 2**24, slow) == time_us(model, op, ranks, 2**24, preset("hgx_h200"))


def test_latency_of_rings_and_trees_by_counting_steps():
    cluster = Cluster("c", nic_gbps=400, hop_us=7.0, host_hop_us=0.5)

    def latency(op, ranks, island, algorithm):
        return route(cluster, op, ranks, island, algorithm).latency_us

    # A ring of 64 in 8 hosts: a lap of 63 steps, 8 of them between hosts; 7 inside are in the host's own time.
    assert latency("reduce_scatter", 64, 8, "ring") == pytest.approx(8 * 7.0 + (63 - 8 - 7) * 0.5)
    assert latency("all_gather", 64, 8, "ring") == latency("reduce_scatter", 64, 8, "ring")
    assert latency("all_reduce", 64, 8, "ring") == pytest.approx(2 * latency("reduce_scatter", 64, 8, "ring"))
    # A tree over 8 hosts has 3 levels, up and down; its chains inside hosts are as long as the host's own ring.
    assert latency("all_reduce", 64, 8, "tree") == pytest.approx(2 * 3 * 7.0)
    # One rank in each host: all steps are between hosts.
    assert latency("all_gather", 16, 1, "ring") == pytest.approx(15 * 7.0)


def test_a_tree_wins_small_all_reduces_and_a_ring_large_ones(model):
    both = replace(preset("hgx_h200"), nic_gbps=100.0)
    ring, tree = (replace(both, algorithms=names) for names in (("ring",), ("ring", "tree")))
    small, large = 2.0**16, HUGE
    assert time_us(model, "all_reduce", 512, small, tree) < 0.2 * time_us(model, "all_reduce", 512, small, ring)
    assert time_us(model, "all_reduce", 512, large, both) == time_us(model, "all_reduce", 512, large, ring)
    # Gathers have rings alone.
    assert time_us(model, "all_gather", 512, small, both) == time_us(model, "all_gather", 512, small, ring)


def test_a_hierarchy_is_its_three_phases(model):
    cluster = replace(preset("hgx_h200"), algorithms=("hierarchical",))
    plain = replace(cluster, algorithms=("ring", "tree"))
    size = 2.0**26
    phases = [
        time_us(model, "reduce_scatter", 8, size, plain),
        time_us(model, "all_reduce", 64, size / 8, plain, per_host=1),
        time_us(model, "all_gather", 8, size, plain),
    ]
    assert time_us(model, "all_reduce", 512, size, cluster) == pytest.approx(sum(phases))
    # At scale it saves a gather the long way round the ring.
    assert time_us(model, "all_gather", 512, size, cluster) < time_us(model, "all_gather", 512, size, plain)


def test_one_rank_a_host_sends_over_its_own_card(model):
    cluster = replace(preset("hgx_h200"), algorithms=("ring",))
    card = 400e9 / 8 * 0.94 / 1e6
    expected = HUGE * 2 * 15 / 16 / card
    assert time_us(model, "all_reduce", 16, HUGE, cluster, per_host=1) == pytest.approx(expected, rel=1e-3)


def test_oversubscription_slows_what_leaves_the_leaf(model):
    """Rails of 32 hosts are 256 GPUs; of 1,024 ranks three quarters of the exchange cross the spine."""
    free = preset("hgx_h200")
    assert free.leaf_hosts == 32
    narrow = replace(free, oversubscription=4.0)
    assert time_us(model, "all_to_all", 256, HUGE, narrow) == time_us(model, "all_to_all", 256, HUGE, free)
    card = 400e9 / 8 * 0.94 / 1e6
    assert time_us(model, "all_to_all", 1024, HUGE, narrow) == pytest.approx(HUGE * 0.75 * 4 / card, rel=1e-3)
    # One leaf for all cards of a host holds an eighth of the hosts.
    assert replace(free, rails=1).leaf_hosts == 4
    # A ring crosses a leaf's border once, and all of the uplink serves it.
    assert time_us(model, "all_reduce", 1024, HUGE, narrow) == time_us(model, "all_reduce", 1024, HUGE, free)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    op=st.sampled_from(OPS), hosts=st.integers(2, 512), exponent=st.floats(10, 34), gbps=st.floats(1, 3200),
    rails=st.sampled_from([1, 2, 4, 8]), oversubscription=st.floats(1, 16),
)  # fmt: skip
def test_never_faster_than_its_links_nor_slower_with_more(op, hosts, exponent, gbps, rails, oversubscription):
    model = loaded()
    cluster = Cluster("c", nic_gbps=gbps, rails=rails, oversubscription=oversubscription)
    ranks, size = 8 * hosts, 2.0**exponent
    frame = pd.DataFrame([{"op": op, "ranks": ranks, "bytes_per_rank": factor * size} for factor in (1, 1.5)])
    first, second = model.predict(frame, cluster).itertuples(index=False)
    out = (ranks - 8) / ranks if op == "all_to_all" else wire(op, ranks) / 8
    assert first.time_us >= size * out / (gbps * 125) * 0.999
    assert second.time_us >= first.time_us * 0.999
    assert 0 < first.low_us <= first.time_us <= first.high_us
    faster = model.predict(frame, replace(cluster, nic_gbps=2 * gbps))["time_us"]
    assert (faster <= np.array([first.time_us, second.time_us]) * 1.001).all()


def test_presets_are_hosts_of_eight_with_400_gbps_a_gpu():
    assert set(PRESETS) == {"hgx_h100", "hgx_h200"}
    for cluster in PRESETS.values():
        assert (cluster.gpus_per_host, cluster.nic_gbps, cluster.oversubscription) == (8, 400.0, 1.0)
        # 46 to 49 GB/s a card is what NCCL's engineers state.
        assert 46e3 <= cluster.nic_bytes_per_us <= 49e3


def test_a_file_may_start_from_a_preset():
    found = from_dict({"name": "mine", "preset": "hgx_h200", "oversubscription": 2, "algorithms": ["ring"]})
    assert found == replace(preset("hgx_h200"), name="mine", oversubscription=2, algorithms=("ring",))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "no table of fields"),
        ({"name": "c"}, "nic_gbps is missing; write it, in Gb/s a GPU"),
        ({"nic_gbps": 400}, "name is missing"),
        ({"name": "", "nic_gbps": 400}, "name '' is no text"),
        ({"name": "c", "nic_gpbs": 400}, "unknown field 'nic_gpbs'; write nic_gbps"),
        ({"name": "c", "preset": "dgx_a100"}, "cluster 'dgx_a100' is unknown; choose one of hgx_h100, hgx_h200"),
        ({"name": "c", "nic_gbps": "fast"}, "nic_gbps 'fast' is no number above 0"),
        ({"name": "c", "nic_gbps": True}, "nic_gbps True is no number"),
        ({"name": "c", "nic_gbps": math.nan}, "nic_gbps nan is no number"),
        ({"name": "c", "nic_gbps": 400, "nic_efficiency": 0}, "nic_efficiency 0 is no number above 0 and at most 1"),
        ({"name": "c", "nic_gbps": 400, "host_step_us": 0}, "host_step_us 0 is no number above 0 and at most 1e"),
        ({"name": "c", "nic_gbps": 400, "host_step_us": "slow"}, "host_step_us 'slow' is no number above 0 and at most 1e"),
        ({"name": "c", "nic_gbps": 400, "oversubscription": 0.5}, "oversubscription 0.5 is no number at least 1"),
        ({"name": "c", "nic_gbps": 400, "gpus_per_host": 0}, "gpus_per_host 0 is no positive integer"),
        ({"name": "c", "nic_gbps": 400, "gpus_per_host": 4, "rails": 8}, "rails 8 does not divide the 4 GPUs"),
        ({"name": "c", "nic_gbps": 400, "rails": 1, "leaf_ports": 4}, "leaf_ports 4 is less than one host's cards"),
        ({"name": "c", "nic_gbps": 400, "algorithms": ["star"]}, "algorithms holds 'star'; choose of ring, tree, hierarchical"),
        ({"name": "c", "nic_gbps": 400, "algorithms": "ring"}, "algorithms 'ring' is no list of names"),
        ({"name": "c", "nic_gbps": 400, "algorithms": ["tree"]}, "a tree can only reduce to all; add ring"),
        ({"name": "c", "nic_gbps": 400, "algorithms": []}, "an empty list"),
    ],
)
def test_a_wrong_field_is_named_with_its_mend(document, message):
    with pytest.raises(ValueError, match=message):
        from_dict(document)

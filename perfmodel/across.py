"""Collectives over several hosts: the host's part as measured inside one, the network's part by its links.

Both parts move pieces of the message at the same time, so that the slower one counts; what launching takes and the
latencies of the network come on top.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfmodel.collectives import CollectiveModel, Estimate, Setting, compression, plain
from perfmodel.curves import Array
from perfmodel.topology import Cluster, Route, route, wire


def across(model: CollectiveModel, cluster: Cluster, setting: Setting, island: int, sizes: Array) -> Estimate:
    """Times of a collective whose ranks fill several hosts alike.

    Args:
        model: Collectives inside a host.
        cluster: The network.
        setting: op, dtype, dim and ranks.
        island: Ranks in each host.
        sizes: Bytes per rank.

    Raises:
        ValueError: an uneven split, which is known inside a host only.
    """
    if setting.split != "equal":
        raise ValueError(f"split {setting.split}: an all-to-all over several hosts is known with split equal only")
    if setting.dim:
        travels = across(model, cluster, plain(setting), island, sizes * compression(setting.dim))
        return model.codec(setting, sizes).plus(travels)
    if setting.op == "all_to_all":
        return _on_route(model, cluster, setting, island, sizes, "ring")
    options = []
    for name in cluster.algorithms:
        if name == "hierarchical" and island > 1:
            options.append(_in_phases(model, cluster, setting, island, sizes))
        elif name == "ring" or (name == "tree" and setting.op == "all_reduce"):
            options.append(_on_route(model, cluster, setting, island, sizes, name))
    if not options:  # one rank in each host: a hierarchy has nothing to do inside
        options.append(_on_route(model, cluster, setting, island, sizes, "ring"))
    fastest = np.argmin([option.time for option in options], axis=0)
    time, low, high, beyond = (np.choose(fastest, list(column)) for column in zip(*options, strict=True))
    return Estimate(time, low, high, beyond)


def _on_route(model: CollectiveModel, cluster: Cluster, setting: Setting, island: int, sizes: Array, algorithm: str) -> Estimate:
    path = route(cluster, setting.op, setting.ranks, island, algorithm)
    floor, host = _host(model, cluster, setting, island, sizes, algorithm)
    ends = []
    for time, network in ((host.time, 1.0), (host.low, 1 - cluster.uncertainty), (host.high, 1 + cluster.uncertainty)):
        # What launching takes is as uncertain as the host's part of it.
        base = floor * time / host.time
        ends.append(base + np.maximum(time - base, network * network_us(cluster, path, sizes)) + network * path.latency_us)
    return Estimate(ends[0], ends[1], ends[2], host.extrapolated)


def network_us(cluster: Cluster, path: Route, sizes: Array) -> Array:
    """Time of the bytes on the network's narrowest link."""
    return sizes * max(path.nic, path.spine) / cluster.nic_bytes_per_us


def _host(
    model: CollectiveModel, cluster: Cluster, setting: Setting, island: int, sizes: Array, algorithm: str
) -> tuple[float, Estimate]:
    """What launching takes, and the part inside each host with it."""
    floor = model.floor(setting)
    if island == 1:
        none = np.full(len(sizes), floor)
        return floor, Estimate(none, none, none, np.zeros(len(sizes), dtype=bool))
    inside = setting._replace(ranks=island, groups=1)
    if setting.op != "all_to_all":
        crossing = 2.0 if algorithm == "tree" else wire(setting.op, setting.ranks)
        share = crossing / wire(setting.op, island)
    else:
        # On its way to the card of its rail, what leaves the host crosses NVLink as what stays does.
        share = 1.0 if cluster.rails > 1 else island / setting.ranks
    return floor, model.inside(inside, sizes * share)


def _in_phases(model: CollectiveModel, cluster: Cluster, setting: Setting, island: int, sizes: Array) -> Estimate:
    """Inside the host, across hosts on each rail, inside the host: one after the other."""
    hosts = setting.ranks // island
    between = setting._replace(ranks=hosts, groups=1)
    network = across(model, replace(cluster, algorithms=("ring", "tree")), between, 1, sizes / island)
    phases = {"all_reduce": ("reduce_scatter", "all_gather")}.get(setting.op, (setting.op,))
    for op in phases:
        network = network.plus(model.inside(setting._replace(op=op, ranks=island, groups=1), sizes))
    return network

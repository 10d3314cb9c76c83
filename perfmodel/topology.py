"""A cluster's links, and what a collective sends over each of them: closed forms, no measurement.

A host is an island of GPUs joined by NVLink. Every GPU has its share of the host's network cards; cards reach leaf
switches, leaves reach each other over a spine. With several rails the cards of one host go to as many leaves, and a
message to another rail crosses NVLink before it leaves (NCCL's PXN), so that it stays on one rail.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MOST_GPUS = 4096
"""Largest cluster that can be asked about."""

HOST_GPUS = 8
"""GPUs of an HGX host."""

OPS = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS = ("ring", "tree", "hierarchical")


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal GPUs and the network between them.

    Attributes:
        name: What to call it.
        nic_gbps: Network line rate a GPU has to itself, one direction, in Gb/s.
        gpus_per_host: GPUs that NVLink joins.
        nic_efficiency: Share of the line rate that a large message reaches. NVIDIA's NCCL engineers expect 46 to 49 GB/s
            of a 400 Gb/s card (github.com/NVIDIA/nccl-tests, issues 267 and 290).
        rails: Leaf switches that a host's cards are spread over; 1 where all go to one.
        leaf_ports: Cards on one leaf switch.
        oversubscription: A leaf's bandwidth to its cards over that to the spine; 1 is none.
        hop_us: One step of a ring or tree from host to host, in microseconds. NCCL's tuning model has 2.7 to 8.5 for its
            low-latency protocols (src/graph/tuning.cc).
        host_hop_us: One step inside a host of a ring that spans hosts; NCCL's tuning model has 1.0 (network overhead).
        message_us: Posting one message to one peer; NCCL's tuning model has 1.0 on Intel and 2.0 on AMD hosts.
        algorithms: What reductions and gathers may use across hosts: `ring` and `tree` as NCCL does, the faster one;
            `hierarchical` for jobs that reduce inside the host first by themselves.
        uncertainty: Share by which the network's part may be off either way, for 90% intervals: an assumption, since no
            measurement of this network stands behind it.
        host_step_us: What a host takes for the step that tells how fast it launches kernels, in microseconds (`python -m
            hil.host`); None where that is not known.
    """

    name: str
    nic_gbps: float
    gpus_per_host: int = HOST_GPUS
    nic_efficiency: float = 0.94
    rails: int = 8
    leaf_ports: int = 32
    oversubscription: float = 1.0
    hop_us: float = 5.0
    host_hop_us: float = 1.0
    message_us: float = 1.0
    algorithms: tuple[str, ...] = ("ring", "tree")
    uncertainty: float = 0.25
    host_step_us: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no cluster can be.

        Raises:
            ValueError: a field is out of range; one line that names it and the mend.
        """
        for name in ("gpus_per_host", "rails", "leaf_ports"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"cluster {self.name}: {name} {value!r} is no positive integer")
        ranges = {
            "nic_gbps": (0.0, math.inf), "nic_efficiency": (0.0, 1.0), "oversubscription": (1.0, math.inf),
            "hop_us": (0.0, 1e6), "host_hop_us": (0.0, 1e6), "message_us": (0.0, 1e6), "uncertainty": (0.0, 0.99),
            **({} if self.host_step_us is None else {"host_step_us": (0.0, 1e6)}),
        }  # fmt: skip
        positive = ("nic_gbps", "nic_efficiency", "host_step_us")
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not least <= value <= most or (name in positive and not value > 0):
                said = f"above {least:g}" if name in positive else f"at least {least:g}"
                limit = "" if most == math.inf else f" and at most {most:g}"
                raise ValueError(f"cluster {self.name}: {name} {value!r} is no number {said}{limit}")
        unknown = [name for name in self.algorithms if name not in ALGORITHMS]
        if unknown or not self.algorithms:
            said = repr(unknown[0]) if unknown else "an empty list"
            raise ValueError(f"cluster {self.name}: algorithms holds {said}; choose of {', '.join(ALGORITHMS)}")
        if "ring" not in self.algorithms and "hierarchical" not in self.algorithms:
            raise ValueError(f"cluster {self.name}: a tree can only reduce to all; add ring or hierarchical to algorithms")
        if self.gpus_per_host % self.rails:
            raise ValueError(f"cluster {self.name}: rails {self.rails} does not divide the {self.gpus_per_host} GPUs of a host")
        if self.leaf_ports < self.gpus_per_host // self.rails:
            raise ValueError(f"cluster {self.name}: leaf_ports {self.leaf_ports} is less than one host's cards on a leaf")

    @property
    def nic_bytes_per_us(self) -> float:
        """What one GPU's share of the network carries, one direction."""
        return self.nic_gbps * 1e3 / 8 * self.nic_efficiency

    @property
    def leaf_hosts(self) -> int:
        """Hosts that reach each other without the spine."""
        return self.leaf_ports * self.rails // self.gpus_per_host

    def island(self, ranks: int, per_host: int | None = None) -> int:
        """GPUs that a group of so many ranks has in each host.

        Args:
            ranks: Its GPUs.
            per_host: As asked; None for as many as fit.

        Raises:
            ValueError: the group does not fill whole hosts alike, or is larger than the largest cluster.
        """
        if ranks > MOST_GPUS:
            raise ValueError(f"ranks {ranks}: at most {MOST_GPUS:,} GPUs can be asked about")
        island = min(ranks, self.gpus_per_host) if per_host is None else per_host
        if not 1 <= island <= self.gpus_per_host:
            raise ValueError(f"per_host {island}: hosts of {self.name} have {self.gpus_per_host} GPUs")
        if ranks % island:
            raise ValueError(f"ranks {ranks}: hosts of {self.name} hold {island} of them each; give a multiple of {island}")
        return island


PRESETS = {name: Cluster(name, nic_gbps=400.0) for name in ("hgx_h100", "hgx_h200")}
"""HGX hosts: eight GPUs behind NVSwitch, one ConnectX-7 of 400 Gb/s each, rails of 32 hosts, a full spine."""


# In their names: GPUs of other hosts, whose links are slower or join fewer of them.
_NO_HGX = re.compile(r"\b(pcie|nvl|gh200|h800)\b", re.IGNORECASE)


def is_hgx(gpu: str) -> bool:
    """Whether a GPU of this name stands in HGX hosts, whose NVLink is the same for an H100 and an H200."""
    return not _NO_HGX.search(gpu)


def usual(hardware: str) -> Cluster | None:
    """The preset of the hosts that a hardware of this name usually stands in; a user's own may be called h100-80gb-hbm3."""
    return PRESETS.get(f"hgx_{hardware.partition('-')[0]}") if is_hgx(hardware) else None


def preset(name: str) -> Cluster:
    """A cluster by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in PRESETS:
        raise ValueError(f"cluster {name!r} is unknown; choose one of {', '.join(PRESETS)} or give a file")
    return PRESETS[name]


def from_dict(document: Any, where: str = "cluster") -> Cluster:
    """A cluster from what a JSON or YAML file held: the attributes of `Cluster`; `preset` fills in what is left out.

    Raises:
        ValueError: an unknown or missing field, or a value out of range; one line with `where`, the field and the mend.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"{where}: no table of fields; write at least name and nic_gbps")
    known = [field.name for field in fields(Cluster)]
    for key in document:
        if key not in (*known, "preset"):
            near = difflib.get_close_matches(str(key), known, 1)
            raise ValueError(
                f"{where}: unknown field {key!r}; " + (f"write {near[0]}" if near else f"there are {', '.join(known)}")
            )
    values: dict[str, Any] = {}
    if "preset" in document:
        values = {name: getattr(preset(str(document["preset"])), name) for name in known if name != "name"}
    values |= {key: value for key, value in document.items() if key != "preset"}
    for name in ("name", "nic_gbps"):
        if name not in values:
            raise ValueError(f"{where}: {name} is missing; write it" + (", in Gb/s a GPU" if name == "nic_gbps" else ""))
    if not isinstance(values["name"], str) or not values["name"]:
        raise ValueError(f"{where}: name {values['name']!r} is no text")
    algorithms = values.get("algorithms", ())
    if "algorithms" in values:
        if not isinstance(algorithms, list | tuple) or not all(isinstance(name, str) for name in algorithms):
            raise ValueError(f"{where}: algorithms {algorithms!r} is no list of names; choose of {', '.join(ALGORITHMS)}")
        values["algorithms"] = tuple(algorithms)
    return Cluster(**values)


@dataclass(frozen=True)
class Route:
    """What one GPU sends for each byte of its buffer, and the latencies that no byte pays for.

    Attributes:
        nic: Bytes through its share of the network cards.
        spine: Bytes that its leaf's uplink must carry, as if the uplink were divided evenly over the leaf's cards.
        latency_us: Steps between hosts, posts of messages, and steps inside hosts beyond those of a collective in one host.
    """

    nic: float
    spine: float
    latency_us: float


def wire(op: str, ranks: int) -> float:
    """Bytes that each rank must send for each byte of its larger buffer, whatever the algorithm of a ring's kind."""
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def route(cluster: Cluster, op: str, ranks: int, island: int, algorithm: str) -> Route:
    """The path of a collective over several hosts.

    Args:
        cluster: The network.
        op: One of `OPS`; all_to_all has one algorithm, each rank sends to each.
        ranks: GPUs that take part.
        island: How many of them share a host; less than `ranks`.
        algorithm: `ring` or `tree`.
    """
    hosts = ranks // island
    if op == "all_to_all":
        leaf = min(cluster.leaf_hosts * island, ranks)
        # With rails, what goes to one host is gathered on the card of its rail and posted together.
        messages = hosts - 1 if cluster.rails > 1 and island > 1 else ranks - island
        latency = cluster.hop_us + messages * cluster.message_us
        return Route((ranks - island) / ranks, (ranks - leaf) / ranks * cluster.oversubscription, latency)
    if algorithm == "tree":
        # Two binary trees over the hosts, each with half of the bytes, up and down; a chain inside each host.
        # A host is a leaf in one tree and inside the other, so that it sends each byte once up and once down.
        crossing, steps, inside = 2.0, 2 * math.ceil(math.log2(hosts)), 2 * (island - 1)
    else:
        laps = 2 if op == "all_reduce" else 1
        crossing = wire(op, ranks)
        # A lap has ranks - 1 steps; the longest way of a byte crosses each of the hosts' borders once.
        steps = laps * (hosts if island > 1 else hosts - 1)
        inside = laps * (ranks - 1) - steps
    extra = max(inside - round(wire(op, island) * island), 0)
    # The borders of a leaf are crossed by one flow of each card on it: all of its uplink serves them.
    spans = hosts > cluster.leaf_hosts
    share = crossing / island
    uplink = share * cluster.oversubscription / cluster.leaf_ports if spans else 0.0
    return Route(share, uplink, steps * cluster.hop_us + extra * cluster.host_hop_us)

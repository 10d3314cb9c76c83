"""How networks of choices are taught: several at once, each a slice of the same batched products.

A layer of 16 networks is one product of (16, batch, inputs) by (16, inputs, units): on a GPU they learn in the time of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from perfmodel.choice import grid_of
from perfmodel.features import features
from perfmodel.fits import NEVER, Fits, worth_of_rests, worth_of_tiles
from perfmodel.hardware import HardwareSpec
from perfmodel.network import REACH, Experts, Network, in_half

if TYPE_CHECKING:
    import torch

# The input by which calls are shared out among experts: of GEMMs, the size of the result.
COLUMN = "log2_output_bytes"
DECAY = 1e-2
# Of the steps so many, the first, may multiply in bfloat16.
_COARSE = 0.95
# Fewer steps are done sooner than compiled.
LEAST_STEPS = 5_000

Stacked = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
"""Weights (networks, inputs, outputs) and biases (networks, 1, outputs) of each layer."""


def deciding(kernel: str, hardware: HardwareSpec) -> int:
    """Which of the inputs of `perfmodel.choice.asked` is `COLUMN`."""
    one = np.ones(1)
    return features(kernel, one, one, one, one, hardware)[0].index(COLUMN)


def networks_of(network: Network | Experts) -> list[Network]:
    """The networks that there are."""
    return network.networks if isinstance(network, Experts) else [network]


def untaught(
    matrix: npt.NDArray[np.floating], column: int, experts: int, hidden: Sequence[int], values: int, seed: int = 0
) -> Network | Experts:
    """Networks that know nothing yet, for as many rows each.

    Args:
        matrix: Features of the rows to teach, (rows, inputs).
        column: The input by which they are shared out.
        experts: How many networks.
        hidden: Units of each hidden layer.
        values: What the last layer gives.
        seed: Of the weights.
    """
    generator = np.random.default_rng(seed)
    sizes = [matrix.shape[1], *hidden, values]
    edges = _edges(matrix, column, experts)
    number = np.searchsorted(edges, matrix[:, column].astype(np.float32), side="right")
    made = []
    for expert in range(len(edges) + 1):
        mine, layers = matrix[number == expert], list[tuple[Any, Any]]()
        for fan_in, fan_out in zip(sizes, sizes[1:], strict=False):
            bound = 1 / np.sqrt(fan_in)
            drawn = (generator.uniform(-bound, bound, shape).astype(np.float32) for shape in ((fan_in, fan_out), (fan_out,)))
            layers.append((next(drawn), next(drawn)))
        mean, deviation = mine.mean(axis=0).astype(np.float32), mine.std(axis=0).astype(np.float32) + np.float32(1e-6)
        made.append(Network(mean, deviation, 0.0, 1.0, layers))
    return made[0] if len(made) == 1 else Experts(column, edges, made)


def copied(network: Network | Experts, matrix: npt.NDArray[np.floating], column: int, experts: int) -> Network | Experts:
    """A network several times over, each to go on with its part of the rows; of several, each as often.

    Arguments as of `untaught`; of several there will be no more than `experts`.
    """
    if isinstance(network, Network):
        edges = _edges(matrix, column, experts)
        return Experts(column, edges, [network] * (len(edges) + 1)) if len(edges) else network
    all_edges, networks = list[np.float32](), list[Network]()
    for lowest, one, rows in zip((None, *network.edges), network.networks, network.asked(matrix), strict=True):
        edges = _edges(matrix[rows], network.column, experts // len(network.networks)) if len(rows) else np.empty(0, np.float32)
        all_edges += [*([] if lowest is None else [lowest]), *edges]
        networks += [one] * (len(edges) + 1)
    return Experts(network.column, np.array(all_edges, dtype=np.float32), networks)


def _edges(matrix: npt.NDArray[np.floating], column: int, experts: int) -> npt.NDArray[np.float32]:
    """Where an input is cut so that each of so many networks has as many rows."""
    shared_by = matrix[:, column].astype(np.float32)
    edges = np.unique(np.quantile(shared_by, np.arange(1, experts) / experts).astype(np.float32))
    return edges[edges > shared_by.min()]


def shared_out(network: Network | Experts, matrix: npt.NDArray[np.floating]) -> list[npt.NDArray[np.int64]]:
    """The numbers of the rows that each network is asked for."""
    return network.asked(matrix) if isinstance(network, Experts) else [np.arange(len(matrix))]


def stacked(networks: Sequence[Network]) -> Stacked:
    """Layers of networks of one form."""
    layers = zip(*(network.layers for network in networks), strict=True)
    return [(np.stack([w for w, _ in layer]), np.stack([b for _, b in layer])[:, None]) for layer in layers]


def with_layers(network: Network | Experts, layers: Stacked) -> Network | Experts:
    """The same with other weights."""
    made = [
        Network(old.mean, old.deviation, old.level, old.spread, [(w[number].copy(), b[number, 0].copy()) for w, b in layers])
        for number, old in enumerate(networks_of(network))
    ]
    return Experts(network.column, network.edges, made) if isinstance(network, Experts) else made[0]


def between(network: Network | Experts, other: Network | Experts, share: float) -> Network | Experts:
    """Networks of one form with weights on the way from one's to another's: the first's by this share, the rest the other's."""
    pairs = zip(stacked(networks_of(network)), stacked(networks_of(other)), strict=True)
    layers = [tuple(share * a + (1 - share) * b for a, b in zip(mine, theirs, strict=True)) for mine, theirs in pairs]
    return with_layers(network, layers)  # type: ignore[arg-type]


def halved(network: Network | Experts) -> Network | Experts:
    """The same with its weights rounded to float16, which takes half the room on disk."""
    layers = stacked(networks_of(network))
    return with_layers(network, [(in_half(weights), in_half(biases)) for weights, biases in layers])


def _through(layers: Sequence[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """What the last layers give for normal features, (networks, rows, inputs) to (networks, rows, values)."""
    import torch

    for number, (weights, biases) in enumerate(layers):
        x = torch.baddbmm(biases, x, weights)
        if number < len(layers) - 1:
            x = torch.nn.functional.hardswish(x)
    return x


def normal(network: Network, matrix: torch.Tensor) -> torch.Tensor:
    """Features as the network's first layer takes them."""
    import torch

    mean, deviation = (torch.tensor(a, device=matrix.device) for a in (network.mean, network.deviation))
    return ((matrix - mean) / deviation).clamp(-REACH, REACH)


class FitsTaught:
    """What `perfmodel.fits` of a network are worth, while they are taught with it.

    Attributes:
        parameters: All that is taught.
    """

    def __init__(self, begun: Fits, kernels: npt.NDArray[np.int64], sizes: Sequence[torch.Tensor]) -> None:
        """Go on from fits.

        Args:
            begun: To begin with.
            kernels: `perfmodel.choice.PARTS` of those that they are of.
            sizes: M, N and groups of the rows to be taught, each (rows, 1), where the work is to be done.
        """
        import torch

        device = sizes[0].device
        self._begun, self._sizes = begun, sizes
        self._grid = grid_of(kernels).of_arrays(lambda array: torch.from_numpy(array).to(device))
        self.parameters = [torch.nn.Parameter(torch.from_numpy(array.copy()).to(device)) for array in begun.arrays]
        self._exists = torch.from_numpy(begun.pairs > NEVER).to(device)

    def loss(self, out: torch.Tensor, index: torch.Tensor, tile: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """Of what the last layer gives for rows, (rows, values), with these numbers, of each of which tile and rest are known."""
        import torch

        (m, n, groups), (tiles, rests) = (size[index] for size in self._sizes), self._exists.shape
        *others, pairs = self.parameters
        fits = Fits.of_arrays(self._begun.multiprocessors, [*others, torch.where(self._exists, pairs, NEVER)])
        context, right = out[:, tiles + rests :], tile[index]
        of_tiles = out[:, :tiles] + worth_of_tiles(torch, (m, n, groups), self._grid, fits, context)
        of_rests = out[:, tiles : tiles + rests] + worth_of_rests(torch, (m, n, groups), self._grid, fits, context, right)
        entropy = torch.nn.functional.cross_entropy
        return entropy(of_tiles, right) + entropy(of_rests, rest[index])

    def fits(self, keep: float = 0.0) -> Fits:
        """What they became, rounded to float16; by a share what they were at the start."""
        now = [parameter.detach().cpu().numpy() for parameter in self.parameters]
        *arrays, pairs = (in_half(keep * was + (1 - keep) * array) for was, array in zip(self._begun.arrays, now, strict=True))
        pairs = np.where(self._begun.pairs > NEVER, pairs, np.float32(NEVER))
        return Fits.of_arrays(self._begun.multiprocessors, [*arrays, pairs])


def taught(
    network: Network | Experts,
    matrix: torch.Tensor,
    kept: Sequence[npt.NDArray[np.int64]],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    epochs: int,
    batch: int,
    rate: float,
    seed: int = 0,
    coarse: bool = False,
    beside: Sequence[torch.nn.Parameter] = (),
) -> Network | Experts:
    """Networks that go on from what they are, each by its own rows.

    Args:
        network: To begin with.
        matrix: Features of rows, (rows, inputs), where the work is to be done.
        kept: Numbers of the rows to learn from, for each network.
        loss: Of what the last layers give, (networks, batch, values), for rows of these numbers, (networks, batch).
        epochs: Times that each row is seen, on average; a network of few rows sees its own more often.
        batch: Rows of one step for all networks together.
        rate: The highest learning rate.
        seed: Of the order.
        coarse: Multiply in bfloat16 but for the last steps.
        beside: Of the loss, to be taught with them.
    """
    import torch

    torch.manual_seed(seed)
    networks, device = networks_of(network), matrix.device
    x = torch.empty(len(matrix), matrix.shape[1], device=device)
    for one, rows in zip(networks, kept, strict=True):
        x[torch.from_numpy(rows).to(device)] = normal(one, matrix[torch.from_numpy(rows).to(device)])
    # One without rows takes part with any, and stays as it was.
    known = [torch.from_numpy(rows if len(rows) else np.concatenate(kept)).to(device) for rows in kept]
    layers = [tuple(torch.nn.Parameter(torch.from_numpy(a.copy()).to(device)) for a in layer) for layer in stacked(networks)]
    total = sum(map(len, kept))
    each = max(1, min(batch, total) // len(networks))
    in_epoch = max(1, total // (each * len(networks)))
    parameters = [*(parameter for layer in layers for parameter in layer), *beside]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * in_epoch, pct_start=0.15, cycle_momentum=False)
    step = 0

    def off(index: torch.Tensor, coarsely: bool) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=coarsely):
            out = _through(layers, x[index])  # type: ignore[arg-type]
        return loss(out.float(), index)

    # A GPU waits for a step's many small launches: of 8,192 answers it takes 3.7 ms compiled, all included, and some 9 else.
    if device.type == "cuda" and epochs * in_epoch >= LEAST_STEPS:
        off = torch.compile(off, fullgraph=True)
    for _ in range(epochs):
        for index in _batches(known, each, in_epoch):
            optimizer.zero_grad()
            off(index, coarse and step < _COARSE * epochs * in_epoch).backward()
            optimizer.step()
            schedule.step()
            step += 1
    found = [tuple(part.detach().cpu().numpy() for part in layer) for layer in layers]
    for before, layer in zip(stacked(networks), found, strict=True):
        for old, new in zip(before, layer, strict=True):
            untaught_ones = [number for number, rows in enumerate(kept) if not len(rows)]
            new[untaught_ones] = old[untaught_ones]
    return with_layers(network, found)  # type: ignore[arg-type]


def _batches(known: Sequence[torch.Tensor], each: int, number: int) -> Iterator[torch.Tensor]:
    """So many steps' rows, (networks, each), each network's in an order of its own, again from the start where they end."""
    import torch

    orders: list[Any] = []
    for rows in known:
        times = -(-each * number // len(rows))
        orders.append(torch.cat([rows[torch.randperm(len(rows), device=rows.device)] for _ in range(times)])[: each * number])
    yield from torch.stack(orders).view(len(known), number, each).unbind(1)

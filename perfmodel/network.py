"""A small neural network in numpy: the smooth part of a kernel's time, where trees would need a step for every size.

Three hidden layers of hard-swish units, trained by Adam with a one-cycle learning rate on a Huber loss. Saved as JSON.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from perfmodel import compiled

Array = npt.NDArray[np.float32]
Layers = list[tuple[Array, Array]]

# Of a prediction.
THREADS = 2
WIDTH = 128
HIDDEN = 3
EPOCHS = 20
BATCH = 512
RATE = 3e-3
DECAY = 1e-2
# Where the loss turns from a square to an absolute value, in standard deviations of the target.
BEND = 0.3
# Features further than this many standard deviations from the mean count as that far: outside the sweep it is constant.
REACH = 4.0
# Rows are multiplied in blocks of so many, the last one filled up to a multiple of `TURN`: a row's value then does not depend on
# how many others it came with. Nor does it on its place among them where the matrix library sums all rows in one order; its
# kernels for processors with AVX2 and no AVX-512, which OpenBLAS 0.3.31 takes on AMD's Zen 5, too, take 12 rows in turn and sum
# half of them in another, which shows in the last bits of float32: a row keeps its place in a turn.
_BLOCK, TURN = 576, 48
# The library may multiply matrices of fewer products by other kernels, which sum in another order (OpenBLAS up to 100^3, with
# AVX-512 up to 28 * 512^2): no block has so few, unless a full one has.
_MANY_PRODUCTS = 28 * 512**2


def _gate(x: Array) -> Array:
    """What a unit multiplies its input by: 0 below -3, 1 above 3, straight between (hard swish; no exponential to wait for)."""
    gate = x * np.float32(1 / 6)
    gate += np.float32(0.5)
    return np.clip(gate, np.float32(0), np.float32(1), out=gate)


def in_half(x: Array) -> Array:
    """Values rounded to float16, as float32: a network of such is saved in half the room."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


@cache
def _threads() -> Any:
    """What sets the number of the matrix library's threads."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def single_threaded() -> AbstractContextManager[Any]:
    """The matrix library with one thread: for a block, several wait for each other longer than they multiply.

    The limit is the process': whoever runs networks in threads of their own enters it around all of them.
    """
    context: AbstractContextManager[Any] = _threads().limit(limits=1, user_api="blas")
    return context


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """Those of a prediction, of which each may run networks."""
    with single_threaded(), ThreadPoolExecutor(THREADS) as pool:
        yield pool


@dataclass(frozen=True)
class Network:
    """A trained network.

    Attributes:
        mean: Of each feature where it was trained.
        deviation: Likewise the standard deviation.
        level: Mean of the target.
        spread: Standard deviation of the target.
        layers: (weights, biases) of each layer.
    """

    mean: Array
    deviation: Array
    level: float
    spread: float
    layers: Layers

    def predict(self, matrix: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        """The network's value for each row of features, (rows,)."""
        return self.level + self.spread * self.outputs(matrix)[:, 0].astype(np.float64)

    def outputs(self, matrix: npt.NDArray[np.floating]) -> Array:
        """What the last layer gives for each row of features, (rows, outputs)."""
        result = np.empty((len(matrix), self.values), dtype=np.float32)
        with single_threaded():
            for rows, values in self.blocks(matrix):
                result[rows] = values
        return result

    @property
    def inputs(self) -> int:
        """Features of a row."""
        return self.mean.size

    @property
    def values(self) -> int:
        """What the last layer gives for a row."""
        return self.layers[-1][1].size

    def room(self) -> list[Array]:
        """Where `blocks` puts the features of a block and what each layer gives."""
        return [
            np.zeros((_BLOCK, width), dtype=np.float32) for width in (self.inputs, *(biases.size for _, biases in self.layers))
        ]

    def blocks(
        self, matrix: npt.NDArray[np.floating], asked: npt.NDArray[np.int64] | None = None, room: list[Array] | None = None
    ) -> Iterator[tuple[slice | npt.NDArray[np.int64], Array]]:
        """Likewise, block after block while it lies in the cache: which rows it is, and what the last layer gives.

        The next block overwrites the values of this one. Enter `single_threaded` around all of them.

        Args:
            matrix: Features, (rows, features).
            asked: The numbers of the rows that are looked at; None for all.
            room: Of this network or one of its extents; None for a new one.
        """
        x, *others = self.room() if room is None else room
        count = len(matrix) if asked is None else len(asked)
        # Blocks are alike: a last one of few rows would be filled up.
        even = min(-(-count // (-(-count // _BLOCK) * TURN or 1)) * TURN, _BLOCK)
        for start in range(0, count, even or 1):
            block = slice(start, min(start + even, count))
            rows, filled = block if asked is None else asked[block], block.stop - start
            x[:filled] = self.normal(matrix[rows])
            size = min(-(-max(filled, self._least_rows) // TURN) * TURN, _BLOCK)
            yield rows, self._through(x[:size], [each[:size] for each in others])[:filled]

    @property
    def _least_rows(self) -> int:
        """Rows that take more than `_MANY_PRODUCTS` in each layer; a single output is no product of matrices."""
        return _MANY_PRODUCTS // min((weights.size for weights, biases in self.layers if biases.size > 1), default=1) + 1

    def normal(self, matrix: npt.NDArray[np.floating]) -> Array:
        """Features as the first layer takes them, (rows, features)."""
        scaled = matrix - self.mean
        scaled /= self.deviation
        return np.clip(scaled, -REACH, REACH, out=scaled).astype(np.float32, copy=False)

    def _through(self, x: Array, room: list[Array]) -> Array:
        """What the last layer gives for normal features x, (rows, outputs); each layer's values go into its `room`."""
        loops: Any = compiled.at_hand()
        for number, ((weights, biases), out) in enumerate(zip(self.layers, room, strict=True)):
            x = np.matmul(x, weights, out=out)
            if number == len(self.layers) - 1:
                x += biases
            elif loops and not len(biases) % compiled.AT_ONCE:
                loops.rectify(x, biases)
            else:
                x += biases
                x *= _gate(x)
        return x

    def save(self) -> bytes:
        """As JSON; arrays are base64 of little-endian float32, or of float16 where that holds every value."""
        arrays = [self.mean, self.deviation, *(array for layer in self.layers for array in layer)]
        packed = []
        for array in arrays:
            half = in_half(array)
            name, kept = ("float16", half.astype("<f2")) if (half == array).all() else ("float32", array.astype("<f4"))
            packed.append({"shape": array.shape, name: base64.b64encode(kept.tobytes()).decode()})
        return json.dumps({"level": self.level, "spread": self.spread, "arrays": packed}).encode()

    @classmethod
    def load(cls, saved: bytes) -> Network:
        """What `save` made.

        Raises:
            ValueError: it is damaged.
        """
        try:
            return cls.of(json.loads(saved))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("the network is damaged") from error

    @classmethod
    def of(cls, document: dict[str, Any]) -> Network:
        """What `save` made, read from JSON.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        mean, deviation, *rest = (
            np.frombuffer(base64.b64decode(a["float16"]), "<f2").astype("<f4").reshape(a["shape"])
            if "float16" in a
            else np.frombuffer(base64.b64decode(a["float32"]), "<f4").reshape(a["shape"])
            for a in document["arrays"]
        )
        layers = list(zip(rest[::2], rest[1::2], strict=True))
        return cls(mean, deviation, float(document["level"]), float(document["spread"]), layers)


@dataclass(frozen=True)
class Experts:
    """Networks of the same inputs and values, each for the rows of which one input lies between two edges.

    Together they know as much as a wide network, and a row costs what the narrow one does that it goes to.

    Attributes:
        column: The input that decides.
        edges: Where the next network begins, ascending, (networks - 1,).
        networks: In order.
    """

    column: int
    edges: Array
    networks: list[Network]

    @property
    def inputs(self) -> int:
        """As of each."""
        return self.networks[0].inputs

    @property
    def values(self) -> int:
        """As of each."""
        return self.networks[0].values

    def asked(self, matrix: npt.NDArray[np.floating], among: npt.NDArray[np.int64] | None = None) -> list[npt.NDArray[np.int64]]:
        """The numbers of the rows that each network is asked for, ascending, of all rows or among some."""
        column = matrix[:, self.column] if among is None else matrix[among, self.column]
        number = np.searchsorted(self.edges, np.asarray(column, dtype=np.float32), side="right")
        found = [np.flatnonzero(number == expert) for expert in range(len(self.networks))]
        return found if among is None else [among[mine] for mine in found]

    def blocks(
        self, matrix: npt.NDArray[np.floating], asked: npt.NDArray[np.int64] | None = None
    ) -> Iterator[tuple[slice | npt.NDArray[np.int64], Array]]:
        """As `Network.blocks`; rows come as their numbers."""
        room = self.networks[0].room()
        for network, mine in zip(self.networks, self.asked(matrix, asked), strict=True):
            yield from network.blocks(matrix, mine, room)

    def save(self) -> bytes:
        """As JSON."""
        networks = [json.loads(network.save()) for network in self.networks]
        return json.dumps({"column": self.column, "edges": self.edges.tolist(), "networks": networks}).encode()

    @classmethod
    def of(cls, document: dict[str, Any]) -> Experts:
        """What `save` made, read from JSON.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        networks, edges = [Network.of(saved) for saved in document["networks"]], np.asarray(document["edges"], np.float32)
        column = int(document["column"])
        sizes = {(network.inputs, network.values) for network in networks}
        if len(sizes) != 1 or edges.shape != (len(networks) - 1,) or not 0 <= column < networks[0].inputs:
            raise ValueError("the experts do not fit together")
        return cls(column, edges, networks)


def train(matrix: npt.NDArray[np.floating], target: npt.NDArray[np.floating], seed: int = 0) -> Network:
    """A network fitted to rows.

    Args:
        matrix: Features, (rows, features).
        target: (rows,).
        seed: Seeds weights and order.
    """
    generator = np.random.default_rng(seed)
    sizes = [matrix.shape[1], *[WIDTH] * HIDDEN, 1]
    layers: Layers = []
    for fan_in, fan_out in zip(sizes, sizes[1:], strict=False):
        bound = 1 / np.sqrt(fan_in)
        layers.append((_uniform(generator, bound, (fan_in, fan_out)), _uniform(generator, bound, (fan_out,))))
    mean, deviation = matrix.mean(axis=0).astype(np.float32), (matrix.std(axis=0) + 1e-6).astype(np.float32)
    network = Network(mean, deviation, float(target.mean()), float(target.std() + 1e-9), layers)
    x, y = network.normal(matrix), ((target - network.level) / network.spread).astype(np.float32)
    parameters = [array for layer in layers for array in layer]
    first, second = ([np.zeros_like(p) for p in parameters] for _ in range(2))
    batch = min(BATCH, len(x))
    steps = EPOCHS * (len(x) // batch)
    for step, rows in enumerate(_batches(generator, len(x), batch), 1):
        rate = RATE * _cycle(step / steps)
        for number, gradient in enumerate(_gradients(network, x[rows], y[rows])):
            p = parameters[number]
            first[number] += 0.1 * (gradient - first[number])
            second[number] += 0.001 * (gradient**2 - second[number])
            scale = np.sqrt(second[number] / (1 - 0.999**step)) + 1e-8
            p *= 1 - rate * DECAY
            p -= rate / (1 - 0.9**step) * first[number] / scale
    return network


def _uniform(generator: np.random.Generator, bound: float, shape: tuple[int, ...]) -> Array:
    return generator.uniform(-bound, bound, shape).astype(np.float32)


def _batches(generator: np.random.Generator, rows: int, batch: int) -> Iterator[npt.NDArray[np.int64]]:
    for _ in range(EPOCHS):
        order = generator.permutation(rows)
        for start in range(0, rows // batch * batch, batch):
            yield order[start : start + batch]


def _cycle(share: float) -> float:
    """Learning rate as a share of the highest: up from 4% over the first 30% of the steps, then down to nothing, as cosines."""
    if share < 0.3:
        return 0.04 + 0.96 * 0.5 * (1 - np.cos(np.pi * share / 0.3))
    return 0.5 * (1 + np.cos(np.pi * (share - 0.3) / 0.7))


def _gradients(network: Network, x: Array, y: Array) -> list[Array]:
    """Of the mean loss, for each layer's weights and biases in turn."""
    inputs, gates, sums = [x], [], []
    for number, (weights, biases) in enumerate(network.layers):
        x = x @ weights + biases
        if number < len(network.layers) - 1:
            sums.append(x)
            gates.append(_gate(x))
            x = x * gates[-1]
            inputs.append(x)
    slope = (np.clip((x[:, 0] - y) / BEND, -1, 1) / len(y)).astype(np.float32)[:, None]
    gradients: list[Array] = []
    for number in reversed(range(len(network.layers))):
        gradients[:0] = [inputs[number].T @ slope, slope.sum(axis=0)]
        if number:
            bend = sums[number - 1] * np.float32(1 / 6) * (np.abs(sums[number - 1]) < 3)
            slope = (slope @ network.layers[number][0].T) * (gates[number - 1] + bend)
    return gradients

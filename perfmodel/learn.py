"""How one kernel's time is learned: first from many quick launches where there are some, then from careful timings.

A library chooses among a thousand kernels by rules that it does not publish, and each choice is a jump in the time. Single
profiled launches of a hundred thousand shapes (`hil.launches`) show where the jumps are, though each is some 6% off: a
small network takes what is smooth about them, and trees on top of it the jumps, once the drift of the clocks is taken out
(`perfmodel.steady`). Where it is known which kernel the library is likely to choose (`perfmodel.choice`), both are told, and
fewer trees suffice. What the careful timings add is small, and their few thousand shapes suffice for more trees to
learn it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from perfmodel import network
from perfmodel.calls import columns_of
from perfmodel.choice import Choice
from perfmodel.hardware import HardwareSpec
from perfmodel.judge import SHAPE
from perfmodel.kernels import KERNELS
from perfmodel.network import Network
from perfmodel.packed import unpack
from perfmodel.parallel import each
from perfmodel.prediction import Seen, at_edge, baseline_us, no_less
from perfmodel.steady import drift

Array = npt.NDArray[np.float64]

PARAMETERS: dict[str, Any] = {
    "max_depth": 6, "eta": 0.05, "subsample": 0.8, "colsample_bytree": 1.0, "colsample_bynode": 0.5, "min_child_weight": 2.0,
    "objective": "reg:squarederror", "nthread": 0, "seed": 0,
}  # fmt: skip
ROUNDS = 500
# Memory-bound kernels: what torch.compile tunes is now and then a kernel three times as slow, which the median leaves aside.
MEMORY_PARAMETERS = {**PARAMETERS, "objective": "reg:absoluteerror"}
# What a timing counts of a kernel that torch.compile's own clock chose among its candidates, beside 1 of what the GPU alone did:
# of shapes held out, so chosen, torch's quantizers are 3.0% off with it, 3.2% with 1, 3.1% with 0.15 or 0.5.
OWN_CLOCK_WEIGHT = 0.3
# Of the trees that quick launches grow. Now and then a launch takes far longer than the next: by squares of what they are off two
# folds of five of our tensorwise fast's shapes held out are 1.73% off, so 1.70%, cuBLAS's 2.33% both times.
FIRST_PARAMETERS = {**PARAMETERS, "objective": "reg:absoluteerror", "max_depth": 12, "eta": 0.08, "min_child_weight": 16.0}
FIRST_ROUNDS = 220
# Likewise where the library's choice is known: fewer suffice. With 120 and 0.13 cuBLAS's tensorwise fast is 2.33% off, with
# these 2.30%.
TOLD_PARAMETERS = {**FIRST_PARAMETERS, "eta": 0.11}
TOLD_ROUNDS = 160
# Likewise of very many launches, which teach more and deeper trees: of bf16's 1.4 million two folds of five of its shapes held
# out are 2.35% off with these (p90 5.1%), 2.36% (5.2%) 12 deep, 2.42% (5.4%) with 160 such.
MANY_LAUNCHES = 1_000_000
MANY_PARAMETERS = {**TOLD_PARAMETERS, "max_depth": 13}
MANY_ROUNDS = 400
# Of those on top of them. Two folds of five of bf16's shapes held out are 2.42% off with these, 2.48% with a depth of 6 and
# "eta" 0.06; of batched products 2.53% and 2.59%, of our tensorwise split 2.06% and 2.10%.
NEXT_PARAMETERS = {
    **PARAMETERS, "objective": "reg:absoluteerror", "max_depth": 9, "eta": 0.08, "min_child_weight": 4.0,
}  # fmt: skip
NEXT_ROUNDS = 200
# Of those on top of another GPU's: few timings of a memory-bound kernel then say by how much it is slower, and hardly more.
NEXT_MEMORY_PARAMETERS = {**NEXT_PARAMETERS, "max_depth": 4, "eta": 0.05, "min_child_weight": 6.0}
# Of trees that quick launches grow on top of another GPU's.
MORE_ROUNDS = 100
# Fewer quick launches of a kernel teach nothing.
LEAST_LAUNCHES = 2000


class Learned(NamedTuple):
    """What predicts log(time / baseline) of one kernel: the network's value, if there is one, plus the trees'.

    Attributes:
        network: The smooth part, from the features and those of the choice.
        booster: Trees of the same and of the network's value.
        choice: What tells the kernel that the library chooses.
        least_us: The shortest careful timing, under which no call is predicted. 0 before careful timings.
    """

    network: Network | None
    booster: Any
    choice: Choice | None = None
    least_us: float = 0.0


def xgboost_package() -> Any:
    """The package, with threads that sleep while they wait: on a busy machine spinning ones take ten times as long."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import xgboost

    return xgboost


def read_trees(stored: bytes) -> Any:
    """Trees as a models folder has them, to be grown further."""
    trees = xgboost_package().Booster()
    trees.load_model(bytearray(unpack(stored)))
    return trees


def _data(
    kernel: str,
    rows: pd.DataFrame,
    time_us: Array,
    hardware: HardwareSpec,
    choice: Choice | None,
    net: Network | None,
    weight: Array | None = None,
) -> Any:
    sizes = columns_of(rows)
    seen = Seen.of(kernel, sizes, hardware, choice, net)
    target = np.log(time_us / baseline_us(kernel, *sizes, hardware)) - seen.smooth
    return xgboost_package().DMatrix(seen.matrix, target, weight=weight, feature_names=seen.names)


def _weight(rows: pd.DataFrame) -> Array | None:
    """What each careful timing counts; None where all count alike."""
    if "own_clock" not in rows or not rows["own_clock"].any():
        return None
    return np.where(rows["own_clock"].to_numpy(dtype=bool), OWN_CLOCK_WEIGHT, 1.0)


def learn_first(
    launches: pd.DataFrame | None,
    hardware: HardwareSpec,
    kernels: Iterable[str],
    choices: Mapping[str, Choice] | None = None,
) -> dict[str, Learned]:
    """What quick launches teach of each kernel, for `train` to go on from; nothing of one with too few.

    Args:
        launches: Rows with `kernel`, `m`, `n`, `k`, `groups`, `time_us`, in the order of their measurement; None for none.
        hardware: The GPU.
        kernels: Which to learn, at most.
        choices: Of kernels of which it is known what tells the library's choice.
    """
    found = steadied(launches, hardware, kernels, choices)
    jobs = [(kernel, rows, hardware, (choices or {}).get(kernel), net) for kernel, (rows, net) in found.items()]
    return dict(zip(found, each(_jumps, jobs), strict=True))


def steadied(
    launches: pd.DataFrame | None,
    hardware: HardwareSpec,
    kernels: Iterable[str],
    choices: Mapping[str, Choice] | None = None,
) -> dict[str, tuple[pd.DataFrame, Network]]:
    """Each kernel's launches without the drift of the clocks, and the network that took it out; arguments as `learn_first`."""
    if launches is None:
        return {}
    number = launches["kernel"].value_counts()
    wanted = set(number.index[number >= LEAST_LAUNCHES]) & set(kernels)
    if not wanted:
        return {}
    launches = launches[launches["kernel"].isin(list(wanted))].reset_index(drop=True)
    rows = {kernel: np.flatnonzero(launches["kernel"] == kernel) for kernel in KERNELS if kernel in wanted}
    jobs = [(kernel, launches.iloc[index], hardware, (choices or {}).get(kernel)) for kernel, index in rows.items()]
    networks: list[Network] = []
    residual = np.full(len(launches), np.nan)
    for (kernel, mine, *_), (net, off) in zip(jobs, each(_smooth, jobs), strict=True):
        networks.append(net)
        residual[rows[kernel]] = off
        print(f"smooth part of {kernel}: {len(mine)} launches", file=sys.stderr)
    steady = launches.assign(time_us=launches["time_us"].to_numpy(dtype=float) * np.exp(-drift(launches, residual)))
    return {kernel: (steady.iloc[index], net) for (kernel, index), net in zip(rows.items(), networks, strict=True)}


def _smooth(kernel: str, launches: pd.DataFrame, hardware: HardwareSpec, choice: Choice | None) -> tuple[Network, Array]:
    """The network of a kernel's launches, and by how much, as a logarithm, each took longer than it says."""
    sizes = columns_of(launches)
    target = np.log(launches["time_us"].to_numpy(dtype=float) / baseline_us(kernel, *sizes, hardware))
    matrix = Seen.of(kernel, sizes, hardware, choice, None).matrix
    net = network.train(matrix, target)
    return net, target - net.predict(matrix)


def _jumps(kernel: str, launches: pd.DataFrame, hardware: HardwareSpec, choice: Choice | None, net: Network) -> Learned:
    """Trees on top of the network, of launches without their drift."""
    many = len(launches) >= MANY_LAUNCHES
    told = (MANY_PARAMETERS, MANY_ROUNDS) if many else (TOLD_PARAMETERS, TOLD_ROUNDS)
    parameters, rounds = (FIRST_PARAMETERS, FIRST_ROUNDS) if choice is None else told
    data = _data(kernel, launches, launches["time_us"].to_numpy(dtype=float), hardware, choice, net)
    return Learned(net, xgboost_package().train(parameters, data, rounds), choice)


def learn_more(
    kernel: str, launches: pd.DataFrame, hardware: HardwareSpec, start: Learned, early: Learned | None = None
) -> Learned:
    """What quick launches on this GPU, without their drift, add to what is known from another.

    Args:
        kernel: Which kernel.
        launches: On this GPU.
        hardware: This GPU.
        start: What is known.
        early: The same before the other GPU's careful timings. By what those taught a launch here is taken to be off, too: else
            these would first teach to forget it.
    """
    data = _data(kernel, launches, launches["time_us"].to_numpy(dtype=float), hardware, start.choice, start.network)
    if early is not None:
        data.set_label(data.get_label() + start.booster.predict(data) - early.booster.predict(data))
    return start._replace(booster=xgboost_package().train(FIRST_PARAMETERS, data, MORE_ROUNDS, xgb_model=start.booster))


def train(kernel: str, rows: pd.DataFrame, hardware: HardwareSpec, first: Learned | None = None) -> Learned:
    """Learn one kernel from careful timings.

    Args:
        kernel: Which kernel.
        rows: Its careful timings, `p50_us`; those of `own_clock`, where there is such a column, count less.
        hardware: The GPU.
        first: What `learn_first` learned from other shapes, or what is known from another GPU (`perfmodel.transfer`).
    """
    net, start, choice, least = first or (None, None, None, 0.0)
    gemm = "gemm" in KERNELS[kernel].kind
    alone, on_top = (PARAMETERS, NEXT_PARAMETERS) if gemm else (MEMORY_PARAMETERS, NEXT_MEMORY_PARAMETERS)
    parameters = alone if first is None else on_top
    data = _data(kernel, rows, rows["p50_us"].to_numpy(dtype=float), hardware, choice, net, _weight(rows))
    trees = xgboost_package().train(parameters, data, ROUNDS if first is None else NEXT_ROUNDS, xgb_model=start)
    shortest = float(rows["p50_us"].min())
    return Learned(net, trees, choice, min(shortest, least or shortest))


def measured_range(rows: pd.DataFrame) -> dict[str, list[float]]:
    """Least and largest m, n, k, groups and product of the four among rows of one kernel, by name."""
    sizes = dict(zip(SHAPE, columns_of(rows), strict=True))
    sizes["product"] = sizes["m"] * sizes["n"] * sizes["k"] * sizes["groups"]
    return {name: [float(values.min()), float(values.max())] for name, values in sizes.items()}


def predict(
    learned: Learned, kernel: str, rows: pd.DataFrame, hardware: HardwareSpec, measured: dict[str, list[float]] | None = None
) -> Array:
    """Times in microseconds of one kernel's rows; arguments as `predict_doubting`."""
    return predict_doubting(learned, kernel, rows, hardware, measured)[0]


def predict_doubting(
    learned: Learned, kernel: str, rows: pd.DataFrame, hardware: HardwareSpec, measured: dict[str, list[float]] | None = None
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Times in microseconds of one kernel's rows, and each one's class of doubt about what the library chooses.

    Args:
        learned: What `train` made.
        kernel: Which kernel.
        rows: Its calls.
        hardware: The GPU.
        measured: `measured_range` of what was learned from, where rows may lie outside it.
    """
    sizes = columns_of(rows)
    seen = Seen.of(kernel, at_edge(sizes, measured) if measured else sizes, hardware, learned.choice, learned.network)
    ratio = seen.smooth + learned.booster.inplace_predict(seen.matrix).astype(np.float64)
    time = no_less(baseline_us(kernel, *sizes, hardware) * np.exp(ratio), kernel, sizes, hardware, learned.least_us)
    return time, seen.doubt

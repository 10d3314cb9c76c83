"""What networks of choices begin with: nothing, or what others know, of another GPU's kernels or of this one's of before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hil import teaching
from perfmodel.choice import Choice, grid_of, vocabulary
from perfmodel.fits import CONTEXT, NEVER, Fits, unlearned
from perfmodel.hardware import HardwareSpec
from perfmodel.network import Experts, Network


def begin(
    matrix: npt.NDArray[np.float32],
    kernels: npt.NDArray[np.int64],
    hardware: HardwareSpec,
    column: int,
    experts: int,
    hidden: Sequence[int],
    start: Choice | None,
    seed: int,
) -> tuple[Network | Experts, Fits]:
    """Networks and fits to be taught.

    Args:
        matrix: Features of the rows to teach, (rows, inputs).
        kernels: `perfmodel.choice.PARTS` of those to learn, (kernels, parts).
        hardware: The GPU.
        column: The input by which rows are shared out.
        experts: How many networks, at least.
        hidden: Units of each hidden layer.
        start: What to go on from, in the form that it has; None for nothing.
        seed: Of the weights.
    """
    halves = vocabulary(kernels)
    if start is None:
        values = sum(len(half) for half, _ in halves) + CONTEXT
        network = teaching.untaught(matrix, column, experts, hidden, values, seed)
        return network, unlearned_of(kernels, hardware.multiprocessors)
    network, fits = gone_on(start, kernels, hardware.multiprocessors)
    if experts > len(teaching.networks_of(network)):
        network = teaching.copied(network, matrix, column, experts)
    return network, fits


def unlearned_of(kernels: npt.NDArray[np.int64], multiprocessors: int) -> Fits:
    """Fits of kernels, `PARTS` of each, of which nothing is known yet."""
    (tiles, tile), (rests, rest) = vocabulary(kernels)
    exists = np.zeros((len(tiles), len(rests)), dtype=np.bool_)
    exists[tile, rest] = True
    return unlearned(grid_of(kernels), exists, multiprocessors)


def gone_on(start: Choice, kernels: npt.NDArray[np.int64], multiprocessors: int) -> tuple[Network | Experts, Fits]:
    """A choice's network and fits for other kernels: what it does not know is worth nothing, and has its least bias.

    Args:
        start: The choice.
        kernels: `PARTS` of those to learn.
        multiprocessors: Of the GPU that they are to be learned for.
    """
    layers = teaching.stacked(teaching.networks_of(start.network))
    weights, biases = layers[-1]
    known, wanted = vocabulary(start.kernels), vocabulary(kernels)
    columns, levels, first = list[npt.NDArray[np.float32]](), list[npt.NDArray[np.float32]](), 0
    for (before, _), (now, _) in zip(known, wanted, strict=True):
        own = slice(first, first + len(before))
        last = np.zeros((*weights.shape[:-1], len(now)), np.float32)
        level = np.repeat(biases[..., own].min(axis=-1, keepdims=True), len(now), axis=-1)
        mine, its = _both_have(now, before)
        last[..., mine], level[..., mine] = weights[..., own][..., its], biases[..., own][..., its]
        columns.append(last)
        levels.append(level)
        first += len(before)
    for array, kept in ((weights, columns), (biases, levels)):
        context = np.zeros((*array.shape[:-1], CONTEXT), np.float32)
        context[..., : array.shape[-1] - first] = array[..., first:]
        kept.append(context)
    ending = np.concatenate(columns, axis=-1), np.concatenate(levels, axis=-1)
    return teaching.with_layers(start.network, [*layers[:-1], ending]), _fits_gone_on(start, kernels, multiprocessors)


def _both_have(now: npt.NDArray[Any], before: npt.NDArray[Any]) -> tuple[list[int], list[int]]:
    """Places of what there is in both, rows or single values, in the one and in the other."""
    place = {str(row): number for number, row in enumerate(before.tolist())}
    found = [(number, place[key]) for number, row in enumerate(now.tolist()) if (key := str(row)) in place]
    return [mine for mine, _ in found], [its for _, its in found]


def _fits_gone_on(start: Choice, kernels: npt.NDArray[np.int64], multiprocessors: int) -> Fits:
    """A choice's fits for other kernels; arguments as of `gone_on`."""
    fits = unlearned_of(kernels, multiprocessors)
    if start.fits is None:
        return fits
    known, wanted = vocabulary(start.kernels), vocabulary(kernels)
    (tiles, its_tiles), (rests, its_rests) = (_both_have(now, old) for (now, _), (old, _) in zip(wanted, known, strict=True))
    before, now = start.grid, grid_of(kernels)
    ways = ((now.wide, before.wide), (now.high, before.high), (now.clusters, before.clusters))
    places = [(tiles, its_tiles), *(_both_have(mine, its) for mine, its in ways)]
    for array, its, (mine, theirs) in zip(fits.arrays, start.fits.arrays, places, strict=False):
        array[mine] = its[theirs]
    pairs = start.fits.pairs[np.ix_(its_tiles, its_rests)]
    of_both = fits.pairs[np.ix_(tiles, rests)]
    fits.pairs[np.ix_(tiles, rests)] = np.where((of_both > NEVER) & (pairs > NEVER), pairs, of_both)
    return fits

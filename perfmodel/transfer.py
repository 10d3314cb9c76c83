"""Learning a GPU's kernels from another GPU's model of them.

Two GPUs of one architecture run the same kernels: which shapes are slow, and why, is known from the one; quick launches and some
careful timings of the other say where its memory, its caches and what its library chooses make a difference. An H100 learned so
from 72,658 timings of GEMMs, 1,022,000 launches and the H200's model is 2.6% off in our GEMMs on shapes that no fit saw and 3.0%
in FBGEMM's, by its own data alone 2.9% and 4.0%; in bf16, of which there are most launches, 3.5% by either, by a third of the
timings without launches 4.4% (`python benchmarks/another_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from perfmodel import learn
from perfmodel.choice import Choice
from perfmodel.hardware import HardwareSpec
from perfmodel.judge import SHAPE
from perfmodel.learn import NEXT_ROUNDS, Learned
from perfmodel.model import PerfModel
from perfmodel.opened import model_file

# Of shapes to be judged, so many may be known from the other GPU, as common sizes are: they flatter little, and forgetting them
# takes a minute of a GPU's host for every library's GEMM.
FEW = 0.2


@dataclass(frozen=True)
class Start:
    """What another GPU's model knows of a kernel, to go on from.

    Attributes:
        kernel: Which.
        known: What is stored of it.
        early: The same before the careful timings, where quick launches came first.
        rows: Those careful timings, of which some are left out where it must not know a shape; None where they are not here.
        other: The other GPU.
        hardware: This one.
        choice: What tells which kernel the library chooses on this one.
        launches: Quick launches on this one, without their drift; None for none.
    """

    kernel: str
    known: Learned
    early: Learned | None
    rows: pd.DataFrame | None
    other: HardwareSpec
    hardware: HardwareSpec
    choice: Choice | None
    launches: pd.DataFrame | None

    @cached_property
    def whole(self) -> Learned:
        """All that is known before this GPU's careful timings, from which `learn.train` goes on."""
        return self._here(self.known)

    def without(self, shapes: pd.DataFrame) -> Learned:
        """Likewise, but for what the other GPU's timings of these shapes (m, n, k, groups) taught, unless they are `FEW`."""
        if self.rows is None:
            return self.whole
        theirs, wanted = (pd.MultiIndex.from_frame(rows[SHAPE]) for rows in (self.rows, shapes))
        if wanted.isin(theirs).mean() <= FEW:
            return self.whole
        hidden = theirs.isin(wanted)
        return self._here(learn.train(self.kernel, self.rows[~hidden], self.other, self.early))

    def _here(self, known: Learned) -> Learned:
        here = known._replace(choice=self.choice)
        return here if self.launches is None else learn.learn_more(self.kernel, self.launches, self.hardware, here, self.early)


def begin(first: Learned | Start | None, shapes: pd.DataFrame | None = None) -> Learned | None:
    """What `learn.train` goes on from, ignorant of these shapes."""
    if isinstance(first, Start):
        return first.whole if shapes is None else first.without(shapes)
    return first


def starts(
    model: PerfModel,
    timings: pd.DataFrame | None,
    hardware: HardwareSpec,
    kernels: Iterable[str],
    launches: pd.DataFrame | None = None,
    choices: Mapping[str, Choice] | None = None,
) -> dict[str, Start | Learned]:
    """Where learning a GPU's kernels begins; those that the model does not know are learned from their launches alone.

    Args:
        model: Of the other GPU.
        timings: What it was fitted to; None where that is not here, and it then knows whatever shapes it knows.
        hardware: The GPU to learn.
        kernels: Which.
        launches: As of `learn.learn_first`.
        choices: Likewise; by default what the other GPU's library chooses.
    """
    kernels = list(kernels)
    alike = [kernel for kernel in kernels if kernel in model.manifest["kernels"]]
    told = {kernel: choice for kernel in alike if (choice := model.choice(kernel)) is not None} | dict(choices or {})
    steady = {kernel: rows for kernel, (rows, _) in learn.steadied(launches, hardware, alike, told).items()}
    found: dict[str, Start | Learned] = {}
    for kernel in alike:
        rows = None if timings is None else timings[timings["kernel"] == kernel]
        found[kernel] = Start(
            kernel, *stored(model, kernel), rows, model.hardware, hardware, told.get(kernel), steady.get(kernel)
        )
    return found | learn.learn_first(launches, hardware, set(kernels) - set(alike), choices)


def stored(model: PerfModel, kernel: str) -> tuple[Learned, Learned | None]:
    """A kernel as a fit made it, for a fit to go on with; and as it was before careful timings, if launches came first."""
    network, _ = model.learned(kernel)
    trees = learn.read_trees((model.folder / model_file(kernel)).read_bytes())
    learned = Learned(network, trees, model.choice(kernel), model.least_us(kernel))
    return learned, None if network is None else learned._replace(booster=trees[: trees.num_boosted_rounds() - NEXT_ROUNDS])

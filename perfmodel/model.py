"""The learned kernel-time model: the logarithm of time over roofline, by a small network and gradient-boosted trees."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from perfmodel import opened
from perfmodel.calls import Columns, Sizes, columns_of, kernels_of, of_calls, places_of
from perfmodel.choice import Choice
from perfmodel.compiled import worth_compiling
from perfmodel.data_folder import data_folder
from perfmodel.hardware import HardwareSpec, serving
from perfmodel.kernels import BF16, KERNELS, of_kernel
from perfmodel.network import THREADS, TURN, Network, threads
from perfmodel.opened import choice_file, model_file, network_file
from perfmodel.pairs import Agreement, Asked, Pair, agreed_factors, pairs_in
from perfmodel.prediction import Seen, at_edge, baseline_us, bounds_of, gap_octaves, no_less, wider
from perfmodel.trees import Trees

if TYPE_CHECKING:
    import pandas as pd

    from perfmodel.collectives import CollectiveModel
    from perfmodel.explain import Explanation
    from perfmodel.layouts import LayoutModel
    from perfmodel.overlap import OverlapModel
    from perfmodel.topology import Cluster

Array = npt.NDArray[np.float64]
# Rows of one kernel that a thread works on at once, few enough for its cache; and rows from which on more than one is woken.
_ROWS_AT_ONCE, _MANY_ROWS = 8192, 4096


@dataclass(frozen=True)
class PerfModel:
    """Predicts kernel times on one GPU.

    Attributes:
        hardware: The GPU.
        folder: Where the trees lie.
        manifest: What they were fitted on, how good they are on held-out shapes, and their interval factors.
        calibration: The calibration folder that it came with, if any.
    """

    hardware: HardwareSpec
    folder: Path
    manifest: dict[str, Any]
    calibration: Path | None = field(default=None, kw_only=True)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the fitted model and its data: of kernels, of bf16's other layouts, of what else a step is made of."""
        from perfmodel import attention, fused, in_step, layouts

        digest = hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode())
        for file in (attention.FILE, fused.MANIFEST, in_step.FILE, layouts.MANIFEST):
            if (like := serving(self.hardware, f"models/{file}")) is not None:
                digest.update((data_folder() / like / "models" / file).read_bytes())
        return digest.hexdigest()[:16]

    @property
    def kernel_files(self) -> list[str]:
        """Names of the files in `folder` that hold what was learned of each kernel; of pairs, see `pair_file`."""
        names = []
        for kernel, entry in self.manifest["kernels"].items():
            optional = {"network": network_file(kernel), "choice": choice_file(kernel)}
            names += [model_file(kernel), *(name for part, name in optional.items() if entry.get(part))]
        return names

    @property
    def kernels_fingerprint(self) -> str:
        """Identity of trees and networks of the kernels, from which another GPU's fit begins; other intervals leave it as it is.

        So do other networks of what the library chooses, of which each GPU has its own.
        """
        digest, choices = hashlib.sha256(), {choice_file(kernel) for kernel in self.manifest["kernels"]}
        for name in sorted(set(self.kernel_files) - choices):
            digest.update(name.encode() + (self.folder / name).read_bytes())
        return digest.hexdigest()[:16]

    @cached_property
    def _loaded(self) -> dict[str, tuple[Network | None, Trees]]:
        return {}

    def learned(self, kernel: str) -> tuple[Network | None, Trees]:
        """Network, if it has one, and trees of a kernel that the manifest names, read when first asked for.

        Raises:
            ValueError: a file is missing or damaged.
        """
        if kernel not in self._loaded:
            with_network = bool(self.manifest["kernels"][kernel].get("network"))
            self._loaded[kernel] = opened.learned(self.folder, kernel, with_network)
        return self._loaded[kernel]

    def choice(self, kernel: str) -> Choice | None:
        """What tells which of its kernels the library chooses, where the trees were fitted with that.

        Raises:
            ValueError: its file is missing or damaged.
        """
        return opened.choice(self.folder, kernel) if self.manifest["kernels"][kernel].get("choice") else None

    def seen(self, kernel: str, sizes: Sizes, choice: Choice | None = None) -> Seen:
        """What the trees see of calls of one kernel; with another `choice`, as if the library chose by that."""
        sizes = at_edge(sizes, self.manifest["kernels"][kernel]["range"])
        choice = choice or self.choice(kernel)
        return Seen.of(kernel, sizes, self.hardware, choice, self.learned(kernel)[0], self.planned(kernel))

    def planned(self, kernel: str) -> int:
        """With how much of what is known of a launch its trees were fitted (`perfmodel.features.PLANNED`)."""
        return int(self.manifest["kernels"][kernel].get("planned", 0))

    def least_us(self, kernel: str) -> float:
        """The kernel's shortest call among those that were fitted, in microseconds; 0 of a model that does not say."""
        return float(self.manifest["kernels"][kernel].get("least_us", 0.0))

    @cached_property
    def agreement(self) -> Agreement:
        """Pairs of kernels whose ratio was learned by itself, none of a model that knows of none."""
        kernels, pairs = self.manifest["kernels"], pairs_in(self.manifest)
        return Agreement.of({name: float(kernels[name]["held_out"]["mape"]) for pair in pairs for name in pair}, pairs)

    def pair_trees(self, pair: Pair) -> Trees:
        """Trees of a pair's ratio.

        Raises:
            ValueError: their file is missing or damaged.
        """
        return opened.pair_trees(self.folder, pair)

    def times_of(self, kernel: str, sizes: Sizes, seen: Seen) -> Array:
        """Times of calls of one kernel and both ends of their intervals, (calls, 3), by what its trees see of them."""
        entry = self.manifest["kernels"][kernel]
        ratio = seen.smooth + self.learned(kernel)[1].predict(seen.matrix).astype(np.float64)
        learned = baseline_us(kernel, *sizes, self.hardware, self.planned(kernel)) * np.exp(ratio)
        time = no_less(learned, kernel, sizes, self.hardware, self.least_us(kernel))
        low, high = bounds_of(time, entry, seen.doubt, wider(kernel, sizes, entry)).T
        # However little is known of a call, it does not beat the roofline.
        return np.column_stack([time, no_less(low, kernel, sizes, self.hardware, 0.0), high])

    @overload
    def predict(self, frame: pd.DataFrame) -> pd.DataFrame: ...

    @overload
    def predict(self, frame: Columns) -> Mapping[str, Array]: ...

    def predict(self, frame: pd.DataFrame | Columns) -> pd.DataFrame | Mapping[str, Array]:
        """Times of kernel calls.

        Beyond the largest measured M, N or K a call never takes less for being larger (of the same alignment). Inside, the
        library's own times fall now and then where it changes its kernel: of pairs of H200 timings of aligned GEMMs that
        differ by a factor of two in one size, 1 to 4% by kernel fall by more than 5%, one to less than half. The prediction
        follows by at most a third, and by more than 5% in less than 2% of such pairs. Nothing takes less than 95% of the
        roofline, nor than the shortest call of its kernel that was fitted to.

        Args:
            frame: Columns `kernel`, `m`, `n`, `k` and optionally `groups` (default 1). For a memory-bound kernel `m` and
                `k` are the rows and columns of its input and `n` is 1. A bf16 product reads both operands along K, or as
                its name says how a (m, k) and b (k, n) lie (`torch/bf16_column_row`). A DataFrame, or columns by name.

        Returns:
            Columns `time_us`, `low_us`, `high_us` (a 90% interval, the wider the further a call is from what was measured),
            in the order of `frame`: a DataFrame with its index, or arrays by name where it is no DataFrame. A DataFrame's
            `attrs["extrapolated"]` is the number of calls outside what was measured; `in_range` says which.

        Raises:
            ValueError: an unknown kernel, one without measurements on this GPU, a size that is no whole number from 1 on, or a
                shape that the kernel cannot run.
        """
        return self._predicted(frame, together=False)

    @overload
    def predict_together(self, frame: pd.DataFrame) -> pd.DataFrame: ...

    @overload
    def predict_together(self, frame: Columns) -> Mapping[str, Array]: ...

    def predict_together(self, frame: pd.DataFrame | Columns) -> pd.DataFrame | Mapping[str, Array]:
        """As `predict`, for choosing between the kernels that are asked of one call (m, n, k, groups).

        What two of them differ by is known better than either, since they are off together (`perfmodel.pairs`). So a time
        hangs, by a percent or so, on which other kernels are asked of the same call, and on nothing else; the ends of its
        interval move with it.
        """
        return self._predicted(frame, together=True)

    def alone_and_together(self, frame: pd.DataFrame | Columns) -> tuple[Array, Array]:
        """What `predict` and `predict_together` say, asked once: times and ends of intervals, (rows, 3) each."""
        return self._told(frame, together=True)

    def _predicted(self, frame: pd.DataFrame | Columns, together: bool) -> pd.DataFrame | Mapping[str, Array]:
        """`predict`, or `predict_together`."""
        told = self._told(frame, together)[together]
        columns = dict(zip(("time_us", "low_us", "high_us"), told.T, strict=True))
        return columns if isinstance(frame, Mapping) else self._answer(frame, columns)

    def _told(self, frame: pd.DataFrame | Columns, together: bool) -> tuple[Array, Array]:
        """As `alone_and_together`; the same twice where kernels are not asked `together`.

        What reads an operand across takes as long as with K fastest, by a factor of its layout; where no such are known, as long.
        """
        kernels, sizes = kernels_of(frame), columns_of(frame)
        of = {name: k_fastest for name in set(kernels) if (k_fastest := of_kernel(name)) != name}
        if not of:
            return self._with_k_fastest(kernels, sizes, together)
        alone, told = self._with_k_fastest([of.get(name, name) for name in kernels], sizes, together)
        across = np.flatnonzero([name in of for name in kernels])
        laid = self._laid([kernels[place] for place in across], of_calls(sizes, across))
        return laid(alone, across), laid(told, across)

    def _laid(self, names: Sequence[str], sizes: Sizes) -> Callable[[Array, npt.NDArray[np.intp]], Array]:
        """What changes times and ends of intervals, (calls, 3), of some rows to those of their kernels, which read across."""
        if self.layouts is None:
            return lambda times, rows: times
        factor, off = self.layouts.told([KERNELS[name].layout for name in names], *sizes)

        def laid(times: Array, rows: npt.NDArray[np.intp]) -> Array:
            us, low, high = times[rows].T
            down, up = (np.exp(np.hypot(np.log(ratio), off)) for ratio in (us / low, high / us))
            result, us = times.copy(), us * factor
            # Single and batched products have one roofline.
            bounded = [no_less(end, BF16, sizes, self.hardware, 0.0) for end in (us, us / down)]
            result[rows] = np.stack([*bounded, us * up], axis=1)
            return result

        return laid

    def _with_k_fastest(self, kernels: Sequence[str], sizes: Sizes, together: bool) -> tuple[Array, Array]:
        """As `_told`, of kernels that are learned by themselves."""
        m, n, k, groups = sizes
        for name, size in zip(("m", "n", "k", "groups"), (m, n, k, groups), strict=True):
            if size.shape != (len(kernels),):
                raise ValueError(f"{name} has the shape {size.shape} for {len(kernels)} kernels; give each of them one {name}")
            if (wrong := ~((size >= 1) & (size < 2**62) & (np.floor(size) == size))).any():
                raise ValueError(
                    f"{name} = {size[wrong][0]:g} is no size; m, n, k and groups must be at least 1, and whole numbers"
                )
        result, parts = np.empty((len(kernels), 3)), []
        paired = self.agreement.kernels if together else ()
        for name, rows in places_of(kernels).items():
            self._refuse(name, (m[rows], n[rows], k[rows], groups[rows]))
            # Parts are alike, as many for each thread, and begin where a network's turn of rows does.
            shared = THREADS * -(-len(rows) // (THREADS * _ROWS_AT_ONCE)) if len(rows) > _MANY_ROWS else 1
            ends = np.arange(1, shared) * len(rows) // (shared * TURN) * TURN
            parts += [(name, part) for part in np.split(rows, ends)]

        def fill(part: tuple[str, npt.NDArray[np.intp]]) -> Seen | None:
            name, rows = part
            sizes = of_calls((m, n, k, groups), rows)
            seen = self.seen(name, sizes)
            result[rows] = self.times_of(name, sizes, seen)
            return seen if name in paired else None

        # Each kernel's files are read once before two threads may ask for them.
        names = dict.fromkeys(name for name, _ in parts)
        if len(kernels) < _MANY_ROWS:
            if len(unread := [name for name in names if name not in self._loaded]) >= THREADS:
                # Reading is most of what few rows take. They themselves are too little work to be shared.
                pairs = [pair for pair in self.agreement.pairs if set(pair) <= set(names)] if together else []
                with threads() as pool:
                    for read in (pool.map(self.learned, unread), pool.map(self.pair_trees, pairs)):
                        list(read)
            alone = self._agree(parts, map(fill, parts), (m, n, k, groups), result, map)
        else:
            # A part alone is too small to have the loop compiled; once it is there, parts use it.
            worth_compiling(len(kernels))
            with threads() as pool:
                for found in (pool.map(self.learned, names), pool.map(self.choice, names)):
                    list(found)
                alone = self._agree(parts, pool.map(fill, parts), (m, n, k, groups), result, pool.map)
        return alone, result

    def _agree(
        self,
        parts: Sequence[tuple[str, npt.NDArray[np.intp]]],
        filled: Iterable[Seen | None],
        sizes: Sizes,
        result: Array,
        each: Callable[..., Iterable[Any]],
    ) -> Array:
        """Move times and ends of intervals, (rows, 3), as pairs of kernels ask; returns what they were, (rows, 3).

        Args:
            parts: Kernels and the rows that are asked of each.
            filled: What was seen of a part, whose times are there by then; None where no pair asks for it.
            sizes: m, n, k, groups of all rows.
            result: Times and ends.
            each: As `map`.
        """
        found: dict[str, list[tuple[npt.NDArray[np.intp], Seen]]] = {}
        for (name, rows), seen in zip(parts, filled, strict=True):
            if seen is not None:
                found.setdefault(name, []).append((rows, seen))
        alone = result
        if len(found) > 1:
            alone = result.copy()
            asked = {name: Asked.of(mine) for name, mine in found.items()}
            result *= agreed_factors(self, asked, sizes, result[:, 0], each)[:, None]
            for name, mine in asked.items():
                own = of_calls(sizes, mine.rows)
                result[mine.rows, 0] = no_less(result[mine.rows, 0], name, own, self.hardware, self.least_us(name))
                result[mine.rows, 1] = no_less(result[mine.rows, 1], name, own, self.hardware, 0.0)
        return alone

    def _answer(self, frame: pd.DataFrame, columns: Mapping[str, Array]) -> pd.DataFrame:
        """What `predict` answers to `frame`: these columns, and how many of its calls are extrapolated."""
        import pandas

        answer = pandas.DataFrame(columns, index=frame.index)
        answer.attrs["extrapolated"] = int((~self.in_range(frame)).sum())
        return answer

    @cached_property
    def layouts(self) -> LayoutModel | None:
        """What bf16 products take that read an operand across, of this GPU or of the nearest of which that is known."""
        from perfmodel import layouts

        return layouts.load(self.hardware)

    def knows(self, kernel: str) -> bool:
        """Whether it has times of a kernel."""
        return of_kernel(kernel) in self.manifest["kernels"]

    def _refuse_unknown(self, kernel: str) -> None:
        if not self.knows(kernel):
            known = "has no measurements on" if kernel in KERNELS else "is not a kernel; known on"
            names = sorted(filter(self.knows, KERNELS))
            raise ValueError(f"kernel {kernel!r} {known} {self.hardware.name}: {', '.join(names)}")

    def _refuse(self, kernel: str, sizes: Sizes) -> None:
        """Raise where a kernel is not known here or cannot run one of the shapes."""
        self._refuse_unknown(kernel)
        spec = KERNELS[kernel]
        multiples = (spec.multiple_m, spec.multiple_n, spec.multiple_k)
        for letter, size, multiple in zip("MNK", sizes[:3], multiples, strict=True):
            if (wrong := size % multiple != 0).any():
                raise ValueError(f"{kernel} cannot run {letter} = {size[wrong][0]:.0f}: it is no multiple of {multiple}")
        if spec.kind == "gemm" and (several := sizes[3] != 1).any():
            raise ValueError(f"{kernel} makes one product, not groups = {sizes[3][several][0]:.0f}; name a batched kernel")
        if spec.most_k is not None and (long := sizes[2] > spec.most_k).any():
            raise ValueError(f"{kernel} cannot run K = {sizes[2][long][0]:.0f}: it is more than {spec.most_k}")
        if spec.most_groups is not None and (many := sizes[3] > spec.most_groups).any():
            raise ValueError(f"{kernel} takes at most {spec.most_groups} groups, not {sizes[3][many][0]:.0f}")

    def explain(self, row: Mapping[str, Any] | pd.Series) -> Explanation:
        """Why a call takes as long as predicted: roofline, launch, and what each feature of the shape adds.

        Args:
            row: `kernel`, `m`, `n`, `k` and optionally `groups`.

        Raises:
            ValueError: as `predict`.
        """
        from perfmodel.explain import explain

        return explain(self, row)

    @cached_property
    def collectives(self) -> CollectiveModel:
        """Collectives on this GPU, of the calibration where it measured them, or of a GPU with the same links.

        Raises:
            FileNotFoundError: none were measured.
        """
        from perfmodel import collectives

        return collectives.load(self.hardware, self.calibration)

    @cached_property
    def overlap(self) -> OverlapModel | None:
        """What kernels and collectives that run at once cost each other; None where that is known of no GPU.

        Of the calibration where it measured that, of this GPU, or of the nearest one of which it is known.
        """
        from perfmodel import overlap

        return overlap.load(self.hardware, self.calibration)

    def predict_collective(self, frame: pd.DataFrame, cluster: Cluster | None = None) -> pd.DataFrame:
        """Times of collectives, inside one host or over several; see `CollectiveModel.predict`.

        Args:
            frame: Columns `op`, `dtype`, `ranks`, `groups`, `bytes_per_rank`; `dim` where rows have scales.
            cluster: Hosts and the network between them (`perfmodel.topology`); None for the preset `hgx_<hardware>`.

        Returns:
            Columns `time_us`, `low_us`, `high_us` (a 90% interval), with the index and the order of `frame`.
        """
        return self.collectives.predict(frame, cluster)

    @overload
    def in_range(self, frame: pd.DataFrame) -> pd.Series: ...

    @overload
    def in_range(self, frame: Columns) -> npt.NDArray[np.bool_]: ...

    def in_range(self, frame: pd.DataFrame | Columns) -> pd.Series | npt.NDArray[np.bool_]:
        """Whether each call lies inside the sizes that the kernel was measured at (every dimension, and their product).

        It does not where nothing within half an octave to one in each size was measured, either (`perfmodel.cells`).

        Raises:
            ValueError: an unknown kernel, or one without measurements on this GPU.
        """
        kernels = kernels_of(frame)
        sizes = dict(zip(("m", "n", "k", "groups"), columns_of(frame), strict=True))
        sizes["product"] = sizes["m"] * sizes["n"] * sizes["k"] * sizes["groups"]
        inside = np.empty(len(kernels), dtype=bool)
        for kernel, rows in places_of(kernels).items():
            self._refuse_unknown(kernel)
            entry, mine = self.manifest["kernels"][of_kernel(kernel)], {name: size[rows] for name, size in sizes.items()}
            known = gap_octaves((mine["m"], mine["n"], mine["k"], mine["groups"]), entry) == 0
            for name, (low, high) in entry["range"].items():
                known &= (mine[name] >= low) & (mine[name] <= high)
            inside[rows] = known
        if isinstance(frame, Mapping):
            return inside
        import pandas

        return pandas.Series(inside, index=frame.index)

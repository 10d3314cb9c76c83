"""Time of torch's fused attention on Hopper, by the tiles of queries and keys that its kernels run over.

`scaled_dot_product_attention` is one kernel forward and several backward (cuDNN's, torch 2.11), that keep the scores on the chip;
heads that 8 does not divide are padded with zeros, and flash attention's kernels run. Their time is a launch, what each tile of
queries and each pair of tiles takes, and what each takes for its features, each a cost that `perfmodel.fit_attention` finds. Of
causal attention half the pairs run, and those on the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from perfmodel import hardware as hardware_module
from perfmodel.hardware import HardwareSpec

Array = npt.NDArray[np.float64]

SCHEMA_VERSION = 1
FILE = "attention.json"
FORWARD, BACKWARD = "attention", "attention_backward"
KINDS = (FORWARD, BACKWARD)
PADDED = ":padded"  # of a label: of the features some are zeros, and other kernels run
TILES = {FORWARD: (128, 128), BACKWARD: (128, 64), FORWARD + PADDED: (128, 128), BACKWARD + PADDED: (128, 128)}
"""Queries and keys of a tile that came closest to held-out timings, of twelve pairs from 64 x 32 to 256 x 256, padded of nine."""
FEATURES = {False: 64, True: 32}  # that a tile is filled up to, of others and of padded ones
VECTOR, MOST_FEATURES = 8, 128  # what torch's kernels take, and what was timed
NAMES = ("launch", "groups", "queries", "keys", "query_features", "key_features", "pairs", "pair_features", "elements")


def label_of(queries: int, keys: int, features: int, causal: bool, padded: bool = False) -> str:
    """What an attention kernel is called: it says its sizes, which the elements alone do not."""
    return f"attention:{queries}x{keys}x{features}" + (":causal" if causal else "") + (PADDED if padded else "")


def sizes_of(label: str) -> tuple[int, int, int, bool]:
    """Queries, keys, features of a head, and whether it is causal, by `label_of`'s name.

    Raises:
        ValueError: it is none.
    """
    what, _, rest = label.removesuffix(PADDED).partition(":")
    sizes, _, causal = rest.partition(":")
    numbers = [int(size) for size in sizes.split("x") if size.isdigit()]
    if what != FORWARD or len(numbers) != 3 or causal not in ("", "causal"):
        raise ValueError(
            f"{label!r} names no attention; write it as attention:QUERIESxKEYSxFEATURES, with :causal and :padded behind it if so"
        )
    return numbers[0], numbers[1], numbers[2], bool(causal)


def terms(kind: str, groups: Array, queries: Array, keys: Array, features: Array, causal: Array) -> Array:
    """What each cost of `NAMES` counts, (rows, names).

    Args:
        kind: Of `KINDS`, with `PADDED` behind it of padded operands.
        groups: Samples times heads.
        queries: Tokens that ask.
        keys: Tokens that are seen.
        features: Of a head.
        causal: Whether a query sees only the keys before it.
    """
    wide, high = TILES[kind]
    rows, columns = np.ceil(queries / wide), np.ceil(keys / high)
    pairs = np.where(causal, (rows * columns + np.maximum(rows, columns)) / 2, rows * columns)
    fill = FEATURES[kind.endswith(PADDED)]
    filled = np.ceil(features / fill) * fill
    each = (
        np.ones_like(groups), groups, groups * rows, groups * columns, groups * rows * filled, groups * columns * filled,
        groups * pairs, groups * pairs * filled, groups * queries * features,
    )  # fmt: skip
    return np.stack(each, axis=1)


@dataclass(frozen=True)
class AttentionModel:
    """Costs in microseconds by kind, as of `NAMES`, and the factors of a 90% interval of held-out timings.

    Of padded operands by the kind with `PADDED` behind, or where none were timed as of others.
    """

    costs: dict[str, Array]
    factors: dict[str, tuple[float, float]]

    def times(self, kind: str, label: str, kept: int) -> tuple[float, float, float]:
        """Microseconds of a kernel and the ends of a 90% interval.

        Args:
            kind: Of `KINDS`.
            label: As of `label_of`.
            kept: Queries of all samples and heads.
        """
        queries, keys, features, causal = sizes_of(label)
        sizes = (np.array([float(value)]) for value in (kept / max(queries, 1), queries, keys, features, causal))
        of = kind + PADDED if label.endswith(PADDED) and kind + PADDED in self.costs else kind
        us = float(terms(of, *sizes)[0] @ self.costs[of])
        low, high = self.factors[of]
        return us, us * low, us * high


@cache
def load(hardware: HardwareSpec) -> AttentionModel | None:
    """Of a GPU, or of the nearest shipped one where attention was timed; None where there is none.

    Raises:
        ValueError: the file is of another schema version.
    """
    found = hardware_module.fitted(hardware, FILE, SCHEMA_VERSION)
    if found is None:
        return None
    kinds = found[0]["kinds"]
    costs = {kind: np.array([kinds[kind]["costs_us"].get(name, 0.0) for name in NAMES]) for kind in kinds}
    return AttentionModel(costs, {kind: tuple(kinds[kind]["interval_factors"]) for kind in kinds})

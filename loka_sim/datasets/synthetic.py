"""A seeded stream with Criteo's shape, for those who have no data and for long runs.

13 counts are log-normal with heavy tails, some missing; 26 categories follow power laws over their tables; a label
is drawn from a logistic model of main effects, field interactions and counts, so that there is something to learn.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loka_sim.datasets.base import Batch, Dataset, hashed, mix
from loka_sim.errors import UserError
from loka_sim.inputs import InputShape

CHUNK = 8_192
LATENT = 4
# Of Criteo's public sample: about a quarter of the labels are clicks, a fifth of the counts are missing.
BASE_LOGIT = -2.1
MISSING_COUNTS = 0.2
MISSING_CATEGORIES = 0.1


class SyntheticDataset(Dataset):
    """Samples made as they are asked for; the same (seed, split) gives the same samples, however they are chunked.

    Args:
        rows: Number of samples.
        split: `train` or `dev`: different samples of the same law.
        shape: What a sample has; any number of dense features and fields.
        seed: Of the law and of the samples.

    Raises:
        UserError: no rows, or a table has fewer than 2.
    """

    def __init__(self, rows: int, split: str, shape: InputShape, seed: int = 0) -> None:
        """See the class."""
        if rows < 1:
            raise UserError(f"synthetic rows = {rows}; ask for at least 1")
        if min(*shape.rows, shape.sequence_rows) < 2:
            raise UserError("a table has fewer than 2 rows; give room for a missing value and one present")
        self.name, self.shape, self.rows, self.seed = "synthetic", shape, rows, seed
        self._split = 0 if split == "train" else 1
        law = np.random.default_rng((seed, 2))
        fields = len(shape.rows)
        self._exponents = law.uniform(1.05, 1.6, fields)
        self._scales = law.uniform(0.5, 2.5, shape.dense)
        self._locations = law.uniform(0.0, 3.0, shape.dense)
        self._count_effects = law.normal(0.0, 0.3 / np.sqrt(max(shape.dense, 1)), shape.dense)
        self._field_scale = law.uniform(0.1, 0.5, fields)

    def provenance(self) -> dict[str, str | int]:
        """See `Dataset.provenance`."""
        return {"name": self.name, "rows": self.rows, "seed": self.seed}

    def chunks(self, rows: int) -> Iterator[Batch]:
        """See `Dataset.chunks`."""
        held: list[Batch] = []
        for index in range(-(-self.rows // CHUNK)):
            held.append(self._make(index, min(CHUNK, self.rows - index * CHUNK)))
            joined = Batch.join(held)
            while len(joined) >= rows:
                yield joined.take(slice(0, rows))
                joined = joined.take(slice(rows, None))
            held = [joined]
        if held and len(held[0]):
            yield held[0]

    def _make(self, index: int, count: int) -> Batch:
        """Chunk number `index`, cut to its first `count` samples."""
        rng = np.random.default_rng((self.seed, self._split, index))
        size = (CHUNK, self.shape.dense)
        # A normal over a gamma gives the logarithm Student-like tails: counts heavier than log-normal.
        spread = rng.standard_normal(size) / np.sqrt(rng.gamma(4.0, 0.25, size))
        counts = np.floor(np.exp(np.minimum(self._locations + self._scales * spread, 40.0)))
        dense = np.where(rng.random(size) < MISSING_COUNTS, 0.0, np.log1p(counts)).astype(np.float32)
        ranks = self._ranks(rng)
        absent = rng.random(ranks.shape) < MISSING_CATEGORIES
        ids = np.where(absent, 0, ranks)
        logit = self._logit(dense, ids)
        labels = (rng.random(CHUNK) < 1.0 / (1.0 + np.exp(-logit))).astype(np.float32)
        return Batch(dense, ids, self._sequence(ids), labels).take(slice(0, count))

    def _ranks(self, rng: np.random.Generator) -> np.ndarray:
        """(CHUNK, fields) ids from 1, a bounded power law: P(id) falls as id ** -exponent."""
        room = np.asarray(self.shape.rows, np.float64) - 1.0
        power = 1.0 - self._exponents
        uniform = rng.random((CHUNK, len(room)))
        ranks = ((np.power(room + 1.0, power) - 1.0) * uniform + 1.0) ** (1.0 / power)
        return np.minimum(np.floor(ranks), room).astype(np.int64)

    def _normal(self, ids: np.ndarray, salt: int) -> np.ndarray:
        """A standard normal per (field, id): the same at every call, without a table of effects."""
        salted = ((self.seed * 977 + salt) % 2**18) << 44
        key = mix(ids ^ (np.arange(ids.shape[1], dtype=np.int64) << 32) ^ salted)
        first = ((key >> np.uint64(40)).astype(np.float64) + 0.5) / 2**24
        second = (key & np.uint64(0xFFFFFF)).astype(np.float64) / 2**24
        return np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second)

    def _logit(self, dense: np.ndarray, ids: np.ndarray) -> np.ndarray:
        main = (self._normal(ids, 0) * self._field_scale).sum(axis=1)
        # Pairwise interactions as a factorization machine: ((sum v)^2 - sum v^2) / 2 over a few latent directions.
        vectors = np.stack([self._normal(ids, 1 + axis) for axis in range(LATENT)], axis=2)
        total, squares = vectors.sum(axis=1), np.square(vectors).sum(axis=1)
        pairs = ((np.square(total) - squares) / 2).sum(axis=1) / (2.0 * ids.shape[1])
        counts = (dense - self._locations) @ self._count_effects
        return BASE_LOGIT + main + 0.3 * pairs + counts

    def _sequence(self, ids: np.ndarray) -> np.ndarray:
        """The sample's own categories as tokens, as the Criteo reader does."""
        column = np.arange(ids.shape[1], dtype=np.int64) << 40
        tokens = np.where(ids > 0, hashed(ids ^ column, self.shape.sequence_rows), 0)
        length = self.shape.sequence_length
        if length <= tokens.shape[1]:
            return tokens[:, tokens.shape[1] - length :]
        return np.pad(tokens, ((0, 0), (length - tokens.shape[1], 0)))

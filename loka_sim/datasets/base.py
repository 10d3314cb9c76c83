"""What every dataset is: an iterator of batches of numpy arrays, with the shape that a model must be built for."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loka_sim.errors import DataError
from loka_sim.inputs import InputShape

SPLITS = ("train", "dev")
BUFFER_ROWS = 65_536


@dataclass(frozen=True)
class Batch:
    """Samples.

    Attributes:
        dense: (B, dense) float32.
        ids: (B, fields) int64, each below its table's rows; 0 is a missing value.
        sequence: (B, length) int64, most recent last; 0 is padding.
        labels: (B,) float32, 1 for a click.
    """

    dense: np.ndarray
    ids: np.ndarray
    sequence: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.labels)

    def take(self, index: np.ndarray | slice) -> Batch:
        """The samples at `index`."""
        return Batch(self.dense[index], self.ids[index], self.sequence[index], self.labels[index])

    @staticmethod
    def join(parts: list[Batch]) -> Batch:
        """All samples of several batches, in order."""
        return Batch(
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.sequence for part in parts]),
            np.concatenate([part.labels for part in parts]),
        )


class Dataset(ABC):
    """A named split that can be read again and again.

    Attributes:
        name: What it is called in a manifest.
        shape: What its samples have.
    """

    name: str
    shape: InputShape

    @abstractmethod
    def provenance(self) -> dict[str, str | int]:
        """What a manifest says of the data: the name, and what tells them apart from others of that name."""

    @abstractmethod
    def chunks(self, rows: int) -> Iterator[Batch]:
        """All samples in their order, up to `rows` at a time."""

    def batches(self, size: int, seed: int | None = None, buffer: int = BUFFER_ROWS) -> Iterator[Batch]:
        """One pass in batches of exactly `size`; what is left at the end is dropped.

        Args:
            size: Samples per batch.
            seed: Shuffles within a buffer of `buffer` rows (a smaller set as a whole); None keeps the order.
            buffer: Rows held in memory.

        Raises:
            DataError: fewer than `size` samples, or the file is damaged.
        """
        rng = None if seed is None else np.random.default_rng(seed)
        rest: list[Batch] = []
        yielded = False
        for chunk in self.chunks(max(buffer, size)):
            joined = Batch.join([*rest, chunk])
            if rng is not None:
                joined = joined.take(rng.permutation(len(joined)))
            whole = len(joined) // size * size
            for start in range(0, whole, size):
                yielded = True
                yield joined.take(slice(start, start + size))
            rest = [joined.take(slice(whole, None))]
        if not yielded:
            raise DataError(f"{self.name} has fewer samples than one batch of {size}; give a smaller batch")

    def read(self) -> Batch:
        """All samples in memory.

        Raises:
            DataError: there are none, or the file is damaged.
        """
        parts = list(self.chunks(BUFFER_ROWS))
        if not parts:
            raise DataError(f"{self.name} has no samples; give a file with at least one line")
        return Batch.join(parts)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def mix(values: np.ndarray) -> np.ndarray:
    """A 64-bit hash of integers (the finalizer of SplitMix64), the same on every machine."""
    x = np.asarray(values).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hashed(values: np.ndarray, rows: np.ndarray | int) -> np.ndarray:
    """Ids from 1 to rows - 1 for integer values that are present; `rows` must be at least 2."""
    room = np.asarray(rows).astype(np.uint64) - np.uint64(1)
    return (mix(values) % room).astype(np.int64) + 1


class FrequentOnly(Dataset):
    """A dataset whose rare ids (categories and sequence tokens) count as missing, the usual treatment of Criteo data.

    Args:
        dataset: The split to read.
        keep: By table, which ids stay (see `frequent`); the last entry is the sequence table's.
    """

    def __init__(self, dataset: Dataset, keep: list[np.ndarray]) -> None:
        """See the class."""
        self.name, self.shape, self._dataset, self._keep = dataset.name, dataset.shape, dataset, keep

    def provenance(self) -> dict[str, str | int]:
        """See `Dataset.provenance`."""
        return self._dataset.provenance()

    def chunks(self, rows: int) -> Iterator[Batch]:
        """See `Dataset.chunks`."""
        for batch in self._dataset.chunks(rows):
            columns = [column * keep[column] for column, keep in zip(batch.ids.T, self._keep[:-1], strict=True)]
            sequence = batch.sequence * self._keep[-1][batch.sequence]
            yield Batch(batch.dense, np.stack(columns, axis=1), sequence, batch.labels)


def frequent(dataset: Dataset, least: int) -> list[np.ndarray]:
    """By table (the sequence table last), a boolean per id: seen at least `least` times in the dataset."""
    rows = (*dataset.shape.rows, dataset.shape.sequence_rows)
    counts = [np.zeros(count, np.int64) for count in rows]
    for batch in dataset.chunks(BUFFER_ROWS):
        for column, count in zip((*batch.ids.T, batch.sequence.reshape(-1)), counts, strict=True):
            count += np.bincount(column, minlength=len(count))
    return [count >= least for count in counts]

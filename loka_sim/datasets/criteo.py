"""The Criteo display-advertising TSV format: a label, 13 counts, 26 categories in hexadecimal, empty where missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from loka_sim.datasets.base import Batch, Dataset, file_digest, hashed
from loka_sim.errors import DataError, UserError
from loka_sim.inputs import FIELDS, InputShape

COUNTS = 13
COLUMNS = 1 + COUNTS + FIELDS
TOKENS = COUNTS + FIELDS
# Without a file of its own, every tenth line of the training file is the dev split.
HELD_OUT = 10
MISSING = -1
_MISSING_COUNT = np.iinfo(np.int64).min


class CriteoDataset(Dataset):
    """Samples of a Criteo file.

    A count x becomes log(1 + max(x, 0)), a missing one 0. A category is hashed to its table's rows 1 and up, a missing
    one is 0. Criteo has no history, so the sequence is the sample itself: its 13 counts (as powers of two) and its 26
    categories as 39 tokens in the file's order, each hashed together with its column, a missing one being padding.

    Args:
        path: A file, or a folder with `train.tsv` (or `train.txt`) and, possibly, `dev.tsv`. Without a dev file every
            tenth line of the training file belongs to the dev split and to no other.
        split: `train` or `dev`.
        shape: What the model wants: 13 dense features, 26 fields, any table sizes and sequence length.

    Raises:
        DataError: there is no such file.
        UserError: the shape is not Criteo's.
    """

    def __init__(self, path: Path, split: str, shape: InputShape) -> None:
        """See the class."""
        if shape.dense != COUNTS or len(shape.rows) != FIELDS:
            raise UserError(
                f"Criteo has {COUNTS} counts and {FIELDS} fields, the model {shape.dense} and {len(shape.rows)};"
                " build it for Criteo's shape"
            )
        if min(*shape.rows, shape.sequence_rows) < 2:
            raise UserError("a table has fewer than 2 rows; give room for a missing value and one present")
        self.name, self.shape = "criteo", shape
        self.path, self._keep = _file(Path(path), split)
        self._rows = np.asarray(shape.rows)

    def provenance(self) -> dict[str, str | int]:
        """See `Dataset.provenance`."""
        return {"name": self.name, "file": self.path.name, "sha256": file_digest(self.path)}

    def chunks(self, rows: int) -> Iterator[Batch]:
        """See `Dataset.chunks`.

        Raises:
            DataError: a line is malformed; names the file, the line and the column.
        """
        parsed: list[list[int]] = []
        try:
            with self.path.open(encoding="utf-8") as stream:
                for number, line in enumerate(stream, start=1):
                    if self._keep is None or (number % HELD_OUT == 0) == self._keep:
                        parsed.append(self._parse(number, line.rstrip("\r\n")))
                    if len(parsed) == rows:
                        yield self._batch(parsed)
                        parsed = []
        except UnicodeDecodeError:
            raise DataError(f"{self.path} is not text; give Criteo's tab-separated file, unpacked") from None
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}; give a file that you may read") from None
        if parsed:
            yield self._batch(parsed)

    def _parse(self, number: int, line: str) -> list[int]:
        """Label, counts and categories as integers."""
        columns = line.split("\t")
        if len(columns) != COLUMNS:
            raise DataError(
                f"{self.path}:{number}: {len(columns)} columns, expected {COLUMNS} (label, {COUNTS} counts,"
                f" {FIELDS} categories, tab-separated); mend or drop the line"
            )
        if columns[0] not in ("0", "1"):
            raise DataError(f"{self.path}:{number}: label is '{columns[0]}', expected 0 or 1; mend or drop the line")
        values = [int(columns[0])]
        for index, text in enumerate(columns[1:], start=2):
            count = index <= 1 + COUNTS
            try:
                if not text:
                    values.append(_MISSING_COUNT if count else MISSING)
                else:
                    value = int(text, 10 if count else 16)
                    if not (-(2**62) if count else 0) <= value < 2**62:
                        raise ValueError
                    values.append(value)
            except ValueError:
                kind = "an integer" if count else "hexadecimal"
                raise DataError(
                    f"{self.path}:{number}: column {index} is '{text[:32]}', expected {kind}; mend or drop the line"
                ) from None
        return values

    def _batch(self, parsed: list[list[int]]) -> Batch:
        table = np.array(parsed, np.int64)
        counts, categories = table[:, 1 : 1 + COUNTS], table[:, 1 + COUNTS :]
        known = counts != _MISSING_COUNT
        dense = np.where(known, np.log1p(np.maximum(counts, 0)), 0.0).astype(np.float32)
        ids = np.where(categories == MISSING, 0, hashed(categories, self._rows))
        return Batch(dense, ids, self._sequence(counts, known, categories), table[:, 0].astype(np.float32))

    def _sequence(self, counts: np.ndarray, known: np.ndarray, categories: np.ndarray) -> np.ndarray:
        powers = np.ceil(np.log2(np.maximum(counts, 0) + 1.0)).astype(np.int64)
        values = np.concatenate((powers, categories), axis=1)
        present = np.concatenate((known, categories != MISSING), axis=1)
        column = np.arange(TOKENS, dtype=np.int64) << 40
        tokens = np.where(present, hashed(values ^ column, self.shape.sequence_rows), 0)
        length = self.shape.sequence_length
        if length <= TOKENS:
            return tokens[:, TOKENS - length :]
        return np.pad(tokens, ((0, 0), (length - TOKENS, 0)))


def _file(path: Path, split: str) -> tuple[Path, bool | None]:
    """The file to read, and which of its lines: None all, True every tenth, False all others."""
    if path.is_file():
        return path, split == "dev"
    found = {
        name: candidate
        for name in ("train", "dev")
        for suffix in ("txt", "tsv")
        if (candidate := path / f"{name}.{suffix}").is_file()
    }
    if split == "dev" and "dev" in found:
        return found["dev"], None
    if "train" not in found:
        raise DataError(f"{path} has no train.tsv or train.txt; give Criteo's folder or file")
    return found["train"], None if "dev" in found else split == "dev"

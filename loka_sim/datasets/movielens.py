"""MovieLens in RecBole's atomic files: `*.inter`, `*.item`, `*.user`, each with a header of `name:type` columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loka_sim.datasets.base import Batch, Dataset, file_digest
from loka_sim.errors import DataError
from loka_sim.inputs import InputShape

DENSE = 3
TYPES = ("token", "token_seq", "float", "float_seq")


@dataclass(frozen=True)
class AtomicTable:
    """One atomic file: columns of text or numbers, by name."""

    path: Path
    types: dict[str, str]
    columns: dict[str, list[str]]

    def require(self, *names: str) -> None:
        """Raises `DataError` naming a column that is missing."""
        for name in names:
            if name not in self.columns:
                raise DataError(f"{self.path}:1: no column '{name}'; the file has {', '.join(self.columns)}")

    def numbers(self, name: str) -> np.ndarray:
        """A float64 column. Raises `DataError` naming file and line of what is no number."""
        values = np.empty(len(self.columns[name]))
        for index, text in enumerate(self.columns[name]):
            try:
                values[index] = float(text)
            except ValueError:
                raise DataError(f"{self.path}:{index + 2}: {name} is '{text[:32]}', expected a number") from None
        return values


def read_atomic(path: Path) -> AtomicTable:
    """Reads one atomic file.

    Raises:
        DataError: it is missing, has no typed header, or a line has another number of columns.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{path} is missing; give a folder with .inter, .item and .user files") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; give RecBole's atomic files") from None
    header = lines[0].split("\t") if lines else []
    types = dict(column.split(":", 1) for column in header if ":" in column)
    if not header or len(types) != len(header) or not set(types.values()) <= set(TYPES):
        raise DataError(f"{path}:1: expected a header of name:type columns (types {', '.join(TYPES)})")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        cells = line.split("\t")
        if len(cells) != len(header):
            raise DataError(f"{path}:{number}: {len(cells)} columns, expected {len(header)}; mend or drop the line")
        rows.append(cells)
    transposed = list(zip(*rows, strict=True)) if rows else [()] * len(header)
    return AtomicTable(path, types, {name: list(cells) for name, cells in zip(types, transposed, strict=True)})


class MovieLensDataset(Dataset):
    """Interactions in the order of time; a rating of at least `click_rating` is a click.

    Fields are every token column of users, items and interactions. Dense features, all known before the interaction:
    its time as a share of the training split's span, log(1 + clicks and non-clicks so far), share of clicks so far.
    The sequence is the user's clicked items so far, most recent last.

    Args:
        path: Folder of the three atomic files.
        split: `train` or `dev`: the last `dev_share` of all interactions, by time.
        sequence_length: Tokens of a sequence.
        click_rating: Least rating that counts as a click.
        dev_share: Share of the interactions in the dev split.

    Raises:
        DataError: a file is missing or malformed; names file and line.
    """

    def __init__(
        self, path: Path, split: str, *, sequence_length: int = 44, click_rating: float = 4.0, dev_share: float = 0.1
    ) -> None:
        """See the class."""
        self.name = "movielens"
        stem = _stem(Path(path))
        tables = {kind: read_atomic(stem.with_suffix(f".{kind}")) for kind in ("inter", "item", "user")}
        tables["inter"].require("user_id", "item_id", "rating", "timestamp")
        tables["item"].require("item_id")
        tables["user"].require("user_id")
        inter = tables["inter"]
        self._inter = inter.path
        times = inter.numbers("timestamp")
        order = np.argsort(times, kind="stable")
        clicks = (inter.numbers("rating") >= click_rating).astype(np.float32)[order]
        users, user_rows = _codes(inter, "user_id", tables["user"], order)
        items, item_rows = _codes(inter, "item_id", tables["item"], order)
        fields = [_vocabulary(inter.columns[name])[order] for name in _extra_fields(inter)]
        for table, rows in ((tables["user"], user_rows), (tables["item"], item_rows)):
            for name, kind in table.types.items():
                if kind in ("token", "token_seq"):
                    fields.append(_vocabulary(table.columns[name])[rows])
        ids = np.stack(fields, axis=1)
        cut = len(order) - int(len(order) * dev_share)
        sequence, past = _histories(users, items, clicks, sequence_length)
        start, span = times[order[0]], max(times[order[cut - 1]] - times[order[0]], 1.0)
        dense = np.stack(((times[order] - start) / span, np.log1p(past[:, 0]), past[:, 1] / np.maximum(past[:, 0], 1)), axis=1)
        everything = Batch(dense.astype(np.float32), ids, sequence, clicks)
        rows_per_field = tuple(int(column.max()) + 1 for column in ids.T)
        self.shape = InputShape(DENSE, rows_per_field, int(items.max()) + 1, sequence_length)
        self._batch = everything.take(slice(None, cut) if split == "train" else slice(cut, None))

    def provenance(self) -> dict[str, str | int]:
        """See `Dataset.provenance`."""
        return {"name": self.name, "file": self._inter.name, "sha256": file_digest(self._inter)}

    def chunks(self, rows: int) -> Iterator[Batch]:
        """See `Dataset.chunks`."""
        for start in range(0, len(self._batch), rows):
            yield self._batch.take(slice(start, start + rows))


def _stem(path: Path) -> Path:
    """The common path of the three files, without the suffix."""
    if path.is_file():
        return path.with_suffix("")
    found = sorted(path.glob("*.inter"))
    if len(found) != 1:
        raise DataError(f"{path} has {len(found)} .inter files; give a folder with one, or the file itself")
    return found[0].with_suffix("")


def _extra_fields(inter: AtomicTable) -> list[str]:
    """Token columns of the interactions beside the two keys."""
    return [name for name, kind in inter.types.items() if kind == "token" and name not in ("user_id", "item_id")]


def _vocabulary(values: list[str]) -> np.ndarray:
    """Ids from 1 in the order of the sorted values; 0 for an empty one."""
    ids = {text: index for index, text in enumerate(sorted(set(values) - {""}), start=1)}
    return np.array([ids.get(text, 0) for text in values], np.int64)


def _codes(inter: AtomicTable, key: str, table: AtomicTable, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids from 1 of a key column, and the row of `table` that each interaction refers to."""
    index = {text: row for row, text in enumerate(table.columns[key])}
    rows = np.empty(len(order), np.int64)
    for position, text in enumerate(inter.columns[key]):
        if text not in index:
            raise DataError(f"{inter.path}:{position + 2}: {key} '{text}' is not in {table.path.name}; add it there")
        rows[position] = index[text]
    return rows[order] + 1, rows[order]


def _histories(users: np.ndarray, items: np.ndarray, clicks: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Each interaction's earlier clicked items (B, length), and (B, 2) interactions and clicks of its user so far."""
    sequence = np.zeros((len(users), length), np.int64)
    past = np.zeros((len(users), 2))
    clicked: dict[int, list[int]] = {}
    seen: dict[int, int] = {}
    for index, (user, item, click) in enumerate(zip(users.tolist(), items.tolist(), clicks.tolist(), strict=True)):
        history = clicked.setdefault(user, [])
        recent = history[-length:]
        if recent:
            sequence[index, length - len(recent) :] = recent
        past[index] = seen.get(user, 0), len(history)
        seen[user] = seen.get(user, 0) + 1
        if click:
            history.append(item)
    return sequence, past

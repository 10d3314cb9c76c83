"""The files of a models folder that hold what was learned: their names, and what is in them, read once."""

from __future__ import annotations

import gzip
import zlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from perfmodel.choice import Choice
from perfmodel.network import Network
from perfmodel.pairs import Pair, pair_file
from perfmodel.trees import Trees


def model_file(kernel: str) -> str:
    """File name of a kernel's trees inside the models folder."""
    return kernel.replace("/", "__") + ".ubj.gz"


def network_file(kernel: str) -> str:
    """File name of a kernel's network, where it has one."""
    return kernel.replace("/", "__") + ".network.json.gz"


def choice_file(kernel: str) -> str:
    """File name of what tells which of its kernels the library chooses, where there is such a thing."""
    return kernel.replace("/", "__") + ".choice.json.gz"


class _Stamp(NamedTuple):
    """A file as it is now: another one of the same name has another time or size."""

    path: Path
    changed_ns: int
    size: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        """The file's, or a stamp that no file has where there is none."""
        try:
            found = path.stat()
        except OSError:
            return cls(path, -1, -1)
        return cls(path, found.st_mtime_ns, found.st_size)


def learned(folder: Path, kernel: str, with_network: bool) -> tuple[Network | None, Trees]:
    """A kernel's network, if it has one, and trees.

    Raises:
        ValueError: a file is missing or damaged.
    """
    names = [model_file(kernel), *([network_file(kernel)] if with_network else [])]
    return _learned(*(_Stamp.of(folder / name) for name in names))


def choice(folder: Path, kernel: str) -> Choice:
    """What tells which of its kernels the library chooses.

    Raises:
        ValueError: its file is missing or damaged.
    """
    return _choice(_Stamp.of(folder / choice_file(kernel)))


def pair_trees(folder: Path, pair: Pair) -> Trees:
    """Trees of a pair's ratio.

    Raises:
        ValueError: their file is missing or damaged.
    """
    return _pair_trees(_Stamp.of(folder / pair_file(pair)))


@lru_cache(maxsize=128)
def _learned(trees: _Stamp, network: _Stamp | None = None) -> tuple[Network | None, Trees]:
    """What a kernel's files hold; models that are opened again share it."""
    path = trees.path
    try:
        forest, smooth = Trees(path.read_bytes()), None
        if network is not None:
            path = network.path
            smooth = Network.load(gzip.decompress(path.read_bytes()))
    except (EOFError, OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} is missing or truncated; copy the folder again") from error
    return smooth, forest


@lru_cache(maxsize=128)
def _choice(saved: _Stamp) -> Choice:
    """What a kernel's file of choices holds; models that are opened again share it."""
    try:
        return Choice.load(gzip.decompress(saved.path.read_bytes()))
    except (EOFError, OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{saved.path} is missing or truncated; copy the folder again") from error


@lru_cache(maxsize=32)
def _pair_trees(saved: _Stamp) -> Trees:
    """What a pair's file holds; models that are opened again share it."""
    try:
        return Trees(saved.path.read_bytes())
    except (EOFError, OSError, zlib.error, ValueError) as error:
        raise ValueError(f"{saved.path} is missing or truncated; copy the folder again") from error

"""One process at a time on a GPU that is being timed, whichever processes take part."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class GpuLock:
    """A lock in a file: held by one of all processes that name the same file.

    It may be taken again by the process that holds it, is given back by the system when its holder dies, and travels to
    spawned processes as its path.
    """

    def __init__(self, path: str | Path) -> None:
        """The file is made where it is not there; its folder must be."""
        self._path, self._depth, self._file = str(path), 0, -1

    def __reduce__(self) -> tuple[type[GpuLock], tuple[str]]:
        """The path alone."""
        return GpuLock, (self._path,)

    def __enter__(self) -> GpuLock:
        """Waits until no other process holds it."""
        if not self._depth:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        """Lets the next one in."""
        self._depth -= 1
        if not self._depth:
            os.close(self._file)

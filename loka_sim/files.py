"""Writing files so that nothing is left half-written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from loka_sim.errors import UserError


def write_bytes_atomic(path: Path, payload: bytes) -> None:
    """Write to a temporary file beside `path`, then rename it into place.

    Raises:
        UserError: the folder cannot be written to.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"cannot write {path}: a file stands where a folder of that path should be; choose another") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that you may write to") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(payload)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that you may write to") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text_atomic(path: Path, text: str) -> None:
    """`write_bytes_atomic` for UTF-8 text."""
    write_bytes_atomic(path, text.encode())

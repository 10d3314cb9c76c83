"""Writing files so that nothing is left half-written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from loka_sim.errors import UserError


def write_bytes_atomic(path: Path, payload: bytes) -> None:
    """Write to a temporary file beside `path`, then rename it into place.

    A link stays a link, to what it leads to. A pipe or a device (`/dev/stdout`, `/dev/null`) is written to as it is: a file
    that took its name would be in its place for everybody.

    Raises:
        UserError: the folder cannot be written to.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder; name a file")
    if path.exists() and not path.is_file():
        try:
            path.write_bytes(payload)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that you may write to") from None
        return
    try:
        place = Path(os.path.realpath(path))
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"cannot write {path}: a file stands where a folder of that path should be; choose another") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that you may write to") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(payload)
        os.chmod(temporary, 0o644)
        os.replace(temporary, place)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; choose a folder that you may write to") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text_atomic(path: Path, text: str) -> None:
    """`write_bytes_atomic` for UTF-8 text."""
    write_bytes_atomic(path, text.encode())

"""Errors a user can cause: one line that says what is wrong and the mend, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LokaSimError(Exception):
    """An expected error; its text is the one line a user sees."""

    exit_code = 1


class UserError(LokaSimError):
    """Usage or configuration is wrong (exit code 2)."""

    exit_code = 2


class DataError(LokaSimError):
    """Data or a GPU is not there (exit code 3)."""

    exit_code = 3


@contextmanager
def expected_of_lower_floors() -> Iterator[None]:
    """Turn what `numerics` and `perfmodel` raise for a user's mistake into this floor's errors.

    They raise ValueError for a wrong argument and FileNotFoundError for data that are missing, each with a
    one-line message. Wrap only the call that a user's argument reaches: a ValueError from elsewhere is a bug.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error
    except FileNotFoundError as error:
        raise DataError(str(error)) from error

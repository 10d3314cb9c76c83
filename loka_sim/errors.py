"""Errors a user can cause: one line that says what is wrong and the mend, and an exit code."""

from __future__ import annotations


class LokaSimError(Exception):
    """An expected error; its text is the one line a user sees."""

    exit_code = 1


class UserError(LokaSimError):
    """Usage or configuration is wrong (exit code 2)."""

    exit_code = 2


class DataError(LokaSimError):
    """Data or a GPU is not there (exit code 3)."""

    exit_code = 3

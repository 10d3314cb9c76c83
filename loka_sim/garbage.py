"""Pausing the collector of cycles while records are made by the hundred thousand, none of which is in a cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the collector of cycles: looking for some among so many records is a fifth of what 1,000 sites take.

    What was made meanwhile counts as old afterwards, so that the next new object does not have all of it looked at; the next
    whole collection still does. Nothing changes where the collector is off already, and what a program has frozen stays so.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()

"""Whether there are compiled loops, and when they are worth compiling.

`perfmodel.loops` is imported when a prediction is first met that is large enough to pay for it. Where llvmlite, which numba
brings along, cannot compile them, xgboost and numpy do all.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType

# Rows of all kernels for which xgboost takes longer than compiling the loops and the loops together.
ROWS_WORTH_COMPILING = 1 << 14
_LOOPS = "perfmodel.loops"
# Units that are rectified at once: layers are as wide as a multiple of it. Of other values as many as are looked at at once.
AT_ONCE = 16


def worth_compiling(rows: int) -> bool:
    """Whether so many rows are worth the compiled loops, which later ones are too once they are there."""
    return (_LOOPS in sys.modules or rows >= ROWS_WORTH_COMPILING) and loops() is not None


def at_hand() -> ModuleType | None:
    """The module with the compiled loops where they are there already; None elsewhere."""
    return loops() if worth_compiling(0) else None


@cache
def loops() -> ModuleType | None:
    """The module with the compiled loops; None where they cannot be compiled."""
    try:
        from perfmodel import loops as compiled
    except (AttributeError, ImportError, OSError, RuntimeError):
        return None
    return compiled

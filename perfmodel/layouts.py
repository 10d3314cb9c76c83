"""What a bf16 GEMM takes in another layout of its operands than the one that it was timed in."""

from __future__ import annotations

FILE = "layouts.parquet"
K_FASTEST = ("row", "column")
LAYOUTS = (K_FASTEST, ("row", "row"), ("column", "row"), ("column", "column"))
"""Of operand a and of operand b, as in `loka_sim.modelspec.Gemm`."""


def column(layout: tuple[str, str]) -> str:
    """Of microseconds in a layout."""
    return f"{layout[0]}_{layout[1]}_us"

"""What one sample of a recommendation model has: the record that datasets fill and zoo models read."""

from __future__ import annotations

from dataclasses import dataclass

FIELDS = 26
SMALL_ROWS = (2_048,) * FIELDS


@dataclass(frozen=True)
class InputShape:
    """What a model reads per sample.

    Attributes:
        dense: Number of dense (float) features.
        rows: Rows of each categorical field's table; id 0 stands for a missing value.
        sequence_rows: Rows of the table of sequence tokens; id 0 is padding.
        sequence_length: Tokens of a sequence; padding comes first, the most recent token last.
    """

    dense: int = 13
    rows: tuple[int, ...] = SMALL_ROWS
    sequence_rows: int = 8_192
    sequence_length: int = 44

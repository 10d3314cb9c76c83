"""Printing: JSON, tables of at most 100 columns, colour on terminals alone."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

WIDTH = 100

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Style:
    """Paints text, or leaves it as it is where nobody would see colour."""

    def __init__(self, enabled: bool) -> None:
        """Paint or not."""
        self.enabled = enabled

    @classmethod
    def of_stdout(cls) -> Style:
        """Colour on a terminal that wants it (https://no-color.org)."""
        return cls(sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")

    def __call__(self, text: str, *names: str) -> str:
        """The text in bold, dim, or a colour."""
        if not self.enabled or not names or not text:
            return text
        return f"\x1b[{';'.join(_CODES[name] for name in names)}m{text}\x1b[0m"


def print_json(document: Any) -> None:
    """A document on stdout; lists of plain values stay on one line each, so that a person can read it."""
    print(render_json(document))


def render_json(value: Any, indent: str = "") -> str:
    """JSON with two spaces a level, and rows of plain values on one line."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        body = ",\n".join([f"{inner}{_key(key)}: {render_json(entry, inner)}" for key, entry in value.items()])
        return f"{{\n{body}\n{indent}}}"
    if isinstance(value, list) and value and any(isinstance(entry, (dict, list)) for entry in value):
        return "[\n" + ",\n".join([f"{inner}{render_json(entry, inner)}" for entry in value]) + f"\n{indent}]"
    return _plain(value)


_encode = json.JSONEncoder(allow_nan=False).encode


def _plain(value: Any) -> str:
    # What most values are, without a call of the encoder for each.
    if value is None:
        return "null"
    if isinstance(value, float) and math.isfinite(value):
        return float.__repr__(value)
    return _encode(value)


@lru_cache(maxsize=4096)
def _key(name: str) -> str:
    """A key in JSON: documents have few of them, again and again."""
    return json.dumps(name)


_LEAST_NAME = 12


def table(rows: Sequence[Sequence[str]], align: str, indent: int = 2, gives: int | None = None) -> list[str]:
    """Columns of text as lines: two spaces between columns, one where they would be wider than `WIDTH` otherwise.

    Args:
        rows: Cells; the first row is usually the head.
        align: `l` or `r` per column.
        indent: Spaces before each line.
        gives: A column of module names that is shortened where the line would be wider than `WIDTH` even so.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    over = indent + sum(widths) + len(widths) - 1 - WIDTH
    if gives is not None and over > 0:
        widths[gives] = max(widths[gives] - over, _LEAST_NAME)
        rows = [[shorten(cell, widths[gives]) if i == gives else cell for i, cell in enumerate(row)] for row in rows]
    gap = 2 if indent + sum(widths) + 2 * (len(widths) - 1) <= WIDTH else 1
    lines = []
    for row in rows:
        cells = (c.ljust(w) if a == "l" else c.rjust(w) for c, w, a in zip(row, widths, align, strict=True))
        lines.append((" " * indent + (" " * gap).join(cells)).rstrip())
    return lines


def shorten(text: str, width: int) -> str:
    """Text of at most `width` characters; what is cut is the middle, since both ends of a module's name tell.

    Whole components of a dotted name go first: `layers.….dhen.*.cross.*.u`.
    """
    if len(text) <= width:
        return text
    first, *rest = text.split(".")
    while len(rest) > 1:
        rest = rest[1:]
        cut = ".".join((first, "…", *rest))
        if len(cut) <= width:
            return cut
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def figure(value: float) -> str:
    """Microseconds for a table: tenths only where they tell something."""
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def wrap(text: str, first: str, rest: str) -> list[str]:
    """Text in lines of at most `WIDTH` columns, the first led by `first`, the others by `rest`."""
    import textwrap

    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def statements(document: dict[str, Any], style: Style) -> list[str]:
    """What a document takes for granted, and what to beware of: the lines of its `statements`."""
    lines = []
    for statement in document["statements"]:
        warning = statement["level"] == "warning"
        wrapped = wrap(statement["text"], "  ! " if warning else "  - ", "    ")
        lines += [style(line, "yellow" if warning else "dim") for line in wrapped]
    return lines

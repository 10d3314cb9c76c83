"""Put the present figures into the README: the first screen, the time model, what is emulated exactly, the choice benchmark.

    python benchmarks/readme.py

Each block stands in a fence behind a comment that names it. tests/test_readme.py holds all but the last two to the truth.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from hil.exactness import table as exactness_table
from perfmodel import data_folder
from perfmodel.fit import table

README = Path(__file__).resolve().parent.parent / "README.md"


def first_screen() -> str:
    """What `make whatif` prints."""
    command = [sys.executable, "-m", "loka_sim", "whatif", "wukong"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={"NO_COLOR": "1", "COLUMNS": "100"}).stdout


def accuracy() -> str:
    """The time model's table."""
    return table(json.loads((data_folder() / "h200" / "models" / "manifest.json").read_text()))


def exactness() -> str:
    """The emulator against the hardware, kernel by kernel."""
    return exactness_table(json.loads((data_folder() / "h200" / "exactness.json").read_text())["rows"])


def choice() -> str:
    """The choice benchmark's table."""
    command = [sys.executable, str(Path(__file__).with_name("choice.py"))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def another() -> str:
    """The H100 learned from the H200."""
    command = [sys.executable, str(Path(__file__).with_name("another_gpu.py"))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def block(text: str, name: str) -> str:
    """The fenced block called `name`."""
    found = re.search(rf"<!-- {name} -->\n```\n(.*?)\n```", text, re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no block {name!r}")
    return found[1]


def main() -> int:
    """Rewrite the blocks."""
    text = README.read_text()
    for name, make in (
        ("whatif", first_screen),
        ("fit", accuracy),
        ("exactness", exactness),
        ("choice", choice),
        ("another", another),
    ):
        text = text.replace(block(text, name), make().strip())
    README.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

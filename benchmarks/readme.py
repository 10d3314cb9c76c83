"""Put the present figures into the README and docs/: the first screen, the time model, what is emulated, the choice benchmark.

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

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "time_model.md")


def first_screen() -> str:
    """What `make whatif` prints."""
    command = [sys.executable, "-m", "loka_sim", "whatif", "wukong"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={"NO_COLOR": "1", "COLUMNS": "100"}).stdout


def accuracy() -> str:
    """The time model's table."""
    return table(json.loads((data_folder() / "h200" / "models" / "manifest.json").read_text()))


def fresh(hardware: str, *sections: str) -> str:
    """The time model of a GPU on its sweeps that no fit saw: sections `sweeps`, one by one, then `fresh`, in one table."""
    command = [sys.executable, str(Path(__file__).with_name("time_model.py")), *sections, "--hardware", hardware]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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


def page_of(name: str) -> Path:
    """The page with the fenced block called `name`."""
    for page in PAGES:
        if f"<!-- {name} -->" in page.read_text():
            return page
    raise ValueError(f"neither README.md nor docs/time_model.md has a block {name!r}")


def block(name: str) -> str:
    """What the fenced block called `name` holds."""
    found = re.search(rf"<!-- {name} -->\n```\n(.*?)\n?```", page_of(name).read_text(), re.DOTALL)
    if found is None:
        raise ValueError(f"behind <!-- {name} --> there is no fence")
    return found[1]


def main() -> int:
    """Rewrite the blocks."""
    for name, make in (
        ("whatif", first_screen),
        ("fresh", lambda: fresh("h200", "fresh")),
        ("fresh_h100", lambda: fresh("h100", "fresh")),
        ("sweeps", lambda: fresh("h200", "sweeps")),
        ("fit", accuracy),
        ("exactness", exactness),
        ("choice", choice),
        ("another", another),
    ):
        page, before = page_of(name), f"<!-- {name} -->\n```\n"
        old = before + block(name)
        page.write_text(page.read_text().replace(old, before + make().strip("\n") + ("" if block(name) else "\n")))
    return 0


if __name__ == "__main__":
    sys.exit(main())

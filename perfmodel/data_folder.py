"""Where the shipped data lies, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path


def data_folder() -> Path:
    """The folder with hardware specs, timings, models, statistics and model specs.

    Raises:
        FileNotFoundError: neither the installed nor the checkout's data are there.
    """
    root = Path(__file__).resolve().parent.parent
    for candidate in (root / "loka_sim_data", root / "data"):
        if (candidate / "h200").is_dir():
            return candidate
    raise FileNotFoundError(f"loka-sim's data are missing under {root}; reinstall the package")

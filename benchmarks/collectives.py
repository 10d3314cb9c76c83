"""Measured collectives inside one host: every op's time by size, when FP8 wins, and what its fused kernels gain.

    python -m benchmarks.collectives

Reads the table of `python -m hil.collectives`; needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import pandas as pd

from perfmodel.collectives import load

FUSED, UNFUSED = "fp8_rowwise", "fp8_rowwise_unfused"
LEAST_GAIN = 1.02
"""A win counts from this ratio on: differences below it come and go between runs."""


def size_text(size: int) -> str:
    """Bytes in the largest whole unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def by_size(rows: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Medians in us, sizes down, the given columns across."""
    return rows.pivot_table(index="bytes_per_rank", columns=columns, values="p50_us", observed=True).sort_index()


def show(title: str, table: pd.DataFrame, form: str = "{:,.1f}") -> None:
    """Print a table whose rows are sizes."""
    named = table.rename(index=size_text).rename_axis(index="a rank")
    print(f"\n{title}\n{named.to_string(float_format=form.format, na_rep='-')}")


def wins(ratio: pd.Series, least: float = LEAST_GAIN) -> list[tuple[int, int]]:
    """First and last size of each run of measured sizes whose ratio is at least so much."""
    runs: list[tuple[int, int]] = []
    open_run = False
    for size, value in ratio.dropna().sort_index().items():
        if value >= least:
            runs = [*runs[:-1], (runs[-1][0], int(size))] if open_run else [*runs, (int(size), int(size))]
        open_run = value >= least
    return runs


def wins_text(ratio: pd.Series) -> str:
    """Where the ratio is a win, in words, with the least and greatest gain there."""
    runs = wins(ratio)
    if not runs:
        return f"nowhere (at best {ratio.max():.2f}x)"
    last = int(ratio.dropna().index.max())
    parts = []
    for first, end in runs:
        inside = ratio.loc[first:end]
        where = f"from {size_text(first)} on" if end == last else f"{size_text(first)} to {size_text(end)}"
        gain = f"{inside.min():.2f}x to {inside.max():.2f}x"
        if first == end:
            where, gain = f"at {size_text(first)}", f"{inside.max():.2f}x"
        parts.append(f"{where} ({gain})")
    return ", ".join(parts)


def settings(rows: pd.DataFrame) -> list[tuple[int, int]]:
    """(ranks, groups) measured."""
    return sorted({(int(r), int(g)) for r, g in zip(rows["ranks"], rows["groups"], strict=True)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200", help="whose table (default: h200)")
    options = parser.parse_args(arguments)
    try:
        rows = load(options.hardware).table
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 3
    whole = rows[~rows["op"].isin(["pack", "unpack", "copy"])]
    for (op, split), part in whole[whole["dtype"] == "bf16"].groupby(["op", "split"]):
        show(f"{op}, {split} split, bf16: us, by ranks and groups at once", by_size(part, ["ranks", "groups"]))
    exchanges = whole[(whole["op"] == "all_to_all") & (whole["split"] == "equal")]
    ratios: dict[tuple[int, int, int], pd.Series] = {}
    gains: dict[tuple[int, int, int], pd.Series] = {}
    for ranks, groups in settings(exchanges):
        here = exchanges[(exchanges["ranks"] == ranks) & (exchanges["groups"] == groups)]
        table = by_size(here, ["dtype", "dim"])
        measured = table[FUSED].dropna(how="all").index
        show(f"all_to_all, {groups} x {ranks} ranks: us, codec included, by dtype and dim", table.loc[measured])
        for dim in table[FUSED].columns:
            ratios[ranks, groups, dim] = table["bf16"][0].loc[measured] / table[FUSED][dim].loc[measured]
            gains[ranks, groups, dim] = table[UNFUSED][dim].loc[measured] / table[FUSED][dim].loc[measured]
    print(f"\nWhere FP8 rowwise, fused, beats bf16 by {LEAST_GAIN - 1:.0%} or more:")
    for (ranks, groups, dim), ratio in ratios.items():
        print(f"  {groups} x {ranks} ranks, dim {dim:>3}: {wins_text(ratio)}")
    print(f"\nThe same without the fused kernels ({UNFUSED}):")
    for key, ratio in ratios.items():
        print(f"  {key[1]} x {key[0]} ranks, dim {key[2]:>3}: {wins_text(ratio / gains[key])}")
    gained = pd.DataFrame(gains).agg(["median", "min", "max"], axis=1)
    show("What the fused kernels gain over unfused ones, unfused / fused, over dims and settings", gained, "{:,.2f}x")
    print(f"  median over all sizes: {pd.DataFrame(gains).stack(level=[0, 1, 2]).median():.2f}x")
    local = rows[rows["op"].isin(["pack", "unpack"])]
    if len(local):
        show("The codec alone: share of a copy's bandwidth", codec_shares(rows, local), "{:.0%}")
    return 0


def codec_shares(rows: pd.DataFrame, local: pd.DataFrame) -> pd.DataFrame:
    """Bytes over time of pack and unpack, as a share of a copy of the same bf16 rows."""
    copy = by_size(rows[rows["op"] == "copy"], ["op"])["copy"]
    times = by_size(local, ["op", "dtype", "dim"])
    # A copy moves 4 bytes a value; a codec 3, and a scale a row.
    moved = [(3 + 4 / dim) / 4 for _, _, dim in times.columns]
    return (1 / times).mul(copy, axis=0).mul(moved, axis=1)


if __name__ == "__main__":
    sys.exit(main())

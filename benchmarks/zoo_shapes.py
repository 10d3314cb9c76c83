"""The zoo's own shapes as CSV, for measuring them: whole models that no sweep was drawn from.

python benchmarks/zoo_shapes.py gemm --batches 512 2048 8192 > zoo_gemm.csv
python -m hil.collect gemm --shapes zoo_gemm.csv --sweep zoo --out data/h200
"""

from __future__ import annotations

import argparse
import csv
import sys

from loka_sim.resolve import resolve_model
from loka_sim.zoo import NAMES


def gemm_rows(batches: list[int]) -> set[tuple[int, int, int, int]]:
    """(m, n, k, groups) of every pass of every site of the zoo."""
    return {
        (*gemm.shape(batch), gemm.groups.at(batch))
        for name in NAMES
        for site in resolve_model(name).sites
        for gemm in site.passes.values()
        for batch in batches
    }


def memory_rows(batches: list[int], largest: int = 2**28) -> set[tuple[int, int, int, int]]:
    """(rows, 1, columns, 1) of every linear's activation, weight and output gradient."""
    rows = set()
    for name in NAMES:
        for site in resolve_model(name).sites:
            for batch in batches:
                m, n, k = site.passes["output"].shape(batch)
                if site.weight is not None:
                    rows |= {(m, 1, k, 1), (n, 1, k, 1), (m, 1, n, 1)}
    return {row for row in rows if row[0] * row[2] <= largest}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=("gemm", "memory"))
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 2048, 8192])
    options = parser.parse_args()
    writer = csv.writer(sys.stdout)
    writer.writerow(("m", "n", "k", "groups"))
    make = gemm_rows if options.family == "gemm" else memory_rows
    writer.writerows(sorted(make(options.batches)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`loka-sim models`: the zoo."""

from __future__ import annotations

import argparse
from typing import Any


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser("models", help="the models that come with loka-sim", allow_abbrev=False, description="List the zoo.")
    verb.add_argument("--json", action="store_true", help="print as JSON")
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List the shipped specs."""
    from loka_sim.cli.output import print_json, table
    from loka_sim.modelspec import load
    from loka_sim.resolve import zoo_names
    from loka_sim.statistics import default_name

    rows: list[dict[str, Any]] = []
    for path in zoo_names().values():
        spec = load(path)
        rows.append({
            "name": spec.name,
            "batch": spec.batch,
            "sites": len(spec.sites),
            "gflop_per_sample": round(spec.flops() / spec.batch / 1e9, 4),
            "dense_parameters": spec.dense_parameters,
            "tables": len(spec.tables),
            "statistics": default_name(spec.name),
        })  # fmt: skip
    if arguments.json:
        print_json({"schema_version": 1, "kind": "loka-sim/models", "models": rows})
        return 0
    head = ("model", "batch", "GEMM sites", "GFLOP/sample", "dense parameters", "tables", "statistics")
    body = [
        (r["name"], f"{r['batch']:,}", str(r["sites"]), f"{r['gflop_per_sample']:.3g}", f"{r['dense_parameters']:,}",
         str(r["tables"]), r["statistics"] or "none")
        for r in rows
    ]  # fmt: skip
    print("\n".join(table([head, *body], "lrrrrrl", indent=0)))
    return 0

"""`loka-sim kernels`: what a decision chooses from."""

from __future__ import annotations

import argparse
from typing import Any


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "kernels", help="the kernels that a decision chooses from", allow_abbrev=False, description="List the kernels."
    )
    verb.add_argument("--json", action="store_true", help="print as JSON")
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List kernel names, recipes and legality."""
    from loka_sim.cli.output import print_json, table
    from perfmodel.kernels import KERNELS

    if arguments.json:
        rows = [{**vars(spec), "min_capability": list(spec.min_capability)} for spec in KERNELS.values()]
        print_json({"schema_version": 1, "kind": "loka-sim/kernels", "kernels": rows})
        return 0
    head = ("kernel", "kind", "left operand", "right operand", "accumulation", "multiples of")
    body = []
    for spec in KERNELS.values():
        multiples = [(letter, getattr(spec, f"multiple_{letter.lower()}")) for letter in "MNK"]
        wanted = ", ".join(f"{letter} {size}" for letter, size in multiples if size > 1)
        accumulation = spec.accumulation if spec.recipe_a else ""
        body.append((spec.name, spec.kind, spec.recipe_a or "", spec.recipe_b or "", accumulation, wanted))
    print("\n".join(table([head, *body], "llllll", indent=0)))
    return 0

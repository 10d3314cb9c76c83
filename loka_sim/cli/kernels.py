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
    """List kernel names, recipes, legality, and how true the emulation of each GEMM is."""
    from loka_sim.cli.output import print_json, table
    from numerics import fidelity
    from perfmodel.kernels import KERNELS

    if arguments.json:
        rows = [
            {
                **vars(spec),
                "min_capability": list(spec.min_capability),
                "emulation": vars(fidelity(spec.name)) if spec.recipe_a else None,
            }
            for spec in KERNELS.values()
        ]
        print_json({"schema_version": 1, "kind": "loka-sim/kernels", "kernels": rows})
        return 0
    gemms: list[tuple[str, ...]] = [("GEMM kernel", "left operand", "right operand", "sums", "emulated", "multiples of")]
    others: list[tuple[str, ...]] = [("other kernel", "kind", "multiples of")]
    for spec in KERNELS.values():
        multiples = [(letter, getattr(spec, f"multiple_{letter.lower()}")) for letter in "MNK"]
        wanted = " ".join(f"{letter}{size}" for letter, size in multiples if size > 1)
        if spec.recipe_a and spec.recipe_b and spec.kind != "linear":
            level = fidelity(spec.name).level
            accumulation = spec.accumulation.removeprefix("hopper_")
            gemms.append((spec.name, spec.recipe_a, spec.recipe_b, accumulation, level, wanted))
        else:
            others.append((spec.name, spec.kind, wanted))
    print("\n".join([*table(gemms, "llllll", indent=0), "", *table(others, "lll", indent=0)]))
    return 0

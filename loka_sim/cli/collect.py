"""`loka-sim collect --gpu`: a sweep of this machine's GPU, and a time model fitted to it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from loka_sim.errors import UserError


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "collect",
        help="measure this GPU and fit the time model to it (for a GPU without shipped data)",
        allow_abbrev=False,
        description="Measure GEMMs, quantization, norms, activations and, on a host of several GPUs, collectives, and fit the "
        "time model to them: a calibration for whatif --calibration. A killed run goes on where it was.",
        epilog="Exit code 3: no GPU.",
    )
    verb.add_argument("--gpu", action="store_true", help="measure on this machine's GPU (needed: it is busy for minutes)")
    verb.add_argument("--out", type=Path, metavar="DIR", required=True, help="folder of the calibration")
    verb.add_argument("--minutes", type=float, default=28.0, metavar="N", help="time to spend (default: 28)")
    verb.add_argument("--name", metavar="NAME", help="what to call the hardware (default: the GPU's name)")
    verb.add_argument("--json", action="store_true", help="print the result as JSON")
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, print."""
    # Read when torch is first imported: threads that wait for work leave the cores to those that compile.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from loka_sim.cli.output import print_json, table, wrap
    from loka_sim.collection import collect
    from loka_sim.validation.measuring import ending_children

    if not arguments.gpu:
        raise UserError("collect runs kernels on this machine's GPU for minutes: say --gpu")
    command = ["loka-sim", *arguments.argv]
    with ending_children():
        document = collect(arguments.out, minutes=arguments.minutes, name=arguments.name, command=command)
    if arguments.json:
        print_json(document)
        return 0
    rows: list[tuple[str, ...]] = [("kernel", "rows", "MAPE", "p90")]
    for kernel, found in document["held_out"].items():
        rows.append((kernel, str(document["rows"].get(kernel, 0)), f"{found['mape']:.1%}", f"{found['p90']:.1%}"))
    print(f"{document['hardware']}: {sum(document['rows'].values()):,} rows in {document['seconds'] / 60:.1f} minutes")
    print(f"time model: {document['model']}; errors on held-out shapes:\n")
    print("\n".join(table(rows, "lrrr")))
    for text in document["left_out"]:
        print("\n".join(wrap(f"! {text}", "", "  ")))
    print(f"\nnext: loka-sim whatif wukong --calibration {arguments.out}")
    return 0

"""`loka-sim validate --gpu [MODEL]`: how far both models are from this machine's GPU, and what that changes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from loka_sim.errors import UserError


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "validate",
        help="measure a model's kernels on this GPU, correct both models, decide again",
        allow_abbrev=False,
        description="Run a model's real kernels on this machine's Hopper GPU and say how far off the predictions of error and "
        "time are; refine both from what was measured, decide again, and leave a calibration for whatif --calibration.",
        epilog="Exit code 0: within the tolerances printed; 1: outside them; 3: no GPU. A killed run goes on where it was "
        "when it is started again with the same --out.",
    )
    verb.add_argument("--gpu", action="store_true", help="measure on this machine's GPU (needed: it is busy for minutes)")
    verb.add_argument(
        "model", metavar="MODEL", nargs="?", default="wukong",
        help="zoo name, package.module:callable, or model spec file (default: wukong)",
    )  # fmt: skip
    verb.add_argument("--batch", type=int, metavar="N", help="samples per GPU (default: the model's own)")
    verb.add_argument("--minutes", type=float, default=10.0, metavar="N", help="time to spend (default: 10)")
    verb.add_argument("--out", type=Path, metavar="DIR", help="folder of the result (default: runs/validate-MODEL)")
    verb.add_argument(
        "--hardware", metavar="NAME",
        help="whose predictions to validate, h100 or h200 (default: this GPU's, or the nearest there are)",
    )  # fmt: skip
    verb.add_argument("--statistics", metavar="NAME|DIR", help="distributions of the tensors (default: the zoo model's own)")
    verb.add_argument("--mods", default="", metavar="LIST", help="model changes: no_bias, blocknorm, hardswish, all")
    verb.add_argument(
        "--libraries", default="torch", metavar="LIST", help="whose FP8 kernels to choose from, as in whatif (default: torch)"
    )
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="of fresh shapes and samples (default: 0)")
    verb.add_argument("--json", action="store_true", help="print every figure as JSON")
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, refine, print."""
    # Read when torch is first imported: threads that wait for work leave the cores to those that compile.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from loka_sim.cli.output import Style, print_json
    from loka_sim.cli.screen_validate import validation_screen
    from loka_sim.validation import validate
    from loka_sim.validation.measuring import ending_children

    if not arguments.gpu:
        raise UserError("validate runs kernels on this machine's GPU for minutes: say --gpu; to predict alone: loka-sim whatif")
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in Path(arguments.model).name)
    out = arguments.out or Path("runs") / f"validate-{name}"
    with ending_children():
        document = validate(
            arguments.model,
            out=out,
            batch=arguments.batch,
            mods=arguments.mods,
            statistics=arguments.statistics,
            minutes=arguments.minutes,
            seed=arguments.seed,
            hardware=arguments.hardware,
            libraries=arguments.libraries,
            command=["loka-sim", *arguments.argv],
        )
    if arguments.json:
        print_json(document)
    else:
        print(validation_screen(document, Style.of_stdout(), out))
    return 0 if document["verdict"] else 1

"""`loka-sim compare A B`: two what-if runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "compare",
        help="two run folders side by side: what changed, where, what it is worth",
        allow_abbrev=False,
        description="Set two folders that `loka-sim whatif --out` wrote side by side.",
    )
    verb.add_argument("a", type=Path, metavar="A", help="run folder, or its whatif.json")
    verb.add_argument("b", type=Path, metavar="B", help="run folder, or its whatif.json")
    verb.add_argument("--out", type=Path, metavar="FILE", help="write the comparison as an HTML page")
    verb.add_argument("--json", action="store_true", help="print every figure as JSON")
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and write the page if asked to."""
    from loka_sim.cli.output import Style, print_json
    from loka_sim.cli.screen_compare import compare_screen
    from loka_sim.compare import compare
    from loka_sim.files import write_text_atomic
    from loka_sim.report import render_compare

    document = compare(arguments.a, arguments.b).to_dict()
    if arguments.out is not None:
        write_text_atomic(arguments.out, render_compare(document))
    if arguments.json:
        print_json(document)
    else:
        print(compare_screen(document, Style.of_stdout()))
        if arguments.out is not None:
            print(f"\nwrote {arguments.out}")
    return 0

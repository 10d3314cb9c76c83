"""`loka-sim export TABLE --to torchao`: a dispatch table as a module that a training job imports."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "export",
        help="a dispatch table as code for a training framework",
        allow_abbrev=False,
        description="Turn a dispatch table into a Python module that a training job imports. torchao runs torch's kernels "
        "alone: a layer with others runs what was decided anew for torchao, and notes say what that costs.",
    )
    verb.add_argument("table", type=Path, metavar="TABLE", help="dispatch_table.json, or the run folder that holds it")
    verb.add_argument("--to", default="torchao", metavar="TARGET", help="what to write it for (default: torchao)")
    verb.add_argument("--out", type=Path, metavar="FILE", help="write it there (default: print it)")
    verb.add_argument("--json", action="store_true", help="print code and notes as JSON")
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export; the module on stdout or in a file, what it leaves out on stderr."""
    from loka_sim.cli.output import print_json
    from loka_sim.dispatch.export import export_with_notes
    from loka_sim.files import write_text_atomic

    exported = export_with_notes(arguments.table, arguments.to)
    if arguments.out is not None:
        write_text_atomic(arguments.out, exported.text)
    if arguments.json:
        print_json({
            "schema_version": 1, "kind": "loka-sim/export", "target": arguments.to, "modules": exported.modules,
            "notes": list(exported.notes), "slower_us": exported.slower_us,
            "file": None if arguments.out is None else str(arguments.out), "code": exported.text,
        })  # fmt: skip
        return 0
    for note in exported.notes:
        print(f"note: {note}", file=sys.stderr)
    if exported.slower_us > 0:
        print(f"note: in all {exported.slower_us:,.1f} us a step slower than decided, as predicted", file=sys.stderr)
    if arguments.out is None:
        print(exported.text, end="")
    else:
        print(f"wrote {arguments.out}: {exported.modules} module{'s' * (exported.modules != 1)} in FP8")
    return 0

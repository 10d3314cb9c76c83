"""`loka-sim step MODEL`: where the time of one training step goes, stream by stream, and which communication is exposed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from loka_sim.cli.whatif import add_question, ask


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "step",
        help="the timeline of one training step on 1 to 4,096 GPUs: streams, exposed communication, a trace",
        allow_abbrev=False,
        description="Schedule one training step as decided, and in bf16: compute beside communication, 1 to 4,096 GPUs.",
        epilog="Traces open in https://ui.perfetto.dev and chrome://tracing.",
    )
    add_question(verb, several=True)
    verb.add_argument("--table", metavar="FILE|DIR", help="a dispatch table, or a run folder with one: its step too")
    verb.add_argument("--json", action="store_true", help="print every figure as JSON")
    verb.add_argument("--trace", type=Path, metavar="FILE", help="write both steps as a Chrome trace (JSON)")
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer, print, and write the trace if asked to."""
    from loka_sim.cli.output import Style, print_json
    from loka_sim.cli.screen_step import step_screen
    from loka_sim.step_document import step_document, write_trace

    if len(arguments.gpus) > 1:
        return _side_by_side(arguments)
    answer = ask(arguments, arguments.gpus[0])
    table = None
    if arguments.table is not None:
        from loka_sim.table_step import table_timeline

        table = table_timeline(answer, arguments.table)
    document = step_document(answer, table)
    if arguments.trace is not None:
        write_trace(answer, arguments.trace, document["command"], table)
    if arguments.json:
        print_json(document)
    else:
        print(step_screen(document, Style.of_stdout(), arguments.trace))
    return 0


def _side_by_side(arguments: argparse.Namespace) -> int:
    """One decision on several numbers of GPUs."""
    from loka_sim.cli.output import Style, print_json
    from loka_sim.cli.screen_step import scaling_screen
    from loka_sim.errors import UserError
    from loka_sim.scaling import scaling, scaling_document

    for option in ("trace", "table"):
        if getattr(arguments, option) is not None:
            raise UserError(f"--{option} is of one number of GPUs; give --gpus one")
    document = scaling_document(scaling(ask(arguments, arguments.gpus[0]), arguments.gpus))
    if arguments.json:
        print_json(document)
    else:
        print(scaling_screen(document, Style.of_stdout()))
    return 0

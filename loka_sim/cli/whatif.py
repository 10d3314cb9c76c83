"""`loka-sim whatif MODEL`: which GEMMs may run in FP8, with which kernel, and what that is worth."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka_sim.whatif import WhatIf


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "whatif",
        help="which GEMMs of a model may run in FP8, and what it is worth",
        allow_abbrev=False,
        description="Decide per GEMM and pass which kernel to run, and predict the time of the dense part and of the whole step.",
        epilog="Exit code 0: FP8 pays somewhere; 1: nowhere.",
    )
    add_question(verb)
    verb.add_argument("--json", action="store_true", help="print every figure as JSON")
    verb.add_argument("--out", type=Path, metavar="DIR", help="write dispatch table, report and manifest into a folder")
    verb.add_argument("--trace", type=Path, metavar="FILE", help="write the step's timeline as a Chrome trace (see step)")
    verb.set_defaults(run=run)


def add_question(verb: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the options of a what-if, whatever is then shown of the answer.

    Args:
        verb: Where to.
        several: Whether `--gpus` takes more than one number; it is a list then.
    """
    verb.add_argument(
        "model", metavar="MODEL", help="zoo name (see `loka-sim models`), model spec file, or package.module:callable"
    )
    verb.add_argument("--batch", type=int, metavar="N", help="samples per GPU (default: the model's own)")
    if several:
        verb.add_argument(
            "--gpus", type=_numbers, default=[1], metavar="N[,N...]", help="GPUs of the training job; several: side by side"
        )
    else:
        verb.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of the training job (default: 1)")
    verb.add_argument("--hardware", default="h200", metavar="NAME", help="whose timings to use: h100 or h200 (default: h200)")
    verb.add_argument("--statistics", metavar="NAME|DIR", help="distributions of the tensors (default: the zoo model's own)")
    verb.add_argument(
        "--mods", default="", metavar="LIST", help="model changes: no_bias, blocknorm, hardswish, all; comma-separated"
    )
    verb.add_argument(
        "--max-mere", type=float, default=0.2, metavar="X", help="largest mean element-wise relative error (default: 0.2)"
    )
    verb.add_argument(
        "--min-speedup", type=float, default=1.05, metavar="X", help="least speedup, quantization included (default: 1.05)"
    )
    verb.add_argument(
        "--calibration", metavar="DIR", help="both models as a machine of yours corrected them (see validate and collect)"
    )
    verb.add_argument(
        "--libraries", default="torch", metavar="LIST",
        help="whose FP8 kernels to choose from: torch, loka, fbgemm, deepgemm, all; comma-separated (default: torch, which is "
        "what the export to torchao can run; it decides anew where kernels of others were chosen)",
    )  # fmt: skip
    verb.add_argument(
        "--cluster", metavar="NAME|FILE",
        help="hosts and the network between them: hgx_h100, hgx_h200, or a YAML or JSON file (default: the hardware's preset)",
    )  # fmt: skip
    verb.add_argument(
        "--dense", default="ddp", metavar="HOW",
        help="dense part over GPUs: ddp (replicated), fsdp (sharded), hsdp (sharded inside each host) (default: ddp)",
    )  # fmt: skip
    verb.add_argument(
        "--exchange", default="bf16", metavar="DTYPE", help="embeddings travel in bf16, fp16 or fp8_rowwise (default: bf16)"
    )


def _numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, nor several with commas between them") from None


def ask(arguments: argparse.Namespace, gpus: int) -> WhatIf:
    """The what-if that the options of `add_question` ask for."""
    from loka_sim.whatif import whatif

    return whatif(
        arguments.model,
        batch=arguments.batch,
        gpus=gpus,
        hardware=arguments.hardware,
        statistics=arguments.statistics,
        mods=arguments.mods,
        max_mere=arguments.max_mere,
        min_speedup=arguments.min_speedup,
        calibration=arguments.calibration,
        libraries=arguments.libraries,
        cluster=arguments.cluster,
        dense=arguments.dense,
        exchange=arguments.exchange,
    )


def run(arguments: argparse.Namespace) -> int:
    """Answer, print, and write the run folder if asked to."""
    from loka_sim.cli.output import Style, print_json
    from loka_sim.cli.screen import first_screen

    folder = None
    if arguments.out is not None:
        from loka_sim.run_folder import RunFolder

        folder = RunFolder.prepare(arguments.out)
    answer = ask(arguments, arguments.gpus)
    document = answer.to_dict()
    if folder is not None:
        folder.write(document, ["loka-sim", *arguments.argv])
    if arguments.trace is not None:
        from loka_sim.step_document import write_trace

        write_trace(answer, arguments.trace, document["command"])
    if arguments.json:
        print_json(document)
    else:
        print(first_screen(document, Style.of_stdout(), arguments.out))
    return 0 if answer.pays else 1

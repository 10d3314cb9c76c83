"""The command line: parse, run, print, return an int. Every verb is a thin file over the flat API.

Exit codes: 0 done; 1 ran, and the verdict is negative; 2 usage or configuration; 3 data or a GPU are not
there; 101 a bug; 130 interrupted; 141 the reader of the output left.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import loka_sim
from loka_sim.cli import capture, collect, compare, export, kernels, models, step, validate, whatif
from loka_sim.errors import DataError, LokaSimError, UserError

BUG, INTERRUPTED, BROKEN_PIPE = 101, 130, 141

_DESCRIPTION = "Where FP8 is safe and fast in a large recommendation model, known before a GPU hour is spent."
_EPILOG = """start here:
  loka-sim whatif wukong                          the answer for a zoo model
  loka-sim whatif my_package.model:make           ... for your own
  loka-sim whatif wukong --out runs/wukong        ... with dispatch table and report
  loka-sim step wukong --gpus 64 --trace t.json   one step's timeline over 64 GPUs, as a trace for Perfetto
  loka-sim step wukong --gpus 1,8,64,512          ... and what is left of it on more
  loka-sim compare runs/a runs/b                  what changed between two runs, and what it is worth
  loka-sim validate --gpu wukong                  on a Hopper GPU: how true all that is, and a calibration
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    """The whole command line; importing it loads nothing heavy."""
    top = _Parser(
        prog="loka-sim", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"loka-sim {loka_sim.__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=_Parser)
    for verb in (whatif, step, compare, export, capture, validate, collect, models, kernels):
        verb.add(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; nothing that a user causes ends in a traceback."""
    if sys.stdout is None:  # closed by the shell: the files and the exit code are still wanted
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a bar character still gets its answer
    try:
        try:
            arguments = parser().parse_args(argv)
            arguments.argv = list(sys.argv[1:] if argv is None else argv)
            code = int(arguments.run(arguments))
        except SystemExit as leaving:  # --help and --version
            code = int(leaving.code or 0)
        sys.stdout.flush()
        return code
    except LokaSimError as error:
        print(f"loka-sim: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("loka-sim: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        path = str(error.filename)
        if error.errno == errno.ENAMETOOLONG:
            return _refused(f"{path[:60]}... is longer than a path may be; give a shorter one")
        if isinstance(error, PermissionError):
            return _refused(f"cannot read {path}: {error.strerror}; give a path that you may read", DataError.exit_code)
        if error.errno != errno.ENOSPC:
            return _bug()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _refused(f"cannot write the output: {error.strerror}; make room, or write it elsewhere")
    except Exception:
        return _bug()


def _refused(text: str, code: int = UserError.exit_code) -> int:
    print(f"loka-sim: {text}", file=sys.stderr)
    return code


def _bug() -> int:
    """Say so, with the traceback of the exception at hand."""
    traceback.print_exc()
    print("loka-sim: this is a bug; please report the lines above with the command", file=sys.stderr)
    return BUG

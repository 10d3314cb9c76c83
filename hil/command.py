"""Command lines of this floor: like `loka-sim`'s, a wrong one is answered by one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage before it; the exit code is 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and leave."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see `{self.prog} --help`\n")

"""What tests of several floors share."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def run_interpreted() -> Callable[[str], None]:
    """Run a test file once more in a process of its own, under Triton's interpreter: there the kernels need no GPU."""

    def run(file: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "default", file],
            env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

    return run

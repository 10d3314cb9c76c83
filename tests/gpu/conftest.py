"""Every test here needs a Hopper GPU: without one it is skipped, by name."""

import os
from pathlib import Path

# Tests run in many processes, each of which torch.compile would give a process a core.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MARKS = (
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a CUDA GPU of compute capability 9.0"),
    # torch, triton and torchao warn of one another's interfaces on some versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # torchao 0.17 has an escape sequence that Python 3.12 warns of when it first compiles the file.
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for mark in MARKS:
                item.add_marker(mark)

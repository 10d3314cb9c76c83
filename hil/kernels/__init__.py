"""One registry of the real kernels: name -> how to make operands, how to launch, what the result should be."""

from __future__ import annotations

from hil.kernels.base import Runner
from hil.kernels.torch_gemm import GEMM_RUNNERS
from hil.kernels.torch_memory import MEMORY_RUNNERS

RUNNERS: dict[str, Runner] = {runner.name: runner for runner in (*GEMM_RUNNERS, *MEMORY_RUNNERS)}

__all__ = ["RUNNERS", "Runner"]

"""One registry of the real kernels: name -> how to make operands, how to launch, what the result should be.

Importing it imports no library but torch and triton; a kernel whose library is absent is named by `availability`.
"""

from __future__ import annotations

from hil.kernels.base import Runner
from hil.kernels.deepgemm import DEEPGEMM_RUNNERS
from hil.kernels.fbgemm import FBGEMM_RUNNERS
from hil.kernels.loka_gemm import LOKA_GEMM_RUNNERS
from hil.kernels.loka_quantize import LOKA_QUANTIZE_RUNNERS
from hil.kernels.torch_gemm import GEMM_RUNNERS
from hil.kernels.torch_grouped import GROUPED_RUNNERS
from hil.kernels.torch_memory import MEMORY_RUNNERS
from hil.kernels.torchao_linear import TORCHAO_RUNNERS
from hil.kernels.transformer_engine import TE_RUNNERS

_FAMILIES = (
    GEMM_RUNNERS, GROUPED_RUNNERS, LOKA_GEMM_RUNNERS, FBGEMM_RUNNERS, DEEPGEMM_RUNNERS, TORCHAO_RUNNERS, TE_RUNNERS,
    MEMORY_RUNNERS, LOKA_QUANTIZE_RUNNERS,
)  # fmt: skip
RUNNERS: dict[str, Runner] = {runner.name: runner for family in _FAMILIES for runner in family}

__all__ = ["RUNNERS", "Runner"]

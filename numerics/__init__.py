"""Number formats, scaling, tensor-core accumulation, and the error they bring to one GEMM.

The API is flat and lazy: names are imported when first used, so that `numerics.TensorStatistics`,
`numerics.Recipe` and what is built on statistics alone never bring torch with them.

Rooms, each built on those before it:

    formats, rounding           a number's grid, one algorithm for all of them
    recipe, scaling             what an operand becomes, by name; its amax and scales
    quantization                the one way in: to cpu (jit), gpu (and gpu_kernels, _columns, _pairs, _dual, _meeting, _strips)
    tensor_core, accumulate     how products are summed, as data and at speed; reference: one at a time; verified: how true
    errors                      what a GEMM in low precision is off by
    normal, distributions       statistics of a tensor; collect: from tensors; families: from parameters
    noise, drift                what quantizing an operand costs, what the accumulator does
    gradient, pair              what two tensors are to each other
    predict, monte_carlo        a GEMM's error from statistics: an estimate, and its reference by sampling
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numerics.accumulate import bf16_matmul as bf16_matmul
    from numerics.accumulate import fp8_matmul as fp8_matmul
    from numerics.collect import StatisticsAccumulator as StatisticsAccumulator
    from numerics.distributions import TensorStatistics as TensorStatistics
    from numerics.distributions import gaussian as gaussian
    from numerics.distributions import sample as sample
    from numerics.errors import GemmError as GemmError
    from numerics.errors import gemm_error as gemm_error
    from numerics.errors import output_error as output_error
    from numerics.families import copula as copula
    from numerics.families import log_normal as log_normal
    from numerics.families import matrix_normal as matrix_normal
    from numerics.families import mixture as mixture
    from numerics.families import relu as relu
    from numerics.families import student_t as student_t
    from numerics.families import uniform as uniform
    from numerics.formats import FORMATS as FORMATS
    from numerics.formats import Format as Format
    from numerics.gradient import GradientSignal as GradientSignal
    from numerics.gradient import SignalAccumulator as SignalAccumulator
    from numerics.monte_carlo import SampledGemmError as SampledGemmError
    from numerics.monte_carlo import sample_gemm_error as sample_gemm_error
    from numerics.pair import PairStatistics as PairStatistics
    from numerics.pair import measure_pair as measure_pair
    from numerics.predict import predict_gemm_error as predict_gemm_error
    from numerics.predict import predict_gemm_errors as predict_gemm_errors
    from numerics.quantization import QuantizedTensor as QuantizedTensor
    from numerics.quantization import fake_quantize as fake_quantize
    from numerics.quantization import quantize as quantize
    from numerics.recipe import Recipe as Recipe
    from numerics.rounding import cast as cast
    from numerics.scaling import AmaxHistory as AmaxHistory
    from numerics.tensor_core import estimated_split_k as estimated_split_k
    from numerics.verified import Fidelity as Fidelity
    from numerics.verified import fidelity as fidelity

_HOMES = {
    "AmaxHistory": "scaling",
    "FORMATS": "formats",
    "Fidelity": "verified",
    "Format": "formats",
    "GemmError": "errors",
    "GradientSignal": "gradient",
    "PairStatistics": "pair",
    "QuantizedTensor": "quantization",
    "Recipe": "recipe",
    "SampledGemmError": "monte_carlo",
    "SignalAccumulator": "gradient",
    "StatisticsAccumulator": "collect",
    "TensorStatistics": "distributions",
    "bf16_matmul": "accumulate",
    "cast": "rounding",
    "copula": "families",
    "estimated_split_k": "tensor_core",
    "fake_quantize": "quantization",
    "fidelity": "verified",
    "fp8_matmul": "accumulate",
    "gaussian": "distributions",
    "gemm_error": "errors",
    "log_normal": "families",
    "matrix_normal": "families",
    "measure_pair": "pair",
    "mixture": "families",
    "output_error": "errors",
    "predict_gemm_error": "predict",
    "predict_gemm_errors": "predict",
    "quantize": "quantization",
    "relu": "families",
    "sample": "distributions",
    "sample_gemm_error": "monte_carlo",
    "student_t": "families",
    "uniform": "families",
}

__all__ = list(_HOMES)  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'numerics' has no attribute {name!r}")
    module = importlib.import_module(f"numerics.{_HOMES[name]}")
    globals()[name] = value = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

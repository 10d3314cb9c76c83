"""A GPU's specification from what was measured on it: the roofline that its time model is learned over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loka_sim.errors import DataError
from perfmodel.kernels import KERNELS

if TYPE_CHECKING:
    import pandas


def hardware_of(name: str, machine: dict[str, Any], rows: pandas.DataFrame) -> dict[str, Any]:
    """A GPU's specification from what was measured on it, each figure with its source (see `perfmodel.hardware`).

    Args:
        name: What to call it.
        machine: Its fingerprint.
        rows: Measured rows.

    Raises:
        DataError: no bf16 or FP8 GEMM, or no memory-bound kernel, was measured.
    """
    import numpy as np

    from perfmodel.roofline import flops, moved_bytes

    def best(what: str, kernels: list[str], amount: Any, among: pandas.DataFrame = rows) -> float:
        some = among[among["kernel"].isin(kernels)]
        if some.empty:
            raise DataError(f"no {what} kernel was measured; run the sweep again with more --minutes")
        rates = [
            amount(KERNELS[str(kernel)], *(np.array([float(size)]) for size in sizes))[0] / us / 1e6
            for kernel, *sizes, us in some[["kernel", "m", "n", "k", "groups", "p50_us"]].itertuples(index=False)
        ]
        return float(max(rates))

    fp8 = [n for n, spec in KERNELS.items() if spec.kind == "gemm" and spec.is_fp8]
    pointwise = [n for n, spec in KERNELS.items() if spec.kind == "pointwise"]
    major, minor = machine["capability"].split(".")
    # What stays in the L2 moves faster than memory does: a bandwidth is of what does not fit.
    large = rows[rows["m"] * rows["k"] * 4 > 2 * machine["l2_bytes"]]
    bandwidth = best("pointwise", pointwise, moved_bytes, large if large["kernel"].isin(pointwise).any() else rows)
    return {
        "schema_version": 1, "name": name, "gpu": machine["gpu"], "capability": [int(major), int(minor)],
        "peak_bf16_tflops": round(best("bf16 GEMM", ["torch/bf16"], flops), 1),
        "peak_fp8_tflops": round(best("FP8 GEMM", fp8, flops), 1), "copy_bandwidth_tbs": round(bandwidth, 2),
        "l2_bytes": machine["l2_bytes"], "multiprocessors": machine["multiprocessors"],
        "sources": {
            "peak_bf16_tflops": "fastest torch/bf16 row of the sweep", "peak_fp8_tflops": "fastest FP8 row of the sweep",
            "copy_bandwidth_tbs": "fastest pointwise row of the sweep beyond twice the L2, or of all where none is",
            "l2_bytes": "reported by the CUDA driver", "multiprocessors": "reported by the CUDA driver",
        },
    }  # fmt: skip

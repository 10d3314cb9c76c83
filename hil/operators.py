"""Our kernels and FBGEMM's as torch operators, so that torch.compile keeps them in its graphs and a training step can run them.

    torch.ops.loka.quantized(x, kernel) -> codes, scales
    torch.ops.loka.quantized_both(x, kernel) -> codes, turned codes, scales of both
    torch.ops.loka.product(a, b, scale_a, scale_b, kernel) -> bf16

`kernel` is a name of `perfmodel.KERNELS`. x is a row-major bf16 matrix; codes are e4m3, row-major; scales are FP32 and multiply:
one value, (rows, 1) or (blocks of rows, blocks of columns). An operator has no gradient of its own: `loka_sim.dispatch.runtime`
makes whole layers of them. Importing this module registers them.
"""

from __future__ import annotations

import functools

import torch
from torch import library as torch_library

from hil.kernels.base import E4M3
from perfmodel.kernels import KERNELS, library_of

Matrix = torch.Tensor

_LIBRARY = torch_library.Library("loka", "DEF")
# Strides are kept as traced: the kernels want rows side by side.
_TAGS = (torch.Tag.needs_fixed_stride_order,)


def _parts(kernel: str) -> tuple[str, str, str]:
    """Library, scaling and form ('', 'transposed' or 'dual') of a quantizer's name."""
    library, _, name = kernel.partition("/quantize_")
    scaling, _, form = name.partition("_")
    return library, scaling, form


def scales_shape(scaling: str, rows: int, columns: int) -> tuple[int, ...]:
    """Shape of the scales of a matrix: (), (rows, 1), or one a block."""
    if scaling == "tensorwise":
        return ()
    tall, wide = {"rowwise": (1, columns), "block1x128": (1, 128), "block128x128": (128, 128)}[scaling]
    return rows // tall, columns // wide


def _quantized(x: Matrix, kernel: str) -> tuple[Matrix, Matrix]:
    library, scaling, form = _parts(kernel)
    if library == "fbgemm":
        from hil.kernels import fbgemm

        fbgemm.load()
        operator = torch.ops.fbgemm.quantize_fp8_per_row if scaling == "rowwise" else torch.ops.fbgemm.quantize_fp8_per_tensor
        codes, scales = operator(x)
        return codes, scales.reshape(scales_shape(scaling, *x.shape))
    from hil.kernels import loka_quantize

    if form:
        return loka_quantize.quantize_transposed(x, scaling)
    return loka_quantize.quantize(x, scaling)


def _quantized_fake(x: Matrix, kernel: str) -> tuple[Matrix, Matrix]:
    _, scaling, form = _parts(kernel)
    rows, columns = x.shape[::-1] if form == "transposed" else x.shape
    shape = scales_shape(scaling, rows, columns)
    return x.new_empty((rows, columns), dtype=E4M3), x.new_empty(shape, dtype=torch.float32)


def _quantized_both(x: Matrix, kernel: str) -> tuple[Matrix, Matrix, Matrix]:
    from hil.kernels import loka_quantize

    (codes, scales), (turned, turned_scales) = loka_quantize.quantize_dual(x, _parts(kernel)[1])
    # Both lie in one allocation, one behind the other: results of an operator may not share theirs.
    return codes, turned, scales.as_strided((scales.numel() + turned_scales.numel(),), (1,), scales.storage_offset())


def _quantized_both_fake(x: Matrix, kernel: str) -> tuple[Matrix, Matrix, Matrix]:
    rows, columns = x.shape
    scaling = _parts(kernel)[1]
    count = torch.Size(scales_shape(scaling, rows, columns)).numel() + torch.Size(scales_shape(scaling, columns, rows)).numel()
    codes, turned = x.new_empty((rows, columns), dtype=E4M3), x.new_empty((columns, rows), dtype=E4M3)
    return codes, turned, x.new_empty((count,), dtype=torch.float32)


def both(x: Matrix, kernel: str) -> tuple[tuple[Matrix, Matrix], tuple[Matrix, Matrix]]:
    """Codes and scales of x, and of x transposed, from one kernel of the form `dual`."""
    rows, columns = x.shape
    scaling = _parts(kernel)[1]
    codes, turned, scales = torch.ops.loka.quantized_both(x, kernel)
    shapes = scales_shape(scaling, rows, columns), scales_shape(scaling, columns, rows)
    if scaling == "tensorwise":
        # The same scale twice; cuBLAS refuses the second one's address, which 16 bytes do not divide.
        scale = scales[:1].view(())
        return (codes, scale), (turned, scale)
    first = torch.Size(shapes[0]).numel()
    return (codes, scales[:first].view(shapes[0])), (turned, scales[first:].view(shapes[1]))


def _product(a: Matrix, b: Matrix, scale_a: Matrix, scale_b: Matrix, kernel: str) -> Matrix:
    library, fast = library_of(kernel), kernel.endswith("_fast")
    if library == "fbgemm":
        from hil.kernels import fbgemm

        fbgemm.load()
        if kernel == "fbgemm/fp8_block128":
            return fbgemm.block128(a, b, scale_a, scale_b)
        return fbgemm.rowwise(a, b, scale_a.reshape(-1), scale_b.reshape(-1), fast)
    from hil.kernels.loka_gemm import fp8_gemm

    return fp8_gemm(a, b, scale_a, scale_b, fast=fast)


def _product_fake(a: Matrix, b: Matrix, scale_a: Matrix, scale_b: Matrix, kernel: str) -> Matrix:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


@functools.cache
def runs(kernel: str) -> bool:
    """Whether an operator of this module runs a kernel of `perfmodel.KERNELS`."""
    spec = KERNELS[kernel]
    return kernel.startswith(("loka/", "fbgemm/")) and (spec.makes is not None or (spec.kind == "gemm" and spec.is_fp8))


for _name, _signature, _run, _fake in (
    ("quantized", "(Tensor x, str kernel) -> (Tensor, Tensor)", _quantized, _quantized_fake),
    ("quantized_both", "(Tensor x, str kernel) -> (Tensor, Tensor, Tensor)", _quantized_both, _quantized_both_fake),
    ("product", "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str kernel) -> Tensor", _product, _product_fake),
):
    _LIBRARY.define(_name + _signature, tags=_TAGS)
    for _device in ("CUDA", "CPU"):
        _LIBRARY.impl(_name, _run, _device)
    torch_library.register_fake(f"loka::{_name}", _fake, lib=_LIBRARY)

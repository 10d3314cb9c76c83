"""FP8 rowwise messages: rows of bf16 in one buffer of e4m3 codes and FP32 scales, a payload for each destination.

A destination's payload is its rows' codes (`dim` bytes a row, row after row), then its rows' scales (four bytes a row),
then zeros up to a multiple of 16 bytes. Codes and scales thus travel in one message, and each part starts on a multiple
of 16 bytes wherever the rows are cut. Codes and scales are those of `numerics.quantize` under `e4m3/rowwise`, to the
last bit; a row that holds NaN or infinity arrives as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from numerics.sizes import cdiv, next_power_of_2

ALIGNMENT = 16
_SCALE_BYTES = 4
# Values of one program, 32 a thread: several 16-byte loads in flight in each, and a few thousand programs from 8 MB.
_TILE = 2048
_LEAST_TILE = 128


@dataclass(frozen=True)
class Layout:
    """Where each destination's (or each source's) payload lies in a message.

    Attributes:
        dim: Values of a row: a positive multiple of 16.
        rows: Rows of each payload, in the order of ranks.

    Raises:
        ValueError: dim is not such a multiple, or a number of rows is negative.
    """

    dim: int
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse what kernels could not keep aligned."""
        if self.dim <= 0 or self.dim % ALIGNMENT:
            raise ValueError(f"dim {self.dim}: give a positive multiple of {ALIGNMENT}, so that codes stay aligned")
        if not self.rows or min(self.rows) < 0:
            raise ValueError(f"rows {self.rows}: give one number of rows, 0 or more, for each rank")

    @property
    def payload_bytes(self) -> list[int]:
        """Bytes of each payload: what an all-to-all of uint8 takes as its split sizes."""
        return [n * self.dim + -(-n * _SCALE_BYTES // ALIGNMENT) * ALIGNMENT for n in self.rows]

    @property
    def total_rows(self) -> int:
        """Rows of all payloads."""
        return sum(self.rows)

    @property
    def message_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(self.payload_bytes)

    def message(self, device: torch.device | str) -> torch.Tensor:
        """A buffer for a message: (message_bytes,) uint8, zero, so that its padding is."""
        return torch.zeros(self.message_bytes, dtype=torch.uint8, device=device)

    def places(self, device: torch.device | str) -> torch.Tensor:
        """What the kernels need: (payloads + 1, 2) int64, each payload's first row and first byte, then their totals."""
        bounds = [(0, 0)]
        for rows, size in zip(self.rows, self.payload_bytes, strict=True):
            bounds.append((bounds[-1][0] + rows, bounds[-1][1] + size))
        return torch.tensor(bounds, dtype=torch.int64, device=device)


class Packer:
    """Writes rows into a message; makes no tensor, waits for nothing, and so can be captured in a CUDA graph."""

    def __init__(self, layout: Layout, device: torch.device | str) -> None:
        """Keep where each payload lies on the device."""
        from numerics.gpu import converts
        from numerics.gpu_constants import constants_of
        from numerics.recipe import Recipe

        self.layout = layout
        self._places = layout.places(device)
        self._constants = constants_of(Recipe.parse("e4m3/rowwise"), False, converts(self._places.device))

    def __call__(self, x: torch.Tensor, message: torch.Tensor) -> None:
        """Quantize and pack.

        Args:
            x: (total_rows, dim) bfloat16, float16 or float32, contiguous; rows in the order of destinations.
            message: Written but for its padding: (message_bytes,) uint8.

        Raises:
            ValueError: x or message is not of that shape or layout.
        """
        from hil.codec_kernels import pack_kernel

        _check(self.layout, x, message)
        _launch(pack_kernel, self.layout, x, message, message.view(torch.float32), self._places, C=self._constants)


class Unpacker:
    """Reads rows out of a message that `Packer` wrote, or that arrived in as many payloads; see there."""

    def __init__(self, layout: Layout, device: torch.device | str) -> None:
        """Keep where each payload lies on the device."""
        self.layout = layout
        self._places = layout.places(device)

    def __call__(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Unpack and dequantize: code times scale in FP32, rounded once to out's type.

        Args:
            message: (message_bytes,) uint8.
            out: Written: (total_rows, dim) bfloat16, float16 or float32, contiguous.

        Raises:
            ValueError: message or out is not of that shape or layout.
        """
        from hil.codec_kernels import unpack_kernel

        _check(self.layout, out, message)
        codes, scales = message.view(torch.float8_e4m3fn), message.view(torch.float32)
        _launch(unpack_kernel, self.layout, out, codes, scales, self._places)


def split_rows(total: int, ranks: int, weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """`total` rows over ranks, equally or by weights, every row given: the last rank takes what rounding leaves.

    Raises:
        ValueError: there is not one weight a rank.
    """
    shares = [1.0] * ranks if weights is None else list(weights)
    if len(shares) != ranks:
        raise ValueError(f"weights: {len(shares)} for {ranks} ranks; give one a rank")
    whole = sum(shares)
    rows = [int(total * share / whole) for share in shares[:-1]]
    return (*rows, total - sum(rows))


def _check(layout: Layout, rows: torch.Tensor, message: torch.Tensor) -> None:
    if tuple(rows.shape) != (layout.total_rows, layout.dim) or not rows.is_contiguous():
        raise ValueError(
            f"rows are {tuple(rows.shape)}{'' if rows.is_contiguous() else ', strided'}; "
            f"give a contiguous ({layout.total_rows}, {layout.dim})"
        )
    if tuple(message.shape) != (layout.message_bytes,) or message.dtype != torch.uint8 or not message.is_contiguous():
        raise ValueError(
            f"message is {tuple(message.shape)} {message.dtype}; give a contiguous ({layout.message_bytes},) torch.uint8"
        )


def _launch(kernel: object, layout: Layout, *arguments: torch.Tensor, **constants: object) -> None:

    from numerics.gpu import on, run

    most = max(layout.rows)
    if not most:
        return
    width = next_power_of_2(layout.dim)
    height = max(min(_TILE // width, next_power_of_2(most)), _LEAST_TILE // width, 1)
    with on(arguments[0].device):
        run(
            kernel, (cdiv(most, height), len(layout.rows)), height * width, *arguments,
            DIM=layout.dim, WIDTH=width, ROWS=height, **constants,
        )  # fmt: skip

"""The all-to-all of bf16 rows, sent as they are or compressed: one operation of codec, send and codec.

    exchange = CompressedAllToAll("fp8_rowwise", 128, send_rows, receive_rows, group, device)
    exchange(x, out)

Buffers are made once, so that a call can be captured in a CUDA graph. `fp8_rowwise` packs codes and scales into one
message by fused kernels (`hil.codec`); `fp8_rowwise_unfused` is what one writes without them: quantization and
dequantization by torch.compile, codes and scales in an all-to-all each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hil.codec import Layout, Packer, Unpacker

DTYPES = ("bf16", "fp16", "fp8_rowwise", "fp8_rowwise_unfused")
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Wire:
    """One all-to-all of a tensor cut along its first axis.

    Attributes:
        sent: Payloads to all ranks, one after another.
        received: Payloads from all ranks.
        send_splits: Length of each payload sent.
        receive_splits: Length of each payload received.
    """

    sent: torch.Tensor
    received: torch.Tensor
    send_splits: list[int]
    receive_splits: list[int]

    def exchange(self, group: Any) -> None:
        """Send and receive."""
        dist.all_to_all_single(self.received, self.sent, self.receive_splits, self.send_splits, group=group)


class CompressedAllToAll:
    """Rows of `dim` bf16 values to all ranks of a group and from them.

    Attributes:
        wires: What is exchanged, and its buffers; a bf16 exchange has no buffers of its own, hence none.
    """

    def __init__(
        self,
        dtype: str,
        dim: int,
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        group: Any,
        device: torch.device | str,
    ) -> None:
        """Make the buffers.

        Args:
            dtype: One of `DTYPES`: what travels. `fp16` holds values up to 65,504: larger ones arrive as infinity.
            dim: Values of a row; a positive multiple of 16.
            send_rows: Rows for each rank of the group.
            receive_rows: Rows from each rank of the group.
            group: Process group; None for all ranks.
            device: Where rows live.

        Raises:
            ValueError: no such dtype, or dim or rows are not as said.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r}: give one of {', '.join(DTYPES)}")
        self.dtype = dtype
        self._group = group
        self._send, self._receive = Layout(dim, tuple(send_rows)), Layout(dim, tuple(receive_rows))
        self.wires = self._make_wires(device)
        if dtype == "fp8_rowwise":
            self._pack, self._unpack = Packer(self._send, device), Unpacker(self._receive, device)
        elif dtype == "fp8_rowwise_unfused":
            self._quantize, self._dequantize = unfused(torch.device(device).type)

    def _make_wires(self, device: torch.device | str) -> list[Wire]:
        send, receive = self._send, self._receive
        if self.dtype == "bf16":
            return []
        if self.dtype == "fp8_rowwise":
            return [Wire(send.message(device), receive.message(device), send.payload_bytes, receive.payload_bytes)]
        shapes = [(send.dim, torch.float16)] if self.dtype == "fp16" else [(send.dim, torch.uint8), (1, torch.float32)]
        return [
            Wire(
                torch.empty(send.total_rows, width, dtype=kind, device=device),
                torch.empty(receive.total_rows, width, dtype=kind, device=device),
                list(send.rows),
                list(receive.rows),
            )
            for width, kind in shapes
        ]

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends, to itself included."""
        if not self.wires:
            return 2 * self._send.total_rows * self._send.dim
        return sum(wire.sent.nbytes for wire in self.wires)

    def encode(self, x: torch.Tensor) -> None:
        """Rows (send rows, dim) bf16 into what is sent."""
        if self.dtype == "fp16":
            self.wires[0].sent.copy_(x)
        elif self.dtype == "fp8_rowwise":
            self._pack(x, self.wires[0].sent)
        elif self.dtype == "fp8_rowwise_unfused":
            self._quantize(x, self.wires[0].sent, self.wires[1].sent)

    def decode(self, out: torch.Tensor) -> None:
        """What was received into rows (receive rows, dim) bf16."""
        if self.dtype == "fp16":
            out.copy_(self.wires[0].received)
        elif self.dtype == "fp8_rowwise":
            self._unpack(self.wires[0].received, out)
        elif self.dtype == "fp8_rowwise_unfused":
            self._dequantize(self.wires[0].received, self.wires[1].received, out)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Exchange rows.

        Args:
            x: (send rows, dim) bfloat16, contiguous.
            out: Written: (receive rows, dim) bfloat16, contiguous; rows in the order of ranks.
        """
        self.encode(x)
        for wire in self.wires or [Wire(x, out, list(self._send.rows), list(self._receive.rows))]:
            wire.exchange(self._group)
        self.decode(out)


def _quantize(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    wide = x.float()
    amax = wide.abs().amax(dim=1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, amax / _E4M3_MAX)
    codes.copy_((wide / scale).to(torch.float8_e4m3fn).view(torch.uint8))
    scales.copy_(scale)


def _dequantize(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_((codes.view(torch.float8_e4m3fn).float() * scales).to(out.dtype))


@functools.cache
def unfused(device_type: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Quantize (x, codes, scales) and dequantize (codes, scales, out): compiled on a GPU, eager on a CPU."""
    if device_type != "cuda":
        return _quantize, _dequantize
    return _compiled(_quantize), _compiled(_dequantize)


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compiled once for each dim and for any number of rows, as in a model whose batch varies."""
    compiled = torch.compile(function)

    def call(*tensors: torch.Tensor) -> None:
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_static(tensor, 1)
        compiled(*tensors)

    return call

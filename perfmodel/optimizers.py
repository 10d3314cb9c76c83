"""Time of an optimizer's step: torch's fused kernels over lists of tensors, which take them chunk by chunk.

A launch takes so many tensors and `BLOCKS` chunks at most, a block a chunk. Few blocks take as long as one does, many
share the memory; small parameters are therefore far from any bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# at::native::multi_tensor_apply, torch 2.11 and 2.13: elements of a chunk, chunks of a launch.
CHUNK, BLOCKS = 65_536, 320
LAUNCH_US = 1.0


@dataclass(frozen=True)
class Optimizer:
    """One of torch's optimizers, on bf16 parameters, gradients and state.

    Attributes:
        read_bytes: Per parameter.
        written_bytes: Per parameter.
        state_bytes: Of these, its state, read and written.
        tensors: Parameters that a launch takes at most.
        chunk_us: A block's time for a whole chunk.
        bandwidth_tbs: Of launches of many chunks.
        counts: Launches beside those, which count steps.
    """

    read_bytes: int
    written_bytes: int
    state_bytes: int
    tensors: int
    chunk_us: float
    bandwidth_tbs: float
    counts: int = 0


# Fitted to the first six lists of tensors of `python -m hil.fused eager` on an H200 (data/h200/eager_ops.json); on the other
# four, which are shaped as layers with their biases, at most 8% off for AdamW and 20% for SGD. torch's Adagrad has no fused
# form: five kernels over the list.
OPTIMIZERS = {
    "adamw": Optimizer(8, 6, 8, 36, 37.0, 2.80, counts=1),
    "sgd": Optimizer(4, 2, 0, 64, 19.0, 3.55),
    "sgd_momentum": Optimizer(6, 4, 4, 48, 22.0, 3.15),
    "adagrad": Optimizer(6, 4, 4, 50, 72.0, 1.25),
}
UNCERTAINTY = 0.2


def step_us(sizes: Iterable[int], optimizer: str) -> float:
    """Microseconds of one step over tensors of so many elements, in bf16, on an H200."""
    kind = OPTIMIZERS[optimizer]
    moved = kind.read_bytes + kind.written_bytes
    total = LAUNCH_US * kind.counts
    for largest, elements in _launches(sizes, kind.tensors):
        total += LAUNCH_US + max(kind.chunk_us * largest / CHUNK, moved * elements / (kind.bandwidth_tbs * 1e6))
    return total


def _launches(sizes: Iterable[int], most: int) -> Iterator[tuple[int, int]]:
    """Largest chunk and elements of each launch."""
    blocks = tensors = elements = largest = 0
    for size in sizes:
        tensors += 1
        while size:
            part = min(size, (BLOCKS - blocks) * CHUNK)
            blocks, elements, largest = blocks + math.ceil(part / CHUNK), elements + part, max(largest, min(part, CHUNK))
            size -= part
            if blocks == BLOCKS or (not size and tensors == most):
                yield largest, elements
                blocks = elements = largest = 0
                tensors = 1 if size else 0
    if blocks:
        yield largest, elements

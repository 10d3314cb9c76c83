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
# The GPU that all figures here were measured on; another one is faster or slower by its memory, a block alone is not.
MEASURED_ON = "h200"
# What AdamW launches first, to count its steps: microseconds, and tensors of a launch (`data/h200/optimizers.json`).
COUNT_US, COUNTED = 1.45, 110


@dataclass(frozen=True)
class Optimizer:
    """One of torch's optimizers, on bf16 parameters, gradients and state.

    Attributes:
        read_bytes: Per parameter.
        written_bytes: Per parameter.
        state_bytes: Of these, its state, read and written.
        tensors: Parameters that a launch takes at most.
        launch_us: Of every launch, beside what follows.
        chunk_us: A block's time for a whole chunk.
        bandwidth_tbs: Of what the memory's part of a launch grows with, on an H200.
        bend: How sharply one of the two takes over from the other: the exponent of the norm that joins them.
        counts: Whether a launch counts steps.
    """

    read_bytes: int
    written_bytes: int
    state_bytes: int
    tensors: int
    launch_us: float
    chunk_us: float
    bandwidth_tbs: float
    bend: float
    counts: bool = False


# The last four of each: `python -m perfmodel.fit_optimizers`. torch's Adagrad has no fused form: five kernels over the list,
# as if they were one.
OPTIMIZERS = {
    "adamw": Optimizer(8, 6, 8, 36, 2.29, 33.9, 2.96, 2.96, counts=True),
    "sgd": Optimizer(4, 2, 0, 64, 1.44, 15.1, 6.67, 0.977),
    "sgd_momentum": Optimizer(6, 4, 4, 48, 1.54, 18.2, 3.44, 1.78),
    "adagrad": Optimizer(6, 4, 4, 50, 5.56, 55.9, 1.53, 1.41),
}
# 90% of the steps over lists that were not fitted to are that close.
UNCERTAINTY = 0.1


def step_us(sizes: Iterable[int], optimizer: str, constants: Optimizer | None = None) -> float:
    """Microseconds of one step over tensors of so many elements, in bf16, on an H200; by other constants where they are given."""
    kind, sizes = constants or OPTIMIZERS[optimizer], list(sizes)
    total = COUNT_US * math.ceil(len(sizes) / COUNTED) if kind.counts else 0.0
    for largest, elements in launches(sizes, kind.tensors):
        total += launch_us(kind, largest, elements)
    return total


def launch_us(kind: Optimizer, largest: int, elements: int) -> float:
    """Microseconds of one launch whose largest chunk and whose chunks in all have so many elements."""
    chunk = kind.chunk_us * largest / CHUNK
    memory = (kind.read_bytes + kind.written_bytes) * elements / (kind.bandwidth_tbs * 1e6)
    return kind.launch_us + float((chunk**kind.bend + memory**kind.bend) ** (1 / kind.bend))


def launches(sizes: Iterable[int], most: int) -> Iterator[tuple[int, int]]:
    """Elements of the largest chunk, and of all, of each launch over tensors of these sizes, `most` of them at once.

    Tensors without elements are left out, as torch does.
    """
    blocks = tensors = elements = largest = 0
    for size in filter(None, sizes):
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

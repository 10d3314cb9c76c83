"""What nodes of an aten graph are views of, and how these lie in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from loka_sim.capture.operators import ATTENTION, BAGS, EXTERNAL, GEMMS, VIEWS, WHOLE_VIEWS, operator_name, value_of

# torch._inductor.config.padding_stride_threshold, and padding_alignment_bytes: longer rows begin at a multiple.
PADDED_FROM, PADDED_TO_BYTES = 1024, 128


def factors(node: fx.Node) -> list[fx.Node]:
    """The two factors of a product."""
    return [node.args[position] for position in GEMMS[operator_name(node)]]  # type: ignore[misc]


def viewed(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What a node is a view of, all of it, and the views from there on."""
    chain: list[fx.Node] = []
    while node.op == "call_function" and operator_name(node) in WHOLE_VIEWS:
        chain.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return node, chain


def is_laid_by_compiler(base: fx.Node) -> bool:
    """Whether a node is written by a loop, not by a library nor by who calls: torch.compile lays it in memory, with padding."""
    if base.op != "call_function" or not isinstance(value_of(base), torch.Tensor):
        return False
    return all(operator_name(base) not in names for names in (VIEWS, GEMMS, EXTERNAL, BAGS, ATTENTION))


def laid(sizes: Sequence[int], itemsize: int) -> list[int]:
    """Strides of sizes that follow one another as they are counted, the longer ones padded (`ir.Layout._pad_strides`)."""
    multiple, strides = PADDED_TO_BYTES // itemsize, [1]
    for size in reversed(sizes[1:]):
        stride = strides[0] * size
        strides.insert(0, -(-stride // multiple) * multiple if stride > PADDED_FROM else stride)
    return strides if sizes else []


def lying(base: fx.Node, chain: Iterable[fx.Node]) -> torch.Tensor | None:
    """How views of a tensor lie whose sizes follow one another as they are counted; None where they cannot be without a copy."""
    value = value_of(base)
    lies = torch.empty(value.shape, dtype=value.dtype, device="meta")
    if is_laid_by_compiler(base):
        lies = torch.empty_strided(value.shape, laid(value.shape, value.element_size()), dtype=value.dtype, device="meta")
    for view in chain:
        if isinstance(view.target, torch._ops.OpOverload):
            try:
                seen = view.target(lies, *view.args[1:], **view.kwargs)
            except RuntimeError:
                return None
            if seen.untyped_storage()._cdata != lies.untyped_storage()._cdata:
                return None
            lies = seen
    return lies


def steps(value: torch.Tensor) -> list[int]:
    """Strides of dimensions of more than one element."""
    return [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]

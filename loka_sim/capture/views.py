"""What nodes of an aten graph are views of, and how these lie in memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from loka_sim.capture.operators import GEMMS, WHOLE_VIEWS, operator_name, value_of


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


def lying(base: fx.Node, chain: Iterable[fx.Node]) -> torch.Tensor | None:
    """How views of a tensor lie whose sizes follow one another as they are counted; None where they cannot be without a copy."""
    lies = torch.empty(value_of(base).shape, dtype=value_of(base).dtype, device="meta")
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

"""Whether torch.compile computes a concatenation where it is used, or writes its parts to their places (`lowering.cat`, 2.11)."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence

import torch
from torch import fx

from loka_sim.capture.operators import VIEWS, operator_name
from loka_sim.capture.results import View
from loka_sim.loops import Scheduled

# What takes a concatenation in though it is not element by element.
ALSO = {"cat", "constant_pad_nd"}
# Who lays out their own results, which no concatenation makes room for.
LAID = {"gemm", "external", "copy", "place"}


def computed_where_used(node: fx.Node, parts: Sequence[View], loops: Iterable[Scheduled], joined: Container[int]) -> bool:
    """Whether a concatenation of few parts is computed where it is used.

    It is where all that uses it goes element by element and one part at least is computed, too; and where no part lies where it
    could as well be written in its place, and none is made of a reduction's results.

    Args:
        node: The concatenation.
        parts: What it puts together.
        loops: All that is written before it.
        joined: Buffers of concatenations that are not.
    """
    computed = [view for view in parts if view.root.buffer is None]
    if computed and all(map(_elementwise, node.users)):
        return True
    makers = {buffer: loop for loop in loops for buffer in loop.writes}
    reduced = {buffer for buffer, loop in makers.items() if loop.kind in ("row", "column")}
    if any(buffer in reduced for view in computed for buffer, _ in view.root.reads):
        return False
    written = [view.root.buffer for view in parts if view.root.buffer is not None]
    return all(buffer not in makers or buffer in joined or makers[buffer].kind in LAID for buffer in written)


def _elementwise(use: fx.Node) -> bool:
    """Whether a use goes element by element, or all that uses a view of it (`utils.is_pointwise_use`)."""
    if use.op != "call_function" or not (isinstance(use.target, torch._ops.OpOverload) or use.target is operator.getitem):
        return False
    if operator_name(use) in VIEWS:
        return all(map(_elementwise, use.users))
    tags = use.target.tags if isinstance(use.target, torch._ops.OpOverload) else ()
    return torch.Tag.pointwise in tags or operator_name(use) in ALSO

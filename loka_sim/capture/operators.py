"""aten operators by what a compiler does with them, and how their tensors lie in memory."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any, TypeAlias

import torch
from torch import fx

from loka_sim.loops import ACROSS, TURNED, Scheduled
from perfmodel.attention import BACKWARD, FORWARD
from perfmodel.kernels import KERNELS

WHOLE_VIEWS = set("view reshape _unsafe_view unsqueeze squeeze alias detach lift_fresh squeeze_dims permute transpose t".split())
OTHER_VIEWS = set(
    "select slice split split_with_sizes as_strided diagonal unbind unfold narrow expand getitem lookup_seed".split()
)
VIEWS = WHOLE_VIEWS | OTHER_VIEWS
GEMMS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
REDUCTIONS = set("sum mean amax amin var_mean var std argmax argmin any all prod logsumexp max min std_mean norm".split())
GATHERS = {"embedding": 0, "index": 0, "index_select": 0, "gather": 0, "_unsafe_index": 0, "_unsafe_masked_index": 0, "take": 0}
SCATTERS = set(
    "index_put _unsafe_index_put _unsafe_masked_index_put_accumulate scatter_add scatter scatter_reduce index_put_".split()
)
FILLS = set("full zeros ones empty new_zeros new_full new_ones full_like zeros_like ones_like new_empty seeds".split())
# Written where they are made: every use must see the same numbers (`inductor_random` is written, torch 2.11 and 2.13).
RANDOM = set("seeds random rand randn rand_like randn_like randint bernoulli".split())
# Library calls and scans: their operands must be there, their result is written, nothing fuses into them.
EXTERNAL = set(
    "index_add sort topk cumsum cumprod nonzero convolution convolution_backward unique _unique2 searchsorted bucketize "
    "multinomial max_pool2d_with_indices avg_pool2d repeat_interleave masked_scatter".split()
)
# Look-ups and their gradients that are library calls: kind, and positions of what is read whole and of the ids.
BAGS = {
    "_embedding_bag": ("gather", (1, 2), 1),
    "_embedding_bag_forward_only": ("gather", (1, 2), 1),
    "_embedding_bag_backward": ("scatter", (0, 1, 2), 1),
    "_embedding_bag_dense_backward": ("scatter", (0, 1, 2), 1),
    "embedding_dense_backward": ("scatter", (0, 1), 1),
}
# Attention that torch runs as kernels of its own.
ATTENTION = {"_scaled_dot_product_flash_attention": FORWARD, "_scaled_dot_product_flash_attention_backward": BACKWARD}


def value_of(node: fx.Node) -> Any:
    """The tensor without data, or tuple of such, that a node's result looks like."""
    return node.meta.get("val", node.meta.get("tensor_meta"))


def distinct(tensor: Any) -> int:
    """Elements that a tensor has in memory: what is expanded counts once."""
    return math.prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step) if tensor.dim() else 1


MOST_MULTIPLIED = 32  # torch._inductor.lowering.pow, torch 2.11 and 2.13: whole exponents nearer to 0 are multiplications


def operator_name(node: fx.Node) -> str:
    """`sum`, `index_put`, ...: the aten or prims operator of a call without its overload; of a small power what computes it."""
    target = node.target
    packet = getattr(target, "_overloadpacket", target)
    name = str(getattr(packet, "__name__", packet)).removeprefix("inductor_")
    if name == "scalar_tensor":
        return "full"
    exponent = node.args[1] if name == "pow" and len(node.args) > 1 else None
    if isinstance(exponent, int | float):
        if exponent == 0.5:
            return "sqrt"
        if float(exponent).is_integer() and abs(exponent) < MOST_MULTIPLIED:
            return "mul" if exponent > 0 else "reciprocal"
    return name


CONSTANT = "constant"
Computed: TypeAlias = "tuple[str, Any]"
"""One operation of an element, as torch.compile tells them apart: of which part, or `CONSTANT` everywhere, and what."""


def operations(node: fx.Node, name: str) -> frozenset[Computed]:
    """What a node itself computes for an element, as torch.compile counts it (`OpCounterCSE`, torch 2.11 and 2.13).

    Each operator is one and each number that it takes, a copy is none; where places decide what is computed (a concatenation,
    a part written into a whole, padding) each comparison is one.
    """
    if name == "clone":
        return frozenset()
    places = 1
    if name == "cat":
        places = 6 * len(node.all_input_nodes) - 1
    elif name == "slice_scatter":
        arguments: tuple[Any, ...] = (*node.args, *(None, None, 0, None, None, 1)[len(node.args) :])
        dim, start, end, step = arguments[2:]
        masks = [2] * bool(start) + [2] * (end is not None and end < value_of(node).shape[dim]) + [3] * (step != 1)
        places = sum(masks) + len(masks) + 2
    elif name == "constant_pad_nd":
        padding: Any = node.args[1]
        sides = [bool(before) + bool(behind) for before, behind in zip(padding[::2], padding[1::2], strict=True)]
        places = sum(map(bool, sides)) + 3 * sum(sides)
    found: set[Computed] = {("", (node, place)) for place in range(places)}
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
        found |= {(CONSTANT, (number, value_of(node).dtype)) for number in node.args if isinstance(number, int | float)}
    return frozenset(found)


def how_turned(read: Any, loop: torch.Tensor) -> int:
    """How a tensor's elements lie against those of the tensor that a loop makes from it, see `Access.turned`."""
    if not isinstance(read, torch.Tensor) or read.dim() > loop.dim():
        return 0
    offset = loop.dim() - read.dim()
    dims = [dim for dim in range(read.dim()) if read.shape[dim] > 1 and read.stride(dim) and loop.shape[dim + offset] > 1]
    steps, loop_steps = read.stride(), loop.stride()
    own = sorted(dims, key=lambda dim: -steps[dim])
    order = sorted(dims, key=lambda dim: -loop_steps[dim + offset])
    return 0 if own == order else ACROSS if own[-1] != order[-1] else TURNED


def shape_of(value: torch.Tensor, inner: Container[int] = ()) -> tuple[int, ...]:
    """Sizes of a loop over a tensor as it lies, those of 1 left out; the dimensions `inner` are the last."""
    steps = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: (dim in inner, -steps[dim]))
    return tuple(value.shape[dim] for dim in order if value.shape[dim] > 1)


def repeated_within(read: Any, loop: torch.Tensor) -> bool:
    """Whether a loop reads a tensor again along a dimension between two of the tensor's own, as one mask for every head."""
    if not isinstance(read, torch.Tensor) or read.dim() > loop.dim():
        return False
    own = [size > 1 and bool(step) for size, step in zip(read.shape, read.stride(), strict=True)]
    if not any(own):
        return False
    sizes = loop.shape[loop.dim() - read.dim() :]
    inside = slice(own.index(True), len(own) - own[::-1].index(True))
    return any(size > 1 and not mine for size, mine in zip(sizes[inside], own[inside], strict=True))


def trailing(value: torch.Tensor) -> bool:
    """Whether only the last dimensions are expanded: one element for a whole row."""
    steps = [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]
    seen = False
    for step in reversed(steps):
        if step:
            seen = True
        elif seen:
            return False
    return True


def reduced_dims(node: fx.Node, source: torch.Tensor) -> set[int]:
    """The dimensions that a reduction removes."""
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dims in (None, []):
        return set(range(source.dim()))
    return {dim % max(source.dim(), 1) for dim in ([dims] if isinstance(dims, int) else dims)}


def along_memory(node: fx.Node, source: torch.Tensor) -> bool:
    """Whether the dimensions that a reduction removes are the ones that lie closest in memory."""
    reduced = reduced_dims(node, source)
    if len(reduced) == source.dim():
        return True
    steps = {dim: source.stride(dim) for dim in range(source.dim()) if source.shape[dim] > 1}
    inner = [step for dim, step in steps.items() if dim in reduced]
    outer = [step for dim, step in steps.items() if dim not in reduced]
    return not inner or not outer or min(inner) < min(outer)


def of_two(node: fx.Node, value: Any) -> bool:
    """Whether a node is `max` or `min` of two tensors, which is no reduction."""
    return isinstance(value, torch.Tensor) and len(node.args) > 1 and isinstance(node.args[1], fx.Node)


def is_outer(node: fx.Node, name: str) -> bool:
    """Whether a node is a product over one element: torch.compile multiplies and broadcasts instead."""
    left = node.args[GEMMS[name][0]]
    return name == "mm" and isinstance(left, fx.Node) and bool(value_of(left).shape[-1] == 1)


def several_indices(node: fx.Node) -> bool:
    """Whether a node reads, or adds, at several indices at once: element by element, not by rows."""
    return sum(index is not None for index in node.args[1]) > 1  # type: ignore[union-attr, misc]


def may_be_fp8(product: Scheduled, batch: int) -> bool:
    """Whether a product's sizes beside the batch are multiples of what `torch._scaled_mm` takes."""
    assert product.gemm is not None
    multiple = KERNELS["torch/fp8_tensorwise_split"].multiple_k
    return all(size % batch == 0 or size % multiple == 0 for size in product.gemm[1:])

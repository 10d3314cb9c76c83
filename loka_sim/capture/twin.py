"""A stand-in for a model and its inputs that has shapes and no storage: what a capture runs instead of the user's."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from loka_sim.errors import UserError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Neither warnings nor torch's log of what failed without data, of a run that the user did not ask for."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.disabled = True
        try:
            yield
        finally:
            log.disabled = before


def hollow(tensor: torch.Tensor, device: str, size: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor without data like `tensor`: same dtype, order of strides and need of a gradient.

    Args:
        tensor: What to stand in for; may lie anywhere.
        device: `meta`, or the device that fake tensors claim.
        size: Another size, of as many dimensions; None keeps the tensor's.
    """
    steps = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-steps[dim], dim))
    twin = torch.empty_permuted(tensor.shape if size is None else size, order, dtype=tensor.dtype, device=device)
    return twin.requires_grad_(tensor.requires_grad)


class _HollowCopies(TorchFunctionMode):
    """Inside, `copy.deepcopy` of any tensor gives its twin: tensors that are plain attributes are not copied either."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            original, memo = args
            if id(original) not in memo:
                memo[id(original)] = hollow(original, self.device)
            return memo[id(original)]
        return func(*args, **(kwargs or {}))


def hollow_module(model: nn.Module, device: str) -> nn.Module:
    """A copy of `model` whose tensors have no data; sharing between modules is kept, `model` is left alone.

    Raises:
        UserError: the model has lazy parameters that are not there yet, or cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if nn.parameter.is_lazy(parameter):
            raise UserError(f"{name}: a lazy parameter has no shape yet; run one batch through the model before capturing it")
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(hollow(parameter, device).detach(), requires_grad=parameter.requires_grad)
    # A gradient may be as large as its parameter, and copying an optimizer's state of it would be of no use.
    for parameter in model.parameters():
        if parameter.grad is not None:
            memo[id(parameter.grad)] = None
    try:
        with _HollowCopies(device):
            twin = copy.deepcopy(model, memo)
    except Exception as error:  # whatever a user's __deepcopy__ or an attribute that cannot be copied raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{type(model).__name__} cannot be copied for the capture ({reason}); "
            "keep what copy.deepcopy refuses (locks, files, process groups) out of the module's attributes"
        ) from error
    return twin


def find_batch(inputs: Any, batch_dim: int, said: int | None = None) -> int:
    """Batch of the example inputs: the size along `batch_dim` of one of their tensors.

    That one is the first floating tensor, else the first with two dimensions, else the shortest: ids of a
    one-dimensional jagged tensor are several to a sample, its offsets one.

    Args:
        inputs: Anything that holds tensors.
        batch_dim: Dimension that is the batch.
        said: What the caller says the batch is; checked.

    Raises:
        UserError: no tensor has such a dimension, or none of the size said.
    """
    leaves = pytree.tree_leaves(inputs)
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and next(_tensors(leaf), None) is not None:
            name = type(leaf).__name__
            raise UserError(
                f"inputs: a {name} hides its tensors; call torch.utils._pytree.register_dataclass({name}) first, or pass a dict"
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > batch_dim]

    def rank(tensor: torch.Tensor) -> tuple[bool, bool, int]:
        jagged = not tensor.is_floating_point() and tensor.dim() < 2
        return not tensor.is_floating_point(), tensor.dim() < 2, tensor.shape[batch_dim] if jagged else 0

    ranked = sorted(tensors, key=rank)
    if not ranked:
        raise UserError(f"inputs: no tensor has a dimension {batch_dim} that could be the batch; pass example tensors")
    if not ranked[0].shape[batch_dim]:
        raise UserError(f"inputs: the batch (dimension {batch_dim}) is empty; pass at least one sample")
    sizes = [tensor.shape[batch_dim] for tensor in ranked]
    if said is not None and said not in sizes:
        raise UserError(
            f"batch {said}: no input tensor has it as dimension {batch_dim} (there are {sizes[:8]}); pass one of these"
        )
    return sizes[0] if said is None else said


def hollow_inputs(inputs: Any, device: str, old: int, new: int, batch_dim: int) -> Any:
    """Twins of all input tensors, those of batch `old` resized to batch `new`.

    A one-dimensional integer tensor of `r * old` elements (the ids of `r` lookups a sample) becomes `r * new`, one of
    `old + 1` (offsets that include the last) becomes `new + 1`.
    """
    twins: dict[int, torch.Tensor] = {}

    def size(tensor: torch.Tensor) -> tuple[int, ...]:
        sizes = list(tensor.shape)
        if tensor.dim() > batch_dim and sizes[batch_dim] == old:
            sizes[batch_dim] = new
        elif tensor.dim() == 1 and not tensor.is_floating_point() and old > 1:
            if sizes[0] == old + 1:
                sizes[0] = new + 1
            elif sizes[0] and sizes[0] % old == 0:
                sizes[0] = sizes[0] // old * new
        return tuple(sizes)

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout is not torch.strided:
            raise UserError(f"inputs: a tensor of layout {leaf.layout} cannot be resized; pass dense tensors")
        if id(leaf) not in twins:
            twins[id(leaf)] = hollow(leaf, device, size(leaf))
        return twins[id(leaf)]

    return pytree.tree_map(twin, inputs)


def arguments(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as a call takes them: a tuple or list are positional, a dict keyword ones where `forward` takes its keys.

    Raises:
        UserError: a dict is neither that nor the one argument of `forward`; what does not fit is named.
    """
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if not _is_named(inputs):
        return (inputs,), {}
    misfit = _misfit(model, inputs)
    if not misfit:
        return (), inputs
    try:
        inspect.signature(model.forward).bind(inputs)
    except TypeError:
        raise UserError(
            f"inputs: {type(model).__name__}.forward {misfit}; name the dict's keys after its arguments, or pass a tuple"
        ) from None
    return (inputs,), {}


def _is_named(inputs: Any) -> bool:
    return isinstance(inputs, dict) and all(isinstance(key, str) for key in inputs)


def _misfit(model: nn.Module, inputs: dict[str, Any]) -> str:
    """Why a dict cannot be the keyword arguments of `forward`; nothing where it can."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    needed = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_ONLY]
    needed += [each for each in named if each.default is each.empty and each.name not in inputs]
    taken = {each.name for each in named}
    unknown = [] if any(each.kind is each.VAR_KEYWORD for each in parameters) else [key for key in inputs if key not in taken]
    found = [f"{what} {names[0]!r}" for what, names in (
        ("takes no", unknown), ("needs", [each.name for each in needed]),
    ) if names]  # fmt: skip
    return " and ".join(found)


def mend(model: nn.Module, inputs: Any) -> str:
    """What to do where the model fails on its inputs: a dict may be one argument only because a key of it is wrong."""
    if (
        _is_named(inputs)
        and (misfit := _misfit(model, inputs))
        and set(inputs) & set(inspect.signature(model.forward).parameters)
    ):
        return f"forward {misfit}, so that the dict was its one argument: name the keys after forward's arguments"
    return "check that the inputs fit the model"


def call(model: nn.Module, inputs: Any) -> Any:
    """Run the model on its inputs, see `arguments`."""
    positional, named = arguments(model, inputs)
    return model(*positional, **named)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for item in dataclasses.fields(leaf):
                yield from _tensors(getattr(leaf, item.name))


def total(outputs: Any) -> torch.Tensor | None:
    """A scalar to call `backward` on: all floating outputs, weighted and summed; None if none needs a gradient.

    The weights make each output's gradient a dense tensor, as a real loss does: a plain sum's is one element, expanded.
    """
    terms = [(out * torch.empty_like(out)).sum() for out in _tensors(outputs) if out.is_floating_point() and out.requires_grad]
    return torch.stack([term.double() for term in terms]).sum() if terms else None

"""A model that can be run on the GPU: what a validation times whole and takes tensors from."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loka_sim.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

# Rows of an embedding table: look-ups cost the same as in one of millions, memory does not.
TABLE_ROWS = 10_000


@dataclasses.dataclass(frozen=True)
class Runnable:
    """How to make a model and a batch of its inputs.

    Attributes:
        make: A fresh model on the GPU, in bf16.
        inputs: A batch on the GPU, floating-point tensors in bf16.
        loss: A scalar of the model's output.
        zoo: The zoo's name of it; None for a user's own.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Any], Tensor]
    zoo: str | None


def runnable(model: str, batch: int, mods: Sequence[str]) -> Runnable | None:
    """The model that a validation was asked for, to be run; None where there is only a specification of it.

    Args:
        model: Zoo name or `package.module:callable`; of a spec file there is nothing to run.
        batch: Samples.
        mods: Mods of a zoo model.
    """
    from loka_sim.resolve import zoo_names

    if ":" in model and not model.endswith((".json", ".yaml", ".yml")):
        return _users(model) if not mods else None
    name = next((name for name in zoo_names() if name == model or name == f"{model}-production"), None)
    return None if name is None else _from_zoo(name, batch, mods)


def _from_zoo(name: str, batch: int, mods: Sequence[str]) -> Runnable:
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    from loka_sim import zoo

    shape = zoo.input_shape(name)
    fewer: dict[str, Any] = {"rows": tuple(min(rows, TABLE_ROWS) for rows in shape.rows)}
    if shape.sequence_rows:
        fewer["sequence_rows"] = min(shape.sequence_rows, TABLE_ROWS)
    shape = dataclasses.replace(shape, **fewer)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return zoo.build(name, mods=mods, device="cuda", shape=shape).bfloat16()

    def inputs() -> tuple[Tensor, ...]:
        return _in_bf16(zoo.example_inputs(name, batch, device="cuda", shape=shape))

    labels = torch.rand(batch, generator=torch.Generator().manual_seed(1)).round().cuda()
    return Runnable(make, inputs, lambda out: binary_cross_entropy_with_logits(out.float().flatten(), labels), name)


def _users(text: str) -> Runnable:
    """A function of the user's, which returns (model, inputs), called with the GPU as torch's default device."""
    import torch
    from torch import nn

    from loka_sim.resolve import load_callable

    function = load_callable(text)

    def call() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        with torch.device("cuda"), contextlib.redirect_stdout(sys.stderr):
            made = function()
        if not (isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise UserError(f"{text}: returned no (model, inputs); a validation runs the model and needs both")
        given = made[1]
        return made[0].cuda(), given if isinstance(given, tuple) else tuple(given) if isinstance(given, list) else (given,)

    def loss(out: Any) -> Tensor:
        if isinstance(out, torch.Tensor):
            return out.float().square().mean()
        if isinstance(out, dict):
            out = tuple(out.values())
        if isinstance(out, tuple | list):
            parts = [loss(part) for part in out if not isinstance(part, torch.Tensor) or part.is_floating_point()]
            return torch.stack(parts).sum()
        raise UserError(f"{text}: the model returns a {type(out).__name__}; return tensors, so that a gradient can be taken")

    return Runnable(lambda: call()[0].bfloat16(), lambda: _in_bf16(tuple(x.cuda() for x in call()[1])), loss, None)


def _in_bf16(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)

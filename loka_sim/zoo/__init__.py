"""The model zoo: DLRM, DCN V2, Wukong and InterFormer, each `small` (trains on a CPU) and `production`.

```
model = build("wukong-production")                    # on the meta device: no memory
inputs = example_inputs("wukong-production", 2048)
logits = model(*inputs)
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from loka_sim.errors import UserError
from loka_sim.mods.modules import LayerFactory
from loka_sim.zoo import dcnv2, dlrm, interformer, wukong
from loka_sim.zoo.common import InputShape
from numerics.sizes import is_whole

__all__ = ["DEFAULT_BATCH", "MODELS", "NAMES", "InputShape", "build", "canonical", "example_inputs", "input_shape"]


@dataclass(frozen=True)
class _Entry:
    """A model class and its two sizes."""

    cls: Callable[..., nn.Module]
    small: Any
    production: Any
    sequence: bool = False


MODELS = {
    "dlrm": _Entry(dlrm.DLRM, dlrm.SMALL, dlrm.PRODUCTION),
    "dcnv2": _Entry(dcnv2.DCNv2, dcnv2.SMALL, dcnv2.PRODUCTION),
    "wukong": _Entry(wukong.Wukong, wukong.SMALL, wukong.PRODUCTION),
    "interformer": _Entry(interformer.InterFormer, interformer.SMALL, interformer.PRODUCTION, sequence=True),
}
SIZES = ("small", "production")
NAMES = tuple(f"{model}-{size}" for model in MODELS for size in SIZES)
DEFAULT_BATCH = {name: 512 if name.endswith("-small") else 2048 for name in NAMES}


def canonical(name: str) -> str:
    """The zoo's full name: a bare model name means its production size.

    Raises:
        UserError: the zoo has no such model.
    """
    full = f"{name}-production" if name in MODELS else name
    if full not in NAMES:
        raise UserError(f"unknown zoo model '{name}'; choose from {', '.join(NAMES)}")
    return full


def _entry(name: str) -> tuple[_Entry, Any]:
    model, _, size = canonical(name).rpartition("-")
    return MODELS[model], getattr(MODELS[model], size)


def input_shape(name: str) -> InputShape:
    """What a sample of a zoo model has, unless `build` is told otherwise.

    Raises:
        UserError: the zoo has no such model.
    """
    _, config = _entry(name)
    known = {field.name for field in fields(InputShape)}
    return InputShape(**{key: value for key, value in vars(config).items() if key in known and key != "dense"})


def build(
    name: str,
    *,
    mods: str | Iterable[str] = (),
    device: str | torch.device = "meta",
    shape: InputShape | None = None,
) -> nn.Module:
    """A zoo model.

    Args:
        name: One of `NAMES`, or a bare model name for its production size.
        mods: Names of Mods to apply (see `loka_sim.mods`).
        device: Where its parameters live; `meta` needs no memory. Seed torch before building for a repeatable start.
        shape: What a sample has; the model's own (13 counts, 26 fields) by default.

    Raises:
        UserError: the zoo has no such model or there is no such Mod.
    """
    entry, config = _entry(name)
    factory = LayerFactory(mods)
    with torch.device(device):
        return entry.cls(config, shape or input_shape(name), factory)


def example_inputs(
    name: str,
    batch: int,
    device: str | torch.device = "meta",
    seed: int = 0,
    shape: InputShape | None = None,
) -> tuple[Tensor, ...]:
    """Random inputs: dense (batch, dense) float32, ids (batch, fields) int64, and for InterFormer a sequence of ids.

    Args:
        name: A zoo model.
        batch: Number of samples.
        device: Where to put them.
        seed: Of the random numbers (without meaning on the meta device).
        shape: What a sample has; the model's own by default.

    Raises:
        UserError: the zoo has no such model, or the batch is no positive whole number.
    """
    if not is_whole(batch):
        raise UserError(f"batch = {batch}: give a whole number of at least 1")
    entry, _ = _entry(name)
    shape = shape or input_shape(name)
    if torch.device(device).type == "meta":
        meta = [torch.empty(batch, shape.dense, device="meta")]
        meta.append(torch.empty(batch, len(shape.rows), dtype=torch.int64, device="meta"))
        if entry.sequence:
            meta.append(torch.empty(batch, shape.sequence_length, dtype=torch.int64, device="meta"))
        return tuple(meta)
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(batch, shape.dense, generator=generator)]
    columns = [torch.randint(rows, (batch,), generator=generator) for rows in shape.rows]
    made.append(torch.stack(columns, dim=1))
    if entry.sequence:
        size = (batch, shape.sequence_length)
        made.append(torch.randint(1, shape.sequence_rows, size, generator=generator))
    return tuple(tensor.to(device) for tensor in made)

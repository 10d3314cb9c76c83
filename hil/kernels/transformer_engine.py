"""TransformerEngine's FP8 recipes on one linear layer: delayed, current and block scaling.

Written against the interface that TransformerEngine documents (`Linear` under `autocast`, `fp8_autocast` in versions before
that name) and checked against a stand-in only: it has never run on a GPU here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hil.kernels.linear import linear_runner


def _autocast(te: Any, recipe: Any) -> Any:
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def _convert(name: str, layer: nn.Linear) -> tuple[Callable[[torch.Tensor], torch.Tensor], nn.Parameter]:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    scaling = getattr(recipe, name, None)
    if scaling is None:
        raise ImportError(f"this transformer-engine has no recipe {name}; pip install --upgrade transformer-engine")
    module = te.Linear(
        layer.in_features, layer.out_features, bias=False, params_dtype=torch.bfloat16, device=str(layer.weight.device)
    )
    with torch.no_grad():
        module.weight.copy_(layer.weight)
    made = scaling()

    def forward(x: torch.Tensor) -> torch.Tensor:
        with _autocast(te, made):
            return module(x)

    return forward, module.weight


TE_RUNNERS = (
    linear_runner("transformer_engine/linear_fp8_delayed", partial(_convert, "DelayedScaling")),
    linear_runner("transformer_engine/linear_fp8_current", partial(_convert, "Float8CurrentScaling")),
    linear_runner("transformer_engine/linear_fp8_block", partial(_convert, "Float8BlockScaling")),
)

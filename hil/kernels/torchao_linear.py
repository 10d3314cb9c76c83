"""torchao's float8 training recipes on one linear layer, and the bf16 layer beside which they are judged.

Compiled by torch.compile with static shapes, which torchao counts on to fuse its casts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from hil.kernels.linear import linear_runner


def _compiled(layer: nn.Module) -> tuple[Any, nn.Parameter]:
    parameter = layer.weight
    assert isinstance(parameter, nn.Parameter)
    return torch.compile(layer, dynamic=False), parameter


def _float8(recipe: str, layer: nn.Linear) -> tuple[Any, nn.Parameter]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return _compiled(convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe)))


TORCHAO_RUNNERS = (
    linear_runner("torch/linear_bf16", _compiled),
    linear_runner("torchao/linear_tensorwise", partial(_float8, "tensorwise")),
    linear_runner("torchao/linear_rowwise", partial(_float8, "rowwise")),
    # The weight gradient stays in bf16.
    linear_runner("torchao/linear_rowwise_gw_hp", partial(_float8, "rowwise_with_gw_hp")),
)

"""The zoo's models at other widths and depths: steps that no figure was ever made for, to judge predictions by.

    python benchmarks/step_profile.py benchmarks.other_widths:dcnv2 --batch 4096
    loka-sim whatif benchmarks.other_widths:dcnv2 --batch 4096

Tables have at most 10,000 rows, so that every model fits a GPU beside others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from loka_sim import zoo
from loka_sim.inputs import InputShape
from loka_sim.mods.modules import LayerFactory
from loka_sim.validation.runnable import TABLE_ROWS
from loka_sim.zoo import dcnv2 as dcn
from loka_sim.zoo import dlrm as dot
from loka_sim.zoo import interformer as inter
from loka_sim.zoo import wukong as wu

BATCHES = {"dlrm": 4096, "dcnv2": 4096, "wukong": 1536, "interformer": 1024}
"""That the functions' own inputs have."""


def _model(name: str, cls: Callable[..., nn.Module], config: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    rows = tuple(min(rows, TABLE_ROWS) for rows in config.rows)
    sequence = {"sequence_rows": TABLE_ROWS, "sequence_length": config.sequence_length} if name == "interformer" else {}
    shape = InputShape(rows=rows, **sequence)
    device = torch.device("meta" if torch.get_default_device().type == "meta" else "cpu")
    with device:  # a GPU takes no random numbers from the host's generator
        inputs = zoo.example_inputs(f"{name}-production", BATCHES[name], device, shape=shape)
    return cls(config, shape, LayerFactory(())), inputs


def dlrm() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Twice as wide."""
    return _model("dlrm", dot.DLRM, replace(dot.PRODUCTION, dim=256, bottom=(1024, 512), top=(2048, 2048, 1024, 512)))


def dcnv2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Four cross layers of a higher rank over wider embeddings."""
    return _model("dcnv2", dcn.DCNv2, replace(dcn.PRODUCTION, dim=192, cross_layers=4, rank=1024, top=(2048, 1024, 512)))


def wukong() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Fewer layers, narrower, of wider embeddings."""
    return _model("wukong", wu.Wukong, replace(wu.PRODUCTION, dim=192, per_field=4, layers=6, fmb=48, lcb=80,
                                               hidden=(4096, 6144, 4096), top=(4096, 2048)))  # fmt: skip


def interformer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Two layers, narrower, over a shorter sequence."""
    return _model("interformer", inter.InterFormer, replace(inter.PRODUCTION, dim=192, layers=2, rank=512, dot_hidden=(4096,),
                                                            hidden=(4096, 4096), sequence_length=160))  # fmt: skip

"""The zoo's models at other widths and depths: steps that no figure was ever made for, to judge predictions by.

    python benchmarks/step_profile.py benchmarks.other_widths:dcnv2 --batch 4096
    loka-sim whatif benchmarks.other_widths:dcnv2 --batch 4096
    loka-sim whatif benchmarks.other_widths:wukong_7     # all sizes and the batch drawn with seed 7

Tables have at most 10,000 rows, so that every model fits a GPU beside others. The batch is that of the functions' own inputs.
"""

from __future__ import annotations

import random
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


def _model(
    name: str, cls: Callable[..., nn.Module], config: Any, batch: int | None = None
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    rows = tuple(min(rows, TABLE_ROWS) for rows in config.rows)
    sequence = {"sequence_rows": TABLE_ROWS, "sequence_length": config.sequence_length} if name == "interformer" else {}
    shape = InputShape(rows=rows, **sequence)
    device = torch.device("meta" if torch.get_default_device().type == "meta" else "cpu")
    with device:  # a GPU takes no random numbers from the host's generator
        inputs = zoo.example_inputs(f"{name}-production", batch or BATCHES[name], device, shape=shape)
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


def drawn(name: str, seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of one of the four kinds, its sizes and its batch drawn: between the zoo's small and its production models.

    Args:
        name: dlrm, dcnv2, wukong or interformer.
        seed: The same sizes for the same seed.
    """
    source = random.Random(f"{name} {seed}")

    def pick(*options: int) -> int:
        return source.choice(options)

    def widths(most: int, *options: int) -> tuple[int, ...]:
        return tuple(sorted((pick(*options) for _ in range(pick(*range(1, most + 1)))), reverse=True))

    batch = pick(1024, 1536, 2048, 3072, 4096, 6144)
    if name == "dlrm":
        sizes = {
            "dim": pick(32, 48, 64, 96, 160, 192),
            "bottom": widths(2, 128, 256, 384, 768),
            "top": widths(4, 256, 512, 768, 1536),
        }
        return _model(name, dot.DLRM, replace(dot.PRODUCTION, **sizes), 2 * batch)
    if name == "dcnv2":
        sizes = {
            "dim": pick(32, 48, 64, 96, 160), "cross_layers": pick(1, 2, 4, 5), "rank": pick(128, 256, 384, 768),
            "bottom": widths(2, 128, 256, 384), "top": widths(4, 256, 512, 768, 1536, 2048),
        }  # fmt: skip
        return _model(name, dcn.DCNv2, replace(dcn.PRODUCTION, **sizes), 2 * batch)
    if name == "wukong":
        hidden = widths(3, 512, 1024, 1536, 2048, 3072)
        sizes = {
            "dim": pick(32, 48, 64, 96), "per_field": pick(1, 2, 3, 5), "layers": pick(2, 3, 4), "fmb": pick(16, 24, 32, 48),
            "lcb": pick(16, 32, 64, 96), "rank": pick(8, 16, 24), "hidden": hidden, "top": widths(3, 256, 512, 1024, 2048),
        }  # fmt: skip
        return _model(name, wu.Wukong, replace(wu.PRODUCTION, **sizes), batch)
    sizes = {
        "dim": pick(32, 64, 96, 128), "layers": pick(1, 2), "heads": pick(2, 4), "rank": pick(64, 128, 256),
        "dot_hidden": widths(1, 512, 1024, 2048), "hidden": widths(2, 512, 1024, 2048), "dhen_layers": pick(1, 2),
        "cross_layers": pick(1, 2), "sequence_length": pick(48, 80, 120, 160),
    }  # fmt: skip
    return _model(name, inter.InterFormer, replace(inter.PRODUCTION, **sizes), batch // 2)


def __getattr__(name: str) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    """`MODEL_SEED`: the function of a drawn model."""
    kind, _, seed = name.rpartition("_")
    if kind not in BATCHES or not seed.isdigit():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: drawn(kind, int(seed))

"""A whole model's training step on the GPU: forward and backward, in bf16 and as converted, timed in turn."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from loka_sim.dispatch.baselines import BASELINES
from loka_sim.validation.runnable import Runnable

if TYPE_CHECKING:
    from torch import nn

Convert = Callable[["nn.Module"], "nn.Module"]
STEPS_OF_A_SAMPLE = 3


def as_it_is(model: nn.Module) -> nn.Module:
    """No conversion: bf16."""
    return model


def converted_by_torchao(baseline: str) -> Convert:
    """The conversion that a name of `dispatch.baselines` stands for; needs torchao."""
    from torch import nn
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = next(b for b in BASELINES if b.name == baseline)
    config = Float8LinearConfig.from_recipe_name(str(chosen.scaling))

    def wanted(layer: nn.Module, name: str) -> bool:
        if not isinstance(layer, nn.Linear) or layer.in_features % 16 or layer.out_features % 16:
            return False
        return chosen.wants(layer.out_features, layer.in_features)

    return lambda model: convert_to_float8_training(model, config=config, module_filter_fn=wanted)


def converted_by_table(table: dict[str, Any]) -> Convert:
    """The conversion that a dispatch table asks for.

    Of torch's kernels alone, through what `loka-sim export` writes, which needs torchao; with other libraries' among them, by
    `dispatch.runtime`, which runs them as they are.
    """
    from loka_sim.dispatch import runtime
    from loka_sim.dispatch.export import export

    if runtime.libraries(table) - {"torch"}:
        return lambda model: runtime.convert(model, table)
    module = ModuleType("loka_sim_exported")
    sys.modules[module.__name__] = module  # its dataclasses look their module up
    exec(compile(export(table, "torchao"), "<exported dispatch table>", "exec"), module.__dict__)
    convert: Convert = module.__dict__["convert"]
    return convert


def step_of(model: Runnable, convert: Convert) -> Callable[[], None]:
    """One compiled training step's forward and backward, compiled and ready to run."""
    import torch

    module: nn.Module = convert(model.make())
    compiled = torch.compile(module, dynamic=False)
    inputs = model.inputs()

    def step() -> None:
        model.loss(compiled(*inputs)).backward()
        module.zero_grad(set_to_none=True)

    step()
    step()
    torch.cuda.synchronize()
    return step


def graphed(step: Callable[[], None]) -> Callable[[], None]:
    """A compiled step as one CUDA graph: what its kernels take where no host launches them one by one."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def time_steps(steps: Mapping[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    """Milliseconds of each step, per turn; the variants alternate."""
    import torch

    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            step()
            start.record()
            for _ in range(STEPS_OF_A_SAMPLE):
                step()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) / STEPS_OF_A_SAMPLE)
    return samples


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p10, p50 and p90 of samples in milliseconds."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {"p10_ms": tenths[0], "p50_ms": statistics.median(values), "p90_ms": tenths[8]}

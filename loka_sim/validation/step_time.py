"""A whole model's training step on the GPU: forward and backward, in bf16 and as converted, timed in turn."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
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
    """The conversion that a dispatch table asks for, through what `loka-sim export` writes; needs torchao."""
    from loka_sim.dispatch.export import export

    module = ModuleType("loka_sim_exported")
    sys.modules[module.__name__] = module  # its dataclasses look their module up
    exec(compile(export(table, "torchao"), "<exported dispatch table>", "exec"), module.__dict__)
    convert: Convert = module.__dict__["convert"]
    return convert


def step_of(model: Runnable, convert: Convert) -> Callable[[], None]:
    """One compiled training step's forward and backward, compiled and ready to run."""
    import torch

    torch._dynamo.reset()
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


def time_steps(steps: dict[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
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


def measure_steps(
    model: Runnable, converts: dict[str, Convert], deadline: float, turns: int = 10
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Time a model's step in several variants.

    Args:
        model: What to run.
        converts: Conversion per variant, in the order of their worth: the first are compiled first.
        deadline: `time.monotonic()` after which no further variant is compiled.
        turns: Samples of each variant.

    Returns:
        Per variant p10, p50 and p90 in milliseconds, and a line for each variant that was left out.
    """
    import torch

    torch._dynamo.config.recompile_limit = 512
    steps: dict[str, Callable[[], None]] = {}
    left_out = []
    for name, convert in converts.items():
        if steps and time.monotonic() > deadline:
            left_out.append(f"{name}: out of time before it was compiled")
            continue
        started = time.monotonic()
        try:
            steps[name] = step_of(model, convert)
        except (RuntimeError, ValueError, ImportError, torch.cuda.OutOfMemoryError) as error:
            left_out.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
            continue
        print(f"  step, {name}: compiled in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    samples = time_steps(steps, turns)
    return {name: _quantiles(values) for name, values in samples.items()}, left_out


def _quantiles(values: list[float]) -> dict[str, float]:
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {"p10_ms": tenths[0], "p50_ms": statistics.median(values), "p90_ms": tenths[8]}

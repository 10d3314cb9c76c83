"""Measure what the what-if predicts: a zoo model's training step in bf16, under torchao's conversions and under the decision.

    python benchmarks/step.py wukong-production --batch 2048 --table runs/wukong/dispatch_table.json --module converted.py

Each variant is a fresh model in bf16 (tables cut to 10,000 rows: look-ups cost the same, memory does not), compiled by
torch.compile, forward and backward under a log loss. The variants are timed in turn, so that drift hits all alike; medians
over the turns. `--module` is what `loka-sim export TABLE --to torchao` wrote.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from loka_sim.dispatch.baselines import BASELINES
from loka_sim.zoo import InputShape, build, example_inputs, input_shape

ROWS = 10_000


def cut(shape: InputShape) -> InputShape:
    """The same sample with tables of at most `ROWS` rows."""
    import dataclasses

    small = {"rows": tuple(min(rows, ROWS) for rows in shape.rows)}
    if getattr(shape, "sequence_rows", 0):
        small["sequence_rows"] = min(shape.sequence_rows, ROWS)
    return dataclasses.replace(shape, **small)


def converters(module: Path | None) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Conversion per variant."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def baseline(name: str) -> Callable[[nn.Module], nn.Module]:
        chosen = next(b for b in BASELINES if b.name == name)
        config = Float8LinearConfig.from_recipe_name(str(chosen.scaling))

        def wanted(layer: nn.Module, name: str) -> bool:
            legal = isinstance(layer, nn.Linear) and layer.in_features % 16 == 0 and layer.out_features % 16 == 0
            return legal and chosen.wants(layer.out_features, layer.in_features)

        return lambda model: convert_to_float8_training(model, config=config, module_filter_fn=wanted)

    result: dict[str, Callable[[nn.Module], nn.Module]] = {"bf16": lambda model: model}
    if module:
        spec = importlib.util.spec_from_file_location("converted", module)
        assert spec and spec.loader
        loaded = importlib.util.module_from_spec(spec)
        sys.modules["converted"] = loaded
        spec.loader.exec_module(loaded)
        result["decision"] = loaded.convert
    return {**result, "naive_tensorwise": baseline("naive_tensorwise"), "filter_tensorwise": baseline("filter_tensorwise")}


def step_of(name: str, batch: int, convert: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    """One compiled training step's forward and backward, ready to run."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    shape = cut(input_shape(name))
    model = convert(build(name, device="cuda", shape=shape).bfloat16())
    compiled = torch.compile(model, dynamic=False)
    inputs = tuple(x.bfloat16() if x.is_floating_point() else x for x in example_inputs(name, batch, device="cuda", shape=shape))
    labels = torch.rand(batch, device="cuda").round()

    def step() -> None:
        loss = binary_cross_entropy_with_logits(compiled(*inputs).float().flatten(), labels)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def time_steps(steps: dict[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    """Milliseconds of each step, per turn; the variants alternate."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            step()
            start.record()
            for _ in range(3):
                step()
            stop.record()
            stop.synchronize()
            samples[name].append(start.elapsed_time(stop) / 3)
    return samples


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--module", type=Path, help="what `loka-sim export` wrote")
    parser.add_argument("--variants", nargs="+", help="which to run (default: all)")
    parser.add_argument("--whatif", type=Path, help="whatif.json of the same run, to set the predictions beside")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch._inductor.config.compile_threads = 16
    torch._dynamo.config.recompile_limit = 512
    steps: dict[str, Callable[[], None]] = {}
    for name, convert in converters(options.module).items():
        if options.variants and name not in options.variants:
            continue
        started = time.time()
        step = step_of(options.model, options.batch, convert)
        step()
        step()
        torch.cuda.synchronize()
        steps[name] = step
        print(f"{name}: compiled in {time.time() - started:.0f} s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in time_steps(steps, options.turns).items()}
    predicted: dict[str, float] = {}
    if options.whatif:
        predicted = {row["name"]: row["step_us"] / 1e3 for row in json.loads(options.whatif.read_text())["steps"]}
    print(f"{options.model}, batch {options.batch}, {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'variant':20s} {'measured ms':>12s} {'vs bf16':>8s} {'predicted ms':>13s} {'vs bf16':>8s}")
    for name, value in medians.items():
        line = f"{name:20s} {value:12.2f} {medians['bf16'] / value:7.3f}x"
        if name in predicted:
            line += f" {predicted[name]:13.2f} {predicted['bf16'] / predicted[name]:7.3f}x"
        print(line)
    if options.out:
        options.out.write_text(
            json.dumps({"model": options.model, "batch": options.batch, "measured_ms": medians, "predicted_ms": predicted})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

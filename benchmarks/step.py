"""Measure what the what-if predicts: a model's training step in bf16, under torchao's conversions and under the decision.

    python benchmarks/step.py wukong-production --batch 2048 --module converted.py --whatif runs/wukong/whatif.json

Each variant is a fresh model in bf16 (tables cut to 10,000 rows: look-ups cost the same, memory does not), compiled by
torch.compile, forward and backward under a log loss. The variants are timed in turn, so that drift hits all alike; medians
over the turns. `--module` is what `loka-sim export TABLE --to torchao` wrote. The steps are those of `loka-sim validate`.
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

from loka_sim.validation.runnable import runnable
from loka_sim.validation.step_time import Convert, as_it_is, converted_by_torchao, step_of, time_steps


def converters(module: Path | None) -> dict[str, Callable[[], Convert]]:
    """What makes each variant's conversion."""
    names = ("naive_tensorwise", "filter_tensorwise")
    result: dict[str, Callable[[], Convert]] = {"bf16": lambda: as_it_is}
    if module:
        result["decision"] = lambda: exported(module)
    return {**result, **{name: lambda name=name: converted_by_torchao(name) for name in names}}  # type: ignore[misc]


def exported(module: Path) -> Convert:
    """`convert` of a module that `loka-sim export` wrote."""
    spec = importlib.util.spec_from_file_location("converted", module)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["converted"] = loaded
    spec.loader.exec_module(loaded)
    convert: Convert = loaded.convert
    return convert


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="zoo name, or package.module:callable")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--module", type=Path, help="what `loka-sim export` wrote")
    parser.add_argument("--variants", nargs="+", help="which to run (default: all)")
    parser.add_argument("--whatif", type=Path, help="whatif.json of the same run, to set the predictions beside")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = runnable(options.model, options.batch, ())
    if model is None:
        parser.error(f"{options.model} is no model that can be run")
    torch._dynamo.config.recompile_limit = 512
    steps: dict[str, Callable[[], None]] = {}
    for name, conversion in converters(options.module).items():
        if options.variants and name not in options.variants:
            continue
        started = time.time()
        steps[name] = step_of(model, conversion())
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

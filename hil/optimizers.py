"""Measure torch's optimizers over lists of tensors, launch by launch.

    python -m hil.optimizers --out data/h200 --seconds 80

Lists drawn as the layers of a model are, and lists of tensors all alike; every fused optimizer, and Adagrad, which has none.
Each launch's duration by torch's profiler is the median of several steps, before each of which 512 MB are written, so that
nothing is read from the L2. Rows go to `optimizers.json`; `python -m perfmodel.fit_optimizers` learns from it.
"""

from __future__ import annotations

import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hil.command import Parser
from hil.compiled import by_iteration, kernel_launches
from hil.files import write_atomic
from hil.fingerprint import fingerprint, has_gpu

ITERATIONS, WARM = 7, 2
MOST_ELEMENTS = 2**28
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {"fused": True, "lr": 0.1}),
    "sgd_momentum": (torch.optim.SGD, {"fused": True, "lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"foreach": True}),
}
ALIKE = (
    (1024 * 1024,) * 4, (1024 * 1024,) * 64, (4096 * 4096,) * 16, (256 * 256,) * 100, (1024,) * 200, (16 * 4096 * 4096,),
    (65_536,), (65_536,) * 30, (32_768,) * 30, (8192,) * 30, (655_360,) * 16, (655_360,) * 32, (131_072,) * 36,
)  # fmt: skip


def drawn(count: int, seed: int) -> list[tuple[int, ...]]:
    """Elements of each tensor of so many models' layers: widths of 16 to 8192, with biases or without, 1 to 60 layers."""
    at_random, found = random.Random(seed), list[tuple[int, ...]]()
    while len(found) < count:
        layers, widest = round(60 ** at_random.random()), 6 + 7 * at_random.random()
        widths = [max(16, round(2 ** (widest - 4 * at_random.random()) / 8) * 8) for _ in range(layers + 1)]
        bias = at_random.random() < 0.7
        sizes = [size for n, k in zip(widths[1:], widths, strict=False) for size in ((n * k, n) if bias else (n * k,))]
        if sum(sizes) <= MOST_ELEMENTS:
            found.append(tuple(sizes))
    return found


def _cases(lists: list[tuple[int, ...]]) -> Iterator[tuple[dict[str, Any], torch.optim.Optimizer]]:
    for sizes in lists:
        for dtype in (torch.bfloat16, torch.float32):
            parameters = [torch.randn(size, dtype=dtype, device="cuda", requires_grad=True) for size in sizes]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            for name, (cls, options) in OPTIMIZERS.items():
                facts = {"optimizer": name, "dtype": str(dtype).removeprefix("torch."), "sizes": list(sizes)}
                yield facts, cls(parameters, **options)
            del parameters


def measure(out: Path, seconds: float, count: int, seed: int) -> int:
    """Measure until the time is up; rows go to `optimizers.json`.

    Returns:
        The exit code: 1 where there was not a row, and nothing is written.
    """
    started, rows, left_out = time.monotonic(), list[dict[str, Any]](), list[str]()
    filler = torch.empty(2**28, dtype=torch.bfloat16, device="cuda")
    for facts, optimizer in _cases([*ALIKE, *drawn(count, seed)]):
        said = f"{facts['optimizer']} {facts['dtype']} of {len(facts['sizes'])} tensors"
        if time.monotonic() - started > seconds:
            left_out.append(f"from {said} on: out of time")
            break

        def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
            filler.fill_(1.0)
            optimizer.step()

        try:
            rows.append({**facts, "launch_us": medians(kernel_launches(step, ITERATIONS, WARM))})
        except RuntimeError as error:  # memory, or a launch that the profiler did not see
            left_out.append(f"{said}: {str(error).splitlines()[0][:200]}")
        print(f"\r{time.monotonic() - started:5.0f} s  {len(rows)} steps", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if not rows:
        print("\n".join(["nothing was measured", *left_out]), file=sys.stderr)
        return 1
    document = {
        "schema_version": 1,
        "method": f"torch.profiler's durations, each launch's median of {ITERATIONS} steps, 512 MB written before each",
        "command": shlex.join(["python", "-m", "hil.optimizers", *sys.argv[1:]]),
        "measured": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "machine": fingerprint(), "left_out": left_out,
        "rows": rows,
    }  # fmt: skip
    write_atomic(out / "optimizers.json", lambda beside: beside.write_text(json.dumps(document) + "\n"))
    return 0


def medians(launches: Sequence[tuple[str, float]]) -> list[float]:
    """Microseconds of each launch of a step, the median of `ITERATIONS`, less the first: what is written before it.

    Raises:
        RuntimeError: as `hil.compiled.by_iteration`.
    """
    steps = by_iteration(launches, ITERATIONS)
    return [round(statistics.median(us for _, us in alike), 3) for alike in zip(*(step[1:] for step in steps), strict=True)]


def main() -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.optimizers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of optimizers.json (default: this one)")
    parser.add_argument("--seconds", type=float, default=80, help="begin nothing after so many (default: %(default)s)")
    parser.add_argument("--count", type=int, default=60, help="lists to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    if not has_gpu():
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    return measure(options.out, options.seconds, options.count, options.seed)


if __name__ == "__main__":
    sys.exit(main())

"""How fast a host launches: the step of a small compiled network, which no CUDA graph replays, and what is quicker to time.

    python -m hil.host --out FILE

writes what a host takes for that step as torch runs it, `{"host_step_us": 4321.0}`. The GPU has next to nothing to do in it, so
that its time is the host's: guards, compiled graphs, launches, GEMMs' calls, allocations, nodes of autograd, gradients kept.
Hosts differ in these alike, so that a larger step's time goes with it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hil.command import Parser
from hil.files import write_atomic
from hil.fingerprint import has_gpu

LAYERS, WIDTH, ROWS = 16, 64, 64
"""Of the reference network: each layer a linear layer, a layer norm and a SiLU."""
LEAST_STEPS = 20
QUICK_CALLS = {"python": 200, "allocation": 100, "mm": 50}
Step = Callable[[], object]


def train(network: torch.nn.Module, called: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    """One forward and backward of a network as it is called, its gradients cleared."""
    called(inputs).float().square().mean().backward()
    network.zero_grad(set_to_none=True)


def reference(compiled: bool = True) -> Step:
    """The step of the reference network, ready to run: compiled, or as torch runs it."""
    layers = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.SiLU()) for _ in range(LAYERS)]
    network = torch.nn.Sequential(*(module for layer in layers for module in layer)).to("cuda", torch.bfloat16)
    inputs = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    step = partial(train, network, torch.compile(network, dynamic=False) if compiled else network, inputs)
    step()
    step()
    torch.cuda.synchronize()
    return step


def seconds_of(call: Step, calls: int = 1) -> float:
    """Of one call, on the host alone: the GPU is idle when the first begins."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begun) / calls


def quick() -> dict[str, Step]:
    """Calls that tell at once how fast a host is: of Python's, an allocation on the GPU, a small `mm`."""
    left = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(left)
    return {
        "python": lambda: None,
        "allocation": lambda: torch.empty_strided((16, 16), (16, 1), dtype=torch.bfloat16, device="cuda"),
        "mm": lambda: torch.mm(left, left, out=out),
    }


def middle_us(samples: list[float]) -> float:
    """Median of seconds, in microseconds."""
    return round(1e6 * statistics.median(samples), 4)


def step_us(seconds: float = 0.5) -> float:
    """Microseconds of the host for a step of the reference network, as torch runs it: nothing is compiled.

    Args:
        seconds: How long to repeat it.
    """
    step, samples = reference(compiled=False), list[float]()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(samples) < LEAST_STEPS:
        samples.append(seconds_of(step))
    return middle_us(samples)


def main() -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.host", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write, as JSON")
    options = parser.parse_args()
    if not has_gpu():
        return 3
    text = json.dumps({"host_step_us": step_us()}) + "\n"
    write_atomic(options.out, lambda path: path.write_text(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a GEMM takes in the layout that its pass has in a training step, beside the same product with K fastest in both operands.

    python benchmarks/step_layouts.py --out data/h200/step_layouts.parquet

Kernels are timed, and their times learned, with K fastest. In a step a layer's input gradient reads a weight of which N is the
reduced size, row by row, and its weight gradient reads both operands across: there the features are the leading dimensions, and
where they are no multiples of eight cuBLAS runs other kernels than on the same sizes with K fastest. Sizes are drawn: most with
such features, some without. The kernel that ran is named, too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hil.files import write_atomic
from hil.fingerprint import fingerprint, has_gpu

ROUND = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
UNEVEN = (1, 2, 3, 4, 6, 10, 12, 13, 20, 26, 27, 28, 36, 39, 60, 75, 100, 117, 250, 351, 367, 479, 514, 845, 1002, 1500)
MOST_ELEMENTS = 2**27
PASSES = ("output", "grad_input", "grad_weight")
Product = tuple[str, int, int, int, int]
"""Pass, m, n, k and groups."""


def drawn(count: int, seed: int) -> list[Product]:
    """Products to time: eight in ten with a feature that is no multiple of eight, one in six batched."""
    rng = np.random.default_rng(seed)

    def feature(uneven: float) -> int:
        return int(rng.choice(UNEVEN if rng.random() < uneven else ROUND))

    found: dict[Product, None] = {}
    while len(found) < count:
        batched = rng.random() < 1 / 6
        first, second = (feature(0.55) for _ in range(2))
        rows = int(rng.choice((16, 24, 32, 39, 48, 64, 128))) if batched else int(2 ** rng.integers(8, 17))
        groups = int(2 ** rng.integers(8, 13)) if batched else 1
        name = str(rng.choice(PASSES, p=(0.1, 0.35, 0.55)))
        if max(first, second) > 512 and batched:
            continue
        sizes = {"output": (rows, first, second), "grad_input": (rows, second, first), "grad_weight": (first, second, rows)}
        m, n, k = sizes[name]
        if groups * max(m * k, n * k, m * n) <= MOST_ELEMENTS:
            found[name, m, n, k, groups] = None
    return list(found)


def binder(name: str, m: int, n: int, k: int, groups: int, pool: Any) -> Callable[[int], Any]:
    """A launcher of the product of (m, k) and (k, n), operands lying as in the pass of this name; with `output`, K fastest."""
    import torch

    lead = () if groups == 1 else (groups,)
    left, right = {
        "output": ((m, k), (n, k)),
        "grad_input": ((m, k), (k, n)),
        "grad_weight": ((k, m), (k, n)),
    }[name]

    def launch(index: int) -> Any:
        a, b = pool.view((*lead, *left), index, 0), pool.view((*lead, *right), index, 1)
        return torch.matmul(a.mT if name == "grad_weight" else a, b.mT if name == "output" else b)

    return launch


def called(launchers: Sequence[Callable[[int], Any]]) -> list[str]:
    """Names of the kernels that each launcher runs, one behind another."""
    import torch

    from hil.compiled import kernel_launches

    def run() -> None:
        for launch in launchers:
            launch(0)
            torch.cuda._sleep(100)

    found: list[list[str]] = [[]]
    for name, _ in kernel_launches(run, iterations=1, warm=1):
        if "spin_kernel" in name:
            found.append([])
        else:
            found[-1].append(re.sub(r"^void |\(.*$", "", name)[:160])
    if len(found) != len(launchers) + 1:
        print(f"{len(found) - 1} of {len(launchers)} calls were seen: their kernels are not named", file=sys.stderr)
        return [""] * len(launchers)
    return ["; ".join(names) for names in found[:-1]]


def measured(shapes: Sequence[Product], deadline: float) -> list[dict[str, Any]]:
    """Rows of shapes, until the deadline of `time.time()`: microseconds of both ways, and the kernels of a call."""
    from hil.timing import BufferPool, capture, launches_for, time_interleaved

    pool = BufferPool(elements=2**28)
    rows: list[dict[str, Any]] = []
    launchers: list[Callable[[int], Any]] = []
    for shape in shapes:
        if time.time() > deadline:
            break
        _, m, n, k, groups = shape
        both = [binder(*shape, pool), binder("output", m, n, k, groups, pool)]
        number = launches_for(2 * groups * (m * k + n * k + m * n))
        captured = [capture(launch, number) for launch in both]
        own, plain = (timing.quantile(0.5) for timing in time_interleaved([(graph, number) for graph, _ in captured], 6.0))
        del captured
        rows.append({**dict(zip(("pass", "m", "n", "k", "groups"), shape, strict=True)), "us": own, "k_fastest_us": plain})
        launchers += both
    names = called(launchers)
    for row, own_kernels, kernels in zip(rows, names[::2], names[1::2], strict=True):
        row |= {"kernels": own_kernels, "k_fastest_kernels": kernels}
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="parquet file of the table")
    parser.add_argument("--count", type=int, default=400, help="products to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0, help="stop in time and keep what is measured")
    options = parser.parse_args()

    if not has_gpu():
        return 3
    rows = measured(drawn(options.count, options.seed), time.time() + options.seconds)
    if not rows:
        print("nothing was measured; give more --seconds", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "schema_version": 1,
        "command": f"python benchmarks/step_layouts.py --count {options.count} --seed {options.seed} --out {options.out.name}",
        "method": "medians of CUDA-graph replays over rotating buffers, both ways in turn; see hil/timing.py",
        "rows": len(rows),
        "machine": fingerprint(),
    }
    write_atomic(options.out.with_suffix(".json"), lambda beside: beside.write_text(json.dumps(about, indent=1) + "\n"))
    write_atomic(options.out, lambda beside: pd.DataFrame(rows).to_parquet(beside, index=False))
    print(f"{options.out}: {len(rows)} products")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which products torch.compile pads, by its own timing on a GPU, and what `loka_sim.capture.padding` says of them.

python benchmarks/padding.py collect --out data/h200/padding.json     # on a GPU: draws products and asks torch
python benchmarks/padding.py fit                                      # the constants, by all of them
python benchmarks/padding.py                                          # how often both agree, whole products held out
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from loka_sim.capture.padding import FASTER, H200, Costs, Operand, timed
from loka_sim.files import write_text_atomic

DATA = Path(__file__).parents[1] / "data" / "h200" / "padding.json"
MOST_FLOP, MOST_ELEMENTS, AT_ONCE = 4e11, 1e8, 12


def _size(rng: np.random.Generator, uneven: bool, low: float, high: float) -> int:
    """A dimension; an uneven one lies by 1, 2 or 4 elements."""
    size = int(2 ** rng.uniform(np.log2(low), np.log2(high)))
    lie = int(rng.choice([1, 2, 4], p=[0.5, 0.25, 0.25])) if uneven else 8
    return max(size // (2 * lie) * 2 * lie + lie if uneven else size // 8 * 8, lie)


class Product(NamedTuple):
    """A linear layer, or a product of two stacks; whether the program makes its operands itself."""

    shapes: list[tuple[int, ...]]
    left_inside: bool
    right_inside: bool


def drawn(count: int, seed: int) -> Iterator[Product]:
    """Products as models have them."""
    rng = np.random.default_rng(seed)
    while count:
        uneven = int(rng.integers(1, 4))
        if rng.random() < 0.7:
            m, groups = int(2 ** rng.integers(9, 15)) * (int(rng.integers(8, 65)) if rng.random() < 0.4 else 1), 1
            n, k = (_size(rng, bool(uneven & bit), 8, 4096 if m < 2**15 else 1024) for bit in (1, 2))
            shapes: list[tuple[int, ...]] = [(m, k), (n, k), (n,)][: int(rng.integers(2, 4))]
        else:
            groups = int(2 ** rng.integers(8, 16))
            m, n, k = (_size(rng, bool(rng.random() < 0.6), 8, 256) for _ in range(3))
            shapes = [(groups, m, k), (groups, k, n)]
        inside = bool(rng.random() < 0.8), bool(rng.random() < 0.5) and groups > 1
        if 2 * groups * m * n * k < MOST_FLOP and groups * (m * k + k * n + m * n) < MOST_ELEMENTS:
            count -= 1
            yield Product(shapes, *inside)


class _Decided(Exception):
    """All that a program multiplies was decided on: there is nothing to compile."""


def collect(count: int, seed: int, seconds: float) -> list[dict[str, Any]]:
    """Torch's decisions on drawn products and their gradients, in programs that are compiled for training, and both times in us.

    It times them while it compiles, one operator after the other: what the host takes to launch each counts.
    """
    import torch
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes import pad_mm

    rows: list[dict[str, Any]] = []
    timed: list[tuple[float, float]] = []
    faster, should_pad = pad_mm.is_padded_faster, pad_mm.should_pad

    def judged(key: str, as_it_is: float, padded: float) -> bool:
        timed.append((as_it_is, padded))
        return bool(faster(key, as_it_is, padded))

    def asked(match: Any, left: torch.Tensor, right: torch.Tensor, op: Any, input: Any = None) -> bool:
        timed.clear()
        decided = bool(should_pad(match, left, right, op, input))
        if timed:
            written = [pad_mm.should_exclude_padding_time(match, name) for name in ("mat1", "mat2")]
            rows.append(
                {
                    "left": list(left.shape), "right": list(right.shape), "turned": [t.stride(-1) != 1 for t in (left, right)],
                    "written_padded": written, "bias": input is not None, "padded": decided,
                    "us": [1e3 * each for each in timed[0]],
                }
            )  # fmt: skip
        return decided

    def stop(*_: Any, **__: Any) -> Any:
        raise _Decided

    until, products = time.monotonic() + seconds, drawn(count, seed)
    with (
        patch.object(pad_mm, "is_padded_faster", judged),
        patch.object(pad_mm, "should_pad", asked),
        patch.object(compile_fx, "fx_codegen_and_compile", stop),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        while (some := list(islice(products, AT_ONCE))) and time.monotonic() < until:
            tensors = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in each.shapes] for each in some]
            for each in chain(*tensors):
                each.requires_grad_()
            torch._dynamo.reset()
            try:
                torch.compile(_program)(some, tensors)
            except Exception as error:  # torch.compile raises its own, which names the one below
                if _Decided.__name__ not in str(error):
                    raise
            print(f"\r{len(rows)} decisions", end="", file=sys.stderr)
    return rows


def _program(some: list[Product], tensors: list[list[Any]]) -> Any:
    import torch

    total = 0.0
    for product, (left, right, *bias) in zip(some, tensors, strict=True):
        left = left.relu() if product.left_inside else left
        right = right.relu() if product.right_inside else right
        made = torch.nn.functional.linear(left, right, *bias) if left.dim() == 2 else torch.bmm(left, right)
        total = total + made.float().square().sum()
    return total


def fitted(rows: list[dict[str, Any]]) -> Costs:
    """The costs whose times are nearest to torch's own, by their logarithms."""
    from scipy.optimize import least_squares

    products = [_operands(row) for row in rows]
    found = np.log([row["us"] for row in rows])

    def off(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return (np.log([timed(*each, Costs(*costs)) for each in products]) - found).ravel()

    return Costs(*least_squares(off, H200, loss="soft_l1", f_scale=0.2, bounds=(1e-3, np.inf), x_scale=np.array(H200)).x)


def _operands(row: dict[str, Any]) -> tuple[Operand, Operand, bool]:
    sides = zip((row["left"], row["right"]), row["turned"], row["written_padded"], strict=True)
    left, right = (Operand(*s[-2:], s[0] if len(s) == 3 else 1, turned, written) for s, turned, written in sides)
    return left, right, row["bias"]


def judge(rows: list[dict[str, Any]], folds: int = 5) -> str:
    """How often padding is told as torch decided, products of the same three sizes held out together."""
    sizes = [tuple(sorted((*row["left"][-2:], row["right"][-1]))) for row in rows]
    distinct = sorted(set(sizes))
    places = dict(zip(distinct, np.random.default_rng(0).integers(0, folds, len(distinct)), strict=True))
    fold = np.array([places[size] for size in sizes])
    told, off = np.zeros(len(rows), dtype=bool), np.zeros((len(rows), 2))
    for held in range(folds):
        costs = fitted([row for row, of in zip(rows, fold, strict=True) if of != held])
        for i in np.flatnonzero(fold == held):
            times = timed(*_operands(rows[i]), costs)
            told[i], off[i] = times[0] > FASTER * times[1], np.abs(np.log(np.array(times) / rows[i]["us"]))
    decided = np.array([row["padded"] for row in rows])
    wrong = [abs(np.log(row["us"][0] / row["us"][1] / FASTER)) for row, bad in zip(rows, told != decided, strict=True) if bad]
    return (
        f"{len(rows)} products, {decided.sum()} padded by torch, {told.sum()} as told, {(told & decided).sum()} by both: "
        f"{np.mean(told == decided):.1%} agree; where not, torch found them {np.exp(np.median(wrong)):.2f}x from even (median); "
        f"times {np.exp(off[:, 0].mean()) - 1:.0%} and {np.exp(off[:, 1].mean()) - 1:.0%} off"
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", default="judge", choices=["collect", "fit", "judge"])
    parser.add_argument("--count", type=int, default=900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args()
    if options.what == "collect":
        from hil.fingerprint import fingerprint

        rows = collect(options.count, options.seed, options.seconds)
        command = shlex.join(["python", "benchmarks/padding.py", *sys.argv[1:]])
        document = {"schema_version": 1, "command": command, "machine": fingerprint(), "rows": rows}
        write_text_atomic(options.out, json.dumps(document))
        print(f"{len(rows)} decisions, {sum(row['padded'] for row in rows)} padded")
        return 0
    rows = json.loads(options.out.read_text())["rows"]
    if options.what == "fit":
        print("Costs(" + ", ".join(f"{cost:.3g}" for cost in fitted(rows)) + ")")
    else:
        print(judge(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

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
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

DATA = Path(__file__).parents[1] / "data" / "h200" / "padding.json"
MOST_FLOP, MOST_ELEMENTS = 4e11, 4e8


def _size(rng: np.random.Generator, uneven: bool, low: float, high: float) -> int:
    """A dimension; an uneven one lies by 1, 2 or 4 elements."""
    size = int(2 ** rng.uniform(np.log2(low), np.log2(high)))
    lie = int(rng.choice([1, 2, 4], p=[0.5, 0.25, 0.25])) if uneven else 8
    return max(size // (2 * lie) * 2 * lie + lie if uneven else size // 8 * 8, lie)


def drawn(count: int, seed: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], bool, bool]]:
    """Products as models have them, each of its operands turned or not: operator, both shapes, whether each is turned."""
    rng = np.random.default_rng(seed)
    while count:
        uneven = int(rng.integers(1, 4))
        if rng.random() < 0.7:
            samples = int(2 ** rng.integers(9, 15)) * (int(rng.integers(8, 65)) if rng.random() < 0.4 else 1)
            n, k = (_size(rng, bool(uneven & bit), 8, 4096 if samples < 2**15 else 1024) for bit in (1, 2))
            which = rng.choice(["addmm", "mm", "grad_input", "grad_weight"])
            left, right, turned = {
                "addmm": ((samples, k), (k, n), (False, True)),
                "mm": ((samples, k), (k, n), (False, True)),
                "grad_input": ((samples, n), (n, k), (False, False)),
                "grad_weight": ((n, samples), (samples, k), (True, False)),
            }[which]
            operator = "addmm" if which == "addmm" else "mm"
        else:
            groups = int(2 ** rng.integers(8, 16))
            m, n, k = (_size(rng, bool(rng.random() < 0.6), 8, 256) for _ in range(3))
            operator, left, right = "bmm", (groups, m, k), (groups, k, n)
            turned = bool(rng.random() < 0.4), bool(rng.random() < 0.4)
        (m, k), n, groups = left[-2:], right[-1], left[0] if operator == "bmm" else 1
        if all(size % 8 == 0 or size == 1 for size in (m, n, k)) or 2 * groups * m * n * k > MOST_FLOP:
            continue
        if groups * (m * k + k * n + m * n) > MOST_ELEMENTS:
            continue
        count -= 1
        yield operator, left, right, *turned


def collect(count: int, seed: int, seconds: float) -> list[dict[str, Any]]:
    """Torch's decision on each, with what makes its operands compiled or not, and both times in us."""
    import torch
    from torch._inductor.fx_passes import pad_mm
    from torch._subclasses.fake_tensor import FakeTensorMode

    timed: list[tuple[float, float]] = []
    judged = pad_mm.is_padded_faster

    def faster(key: str, as_it_is: float, padded: float) -> bool:
        timed.append((as_it_is, padded))
        return judged(key, as_it_is, padded)

    fake, graph = FakeTensorMode(), torch.fx.Graph()
    given = [graph.placeholder(name) for name in ("left", "right", "bias")]
    made = [graph.call_function(torch.ops.aten.relu.default, (node,)) for node in given]

    def tensor(shape: tuple[int, ...], turned: bool = False) -> Any:
        order = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        with fake:
            found = torch.empty(order, dtype=torch.bfloat16, device="cuda")
            return found.transpose(-1, -2) if turned else found

    rows, until = [], time.monotonic() + seconds
    with patch.object(pad_mm, "is_padded_faster", faster):
        for operator, left, right, left_turned, right_turned in drawn(count, seed):
            for inside in ((True, True), (False, False), (True, False), (False, True)):
                # Only what lies in order can be written padded.
                if (inside[0] and left_turned) or (inside[1] and right_turned):
                    continue
                nodes = {name: (made if inside[i] else given)[i] for i, name in enumerate(("left", "right"))}
                nodes["left"].meta["val"], nodes["right"].meta["val"] = tensor(left, left_turned), tensor(right, right_turned)
                kwargs = {"mat1": nodes["left"], "mat2": nodes["right"]}
                if operator == "addmm":
                    given[2].meta["val"] = tensor(right[-1:])
                    kwargs["input"] = given[2]
                timed.clear()
                decided = getattr(pad_mm, f"should_pad_{operator}")(types.SimpleNamespace(kwargs=kwargs))
                if timed:
                    rows.append(
                        {
                            "operator": operator, "left": left, "right": right, "turned": [left_turned, right_turned],
                            "written_padded": inside, "padded": decided, "us": [1e3 * each for each in timed[0]],
                        }
                    )  # fmt: skip
            if time.monotonic() > until:
                break
            print(f"\r{len(rows)} products", end="", file=sys.stderr)
    return rows


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
        options.out.write_text(json.dumps(document))
        print(f"{len(rows)} decisions, {sum(row['padded'] for row in rows)} padded")
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

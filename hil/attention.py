"""Calls of `scaled_dot_product_attention`, forward and backward, for `hil.fused` to measure, and their times as a table.

    python -m hil.fused attention --out runs/attention
    python -m hil.attention runs/attention/fused.json --out data/h200/attention.parquet
    python -m hil.fused attention --families '*:padded' --out runs/padded
    python -m hil.attention runs/padded/fused.json --out data/h200/attention.parquet --add

torch runs each call as kernels of its own. Sizes are drawn: sequences of recommenders, whole and causal, of few tokens and many.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import torch
import torch.nn.functional as F

from hil.command import Parser
from hil.files import write_atomic
from perfmodel.attention import BACKWARD, FORWARD, KINDS, PADDED, label_of, sizes_of

LEAST, MOST = 2.0**19, 2.0**25.3  # elements of a result
DIMS = (16, 32, 48, 64, 96, 128)
PADDED_DIMS = (8, 16, 16, 24, 32, 40, 56, 64, 104)
"""Of heads with zeros among them: what they are padded to."""
METHOD = "kernel durations by torch.profiler, the sum of a call's kernels, 512 MB written before each; see hil/fused.py"


def drawn(number: int, seed: int = 1, dims: Sequence[int] = DIMS) -> tuple[tuple[int, int, int, int, bool], ...]:
    """Samples, heads, tokens, features of a head, and whether a token sees only those before it."""
    source, found = random.Random(f"attention {seed}"), set[tuple[int, int, int, int, bool]]()
    while len(found) < number:
        tokens = round(2 ** source.uniform(3.5, 10.3))
        if source.random() < 0.6:
            tokens = max(8, tokens // 8 * 8)
        heads, dim, samples = source.choice((1, 2, 4, 8)), source.choice(dims), 8 * round(2 ** source.uniform(1, 9))
        if LEAST <= samples * heads * tokens * dim <= MOST:
            found.add((samples, heads, tokens, dim, source.random() < 0.5))
    return tuple(sorted(found))


def attention_cases(number: int = 110, seed: int = 1) -> Iterator[tuple[str, int, int, int, int, Callable[[], object]]]:
    """As `hil.fused` takes what torch itself runs: family, kept and reduced, bytes read and written, what runs it.

    Kept are the queries, reduced is what each is multiplied with: features of all keys that it sees. The family says the sizes.
    """
    for samples, heads, tokens, dim, causal in drawn(number, seed):
        q, k, v = (
            torch.randn(samples, tokens, heads, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        queries, size = samples * heads * tokens, 2 * samples * heads * tokens * dim
        reduced = (tokens + 1) // 2 * dim if causal else tokens * dim
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
        out = forward()
        sums, sizes = 4 * queries, label_of(tokens, tokens, dim, causal).removeprefix(FORWARD)
        yield FORWARD + sizes, queries, reduced, 3 * size, size + sums, forward
        gradients = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
        yield BACKWARD + sizes, queries, reduced, 5 * size + sums, 3 * size, gradients


def padded_cases(number: int = 60, seed: int = 1) -> Iterator[tuple[str, int, int, int, int, Callable[[], object]]]:
    """As `attention_cases`, of heads that 8 does not divide: what torch runs once they are padded."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    for samples, heads, tokens, dim, causal in drawn(number, seed, PADDED_DIMS):
        q, k, v, gradient = (torch.randn(samples, heads, tokens, dim, dtype=torch.bfloat16, device="cuda") for _ in range(4))
        queries, size = samples * heads * tokens, 2 * samples * heads * tokens * dim
        reduced, sums = (tokens + 1) // 2 * dim if causal else tokens * dim, 4 * queries
        sizes = label_of(tokens, tokens, dim, causal, padded=True).removeprefix(FORWARD)
        forward = partial(flash, q, k, v, 0.0, causal, False)
        out, logsumexp, *rest = forward()
        yield FORWARD + sizes, queries, reduced, 3 * size, size + sums, forward
        backward = partial(
            torch.ops.aten._scaled_dot_product_flash_attention_backward,
            gradient, q, k, v, out, logsumexp, *rest[:4], 0.0, causal, *rest[4:6],
        )  # fmt: skip
        yield BACKWARD + sizes, queries, reduced, 5 * size + sums, 3 * size, backward


def tabulated(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Timed calls, a row each: kind, groups (samples times heads), queries, keys, features, causal, padded, `p50_us`."""
    found = []
    for row in rows:
        kind, _, sizes = row["family"].partition(":")
        if kind in KINDS and not row["problem"]:
            queries, keys, features, causal = sizes_of(f"{FORWARD}:{sizes}")
            of = {"groups": row["sizes"]["x"] // queries, "queries": queries, "keys": keys, "features": features}
            found.append({"kind": kind, **of, "causal": causal, "padded": sizes.endswith(PADDED), "p50_us": row["time_us"]})
    return pandas.DataFrame(found)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.attention", description="Timed calls of attention as a table.")
    parser.add_argument("file", type=Path, help="what `python -m hil.fused attention` wrote")
    parser.add_argument("--out", type=Path, required=True, help="parquet file of the table; its sidecar names the run")
    parser.add_argument("--add", action="store_true", help="keep the calls that --out has; its sidecar names the new run, too")
    options = parser.parse_args(arguments)
    run, sidecar = json.loads(options.file.read_text()), options.out.with_suffix(".json")
    table = tabulated(run["rows"])
    about: dict[str, Any] = {"schema_version": 1, "method": METHOD, "runs": []}
    if options.add:
        table = pandas.concat([pandas.read_parquet(options.out), table], ignore_index=True)
        about = json.loads(sidecar.read_text())
    about["runs"] += [{name: run[name] for name in ("command", "measured", "machine")}]
    write_atomic(sidecar, lambda beside: beside.write_text(json.dumps(about, indent=1) + "\n"))
    write_atomic(options.out, lambda beside: table.to_parquet(beside, index=False))
    print(f"{options.out}: {len(table)} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Calls of `scaled_dot_product_attention`, forward and backward, for `hil.fused` to measure: torch runs each as kernels of its own.

Sizes are drawn: sequences of recommenders, whole ones and causal ones, of few tokens and of many.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

LEAST, MOST = 2.0**19, 2.0**25.3  # elements of a result
DIMS = (16, 32, 48, 64, 96, 128)
ATTENTION, BACKWARD = "attention", "attention_backward"


def drawn(number: int, seed: int = 1) -> tuple[tuple[int, int, int, int, bool], ...]:
    """Samples, heads, tokens, features of a head, and whether a token sees only those before it."""
    source, found = random.Random(f"attention {seed}"), set[tuple[int, int, int, int, bool]]()
    while len(found) < number:
        tokens = round(2 ** source.uniform(3.5, 10.3))
        if source.random() < 0.6:
            tokens = max(8, tokens // 8 * 8)
        heads, dim, samples = source.choice((1, 2, 4, 8)), source.choice(DIMS), 8 * round(2 ** source.uniform(1, 9))
        if LEAST <= samples * heads * tokens * dim <= MOST:
            found.add((samples, heads, tokens, dim, source.random() < 0.5))
    return tuple(sorted(found))


def attention_cases(number: int = 110, seed: int = 1) -> Iterator[tuple[str, int, int, int, int, Callable[[], object]]]:
    """As `hil.fused` takes what torch itself runs: family, kept and reduced, bytes read and written, what runs it.

    Kept are the queries, reduced is what each is multiplied with: features of all keys that it sees.
    """
    for samples, heads, tokens, dim, causal in drawn(number, seed):
        q, k, v = (
            torch.randn(samples, tokens, heads, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        queries, size = samples * heads * tokens, 2 * samples * heads * tokens * dim
        reduced = seen(tokens, tokens, causal) * dim
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
        out = forward()
        sums = 4 * queries
        yield ATTENTION, queries, reduced, 3 * size, size + sums, forward
        gradients = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
        yield BACKWARD, queries, reduced, 5 * size + sums, 3 * size, gradients


def seen(queries: int, keys: int, causal: bool) -> int:
    """Keys that a query sees, in the middle."""
    return (keys + 1) // 2 if causal and queries == keys else keys

"""Computations that torch.compile makes memory-bound kernels of, family by family, for `hil.fused` to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MATRICES = (
    (2048, 1), (2048, 128), (2048, 512), (2048, 1024), (2048, 3456), (2048, 8192), (2048, 32768), (8192, 1024),
    (16384, 256), (65536, 128), (131072, 256), (524288, 128), (524288, 256), (4096, 100), (30000, 367),
)  # fmt: skip
CUBES = (
    (2048, 256, 128), (2048, 64, 128), (2048, 40, 256), (512, 128, 64), (4096, 32, 64), (1024, 200, 128),
    (2048, 100, 64), (2048, 16, 512), (8192, 27, 128), (64, 512, 512),
)  # fmt: skip
# A reduction of these, both ways, is one kernel; none is a zoo model's.
LARGE_CUBES = (
    (2048, 128, 96), (1024, 512, 128), (4096, 64, 192), (1536, 320, 64), (3072, 96, 160), (1024, 300, 256), (6144, 48, 128),
    (512, 768, 96),
)  # fmt: skip
SMALL = ((512, 16), (512, 64), (1024, 24), (1024, 128), (3000, 16), (3000, 48), (4096, 40), (6000, 16), (12000, 32))
"""Matrices of less than a megabyte."""
CALLED = "called"
"""Stands for the name of a kernel that torch itself runs."""
Computation = Callable[..., Any]
Case = tuple[Computation, tuple[Any, ...]]


def sums_both_ways(rows: int, columns: int) -> bool:
    """Whether torch.compile sums over rows and columns in one kernel."""
    return rows * columns >= 5 * 2**20 and rows >= max(4096, 2 * columns)


def _random(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*size, dtype=dtype, device="cuda")


def power_law(count: int, rows: int, exponent: float = 1.05) -> Tensor:
    """Ids whose frequency falls with rank as rank ** -exponent, ranks scattered over the rows."""
    share = torch.rand(count, device="cuda", dtype=torch.float64)
    # Inverse of the continuous distribution on [1, rows + 1).
    power = 1.0 - exponent
    ranks = ((1 + share * ((rows + 1.0) ** power - 1)) ** (1 / power)).long().clamp(1, rows) - 1
    return (ranks * 2_654_435_761) % rows


def uniform(count: int, rows: int) -> Tensor:
    """Ids that fall on all rows alike."""
    return torch.randint(rows, (count,), device="cuda")


def _sum(*terms: Tensor) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return F.relu(total)


def _silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x.float())
    return (gradient.float() * sigmoid * (1 + x.float() * (1 - sigmoid))).to(x.dtype)


def _cross_backward(gradient: Tensor, x0: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return gradient * u, gradient * x0


def _mask_and_sum(gradient: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    masked = torch.where(y > 0, gradient, 0)
    return masked, masked.sum(dim=0)


def _norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, F.layer_norm(total, (x.shape[1],), weight, bias)


def _norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[1],), weight, bias)

    return torch.func.vjp(norm, x, weight, bias)[1](gradient)


def _softmax(scores: Tensor, padding: Tensor) -> Tensor:
    return scores.masked_fill(padding, -1e9).softmax(dim=-1)


def _softmax_backward(gradient: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data(gradient, y, -1, y.dtype)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.float(), labels)


def _concatenated(*parts: Tensor) -> Tensor:
    return torch.cat(parts, dim=1)


def _looked_up(ids: Tensor, *tables: Tensor) -> Tensor:
    return torch.stack([F.embedding(ids[:, field], table) for field, table in enumerate(tables)], dim=1)


def _split(x: Tensor, *widths: int) -> list[Tensor]:
    return [part.contiguous() for part in x.split(widths, dim=1)]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def _picked(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(1, index)


def _picked_backward(gradient: Tensor, index: Tensor, columns: int) -> Tensor:
    return torch.zeros(gradient.shape[0], columns, dtype=gradient.dtype, device="cuda").index_add(1, index, gradient)


def _table_gradient(gradient: Tensor, ids: Tensor, rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(gradient, ids, rows, -1, False)


def _strided_table_gradient(gradients: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Of one field among many, whose gradients lie field by field beside one another."""
    return _table_gradient(gradients[:, :, gradients.shape[2] // 2], ids, rows)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


def _turned_sum(x: Tensor, u: Tensor) -> Tensor:
    return F.relu(x + u.transpose(1, 2))


def _turned_norm(x: Tensor, u: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + u.transpose(1, 2)
    return total, F.layer_norm(total, (x.shape[2],), weight, bias)


def _norm_turned(x: Tensor, u: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = x + u.transpose(1, 2)
    result = F.layer_norm(total, (x.shape[2],), weight, bias)
    return total, result, result.transpose(1, 2).contiguous()


def _turned_norm_backward(
    gradient: Tensor, turned: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    total = gradient + turned.transpose(1, 2)
    return torch.ops.aten.native_layer_norm_backward(total, x, [x.shape[2]], mean, rstd, weight, bias, [True, True, True])


def _turned_sums_norm_backward(
    g1: Tensor, g2: Tensor, t1: Tensor, t2: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    total = g1 + g2 + t1.transpose(1, 2) + t2.transpose(1, 2)
    return torch.ops.aten.native_layer_norm_backward(total, x, [x.shape[2]], mean, rstd, weight, bias, [True, True, True])


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2).contiguous()


def _cast(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16 if x.dtype is torch.float32 else torch.float32)


def families() -> Iterator[tuple[str, list[Case]]]:
    """Every family's computations; operands are made when it is their turn."""
    for terms in (1, 2, 3, 5):
        yield f"sum{terms}", [(_sum, tuple(_random(m, n) for _ in range(terms))) for m, n in MATRICES]
    yield "silu_backward", [(_silu_backward, (_random(m, n), _random(m, n))) for m, n in MATRICES]
    yield "cross_backward", [(_cross_backward, tuple(_random(m, n) for _ in range(3))) for m, n in MATRICES[1:]]
    yield "mask_and_sum", [(_mask_and_sum, (_random(m, n), _random(m, n))) for m, n in MATRICES[1:]]
    rows = [(m, n) for m, n in MATRICES if n > 1]
    yield "norm", [(_norm, (_random(m, n), _random(m, n), _random(n), _random(n))) for m, n in rows]
    yield "norm_backward", [(_norm_backward, (_random(m, n), _random(m, n), _random(n), _random(n))) for m, n in rows]
    scores = ((8192, 4, 24, 256), (2048, 4, 64, 64), (2048, 4, 256, 256), (512, 2, 48, 48), (2048, 8, 128, 300))
    pads = [torch.rand(b, 1, 1, n, device="cuda") < 0.1 for b, _, _, n in scores]
    yield "softmax", [(_softmax, (_random(*s), pad)) for s, pad in zip(scores, pads, strict=True)]
    yield "softmax_backward", [(_softmax_backward, (_random(*s), _random(*s))) for s in scores]
    yield "loss", [(_loss, (_random(b), torch.rand(b, device="cuda"))) for b in (512, 2048, 16384, 131072)]
    pieces = ((2048, (128, 352)), (2048, (8192, 24576)), (2048, (3456, 128, 1024)), (8192, (64,) * 6), (2048, (64,) * 12),
              (16384, (100, 28)), (2048, (10000, 20000)))  # fmt: skip
    yield "cat", [(_concatenated, tuple(_random(m, n) for n in widths)) for m, widths in pieces]
    yield "split", [(_split, (_random(m, sum(widths)), *widths)) for m, widths in pieces]
    for fields, dim in ((26, 128), (26, 64), (8, 512), (26, 1152)):
        made: list[Case] = []
        for batch in (2048, 8192):
            tables = tuple(_random(10_000, dim) for _ in range(fields))
            ids = torch.stack([uniform(batch, 10_000) for _ in range(fields)], dim=1)
            made.append((_looked_up, (ids, *tables)))
        yield f"lookup{fields}x{dim}", made
    stacks = ((2048, 256, 128), (2048, 40, 256), (8192, 27, 128), (512, 16, 16), (2048, 32, 64), (2048, 128, 512))
    yield "transpose", [(_transposed, (_random(*s),)) for s in stacks]
    pairs = [(b, t, torch.randperm(t * t, device="cuda")[: t * (t - 1) // 2]) for b, t in ((2048, 27), (8192, 27), (2048, 64))]
    yield "pick", [(_picked, (_random(b, t * t), index)) for b, t, index in pairs]
    yield "pick_backward", [(_picked_backward, (_random(b, len(index)), index, t * t)) for b, t, index in pairs]
    gradients = ((2048, 10_000, 128), (2048, 10_000, 1152), (2048, 100_000, 256), (2048 * 64, 10_000, 256), (2048, 100, 128))
    for name, ids_of in (("uniform", uniform), ("power_law", power_law)):
        yield f"table_gradient_{name}", [(_table_gradient, (_random(c, d), ids_of(c, r), r)) for c, r, d in gradients]
    strided = (
        (2048, 27, 128),
        (8192, 27, 128),
        (2048, 26, 512),
        (4096, 14, 64),
        (16384, 27, 32),
        (2048, 64, 256),
        (32768, 27, 64),
    )
    yield (
        "table_gradient_strided",
        [(_strided_table_gradient, (_random(b, d, f), uniform(b, 10_000), 10_000)) for b, f, d in strided],
    )
    turns = ((2048, 4, 256, 64), (2048, 2, 44, 16), (512, 8, 128, 128))
    yield "rotate", [(_rotated, (_random(*s), _random(s[2], s[3] // 2), _random(s[2], s[3] // 2))) for s in turns]

    def cube(b: int, t: int, d: int) -> tuple[Tensor, Tensor]:
        return _random(b, t, d), _random(b, d, t)

    def statistics_of(b: int, t: int, d: int) -> tuple[Tensor, ...]:
        return (*(torch.rand(b, t, 1, device="cuda") for _ in range(2)), _random(d), _random(d))

    yield "turned_sum", [(_turned_sum, cube(*c)) for c in CUBES]
    yield "turned_norm", [(_turned_norm, (*cube(*c), _random(c[2]), _random(c[2]))) for c in CUBES]
    yield "norm_turned", [(_norm_turned, (*cube(*c), _random(c[2]), _random(c[2]))) for c in CUBES]
    yield "turned_norm_backward", [(_turned_norm_backward, (*cube(*c), _random(*c), *statistics_of(*c))) for c in CUBES]
    yield "turned_sums_norm_backward", [
        (_turned_sums_norm_backward, tuple(part for pair in zip(cube(*c), cube(*c), strict=True) for part in pair)
         + (_random(*c), *statistics_of(*c)))
        for c in CUBES
    ]  # fmt: skip
    yield "heads", [(_heads, (_random(b, t, d), h)) for b, t, d, h in ((2048, 256, 256, 4), (2048, 24, 256, 4), (512, 44, 16, 2))]
    more = (
        (4096, 8, 32, 128),
        (1024, 4, 100, 100),
        (2048, 4, 8, 256),
        (2048, 2, 60, 60),
        (512, 16, 128, 512),
        (4096, 4, 32, 200),
    )
    plain = [torch.zeros(1, 1, 1, 1, dtype=torch.bool, device="cuda") for _ in more]
    yield "softmax_plain", [(_softmax, (_random(*s), pad)) for s, pad in zip(more, plain, strict=True)]
    pads = [torch.rand(b, 1, 1, n, device="cuda") < 0.1 for b, _, _, n in more]
    yield "softmax_more", [(_softmax, (_random(*s), pad)) for s, pad in zip(more, pads, strict=True)]
    yield "cast_down", [(_cast, (_random(m, n, dtype=torch.float32),)) for m, n in MATRICES[1::2]]
    yield "cast_up", [(_cast, (_random(m, n),)) for m, n in MATRICES[1::2]]
    yield "turned_sums_norm_backward_large", [
        (_turned_sums_norm_backward, tuple(part for pair in zip(cube(*c), cube(*c), strict=True) for part in pair)
         + (_random(*c), *statistics_of(*c)))
        for c in LARGE_CUBES
    ]  # fmt: skip
    yield "norm_turned_large", [(_norm_turned, (*cube(*c), _random(c[2]), _random(c[2]))) for c in LARGE_CUBES]
    for terms in (1, 2):
        yield f"small_sum{terms}", [(_sum, tuple(_random(m, n) for _ in range(terms))) for m, n in SMALL]
    yield "small_mask_and_sum", [(_mask_and_sum, (_random(m, n), _random(m, n))) for m, n in SMALL]
    yield "small_lookup", [(_looked_up, (uniform(m, 4000).unsqueeze(1), _random(4000, n))) for m, n in SMALL]
    yield (
        "table_gradient_small",
        [(_table_gradient, (_random(m, n), uniform(m, rows), rows)) for m, n in SMALL for rows in (600, 5000)],
    )

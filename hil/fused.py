"""Measure memory-bound kernels as torch.compile fuses them, and what a training step launches beside them.

    python -m hil.fused compiled --out data/h200
    python -m hil.fused eager --out data/h200

`compiled`: one program of independent computations per family (sums, gradients of activations, concatenations, copies
to another layout, norms, softmax, gathers, scatter-adds), each computation on operands of its own; torch.compile's own
account of the bytes beside the profiler's duration of every kernel. `eager`: embedding look-ups and their backward with
uniform and with power-law ids, zero fills, optimizer steps; the sum of the kernels' durations, and the wall time.
Between two iterations 512 MB are written, so that nothing is read from the L2 of the iteration before.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hil.compiled import kernel_launches, kernel_times, recorded
from perfmodel.fused import instructions_of

if TYPE_CHECKING:
    import pandas

ITERATIONS = 8
EAGER_ITERATIONS = 7
MATRICES = (
    (2048, 1), (2048, 128), (2048, 512), (2048, 1024), (2048, 3456), (2048, 8192), (2048, 32768), (8192, 1024),
    (16384, 256), (65536, 128), (131072, 256), (524288, 128), (524288, 256), (4096, 100), (30000, 367),
)  # fmt: skip
CUBES = (
    (2048, 256, 128), (2048, 64, 128), (2048, 40, 256), (512, 128, 64), (4096, 32, 64), (1024, 200, 128),
    (2048, 100, 64), (2048, 16, 512), (8192, 27, 128), (64, 512, 512),
)  # fmt: skip
Computation = Callable[..., Any]
Case = tuple[Computation, tuple[Any, ...]]


def _random(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*size, dtype=dtype, device="cuda")


def _power_law(count: int, rows: int, exponent: float = 1.05) -> Tensor:
    """Ids whose frequency falls with rank as rank ** -exponent, ranks scattered over the rows."""
    uniform = torch.rand(count, device="cuda", dtype=torch.float64)
    # Inverse of the continuous distribution on [1, rows + 1).
    power = 1.0 - exponent
    ranks = ((1 + uniform * ((rows + 1.0) ** power - 1)) ** (1 / power)).long().clamp(1, rows) - 1
    return (ranks * 2_654_435_761) % rows


def _uniform(count: int, rows: int) -> Tensor:
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


def _families() -> Iterator[tuple[str, list[Case]]]:
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
            ids = torch.stack([_uniform(batch, 10_000) for _ in range(fields)], dim=1)
            made.append((_looked_up, (ids, *tables)))
        yield f"lookup{fields}x{dim}", made
    stacks = ((2048, 256, 128), (2048, 40, 256), (8192, 27, 128), (512, 16, 16), (2048, 32, 64), (2048, 128, 512))
    yield "transpose", [(_transposed, (_random(*s),)) for s in stacks]
    pairs = [(b, t, torch.randperm(t * t, device="cuda")[: t * (t - 1) // 2]) for b, t in ((2048, 27), (8192, 27), (2048, 64))]
    yield "pick", [(_picked, (_random(b, t * t), index)) for b, t, index in pairs]
    yield "pick_backward", [(_picked_backward, (_random(b, len(index)), index, t * t)) for b, t, index in pairs]
    gradients = ((2048, 10_000, 128), (2048, 10_000, 1152), (2048, 100_000, 256), (2048 * 64, 10_000, 256), (2048, 100, 128))
    for name, ids_of in (("uniform", _uniform), ("power_law", _power_law)):
        yield f"table_gradient_{name}", [(_table_gradient, (_random(c, d), ids_of(c, r), r)) for c, r, d in gradients]
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


def _measure_family(family: str, cases: list[Case], flush: Callable[[], object]) -> list[dict[str, Any]]:
    """One compiled program of all cases; a row per kernel name."""
    functions, operands = [case[0] for case in cases], [case[1] for case in cases]

    def program(*operands: tuple[Any, ...]) -> list[Any]:
        return [function(*given) for function, given in zip(functions, operands, strict=True)]

    torch._dynamo.reset()
    compiled = torch.compile(program, dynamic=False)
    with recorded() as kernels:
        compiled(*operands)

    def run() -> None:
        flush()
        compiled(*operands)

    times = kernel_times(run, ITERATIONS)
    rows = []
    for name, samples in times.items():
        known = kernels.get(name)
        rows.append(
            {
                "family": family,
                "kernel": name,
                "launches": len(samples) / ITERATIONS,
                "time_us": statistics.median(samples),
                "total_us": sum(samples) / ITERATIONS,
                **(known.to_dict() if known else {}),
            }
        )
    return rows


def measure_compiled(out: Path, seconds: float, wanted: str = "*") -> int:
    """Measure every family whose name is wanted until the time is up; rows go to `fused.json`."""
    started = time.monotonic()
    filler = torch.empty(2**28, dtype=torch.bfloat16, device="cuda")
    rows, left_out = [], []
    for family, cases in _families():
        if not fnmatchcase(family, wanted):
            continue
        if time.monotonic() - started > seconds:
            left_out.append(f"{family}: out of time")
            continue
        try:
            rows += _measure_family(family, cases, lambda: filler.fill_(1.0))
        except Exception as error:  # one family that a torch version refuses must not cost the others
            left_out.append(f"{family}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
        print(f"{time.monotonic() - started:5.0f} s  {family}", file=sys.stderr, flush=True)
        _save(out / "fused.json", rows, left_out)
        del cases
        torch.cuda.empty_cache()
    return 0


EagerCase = tuple[str, dict[str, Any], Callable[[], object]]
BAGS = (
    (10_000, 128, 2048, 1), (1_000_000, 128, 2048, 1), (10_000_000, 128, 2048, 1), (10_000_000, 128, 2048, 20),
    (1_000_000, 64, 8192, 10), (4_000_000, 256, 2048, 1), (4_000_000, 256, 2048, 240), (4_000_000, 1152, 2048, 1),
    (10_000_000, 128, 65536, 1),
)  # fmt: skip
"""Rows, elements of a row, samples, ids a sample."""


def _bag_cases() -> Iterator[EagerCase]:
    """Embedding bags forward and backward, plain look-ups, scatter-adds, dense gradients; then fills."""
    for rows, dim, batch, pooling in BAGS:
        weight = torch.randn(rows, dim, dtype=torch.bfloat16, device="cuda").requires_grad_()
        for law, ids_of in (("uniform", _uniform), ("power_law", _power_law)):
            ids = ids_of(batch * pooling, rows)
            facts = {"rows": rows, "dim": dim, "batch": batch, "pooling": pooling, "ids": law,
                     "unique": int(ids.unique().numel())}  # fmt: skip
            for operation, run in _bag(weight, ids, batch, pooling).items():
                yield operation, facts, run
            weight.grad = None
        torch.cuda.empty_cache()
    for size in (2**16, 2**20, 2**23, 2**26, 2**28):
        filled = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        yield "fill", {"elements": size}, filled.zero_


def _bag(weight: Tensor, ids: Tensor, batch: int, pooling: int) -> dict[str, Callable[[], object]]:
    rows, dim = weight.shape
    plain = weight.detach()
    offsets = torch.arange(0, batch * pooling, pooling, device=ids.device)
    gradient = torch.randn(batch, dim, dtype=weight.dtype, device=ids.device)
    wide = torch.randn(batch * pooling, dim, dtype=weight.dtype, device=ids.device)
    output = F.embedding_bag(ids, weight, offsets, mode="sum", sparse=True)

    def sparse_backward() -> None:
        weight.grad = None
        output.backward(gradient, retain_graph=True)

    found: dict[str, Callable[[], object]] = {
        "bag_forward": lambda: F.embedding_bag(ids, plain, offsets, mode="sum"),
        "lookup": lambda: F.embedding(ids, plain),
        "index_add": lambda: plain.index_add_(0, ids, wide),
        "bag_backward_sparse": sparse_backward,
    }
    if rows <= 1_000_000:
        found["dense_backward"] = lambda: torch.ops.aten.embedding_dense_backward(wide, ids, rows, -1, False)
    return found


def _optimizer_cases() -> Iterator[EagerCase]:
    """Optimizer steps over parameters of several sizes and numbers."""
    classes: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "adamw_fused": (torch.optim.AdamW, {"fused": True}),
        "adamw_foreach": (torch.optim.AdamW, {"foreach": True, "capturable": True}),
        "sgd_fused": (torch.optim.SGD, {"fused": True, "lr": 0.1}),
        "sgd_momentum_fused": (torch.optim.SGD, {"fused": True, "lr": 0.1, "momentum": 0.9}),
        "adagrad_foreach": (torch.optim.Adagrad, {"foreach": True}),
        "adagrad_fused": (torch.optim.Adagrad, {"fused": True}),
    }
    lists = ((1024 * 1024,) * 4, (1024 * 1024,) * 64, (4096 * 4096,) * 16, (256 * 256,) * 100, (1024,) * 200, (8192 * 8192,) * 8)
    for dtype in (torch.bfloat16, torch.float32):
        for name, (cls, options) in classes.items():
            for sizes in lists:
                parameters = [torch.randn(size, dtype=dtype, device="cuda") for size in sizes]
                for parameter in parameters:
                    parameter.requires_grad_()
                    parameter.grad = torch.randn_like(parameter)
                facts = {"elements": sum(sizes), "tensors": len(sizes), "dtype": str(dtype).removeprefix("torch.")}
                try:
                    optimizer = cls(parameters, **options)
                    optimizer.step()
                except (RuntimeError, TypeError, ValueError) as error:
                    print(f"{name}: {str(error)[:100]}", file=sys.stderr)
                    break
                yield name, facts, optimizer.step
                del optimizer, parameters
                torch.cuda.empty_cache()


def measure_eager(out: Path, seconds: float) -> int:
    """Measure look-ups, scatter-adds, fills and optimizer steps; rows go to `eager_ops.json`."""
    started = time.monotonic()
    filler = torch.empty(2**28, dtype=torch.bfloat16, device="cuda")
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for cases in (_bag_cases(), _optimizer_cases()):
        for operation, facts, run in cases:
            if time.monotonic() - started > seconds:
                left_out.append(f"{operation} {facts}: out of time")
                break

            def cold(run: Callable[[], object] = run) -> None:
                filler.fill_(1.0)
                run()

            kernels_us, launches, names = _without_flush(kernel_launches(cold, EAGER_ITERATIONS, 2))
            torch.cuda.synchronize()
            before = time.perf_counter()
            for _ in range(5):
                run()
            torch.cuda.synchronize()
            wall = 1e6 * (time.perf_counter() - before) / 5
            rows.append(
                {"operation": operation, **facts, "kernels_us": kernels_us, "launches": launches, "wall_us": wall,
                 "names": names}
            )  # fmt: skip
    _save(out / "eager_ops.json", rows, left_out)
    print(f"{time.monotonic() - started:5.0f} s  {len(rows)} eager operations", file=sys.stderr, flush=True)
    return 0


def _without_flush(launches: list[tuple[str, float]]) -> tuple[float, int, dict[str, float]]:
    """Kernel time, launches and names of the median iteration, less the flush that begins each."""
    number = len(launches) // EAGER_ITERATIONS
    every = [launches[start + 1 : start + number] for start in range(0, number * EAGER_ITERATIONS, number)]
    median = sorted(every, key=lambda some: sum(time_us for _, time_us in some))[EAGER_ITERATIONS // 2]
    names: dict[str, float] = {}
    for name, time_us in median:
        names[name[:90]] = round(names.get(name[:90], 0.0) + time_us, 3)
    return sum(time_us for _, time_us in median), number - 1, names


def tabulated(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Kernels of `fused.json` as `perfmodel.fused` learns from them: what each does, its sizes, its bytes, its time.

    A gather is taken to read as many rows as it writes, a scatter to read and write as many as it adds; of a norm's
    backward the bytes follow from its size. Stages of reductions over columns are left out (`torch/bias_backward` of
    memory.parquet times them whole).
    """
    import pandas

    found = []
    for row in rows:
        name = row["kernel"]
        if not name.startswith("triton_") or row["problem"]:
            continue
        sizes = row["sizes"]
        kept, reduced = sizes.get("x", 1) * sizes.get("y", 1), sizes.get("r0_", 1)
        entry = _entry(row["family"], name, kept, reduced, row["read_bytes"], row["written_bytes"], "y" in sizes)
        if entry is not None:
            operators = {operator.split(".")[1] for operator in row["operators"] if "." in operator} - {"convert_element_type"}
            sizes_of = {"family": row["family"], "kept": kept, "reduced": reduced}
            found.append({**sizes_of, **entry, "instructions": instructions_of(operators), "p50_us": row["time_us"]})
    return pandas.DataFrame(found).drop_duplicates()


def _entry(
    family: str, name: str, kept: int, reduced: int, read_bytes: int, written_bytes: int, tiled: bool
) -> dict[str, Any] | None:
    """Kind and bytes of a kernel; None of one that is a stage of a reduction."""
    entry = {"kind": "pointwise", "read_bytes": read_bytes, "written_bytes": written_bytes, "unordered_bytes": 0, "uneven": False}
    if family in TURNED:
        return _turned_entry(family, kept, reduced, entry)
    if family == "norm_backward" and (kept, reduced) in MATRICES:
        return {**entry, "kind": "both" if _both(kept, reduced) and written_bytes > kept * reduced else "row"}
    if reduced > 1:
        uneven = family in ("softmax", "softmax_more")
        return {**entry, "kind": "row", "uneven": uneven} if family == "norm" or family.startswith("softmax") else None
    if family.startswith("lookup"):
        return {**entry, "kind": "gather", "read_bytes": written_bytes}
    if family == "pick":
        return {**entry, "kind": "gather", "read_bytes": 2 * kept}
    if family.startswith("table_gradient"):
        if read_bytes == 0:
            return {**entry, "kind": "fill"}
        if read_bytes == 2 * written_bytes:  # FP32 to bf16
            return entry
        return {**entry, "kind": "scatter", "read_bytes": 6 * kept, "written_bytes": 4 * kept}
    if read_bytes == 0:
        return {**entry, "kind": "fill"}
    if family in ("rotate", "cat"):
        return {**entry, "read_bytes": written_bytes}
    return {**entry, "unordered_bytes": read_bytes} if tiled else entry


# Of what these families read and write per element, the bytes across memory.
TURNED = {
    "turned_sum": 2, "turned_norm": 2, "norm_turned": 4, "turned_norm_backward": 2, "turned_sums_norm_backward": 4,
}  # fmt: skip


def _turned_entry(family: str, kept: int, reduced: int, entry: dict[str, Any]) -> dict[str, Any] | None:
    cube = next(((b * t, d) for b, t, d in CUBES if kept * reduced == b * t * d), None)
    if cube is None:
        return None
    entry = {**entry, "unordered_bytes": TURNED[family] * kept * reduced}
    if reduced == 1:
        return entry
    if (kept, reduced) != cube:
        return None
    if family == "turned_sums_norm_backward":  # whose sums along memory read one FP32 tensor, written before
        return {**entry, "kind": "both" if _both(*cube) else "row"}
    return {**entry, "kind": "row", "uneven": True}


def _both(kept: int, reduced: int) -> bool:
    """Whether torch.compile sums both ways in one kernel."""
    return kept * reduced >= 5 * 2**20 and kept >= max(4096, 2 * reduced)


def _save(path: Path, rows: list[dict[str, Any]], left_out: list[str]) -> None:
    from hil.fingerprint import fingerprint

    path.write_text(
        json.dumps(
            {
                "schema_version": 1,
                "method": "torch.profiler's kernel durations, median of 8 iterations, 512 MB written before each",
                "command": shlex.join(["python", "-m", "hil.fused", *sys.argv[1:]]),
                "measured": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "machine": fingerprint(),
                "left_out": left_out,
                "rows": rows,
            }
        )
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("compiled", "eager"))
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--families", default="*", help="families of compiled kernels to measure, as a glob (default: all)")
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    if options.what == "compiled":
        return measure_compiled(options.out, options.seconds, options.families)
    return measure_eager(options.out, options.seconds)


if __name__ == "__main__":
    sys.exit(main())

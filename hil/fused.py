"""Measure memory-bound kernels as torch.compile fuses them, and what a training step launches beside them.

    python -m hil.fused compiled --out data/h200
    python -m hil.fused eager --out data/h200
    python -m hil.fused compiled --families '*_drawn' --lock gpu.lock --out runs/drawn     # several of these side by side

`compiled`: one program of independent computations per family (sums, gradients of activations, concatenations, copies
to another layout, norms, softmax, gathers, scatter-adds), each computation on operands of its own; torch.compile's own
account of the bytes beside the profiler's duration of every kernel. `eager`: embedding look-ups and their backward with
uniform and with power-law ids, zero fills, steps of tiny networks; the sum of the kernels' durations, and the wall time.
Between two iterations 512 MB are written, so that nothing is read from the L2 of the iteration before.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hil.attention import attention_cases, padded_cases
from hil.candidates import locked_autotune
from hil.command import Parser
from hil.compiled import by_iteration, kernel_launches, kernel_times, recorded
from hil.drawn_families import DRAWN, drawn_copies, drawn_families, drawn_parts
from hil.files import write_atomic
from hil.fingerprint import fingerprint, has_gpu
from hil.fused_families import CALLED, Case, families, power_law, uniform
from hil.host import train
from hil.lock import GpuLock
from hil.quantized_families import quantized_families

ITERATIONS = 8
EAGER_ITERATIONS = 7


def _measure_family(
    family: str, cases: list[Case], flush: Callable[[], object], lock: AbstractContextManager[Any]
) -> list[dict[str, Any]]:
    """One compiled program of all cases; a row per kernel name. The lock is held while kernels are timed."""
    functions, operands = [case[0] for case in cases], [case[1] for case in cases]

    def program(*operands: tuple[Any, ...]) -> list[Any]:
        return [function(*given) for function, given in zip(functions, operands, strict=True)]

    torch._dynamo.reset()
    compiled = torch.compile(program, dynamic=False)
    with recorded() as kernels, locked_autotune(lock):
        compiled(*operands)

    def run() -> None:
        flush()
        compiled(*operands)

    with lock:
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


def measure_compiled(out: Path, seconds: float, wanted: str = "*", lock: Path | None = None) -> int:
    """Measure every family whose name is wanted until the time is up; rows go to `fused.json`.

    Args:
        out: Folder of that file.
        seconds: Nothing is begun after so many.
        wanted: Names, as a glob.
        lock: A file that whoever uses this GPU locks; None where nobody else does.
    """
    held = GpuLock(lock) if lock else nullcontext()
    started = time.monotonic()
    filler = torch.empty(2**28, dtype=torch.bfloat16, device="cuda")
    rows, left_out = [], []
    for family, cases in chain(families(), quantized_families(), drawn_families()):
        if not fnmatchcase(family, wanted):
            continue
        if time.monotonic() - started > seconds:
            left_out.append(f"{family}: out of time")
            continue
        try:
            rows += _measure_family(family, cases, lambda: filler.fill_(1.0), held)
        except Exception as error:  # one family that a torch version refuses must not cost the others
            left_out.append(f"{family}: {_problem(error)}")
        print(f"{time.monotonic() - started:5.0f} s  {family}", file=sys.stderr, flush=True)
        _save(out / "fused.json", ITERATIONS, rows, left_out)
        del cases
        torch.cuda.empty_cache()
    return 0


PARTS = tuple(
    (parts, columns)
    for parts in (60, 256, 384, 1000, 1920, 3840, 8192)
    for columns in (16, 32, 48, 96, 128, 200, 320, 512, 1152, 1920, 4096)
)
"""Rows and columns in FP32: what torch.compile leaves of a kernel that sums both ways."""
COPIES = (
    (1024, 1040), (2048, 1096), (3072, 1296), (12288, 1080), (4096, 1736), (8192, 1200), (1536, 2080), (6144, 2592), (2048, 3464),
    (4096, 4320), (12288, 2592), (3072, 8208), (12288, 4320), (30000, 1100), (8192, 5480), (16384, 3000),
)  # fmt: skip
"""Rows and columns in bf16 of products whose rows are padded."""
DRAWN_PARTS, DRAWN_COPIES = drawn_parts(), drawn_copies()
PADDED_TO = 64  # torch._inductor.config.padding_alignment_bytes, in elements


CalledCase = tuple[str, int, int, int, int, Callable[[], object]]
"""Family, elements kept, reduced for each, bytes read and written, and what runs it."""


def _called_cases() -> Iterator[CalledCase]:
    """What a compiled step calls of torch itself: sums of parts, and biases copied to each row of a product."""
    of_parts = [("partials", size) for size in PARTS] + [("partials" + DRAWN, size) for size in DRAWN_PARTS]
    for family, (parts, columns) in of_parts:
        workspace = torch.rand(parts, columns, device="cuda")
        yield family, columns, parts, 4 * parts * columns, 4 * columns, partial(workspace.sum, dim=0)
    for family, (rows, columns) in [("copy", size) for size in COPIES] + [("copy" + DRAWN, size) for size in DRAWN_COPIES]:
        stride = -(-columns // PADDED_TO) * PADDED_TO
        place = torch.empty_strided((rows, columns), (stride, 1), dtype=torch.bfloat16, device="cuda")
        yield family, rows * columns, 1, 2 * columns, 2 * rows * columns, partial(place.copy_, _random_rows(1, columns)[0])


def measure_called(out: Path, cases: Iterable[CalledCase]) -> int:
    """Measure what a compiled step calls of torch itself; rows go to `fused.json`."""
    filler = torch.empty(2**28, dtype=torch.bfloat16, device="cuda")
    rows = []
    for family, kept, reduced, read_bytes, written_bytes, run in cases:
        kernels_us = _eager(run, filler)["kernels_us"]
        rows.append(
            {
                "family": family, "kernel": CALLED, "launches": 1, "time_us": kernels_us, "total_us": kernels_us,
                "read_bytes": read_bytes, "written_bytes": written_bytes, "sizes": {"x": kept, "r0_": reduced},
                "operators": {"aten.sum.dim_IntList" if reduced > 1 else "aten.clone.default": 1}, "problem": "",
            }
        )  # fmt: skip
    _save(out / "fused.json", EAGER_ITERATIONS, rows, [])
    return 0


EagerCase = tuple[str, dict[str, Any], Callable[[], object]]
BAGS = (
    (10_000, 128, 2048, 1), (1_000_000, 128, 2048, 1), (10_000_000, 128, 2048, 1), (10_000_000, 128, 2048, 20),
    (1_000_000, 64, 8192, 10), (4_000_000, 256, 2048, 1), (4_000_000, 256, 2048, 240), (4_000_000, 1152, 2048, 1),
    (10_000_000, 128, 65536, 1),
)  # fmt: skip
"""Rows, elements of a row, samples, ids a sample."""
FUSED_TABLES = (
    (26, 1_000_000, 128, 2048, 1), (26, 1_000_000, 128, 8192, 1), (8, 4_000_000, 256, 2048, 20), (1, 1_000_000, 64, 8192, 50),
)  # fmt: skip
"""Tables, rows, elements of a row, samples, ids a sample."""


def _bag_cases() -> Iterator[EagerCase]:
    """Embedding bags forward and backward, plain look-ups, scatter-adds, dense gradients; then fills."""
    for rows, dim, batch, pooling in BAGS:
        weight = torch.randn(rows, dim, dtype=torch.bfloat16, device="cuda").requires_grad_()
        for law, ids_of in (("uniform", uniform), ("power_law", power_law)):
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


def _table_cases() -> Iterator[EagerCase]:
    """Look-ups whose backward updates the rows in place, as a fused embedding library does it; none without fbgemm_gpu."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
    except (ImportError, OSError, RuntimeError) as problem:
        print(f"tables: {str(problem)[:100]}", file=sys.stderr)
        return
    for optimizer in ("EXACT_ROWWISE_ADAGRAD", "EXACT_SGD"):
        for tables, rows, dim, batch, pooling in FUSED_TABLES:
            module = SplitTableBatchedEmbeddingBagsCodegen(
                [(rows, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * tables,
                optimizer=EmbOptimType[optimizer], learning_rate=0.01, weights_precision=SparseType.FP16,
                output_dtype=SparseType.FP16,
            )  # fmt: skip
            offsets = torch.arange(0, tables * batch * pooling + 1, pooling, device="cuda")
            for law, ids_of in (("uniform", uniform), ("power_law", power_law)):
                ids = ids_of(tables * batch * pooling, rows)
                output = module(ids, offsets)
                gradient = torch.randn_like(output)
                facts = {"tables": tables, "rows": rows, "dim": dim, "batch": batch, "pooling": pooling, "ids": law}
                yield f"tables_forward_{optimizer.lower()}", facts, partial(module, ids, offsets)
                yield f"tables_update_{optimizer.lower()}", facts, partial(output.backward, gradient, retain_graph=True)
            del module, output
            torch.cuda.empty_cache()


def _step_cases() -> Iterator[EagerCase]:
    """Forward and backward of networks so small that the host's launches are what takes the time."""

    def layer(norm: bool) -> list[torch.nn.Module]:
        linear = torch.nn.Linear(64, 64)
        return [linear, torch.nn.LayerNorm(64), torch.nn.SiLU()] if norm else [linear, torch.nn.ReLU()]

    for layers in (8, 32):
        for norm in (False, True):
            modules = [module for _ in range(layers) for module in layer(norm)]
            network = torch.nn.Sequential(*modules).to("cuda", torch.bfloat16)
            inputs = _random_rows(64, 64)
            facts = {"layers": layers, "norm": norm, "gemms": 3 * layers - 1}
            for operation, called in (("step_eager", network), ("step_compiled", torch.compile(network, dynamic=False))):
                run = partial(train, network, called, inputs)
                run()
                yield operation, facts, run


def _random_rows(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


def measure_eager(out: Path, seconds: float) -> int:
    """Measure look-ups, scatter-adds, fills and launch-bound steps; rows go to `eager_ops.json`."""
    started = time.monotonic()
    filler = torch.empty(2**28, dtype=torch.bfloat16, device="cuda")
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for cases in (_step_cases(), _table_cases(), _bag_cases()):
        try:
            for operation, facts, run in cases:
                if time.monotonic() - started > seconds:
                    left_out.append(f"{operation} {facts}: out of time")
                    break
                try:
                    rows.append({"operation": operation, **facts, **_eager(run, filler)})
                except Exception as error:  # one operation that a version refuses must not cost the others
                    left_out.append(f"{operation} {facts}: {_problem(error)}")
        except Exception as error:  # nor what cannot be set up those of other kinds
            left_out.append(_problem(error))
        _save(out / "eager_ops.json", EAGER_ITERATIONS, rows, left_out)
    print(f"{time.monotonic() - started:5.0f} s  {len(rows)} eager operations", file=sys.stderr, flush=True)
    return 0


def _eager(run: Callable[[], object], filler: Tensor) -> dict[str, Any]:
    """Kernel time, launches and wall time of an operation."""

    def cold() -> None:
        filler.fill_(1.0)
        run()

    kernels_us, launches, names = _without_flush(kernel_launches(cold, EAGER_ITERATIONS, 2))
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    wall = 1e6 * (time.perf_counter() - before) / 5
    return {"kernels_us": kernels_us, "launches": launches, "wall_us": wall, "names": names}


def _without_flush(launches: list[tuple[str, float]]) -> tuple[float, int, dict[str, float]]:
    """Kernel time, launches and names of the median iteration, less the flush that begins each.

    Raises:
        RuntimeError: as `by_iteration`.
    """
    every = [each[1:] for each in by_iteration(launches, EAGER_ITERATIONS)]
    median = sorted(every, key=lambda some: sum(time_us for _, time_us in some))[EAGER_ITERATIONS // 2]
    names: dict[str, float] = {}
    for name, time_us in median:
        names[name[:90]] = round(names.get(name[:90], 0.0) + time_us, 3)
    return sum(time_us for _, time_us in median), len(median), names


def _problem(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _save(path: Path, iterations: int, rows: list[dict[str, Any]], left_out: list[str]) -> None:
    document = {
        "schema_version": 1,
        "method": f"torch.profiler's kernel durations, median of {iterations} iterations, 512 MB written before each",
        "command": shlex.join(["python", "-m", "hil.fused", *sys.argv[1:]]),
        "measured": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": fingerprint(),
        "left_out": left_out,
        "rows": rows,
    }
    write_atomic(path, lambda beside: beside.write_text(json.dumps(document)))


def main() -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.fused", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "what",
        choices=("compiled", "eager", "called", "attention"),
        help="kernels that torch.compile makes; look-ups, fills and small steps as called; what a compiled step calls of torch, "
        "and its attention",
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of fused.json or eager_ops.json (default: this one)")
    parser.add_argument("--families", default="*", help="families of kernels to measure, as a glob (default: all)")
    parser.add_argument("--lock", type=Path, help="file that whoever uses this GPU locks (see hil.lock)")
    parser.add_argument("--seconds", type=float, default=150, help="begin nothing after so many (default: %(default)s)")
    options = parser.parse_args()
    if not has_gpu():
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    if options.what == "compiled":
        return measure_compiled(options.out, options.seconds, options.families, options.lock)
    if options.what == "eager":
        return measure_eager(options.out, options.seconds)
    cases = _called_cases() if options.what == "called" else chain(attention_cases(), padded_cases())
    return measure_called(options.out, (case for case in cases if fnmatchcase(case[0], options.families)))


if __name__ == "__main__":
    sys.exit(main())

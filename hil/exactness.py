"""Is what `numerics` emulates what this GPU returns? Every kind of GEMM on fresh operands, compared to the last bit.

    python -m hil.exactness --out data/h200 --minutes 3
    python -m hil.exactness --kernels 'loka/*' 'fbgemm/*'

draws shapes and distributions anew in each run, multiplies on the GPU, emulates sampled outputs (an output depends on one
row of each operand alone), and writes a row per kernel into `exactness.json`: shapes, outputs compared, outputs that differ.
cuBLAS splits K where outputs are few and K is long; into how many parts is found out by probing (`measured_parts`), and
compared with `numerics.estimated_split_k`. `numerics.fidelity` says in words what the rows say in numbers.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hil.command import Parser
from hil.exactness_cases import BF16, CASES, Case, Draw, scale_shapes
from hil.files import write_atomic
from hil.kernels.availability import absences, availability
from hil.lock import GpuLock
from numerics import estimated_split_k
from numerics.tensor_core import split_parts
from perfmodel.kernels import KERNELS

# Rows and columns of a result that are emulated.
_SAMPLED = 96

DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "positive": lambda shape, generator: torch.randn(shape, generator=generator).abs(),
    "relu": lambda shape, generator: (torch.randn(shape, generator=generator) + 0.2).clamp(min=0),
    "lognormal": lambda shape, generator: torch.randn(shape, generator=generator).mul(2).exp(),
    "student-t": lambda shape, generator: (
        torch.randn(shape, generator=generator) / torch.randn((3, *shape), generator=generator).square().mean(0).sqrt()
    ),
    "scaled rows": lambda shape, generator: (
        torch.randn(shape, generator=generator) * torch.randn((shape[0], 1), generator=generator).mul(3).exp()
    ),
}


@dataclass(frozen=True)
class Result:
    """One GEMM on the GPU, and how its sampled outputs compare with the emulator's.

    Attributes:
        kernel: As in `CASES`.
        shape: (M, N, K).
        split_k: Parts that K was split into, as measured; 1 for kernels that never split.
        estimated: What `numerics.estimated_split_k` says, where it applies.
        outputs: Outputs compared.
        unequal: Of them, those that differ in any bit (NaN equals NaN).
        left_out: Elements of K that are in no part.
        apart: Relative Frobenius distance to what is emulated without knowing K's parts, where none is left out.
        note: Seed and distributions, to draw the same again.
    """

    kernel: str
    shape: tuple[int, int, int]
    split_k: int
    estimated: int | None
    outputs: int
    unequal: int
    left_out: int
    apart: float
    note: str


def draw_operands(case: Case, m: int, n: int, k: int, seed: int) -> Draw:
    """Values of a random distribution each, sized anywhere from the format's subnormals to its range, and random scales."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    names, operands = list[str](), list[Tensor]()
    for rows, dtype in zip((m, n), case.dtypes, strict=True):
        names.append(chance.choice(list(DISTRIBUTIONS)))
        values = DISTRIBUTIONS[names[-1]]((rows, k), generator)
        if dtype != BF16:
            top = torch.finfo(dtype).max
            values = (values * (top * 2.0 ** -chance.uniform(0, 8) / values.abs().max())).clamp(-top, top)
        operands.append(values.cuda().to(dtype))

    left, right = scale_shapes(case, m, n, k)
    scales = [torch.rand(shape, generator=generator).add(0.5).cuda() for shape in (left, right)]
    if not case.scales:
        scales = [torch.ones_like(scale) for scale in scales]
    return Draw(operands[0], operands[1], scales[0], scales[1], names)


def measured_parts(case: Case, m: int, n: int, k: int) -> list[slice]:
    """The parts into which this machine's cuBLAS splits K of an (M, N, K) GEMM.

    Products of 2^16, -2^16 and 2^-18, farther apart than FP32 holds. A row has the first at the start of K, the second in
    another block, the small one in the block after that: if both large ones are in one part, they cancel there and the small
    one survives; if not, the second swallows it, in its own part or when parts are added. So the first part's end is found.
    """
    if case.parts is not None:
        return case.parts(m, n, k)
    block = case.split_block
    if block is None or k < 3 * block:
        return [slice(0, k)]
    blocks, large, small = k // block, 256.0, 2.0**-9
    # A block's first place is for the large products, its fifth for the small one.
    b = torch.zeros((n, k), device="cuda")
    b[:, ::block] = large
    b[:, 4::block] = small

    def survives(places: Tensor) -> Tensor:
        a = torch.zeros((m, k), device="cuda")
        rows = torch.arange(len(places), device="cuda")
        a[rows, places[:, 0]] = large
        a[rows, places[:, 1]] = -large
        a[rows, places[:, 2]] = small
        left, right = (torch.ones(shape, device="cuda") for shape in scale_shapes(case, m, n, k))
        return case.run(Draw(a.to(case.dtypes[0]), b.to(case.dtypes[1]), left, right))[: len(places), 0] != 0

    for start in range(1, blocks - 1, m):
        others = torch.arange(start, min(start + m, blocks - 1), device="cuda")
        swallowed = ~survives(torch.stack([0 * others, others * block, (others + 1) * block + 4], 1))
        if bool(swallowed.any()):
            length = int(others[swallowed][0]) * block
            starts = list(range(0, k, length))
            if starts[-1] == blocks * block:
                # What fills no block is a part of its own, or left out.
                rest = torch.tensor([[starts[-1], 1, 2]], device="cuda")
                starts = starts if bool(survives(rest)[0]) else starts[:-1]
            return [slice(start, min(start + length, k)) for start in starts]
    return [slice(0, k)]


def compare(name: str, m: int, n: int, k: int, seed: int, lock: AbstractContextManager[Any] | None = None) -> Result:
    """Draw operands, multiply on the GPU, emulate sampled rows and columns.

    Args:
        name: Kind, of `CASES`.
        m: Rows of the result.
        n: Its columns.
        k: Depth.
        seed: Of the operands.
        lock: Held while the GPU works for long; others may be timing kernels on it.
    """
    draw = draw_operands(CASES[name], m, n, k, seed)
    CASES[name].run(draw)  # compiles: that needs no lock
    with lock or nullcontext():
        return _compare(name, m, n, k, seed, draw)


def _compare(name: str, m: int, n: int, k: int, seed: int, draw: Draw) -> Result:
    case = CASES[name]
    parts = measured_parts(case, m, n, k)
    real = case.run(draw)
    rows = torch.linspace(0, m - 1, min(m, _SAMPLED), device="cuda").long()
    columns = torch.linspace(0, real.shape[1] - 1, min(real.shape[1], _SAMPLED), device="cuda").long()
    ours = case.emulate(draw, rows, columns, parts)
    picked = real[rows][:, columns]
    same = (picked == ours) | (picked.isnan() & ours.isnan())
    estimated = estimated_split_k(m, n, k) if case.scales == "one" and case.parts is None else None
    left_out, apart = k - parts[-1].stop, 0.0
    if len(parts) != (estimated or 1) and not left_out and case.parts is None:
        guess = split_parts(k, estimated or 1, case.split_block or k)
        blind = case.emulate(draw, rows, columns, guess).double()
        apart = float((picked.double() - blind).norm() / picked.double().norm())
    note = f"seed {seed}, {' by '.join(draw.names)}"
    return Result(name, (m, n, k), len(parts), estimated, picked.numel(), int((~same).sum()), left_out, apart, note)


def draw_shape(case: Case, seed: int) -> tuple[int, int, int]:
    """A fresh size: outputs from few to many, K from short to long, every second one of few outputs and a long K."""
    chance = random.Random(seed)
    long = chance.random() < 0.5
    sizes = [2 ** chance.uniform(4, 9.5 if long else 11.5) for _ in range(2)] + [
        2 ** chance.uniform(*((12, 16.5) if long else (5, 12)))
    ]
    m, n, k = (max(1, round(size / multiple)) * multiple for size, multiple in zip(sizes, case.multiples, strict=True))
    # Of a single block of 128 a scale a row would not say whether it is a row's or a block's.
    return m, n, max(k, 2 * case.multiples[2])


def summary(results: list[Result]) -> list[dict]:
    """A row per kernel: shapes, of them split; outputs compared and unequal; how often the estimate of the parts was right."""
    rows = []
    for name in CASES:
        some = [r for r in results if r.kernel == name]
        if not some:
            continue
        row = {
            "kernel": name, "shapes": len(some), "split_shapes": sum(r.split_k > 1 for r in some),
            "outputs": sum(r.outputs for r in some), "unequal": sum(r.unequal for r in some),
            "shapes_with_unequal": sum(r.unequal > 0 for r in some), "most_apart_without_parts": max(r.apart for r in some),
            "shapes_with_k_left_out": sum(r.left_out > 0 for r in some),
        }  # fmt: skip
        guessed = [r for r in some if r.estimated is not None]
        if guessed:
            row["split_or_not_right"] = sum(((r.estimated or 1) > 1) == (r.split_k > 1) for r in guessed) / len(guessed)
            row["split_k_right"] = sum(r.estimated == r.split_k for r in guessed) / len(guessed)
        rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    """A line per kernel."""
    lines = [f"{'kernel':44s}{'shapes':>8s}{'K split':>9s}{'outputs compared':>18s}{'unequal':>9s}"]
    for row in rows:
        figures = f"{row['shapes']:8d}{row['split_shapes']:9d}{row['outputs']:18,d}{row['unequal']:9d}"
        lines.append(f"{row['kernel']:44s}{figures}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Draw and compare until the time is up; 0 when all outputs of all kernels were equal, 1 when not, 3 without a GPU."""
    parser = Parser(prog="python -m hil.exactness", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for exactness.json (default: print only)")
    parser.add_argument("--minutes", type=float, default=3.0, help="time to spend (default 3)")
    parser.add_argument("--until", type=float, help="the same as a Unix time, instead of --minutes")
    parser.add_argument("--seed", type=int, help="first seed (default: drawn anew)")
    parser.add_argument("--kernels", nargs="+", default=["*"], metavar="PATTERN", help="kinds to compare (default: all)")
    parser.add_argument("--lock", type=Path, help="file that whoever uses this GPU for long locks (see hil.lock)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("error: hil.exactness needs a CUDA GPU of compute capability 9.0", file=sys.stderr)
        return 3
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(40)
    end = options.until if options.until is not None else time.time() + 60 * options.minutes
    lock = GpuLock(options.lock) if options.lock else None
    started, results = datetime.now(UTC), list[Result]()
    wanted = [name for name in CASES if any(fnmatch(name, pattern) for pattern in options.kernels)]
    absent = absences(name for name in wanted if name in KERNELS)
    cases = {name: CASES[name] for name in wanted if name not in KERNELS or availability(KERNELS[name]).available}
    print(*absent, sep="\n", end="\n" * bool(absent), file=sys.stderr)
    if not cases:
        print(f"error: nothing to compare matches {' '.join(options.kernels)}", file=sys.stderr)
        return 3
    # Each kind once, however short the time.
    while time.time() < end or not results:
        for name, case in cases.items():
            if len(results) >= len(cases) and time.time() > end:
                break
            seed += 1
            results.append(compare(name, *draw_shape(case, seed), seed, lock))
        print(f"\r{len(results)} GEMMs, {sum(r.unequal for r in results)} unequal outputs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = summary(results)
    print(table(rows))
    worst = [asdict(r) for r in sorted(results, key=lambda r: -r.unequal)[:10] if r.unequal]
    for each in worst:
        print(each)
    if options.out:
        _save(options.out, {"rows": rows, "worst": worst}, started)
    return int(any(row["unequal"] for row in rows))


def _save(folder: Path, content: dict, started: datetime) -> None:
    from hil.fingerprint import fingerprint

    command = f"python -m hil.exactness {shlex.join(sys.argv[1:])}"
    record = {
        "schema_version": 1, "method": (__doc__ or "").split("\n")[0], "command": command,
        "started": started.strftime("%Y-%m-%dT%H:%M:%SZ"), **content, "machine": fingerprint(),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "exactness.json", lambda beside: beside.write_text(json.dumps(record, indent=1) + "\n"))


if __name__ == "__main__":
    sys.exit(main())

"""What a GPU's clock does after large GEMMs, at rest and under small ones, and when these take their own time again.

    python benchmarks/clock.py [--out data/h200/clock.json]

Squares of 8,192 in bf16 run for 0.6 s, which lowers the clock to what the power limit allows. Then the GPU rests, or a GEMM of
0.004 TFLOP (2,048 x 1,024 x 1,024, graphs of 40) runs on and off or without a pause, at once or after a rest, while the clock
is read. Three turns; without a GPU it prints what the file in `data/` has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from hil.files import write_atomic
from hil.fingerprint import fingerprint
from perfmodel import data_folder
from perfmodel.steady import FULL_CLOCK

TURNS, LOAD_S, WATCH_S, WATCH_AFTER_REST_S = 3, 0.6, 1.6, 1.0
# Name, seconds of rest before, and what runs while the clock is read: nothing, a graph every 20 ms, or graphs without a pause.
CASES = (
    ("at rest", 0.0, "rest"), ("small GEMMs on and off", 0.0, "some"), ("small GEMMs", 0.0, "busy"),
    ("0.1 s of rest, small GEMMs", 0.1, "busy"), ("0.3 s of rest, small GEMMs", 0.3, "busy"),
    ("0.6 s of rest, small GEMMs", 0.6, "busy"),
)  # fmt: skip
_GRAPH = 40


def measured() -> dict[str, Any]:
    """What was seen, by case and turn: rows of seconds since, clock in MHz, power in W, and a small GEMM's time in us."""
    import torch

    def load() -> None:
        end = time.time() + LOAD_S
        while time.time() < end:
            for _ in range(20):
                heavy @ other
            torch.cuda.synchronize()

    def small_us() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / _GRAPH

    def watch(seconds: float, what: str) -> list[list[float | None]]:
        began, found = time.time(), []
        while (since := time.time() - began) < seconds:
            us = None if what == "rest" else [small_us() for _ in range(8 if what == "busy" else 1)][-1]
            found.append([round(since, 4), torch.cuda.clock_rate(), round(torch.cuda.power_draw() / 1e3), us])
            if what != "busy":
                time.sleep(0.02)
        return found

    heavy, other = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((2048, 1024), (1024, 1024)))
    heavy @ other, a @ b
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH):
            a @ b
    small_us()
    time.sleep(1.0)
    found: dict[str, Any] = {"cold": watch(0.6, "busy")}
    for turn in range(TURNS):
        for name, rest, what in CASES:
            load()
            time.sleep(rest)
            found[f"{name} {turn}"] = watch(WATCH_AFTER_REST_S if rest else WATCH_S, what)
    return found


def table(found: dict[str, Any]) -> str:
    """By case: the clock at first, when it was full again, and how much longer a small GEMM took meanwhile; turn by turn."""
    full = FULL_CLOCK * max(row[1] for row in found["cold"])
    cold = sorted(row[3] for row in found["cold"])[len(found["cold"]) // 2]
    head = ("after 0.6 s of large GEMMs", "MHz at first", "full clock after, s", "small GEMM, first 0.1 s")
    lines = [f"{head[0]:28s} {head[1]:>18s} {head[2]:>20s} {head[3]:>25s}"]
    for name, _, _ in CASES:
        turns = [found[f"{name} {turn}"] for turn in range(TURNS)]
        first = ", ".join(f"{rows[0][1]:.0f}" for rows in turns)
        back = ", ".join(next((f"{row[0]:.2f}" for row in rows if row[1] >= full), "never") for rows in turns)
        slow = [[row[3] / cold for row in rows if row[3] and row[0] < 0.1] for rows in turns]
        longer = ", ".join(f"{sum(some) / len(some):.2f}x" for some in slow if some)
        lines.append(f"{name:28s} {first:>18s} {back:>20s} {longer:>25s}")
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON to write (default: none)")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        path = data_folder() / "h200" / "clock.json"
        print(f"no GPU: what {path.name} has", file=sys.stderr)
        print(table(json.loads(path.read_text())["seen"]))
        return 0
    found = measured()
    print(table(found))
    if options.out:
        document = {"schema_version": 1, "command": "python benchmarks/clock.py", **fingerprint(), "seen": found}
        write_atomic(options.out, lambda beside: beside.write_text(json.dumps(document) + "\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

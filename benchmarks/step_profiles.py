"""Several steps on one GPU: compiled side by side, tuned and measured one after the other.

    python benchmarks/step_profiles.py dlrm-production:4096:bf16 wukong-small:8192:naive_tensorwise --out profiles

Each is MODEL:BATCH:VARIANT as `benchmarks/step_profile.py` takes them; of the variant `decision` the table is
`TABLES/MODEL-BATCH.json`. A step that is not compiled when the others are measured waits, stopped, and has what time is left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PROFILE = Path(__file__).parent / "step_profile.py"


@dataclass
class Job:
    """One step's process."""

    name: str
    process: subprocess.Popen[bytes]
    ready: Path
    seen: bool = False

    @property
    def waits(self) -> bool:
        """It is compiled and not measured yet."""
        return not self.seen and self.ready.exists() and self.process.poll() is None

    @property
    def compiles(self) -> bool:
        """It is not there yet."""
        return not self.seen and not self.ready.exists() and self.process.poll() is None


def started(text: str, options: argparse.Namespace) -> Job:
    """Start one step's process, which compiles and then waits."""
    model, batch, variant = text.rsplit(":", 2)
    name = f"{model.replace(':', '-')}-{batch}"
    ready = options.out / f"{name}-{variant}.ready"
    command = [sys.executable, str(PROFILE), model, "--batch", batch, "--variant", variant, "--out", str(options.out)]
    command += ["--wait", str(ready), "--turns", str(options.turns), "--lock", str(options.out / "gpu.lock")]
    if variant == "decision":
        command += ["--table", str(options.tables / f"{name}.json")]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(options.threads)}
    with (options.out / f"{name}-{variant}.log").open("wb") as log:
        return Job(text, subprocess.Popen(command, stdout=log, stderr=log, env=environment), ready)


def measure(jobs: list[Job], until: float) -> None:
    """Let the compiled ones run, one at a time, while the others are stopped."""
    stopped = [job for job in jobs if job.compiles]
    for job in stopped:
        job.process.send_signal(signal.SIGSTOP)
    for job in jobs:
        if job.waits and time.monotonic() < until:
            job.seen = True
            begun = time.monotonic()
            job.ready.unlink()
            try:
                code: int | str = job.process.wait(max(until - time.monotonic(), 1.0))
            except subprocess.TimeoutExpired:
                code = "no time"
            print(f"{job.name}: {code}, {time.monotonic() - begun:.0f} s", flush=True)
    for job in stopped:
        job.process.send_signal(signal.SIGCONT)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="+", metavar="MODEL:BATCH:VARIANT")
    parser.add_argument("--tables", type=Path, default=Path("."), help="folder of dispatch tables")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--compile-seconds", type=float, default=150, help="when what is compiled is measured, if not all is")
    parser.add_argument("--threads", type=int, default=4, help="of each compilation")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    until = begun + options.seconds
    jobs = [started(text, options) for text in options.steps]
    try:
        while any(job.compiles for job in jobs) and time.monotonic() < begun + options.compile_seconds:
            time.sleep(0.2)
        print(f"{time.monotonic() - begun:.0f} s: {sum(job.waits for job in jobs)} of {len(jobs)} compiled", flush=True)
        while any(job.compiles or job.waits for job in jobs) and time.monotonic() < until:
            measure(jobs, until)
            time.sleep(0.2)
    finally:
        for job in jobs:
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGCONT)
                job.process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())

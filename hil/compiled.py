"""What torch.compile makes of a program: its Triton kernels with the bytes that they move, and how long each takes.

```
with recorded() as kernels:
    compiled(*inputs)                     # kernels: name -> Kernel
times = kernel_times(lambda: compiled(*inputs))
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass
class Kernel:
    """One Triton kernel as torch.compile's scheduler described it.

    Attributes:
        read_bytes: Distinct buffers read, each once; a gather counts what is indexed, at most the buffer.
        written_bytes: Buffers written.
        sizes: Iteration space: `x`, `y`, ... pointwise, `r0_`, ... reduced, in elements.
        operators: aten operators that were fused into it, with how many of each.
        problem: Why the above could not be read; empty where it could.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    operators: dict[str, int] = field(default_factory=dict)
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@contextmanager
def recorded() -> Iterator[dict[str, Kernel]]:
    """Inside, every Triton kernel that torch.compile makes is kept under its name; its caches are off."""
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonScheduling

    kernels: dict[str, Kernel] = {}
    original = TritonScheduling.define_kernel

    def define(self: Any, source: str, nodes: Any, kernel: Any) -> str:
        name: str = original(self, source, nodes, kernel)
        try:
            kernels[name] = _described(nodes, kernel)
        except Exception as error:  # private interfaces: a version that differs must not stop the program
            kernels[name] = Kernel(problem=f"{type(error).__name__}: {error}")
        return name

    setattr(TritonScheduling, "define_kernel", define)  # noqa: B010 (mypy refuses a plain assignment)
    try:
        with config.patch(force_disable_caches=True):
            yield kernels
    finally:
        setattr(TritonScheduling, "define_kernel", original)  # noqa: B010


def _described(nodes: Any, kernel: Any) -> Kernel:
    from torch._inductor.virtualized import V

    gone = set(kernel.removed_buffers) | set(V.graph.removed_buffers)
    inner = [node for node in nodes if hasattr(node, "read_writes")]
    produced = {name for node in inner for name in node.get_buffer_names()}
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    operators: dict[str, int] = {}
    for node in inner:
        for access, found in ((node.read_writes.reads, read), (node.read_writes.writes, written)):
            for dependency in access:
                if dependency.name not in gone and not (found is read and dependency.name in produced):
                    found[dependency.name] = max(found.get(dependency.name, 0), _bytes(dependency))
        for origin in getattr(node.node, "origins", ()):
            target = str(origin.target)
            operators[target] = operators.get(target, 0) + 1
    sizes = {str(prefix): int(size) for prefix, size in kernel.numels.items()}
    return Kernel(sum(read.values()), sum(written.values()), sizes, operators)


def _bytes(dependency: Any) -> int:
    """Bytes of one access; of a gather or a scatter as many elements as are indexed, at most the buffer."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    whole = int(dependency.numbytes_hint())
    if not (isinstance(dependency, MemoryDep) and dependency.is_indirect()):
        return whole
    indexed = V.graph.get_dtype(dependency.name).itemsize
    for size in dependency.size:
        indexed *= int(size)
    return min(whole, indexed)


def kernel_launches(run: Callable[[], object], iterations: int = 10, warm: int = 3) -> list[tuple[str, float]]:
    """Every GPU kernel, copy and fill of `iterations` calls of `run`: its name and its microseconds, in launch order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(iterations):
            run()
        torch.cuda.synchronize()
    # A range that the host named (an optimizer's step) is listed beside the kernels in it.
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    return [(event.name, float(event.time_range.elapsed_us())) for event in sorted(events, key=lambda e: e.time_range.start)]


def by_iteration(launches: Sequence[tuple[str, float]], iterations: int) -> list[list[tuple[str, float]]]:
    """Launches of each of so many iterations, which all launch as many kernels, one of the same name first.

    Raises:
        RuntimeError: they did not, or the profiler lost some.
    """
    number, odd = divmod(len(launches), iterations)
    found = [list(launches[start : start + number]) for start in range(0, number * iterations, number or 1)]
    if odd or not number or len({first[0] for first, *_ in found}) > 1:
        raise RuntimeError(f"the {len(launches)} launches that were profiled are not {iterations} times the same ones")
    return found


def kernel_times(run: Callable[[], object], iterations: int = 10, warm: int = 3) -> dict[str, list[float]]:
    """Microseconds of every launch of `kernel_launches`, per kernel name."""
    times: dict[str, list[float]] = {}
    for name, time_us in kernel_launches(run, iterations, warm):
        times.setdefault(name, []).append(time_us)
    return times

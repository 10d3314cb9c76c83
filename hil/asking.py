"""Ask cuBLAS which kernel it chooses for very many GEMMs, without running any.

A call is captured into a CUDA graph and never run: the graph's nodes name the kernels. That answers without noise what a timed
launch shows as a jump. Calls are captured 64 together, for beginning and ending a graph takes 1 ms and a call in it hundredths of
that: four processors beside an H200 were told 12 million answers in 4.4 minutes, most of them spent on drawing the shapes. Those
are drawn as `hil.launches` draws them. `hil.choices` teaches networks the answers.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hil.kernels.base import Shape
from hil.launches import drawn, takes
from hil.timing import POOL_ELEMENTS, BufferPool
from perfmodel.choice import PARTS, Choice, asked, parts_of
from perfmodel.hardware import HardwareSpec
from perfmodel.judge import SHAPE
from perfmodel.kernels import BF16_BATCHED, KERNELS

KERNELS_ASKED = (
    "torch/bf16", "torch/bf16_batched", "torch/fp8_tensorwise_fast", "torch/fp8_tensorwise_split", "torch/fp8_block128",
)  # fmt: skip
LAYOUTS_ASKED = tuple(name for name, spec in KERNELS.items() if spec.across)
"""bf16 products that read an operand across or add a bias: asked where they are named, for `perfmodel.fit_layouts`."""
# What draws products that are few and large.
_GROUPED = "torch/fp8_grouped_rowwise_fast"
# Shapes drawn at once, of all kinds, again of many products, of few large ones, of any sizes, of a short K and between the round
# sizes; most values of a result; bytes that torch may keep before it gives back what is free.
_DRAWN, _MOST_OUTPUTS, _KEPT_BYTES = (600, 1200, 500, 400, 400, 1500), 2**29, 5e9
# Likewise of the largest calls: values of a result, and of both halves of the operands.
_LARGE_OUTPUTS, _LARGE_POOL = 2**30, 2**32
_KERNEL_NODE, _MEMSET_NODE, _RELAXED = 0, 2, 2
# Calls in one graph.
_TOGETHER = 64


class _Node(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS_v2` of the driver."""

    _fields_ = [
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("parameters", ctypes.c_void_p), ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    ]  # fmt: skip


class Recorder:
    """Names the kernels of calls without running them."""

    def __init__(self) -> None:
        """Take a stream of its own: the default one cannot be captured."""
        import torch

        self._driver = ctypes.CDLL("libcuda.so.1")
        self.stream = torch.cuda.Stream()
        self._names: dict[int, str] = {}

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._driver, function)(*arguments):
            raise RuntimeError(f"{function} fails with {status}")

    def names(self, launch: Callable[[], Any]) -> list[str]:
        """Names of the kernels that a call launches, in order; "memset" where it clears memory.

        Call it inside `torch.cuda.stream(recorder.stream)`, after one call of that kind outside a capture.

        Raises:
            RuntimeError: the call or its capture fails.
        """
        (found,) = self.names_of_each([launch])
        if found is None:
            raise RuntimeError("the call cannot be captured")
        return found

    def names_of_each(self, launches: Sequence[Callable[[], Any]]) -> list[list[str] | None]:
        """`names` of several calls captured together, which is quicker; None for one that fails.

        Raises:
            RuntimeError: the capture fails.
        """
        stream, graph, total = ctypes.c_void_p(self.stream.cuda_stream), ctypes.c_void_p(), ctypes.c_size_t()
        status, number = ctypes.c_int(), ctypes.c_ulonglong()
        ends, failed = [0], list[bool]()
        self._call("cuStreamBeginCapture_v2", stream, _RELAXED)
        try:
            for launch in launches:
                try:
                    launch()
                    failed.append(False)
                except (RuntimeError, ValueError):
                    failed.append(True)
                found = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph)
                self._call("cuStreamGetCaptureInfo_v2", stream, *found, None, None)
                self._call("cuGraphGetNodes", graph, None, ctypes.byref(total))
                ends.append(total.value)
        finally:
            ended = self._driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        if ended:
            raise RuntimeError(f"cuStreamEndCapture fails with {ended}")
        try:
            nodes = (ctypes.c_void_p * total.value)()
            if total.value:
                self._call("cuGraphGetNodes", graph, nodes, ctypes.byref(total))
            # In the order in which they were added.
            names = [self._name(ctypes.c_void_p(node)) for node in nodes[: total.value]]
            return [
                None if fails else [name for name in names[begin:end] if name]
                for fails, begin, end in zip(failed, ends, ends[1:], strict=False)
            ]
        finally:
            self._driver.cuGraphDestroy(graph)

    def _name(self, node: ctypes.c_void_p) -> str | None:
        kind, found = ctypes.c_int(), _Node()
        self._call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value != _KERNEL_NODE:
            return "memset" if kind.value == _MEMSET_NODE else None
        self._call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(found))
        key = found.function or found.kernel
        if key not in self._names:
            name = ctypes.c_char_p()
            getter = "cuFuncGetName" if found.function else "cuKernelGetName"
            self._call(getter, ctypes.byref(name), ctypes.c_void_p(key))
            self._names[key] = (name.value or b"").decode()
        return self._names[key]


def shapes_to_ask(kernels: Sequence[str], seed: int, large: bool = False) -> list[Shape]:
    """A few thousand shapes for the kernels asked, a third of them between the round sizes; or `large` alone."""
    everything, batched, grouped, *apart = _DRAWN
    if large:
        return drawn(everything, seed, kernels, which="large")
    more = (
        drawn(batched, seed + 5, (BF16_BATCHED,)) + drawn(grouped, seed + 6, (_GROUPED,))
        if any(map(_is_batched, kernels))
        else []
    )
    for number, (count, which) in enumerate(zip(apart, ("odd", "short", "broad"), strict=True), 7):
        more += drawn(count, seed + number, kernels, which=which)
    return drawn(everything, seed, kernels) + more


def _is_batched(kernel: str) -> bool:
    return KERNELS[kernel].kind == "batched_gemm"


def keys_of(shapes: pd.DataFrame) -> npt.NDArray[np.uint64]:
    """A number for each row's shape, (rows,), equal for equal shapes: two million of them are quickly sent to a process."""
    return np.asarray(pd.util.hash_pandas_object(shapes[SHAPE].astype(np.int64), index=False), dtype=np.uint64)


class _Answers:
    """What a recorder was told, call by call.

    Attributes:
        rows: Kernels and shapes of those that did not fail.
    """

    def __init__(self, recorder: Recorder, pool: BufferPool) -> None:
        """Begin with none."""
        self._recorder, self._pool = recorder, pool
        self.rows: list[tuple[str, int, int, int, int]] = []
        self._parts: list[tuple[int, ...]] = []
        self._encoded: dict[tuple[str, ...], tuple[int, ...]] = {}

    def add(self, calls: Sequence[tuple[str, Shape]]) -> None:
        """Ask about a few calls, in one graph."""
        import torch

        launches = [_launch(*call, self._pool) for call in calls]
        for (name, shape), names in zip(calls, self._recorder.names_of_each(launches), strict=True):
            if names is None:
                continue
            found = tuple(names)
            if found not in self._encoded:
                self._encoded[found] = parts_of(found)
            self.rows.append((name, shape.m, shape.n, shape.k, shape.groups))
            self._parts.append(self._encoded[found])
        if torch.cuda.memory_reserved() > _KEPT_BYTES:
            torch.cuda.empty_cache()

    def table(self) -> pd.DataFrame:
        """Rows of `kernel`, the shape and `PARTS`."""
        found = pd.DataFrame(self.rows, columns=["kernel", *SHAPE])
        return found.assign(**dict(zip(PARTS, np.array(self._parts).reshape(-1, len(PARTS)).T, strict=True)))


def _are_among(keys: npt.NDArray[np.uint64], known: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which of a few keys are among very many, ascending ones: `np.isin` would sort all of these at every call."""
    place = np.searchsorted(known, keys)
    return np.asarray(known[np.minimum(place, len(known) - 1)] == keys) if len(known) else np.zeros(len(keys), dtype=np.bool_)


def _launch(kernel: str, shape: Shape, pool: BufferPool) -> Callable[[], Any]:
    """A call to record, which takes memory for scales now and not when it is captured."""
    from hil.kernels import RUNNERS

    return partial(RUNNERS[kernel].bind(shape, pool), 0)


def worth_asking(
    kernel: str, shapes: pd.DataFrame, choice: Choice, hardware: HardwareSpec, share: float, generator: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Which shapes to ask of a kernel, (rows,): those in whose choice a network is in doubt, and a share of the others.

    Most of what is asked at random the network knows already, and what it does not lies along the borders between two kernels.
    """
    m, n, k, groups = (shapes[name].to_numpy(dtype=np.float64) for name in SHAPE)
    _, doubt = choice.told(asked(kernel, m, n, k, groups, hardware))
    return (doubt > 0) | (generator.random(len(shapes)) < share)


def answers(
    kernels: Sequence[str],
    number: int,
    seed: int,
    known: npt.NDArray[np.uint64],
    seconds: float,
    most: int,
    told: Mapping[str, Choice] | None = None,
    hardware: HardwareSpec | None = None,
    share: float = 1.0,
    large: bool = False,
) -> pd.DataFrame:
    """What one process is told: rows of `kernel`, the shape and `PARTS`.

    Args:
        kernels: That are asked.
        number: Of the process.
        seed: Seeds the shapes, with `number`.
        known: `keys_of` shapes to leave out.
        seconds: When to stop.
        most: Rows to stop at.
        told: Networks of what is known, by kernel: with `hardware`, what they are sure of is asked by `share` alone.
        hardware: The GPU that they are asked for.
        share: Of the calls of which they are sure, those to ask.
        large: Ask of the largest batches alone (`hil.shapes.large_shapes`); it takes 13 GB for operands.
    """
    import torch

    until, most_outputs = time.time() + seconds, _LARGE_OUTPUTS if large else _MOST_OUTPUTS
    recorder, pool = Recorder(), BufferPool(elements=_LARGE_POOL if large else POOL_ELEMENTS)
    told_now = _Answers(recorder, pool)
    seen, known, generator = set[int](), np.sort(known), np.random.default_rng([seed, number])
    # Far from those of other processes and of runs with other seeds.
    first = int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
    with torch.cuda.stream(recorder.stream):
        _call_once(kernels, pool)
        for turn in range(1_000_000):
            drawn_now = shapes_to_ask(kernels, first + 10 * turn, large)
            frame = pd.DataFrame([(s.m, s.n, s.k, s.groups) for s in drawn_now], columns=SHAPE)
            wanted = {
                name: worth_asking(name, frame, told[name], hardware, share, generator)
                for name in kernels
                if told and hardware and name in told
            }
            keys = keys_of(frame)
            calls = list[tuple[str, Shape]]()
            for place, (shape, key, left_out) in enumerate(
                zip(drawn_now, keys.tolist(), _are_among(keys, known).tolist(), strict=True)
            ):
                if left_out or key in seen or shape.groups * shape.m * shape.n > most_outputs:
                    continue
                seen.add(key)
                calls += [(name, shape) for name in kernels if takes(name, shape) and (name not in wanted or wanted[name][place])]
            for first_call in range(0, len(calls), _TOGETHER):
                some = calls[first_call : first_call + min(_TOGETHER, most - len(told_now.rows))]
                if time.time() > until or not some:
                    return told_now.table()
                told_now.add(some)
    raise AssertionError


def asked_of(calls: Sequence[tuple[str, Shape]]) -> pd.DataFrame:
    """What is told of calls: rows of `kernel`, the shape and `PARTS`, without those that fail.

    They are of `KERNELS_ASKED` or `LAYOUTS_ASKED`. Progress goes to stderr: an H100 takes 28 s for 68,602 (`python -m hil.asked
    --out data/h100`).
    """
    import torch

    recorder, pool = Recorder(), BufferPool()
    told = _Answers(recorder, pool)
    with torch.cuda.stream(recorder.stream):
        _call_once(tuple({name for name, _ in calls}), pool)
        for start in range(0, len(calls), _TOGETHER):
            told.add(calls[start : start + _TOGETHER])
            if start % (100 * _TOGETHER) == 0:
                print(f"\r{start} of {len(calls)} calls", end="", file=sys.stderr, flush=True)
    print(f"\r{len(calls)} of {len(calls)} calls", file=sys.stderr)
    return told.table()


def _call_once(kernels: Sequence[str], pool: BufferPool) -> None:
    """What a kernel's first call does beside it must not be captured."""
    import torch

    from hil.kernels import RUNNERS

    small = Shape(256, 256, 256, 1)
    for name in kernels:
        RUNNERS[name].bind(replace(small, groups=2) if _is_batched(name) else small, pool)(0)
    torch.cuda.synchronize()

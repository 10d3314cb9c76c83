"""The `loka/` kernels on a Hopper GPU: the same bits as `numerics`, inside a CUDA graph too."""

import random

import pytest
import torch

from hil.kernels.base import Shape
from hil.kernels.loka_gemm import LOKA_GEMM_RUNNERS, fp8_gemm, parts_of, plan_of
from hil.kernels.loka_quantize import (
    LOKA_QUANTIZE_RUNNERS,
    SCALINGS,
    quantize,
    quantize_delayed,
    quantize_dual,
    quantize_transposed,
)
from hil.timing import BufferPool, capture
from numerics import fp8_matmul
from numerics import quantize as reference

RUNNERS = (*LOKA_QUANTIZE_RUNNERS, *LOKA_GEMM_RUNNERS)


@pytest.fixture(scope="module")
def pool() -> BufferPool:
    return BufferPool(elements=2**27)


def assert_is(got, source, scaling):
    # On the CPU: another implementation of `numerics` than the one under test.
    wanted = reference(source.contiguous().cpu(), f"e4m3/{scaling}")
    codes, scales = (part.cpu() for part in got)
    assert torch.equal(codes.view(torch.uint8), wanted.codes) and torch.equal(scales, wanted.scales)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_quantizers_are_numerics(scaling):
    draw = random.SystemRandom()
    for multiple in (1, 4, 128):
        step = 128 if "block" in scaling else multiple
        # The reference is the CPU's: no more than it does in a second.
        rows, columns = (step * draw.randint(1, 2048 // step) for _ in range(2))
        x = torch.randn(rows, columns, device="cuda").mul(torch.randn(rows, 1, device="cuda").exp()).bfloat16()
        assert_is(quantize(x, scaling), x, scaling)
        assert_is(quantize_transposed(x, scaling), x.t(), scaling)
        row_major, turned = quantize_dual(x, scaling)
        assert_is(row_major, x, scaling)
        assert_is(turned, x.t(), scaling)


@pytest.mark.parametrize("shape", [(40000, 6), (5, 2050), (700, 4100), (513, 8192), (3, 16384), (5, 16386), (2, 40000)])
def test_rows_of_any_length(shape):
    x = torch.randn(shape, device="cuda").mul(torch.randn(shape[0], 1, device="cuda").exp()).bfloat16()
    x[1] = 0
    assert_is(quantize(x, "rowwise"), x, "rowwise")


@pytest.mark.parametrize("shape", [(4100, 2050), (4096, 2048), (8192, 4104)])
def test_tensors_of_more_tiles_than_programs(shape):
    """Of which a program holds two, and reads others again."""
    x = torch.randn(shape, device="cuda").bfloat16()
    row_major, turned = quantize_dual(x, "tensorwise")
    assert_is(row_major, x, "tensorwise")
    assert_is(turned, x.t(), "tensorwise")
    assert_is(quantize_transposed(x, "tensorwise"), x.t(), "tensorwise")


@pytest.mark.parametrize(
    "shape", [(8192, 1024), (8196, 1022), (1024, 8192), (1020, 8194), (4096, 2052), (260, 130), (4, 2), (4, 514)]
)
def test_both_layouts_under_scales_of_lines(shape):
    """In two launches where few tiles share a line, in three where many do."""
    x = torch.randn(shape, device="cuda").mul(torch.randn(shape[0], 1, device="cuda").exp()).bfloat16()
    x[3] = 0
    row_major, turned = quantize_dual(x, "rowwise")
    assert_is(row_major, x, "rowwise")
    assert_is(turned, x.t(), "rowwise")


def test_delayed_returns_the_new_amax():
    for shape in ((1, 1), (4096, 2048), (333, 17)):
        x = torch.randn(shape, device="cuda").bfloat16()
        codes, scale, amax = quantize_delayed(x, torch.full((), 2.0, device="cuda"), torch.zeros((), device="cuda"))
        assert amax == x.abs().max() and scale.item() == torch.tensor(2.0).div(448).item()
        assert torch.equal(codes.float(), (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_programs_of_one_launch_meet_whatever_runs_beside():
    """Launches on two streams and replays of two graphs at once, of sizes that take from one program to all."""
    sizes = [(1, 2), (128, 128), (1000, 512), (4096, 2048), (8192, 4096)]
    inputs = [torch.randn(size, device="cuda").mul(2.0**i).bfloat16() for i, size in enumerate(sizes)]
    columns = [reference(x.t().contiguous().cpu(), "e4m3/rowwise") for x in inputs]
    wanted = [*(reference(x.cpu(), "e4m3/tensorwise") for x in inputs), *columns, *columns]

    def every():
        made = [quantize(x, "tensorwise") for x in inputs] + [quantize_transposed(x, "rowwise") for x in inputs]
        return made + [quantize_dual(x, "rowwise")[1] for x in inputs]

    every()
    streams, graphs, kept = [torch.cuda.Stream() for _ in range(4)], [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            kept.append(every())
    torch.cuda.synchronize()
    for turn in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if index < 2:
                    graphs[index].replay()
                else:
                    kept += [every()] if turn % 5 == 0 else []
    torch.cuda.synchronize()
    for results in kept:
        for (codes, scale), expected in zip(results, wanted, strict=True):
            assert torch.equal(codes.view(torch.uint8).cpu(), expected.codes) and torch.equal(scale.cpu(), expected.scales)


def test_captured_launches_have_places_of_their_own(monkeypatch):
    """Each its own; where none is left, two launches do the same."""
    from numerics import gpu_meeting

    x = torch.randn(512, 1024, device="cuda").bfloat16()
    wanted = quantize(x, "tensorwise"), *quantize_dual(x, "tensorwise")
    ready = gpu_meeting._ready[x.device]
    for left in (len(ready), 0):
        monkeypatch.setitem(gpu_meeting._ready, x.device, ready[:left])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = quantize(x, "tensorwise"), *quantize_dual(x, "tensorwise")
        assert len(gpu_meeting._ready[x.device]) == max(left - 2, 0)
        graph.replay()
        torch.cuda.synchronize()
        for (codes, scale), (expected, expected_scale) in zip(made, wanted, strict=True):
            assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(scale, expected_scale)


def test_no_memory_of_a_captured_launch_is_given_to_others(monkeypatch):
    """Graphs whose launches took the last of the places that were made at once, beside tensors that are made afterwards."""
    from numerics import gpu_meeting

    monkeypatch.setattr(gpu_meeting, "_READY", 4)
    x = torch.randn(512, 1024, device="cuda").bfloat16()
    monkeypatch.setitem(gpu_meeting._ready, x.device, [])
    graphs = [capture(lambda _: quantize(x, "tensorwise"), 4) for _ in range(8)]
    assert len(gpu_meeting._ready[x.device]) == 0
    others = [torch.full((4, gpu_meeting.ROOM), -1, device="cuda") for _ in range(64)]
    for graph, _ in graphs:
        graph.replay()
    torch.cuda.synchronize()
    assert all(bool((other == -1).all()) for other in others)
    for _, results in graphs:
        for result in results:
            assert_is(result, x, "tensorwise")


def sampled(size):
    return torch.linspace(0, size - 1, min(size, 64)).long().unique().cuda()


def fp8(rows, k):
    spread = torch.randn(rows, 1, device="cuda").exp()
    return torch.randn(rows, k, device="cuda").mul(spread).clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("fast", [True, False])
def test_gemm_is_the_emulator(rowwise, fast):
    draw = random.SystemRandom()
    shapes = [
        (64, 64, 65536),
        (128, 256, 16384),
        (16, 512, 8192),
        (1, 1, 16),
        (1, 400, 1040),
        (300, 13, 20000),
        (2048, 1024, 512),
    ]
    shapes += [(draw.randint(1, 700), draw.randint(1, 700), 16 * int(2 ** draw.uniform(0, 11))) for _ in range(8)]
    for m, n, k in shapes:
        a, b = fp8(m, k), fp8(n, k)
        scale_a, scale_b = (torch.rand(rows if rowwise else 1, device="cuda") + 0.5 for rows in (m, n))
        got = fp8_gemm(a, b, scale_a, scale_b, fast=fast)
        i, j = sampled(m), sampled(n)
        wanted = fp8_matmul(
            a.view(torch.uint8)[i], b.view(torch.uint8)[j], format_a="e4m3", format_b="e4m3",
            accumulation="hopper_fast" if fast else "hopper_split", split_k=parts_of(k, plan_of(m, n, k, fast).parts),
            scale_a=scale_a[i] if rowwise else scale_a, scale_b=scale_b[j] if rowwise else scale_b, out_dtype=torch.bfloat16,
        )  # fmt: skip
        assert torch.equal(got[i][:, j], wanted), f"{(m, n, k)} {plan_of(m, n, k, fast)}"


@pytest.mark.parametrize("runner", RUNNERS, ids=lambda runner: runner.name)
def test_replayed_graphs_give_what_calls_give(runner, pool):
    """Two launches in one graph, of which the second is checked against a plain call after three replays."""
    shape = Shape(256, 128, 16384) if "fp8" in runner.name else Shape(2048, 1, 1024)
    launch = runner.bind(shape, pool)
    wanted = launch(1)
    graph, results = capture(launch, 2)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert runner.error(shape, pool, results[0]) <= runner.limit
    for got, expected in zip(tensors(results[1]), tensors(wanted), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def tensors(result):
    """Those of a result, however nested."""
    return [result.reshape(-1)] if isinstance(result, torch.Tensor) else [t for part in result for t in tensors(part)]


def test_results_are_the_same_every_time():
    a, b, one = fp8(256, 65536), fp8(128, 65536), torch.ones(1, device="cuda")
    first = fp8_gemm(a, b, one, one, fast=True)
    assert all(torch.equal(fp8_gemm(a, b, one, one, fast=True), first) for _ in range(20))

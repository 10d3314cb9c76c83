"""The kernels that a capture finds beside those that torch.compile makes for an H200, on a machine without a GPU.

    python benchmarks/fusion.py dlrm-production dcnv2-production wukong-small --batch 2048
    python benchmarks/fusion.py dcnv2-production --batch 8192 --variant naive_tensorwise

torch.compile lowers, fuses and writes its Triton kernels for CUDA tensors that have no data; nothing is run, so that no GPU
is needed. Its own account of their bytes stands beside the capture's, in total and per kind of kernel. Both see the same
graphs (tables cut to 10,000 rows, their gradients dense). Where a kernel picks scattered elements the capture counts the
32-byte sectors that the GPU fetches, torch.compile the elements: gradients of looked-up rows in Wukong and DLRM. With a
variant, torch.compile's are those of the model as torchao converts it, the capture's those of the shipped specification's loops
with these GEMMs in FP8.
Reaches into private interfaces: written for torch 2.13.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
from torch._guards import TracingContext, tracing
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from hil.compiled import Kernel, recorded
from loka_sim import step_loops
from loka_sim.capture import trace
from loka_sim.capture.lowering import lower
from loka_sim.dispatch.baselines import BASELINES
from loka_sim.dispatch.candidates import SiteShape, operand_makers
from loka_sim.fp8_step import taken
from loka_sim.fusion import RawGroup, kernels, measured
from loka_sim.loops import Lowered
from loka_sim.quantized_loops import quantized
from loka_sim.resolve import resolve_model as zoo_spec
from loka_sim.validation.runnable import TABLE_ROWS
from loka_sim.validation.step_time import converted_by_torchao
from loka_sim.zoo import build, example_inputs, input_shape


class _H200:
    """What torch.compile asks of a device's properties."""

    name, major, minor, multi_processor_count, warp_size = "NVIDIA H200", 9, 0, 132, 32
    regs_per_multiprocessor, max_threads_per_multi_processor, max_threads_per_block = 65536, 2048, 1024
    total_memory, L2_cache_size, shared_memory_per_block_optin, gcnArchName = 150 * 2**30, 62914560, 232448, ""


class _Written(Exception):
    """The code is there; it is not to be run."""


@contextmanager
def pretended_gpu(codes: list[str]) -> Iterator[Callable[[Any], None]]:
    """Inside, torch.compile's back end takes this machine for one with an H200, and stops once its code is written."""
    from torch._dynamo.device_interface import CudaInterface
    from torch.utils import _triton

    modes: list[Any] = []

    def stop(lowering: Any) -> None:
        written, _ = lowering.codegen()
        codes.append(written.value)
        raise _Written

    answers = {
        "get_device_properties": lambda device=None: _H200, "current_device": lambda: 0, "device_count": lambda: 1,
        "get_compute_capability": lambda device=None: 90, "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None, "is_available": lambda: True,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(answer)))
        stack.enter_context(mock.patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda d=None: _H200)))
        for name, value in (
            ("get_device_properties", lambda device=None: _H200), ("get_device_capability", lambda device=None: (9, 0)),
            ("current_device", lambda: 0), ("device_count", lambda: 1),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", stop))
        stack.enter_context(mock.patch.object(compile_fx, "fake_tensor_prop", lambda *a, **k: modes[-1]))
        stack.enter_context(mock.patch.object(compile_fx, "_check_triton_bf16_support", lambda graph: None))
        stack.enter_context(mock.patch.object(_triton, "triton_hash_with_backend", lambda: "none"))
        stack.enter_context(mock.patch.object(_triton, "triton_backend", lambda: None))
        table = torch._decomp.decomposition_table
        add = torch.ops.aten._unsafe_masked_index_put_accumulate.default
        stack.enter_context(mock.patch.dict(table, {add: lambda x, mask, ids, values: x.new_empty(x.shape)}))
        _triton.has_triton.cache_clear()  # asked before, it said no
        stack.callback(_triton.has_triton.cache_clear)
        yield modes.append


def on_cuda(graph: torch.fx.GraphModule, mode: FakeTensorMode) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A graph traced on meta as if it had been on CUDA, and its inputs."""
    graph = copy.deepcopy(graph)

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            with mode:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        return type(value)(map(moved, value)) if isinstance(value, tuple | list) else value

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = moved(node.meta["val"])
        node.args, node.kwargs = torch.utils._pytree.tree_map_only(
            torch.device, lambda _: torch.device("cuda", 0), (node.args, node.kwargs)
        )
    graph.recompile()
    return graph, [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def by_torch_compile(graphs: dict[str, torch.fx.GraphModule]) -> list[tuple[str, int, Kernel]]:
    """Name, launches and account of every Triton kernel of the graphs."""
    codes: list[str] = []
    with pretended_gpu(codes) as now, recorded() as found, torch.no_grad():
        for phase, graph in graphs.items():
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            now(mode)
            moved, inputs = on_cuda(graph, mode)
            try:
                with tracing(TracingContext(mode)):
                    compile_fx.compile_fx_inner(moved, inputs, is_backward=phase == "backward")
            except Exception as error:
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, _Written):
                    cause = cause.__cause__ or cause.__context__
                if cause is None:
                    raise
    return [(name, sum(code.count(f" {name}.run(") for code in codes), kernel) for name, kernel in found.items()]


def kind_of(name: str, kernel: Kernel) -> str:
    """torch.compile's kernels in the capture's words, as far as their names tell."""
    if name.startswith("triton_poi"):
        return "fill" if kernel.read_bytes == 0 else "pointwise"
    return "reduction"


def graphs_of(name: str, batch: int, variant: str) -> dict[str, torch.fx.GraphModule]:
    """A zoo model's forward and backward as the capture traces them, with tables that fit, in bf16 or as torchao converts it."""
    shape = input_shape(name)
    fewer: dict[str, Any] = {"rows": tuple(min(rows, TABLE_ROWS) for rows in shape.rows)}
    if shape.sequence_rows:
        fewer["sequence_rows"] = min(shape.sequence_rows, TABLE_ROWS)
    shape = dataclasses.replace(shape, **fewer)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.Graph, scaled_at: int = 0) -> Any:
        if not scaled_at:
            graphs.append(copy.deepcopy(graph.owning_module))
        return Lowered()

    model = build(name, shape=shape)
    if variant != "bf16":
        model = converted_by_torchao(variant)(model.bfloat16())
    with mock.patch.object(trace, "lower", keep), mock.patch.object(trace, "_marked_tables", lambda model: model):
        trace.traced(model, example_inputs(name, batch, shape=shape), None, batch, batch, 0)
    return dict(zip(("forward", "backward"), graphs, strict=True))


def captured(name: str, batch: int, variant: str, graphs: dict[str, torch.fx.GraphModule]) -> list[RawGroup]:
    """Our own kernels: of the same graphs, or of the specification's loops converted."""
    if variant == "bf16":
        lowered = {phase: lower(graph.graph) for phase, graph in graphs.items()}
    else:
        spec = zoo_spec(name).at_batch(batch)
        baseline = next(baseline for baseline in BASELINES if baseline.name == variant)
        assigned = {}
        for site in spec.sites:
            shape = SiteShape.of(site, batch)
            assignment = baseline.assignment(site, shape)
            passes = taken(shape, assignment, operand_makers(shape, assignment))
            assigned |= {(site.name, which): operands for which, operands in passes.items()}
        lowered = step_loops.phases(quantized(step_loops.read(spec.loops, batch), assigned))
    return [group for graph in lowered.values() for group in measured(graph, kernels(graph))]


def compared(name: str, batch: int, variant: str = "bf16") -> dict[str, Any]:
    """Kernels and bytes of one model, by the capture and by torch.compile."""
    graphs = graphs_of(name, batch, variant)
    own_bytes: Counter[str] = Counter()
    own_number: Counter[str] = Counter()
    for group in captured(name, batch, variant, graphs):
        kind = {"row": "reduction", "column": "reduction", "both": "reduction", "fill": "fill"}.get(group.kind, "pointwise")
        own_bytes[kind] += group.read_bytes + group.written_bytes
        own_number[kind] += 1
    their_bytes: Counter[str] = Counter()
    their_number: Counter[str] = Counter()
    theirs = by_torch_compile(graphs)
    for kernel_name, launches, kernel in theirs:
        kind = kind_of(kernel_name, kernel)
        their_bytes[kind] += launches * (kernel.read_bytes + kernel.written_bytes)
        their_number[kind] += launches
    tables = [entry for entry in theirs if "embedding_dense_backward" not in entry[0]]
    return {
        "model": name,
        "batch": batch,
        "variant": variant,
        "torch": torch.__version__,
        "capture": {"kernels": dict(own_number), "bytes": dict(own_bytes)},
        "torch_compile": {"kernels": dict(their_number), "bytes": dict(their_bytes)},
        "but_gradients_of_tables": {
            "kernels": sum(launches for _, launches, _ in tables),
            "bytes": sum(launches * (kernel.read_bytes + kernel.written_bytes) for _, launches, kernel in tables),
        },
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--variant", default="bf16", help="bf16, naive_tensorwise, filter_tensorwise, ... (needs torchao)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch._inductor.config.compile_threads = 1
    rows = []
    print(f"{'model':24s} {'kernels':>8s} {'compile':>8s} {'MB':>10s} {'compile':>10s} {'off':>7s}")
    for name in options.models:
        row = compared(name, options.batch, options.variant)
        rows.append(row)
        own, theirs = (row[who] for who in ("capture", "torch_compile"))
        sizes = [sum(side["bytes"].values()) / 1e6 for side in (own, theirs)]
        numbers = [sum(side["kernels"].values()) for side in (own, theirs)]
        print(f"{name:24s} {numbers[0]:8d} {numbers[1]:8d} {sizes[0]:10,.1f} {sizes[1]:10,.1f} {sizes[0] / sizes[1] - 1:+7.1%}")
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A model's forward and backward as torch.compile sees them, on tensors without data: its kernels beside the GEMMs."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import global_decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from loka_sim.capture import twin
from loka_sim.capture.attention import FusedAttention
from loka_sim.capture.calls import MOVES, plain
from loka_sim.capture.lowering import lower
from loka_sim.capture.operators import ATTENTION, operator_name
from loka_sim.loops import Lowered
from loka_sim.step_loops import SCALED

# A table's dense gradient is filled and converted row by row whatever the batch; what that costs is a matter of the tables
# and of how they are trained. The twin's tables have a number of rows (a prime) that tells such kernels from all others.
TABLE_ROWS = 1_000_003
DTYPE = torch.bfloat16


def traced(
    model: nn.Module, inputs: Any, loss: Callable[[Any], torch.Tensor] | None, old: int, new: int, batch_dim: int
) -> dict[str, Lowered]:
    """The loops of a model's `forward` and `backward`, its GEMMs among them, parameters and activations in bf16.

    What the model makes itself, such as a mask, has the type and the device that it says, or torch's defaults. Where that
    fails it is tried again with bf16 as the default type, and all on one device.

    Args:
        model: The module; neither run nor changed.
        inputs: As `capture` takes them.
        loss: From the model's output to a scalar, compiled with it; the outputs' own gradients where None.
        old: Batch of `inputs`.
        new: Batch to trace at.
        batch_dim: Dimension of the inputs that is the batch.

    Raises:
        Exception: whatever a model raises that cannot be traced.
    """
    try:
        return _traced(model, inputs, loss, old, new, batch_dim)
    except Exception as error:
        if not re.search("scalar type|dtype|device|CUDA|NVIDIA", str(error)):
            raise
        return _traced(model, inputs, loss, old, new, batch_dim, constants_too=True)


class _OneDevice(TorchFunctionMode):
    """What names a device, or takes the default one, gets the trace's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = plain(getattr(func, "__name__", "")), dict(kwargs or {})
        if name in MOVES and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if kwargs.get("device") is not None or func in _device_constructors():
            kwargs["device"] = torch.device("meta")
        if name == "to":
            args = (args[0], *("meta" if isinstance(arg, torch.device | str) else arg for arg in args[1:]))
        return func(*args, **kwargs)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _partitioned(graph: fx.GraphModule, inputs: Any, **more: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward, after what torch.compile changes in both together.

    Its passes fold constants, which it cannot tell from others where all tensors are on meta.
    """
    from functorch.compile import min_cut_rematerialization_partition
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    _claim(graph, "cpu")
    with V.set_fake_mode(detect_fake_mode([node.meta.get("val") for node in graph.graph.nodes])):
        graph = joint_graph_passes(graph)
    # What drew random numbers before a pass put another operator there is left, without users: torch counts it as impure.
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "call_function")
    _claim(graph, "meta")
    return min_cut_rematerialization_partition(graph, inputs, **more)


def _claim(graph: fx.GraphModule, device: str) -> None:
    """Let all tensors of a graph be on this device."""
    claimed = torch.device(device)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(tensor.fake_mode, bare, claimed)

    # As its mode makes a fake tensor, without asking it for each of thousands: that takes five times as long.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        for node in graph.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = torch.utils._pytree.tree_map_only(torch.Tensor, moved, node.meta["val"])
            if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
                node.args = tuple(claimed if isinstance(value, torch.device) else value for value in node.args)
                node.kwargs = {name: claimed if isinstance(value, torch.device) else value for name, value in node.kwargs.items()}
    graph.recompile()


@contextlib.contextmanager
def _with_gradients() -> Iterator[None]:
    """Composite operators are taken apart on meta as on any other device.

    torch.compile's decompositions register kernels for meta of some (prelu, relu6, var, nll_loss, where, ...: torch 2.11, 2.13)
    that have no gradient of their own: run whole by such a kernel they would end the backward, silently.
    """
    meta, set_aside = torch._C.DispatchKey.Meta, dict[Any, Any]()
    for operator in global_decomposition_table["meta"] | global_decomposition_table["post_autograd"]:
        kernels = getattr(operator, "py_kernels", {})
        if meta in kernels and _registered(operator, "CompositeImplicitAutograd") and not _registered(operator, "Autograd"):
            set_aside[operator] = kernels.pop(meta)
            operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernel in set_aside.items():
            operator.py_kernels[meta] = kernel
            operator._dispatch_cache.clear()


def _registered(operator: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key))


def _traced(
    model: nn.Module,
    inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    old: int,
    new: int,
    batch_dim: int,
    constants_too: bool = False,
) -> dict[str, Lowered]:
    """`traced`, once: with what the model makes brought to bf16 and to one device, or as it is."""
    from functorch.compile import aot_function, make_boxed_func
    from torch._guards import detect_fake_mode
    from torch._inductor.decomposition import select_decomp_table

    graphs: dict[str, Lowered] = {}

    def keep(which: str) -> Callable[[fx.GraphModule, Any], Any]:
        def compiler(graph: fx.GraphModule, example: Any) -> Any:
            # Warns as it is imported: here that is quiet.
            from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape

            view_to_reshape(graph)
            if any(operator_name(node) in ATTENTION for node in graph.graph.nodes if node.op == "call_function"):
                # What a pass put there lies in memory otherwise than what it took the place of.
                FakeTensorProp(graph, mode=detect_fake_mode(example)).propagate_dont_convert_inputs(*example)
            remove_noop_ops(graph.graph)
            graph.recompile()
            graphs[which] = lower(graph.graph)
            if which == "backward":
                graphs[SCALED] = lower(graph.graph, scaled_at=new)
            return make_boxed_func(graph.forward)

        return compiler

    with contextlib.ExitStack() as stack:
        stack.enter_context(twin.quiet())
        if constants_too:
            stack.enter_context(_default_dtype(DTYPE))
            stack.enter_context(_OneDevice())
        # As in torch.compile: Python is written of the graphs that are run, not of each that a pass changed.
        stack.enter_context(_use_lazy_graph_module(True))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(FusedAttention())
        decompositions = select_decomp_table()
        stack.enter_context(_with_gradients())
        copy = _marked_tables(twin.hollow_module(model, "meta")).to(DTYPE)
        arguments = twin.hollow_inputs(inputs, "meta", old, new, batch_dim)
        arguments = torch.utils._pytree.tree_map_only(torch.Tensor, _in_bf16, arguments)
        parameters, buffers = dict(copy.named_parameters()), dict(copy.named_buffers())

        def forward(parameters: Any, buffers: Any, *arguments: Any, **named: Any) -> Any:
            output = torch.func.functional_call(copy, (parameters, buffers), arguments, named)
            return output if loss is None else loss(output)

        compiled = aot_function(
            forward,
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            partition_fn=_partitioned,
            decompositions=decompositions,
        )
        positional, named = twin.arguments(copy, arguments)
        scalar = twin.total(compiled(parameters, buffers, *positional, **named))
        if scalar is not None and scalar.requires_grad:
            scalar.backward()
    return graphs


def _in_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(DTYPE).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor


def _marked_tables(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            weight = module.weight
            rows = torch.empty(TABLE_ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device)
            module.weight = nn.Parameter(rows, requires_grad=weight.requires_grad)
    return model

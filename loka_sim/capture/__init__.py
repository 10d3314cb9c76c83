"""Model capture: a `ModelSpec` from any `torch.nn.Module`, without its memory and without changing it.

The model runs three times, forward and backward, on tensors that have shapes and no data: at the batch given, at twice
and at three times that batch. What reaches aten is recorded (`record`), what the model called is followed (`calls`),
and the three runs together say how each dimension depends on the batch (`fit`).
"""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel

from loka_sim.capture import twin
from loka_sim.capture.attention import FusedAttention
from loka_sim.capture.calls import Calls
from loka_sim.capture.fit import fit_fused, fit_sites, said
from loka_sim.capture.padding import Padding
from loka_sim.capture.record import Recorder, storage
from loka_sim.capture.trace import traced
from loka_sim.errors import UserError
from loka_sim.modelspec import Fused, ModelSpec, Site, Table

MULTIPLES = (1, 2, 3)  # two batches fix an affine dimension, the third checks it; multiples keep divisible what was


def capture(
    model: nn.Module,
    inputs: Any,
    *,
    name: str | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    batch_dim: int = 0,
    batch: int | None = None,
) -> ModelSpec:
    """Record every GEMM of a model's forward and backward, its other kernels, its embedding tables and its parameters.

    The model may lie on any device, `meta` among them; it is neither run nor changed: twins of it and of its inputs,
    with shapes and no data, are. Attention by `scaled_dot_product_attention`, or by products and a softmax that torch.compile
    takes for it, is one kernel where torch has one for its operands (see `attention`), else the products that it is made of.

    Args:
        model: The module, in training mode or not.
        inputs: Example inputs: a tuple or list of positional arguments, a dict of keyword arguments, or one argument;
            tensors may stand anywhere in them. Those whose size along `batch_dim` is the batch are resized with it.
        name: What to call the model; its class name if None.
        loss: From the model's output to the scalar whose gradient is taken; the sum of all floating outputs if None.
        batch_dim: Dimension of the input tensors that is the batch.
        batch: The inputs' batch; if None that of the first floating tensor in them, else see `twin.find_batch`.

    Raises:
        UserError: the model fails without data (the one line names the module, the operation and the mend), or does not take
            these inputs.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper: the capture needs the model as written
    batch = twin.find_batch(inputs, batch_dim, batch)
    twin.arguments(model, inputs)
    batches = [batch * multiple for multiple in MULTIPLES]
    try:
        runs = [_run(model, inputs, loss, batch, size, batch_dim, fake=False) for size in batches]
    except _Failure as failure:
        problem = failure.explained(model, inputs, batch)
        if not failure.needs_data:
            raise problem from failure.error
        try:  # fake tensors know more: the device that they claim, and sizes that only data decide
            runs = [_run(model, inputs, loss, batch, size, batch_dim, fake=True) for size in batches]
        except _Failure:
            raise problem from failure.error
    first = runs[0]
    sites, unaccounted = fit_sites(batches, [run.sites for run in runs])
    counted = [f"{what} ({said(flops, batch)})" for what, flops in first.unaccounted.items()]
    if sites and all(gemm.flops(batch) == gemm.flops(2 * batch) for site in sites for gemm in site.passes.values()):
        counted.append(
            f"a batch that GEMMs depend on: it was taken to be {batch}, dimension {batch_dim} of an input, and none does"
        )
    tables, dense = _tables(model, first, batch)
    fused, loops, sites, untraced = _fused(model, inputs, loss, batch, batch_dim, sites)
    return ModelSpec(
        name=name or type(model).__name__,
        batch=batch,
        sites=tuple(sites),
        tables=tables,
        dense_parameters=dense,
        unaccounted=(*unaccounted, *counted),
        fused=tuple(fused),
        loops=loops,
        untraced=untraced,
        source=f"{type(model).__module__}:{type(model).__qualname__}",
    )


def _fused(
    model: nn.Module, inputs: Any, loss: Callable[[Any], torch.Tensor] | None, batch: int, batch_dim: int, sites: list[Site]
) -> tuple[list[Fused], tuple[str, ...], list[Site], str]:
    """The kernels beside the GEMMs, their loops, the sites with what is padded, and why there are none where there are none."""
    batches = [batch, 2 * batch if batch % 8 == 0 else 9 * batch]  # what is no multiple of 8 is none in both
    try:
        with Padding().as_compiled(), _without_collections():
            runs = [traced(model, inputs, loss, batch, size, batch_dim) for size in batches]
        return fit_fused(batches, runs, sites)
    except Exception as error:  # anything that a model or a tracer may raise: the sites are known all the same
        return [], (), sites, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """A trace makes objects by the hundred thousand and keeps most of them: to look through them for cycles is a sixth of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Failure(Exception):
    """A run failed: in which module and operation, at which batch."""

    def __init__(self, module: str, operation: str, batch: int, error: Exception) -> None:
        super().__init__(str(error))
        self.module, self.operation, self.batch, self.error = module, operation, batch, error
        self.needs_data = isinstance(error, NotImplementedError) or bool(
            # `MetaFloatType` is a tensor's type in any message.
            re.search(r"[Mm]eta(?!\w*Type)|data-dependent|numpy|unallocated storage", str(error))
        )

    def explained(self, model: nn.Module, inputs: Any, batch: int) -> UserError:
        """The one line for the user."""
        lines = [line.strip() for line in str(self.error).splitlines() if line.strip()]
        reason = lines[0][:200] if lines else type(self.error).__name__
        where = f"{type(model).__name__}, module {self.module}, operation {self.operation}"
        if self.batch != batch:
            mend = f"take sizes from the inputs' shapes (it ran at batch {batch})"
            return UserError(f"{where}: fails at batch {self.batch}: {reason}; {mend}")
        if self.needs_data:
            mend = "let no shape or branch depend on tensor values, or write a spec file"
            return UserError(f"{where}: needs data, which a capture has not: {reason}; {mend}")
        if self.operation == "backward":
            return UserError(f"{where}: {reason}; mend the model, whose own training step fails so")
        return UserError(f"{where}: {reason}; {twin.mend(model, inputs)}")


def _run(
    model: nn.Module, inputs: Any, loss: Callable[[Any], torch.Tensor] | None, old: int, new: int, batch_dim: int, *, fake: bool
) -> Recorder:
    """One forward and backward at batch `new`, on meta or on fake tensors."""
    device = "cpu" if fake else "meta"
    fakes = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) if fake else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        stack.enter_context(twin.quiet())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(fakes)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # parts compiled by the user run as written
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        copy = twin.hollow_module(model, device)
        arguments = twin.hollow_inputs(inputs, device, old, new, batch_dim)
        tensors = {**dict(copy.named_buffers()), **dict(copy.named_parameters())}
        recorder = Recorder({storage(tensor): name for name, tensor in tensors.items()}, device)
        calls = Calls(recorder)
        stack.enter_context(_hooks(copy, recorder, calls))
        stack.enter_context(recorder)
        stack.enter_context(calls)
        stack.enter_context(FusedAttention())
        try:
            outputs = twin.call(copy, arguments)
            scalar = loss(outputs) if loss else twin.total(outputs)
            if scalar is not None and scalar.requires_grad:
                scalar.backward()
        except Exception as error:  # anything that a model may raise
            module, operation = calls.failed or (recorder.module, recorder.last_op or "forward")
            raise _Failure(module, operation, new, error) from error
    return recorder


@contextlib.contextmanager
def _hooks(model: nn.Module, recorder: Recorder, calls: Calls) -> Iterator[None]:
    """Let the recorder and the follower know which module is running."""
    names = {module: name or "(root)" for name, module in model.named_modules()}
    entered: list[tuple[nn.Module, Any]] = []

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            recorder.modules.append(names[module])
            entered.append((module, calls.enter(module, args)))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if module not in names:
            return
        while entered:  # modules that an exception left are above this one
            inner, state = entered.pop()
            recorder.modules.pop()
            calls.leave(state, result if inner is module else None)
            if inner is module:
                break

    before = nn.modules.module.register_module_forward_pre_hook(enter)
    after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _tables(model: nn.Module, run: Recorder, batch: int) -> tuple[tuple[Table, ...], int]:
    """Embedding tables (also those that the example did not look up) and the trainable parameters beside them."""
    parameters = dict(model.named_parameters())
    found = {name: Table(name, raw.rows, raw.dim, raw.pooling, raw.ids / batch) for name, raw in run.tables.items()}
    for name, module in model.named_modules():
        new = name not in found and f"{name}.weight" in parameters
        if new and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            pooling = module.mode if isinstance(module, nn.EmbeddingBag) else "none"
            found[name] = Table(name, module.num_embeddings, module.embedding_dim, pooling, 0.0)
    rows = {f"{name}.weight" for name in found} | set(found)
    dense = sum(parameter.numel() for name, parameter in parameters.items() if parameter.requires_grad and name not in rows)
    return tuple(found.values()), dense

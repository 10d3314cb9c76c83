"""A dispatch table at work: linear layers whose three GEMMs, and what quantizes their operands, are the kernels that it names.

    model = convert(model, "runs/wukong")
    model = torch.compile(model)

Unlike `loka-sim export`, which says in torchao's terms what torchao can express, this runs every library's kernels: a
quantizer that writes both layouts once, our own GEMMs, FBGEMM's. What torch quantizes with is traced, so that torch.compile
fuses it as it would for torchao; the other kernels are operators (`hil.operators`), which it keeps as they are.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hil import operators
from hil.kernels.base import E4M3
from hil.kernels.torch_memory import QUANTIZERS
from loka_sim.dispatch.candidates import OPERANDS
from loka_sim.dispatch.operands import TRANSPOSE
from loka_sim.dispatch.table import load
from loka_sim.dispatch.torchao_plan import convertible, module_of
from loka_sim.errors import DataError
from loka_sim.modelspec import PASSES
from perfmodel.kernels import KERNELS, library_of

BF16 = "torch/bf16"
Quantized = tuple[torch.Tensor, torch.Tensor]
Makers = tuple[str, str]
"""What quantizes a tensor as it is, and transposed; empty where that is not wanted."""


class Kernels(NamedTuple):
    """What a layer runs: every pass' GEMM, and what makes the readings of x (M, K), of the weight (N, K), of y's gradient."""

    output: str
    grad_input: str
    grad_weight: str
    x: Makers
    w: Makers
    g: Makers


def libraries(table: dict[str, Any]) -> set[str]:
    """Whose kernels a dispatch table names, quantizers included."""
    passes = [decided for site in table["sites"] for decided in site["passes"].values()]
    names = {decided["kernel"] for decided in passes} | {k for decided in passes for k in decided.get("quantizers", {}).values()}
    return {library_of(name) for name in names}


def convert(model: nn.Module, table: dict[str, Any] | Path | str) -> nn.Module:
    """Give a model's linear layers the kernels of a dispatch table, in place; parameters and state dict stay what they are.

    A GEMM that is no `torch.nn.Linear`'s stays in bf16, as does a module that is called more than once where its calls
    were decided differently. Convert before torch.compile.

    Args:
        model: The model that the table was made for.
        table: A dispatch table, its file, or the run folder that holds it.

    Returns:
        The model (a new module only where it is one linear layer itself).

    Raises:
        DataError: the table is not there or damaged; or a linear layer is the table's or the model's alone, is of another
            shape, or is none that can be converted; or no operator runs one of its kernels. Nothing was converted.
    """
    table = table if isinstance(table, dict) else load(table)
    chosen = plan(table)
    modules = dict(model.named_modules(remove_duplicate=False))
    _compare(modules, table, frozenset(chosen))
    for name, (kernels, _, _) in chosen.items():
        for kernel in {*kernels[:3], *kernels.x, *kernels.w, *kernels.g} - {""}:
            if not _can_run(kernel):
                raise DataError(f"layer {name}: no operator runs {kernel}; choose --libraries among torch, loka and fbgemm")
    converted: dict[nn.Module, nn.Module] = {}
    for name, (kernels, _, _) in chosen.items():
        layer = modules[name]
        assert isinstance(layer, nn.Linear)
        converted[layer] = TableLinear(layer, kernels)
    # Under every name that the model holds a layer by.
    for name, module in modules.items():
        if module in converted and name:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, converted[module])
    return converted.get(model, model)


def _compare(modules: dict[str, nn.Module], table: dict[str, Any], chosen: frozenset[str]) -> None:
    """Refuse a model whose linear layers are not the table's."""
    said = {module_of(site["name"]) for site in table["sites"]}
    said |= {(site["weight"] or "").rpartition(".")[0] for site in table["sites"]}
    differences = []
    for site in table["sites"]:
        name = module_of(site["name"])
        if convertible(site["name"], site["op"], site["weight"]):
            module = modules.get(name)
            fits = isinstance(module, nn.Linear) and (module.out_features, module.in_features) == (site["n"], site["k"])
            # Of a class with a forward of its own, only what is not converted may be.
            if not fits or (name in chosen and type(module) is not nn.Linear):
                has = "not there" if module is None else str(module).partition("\n")[0]
                differences.append(f"{name} is Linear({site['k']}, {site['n']}) in the table, and {has} in the model")
    known = {id(modules[name]) for name in said if name in modules}
    extra = [name for name, module in modules.items() if isinstance(module, nn.Linear) and id(module) not in known]
    differences += [f"{name} is not in the table" for name in extra]
    if differences:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise DataError(f"{'; '.join(differences[:3])}{more}. Make a table of this model with `loka-sim whatif MODEL --out DIR`")


def plan(table: dict[str, Any]) -> dict[str, tuple[Kernels, int, int]]:
    """Per linear module with an FP8 pass: what it runs, and its output and input features."""
    calls: dict[str, list[tuple[Kernels, int, int]]] = defaultdict(list)
    for site in table["sites"]:
        if convertible(site["name"], site["op"], site["weight"]):
            calls[module_of(site["name"])].append((_kernels(site["passes"]), site["n"], site["k"]))
    return {
        name: found[0]
        for name, found in calls.items()
        if len(set(found)) == 1 and any(KERNELS[kernel].is_fp8 for kernel in found[0][0][:3])
    }


def _kernels(passes: dict[str, Any]) -> Kernels:
    makers: dict[str, list[str]] = {tensor: ["", ""] for tensor in "xwg"}
    for name, decided in passes.items():
        spec = KERNELS[decided["kernel"]]
        for use, recipe in zip(OPERANDS[name], (spec.recipe_a, spec.recipe_b), strict=True):
            if spec.is_fp8:
                # Older tables knew torch's quantizers alone, and did not name them.
                usual = f"torch/quantize_{str(recipe).partition('/')[2]}{'_transposed' * use.transposed}"
                makers[use.tensor][use.transposed] = decided.get("quantizers", {}).get(use.tensor, usual)
    output, grad_input, grad_weight = (str(passes[name]["kernel"]) if name in passes else BF16 for name in PASSES)
    x, w, g = ((plain, turned) for plain, turned in makers.values())
    return Kernels(output, grad_input, grad_weight, x, w, g)


class TableLinear(nn.Linear):
    """A linear layer that runs a table's kernels.

    Args:
        layer: Whose parameters it takes.
        kernels: What it runs.
    """

    def __init__(self, layer: nn.Linear, kernels: Kernels) -> None:
        """Shares the layer's parameters."""
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias, self.kernels = layer.weight, layer.bias, kernels
        self.train(layer.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The linear map of `input` (..., in_features), its GEMMs' operands in bf16 or FP8, its result in bf16.

        Raises:
            ValueError: a kernel cannot run so many rows.
        """
        x = input.reshape(-1, self.in_features)
        y = _Products.apply(x.bfloat16(), self.weight.bfloat16(), *self.kernels)
        y = y.view(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """What it runs."""
        return f"{super().extra_repr()}, {', '.join(self.kernels[:3])}"


@torch._dynamo.allow_in_graph
class _Products(torch.autograd.Function):
    """The three products of a layer. Where one launch makes both readings of a tensor, the second is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, *kernels: Any) -> torch.Tensor:
        """Returns y (M, N) of x (M, K) and w (N, K)."""
        runs = Kernels(*kernels)
        _refuse(runs, int(x.shape[0]), *w.shape)
        operands: list[Quantized] = []
        kept: list[torch.Tensor] = []
        for tensor, makers in ((x, runs.x), (w, runs.w)):
            if _at_once(makers):
                plain, turned = _both(tensor, makers)
                operands.append(plain)
                kept += turned
            else:
                if makers[0]:
                    operands.append(_reading(tensor, makers[0], turned=False))
                kept.append(tensor)
        ctx.runs = runs
        ctx.save_for_backward(*kept)
        return _product(runs.output, *operands) if operands else torch.mm(x, w.t())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of x (M, K) and of w (N, K), from y's (M, N)."""
        runs: Kernels = ctx.runs
        (g,) = gradients
        kept = list(ctx.saved_tensors)
        (x, x_turned), (w, w_turned) = (_unpacked(kept, makers) for makers in (runs.x, runs.w))
        plain = turned = None
        if _at_once(runs.g):
            plain, turned = _both(g, runs.g)
        of_x = of_w = None
        if ctx.needs_input_grad[0]:
            if runs.w[1]:
                plain = plain or _reading(g, runs.g[0], turned=False)
                of_x = _product(runs.grad_input, plain, w_turned or _reading(w, runs.w[1], turned=True))
            else:
                of_x = torch.mm(g, w)
        if ctx.needs_input_grad[1]:
            if runs.x[1]:
                turned = turned or _reading(g, runs.g[1], turned=True)
                of_w = _product(runs.grad_weight, turned, x_turned or _reading(x, runs.x[1], turned=True))
            else:
                of_w = torch.mm(g.t(), x)
        return of_x, of_w, *[None] * len(Kernels._fields)


def _at_once(makers: Makers) -> bool:
    """Whether both readings come from one launch, or the second is the first one's codes transposed."""
    return bool(makers[0] and makers[1]) and (makers[0] == makers[1] or TRANSPOSE in makers)


def _unpacked(kept: list[torch.Tensor], makers: Makers) -> tuple[torch.Tensor, Quantized | None]:
    """What the forward kept of a tensor: itself, or its transposed reading where one was made."""
    first = kept.pop(0)
    return first, (first, kept.pop(0)) if _at_once(makers) else None


def _both(tensor: torch.Tensor, makers: Makers) -> tuple[Quantized, Quantized]:
    """A tensor's reading as it is, and transposed."""
    if makers[0] == makers[1]:
        return operators.both(tensor.contiguous(), makers[0])
    if makers[1] == TRANSPOSE:
        plain = _reading(tensor, makers[0], turned=False)
        return plain, _transposed(plain)
    turned = _reading(tensor, makers[1], turned=True)
    return _transposed(turned), turned


def _transposed(reading: Quantized) -> Quantized:
    codes, scales = reading
    turned = codes.view(torch.uint8).t().contiguous().view(E4M3)
    return turned, scales.t().contiguous() if scales.ndim else scales


def _reading(tensor: torch.Tensor, maker: str, *, turned: bool) -> Quantized:
    """Codes and scales of a tensor, or of its transpose; a kernel that reads the other way round is given the transpose."""
    if KERNELS[maker].readings != (turned,):
        tensor = tensor.t()
    if maker.startswith("torch/"):
        return QUANTIZERS[maker.removeprefix("torch/quantize_")][0](tensor.contiguous())
    codes, scales = torch.ops.loka.quantized(tensor.contiguous(), maker)
    return codes, scales


def _product(kernel: str, left: Quantized, right: Quantized) -> torch.Tensor:
    """bf16 (M, N): a (M, K) times b (N, K) transposed."""
    (a, scale_a), (b, scale_b) = left, right
    if not kernel.startswith("torch/"):
        result: torch.Tensor = torch.ops.loka.product(a, b, scale_a, scale_b, kernel)
        return result
    if kernel == "torch/fp8_block128":
        return _blocks(a, b, scale_a, scale_b)
    # torch.compile's own preparations refuse the view of a scalar: one value is a matrix of one row and column.
    scale_a, scale_b = scale_a.reshape(-1, 1), scale_b.reshape(1, -1)
    fast = kernel.endswith("_fast")
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _blocks(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """Under the scales of 1 x 128 blocks of a and of 128 x 128 of b, whose extent along K cuBLAS wants in fours."""
    from torch.nn.functional import ScalingType, pad, scaled_mm

    scale_b = pad(scale_b, (0, -scale_b.shape[1] % 4)).contiguous().t()
    return scaled_mm(
        a, b.t(), scale_a, ScalingType.BlockWise1x128, scale_b, ScalingType.BlockWise128x128, output_dtype=torch.bfloat16
    )


@functools.cache
def _refuse(runs: Kernels, m: int, n: int, k: int) -> None:
    gemms = (runs.output, (m, n, k)), (runs.grad_input, (m, k, n)), (runs.grad_weight, (n, k, m))
    for kernel, size in gemms:
        if reason := KERNELS[kernel].illegal(*size):
            raise ValueError(f"{m} rows: {kernel} cannot run them: {reason}; make a table of this batch")


def _can_run(kernel: str) -> bool:
    """Whether a layer can run a GEMM or a quantizer."""
    if kernel.startswith("torch/"):
        made = kernel.removeprefix("torch/quantize_") in QUANTIZERS
        return made or kernel == TRANSPOSE or KERNELS[kernel].kind == "gemm"
    return operators.runs(kernel)

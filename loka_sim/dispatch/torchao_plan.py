"""What of a dispatch table torchao's conversion can express, and what runs where it cannot.

torchao replaces a whole `torch.nn.Linear` and is told, per operand and pass, how to cast it. Every mix of bf16,
tensorwise and rowwise over the three passes, fast or split accumulation in each, can be said (tested). Blocks cannot,
nor a GEMM that is no module's, nor two behaviours of one module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from loka_sim.dispatch.operands import Toolbox
from loka_sim.modelspec import PASSES
from loka_sim.site_names import common_name
from perfmodel.kernels import KERNELS

OPERANDS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""Left and right operand of each pass, in torchao's words."""

DTYPES = {"e4m3": "torch.float8_e4m3fn", "e5m2": "torch.float8_e5m2"}
_FEW = 4
_LINEAR_OPS = ("linear", "addmm", "mm", "matmul")


@dataclass(frozen=True)
class Choice:
    """What one pass runs, as a dispatch table says it."""

    kernel: str = "torch/bf16"
    recipe_a: str = "bf16"
    recipe_b: str = "bf16"
    accumulation: str = "fp32"

    @classmethod
    def of(cls, decision: dict[str, Any]) -> Choice:
        """A pass of a table."""
        return cls(*(decision[key] for key in ("kernel", "recipe_a", "recipe_b", "accumulation")))

    @classmethod
    def kernel_named(cls, name: str) -> Choice:
        """A kernel that this loka-sim knows."""
        spec = KERNELS[name]
        return cls(name, spec.recipe_a or "bf16", spec.recipe_b or "bf16", spec.accumulation)

    @property
    def is_fp8(self) -> bool:
        """Whether the operands are quantized."""
        return self.recipe_a != "bf16"

    def formats(self, name: str) -> dict[str, str]:
        """Format of each operand, for the pass of that name; empty in bf16."""
        recipes = (self.recipe_a, self.recipe_b) if self.is_fp8 else ()
        return {operand: recipe.split("/")[0] for operand, recipe in zip(OPERANDS[name], recipes, strict=False)}

    @property
    def beyond(self) -> str | None:
        """Why torchao's configuration cannot say this; None where it can."""
        if not self.is_fp8:
            return None
        if not self.kernel.startswith("torch/"):
            return "torchao runs torch's GEMMs"
        (format_a, _, scaling_a), (format_b, _, scaling_b) = self.recipe_a.partition("/"), self.recipe_b.partition("/")
        if scaling_a != scaling_b or scaling_a not in ("tensorwise", "rowwise"):
            return "torchao's training scales whole tensors or rows, no blocks"
        if format_a not in DTYPES or format_b not in DTYPES or format_a == format_b == "e5m2":
            return f"there is no {format_a} by {format_b} GEMM in torchao"
        if self.accumulation not in ("hopper_fast", "hopper_split"):
            return f"torchao has no {self.accumulation} accumulation"
        return None


BF16 = Choice()


@dataclass(frozen=True)
class Loss:
    """A pass that runs otherwise than the table says."""

    site: str
    name: str
    wanted: str
    instead: str
    reason: str
    gives_up_us: float


@dataclass(frozen=True)
class Plan:
    """A table in torchao's terms.

    Attributes:
        linears: Modules that must be there: (out_features, in_features).
        others: Modules that may be linear, and are left alone: what multiplies is not they, or not their own weight.
        groups: Modules to convert by what their three passes run, in the table's order.
        losses: Passes that run otherwise than the table says.
    """

    linears: dict[str, tuple[int, int]]
    others: frozenset[str]
    groups: dict[tuple[Choice, Choice, Choice], list[str]]
    losses: tuple[Loss, ...]

    @property
    def slower_us(self) -> float:
        """How much slower a step is than decided, as predicted, in microseconds."""
        return sum(loss.gives_up_us for loss in self.losses)

    def notes(self) -> Iterator[str]:
        """The losses, those alike in one line."""
        alike: dict[tuple[str, str, str, str], list[Loss]] = {}
        for loss in self.losses:
            alike.setdefault((loss.name, loss.wanted, loss.instead, loss.reason), []).append(loss)
        for (name, wanted, instead, reason), losses in sorted(alike.items()):
            gives_up = sum(loss.gives_up_us for loss in losses)
            words = "slower" if gives_up > 0 else "faster"
            cost = f", {abs(gives_up):.1f} us a step {words} as predicted" if abs(gives_up) > 0.05 else ""
            yield f"{name} of {_named([loss.site for loss in losses])}: {instead} instead of {wanted}{cost} ({reason})"


def _named(sites: list[str]) -> str:
    """Sites in words; those that differ in their indices alone stand together where they are many, a star where they differ."""
    alike: dict[str, list[str]] = {}
    for site in sites:
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", site), []).append(site)
    words = (some if len(some) <= _FEW else [f"{common_name(some)} ({len(some)} sites)"] for some in alike.values())
    return ", ".join(chain.from_iterable(words))


def plan(table: dict[str, Any]) -> Plan:
    """Put a dispatch table (valid by its schema) into torchao's terms."""
    linears: dict[str, tuple[int, int]] = {}
    others: set[str] = set()
    losses: list[Loss] = []
    modules: dict[str, dict[str, list[tuple[Choice, dict[str, Any], str]]]] = {}
    for site in table["sites"]:
        module = module_of(site["name"])
        obstacle = _no_linear(site["op"], site["weight"], module)
        if obstacle is None:
            linears[module] = (site["n"], site["k"])
        else:
            others.update((module, (site["weight"] or "").rpartition(".")[0]))
        for name, decision in site["passes"].items():
            choice = Choice.of(decision)
            if obstacle and choice.is_fp8:
                losses.append(_in_bf16(site["name"], name, decision, obstacle))
            elif obstacle is None:
                if "torchao" in decision:
                    instead = Choice.of(decision["torchao"])
                    losses.extend(_decided_anew(site["name"], name, decision, choice, instead))
                    choice = instead
                elif choice.beyond:
                    losses.append(_in_bf16(site["name"], name, decision, choice.beyond))
                    choice = BF16
                modules.setdefault(module, {}).setdefault(name, []).append((choice, decision, site["name"]))
    groups: dict[tuple[Choice, Choice, Choice], list[str]] = {}
    for module, passes in modules.items():
        # A backward GEMM that the model does not compute stays in bf16: torchao's eager backward multiplies
        # nevertheless, torch.compile leaves it out.
        output, grad_input, grad_weight = _settle(passes, losses)
        if output.is_fp8 or grad_input.is_fp8 or grad_weight.is_fp8:
            groups.setdefault((output, grad_input, grad_weight), []).append(module)
    return Plan(linears, frozenset(others - set(linears)), groups, tuple(losses))


def module_of(site: str) -> str:
    """A site's module as `named_modules` calls it: the second call's mark taken off, the model itself nameless."""
    module = site.partition("#")[0]
    return "" if module == "(root)" else module


def _no_linear(op: str, weight: str | None, module: str) -> str | None:
    """Why a site is no `torch.nn.Linear`, as far as its operation and its weight's name tell."""
    if weight is None:
        return f"torchao converts torch.nn.Linear only, and this is a {op} of two activations"
    if op not in _LINEAR_OPS or weight != (f"{module}.weight" if module else "weight"):
        return f"torchao converts torch.nn.Linear only, and this is a {op} with the parameter {weight}"
    return None


def convertible(site: str, op: str, weight: str | None) -> bool:
    """Whether torchao's conversion reaches a site, by its name, its operation and its weight's name."""
    return _no_linear(op, weight, module_of(site)) is None


def expressible(torch: Toolbox) -> Toolbox:
    """Those of torch's kernels that torchao's conversion can say."""
    return replace(torch, gemms=tuple(name for name in torch.gemms if _says(name)))


def _says(kernel: str) -> bool:
    return KERNELS[kernel].kind == "gemm" and Choice.kernel_named(kernel).beyond is None


def _decided_anew(site: str, name: str, decision: dict[str, Any], wanted: Choice, instead: Choice) -> Iterator[Loss]:
    """What differs where a site was decided once more for torchao."""
    costs = decision["torchao"]["predicted_us"] - decision["predicted_us"]
    others = sorted({kernel for kernel in decision.get("quantizers", {}).values() if not kernel.startswith("torch/")})
    if wanted != instead:
        reason = wanted.beyond or "its layer is decided anew among torchao's kernels"
        yield Loss(site, name, wanted.kernel, instead.kernel, reason, costs)
    elif wanted.is_fp8 and (others or costs):
        quantized = " and ".join(others) or "the decision's"
        yield Loss(site, name, quantized, "torch's quantization", "torchao casts with torch's kernels", costs)


def _settle(passes: dict[str, list[tuple[Choice, dict[str, Any], str]]], losses: list[Loss]) -> list[Choice]:
    """One choice per pass for a module: its calls must agree, and a tensor has one format in both its passes."""
    settled: list[Choice] = []
    formats: dict[str, str] = {}
    for name in PASSES:
        calls = passes.get(name, [])
        choices = {choice for choice, _, _ in calls}
        choice = choices.pop() if len(choices) == 1 else BF16
        reason = "a module that is called more than once has one configuration in torchao, and its calls differ"
        if choice.is_fp8:
            clash = [op for op, fmt in choice.formats(name).items() if formats.get(op, fmt) != fmt]
            if clash:
                choice, reason = BF16, f"torchao casts the {clash[0]} to one format for both its passes"
        losses.extend(_in_bf16(site, name, decision, reason) for wanted, decision, site in calls if wanted != choice)
        formats.update(choice.formats(name))
        settled.append(choice)
    return settled


def _in_bf16(site: str, name: str, decision: dict[str, Any], reason: str) -> Loss:
    return Loss(site, name, decision["kernel"], BF16.kernel, reason, decision["bf16_us"] - decision["predicted_us"])

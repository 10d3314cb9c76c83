"""Export: a dispatch table as code that a training job imports, without loka_sim.

`export` gives the text of a Python module. Its data come from the table, its code from `torchao_template.py`.
Whatever the target cannot express runs otherwise there, in bf16 mostly, and a note says so: in the result and in the
module.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from loka_sim.dispatch.table import check, load
from loka_sim.dispatch.torchao_plan import DTYPES, OPERANDS, Choice, Plan, plan
from loka_sim.errors import UserError
from loka_sim.modelspec import PASSES

TARGETS = ("torchao",)

_CASTS = {
    "cast_config_input": ("output", "input"),
    "cast_config_weight": ("output", "weight"),
    "cast_config_grad_output": ("grad_input", "grad_output"),
    "cast_config_weight_for_grad_input": ("grad_input", "weight"),
    "cast_config_input_for_grad_weight": ("grad_weight", "input"),
    "cast_config_grad_output_for_grad_weight": ("grad_weight", "grad_output"),
}
"""torchao's cast configurations: the pass that each serves, and the operand that it casts."""


@dataclass(frozen=True)
class Export:
    """An exported table.

    Attributes:
        text: The module's source.
        notes: What the target cannot express, one line each, with what runs there instead.
        modules: How many modules the exported code converts.
        slower_us: How much slower a step is than decided, as predicted, in microseconds.
    """

    text: str
    notes: tuple[str, ...]
    modules: int
    slower_us: float


def export(table: dict[str, Any] | Path | str, target: str = "torchao") -> str:
    """The text of a Python module that applies a dispatch table; see `export_with_notes`."""
    return export_with_notes(table, target).text


def export_with_notes(table: dict[str, Any] | Path | str, target: str = "torchao") -> Export:
    """Turn a dispatch table into code.

    Args:
        table: The table, its file, or the run folder that holds it.
        target: What the code is for; one of `TARGETS`.

    Raises:
        UserError: unknown target.
        DataError: the table is not there, truncated, of another kind or version, or breaks its schema; names the field.
    """
    if target not in TARGETS:
        raise UserError(f"unknown export target {target!r}: choose one of {', '.join(TARGETS)}")
    table = check(table) if isinstance(table, dict) else load(table)
    planned = plan(table)
    notes = tuple(planned.notes())
    return Export(_module(table, planned, notes), notes, sum(map(len, planned.groups.values())), planned.slower_us)


def _module(table: dict[str, Any], planned: Plan, notes: tuple[str, ...]) -> str:
    template = resources.files("loka_sim.dispatch").joinpath("torchao_template.py").read_text(encoding="utf-8")
    prelude, _, code = template.partition("# ==== table: begin ====\n")[2].partition("# ==== table: end ====\n")
    lines = [*_header(table, planned, notes), "", prelude.partition("MODEL = ")[0].rstrip(), ""]
    lines += [f"MODEL = {table['model']['name']!r}", f"FINGERPRINT = {table['model']['fingerprint']!r}", ""]
    lines += ["# Linear modules of the model: (out_features, in_features).", "SITES: dict[str, tuple[int, int]] = {"]
    lines += [*(f"    {name!r}: {shape}," for name, shape in planned.linears.items()), "}", ""]
    lines += ["# May be linear modules, and are never converted: it is not they that multiply by their weight."]
    lines += ["OTHER_LINEARS: frozenset[str] = frozenset({", *(f"    {name!r}," for name in sorted(planned.others)), "})"]
    lines += ["", "GROUPS: tuple[Group, ...] = ("]
    for choices, modules in planned.groups.items():
        by_pass = dict(zip(PASSES, choices, strict=True))
        lines += ["    Group(", "        kernels={"]
        lines += [*(f"            {name!r}: {choice.kernel!r}," for name, choice in by_pass.items()), "        },"]
        lines += ["        config=Float8LinearConfig(", *(f"            {line}," for line in _config(by_pass)), "        ),"]
        lines += ["        modules=frozenset({", *(f"            {module!r}," for module in modules), "        }),", "    ),"]
    lines.append(")")
    return "\n".join(lines) + "\n" + code


def _config(choices: dict[str, Choice]) -> Iterator[str]:
    formats = {op: fmt for name, choice in choices.items() for op, fmt in choice.formats(name).items()}
    for argument, (name, operand) in _CASTS.items():
        choice = choices[name]
        recipe = choice.recipe_a if OPERANDS[name][0] == operand else choice.recipe_b
        # torchao wants one format per operand, also where a pass leaves it in bf16.
        dtype = DTYPES[formats.get(operand, "e4m3")]
        yield f"{argument}=_cast({recipe.partition('/')[2] or 'bf16'!r}, {dtype})"
    for name, choice in choices.items():
        yield f"gemm_config_{name}={'FAST' if choice.accumulation == 'hopper_fast' else 'SPLIT'}"


_wrap = partial(
    textwrap.wrap, width=118, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
)


def _header(table: dict[str, Any], planned: Plan, notes: tuple[str, ...]) -> Iterator[str]:
    model, policy = table["model"], table["policy"]
    count = sum(map(len, planned.groups.values()))
    mods = f", mods {', '.join(model['mods'])}" if model["mods"] else ""
    facts = [
        f"Model: {model['name']} (fingerprint {model['fingerprint']}), batch {model['batch']} per GPU{mods}",
        f"Hardware: {table['hardware']['name']} (time model {table['hardware']['perfmodel_fingerprint']})",
        f"Policy: MERE below {policy['max_mere']}, speedup at least {policy['min_speedup']}, statistics {policy['statistics']}",
        f"Made by: loka-sim {table['loka_sim_version']}, `loka-sim export TABLE --to torchao`",
        "For: torchao 0.17 and 0.18",
    ]
    yield f"# FP8 training through torchao for {count} of {len(planned.linears)} linear modules."
    yield "#"
    yield from (f"# {' '.join(fact.split())}" for fact in facts)
    if notes:
        yield "#"
        yield "# Not as the dispatch table says, because torchao cannot express it:"
        for note in notes:
            yield from _wrap(" ".join(note.split()))
    yield "#"
    yield "# Use: `model = convert(model)`, before torch.compile and FSDP; run the model in bfloat16 or under autocast."
    yield "# ruff: noqa"

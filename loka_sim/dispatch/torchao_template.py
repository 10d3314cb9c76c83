"""The code of an exported torchao module; `loka_sim.dispatch.export` copies it and fills in the table.

Not for import by loka_sim: it is ordinary code, with an empty table, so that linters and tests see what users get.
"""

# ==== table: begin ====
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torchao.float8 import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
    convert_to_float8_training,
)
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args


@dataclasses.dataclass(frozen=True)
class Group:
    """Modules whose three GEMMs run the same kernels, and the configuration that says so."""

    kernels: dict[str, str]
    config: Float8LinearConfig
    modules: frozenset[str]


def _cast(scaling: str, target_dtype: torch.dtype) -> CastConfig:
    if scaling == "bf16":
        return CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=target_dtype)
    granularity = ScalingGranularity.AXISWISE if scaling == "rowwise" else ScalingGranularity.TENSORWISE
    return CastConfig(scaling_granularity=granularity, target_dtype=target_dtype)


FAST = Float8GemmConfig(use_fast_accum=True)
SPLIT = Float8GemmConfig(use_fast_accum=False)

MODEL = ""
FINGERPRINT = ""
SITES: dict[str, tuple[int, int]] = {}
OTHER_LINEARS: frozenset[str] = frozenset()
GROUPS: tuple[Group, ...] = ()
# ==== table: end ====


class TableMismatchError(ValueError):
    """The model is not the one that the table was made for; nothing was converted."""


class RowwiseFloat8Linear(Float8Linear):
    """A `Float8Linear` that scales rows, fit for an input that lies in memory otherwise (a transposed view).

    torchao quantizes such an input as it lies, and refuses to lay out anew what has a scale for each row.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The linear map of `input` (..., in_features)."""
        return super().forward(_laid_out(input, self.config))


def _laid_out(input: torch.Tensor, config: Float8LinearConfig) -> torch.Tensor:
    rowwise = config.cast_config_input.scaling_granularity is ScalingGranularity.AXISWISE
    return input.contiguous() if rowwise else input


class AutocastFloat8Linear(RowwiseFloat8Linear):
    """A `Float8Linear` with a GEMM left in bfloat16, fit for float32 weights under autocast.

    torchao hands the weight to that GEMM as it is, and its backward would then multiply bfloat16 by float32.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The linear map of `input` (..., in_features), in the autocast dtype where autocast is on."""
        if not torch.is_autocast_enabled():
            return super().forward(input)
        dtype = torch.get_autocast_dtype("cuda")
        weight, input = self.weight.to(dtype), _laid_out(input, self.config).to(dtype)
        output = matmul_with_hp_or_float8_args.apply(input, weight.t(), self.linear_mm_config, self.config)
        return output if self.bias is None else output + self.bias.to(dtype)


def convert(model: nn.Module, *, leave: Iterable[str] = (), emulate: bool = False) -> nn.Module:
    """Give the table's modules their FP8 GEMMs, in place; parameters and state dict stay what they are.

    Convert before torch.compile and before FSDP shards the parameters. Run the model in bfloat16 or under autocast.

    Args:
        model: The model that the table was made for, bare or wrapped (torch.compile, DataParallel, DDP).
        leave: Names of linear modules to leave as they are, and out of the check.
        emulate: Multiply in float32 after quantizing, for a machine without FP8 tensor cores.

    Returns:
        The model (a new module only where the model itself is one linear layer).

    Raises:
        TableMismatchError: the model differs from the table's; says in what, and nothing was converted.
    """
    left = frozenset([leave] if isinstance(leave, str) else leave)
    names = site_names(model)
    check(model, left)
    for group in GROUPS:
        model = convert_to_float8_training(
            model,
            config=dataclasses.replace(group.config, emulate=emulate),
            module_filter_fn=module_filter_fn(names, group.modules - left),
        )
    converted: dict[str, nn.Module] = {}
    for fqn, name in names.items():
        module = model.get_submodule(fqn)
        if not isinstance(module, Float8Linear):
            continue
        in_bf16 = ScalingType.DISABLED in (
            module.config.cast_config_weight.scaling_type,
            module.config.cast_config_weight_for_grad_input.scaling_type,
        )
        module.__class__ = AutocastFloat8Linear if in_bf16 else RowwiseFloat8Linear
        converted.setdefault(name, module)
    # A module that the model holds under several names is one module afterwards, too.
    for fqn, name in names.items():
        if name in converted and model.get_submodule(fqn) is not converted[name]:
            parent, _, attribute = fqn.rpartition(".")
            setattr(model.get_submodule(parent), attribute, converted[name])
    return model


def module_filter_fn(names: dict[str, str], wanted: frozenset[str]) -> Callable[[nn.Module, str], bool]:
    """A filter for `convert_to_float8_training`: true for the modules whose table name is wanted, exactly."""

    def chosen(module: nn.Module, fqn: str) -> bool:
        return names.get(fqn) in wanted

    return chosen


def site_names(model: nn.Module) -> dict[str, str]:
    """Fully qualified name in `model` -> name in the table, for every linear module.

    Leaves out what torch.compile, checkpointing, FSDP and data parallelism put into names; a module that is held
    under several names goes by its first.
    """
    parallel = {fqn for fqn, module in model.named_modules() if isinstance(module, (DataParallel, DistributedDataParallel))}
    wrapper_parts = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    names: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            parts = fqn.split(".")
            kept = [
                part
                for index, part in enumerate(parts)
                if part not in wrapper_parts and not (part == "module" and ".".join(parts[:index]) in parallel)
            ]
            names[fqn] = first_name.setdefault(id(module), ".".join(kept))
    # A wrapper of some other library, known by its habit of holding the model as `module`.
    while names and all(n.startswith("module.") for n in names.values()) and not _any_starts(SITES, "module."):
        names = {fqn: name.removeprefix("module.") for fqn, name in names.items()}
    return names


def check(model: nn.Module, leave: Iterable[str] = ()) -> None:
    """Compare the model's linear modules with the table's; changes nothing.

    Raises:
        TableMismatchError: a module is missing, unknown, of another shape, or cannot be converted.
    """
    left = frozenset([leave] if isinstance(leave, str) else leave)
    found = {name: model.get_submodule(fqn) for fqn, name in site_names(model).items()}
    everything = dict(model.named_modules())
    converted = frozenset().union(*(group.modules for group in GROUPS)) - left
    differences = []
    for name, (out_features, in_features) in SITES.items():
        if name in left:
            continue
        module = found.get(name)
        if module is None:
            kind = type(everything[name]).__name__ if name in everything else None
            differences.append(f"{name} is {'missing' if kind is None else f'{kind}, not torch.nn.Linear'}")
        elif (module.out_features, module.in_features) != (out_features, in_features):
            has = (module.out_features, module.in_features)
            differences.append(f"{name} has (out, in) features {has}, the table {(out_features, in_features)}")
        elif name in converted and (obstacle := _obstacle(module)):
            differences.append(f"{name} {obstacle}")
    unknown = sorted(set(found) - set(SITES) - OTHER_LINEARS - left)
    differences.extend(f"{name} is not in the table" for name in unknown)
    differences.extend(f"{name}, named in leave=, is in neither" for name in sorted(left - set(found) - set(SITES)))
    if differences:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        raise TableMismatchError(
            f"this table is for model {MODEL} ({FINGERPRINT}), and the model given differs: {shown}. Nothing was "
            "converted; make a table for this model (loka-sim whatif), or name in leave= what is to stay as it is"
        )


def _obstacle(module: nn.Module) -> str | None:
    if type(module).forward is not nn.Linear.forward:
        return f"is {type(module).__name__}, whose own forward the conversion would drop"
    if not isinstance(module.weight, nn.Parameter) or module.weight.shape != (module.out_features, module.in_features):
        return "has a weight that is no whole parameter (sharded or parametrized): convert first"
    if hasattr(module.weight, "placements"):
        return "has a weight that is sharded already: convert first"
    if any(getattr(module, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")):
        return "carries hooks, which the conversion would drop: add them afterwards"
    return None


def _any_starts(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)

"""`scaled_dot_product_attention` as the kernels that torch runs on a GPU for it, where it has them for these operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from loka_sim.capture.operators import value_of
from perfmodel.attention import FORWARD, MOST_FEATURES, VECTOR, label_of

FUSED = torch.ops.aten._scaled_dot_product_flash_attention.default


class FusedAttention(TorchFunctionMode):
    """Calls torch's fused attention for what it takes; with a mask, say, attention is left to be taken apart."""

    def __enter__(self) -> FusedAttention:
        """Also inside torch's own functions, as `multi_head_attention_forward`, where a mode does not look.

        And for products and a softmax that torch.compile takes for attention (its pass `fuse_attention`).
        """
        from torch._inductor.fx_passes import fuse_attention  # not before a model is captured

        functional.scaled_dot_product_attention = _attended
        fuse_attention._scaled_dot_product_attention = _attended  # type: ignore[assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """As it was."""
        from torch._inductor.fx_passes import fuse_attention

        super().__exit__(*error)
        functional.scaled_dot_product_attention = scaled_dot_product_attention
        fuse_attention._scaled_dot_product_attention = torch.ops.aten.scaled_dot_product_attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function; attention by the operator that has no products in it."""
        return (_attended if func is scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _attended(*args: Any, **kwargs: Any) -> torch.Tensor:
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    operands: tuple[torch.Tensor, ...] = named["query"], named["key"], named["value"]
    if named.get("attn_mask") is not None or named.get("enable_gqa") or not fits(*operands):
        return scaled_dot_product_attention(*args, **kwargs)
    dropout, causal, features = named.get("dropout_p", 0.0), named.get("is_causal", False), operands[0].shape[-1]
    scale = named.get("scale")
    if behind := -features % VECTOR:  # with zeros behind them, as torch has it
        scale = features**-0.5 if scale is None else scale
        operands = tuple(functional.pad(operand, (0, behind)) for operand in operands)
    result: torch.Tensor = FUSED(*operands, dropout, causal, False, scale=scale)[0]
    return result[..., :features] if behind else result


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch has kernels for these: samples, heads, tokens, features."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    features = query.shape[-1]
    alike = key.shape == value.shape and query.shape[:2] == key.shape[:2] and key.shape[-1] == features
    return alike and features <= MOST_FEATURES


def attention_loop(node: fx.Node, kind: str) -> tuple[str, tuple[int, int]]:
    """The label of an attention kernel, which says its sizes, and its iteration space: queries, and what each looks at."""
    # Forward: query, key, value, dropout, causal; backward the gradient stands first, causal at 11. Defaults are left out.
    first, causal_at = (0, 4) if kind == FORWARD else (1, 11)
    query, key = (value_of(node.args[place]) for place in (first, first + 1))  # type: ignore[arg-type]
    causal = len(node.args) > causal_at and bool(node.args[causal_at])
    samples, heads, queries, features = query.shape
    keys = key.shape[2]
    scale = node.kwargs.get("scale")  # of fewer features than there are: the others are zeros
    padded = isinstance(scale, float) and features - VECTOR < round(scale**-2) < features
    seen = (keys + 1) // 2 if causal else keys
    return label_of(queries, keys, features, causal, padded), (samples * heads * queries, seen * features)

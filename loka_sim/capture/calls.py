"""What the model called, above aten: the name of the operation, and the norm and the activation that follow a site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from loka_sim.capture.record import RawSite, Recorder

OPS = {"linear": "linear", "matmul": "matmul", "__matmul__": "matmul", "__rmatmul__": "matmul", "einsum": "einsum"}
OPS |= {name: name for name in ("mm", "bmm", "addmm", "baddbmm")}
# Functions that end in a product, so that what follows them follows that product.
ENDING = (*OPS, "multi_head_attention_forward", "bilinear", "tensordot", "inner")
NORMS = {
    "layer_norm": "layernorm",
    "rms_norm": "rmsnorm",
    "batch_norm": "batchnorm",
    "group_norm": "groupnorm",
    "instance_norm": "instancenorm",
}
ACTIVATIONS = {name: name for name in ("relu", "relu6", "silu", "hardswish", "gelu", "sigmoid", "tanh", "elu", "selu")}
ACTIVATIONS |= {
    name: name.replace("_", "") for name in ("leaky_relu", "softplus", "mish", "hardsigmoid", "hardtanh", "prelu", "celu")
}
# Modules that a model brings itself and that say by their class what they are, however they compute it.
MODULES = {"blocknorm": ("norm", "blocknorm"), "rmsnorm": ("norm", "rmsnorm"), "layernorm": ("norm", "layernorm")}
MODULES |= {f"batchnorm{suffix}": ("norm", "batchnorm") for suffix in ("", "1d", "2d", "3d")} | {
    "syncbatchnorm": ("norm", "batchnorm"),
    "groupnorm": ("norm", "groupnorm"),
    "swish": ("activation", "silu"),
    "hswish": ("activation", "hardswish"),
    **{name: ("activation", name) for name in ACTIVATIONS.values()},
}
# Same values in another shape, type or place (dropout among them: it is not there at inference).
PASSING = set(
    "view reshape view_as reshape_as flatten unflatten squeeze unsqueeze transpose swapaxes t permute movedim contiguous to "
    "type_as float half bfloat16 double clone detach dropout dropout1d alpha_dropout feature_dropout identity".split()
)
JOINING = ("cat", "concat", "concatenate", "stack", "hstack", "vstack")
SCALING = ("mul", "div", "true_divide")
MOVES = ("cuda", "cpu", "xpu", "ipu", "hpu", "mtia", "pin_memory")
LITERALS = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.scalar_tensor)


def plain(name: str) -> str:
    """Function name without what marks an in-place or reflected call: `add_`, `__iadd__`, `__radd__` are all `add`."""
    if name.startswith("__") and name.endswith("__"):
        inner = name.strip("_")
        return inner[1:] if inner[:1] in "ir" and inner[1:] in ("add", "mul", "truediv", "div") else inner
    return name.rstrip("_")


Tag = tuple[tuple[RawSite, ...], str]


class Calls(TorchFunctionMode):
    """Follows each site's result up to the norm and the activation that use it, and says nothing where two do.

    A tag (sites, stage) stands on a tensor as long as it is these sites' result, or their norm's: of several, once
    their results are concatenated. Adding a residual keeps the tag; a product with another tensor or a reduction
    ends it.
    """

    def __init__(self, recorder: Recorder) -> None:
        """Follow the sites of `recorder`."""
        super().__init__()
        self.recorder = recorder
        self.failed: tuple[str, str] | None = None
        self._tags: dict[int, Tag] = {}
        self._used: set[int] = set()  # what a product has read: as an operand of an addition, it is the residual
        self._alive: list[torch.Tensor] = []
        self._quiet = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, on the capture's device, and follow its result."""
        name = plain(getattr(func, "__name__", ""))
        if name in MOVES and isinstance(args[0] if args else None, torch.Tensor):
            return args[0]
        kwargs = self._placed(func, name, dict(kwargs or {}))
        if name == "to":
            args = (args[0], *(self._device(arg) for arg in args[1:]))
        if func in (nn.functional.embedding, nn.functional.embedding_bag):
            args, kwargs = _plain_lookup(func, args, kwargs)
        before = len(self.recorder.sites)
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.failed = self.failed or (self.recorder.module, name)
            raise
        if isinstance(result, torch.Tensor | tuple):
            self._follow(name, args, kwargs, result, self.recorder.sites[before:])
        return result

    def _device(self, value: Any) -> Any:
        return torch.device(self.recorder.device) if isinstance(value, torch.device | str) else value

    def _placed(self, func: Any, name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments with the capture's device; constants written out in the model stay real, and readable."""
        if func in LITERALS:
            kwargs.pop("device", None)
        elif kwargs.get("device") is not None or (func in _device_constructors() and "device" not in kwargs):
            kwargs["device"] = torch.device(self.recorder.device)
        return kwargs

    def _follow(self, name: str, args: Any, kwargs: Any, result: Any, sites: list[RawSite]) -> None:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if sites:
            for site in sites:
                site.op = OPS.get(name, site.op)
            if name == "linear":
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                sites[-1].bias |= bias is not None
            self._used.update(map(id, tensors))
            self._alive += tensors
            first = result[0] if isinstance(result, tuple) else result
            if name in ENDING and isinstance(first, torch.Tensor):
                self._tag(first, ((sites[-1],), "product"))
            return
        if self._quiet or not args or not isinstance(result, torch.Tensor):
            return
        if name == "add":
            self._add(tensors, result)
            return
        if name in JOINING:
            self._join(args[0], result)
            return
        tag = self._tags.get(id(tensors[0])) if tensors else None
        if tag is None:
            return
        if name in NORMS or name in ACTIVATIONS:
            kind = "norm" if name in NORMS else "activation"
            self._claim(tag, kind, (NORMS | ACTIVATIONS)[name], result)
        elif name in PASSING or (name in SCALING and len(tensors) == 1) or self._is_turned(name, tensors[0], result):
            self._tag(result, tag)

    @staticmethod
    def _is_turned(name: str, tensor: torch.Tensor, result: torch.Tensor) -> bool:
        return name == "get" and result is not tensor and result.numel() == tensor.numel() and result._base is not None

    def _fresh(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that are the result of a site, without the residuals among them."""
        products = [tensor for tensor in tensors if self._tags.get(id(tensor), ((), ""))[1] == "product"]
        return [tensor for tensor in products if id(tensor) not in self._used] or products

    def _join(self, tensors: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        fresh = self._fresh(tensors)
        if fresh:
            self._tag(result, (tuple(site for tensor in fresh for site in self._tags[id(tensor)][0]), "product"))

    def _add(self, tensors: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        fresh = self._fresh(tensors)
        if len(fresh) != 1:
            self._tags.pop(id(result), None)
            return
        tag = self._tags[id(fresh[0])]
        self._tag(result, tag)

    def _claim(self, tag: Tag, kind: str, value: str, result: torch.Tensor) -> None:
        """Note that a norm or an activation follows a site; two different ones are none."""
        sites, stage = tag
        if kind == "norm" and stage == "normed":
            return
        for site in sites:
            if kind in site.ambiguous or getattr(site, kind) not in (None, value):
                site.ambiguous.add(kind)
                setattr(site, kind, None)
            else:
                setattr(site, kind, value)
        if kind == "norm":
            self._tag(result, (sites, "normed"))
        else:
            self._tags.pop(id(result), None)

    def _tag(self, tensor: torch.Tensor, tag: Tag) -> None:
        self._tags[id(tensor)] = tag
        self._alive.append(tensor)

    def enter(self, module: nn.Module, args: Any) -> Any:
        """Called before a module's forward; the answer is for `leave`."""
        kind = MODULES.get(type(module).__name__.lower().replace("_", ""))
        tag = self._tags.get(id(args[0])) if args else None
        self._quiet += kind is not None
        return kind, tag, len(self.recorder.sites)

    def leave(self, entered: Any, result: Any) -> None:
        """Called after a module's forward, also one that failed (`result` is None then)."""
        kind, tag, before = entered
        self._quiet -= kind is not None
        if kind and tag and isinstance(result, torch.Tensor) and len(self.recorder.sites) == before:
            self._claim(tag, kind[0], kind[1], result)


def _plain_lookup(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same look-up without what has no shape: sparse gradients, and the renormalization of rows."""
    names: tuple[str, ...] = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    if func is nn.functional.embedding_bag:
        names = ("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")
    bound = dict(zip(names, args, strict=False))
    rest = args[len(names) :]
    if rest:
        return tuple({**bound, "sparse": False, "max_norm": None}.values()) + tuple(rest), kwargs
    return (), {**bound, **kwargs, "sparse": False, "max_norm": None}

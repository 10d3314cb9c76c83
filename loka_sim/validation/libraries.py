"""Which kernel libraries this machine has."""

from __future__ import annotations

from typing import Any


def libraries() -> list[dict[str, Any]]:
    """A row a library for the document: its version, or why its kernels are absent."""
    import torch

    from hil.kernels.availability import availability
    from perfmodel.kernels import KERNELS, LIBRARIES

    result = []
    for library in LIBRARIES:
        spec = next(spec for spec in KERNELS.values() if spec.library == library)
        if spec.requires is None:
            version = torch.__version__ if library == "torch" else None
            result.append({"library": library, "version": version, "available": True, "reason": ""})
            continue
        spec = next(spec for spec in KERNELS.values() if spec.library == library and spec.requires)
        found = availability(spec)
        result.append({"library": library, "version": found.version, "available": found.available, "reason": found.reason or ""})
    return result

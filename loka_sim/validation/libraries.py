"""Which kernel libraries this machine has."""

from __future__ import annotations

from typing import Any


def libraries() -> list[dict[str, Any]]:
    """A row a library for the document: its version, or why its kernels are absent."""
    import torch

    from hil.kernels.availability import availability
    from perfmodel.kernels import KERNELS, LIBRARIES, library_of

    result = []
    for library in LIBRARIES:
        specs = [spec for name, spec in KERNELS.items() if library_of(name) == library]
        if specs[0].requires is None:
            version = torch.__version__ if library == "torch" else None
            result.append({"library": library, "version": version, "available": True, "reason": ""})
            continue
        found = availability(specs[0])
        result.append({"library": library, "version": found.version, "available": found.available, "reason": found.reason or ""})
    return result

"""The dispatch table: a decision as a file that a training job can load and check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loka_sim.errors import DataError
from loka_sim.schemas import problem, read_document
from perfmodel.kernels import KERNELS

SCHEMA_VERSION = 1
KIND = "loka-sim/dispatch_table"
FILE_NAME = "dispatch_table.json"

_PASS_KEYS = (
    "m", "n", "k", "groups", "status", "kernel", "recipe_a", "recipe_b", "accumulation",
    "predicted_us", "predicted_low_us", "predicted_high_us", "bf16_us", "bf16_low_us", "bf16_high_us",
    "speedup", "mere", "sqnr_db", "reason", "runner_up",
)  # fmt: skip


_PASS_EXTRAS = ("quantizers", "torchao")
"""Left out by older versions; `torchao` also where torchao can run the decision as it is."""


def from_whatif(document: dict[str, Any]) -> dict[str, Any]:
    """The dispatch table of a what-if document (`WhatIf.to_dict()`)."""
    model, hardware, settings = document["model"], document["hardware"], document["settings"]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "loka_sim_version": document["loka_sim_version"],
        "model": {
            "name": model["name"],
            "source": model["source"],
            "fingerprint": model["fingerprint"],
            "batch": settings["batch"],
            "mods": settings["mods"],
        },
        "hardware": {
            "name": hardware["name"],
            "capability": hardware["capability"],
            "perfmodel_fingerprint": hardware["perfmodel_fingerprint"],
        },
        "policy": {
            "max_mere": settings["max_mere"],
            "min_speedup": settings["min_speedup"],
            "statistics": document["statistics"]["name"],
            "libraries": settings["libraries"],
        },
        "sites": [
            {
                "name": site["name"],
                "op": site["op"],
                "weight": site["weight"],
                "n": site["passes"]["output"]["n"],
                "k": site["passes"]["output"]["k"],
                "passes": {
                    name: {key: decided[key] for key in (*_PASS_KEYS, *(key for key in _PASS_EXTRAS if key in decided))}
                    for name, decided in site["passes"].items()
                },
            }
            for site in document["sites"]
        ],
    }


def load(path: str | Path) -> dict[str, Any]:
    """Read and check a dispatch table.

    Args:
        path: The table, or a run folder that holds one.

    Raises:
        DataError: it is not there, truncated, of another kind or schema version, or breaks the schema.
    """
    path = Path(path)
    document = read_document(path / FILE_NAME if path.is_dir() else path, "dispatch_table")
    return check(document)


def check(document: dict[str, Any]) -> dict[str, Any]:
    """A dispatch table, unchanged, whose schema holds and whose kernels are known and are what it says of them.

    Raises:
        DataError: otherwise; names the field.
    """
    mend = "make the table again with `loka-sim whatif MODEL --out DIR`"
    if found := problem(document, "dispatch_table"):
        raise DataError(f"this is no dispatch table: {found}; {mend}")
    for site in document["sites"]:
        for name, decided in site["passes"].items():
            for what, choice in ((name, decided), (f"{name}.torchao", decided.get("torchao"))):
                if choice is not None:
                    _check_kernel(f"site {site['name']}: {what}", choice, mend)
            for tensor, kernel in decided.get("quantizers", {}).items():
                if kernel not in KERNELS or KERNELS[kernel].kind not in ("quantize", "layout"):
                    raise DataError(f"site {site['name']}: {name}.quantizers.{tensor} {kernel!r} is no quantizer; {mend}")
    return document


def _check_kernel(where: str, choice: dict[str, Any], mend: str) -> None:
    spec = KERNELS.get(choice["kernel"])
    if spec is None:
        raise DataError(f"{where}.kernel {choice['kernel']!r} is not known; {mend}")
    for field in ("recipe_a", "recipe_b", "accumulation"):
        # Formats may differ from the kernel's usual ones (e5m2 gradients, say); scaling and accumulation may not.
        wanted, given = (str(value).rpartition("/")[2] for value in (getattr(spec, field), choice[field]))
        if wanted != given:
            raise DataError(f"{where}.{field} is {given}, but {spec.name} is {wanted}; {mend}")

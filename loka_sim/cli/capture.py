"""`loka-sim capture MODEL --out spec.yaml`: a model's GEMMs as a file that can be read, edited and shared."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    """Add the verb to the command line."""
    verb = verbs.add_parser(
        "capture",
        help="a model's GEMMs as a spec file",
        allow_abbrev=False,
        description="Record every GEMM of a model, without memory for its weights.",
    )
    verb.add_argument("model", metavar="MODEL", help="zoo name, model spec file, or package.module:callable")
    verb.add_argument("--out", type=Path, metavar="FILE", help="where to write it: .yaml or .json (default: print it)")
    verb.add_argument(
        "--mods", default="", metavar="LIST", help="model changes: no_bias, blocknorm, hardswish, all; comma-separated"
    )
    verb.add_argument("--json", action="store_true", help="print the spec as JSON")
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Capture, then print or write."""
    from loka_sim.cli.output import print_json
    from loka_sim.modelspec import save
    from loka_sim.sources import model_spec
    from loka_sim.specfile import render

    spec, _ = model_spec(arguments.model, arguments.mods)
    if arguments.out is not None:
        save(spec, arguments.out)
    if arguments.json:
        print_json(spec.to_dict())
    elif arguments.out is None:
        print(render(spec.to_dict(), yaml=True), end="")
    else:
        gflop = spec.flops() / spec.batch / 1e9
        print(f"wrote {arguments.out}: {len(spec.sites)} sites, {gflop:.3g} GFLOP per sample at batch {spec.batch:,}")
        for name in spec.unaccounted:
            print(f"  not accounted for: {name}")
        kernels = sum(kernel.count for kernel in spec.fused)
        print(
            f"  {kernels:,} other kernels of a compiled forward and backward"
            if kernels
            else f"  whole step unknown: {spec.untraced}"
        )
    return 0

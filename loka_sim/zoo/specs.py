"""Capture every zoo model, plain and with all Mods, and write the specifications that ship under `data/specs`: for maintainers.

```
python -m loka_sim.zoo.specs            # into the checkout's data/specs
python -m loka_sim.zoo.specs --out DIR
```
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from loka_sim import modelspec
from loka_sim.capture import capture
from loka_sim.errors import LokaSimError
from loka_sim.modelspec import ModelSpec
from loka_sim.resolve import WITH_MODS
from loka_sim.zoo import DEFAULT_BATCH, NAMES, build, example_inputs


def capture_zoo_model(name: str, mods: str = "") -> ModelSpec:
    """A zoo model's specification, captured on meta at its default batch, with Mods or without.

    Raises:
        UserError: the zoo has no such model or there is no such Mod.
    """
    model = build(name, mods=mods, device="meta")
    inputs = example_inputs(name, DEFAULT_BATCH[name], device="meta")
    return replace(capture(model, inputs, name=name), source=f"zoo:{name}")


def main(arguments: list[str] | None = None) -> int:
    """Write all specifications; 0 if that worked, else the error's exit code."""
    from perfmodel import data_folder

    parser = argparse.ArgumentParser(prog="python -m loka_sim.zoo.specs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: the shipped data/specs)")
    out = parser.parse_args(arguments).out or data_folder() / "specs"
    try:
        for name in NAMES:
            for mods, file in (("", name), ("all", f"{name}{WITH_MODS}")):
                spec = capture_zoo_model(name, mods)
                modelspec.save(spec, out / f"{file}.json")
                print(f"{file}: {len(spec.sites)} sites, {spec.flops() / spec.batch / 1e9:.3f} GFLOP a sample", file=sys.stderr)
    except LokaSimError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""loka-sim: where FP8 is safe and fast in a large recommendation model, known before a GPU hour is spent.

The flat API; each name is imported when it is first used, so that `import loka_sim` costs nothing:

    spec = loka_sim.capture(module, inputs)           # any torch.nn.Module -> ModelSpec
    answer = loka_sim.whatif("wukong", batch=4096)    # zoo name, spec file, package.module:callable or ModelSpec
    answer.timelines["decision"]                      # one training step, stream by stream (perfmodel.timeline)
    loka_sim.save_run(answer, "runs/wukong")          # dispatch table, report and manifest
    loka_sim.compare("runs/a", "runs/b")              # two such folders
    loka_sim.export("runs/a/dispatch_table.json", "torchao")
    loka_sim.validate("wukong", out="runs/check")     # on a Hopper GPU: measure, refine, decide again
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

# `typing` takes longer to import than all else here, and an interrupt meanwhile would show a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from loka_sim.capture import capture as capture
    from loka_sim.compare import compare as compare
    from loka_sim.dispatch.export import export as export
    from loka_sim.dispatch.table import load as load_table  # noqa: F401
    from loka_sim.modelspec import ModelSpec as ModelSpec
    from loka_sim.resolve import resolve_model as resolve_model
    from loka_sim.run_folder import save_run as save_run
    from loka_sim.validation import validate as validate
    from loka_sim.whatif import WhatIf as WhatIf
    from loka_sim.whatif import whatif as whatif

__version__ = "0.1.0"

_HOMES = {
    "ModelSpec": "loka_sim.modelspec:ModelSpec",
    "WhatIf": "loka_sim.whatif:WhatIf",
    "capture": "loka_sim.capture:capture",
    "compare": "loka_sim.compare:compare",
    "export": "loka_sim.dispatch.export:export",
    "load_table": "loka_sim.dispatch.table:load",
    "resolve_model": "loka_sim.resolve:resolve_model",
    "save_run": "loka_sim.run_folder:save_run",
    "validate": "loka_sim.validation:validate",
    "whatif": "loka_sim.whatif:whatif",
}

__all__ = ["__version__", *sorted(_HOMES)]


class _Package(ModuleType):
    """Keeps `loka_sim.capture` the function after the module of that name was imported.

    The import system binds a submodule to its package; without this, `loka_sim.capture(...)` would work
    or not depending on what was imported before. `from loka_sim.capture import ...` reaches the module.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, _, attribute = home.partition(":")
        value = getattr(importlib.import_module(module), attribute)
        super().__setattr__(name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES})


sys.modules[__name__].__class__ = _Package

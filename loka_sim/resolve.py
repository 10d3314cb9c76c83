"""The model that a user names on the command line: a zoo model, a spec file, or a function of their own.

Imports no torch for the first two, so that they answer at once.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from loka_sim import modelspec
from loka_sim.errors import UserError, expected_of_lower_floors
from loka_sim.modelspec import ModelSpec

SUFFIXES = (".json", ".yaml", ".yml")
WITH_MODS = "+mods"
"""Ends the names of zoo models that were captured with all Mods, as it does those of their statistics."""


def resolve_model(text: str) -> ModelSpec:
    """The model specification that `text` names.

    Args:
        text: A zoo model (`wukong-small`; a bare `wukong` is its production size), the path of a spec file, or
            `package.module:callable`: a function without arguments that returns (model, inputs) or a ModelSpec.
            It is imported with the current directory on the path, and called with `meta` as torch's default device.

    Raises:
        UserError: there is no such model, the file is wrong, or the import or the call fails; one line with the mend.
        DataError: the package's data are missing.
    """
    names = zoo_names()
    if (shipped := _of_zoo(text, names)) is not None:
        return modelspec.load(shipped, shipped=True)
    path = Path(text)
    if path.suffix == ".py":
        module = path.stem if path.is_absolute() else ".".join(path.with_suffix("").parts)
        raise UserError(f"{text}: a Python file is no model; name the function in it that makes one, as in {module}:make")
    if path.suffix.lower() in SUFFIXES or path.is_file():
        return modelspec.load(path)
    if ":" in text:
        return _from_callable(text)
    known = sorted({*names, *(name.rpartition("-")[0] for name in names if name.endswith("-production"))})
    close = difflib.get_close_matches(text, known, n=3)
    mend = f"did you mean {' or '.join(close)}?" if close else f"zoo models: {', '.join(known)}"
    raise UserError(f"unknown model {text!r}: {mend} (or give a spec file, or package.module:callable)")


def zoo_names() -> dict[str, Path]:
    """Spec file of each shipped zoo model.

    Raises:
        DataError: the package's data are missing.
    """
    from perfmodel.data_folder import data_folder

    with expected_of_lower_floors():
        folder = data_folder() / "specs"
    return {path.stem: path for path in sorted(folder.glob("*.json")) if not path.stem.endswith(WITH_MODS)}


def zoo_with_mods(text: str) -> ModelSpec | None:
    """The zoo model that `text` names with all Mods, as captured; None where it names none.

    Raises:
        DataError: the package's data are missing or damaged.
    """
    found = _of_zoo(text, zoo_names())
    return None if found is None else modelspec.load(found.with_name(f"{found.stem}{WITH_MODS}.json"), shipped=True)


def _of_zoo(text: str, names: dict[str, Path]) -> Path | None:
    """The zoo's file that `text` names: a bare name is the production size."""
    return names.get(text) or names.get(f"{text}-production")


@contextlib.contextmanager
def _current_directory_first() -> Iterator[None]:
    """Import what lies in the current directory, as `python -m` does."""
    try:
        here = str(Path.cwd())
    except FileNotFoundError:
        raise UserError("the current directory is gone; change to one that is there") from None
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def _reason(error: BaseException) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def load_callable(text: str) -> Callable[[], Any]:
    """The function that `package.module:callable` names, imported with the current directory on the path.

    Raises:
        UserError: there is none, or its import fails.
    """
    module_name, _, attribute = text.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{text!r}: write package.module:callable")
    # Standard output is the answer's: what the user's code prints is no part of it.
    with _current_directory_first(), contextlib.redirect_stdout(sys.stderr):
        found = _attribute(_import(module_name, text), attribute, text)
    if not callable(found):
        mend = "name a function without arguments that returns (model, inputs)"
        raise UserError(f"{text}: {attribute} is {found!r:.40}, not a function; {mend}")
    return cast(Callable[[], Any], found)


def _from_callable(text: str) -> ModelSpec:
    found = load_callable(text)
    with _current_directory_first(), contextlib.redirect_stdout(sys.stderr):
        made = _call(found, text)
        if isinstance(made, ModelSpec):
            return made
        return _captured(made, text)


def _import(name: str, text: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            mend = f"run in the folder that holds {missing.partition('.')[0]!r}, or install it"
            if name.endswith(".py"):
                mend = f"write the module's name, not its file: {name.removesuffix('.py').replace('/', '.')}"
            raise UserError(f"{text}: no module named {missing!r}; {mend}") from None
        raise UserError(f"{text}: {name} imports {missing!r}, which is not installed; install it") from None
    except (Exception, SystemExit) as error:  # whatever a user's module raises when it is imported
        raise UserError(f"{text}: importing {name} fails ({_reason(error)}); mend the module") from error


def _attribute(module: Any, attribute: str, text: str) -> Any:
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            close = difflib.get_close_matches(part, names, n=1)
            mend = f"did you mean {close[0]!r}?" if close else f"name one of its functions: {', '.join(names[:8]) or 'none'}"
            raise UserError(f"{text}: {module.__name__} has no {part!r}; {mend}")
        found = getattr(found, part)
    return found


def _call(function: Callable[[], Any], text: str) -> Any:
    """Call the user's function on meta, where a model of any size needs no memory; anew as written if that fails."""
    import torch

    try:
        with torch.device("meta"):
            return function()
    except (Exception, SystemExit):  # reads values while building, say: whatever it is, the call below tells
        pass
    try:
        return function()
    except (Exception, SystemExit) as error:
        mend = "let it run without arguments and return (model, inputs)"
        raise UserError(f"{text}: the call fails ({_reason(error)}); {mend}") from error


def _captured(made: Any, text: str) -> ModelSpec:
    from torch import nn

    from loka_sim.capture import capture

    if not (isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], nn.Module)):
        shown = f"a {type(made).__name__} of {len(made)}" if isinstance(made, tuple | list) else f"a {type(made).__name__}"
        raise UserError(f"{text}: returned {shown}; return (model, inputs), a torch.nn.Module and its example inputs")
    try:
        return replace(capture(*made), source=text)
    except UserError as error:
        raise UserError(f"{text}: {error}") from error

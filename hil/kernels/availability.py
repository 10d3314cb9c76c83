"""Which kernels can run here: is the library that each comes from installed, in a version that fits?

Metadata alone is read; no library is imported, so asking costs milliseconds and a broken installation cannot harm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec

from packaging.requirements import Requirement

from perfmodel.kernels import KERNELS, KernelSpec


@dataclass(frozen=True)
class Availability:
    """Whether a kernel's library is here.

    Attributes:
        available: Whether it is, in a version that fits.
        version: The version installed; None where nothing is, or where torch and triton are enough.
        reason: Why it is not available, and the mend; empty where it is.
    """

    available: bool
    version: str | None
    reason: str


def _importable(module: str) -> bool:
    try:
        # The package alone: looking for a module inside it would import it.
        return find_spec(module.partition(".")[0]) is not None
    except ValueError:
        # A module that is loaded already and carries no spec.
        return True


def _shell(requirement: str) -> str:
    return f"'{requirement}'" if set(requirement) & set("<>=~! ;[") else requirement


@cache
def _check(requires: str, module: str | None) -> Availability:
    requirement = Requirement(requires)
    install = f"pip install {_shell(requires)}"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Availability(False, None, f"{requirement.name} is not installed; {install}")
    if not requirement.specifier.contains(version, prereleases=True):
        needed = f"{requirement.name}{requirement.specifier}"
        return Availability(False, version, f"{requirement.name} {version} is installed, {needed} is needed; {install}")
    if module is not None and not _importable(module):
        why = f"{requirement.name} {version} is installed, but its module {module} is not found"
        return Availability(False, version, f"{why}; pip install --force-reinstall {_shell(requires)}")
    return Availability(True, version, "")


def availability(spec: KernelSpec) -> Availability:
    """Whether a kernel's library is installed, in a version that fits."""
    return Availability(True, None, "") if spec.requires is None else _check(spec.requires, spec.module)


def available_kernels(names: Iterable[str] = KERNELS) -> tuple[str, ...]:
    """Those of the registered kernels whose library is here, in the registry's order."""
    return tuple(name for name in names if availability(KERNELS[name]).available)


def absences(names: Iterable[str]) -> list[str]:
    """One line for every reason why kernels of these are not available, naming them."""
    kernels: dict[str, list[str]] = {}
    for name in names:
        verdict = availability(KERNELS[name])
        if not verdict.available:
            kernels.setdefault(verdict.reason, []).append(name)
    return [f"not available: {', '.join(some)}: {reason}" for reason, some in kernels.items()]

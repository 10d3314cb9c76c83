"""A run's folder: dispatch table, what-if, report, and a manifest that says where they came from.

All or nothing: the files are written to a folder beside, which then takes the name. A folder that is not a
run of ours is never touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import loka_sim
from loka_sim.errors import UserError

if TYPE_CHECKING:
    from loka_sim.whatif import WhatIf

SCHEMA_VERSION = 1
KIND = "loka-sim/run"
MANIFEST, WHATIF, REPORT = "manifest.json", "whatif.json", "report.html"
_LIBRARIES = ("numpy", "pandas", "xgboost-cpu", "torch")


@dataclass(frozen=True)
class RunFolder:
    """A folder that a run may be written to; make one with `prepare`."""

    path: Path

    @classmethod
    def prepare(cls, path: str | Path) -> RunFolder:
        """Check that a run may be written there, before any work is done for it.

        Raises:
            UserError: the folder holds something else, or cannot be written to.
        """
        path = Path(path)
        try:
            if path.is_dir():
                if Path.cwd().is_relative_to(path.resolve()):
                    raise UserError(f"--out {path} is where you are, and a run takes its folder's place; name a folder in it")
                if any(path.iterdir()) and not _is_run(path):
                    raise UserError(f"--out {path} holds other files; choose a new folder or one that loka-sim wrote")
            elif path.exists() or path.is_symlink():
                raise UserError(f"--out {path} is a file; choose a folder")
            parent = path.resolve().parent
            parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryDirectory(dir=parent, prefix=".loka-sim.").cleanup()
        except OSError as error:
            raise _unwritable(path, error) from None
        return cls(path)

    def write(self, document: dict[str, Any], command: Sequence[str]) -> None:
        """Write a what-if and everything made from it.

        Args:
            document: `WhatIf.to_dict()`.
            command: The command line, as words.

        Raises:
            UserError: the folder cannot be written to; what was there is left as it was.
        """
        from loka_sim.cli.output import render_json
        from loka_sim.dispatch import table
        from loka_sim.report import render

        files = {
            table.FILE_NAME: render_json(table.from_whatif(document)) + "\n",
            WHATIF: render_json(document) + "\n",
            REPORT: render(document),
        }
        payloads = {name: text.encode() for name, text in files.items()}
        payloads[MANIFEST] = (json.dumps(_manifest(document, command, payloads), indent=2) + "\n").encode()
        path = self.path.resolve()  # a link to a folder stays a link
        staging = None
        try:
            staging = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
            staging.chmod(0o755)
            for name, payload in payloads.items():
                (staging / name).write_bytes(payload)
            _swap(staging, path)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        finally:
            if staging is not None:
                shutil.rmtree(staging, ignore_errors=True)


def save_run(answer: WhatIf, path: str | Path) -> None:
    """Write a what-if's dispatch table, report, document and manifest into a folder.

    Raises:
        UserError: the folder holds something else, or cannot be written to.
    """
    from loka_sim.document import command

    RunFolder.prepare(path).write(answer.to_dict(), command(answer.settings))


def _swap(staging: Path, path: Path) -> None:
    """Give the staged folder its name; an older run goes only when the new one is in place."""
    if not path.exists():
        os.rename(staging, path)
        return
    older = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
    os.rename(path, older / "run")
    try:
        os.rename(staging, path)
    except BaseException:
        os.rename(older / "run", path)
        raise
    finally:
        shutil.rmtree(older, ignore_errors=True)


def _is_run(path: Path) -> bool:
    """Whether a folder is a run of ours: its manifest says so, and nothing is in it that the manifest does not list."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return manifest["kind"] == KIND and {entry.name for entry in path.iterdir()} <= {MANIFEST, *manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _unwritable(path: Path, error: OSError) -> UserError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return UserError(f"cannot write --out {path}: a file stands where a folder of that path should be; choose another")
    return UserError(f"cannot write --out {path}: {error.strerror}; choose a folder that you may write to")


def _manifest(document: dict[str, Any], command: Sequence[str], payloads: dict[str, bytes]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "command": list(command),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"loka-sim": loka_sim.__version__, "python": platform.python_version(), **_versions()},
        "inputs": {
            "model": document["model"]["name"],
            "model_fingerprint": document["model"]["fingerprint"],
            "perfmodel_fingerprint": document["hardware"]["perfmodel_fingerprint"],
            "statistics": document["statistics"]["name"],
            "statistics_fingerprint": document["statistics"]["fingerprint"],
            "libraries": document["settings"]["libraries"],
        },
        "files": {
            name: {"sha256": hashlib.sha256(payload).hexdigest(), "bytes": len(payload)} for name, payload in payloads.items()
        },
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

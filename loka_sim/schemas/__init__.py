"""The JSON Schemas of the documents that loka-sim writes, and reading a document against its schema."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from loka_sim.errors import DataError

_WRITERS = {"validation": "validate --gpu MODEL --out DIR"}
"""The command that writes a document, where it is not `whatif`."""


@cache
def schema(name: str) -> dict[str, Any]:
    """The shipped JSON Schema of a document: `whatif`, `dispatch_table`, ..."""
    return json.loads(Path(__file__).with_name(f"{name}.schema.json").read_text())


def problem(document: Any, name: str) -> str | None:
    """The first thing in a document that its schema refuses, as `field: what`; None when there is none."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema(name)).iter_errors(document))
    if error is None:
        return None
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    text = error.message if len(error.message) <= 160 else f"{error.message[:157]}..."
    return f"{where.lstrip('.') or 'the document'}: {text}"


def read_document(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON document that loka-sim wrote and check it against its schema.

    Args:
        path: The file.
        name: Which schema, e.g. `whatif`.

    Raises:
        DataError: the file is missing, unreadable, truncated, of another kind or version, or breaks the schema.
    """
    what = f"loka-sim {name.replace('_', ' ')}"
    mend = f"write it again with `loka-sim {_WRITERS.get(name, 'whatif MODEL --out DIR')}`"
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"{path} is not there; {mend}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; {mend}") from None
    except RecursionError:
        raise DataError(f"{path} is no {what}, but nested too deeply to be read; {mend}") from None
    except ValueError as error:
        raise DataError(f"{path} is truncated or no JSON ({error}); {mend}") from None
    kind = schema(name)["properties"]["kind"]["const"]
    version = schema(name)["properties"]["schema_version"]["const"]
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise DataError(f"{path} is no {what}; {mend}")
    if document.get("schema_version") != version:
        raise DataError(f"{path} has schema version {document.get('schema_version')}, this loka-sim reads {version}; {mend}")
    found = problem(document, name)
    if found:
        raise DataError(f"{path}: {found}; {mend}")
    return document

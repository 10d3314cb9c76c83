"""Model specification files: reading, checking against the schema, writing for people to read."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from loka_sim.errors import UserError

SCHEMA_PATH = Path(__file__).parent / "schemas" / "model_spec.schema.json"
MOST = 2**53
"""Largest size beside those of GEMMs, whose limits the what-if names: whole numbers are exact up to there."""


def read(path: Path, what: str = "model spec") -> Any:
    """The document in a `.json`, `.yaml` or `.yml` file (any other suffix is read as YAML, of which JSON is a part).

    Args:
        path: The file.
        what: What an error calls its contents.

    Raises:
        UserError: the file is missing, cannot be read, is truncated or says one key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a readable {what} file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not text; give a {what} as JSON or YAML") from None
    if not text.strip():
        raise UserError(f"{path}: the file is empty; write the {what} again")
    return _parse_json(text, path, what) if path.suffix.lower() == ".json" else _parse_yaml(text, path, what)


def _parse_json(text: str, path: Path, what: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        document: dict[str, Any] = {}
        for key, value in pairs:
            if key in document:
                raise UserError(f"{path}: key {key!r} stands twice in one object; keep one")
            document[key] = value
        return document

    def refuse(constant: str) -> Any:
        raise UserError(f"{path}: {constant} is no JSON number; write a finite number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path}: no valid JSON at {where} ({error.msg}); is the file truncated? write it again") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply for a {what}; write it again") from None


def _parse_yaml(text: str, path: Path, what: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe loader that refuses a key said twice (YAML forbids it, PyYAML takes the last)."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for position, key in enumerate(keys) if key in keys[:position]), None)
            if twice is not None:
                raise UserError(f"{path}: key {twice!r} stands twice in one object; keep one")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # a subclass of SafeLoader: builds plain data only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise UserError(f"{path}: no valid YAML{where} ({problem}); is the file truncated? write it again") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply for a {what}; write it again") from None


def check(document: Any, where: str) -> None:
    """Hold a document against the schema, and what a schema cannot say.

    Raises:
        UserError: one line with `where`, the field and the mend.
    """
    import jsonschema

    schema = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    # The first in the file's own order; at one place an unknown key first, since a misspelt key is also a missing one.
    errors = sorted(
        validator.iter_errors(document),
        key=lambda error: (_position(error, document), error.validator != "additionalProperties"),
    )
    if errors:
        raise UserError(f"{where}: {_explain(errors[0])}")
    _check_sites(document, where)


def _position(error: Any, document: Any) -> list[int]:
    """Indices of an error's path in the order of the document's keys."""
    position = []
    for step in error.absolute_path:
        position.append(list(document).index(step) if isinstance(document, dict) else step)
        document = document[step]
    return position


def _field(steps: Any) -> str:
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _explain(error: Any) -> str:
    """One line for a schema error: the field, what is wrong, the mend."""
    field = _field(error.absolute_path)
    at = f"{field}: " if field else ""
    rule, limit = error.validator, error.validator_value
    if rule == "additionalProperties":
        known = list(error.schema["properties"])
        unknown = next(key for key in error.instance if key not in known)
        close = difflib.get_close_matches(str(unknown), known, n=1)
        mend = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        return f"{at}unknown key {unknown!r}; {mend}"
    if rule == "required":
        missing = next(key for key in limit if key not in error.instance)
        return f"{at}{missing!r} is missing; add it"
    if rule == "oneOf":
        return f"{at}a site takes either 'passes' or 'm', 'n' and 'k'; give one of them"
    if rule == "enum" and field == "schema_version":
        return f"{at}version {_short(error.instance)} is not known here; write {limit[-1]}, or use a newer loka-sim"
    if rule == "enum":
        return f"{at}{_short(error.instance)} is not one of {', '.join(map(str, limit))}; write one of them"
    if rule == "minimum":
        return f"{at}{error.instance} is less than {limit}; write {limit} or more"
    if rule == "pattern" and field.endswith(".label"):
        return (
            f"{at}{_short(error.instance)} names no attention; write attention:QUERIESxKEYSxFEATURES, and :causal behind it if so"
        )
    if rule == "pattern":
        return f"{at}{_short(error.instance)} is no dimension; write an integer, 'batch', '26*batch' or '3*batch+1'"
    if rule == "minLength":
        return f"{at}the text is empty; write a name"
    wanted = " or ".join([limit] if isinstance(limit, str) else limit)
    words = {"object": "an object with keys", "array": "a list", "string": "a text", "null": "null"}
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    found = kinds.get(type(error.instance), f"{_short(error.instance)}")
    return f"{at}found {found}; write {words.get(wanted, 'a value of type ' + wanted)}"


def _check_sites(document: dict[str, Any], where: str) -> None:
    from loka_sim.modelspec import Dim

    batch, seen = document["batch"], set()
    for index, site in enumerate(document["sites"]):
        at = f"{where}: sites[{index}]"
        if site["name"] in seen:
            raise UserError(f"{at}.name: {site['name']!r} stands twice; name each site once, as 'module' and 'module#2'")
        seen.add(site["name"])
        if "passes" in site and (extra := [key for key in ("m", "n", "k", "groups") if key in site]):
            raise UserError(f"{at}: 'passes' and {extra[0]!r} together; a site takes either 'passes' or 'm', 'n' and 'k'")
        passes = {f".passes.{key}": gemm for key, gemm in site["passes"].items()} if "passes" in site else {"": site}
        for label, gemm in passes.items():
            for key in ("m", "n", "k", "groups"):
                if key in gemm and (size := Dim.parse(gemm[key]).at(batch)) < 1:
                    raise UserError(f"{at}{label}.{key}: {gemm[key]!r} is {size} at batch {batch}; it must be positive")
    for index, kernel in enumerate(document.get("fused", ())):
        for key in ("kept", "reduced", "read_bytes", "written_bytes", "unordered_bytes"):
            if key in kernel and (size := Dim.parse(kernel[key]).at(batch)) > MOST:
                raise UserError(f"{where}: fused[{index}].{key}: {_short(size)} at batch {batch}; no GPU holds that, write less")
    for index, table in enumerate(document.get("tables", ())):
        for key in ("rows", "dim", "lookups"):
            if table.get(key, 0) > MOST:
                raise UserError(f"{where}: tables[{index}].{key}: {_short(table[key])}; no GPU holds that, write less")
    names = [table["name"] for table in document.get("tables", ())]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise UserError(f"{where}: tables[{index}].name: {name!r} stands twice; name each table once")


def render(document: dict[str, Any], *, yaml: bool = False) -> str:
    """The document as YAML, or as JSON with one line per pass, table and plain value."""
    if yaml:
        import yaml as yaml_module

        return yaml_module.safe_dump(document, sort_keys=False, width=120)
    return _render_json(document, "") + "\n"


def _render_json(value: Any, indent: str) -> str:
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    if not any(isinstance(item, dict | list) for item in items) and (isinstance(value, dict) or len(items) < 2):
        return json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    if isinstance(value, list):
        rows = [_render_json(item, inner) for item in value]
        return "[\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}]"
    rows = [f"{json.dumps(key)}: {_render_json(item, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}}}"

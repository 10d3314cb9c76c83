"""The HTML report of a what-if: one file that opens offline, for people who look at plots before tables."""

from __future__ import annotations

from functools import cache
from typing import Any


def render(document: dict[str, Any]) -> str:
    """A what-if document (`WhatIf.to_dict()`) as one self-contained HTML page.

    The same document gives the same text. Names come from users' models and are escaped.

    Args:
        document: It must fit the what-if schema.
    """
    from loka_sim.report.view import page

    return _template("report.html.j2").render(page(document))


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("loka_sim.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)

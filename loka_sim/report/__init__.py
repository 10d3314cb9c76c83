"""HTML reports: one file each that opens offline, for people who look at plots before tables.

The same document gives the same text. Names come from users' models and are escaped.
"""

from __future__ import annotations

from functools import cache
from typing import Any


def render(document: dict[str, Any]) -> str:
    """A what-if (`WhatIf.to_dict()`, fitting the what-if schema) as one self-contained HTML page."""
    from loka_sim.report.view import page

    return _template("report.html.j2").render(page(document))


def render_compare(document: dict[str, Any]) -> str:
    """A comparison (`Comparison.to_dict()`, fitting the compare schema) as one self-contained HTML page."""
    from loka_sim.report.compare_view import page

    return _template("compare.html.j2").render(page(document))


def render_validation(document: dict[str, Any]) -> str:
    """A validation (fitting the validation schema) as one self-contained HTML page."""
    from loka_sim.report.validation_view import page

    return _template("validation.html.j2").render(page(document))


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

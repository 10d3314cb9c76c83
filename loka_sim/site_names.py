"""Names of sites that differ in their layers' indices alone."""

import re
from collections.abc import Sequence


def role(name: str) -> str:
    """A site's name with a star for every layer index: `layers.*.fmb.mlp.*`."""
    return re.sub(r"(?<![^.])\d+(?![^.#])", "*", name)


def common_name(names: Sequence[str]) -> str:
    """The name of sites of one role: `layers.*.fmb.mlp.0`, a star where their indices differ."""
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(some[0] if len(set(some)) == 1 else "*" for some in parts)

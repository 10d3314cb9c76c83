"""Two what-if runs side by side: what was asked differently, what changed, where, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loka_sim.dispatch.candidates import SiteShape, illegal, launches
from loka_sim.dispatch.decide import flat
from loka_sim.dispatch.operands import DEFAULT_LIBRARIES, Row, Toolbox
from loka_sim.errors import DataError, UserError
from loka_sim.modelspec import PASSES
from loka_sim.run_folder import WHATIF
from loka_sim.schemas import read_document
from perfmodel.kernels import ACROSS, BF16, BF16_BATCHED, KERNELS, laid
from perfmodel.layouts import OTHERS

SCHEMA_VERSION = 1
KIND = "loka-sim/compare"


@dataclass(frozen=True)
class Change:
    """A site that the two runs decide differently.

    Attributes:
        site: Its name.
        passes: Kernel in A and in B, per pass that changed.
        gain_a_us: What A's decision saves over bf16 there, at A's settings.
        gain_b_us: What B's decision saves over bf16 there, at B's settings.
        worth_us: At B's settings, how much slower the site would be with A's kernels (bf16 where A's cannot
            run there); None where B does not know the times (A's kernels were not considered).
    """

    site: str
    passes: Mapping[str, tuple[str, str]]
    gain_a_us: float
    gain_b_us: float
    worth_us: float | None


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        a: What-if document of the first run.
        b: What-if document of the second run.
        names: What the runs are called: their folders.
        differences: Value in A and in B of every setting and input that differs.
        changes: Sites decided differently, the most worth first.
        only_a: Sites that only A has.
        only_b: Sites that only B has.
    """

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    names: tuple[str, str]
    differences: Mapping[str, tuple[Any, Any]]
    changes: tuple[Change, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def worth_us(self) -> float:
        """At B's settings, how much slower the dense step would be with A's kernels."""
        return sum(change.worth_us for change in self.changes if change.worth_us is not None)

    def to_dict(self) -> dict[str, Any]:
        """The `--json` document, see schemas/compare.schema.json."""
        decided = _step(self.b, "decision")["step_us"]
        exchanged = self.a["communication"] or self.b["communication"]
        steps_a, steps_b = (_steps(side) if exchanged else side["steps"] for side in (self.a, self.b))
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "a": self.names[0],
            "b": self.names[1],
            "differences": {key: {"a": a, "b": b} for key, (a, b) in self.differences.items()},
            "steps": [_side_by_side(a, b) for b in steps_b for a in steps_a if a["name"] == b["name"]],
            "counts": {"a": self.a["counts"]["passes"], "b": self.b["counts"]["passes"]},
            "changes": [
                {
                    "site": change.site,
                    "passes": {name: {"a": a, "b": b} for name, (a, b) in change.passes.items()},
                    "gain_a_us": change.gain_a_us,
                    "gain_b_us": change.gain_b_us,
                    "worth_us": change.worth_us,
                    "worth_percent": None if change.worth_us is None else 100 * change.worth_us / decided,
                }
                for change in self.changes
            ],
            "worth_us": self.worth_us,
            "worth_percent": 100 * self.worth_us / decided,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def compare(a: str | Path, b: str | Path) -> Comparison:
    """Compare two runs.

    Args:
        a: Run folder that `loka-sim whatif --out` wrote, or its whatif.json.
        b: The other.

    Raises:
        DataError: a folder or file is not there, truncated, not a what-if, or of a loka-sim that knows other kernels.
    """
    documents = [_read(Path(path)) for path in (a, b)]
    first, second = documents
    sites_a, sites_b = ({site["name"]: site for site in document["sites"]} for document in documents)
    shared = [name for name in sites_b if name in sites_a]
    if not shared:
        models = f"{first['model']['name']}, {second['model']['name']}"
        raise UserError(f"{a} and {b} have no site in common ({models}); compare runs of one model")
    times = {Row(*entry[:5]): float(entry[5]) for entry in second["times"]}
    # Documents of older versions took every layout for the one with K fastest.
    for row, us in [(row, us) for row, us in times.items() if row.kernel in (BF16, BF16_BATCHED)]:
        for layout in OTHERS if row.kernel == BF16 else ACROSS:
            times.setdefault(row._replace(kernel=laid(row.kernel, layout)), us)
    major, minor = second["hardware"]["capability"]
    # Of A's kernels too, where B knows their times: what B did not consider, it may know all the same.
    known = {row.kernel for row in times}
    libraries = {*_libraries(first), *_libraries(second)}
    toolbox = replace(Toolbox.of(sorted(libraries), known, (major, minor)), us=lambda row: times.get(row, float("inf")))
    changes = [c for name in shared if (c := _change(sites_a[name], sites_b[name], times, toolbox)) is not None]
    changes.sort(key=lambda c: (-abs(c.worth_us or 0.0), -abs(c.gain_b_us - c.gain_a_us), c.site))
    return Comparison(
        first, second, (str(a), str(b)), _differences(first, second), tuple(changes),
        tuple(name for name in sites_a if name not in sites_b), tuple(name for name in sites_b if name not in sites_a),
    )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    document = read_document(path / WHATIF if path.is_dir() else path, "whatif")
    named = (decided["kernel"] for site in document["sites"] for decided in site["passes"].values())
    if (unknown := next((kernel for kernel in named if kernel not in KERNELS), None)) is not None:
        mend = "write it again with `loka-sim whatif MODEL --out DIR`"
        raise DataError(f"{path} decided for {unknown}, a kernel that this loka-sim does not know; {mend}")
    return document


_UNSAID: Mapping[str, Any] = {"libraries": list(DEFAULT_LIBRARIES), "dense": "ddp", "exchange": "bf16"}
"""What documents of older versions leave out of their settings, because it could not be otherwise."""


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    rows: dict[str, tuple[Any, ...]] = {
        key: tuple(side["settings"].get(key, _UNSAID.get(key)) for side in (a, b)) for key in b["settings"] if key != "statistics"
    }
    rows["model fingerprint"] = a["model"]["fingerprint"], b["model"]["fingerprint"]
    rows["statistics"] = a["statistics"]["name"], b["statistics"]["name"]
    rows["time model"] = tuple(d["hardware"]["perfmodel_fingerprint"] for d in (a, b))
    rows["loka-sim"] = a["loka_sim_version"], b["loka_sim_version"]
    return {key: (pair[0], pair[1]) for key, pair in rows.items() if pair[0] != pair[1]}


def _libraries(document: Mapping[str, Any]) -> list[str]:
    found: list[str] = document["settings"].get("libraries", _UNSAID["libraries"])
    return found


def _change(a: Mapping[str, Any], b: Mapping[str, Any], times: Mapping[Row, float], toolbox: Toolbox) -> Change | None:
    both = [name for name in PASSES if name in a["passes"] and name in b["passes"]]
    kernels = {name: (a["passes"][name]["kernel"], b["passes"][name]["kernel"]) for name in both}
    changed = {name: pair for name, pair in kernels.items() if pair[0] != pair[1]}
    if not changed:
        return None
    shape = _shape(b)
    own = {name: entry["kernel"] for name, entry in b["passes"].items()}
    other = dict(own)
    for name, (before, _) in changed.items():
        other[name] = shape.bf16()[name] if illegal(shape, name, before, toolbox) else before
    rows = flat(launches(shape, other, toolbox))
    worth = sum(times[row] for row in rows) - b["predicted_us"] if all(row in times for row in rows) else None
    return Change(b["name"], changed, a["gain_us"], b["gain_us"], worth)


def _shape(site: Mapping[str, Any]) -> SiteShape:
    passes = tuple(
        (name, *(site["passes"][name][key] for key in ("m", "n", "k", "groups"))) for name in PASSES if name in site["passes"]
    )
    padded = tuple(
        (name, *entry["padded"], entry["groups"]) for name in PASSES if "padded" in (entry := site["passes"].get(name, {}))
    )
    return SiteShape(passes, frozenset(site["stored_transposed"]), padded, site["bias"])


def _step(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(step for step in document["steps"] if step["name"] == name)


def _steps(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A run's dense steps, and those of bf16 and the decision with what is exchanged, where that is known."""
    found = document["communication"] or {"step_us": _step(document, "decision")["step_us"], "speedup": None}
    if found["step_us"] is None:
        return list(document["steps"])
    decided = float(found["step_us"])
    speedup = _step(document, "decision")["speedup"] if found["speedup"] is None else found["speedup"]
    with_all = (("bf16", "bf16, on its GPUs", decided * speedup, 1.0), ("decision", "decision, on its GPUs", decided, speedup))
    batch = document["settings"]["batch"]
    return [
        *document["steps"],
        *(
            {"name": f"{name}_on_gpus", "label": label, "step_us": us, "per_sample_us": us / batch, "speedup": ratio}
            for name, label, us, ratio in with_all
        ),
    ]


def _side_by_side(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": b["name"],
        "label": b["label"],
        **{f"{key}_{side}": step[key] for key in ("step_us", "per_sample_us", "speedup") for side, step in (("a", a), ("b", b))},
        "per_sample_ratio": a["per_sample_us"] / b["per_sample_us"],
    }

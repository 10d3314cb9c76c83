"""A comparison document as its page shows it: bars on common scales, repeated layers in one row."""

from __future__ import annotations

from typing import Any

from loka_sim.report import words
from loka_sim.report.plots import Record, family, family_name
from loka_sim.report.scale import Scale

_SIDES = ("a", "b")


def page(document: Record) -> Record:
    """Everything that the template needs, of a document that fits the compare schema."""
    return {
        "names": [document["a"], document["b"]],
        "differences": [
            (key.replace("_", " "), _value(pair["a"]), _value(pair["b"])) for key, pair in document["differences"].items()
        ],
        "steps": _steps(document),
        "counts": _counts(document),
        "changes": _changes(document),
        "sites": len(document["changes"]),
        "unknown": sum(change["worth_us"] is None for change in document["changes"]),
        "worth": words.micro(document["worth_us"]),
        "worth_percent": words.percent(document["worth_percent"] / 100),
        "only": [("A", document["only_a"]), ("B", document["only_b"])],
    }


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "default" if value is None else str(value)


def _steps(document: Record) -> list[Record]:
    scale = Scale(0.0, 1.04 * max([s[f"per_sample_us_{side}"] for s in document["steps"] for side in _SIDES] + [1e-12]))
    return [
        {
            "name": step["name"],
            "label": step["label"],
            "ratio": words.ratio(step["per_sample_ratio"]),
            "bars": [
                {
                    "side": side.upper(),
                    "width": scale.at(step[f"per_sample_us_{side}"]),
                    "per_sample": words.micro(step[f"per_sample_us_{side}"]),
                    "step": words.micro(step[f"step_us_{side}"]),
                    "speedup": words.ratio(step[f"speedup_{side}"]),
                }
                for side in _SIDES
            ],
        }
        for step in document["steps"]
    ]


def _counts(document: Record) -> list[Record]:
    return [
        {
            "side": side.upper(),
            "statuses": [
                {
                    "key": key,
                    "label": label,
                    "passes": document["counts"][side][key],
                    "share": round(100 * document["counts"][side][key] / max(sum(document["counts"][side].values()), 1), 3),
                }
                for key, (label, _) in words.STATUSES.items()
            ],
        }
        for side in _SIDES
    ]


def _changes(document: Record) -> list[Record]:
    """Changed sites, those alike but for their layer's number added up, in the document's order of worth."""
    groups: dict[tuple[str, tuple[tuple[str, str, str], ...]], list[Record]] = {}
    for change in document["changes"]:
        moves = tuple((name, pair["a"], pair["b"]) for name, pair in change["passes"].items())
        groups.setdefault((family(change["site"]), moves), []).append(change)
    rows = []
    for (_, moves), members in groups.items():
        known = [member["worth_us"] for member in members if member["worth_us"] is not None]
        rows.append(
            {
                "name": family_name([member["site"] for member in members]),
                "sites": words.plural(len(members), "site") if len(members) > 1 else "",
                "moves": [
                    {
                        "pass": words.PASSES[name],
                        "from": words.kernel(a),
                        "to": words.kernel(b),
                        "from_fp8": "fp8" in a,
                        "to_fp8": "fp8" in b,
                    }
                    for name, a, b in moves
                ],
                "gain_a": words.micro(sum(member["gain_a_us"] for member in members)),
                "gain_b": words.micro(sum(member["gain_b_us"] for member in members)),
                "worth": words.micro(sum(known)) if known else "–",
                "order": -abs(sum(known)),
            }
        )
    return sorted(rows, key=lambda row: row["order"])

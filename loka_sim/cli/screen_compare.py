"""The screen of a comparison, drawn from its JSON document."""

from __future__ import annotations

from typing import Any

from loka_sim.cli.output import Style, figure, shorten, table, wrap
from loka_sim.cli.screen import STATUS_WORDS, kernel_word
from loka_sim.site_names import common_name, role

_TOP = 8


def compare_screen(document: dict[str, Any], style: Style) -> str:
    """The screen as text, at most 100 columns wide."""
    lines = [f"A  {document['a']}", f"B  {document['b']}", "", *_differences(document, style), ""]
    lines += [*_steps(document, style), "", *_counts(document, style), "", *_changes(document, style)]
    for side, names in (("A", document["only_a"]), ("B", document["only_b"])):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            lines += ["", *wrap(f"only in {side}: {', '.join(names[:5])}{more}", "  ", "    ")]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "default" if value is None else str(value)


def _differences(document: dict[str, Any], style: Style) -> list[str]:
    if not document["differences"]:
        return ["asked for the same, with the same data"]
    rows = [("differs in", "A", "B")]
    for key, pair in document["differences"].items():
        rows.append((key.replace("_", " "), shorten(_text(pair["a"]), 38), shorten(_text(pair["b"]), 38)))
    head, *body = table(rows, "lll")
    return [style(head, "dim"), *body]


def _steps(document: dict[str, Any], style: Style) -> list[str]:
    rows = [("dense step", "A us", "B us", "A us/sample", "B us/sample", "A/B", "A vs bf16", "B vs bf16")]
    for step in document["steps"]:
        is_bf16 = step["name"] == "bf16"
        rows.append((
            step["label"], f"{step['step_us_a']:,.0f}", f"{step['step_us_b']:,.0f}",
            _per_sample(step["per_sample_us_a"]), _per_sample(step["per_sample_us_b"]), f"{step['per_sample_ratio']:.2f}x",
            "" if is_bf16 else f"{step['speedup_a']:.2f}x", "" if is_bf16 else f"{step['speedup_b']:.2f}x",
        ))  # fmt: skip
    head, *body = table(rows, "lrrrrrrr")
    body[-1] = style(body[-1], "bold")
    return [style(head, "dim"), *body]


def _per_sample(us: float) -> str:
    return f"{us:,.2f}" if us >= 1 else f"{us:.4f}"


def _counts(document: dict[str, Any], style: Style) -> list[str]:
    rows = [("GEMM passes", "A", "B")]
    rows += [(word, str(document["counts"]["a"][key]), str(document["counts"]["b"][key])) for key, word in STATUS_WORDS.items()]
    head, *body = table(rows, "lrr")
    return [style(head, "dim"), *body]


def _changes(document: dict[str, Any], style: Style) -> list[str]:
    """Sites decided differently; those that are alike but for a layer index stand in one row, added up."""
    changes = document["changes"]
    if not changes:
        return [style("  every shared site is decided alike", "bold")]
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for change in changes:
        moves = tuple((name, pair["a"], pair["b"]) for name, pair in change["passes"].items())
        groups.setdefault((role(change["site"]), moves), []).append(change)
    ranked = sorted(groups.values(), key=lambda group: -abs(_worth(group, "worth_us")))
    rows: list[tuple[str, ...]] = [("decided differently", "sites", "passes", "A", "B", "worth us", "of step")]
    for group in ranked[:_TOP]:
        first = (shorten(common_name([change["site"] for change in group]), 24), str(len(group)))
        worth = (figure(_worth(group, "worth_us")), f"{_worth(group, 'worth_percent'):.2f}%")
        for names, a, b in _moves(group[0]["passes"]):
            rows.append((*first, names, kernel_word(a), kernel_word(b), *worth))
            first, worth = ("", ""), ("", "")
    head, *body = table(rows, "lrlllrr", gives=0)
    rest = sum(len(group) for group in ranked[_TOP:])
    more = [style(f"  and {rest} more sites (--json lists them)", "dim")] if rest else []
    unknown = sum(change["worth_us"] is None for change in changes)
    total = (
        f"{len(changes)} sites changed. At B's settings, A's kernels would cost {figure(document['worth_us'])} us more "
        f"({document['worth_percent']:.1f}% of the dense step)."
    )
    lines = [style(line, "bold") for line in wrap(total, "  ", "  ")]
    if unknown:
        lines += wrap(f"Of {unknown} sites B knows no time for A's kernels; they are not in that sum.", "  ! ", "    ")
    return [style(head, "dim"), *body, *more, "", *lines]


def _worth(changes: list[dict[str, Any]], key: str) -> float:
    return sum(change[key] for change in changes if change[key] is not None)


def _moves(passes: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Passes that changed alike as one: their names, the kernel in A and in B."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, pair in passes.items():
        grouped.setdefault((pair["a"], pair["b"]), []).append(name)
    return [("all three" if len(names) == 3 else ", ".join(names), a, b) for (a, b), names in grouped.items()]

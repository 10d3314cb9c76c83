"""The screen of a comparison, drawn from its JSON document."""

from __future__ import annotations

from typing import Any

from loka_sim.cli.output import Style, shorten, table, wrap
from loka_sim.cli.screen import STATUS_WORDS, kernel_word

_TOP = 12


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
    rows = [("dense step", "A us", "B us", "A us/sample", "B us/sample", "A vs bf16", "B vs bf16", "A/B per sample")]
    for step in document["steps"]:
        is_bf16 = step["name"] == "bf16"
        label = step["label"].replace("torchao's auto filter", "auto filter")
        rows.append((
            label, f"{step['step_us_a']:,.0f}", f"{step['step_us_b']:,.0f}",
            f"{step['per_sample_us_a']:.4g}", f"{step['per_sample_us_b']:.4g}",
            "" if is_bf16 else f"{step['speedup_a']:.2f}x", "" if is_bf16 else f"{step['speedup_b']:.2f}x",
            f"{step['per_sample_ratio']:.2f}x",
        ))  # fmt: skip
    head, *body = table(rows, "lrrrrrrr", gap=1)
    body[-1] = style(body[-1], "bold")
    return [style(head, "dim"), *body]


def _counts(document: dict[str, Any], style: Style) -> list[str]:
    rows = [("GEMM passes", "A", "B")]
    rows += [(word, str(document["counts"]["a"][key]), str(document["counts"]["b"][key])) for key, word in STATUS_WORDS.items()]
    head, *body = table(rows, "lrr")
    return [style(head, "dim"), *body]


def _changes(document: dict[str, Any], style: Style) -> list[str]:
    changes = document["changes"]
    if not changes:
        return [style("  every shared site is decided alike", "bold")]
    rows = [("decided differently", "A -> B", "gain A us", "gain B us", "worth us", "of step")]
    for change in changes[:_TOP]:
        moves = "; ".join(f"{name} {kernel_word(p['a'])} -> {kernel_word(p['b'])}" for name, p in _short(change["passes"]))
        worth = change["worth_us"]
        rows.append((
            shorten(change["site"], 26), shorten(moves, 34), f"{change['gain_a_us']:,.1f}", f"{change['gain_b_us']:,.1f}",
            "?" if worth is None else f"{worth:,.1f}", "?" if worth is None else f"{change['worth_percent']:.2f}%",
        ))  # fmt: skip
    head, *body = table(rows, "llrrrr", gap=1)
    rest = len(changes) - _TOP
    more = [style(f"  and {rest} more sites (--json lists them)", "dim")] if rest > 0 else []
    total = (
        f"  {len(changes)} sites changed. At B's settings, B's kernels beat A's by "
        f"{document['worth_us']:,.1f} us ({document['worth_percent']:.1f}% of the dense step)."
    )
    return [style(head, "dim"), *body, *more, "", style(total, "bold")]


def _short(passes: dict[str, Any]) -> list[tuple[str, Any]]:
    """Passes that changed alike as one: `all`, or their short names joined."""
    names = {"output": "out", "grad_input": "gin", "grad_weight": "gw"}
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, pair in passes.items():
        grouped.setdefault((pair["a"], pair["b"]), []).append(names[name])
    return [("all" if len(which) == len(names) else "+".join(which), {"a": a, "b": b}) for (a, b), which in grouped.items()]

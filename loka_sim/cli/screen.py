"""The first screen of a what-if: verdict, counts, where the gain is, what the baselines would do, what to run next.

Drawn from the JSON document alone, so that it can say nothing that `--json` does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loka_sim.cli.output import Style, figure, shorten, statements, table, wrap
from loka_sim.modelspec import PASSES
from loka_sim.site_names import common_name, role

STATUS_WORDS = {"fast": "fast", "not_worth_it": "not worth it", "unsafe": "unsafe", "illegal": "illegal"}
_COLOURS = {"fast": "green", "not_worth_it": "dim", "unsafe": "yellow", "illegal": "dim"}
_TOP, _CLOSEST = 8, 5
_BAR = 28


def kernel_word(kernel: str) -> str:
    """A kernel's name as narrow columns hold it: `tensor fast`, `block128`, `bf16`; of others than torch `loka row fast`."""
    library, _, word = kernel.partition("/")
    word = word.removeprefix("fp8_").replace("_batched", "").replace("tensorwise", "tensor").replace("rowwise", "row")
    return ("" if library == "torch" else f"{library} ") + word.replace("_", " ")


def first_screen(document: dict[str, Any], style: Style, out: Path | None = None) -> str:
    """The screen as text, at most 100 columns wide.

    Args:
        document: `WhatIf.to_dict()`.
        style: Colour or none.
        out: The run folder that was written, if any.
    """
    verdict = document["verdict"]
    lines = [
        *(style(line, "dim") for line in wrap(_subject(document), "", "  ")),
        "",
        style(verdict["text"], "bold", "green" if verdict["pays"] else "yellow"),
        "",
        *_counts(document, style),
        "",
        *_steps(document, style),
        "",
    ]
    where = _sites(document, style) if verdict["pays"] else _closest(document, style)
    lines += [*where, ""] if where else []
    lines += statements(document, style)
    lines += ["", *_next(document, style, out)]
    return "\n".join(lines)


def _subject(document: dict[str, Any]) -> str:
    model, settings = document["model"], document["settings"]
    gpus = f"{settings['gpus']} x {document['hardware']['name'].upper()}"
    mods = f", mods {', '.join(settings['mods'])}" if settings["mods"] else ""
    flops = model["flops"] / settings["batch"] / 1e9
    return f"{model['name']}{mods}, {gpus}, batch {settings['batch']:,} per GPU, {flops:.3g} GFLOP per sample"


def _counts(document: dict[str, Any], style: Style) -> list[str]:
    passes, flops = document["counts"]["passes"], document["counts"]["flops"]
    total = sum(flops.values())
    rows = [("GEMM passes", "number", "of FLOPs")]
    rows += [(word, f"{passes[status]:,}", f"{flops[status] / total:.0%}") for status, word in STATUS_WORDS.items()]
    head, *body = table(rows, "lrr")
    lines = [style(head, "dim")]
    for line, status in zip(body, STATUS_WORDS, strict=True):
        bar = "█" * round(_BAR * flops[status] / total)
        lines.append(f"{line}  {style(bar, _COLOURS[status])}".rstrip())
    return lines


def _steps(document: dict[str, Any], style: Style) -> list[str]:
    decided = document["steps"][-1]["step_us"]
    rows = [("dense step", "us", "against bf16", "GEMMs alone", "vs decision", "FP8 passes", "unsafe")]
    for step in document["steps"]:
        ratio = f"{step['speedup']:.2f}x [{step['speedup_low']:.2f}, {step['speedup_high']:.2f}]"
        cells = [ratio if step["fp8_passes"] else "the same", f"{step['gemm_speedup']:.2f}x"]
        over = f"{step['step_us'] / decided - 1:+.1%}"
        passes = [f"{step['fp8_passes']:,}", f"{step['unsafe_passes']:,}"]
        if step["name"] == "bf16":
            cells, passes = ["", ""], ["", ""]
        if step["step_us"] == decided:
            over = ""
        rows.append((step["label"], f"{step['step_us']:,.0f}", *cells, over, *passes))
    head, *body = table(rows, "lrrrrrr")
    body[-1] = style(body[-1], "bold")
    communication = document["communication"]
    more = _whole(document)
    if communication is not None and communication["exposed_us"] is not None:
        ends = f" [{communication['step_low_us']:,.0f}, {communication['step_high_us']:,.0f}]"
        slowed = f", kernels slowed by {communication['slowed_us']:,.0f}" if communication.get("slowed_us") else ""
        more = [
            *more,
            "",
            f"  on {communication['gpus']:,} GPUs: {communication['step_us']:,.0f} us{ends}, {communication['speedup']:.2f}x; "
            f"communication exposed {communication['exposed_us']:,.0f} us{slowed}",
        ]
    return [style(head, "dim"), *body, *more]


def _whole(document: dict[str, Any]) -> list[str]:
    """The step with every kernel in it: bf16, as decided, and the update."""
    first, last = document["steps"][0], document["steps"][-1]
    if "whole_us" not in first:
        return []
    update = sum(other["time_us"] for other in document["others"] if other["phase"] in ("table update", "optimizer"))
    ends = f"[{last['whole_speedup_low']:.2f}, {last['whole_speedup_high']:.2f}]"
    ratio = f"{last['whole_speedup']:.2f}x {ends}" if last["fp8_passes"] else "the same"
    return [
        "",
        f"  whole forward and backward: bf16 {first['whole_us']:,.0f} us, decided {last['whole_us']:,.0f} us, {ratio}; "
        f"update {update:,.0f} us",
    ]


def _sites(document: dict[str, Any], style: Style) -> list[str]:
    """The sites that gain most; sites that are alike but for a layer index stand in one row, added up."""
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for site in document["sites"]:
        if any(decided["status"] == "fast" for decided in site["passes"].values()):
            alike = tuple((name, p["kernel"], p["m"], p["n"], p["k"]) for name, p in site["passes"].items())
            groups.setdefault((role(site["name"]), alike), []).append(site)
    ranked = sorted(groups.values(), key=lambda group: (-_sum(group, "gain_us"), group[0]["name"]))
    rows: list[tuple[str, ...]] = [("top sites by gain", "sites", *PASSES, "bf16 us", "us", "gain", "MERE")]
    for group in ranked[:_TOP]:
        passes = group[0]["passes"]
        kernels = [kernel_word(passes[name]["kernel"]) if name in passes else "-" for name in PASSES]
        worst = max(d["mere"] for site in group for d in site["passes"].values() if d["mere"] is not None)
        figures = [figure(_sum(group, key)) for key in ("bf16_us", "predicted_us", "gain_us")]
        rows.append(
            (shorten(common_name([site["name"] for site in group]), 31), str(len(group)), *kernels, *figures, f"{worst:.3f}")
        )
    head, *body = table(rows, "lrlllrrrr", gives=0)
    rest = ranked[_TOP:]
    number, gain = sum(map(len, rest)), sum(_sum(group, "gain_us") for group in rest)
    more = [style(f"  and {number} more, {figure(gain)} us together", "dim")] if rest else []
    return [style(head, "dim"), *body, *more]


def _sum(sites: list[dict[str, Any]], key: str) -> float:
    return sum(site[key] for site in sites)


def _closest(document: dict[str, Any], style: Style) -> list[str]:
    """Where FP8 pays nowhere: the passes where it comes closest, each on its own, and what it would take."""
    limit = document["settings"]["max_mere"]
    found = []
    for site in document["sites"]:
        for name, decided in site["passes"].items():
            fp8 = [c for c in decided["candidates"] if c["mere"] is not None and c["speedup"] is not None]
            if fp8:
                best = max(fp8, key=lambda candidate: (candidate["mere"] < limit, candidate["speedup"]))
                found.append((best["speedup"], site["name"], name, decided, best))
    rows: list[tuple[str, ...]] = [("closest to paying", "pass", "best FP8", "bf16 us", "GEMM us", "with quantization", "MERE")]
    for _, site_name, name, decided, best in sorted(found, key=lambda entry: (-entry[0], *entry[1:3]))[:_CLOSEST]:
        us = f"{figure(best['total_us'])} ({best['speedup']:.2f}x)"
        figures = (figure(decided["bf16_us"]), figure(best["gemm_us"]), us, f"{best['mere']:.3f}")
        rows.append((shorten(site_name, 26), name, kernel_word(best["kernel"]), *figures))
    if len(rows) == 1:
        return []
    head, *body = table(rows, "lllrrrr", gives=0)
    return [style(head, "dim"), *body]


def _next(document: dict[str, Any], style: Style, out: Path | None) -> list[str]:
    if out is None:
        return [f"next: {style(document['next'], 'cyan')}"]
    return [
        f"wrote {out}/: dispatch_table.json, report.html, whatif.json, manifest.json",
        f"next: {style(f'loka-sim export {out}/dispatch_table.json --to torchao', 'cyan')}",
    ]

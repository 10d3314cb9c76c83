"""Where everything stands on the report's plots, in percent of their width or in pixels of their height."""

from __future__ import annotations

from typing import Any

from loka_sim.report import words
from loka_sim.report.scale import Scale, linear_around, log_around

SCATTER_HEIGHT = 340
TOP_SITES = 12

Record = dict[str, Any]


def speedups(document: Record) -> Record:
    """The dense step's speedup over bf16, decision first, each with its interval."""
    others = [step for step in document["steps"] if step["name"] != "bf16"]
    others.sort(key=lambda step: step["name"] != "decision")
    threshold = document["settings"]["min_speedup"]
    edges = [step[key] for step in others for key in ("speedup_low", "speedup_high")]
    scale = linear_around([1.0, threshold, *edges])
    return {
        "rows": [
            {
                "name": step["name"],
                "label": step["label"],
                "low": scale.at(step["speedup_low"]),
                "width": round(scale.at(step["speedup_high"]) - scale.at(step["speedup_low"]), 3),
                "at": scale.at(step["speedup"]),
                "speedup": words.ratio(step["speedup"]),
                "interval": f"{words.ratio(step['speedup_low'])} to {words.ratio(step['speedup_high'])}",
                "tone": "good" if step["speedup_low"] > 1 else "bad" if step["speedup_high"] < 1 else "open",
            }
            for step in others
        ],
        "one": scale.at(1.0),
        "threshold": scale.at(threshold),
        "ticks": [(scale.at(tick), words.ratio(tick)) for tick in scale.ticks(5)],
    }


def steps(document: Record) -> Record:
    """Every step's time as stacked parts, with its interval and bf16 as the reference."""
    every = document["steps"]
    reference = next((step for step in every if step["name"] == "bf16"), None)
    scale = Scale(0.0, 1.04 * max([step["step_high_us"] for step in every] + [1e-9]))
    rows = []
    for step in every:
        quantize = step["quantize_us"]
        parts = (("gemm", step["gemm_us"] - quantize), ("quantize", quantize), ("around", step["around_us"]))
        unsafe = step["unsafe_passes"]
        rows.append(
            {
                "name": step["name"],
                "label": step["label"],
                "description": step["description"],
                "parts": [{"kind": kind, "width": scale.at(us), "us": words.micro(us)} for kind, us in parts],
                "low": scale.at(step["step_low_us"]),
                "width": round(scale.at(step["step_high_us"]) - scale.at(step["step_low_us"]), 3),
                "us": words.micro(step["step_us"]),
                "interval": f"{words.micro(step['step_low_us'])} to {words.micro(step['step_high_us'])}",
                "speedup": words.ratio(step["speedup"]),
                "fp8": words.plural(step["fp8_passes"], "FP8 pass"),
                "unsafe": f"{unsafe} unsafe" if unsafe else "",
            }
        )
    return {
        "rows": rows,
        "reference": scale.at(reference["step_us"]) if reference else None,
        "ticks": [(scale.at(tick), f"{tick:,g}") for tick in scale.ticks(5)],
    }


LANE_KINDS = {
    "look-up": "around", "forward": "gemm", "loss": "around", "backward": "gemm later", "table update": "around",
    "optimizer": "around", "all_to_all": "quantize", "all_reduce": "reduce", "reduce_scatter": "reduce", "all_gather": "around",
}  # fmt: skip
"""Colours of a timeline's stretches."""


def lanes(document: Record) -> Record | None:
    """The decided step's streams over time; None for one GPU and where nothing is known of communication."""
    found = document["communication"]
    if found is None or not found.get("lanes"):
        return None
    scale = Scale(0.0, 1.02 * found["step_us"])
    rows = []
    for lane in found["lanes"]:
        spans = [
            {
                "kind": LANE_KINDS.get(what, "around"),
                "left": scale.at(start),
                "width": round(scale.at(end) - scale.at(start), 3),
                "tip": f"{words.operation(what)}: {words.micro(end - start)} µs from {words.micro(start)}",
            }
            for start, end, what in lane["spans"]
        ]
        share = found["streams"][lane["stream"]]["share"]
        rows.append({"stream": lane["stream"], "spans": spans, "busy": words.percent(share)})
    return {"rows": rows, "ticks": [(scale.at(tick), f"{tick:,g}") for tick in scale.ticks(5)]}


def shown_candidate(decided: Record, max_mere: float) -> Record | None:
    """The FP8 kernel that stands for a pass on the plot: the chosen one, else the best that was considered.

    Of an unsafe pass that is the fastest; of one not worth it the fastest among the accurate, where there are any.
    None where no FP8 kernel has both a predicted time and a predicted error.
    """
    drawable = [
        candidate
        for candidate in decided["candidates"]
        if candidate["illegal"] is None and candidate["speedup"] and candidate["mere"]
    ]
    for candidate in drawable:
        if candidate["kernel"] == decided["kernel"]:
            return {**candidate, "speedup": decided["speedup"], "mere": decided["mere"] or candidate["mere"]}
    if decided["status"] == "not_worth_it":
        drawable = [candidate for candidate in drawable if candidate["mere"] < max_mere] or drawable
    return max(drawable, key=lambda candidate: candidate["speedup"], default=None)


def scatter(document: Record) -> Record:
    """Every pass by its FP8 speedup and its error, both logarithmic."""
    max_mere, min_speedup = document["settings"]["max_mere"], document["settings"]["min_speedup"]
    drawn, missing = [], dict.fromkeys(words.STATUSES, 0)
    for index, site in enumerate(document["sites"]):
        for name, decided in site["passes"].items():
            candidate = shown_candidate(decided, max_mere)
            if candidate is None:
                missing[decided["status"]] += 1
            else:
                drawn.append((index, site, name, decided, candidate))
    x = log_around([1.0, 1.2 * min_speedup, *(entry[4]["speedup"] for entry in drawn)])
    y = log_around([max_mere, max_mere / 4, *(entry[4]["mere"] for entry in drawn)])
    longest = max((entry[3]["bf16_us"] for entry in drawn), default=1.0) or 1.0
    crowd = min(1.0, max(0.65, (200 / max(len(drawn), 1)) ** 0.25))
    # Large ones first, so that small ones stay visible on top of them.
    drawn.sort(key=lambda entry: -entry[3]["bf16_us"])

    def height(value: float) -> float:
        return round((100 - y.at(value)) * SCATTER_HEIGHT / 100, 2)

    points = [
        {
            "site": index,
            "status": decided["status"],
            "x": x.at(candidate["speedup"]),
            "y": height(candidate["mere"]),
            "r": round(crowd * (3.2 + 8.5 * (decided["bf16_us"] / longest) ** 0.5), 2),
            "tip": f"{site['name']}, {words.PASSES[name]}\n"
            f"{words.STATUSES[decided['status']][0]}: {words.kernel(candidate['kernel'])} at "
            f"{words.ratio(candidate['speedup'])}, MERE {words.percent(candidate['mere'])}\n"
            f"{decided['m']:,} × {decided['n']:,} × {decided['k']:,}, bf16 {words.micro(decided['bf16_us'])} µs\n"
            f"{decided['reason']}",
        }
        for index, site, name, decided, candidate in drawn
    ]
    left_out = [f"{words.plural(n, 'pass')} {words.STATUSES[key][0]}" for key, n in missing.items() if n]
    return {
        "points": points,
        "height": SCATTER_HEIGHT,
        "one": x.at(1.0),
        "min_speedup": x.at(min_speedup),
        "max_mere": height(max_mere),
        "x_ticks": [(x.at(tick), f"{tick:g}×") for tick in x.ticks(7)],
        "y_ticks": [(height(tick), f"{100 * tick:g}%") for tick in y.ticks(6)],
        "left_out": ", ".join(left_out),
        "shared": any(e[3]["status"] == "fast" and e[4]["speedup"] < min_speedup for e in drawn),
        "statuses": [key for key in words.STATUSES if any(point["status"] == key for point in points)],
    }


def family(name: str) -> str:
    """A site's name without its layer's number: the first numeric part, by which repeated layers differ."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join([*parts[:index], "*", *parts[index + 1 :]])
    return name


def family_name(names: list[str]) -> str:
    """One name for sites of a family: `layers.{0-19}.out`, or `layers.{0,2,7}.out` where numbers lack between."""
    pattern = family(names[0])
    if len(names) == 1 or pattern == names[0]:
        return names[0]
    place = pattern.split(".").index("*")
    numbers = sorted(int(name.split(".")[place]) for name in names)
    dense = numbers == list(range(numbers[0], numbers[-1] + 1))
    inside = f"{numbers[0]}-{numbers[-1]}" if dense else ",".join(map(str, numbers))
    return pattern.replace("*", "{" + inside + "}", 1)


def waterfall(document: Record) -> Record:
    """The sites that gain most, repeated layers as one, each starting where the one above it ended."""
    gaining: dict[tuple[str, int, int], list[Record]] = {}
    for site in document["sites"]:
        if site["gain_us"] > 0:
            output = site["passes"]["output"]
            gaining.setdefault((family(site["name"]), output["n"], output["k"]), []).append(site)

    def sums(sites: list[Record]) -> tuple[float, float]:
        bf16 = sum(site["bf16_us"] for site in sites)
        return sum(site["gain_us"] for site in sites), bf16 / max(sum(site["predicted_us"] for site in sites), 1e-9)

    entries = sorted(
        ((family_name([site["name"] for site in sites]), len(sites), *sums(sites)) for sites in gaining.values()),
        key=lambda entry: -entry[2],
    )
    total = sum(entry[2] for entry in entries)
    rest = entries[TOP_SITES:]
    shown: list[tuple[str, int, float, float | None]] = list(entries[:TOP_SITES])
    if rest:
        shown.append(("all others", sum(entry[1] for entry in rest), sum(entry[2] for entry in rest), None))
    rows, run = [], 0.0
    for name, count, gain, speedup in shown:
        rows.append(
            {
                "name": name,
                "sites": words.plural(count, "site") if count > 1 else "",
                "gain": words.micro(gain),
                "speedup": words.ratio(speedup) if speedup else "",
                "start": round(100 * run / total, 3),
                "width": round(100 * gain / total, 3),
                "cumulative": words.percent((run + gain) / total),
                "rest": speedup is None,
            }
        )
        run += gain
    return {"rows": rows, "total": words.micro(total), "sites": sum(entry[1] for entry in entries)}

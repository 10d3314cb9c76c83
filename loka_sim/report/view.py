"""A what-if document as the page shows it: positions on plots, rows in order, and every number already in words.

The template only lays out; each figure here comes from the document, none is computed anew but shares and sums.
"""

from __future__ import annotations

from loka_sim.modelspec import PASSES
from loka_sim.report import agreement, plots, words
from loka_sim.report.plots import Record, family
from loka_sim.report.scale import Scale


def page(document: Record) -> Record:
    """Everything that the template needs, of a document that fits the what-if schema."""
    return {
        "facts": _facts(document),
        "verdict": _verdict(document),
        "speedups": plots.speedups(document),
        "steps": plots.steps(document),
        "statuses": _statuses(document),
        "scatter": plots.scatter(document),
        "waterfall": plots.waterfall(document),
        "sites": _sites(document),
        "communication": _communication(document),
        "trust": _trust(document),
        "policy": {
            "max_mere": words.percent(document["settings"]["max_mere"]),
            "min_speedup": words.ratio(document["settings"]["min_speedup"]),
        },
        "gpu": words.hardware(document["hardware"]["name"]),
        "document": document,
    }


def _facts(document: Record) -> list[tuple[str, str]]:
    model, settings, statistics = document["model"], document["settings"], document["statistics"]
    facts = [
        ("hardware", f"{settings['gpus']} × {words.hardware(document['hardware']['name'])}"),
        ("batch", f"{settings['batch']:,} per GPU"),
        ("GEMMs", f"{words.plural(model['sites'], 'site')}, {words.plural(model['passes'], 'pass')}"),
        ("per step", words.count(model["flops"], "FLOP")),
        ("parameters", f"{words.count(model['dense_parameters'])} dense"),
    ]
    if model["tables"]:
        facts.append(("embeddings", f"{words.plural(model['tables'], 'table')}, {words.count(model['table_bytes'], 'B')}"))
    libraries = settings.get("libraries", [])
    if len(libraries) > 1:
        facts.append(("kernels of", ", ".join(libraries)))
    facts.append(("mods", ", ".join(settings["mods"]) or "none"))
    facts.append(("statistics", statistics["name"]))
    return facts


def _verdict(document: Record) -> Record:
    verdict = document["verdict"]
    return {
        "speedup": words.ratio(verdict["speedup"]),
        "interval": f"{words.ratio(verdict['speedup_low'])} to {words.ratio(verdict['speedup_high'])}",
        "gemm_speedup": words.ratio(verdict["gemm_speedup"]),
        "text": verdict["text"],
        "pays": verdict["pays"],
    }


def _statuses(document: Record) -> list[Record]:
    counts = document["counts"]
    passes, flops = (max(sum(counts[key].values()), 1) for key in ("passes", "flops"))
    return [
        {
            "key": key,
            "label": label,
            "meaning": meaning,
            "passes": counts["passes"][key],
            "share": round(100 * counts["passes"][key] / passes, 3),
            "flops_share": round(100 * counts["flops"][key] / flops, 3),
            "flops": words.percent(counts["flops"][key] / flops),
        }
        for key, (label, meaning) in words.STATUSES.items()
    ]


def _sites(document: Record) -> list[Record]:
    """Sites for the table, the greatest gain first and then the longest."""
    sites = document["sites"]
    longest = max((max(site["bf16_us"], site["predicted_us"]) for site in sites), default=1.0) or 1.0
    order = sorted(range(len(sites)), key=lambda i: (-sites[i]["gain_us"], -sites[i]["bf16_us"], i))
    return [_site(index, sites[index], longest) for index in order]


def _site(index: int, site: Record, longest: float) -> Record:
    passes = {name: site["passes"][name] for name in PASSES if name in site["passes"]}
    output = passes["output"]
    rivals = {name: rival(p) for name, p in passes.items()}
    edges = [p[key] for p in passes.values() for key in ("bf16_high_us", "predicted_high_us")]
    edges += [candidate["total_high_us"] for candidate in rivals.values() if candidate]
    scale = Scale(0.0, 1.03 * max([*edges, 1e-9]))
    errors = [p["mere"] for p in passes.values() if p["mere"] is not None]
    follows = [site["norm"], site["activation"]]
    return {
        "index": index,
        "name": site["name"],
        "shape": f"{'' if site['op'] == 'linear' else site['op'] + ' '}{output['n']:,} × {output['k']:,}",
        "follows": ", ".join(word for word in follows if word),
        "statistics": site["statistics"],
        "bf16": words.micro(site["bf16_us"]),
        "predicted": words.micro(site["predicted_us"]),
        "gain": words.micro(site["gain_us"]) if site["gain_us"] else "0",
        "speedup": words.ratio(site["speedup"]),
        "error": words.percent(max(errors)) if errors else "–",
        "before_width": round(100 * site["bf16_us"] / longest, 2),
        "after_width": round(100 * site["predicted_us"] / longest, 2),
        "family": repr((family(site["name"]), output["n"], output["k"], [p["kernel"] for p in passes.values()])),
        "statuses": " ".join(dict.fromkeys(p["status"] for p in passes.values())),
        "gains": site["gain_us"] > 0,
        "sort": {
            "name": site["name"],
            "bf16": f"{site['bf16_us']:.6g}",
            "predicted": f"{site['predicted_us']:.6g}",
            "gain": f"{site['gain_us']:.6g}",
            "error": f"{max(errors, default=-1):.6g}",
        },
        "passes": [_pass(name, passes[name], rivals[name], scale) if name in passes else {"missing": name} for name in PASSES],
        "out_of_sweep": any(not p["in_sweep"] for p in passes.values()),
    }


def rival(decided: Record) -> Record | None:
    """The FP8 kernel that a bf16 decision is drawn against: the fastest that may run. None beside a chosen one."""
    if decided["status"] == "fast":
        return None
    legal = [c for c in decided["candidates"] if c["illegal"] is None and not _is_bf16(c["kernel"])]
    return min(legal, key=lambda candidate: candidate["total_us"], default=None)


def _is_bf16(kernel: str) -> bool:
    return kernel.startswith("torch/bf16")


def _pass(name: str, decided: Record, rival: Record | None, scale: Scale) -> Record:
    def interval(value: float, low: float, high: float) -> Record:
        start, end = scale.at(low), scale.at(high)
        return {"low": start, "width": round(end - start, 3), "at": scale.at(value)}

    other = (
        interval(rival["total_us"], rival["total_low_us"], rival["total_high_us"])
        if rival
        else interval(decided["predicted_us"], decided["predicted_low_us"], decided["predicted_high_us"])
    )
    runner_up = decided["runner_up"]
    fp8 = decided["status"] == "fast"
    groups = f" × {decided['groups']:,} groups" if decided["groups"] != 1 else ""
    return {
        "missing": None,
        "name": words.PASSES[name],
        "status": decided["status"],
        "status_label": words.STATUSES[decided["status"]][0],
        "kernel": words.kernel(decided["kernel"]),
        "full_kernel": decided["kernel"],
        "speedup": words.ratio(decided["speedup"]) if fp8 else "",
        "shape": f"{decided['m']:,} × {decided['n']:,} × {decided['k']:,}{groups}",
        "bf16_us": words.micro(decided["bf16_us"]),
        "predicted_us": words.micro(decided["predicted_us"]),
        "predicted_interval": f"{words.micro(decided['predicted_low_us'])} to {words.micro(decided['predicted_high_us'])}",
        "gemm_us": words.micro(decided["gemm_us"]),
        "quantize_us": words.micro(decided["quantize_us"]) if decided["quantize_us"] else "",
        "quantized": ", ".join(f"{tensor} by {maker}" for tensor, maker in decided.get("quantizers", {}).items()),
        "bf16_interval": f"{words.micro(decided['bf16_low_us'])} to {words.micro(decided['bf16_high_us'])}",
        "rival": f"{words.kernel(rival['kernel'])} {words.micro(rival['total_us'])} µs" if rival else "",
        "before": interval(decided["bf16_us"], decided["bf16_low_us"], decided["bf16_high_us"]),
        "after": other if rival or fp8 else None,
        "mere": words.percent(decided["mere"]) if decided["mere"] is not None else "",
        "sqnr": f"{decided['sqnr_db']:.1f} dB" if decided["sqnr_db"] is not None else "",
        "reason": decided["reason"],
        "in_sweep": decided["in_sweep"],
        "runner_up": f"{words.kernel(runner_up['kernel'])}, {words.micro(runner_up['total_us'])} µs"
        if runner_up and (rival is None or runner_up["kernel"] != rival["kernel"])
        else "",
        "candidates": [
            {
                "kernel": words.kernel(candidate["kernel"]),
                "illegal": candidate["illegal"],
                "chosen": candidate["kernel"] == decided["kernel"],
                "speedup": words.ratio(candidate["speedup"]) if candidate["speedup"] else "",
                "mere": words.percent(candidate["mere"]) if candidate["mere"] is not None else "",
            }
            for candidate in decided["candidates"]
            if not _is_bf16(candidate["kernel"])
        ],
    }


def _communication(document: Record) -> Record | None:
    found = document["communication"]
    if found is None:
        return None
    rows = [
        ("all-to-all, embeddings", words.count(found["all_to_all_bytes"], "B"), words.micro(found["all_to_all_us"])),
        (
            f"dense part, {found.get('dense', 'ddp')}",
            words.count(found["all_reduce_bytes"], "B"),
            words.micro(found["all_reduce_us"]),
        ),
        ("exposed: not behind compute", "", words.micro(found["exposed_us"])),
        ("kernels slowed by it", "", words.micro(found.get("slowed_us"))),
        ("step with it, as decided", "", words.micro(found["step_us"])),
    ]
    return {
        "gpus": f"{found['gpus']:,}",
        "rows": rows,
        "speedup": words.ratio(found["speedup"]),
        "text": found["text"],
        "lanes": plots.lanes(document),
    }


def _trust(document: Record) -> Record:
    statistics, held_out = document["statistics"], document["hardware"]["held_out"]
    matched = statistics["sites"]
    total = max(sum(matched.values()), 1)
    errors = held_out["kernels"] if held_out else {}
    gemms = {c["kernel"] for site in document["sites"] for p in site["passes"].values() for c in p["candidates"]}
    labels = {"exact": "same site", "role": "site of the same role", "assumed": "assumed, none found"}
    outside = [
        f"{site['name']}, {words.PASSES[name]}"
        for site in document["sites"]
        for name, decided in site["passes"].items()
        if not decided["in_sweep"]
    ]
    return {
        "matched": [
            {"key": key, "label": label, "sites": matched[key], "share": round(100 * matched[key] / total, 3)}
            for key, label in labels.items()
        ],
        "held_out": held_out
        and {
            "mape": f"{held_out['mape_percent']:.1f}%",
            "regret": None if held_out["regret_percent"] is None else f"{held_out['regret_percent']:.2f}%",
            "kernels": [
                [(name, f"{value:.1f}%", value) for name, value in sorted(errors.items()) if (name in gemms) == wanted]
                for wanted in (True, False)
            ],
            "worst": max([*errors.values(), 1e-9]),
            "longest": max(map(len, errors), default=0),
            "command": held_out["command"],
        },
        "fresh": agreement.fresh(held_out, gemms),
        "band": f"{agreement.BAND:g}",
        "warnings": [entry["text"] for entry in document["statements"] if entry["level"] == "warning"],
        "notes": [entry["text"] for entry in document["statements"] if entry["level"] != "warning"],
        "unaccounted": document["model"]["unaccounted"],
        "outside": outside,
    }

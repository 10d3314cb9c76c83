"""The validations that are shipped, side by side: how far off the models were, what decisions cost, what steps took.

    python benchmarks/validations.py [FOLDER]

reads every `loka-sim validate --gpu` document of a folder (data/h200/validations) and prints three tables in Markdown. Errors
of times after refinement are of shapes that it did not see: the model's own cross-validated, fresh ones never used.

    python benchmarks/validations.py --now [FOLDER]

prints the first of them as the shipped time model, refined by each document's own shapes, would have it now.

    python benchmarks/validations.py --swept

prints what the shipped time model's decisions cost over the best of the sweep `zoo`, in which every zoo model's kernels were
measured whole, on another machine; no fit has seen it.

    python benchmarks/validations.py --refined

refines the shipped time model by each document's own shapes and judges it on shapes that it did not see: fresh ones of the same
run, all of the other validations, and the sweeps `blind`, `blind2` and `zoo` of other machines.

    python benchmarks/validations.py --again

prints how far a second measurement of a validation's own shapes, by another validation or in the sweep `zoo`, is off the first.

    python benchmarks/validations.py --steps

prints the whole bf16 steps as the documents say that they were predicted, and as the shipped models predict them now.

    python benchmarks/validations.py --calibration FOLDER

prints how far a calibration's times (of `collect --gpu` or `validate --gpu`) are from the sweeps `blind`, `blind2` and `zoo`
of data/h200, beside the shipped model's: shapes that neither has seen, measured on other machines of that kind.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loka_sim.errors import LokaSimError
from perfmodel import data_folder

FAMILIES = ("gemm", "quantize", "layout")
POLICIES = ("before", "cross_validated", "after", "bf16", "naive_tensorwise", "filter_tensorwise")
BLIND, ENDS = ("blind", "blind2", "zoo"), ("time_us", "low_us", "high_us")
VARIANTS = ("decision", "filter_tensorwise", "naive_tensorwise")


def read(folder: Path) -> list[dict[str, Any]]:
    """Documents of a folder, by model."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: float | None) -> str:
    """`4.2%`."""
    return "–" if value is None else f"{100 * value:.1f}%" if abs(value) < 0.1 else f"{100 * value:.0f}%"


def name_of(document: dict[str, Any]) -> str:
    """Model, and its libraries where they are not torch's alone."""
    settings = document["settings"]
    libraries = [name for name in settings.get("libraries", []) if name != "torch"]
    return settings["model"] + (f" ({', '.join(libraries)})" if libraries else "")


def times(documents: Sequence[dict[str, Any]]) -> str:
    """Error and coverage per family, the model's shapes and fresh ones, before and after."""
    rows = []
    for document in documents:
        measured = document["time"]["summary"] if document["time"] else []
        summary = {(row["set"], row["family"]): row for row in measured}
        for which, label in (("model", "own"), ("fresh", "fresh")):
            cells = [f"{name_of(document)}, {label}"]
            for family in FAMILIES:
                row = summary.get((which, family))
                if row is None:
                    cells += ["–"] * 3
                    continue
                before, after = row["before"], row["after"]
                cells += [f"{row['n']:,}", *(f"{percent(before[key])} → {percent(after[key])}" for key in ("mape", "coverage"))]
            rows.append(cells)
    head = ["shapes", *(text for family in FAMILIES for text in (f"{family}: n", "MAPE", "in 90%"))]
    return markdown(head, rows)


def judged_now(document: dict[str, Any]) -> dict[str, Any]:
    """A document whose times are predicted by the shipped model of its hardware, refined as a validation refines it."""
    import pandas

    import perfmodel
    from loka_sim.validation.judge import time_summary
    from perfmodel.refine import refine

    rows = pandas.DataFrame(document["time"]["rows"]).rename(columns={"measured_us": "p50_us"})
    base = perfmodel.load(document["settings"]["hardware"])
    own, fresh = (rows[rows["set"] == which].reset_index(drop=True) for which in ("model", "fresh"))
    found = refine(base, own)
    told = []
    # Cross-validated rows come in an order of their own.
    for some, after in ((found.rows.assign(set="model"), found.held_out), (fresh, found.model.predict(fresh))):
        for when, predicted in (("before", base.predict(some)), ("after", after)):
            names = (f"{when}_us", f"{when}_low_us", f"{when}_high_us")
            some = some.assign(**{to: predicted[name].to_numpy() for to, name in zip(names, ENDS, strict=True)})
        told.append(some.rename(columns={"p50_us": "measured_us"}))
    return {**document, "time": {**document["time"], "summary": time_summary(pandas.concat(told, ignore_index=True))}}


def decisions(documents: Sequence[dict[str, Any]]) -> str:
    """What each policy costs over the measured best."""
    rows = []
    for document in documents:
        dispatch = document["dispatch"] or {"policies": [], "sites": 0, "of_sites": 0}
        by_name = {row["name"]: row for row in dispatch["policies"]}
        regrets = [percent(by_name[name]["against_best"]) if name in by_name else "–" for name in POLICIES]
        missed = [entry["name"] for entry in document["tolerances"] if entry["ok"] is False]
        kept = sum(entry["ok"] is True for entry in document["tolerances"])
        every = len(document["tolerances"])
        within = f"all {every} kept" if kept == every else f"{kept} kept, {every - kept} not measured"
        verdict = within if document["verdict"] else f"outside: {', '.join(missed)}" if missed else "not validated"
        rows.append([name_of(document), f"{dispatch['sites']} of {dispatch['of_sites']}", *regrets, verdict])
    head = ["over the measured best", "sites", "decision before", "cross-validated", "after", "bf16", "all FP8", "torchao filter"]
    return markdown([*head, "tolerances"], rows)


def steps(documents: Sequence[dict[str, Any]]) -> str:
    """Whole steps: measured, and predicted speedups."""
    rows = []
    for document in documents:
        step = document["step"]
        minutes = sum(stage["seconds"] for stage in document["stages"]) / 60
        asked = f"{minutes:.1f} of {document['settings']['minutes']:g}"
        if step is None:
            rows.append([name_of(document), asked, *["–"] * (2 + 2 * len(VARIANTS))])
            continue
        by_name = {variant["name"]: variant for variant in step["variants"]}
        whole = step["predicted_bf16_ms"]
        graph = by_name["bf16"].get("graph_ms")
        measured = f"{by_name['bf16']['measured_ms']:.2f}" + (f", as a graph {graph:.2f}" if graph else "")
        cells = [name_of(document), asked, measured, "–" if whole is None else f"{whole:.2f}"]
        for name in VARIANTS:
            variant = by_name.get(name) or by_name.get(f"{name}_before")
            if variant is None or variant["speedup"] is None:
                cells += ["–", "–"]
                continue
            # The decision before refinement stands for the refined one where that one's step was not measured.
            said = variant["predicted_after"] or variant["predicted_before"]
            note = " (before)" if variant["name"] != name else ""
            cells += [f"{variant['speedup']:.2f}x{note}", f"{said['speedup']:.2f}x [{said['low']:.2f}, {said['high']:.2f}]"]
        rows.append(cells)
    labels = {"decision": "decision", "filter_tensorwise": "torchao filter", "naive_tensorwise": "all FP8"}
    head = ["step", "minutes", "bf16 ms", "predicted", *(text for name in VARIANTS for text in (labels[name], "predicted"))]
    return markdown(head, rows)


def swept() -> str:
    """Decisions of the shipped time model, and what a user would do without them, priced by the sweep `zoo`."""
    from zoo_across import with_across

    from loka_sim.resolve import zoo_names
    from loka_sim.validation.regret import measured_times, policies_of, regrets
    from loka_sim.whatif import whatif
    from perfmodel.measured import read_timings

    times = measured_times(with_across(read_timings("h200").query("sweep == 'zoo'")))
    rows = []
    for name in zoo_names():
        answer = whatif(name)
        found = regrets(answer, times, policies_of({"decision": answer}))
        over = [percent(us / found.best_us - 1) for us in found.policies_us.values()] if found.sites else []
        rows.append([name, f"{found.sites} of {found.of_sites}", f"{found.best_us:,.0f}", f"{answer.decision.fp8_passes}", *over])
    head = ["over the measured best", "sites", "best, us", "FP8 passes", "decision", "bf16", "all FP8, tensorwise", "rowwise"]
    return markdown([*head, "torchao filter, tensorwise", "rowwise"], rows)


def refined(documents: Sequence[dict[str, Any]]) -> str:
    """Times before and after refinement by each validation's own shapes, on others'."""
    import numpy
    import pandas

    import perfmodel
    from perfmodel.judge import SHAPE
    from perfmodel.kernels import KERNELS
    from perfmodel.measured import read_timings
    from perfmodel.refine import refine

    base = perfmodel.load("h200")
    measured = [pandas.DataFrame(document["time"]["rows"]).rename(columns={"measured_us": "p50_us"}) for document in documents]
    swept = read_timings("h200").query("sweep in @BLIND")
    swept = swept[[name.startswith("torch/") for name in swept["kernel"]]]
    found: list[Any] = []
    for number, rows in enumerate(measured):
        own = rows[rows["set"] == "model"]
        model = refine(base, own).model
        others = pandas.concat([other for index, other in enumerate(measured) if index != number])
        for place, some in (("fresh", rows[rows["set"] == "fresh"]), ("other validations", others), ("sweeps", swept)):
            seen = pandas.MultiIndex.from_frame(some[SHAPE]).isin(pandas.MultiIndex.from_frame(own[SHAPE]))
            some = some[~seen].reset_index(drop=True)
            judged = some.assign(place=place, kind=[KERNELS[name].kind for name in some["kernel"]])
            for when, predicted in (("before", base.predict(some)), ("after", model.predict(some))):
                time, low, high = (predicted[name] for name in ENDS)
                judged[f"mape_{when}"] = numpy.abs(time / some["p50_us"] - 1)
                judged[f"coverage_{when}"] = ((some["p50_us"] >= low) & (some["p50_us"] <= high)).astype(float)
            found.append(judged)
    every = pandas.concat(found)
    table = []
    for (place, kind), some in every.groupby(["place", "kind"]):
        pairs = [[percent(float(some[f"{what}_{when}"].mean())) for when in ("before", "after")] for what in ("mape", "coverage")]
        table.append([str(place), str(kind), f"{len(some):,}", *(" → ".join(pair) for pair in pairs)])
    return markdown(["judged on", "kernels", "n", "MAPE", "in 90%"], table)


def again(documents: Sequence[dict[str, Any]]) -> str:
    """What a measured time says of the next one: differences of two, and whether the interval of the first holds the second."""
    import numpy
    import pandas

    import perfmodel
    from perfmodel.judge import SHAPE
    from perfmodel.kernels import KERNELS
    from perfmodel.measured import read_timings
    from perfmodel.refine import refine

    key, base = ["kernel", *SHAPE], perfmodel.load("h200")
    measured = [pandas.DataFrame(document["time"]["rows"]).query("set == 'model'") for document in documents]
    measured = [rows.rename(columns={"measured_us": "p50_us"})[[*key, "p50_us"]] for rows in measured]
    later = [*measured, read_timings("h200").query("sweep == 'zoo'")[[*key, "p50_us"]]]
    pairs = []
    for number, rows in enumerate(measured):
        second = pandas.concat(later[number + 1 :]).rename(columns={"p50_us": "second_us"})
        both = rows.merge(second, on=key)
        predicted = refine(base, rows).model.predict(both)
        unseen = base.predict(both)["time_us"]
        off = {name: numpy.abs(us / both["second_us"] - 1) for name, us in (("measured", both["p50_us"]), ("predicted", unseen))}
        inside = (both["second_us"] >= predicted["low_us"]) & (both["second_us"] <= predicted["high_us"])
        pairs.append(both.assign(kind=[KERNELS[name].kind for name in both["kernel"]], **off, inside=inside.astype(float)))
    table = []
    for kind, some in pandas.concat(pairs).groupby("kind"):
        shares = [some["measured"].mean(), some["measured"].quantile(0.9), some["predicted"].mean(), some["inside"].mean()]
        table.append([str(kind), f"{len(some):,}", *(percent(float(share)) for share in shares)])
    return markdown(["kernels", "pairs", "second off the first", "p90", "off the prediction", "in the first's 90%"], table)


def calibrated(folder: Path) -> str:
    """A calibration of an H200 against the sweeps that no model has seen, per kernel, beside the shipped model."""
    import pandas

    import perfmodel
    from loka_sim import calibration
    from loka_sim.validation.measuring import timings
    from perfmodel.judge import SHAPE, accuracy_of
    from perfmodel.measured import read_timings

    shipped, own = perfmodel.load("h200"), perfmodel.load(calibration.load(folder).hardware, folder)
    known = set(shipped.manifest["kernels"]) & set(own.manifest["kernels"])
    rows = read_timings("h200")
    seen = pandas.MultiIndex.from_frame(timings(folder / "timings")[SHAPE])
    rows = rows[rows["kernel"].isin(known) & ~pandas.MultiIndex.from_frame(rows[SHAPE]).isin(seen)]
    found: dict[tuple[str, str], list[str]] = {}
    for sweep in BLIND:
        some = rows[rows["sweep"] == sweep].reset_index(drop=True)
        both = (model.predict(some) for model in (shipped, own))
        before, after = (accuracy_of(some, *(predicted[name].to_numpy() for name in ENDS)) for predicted in both)
        for level in ("kinds", "kernels"):
            for name, old in before[level].items():
                new = after[level][name]
                cells = [f"{old['n']:,}", *(f"{percent(old[key])} → {percent(new[key])}" for key in ("mape", "coverage"))]
                found[("all of kind " if level == "kinds" else "") + name, sweep] = cells
    names = dict.fromkeys(name for name, _ in sorted(found))
    table = [[name, *(cell for sweep in BLIND for cell in found.get((name, sweep), ["–"] * 3))] for name in names]
    head = ["kernel", *(text for sweep in BLIND for text in (f"{sweep}: n", "MAPE", "in 90%"))]
    return markdown(head, table)


def steps_now(documents: Sequence[dict[str, Any]]) -> str:
    """Whole bf16 steps: measured, predicted as each document says, and predicted by the shipped models."""
    from loka_sim.validation.document import step_part
    from loka_sim.whatif import whatif

    table, off = [], []
    for document in documents:
        settings, step = document["settings"], document["step"]
        measured = {variant["name"]: variant for variant in step["variants"]}["bf16"]
        ms = measured["graph_ms"] or measured["measured_ms"]
        answer = whatif(settings["model"], batch=settings["batch"], hardware=settings["hardware"])
        ran = {"medians": {"bf16": {"p50_ms": ms}}, "graphs": None, "note": None}
        now = step_part(ran, answer, answer)
        assert now is not None
        told = step["predicted_bf16_ms"], now["predicted_bf16_ms"]
        off.append([abs(predicted / ms - 1) for predicted in told])
        table.append([document["settings"]["model"], f"{ms:.2f} ms", *(f"{predicted:.2f} ms" for predicted in told)])
    table.append(["mean error", "", *(percent(sum(column) / len(column)) for column in zip(*off, strict=True))])
    return markdown(["bf16 step", "measured", "predicted, as the document says", "predicted now"], table)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--now", action="store_true", help="times as the shipped model, refined, has them now")
    parser.add_argument("--swept", action="store_true", help="decisions of the shipped time model, priced by the sweep zoo")
    parser.add_argument("--refined", action="store_true", help="times before and after refinement, on shapes of others")
    parser.add_argument("--again", action="store_true", help="second measurements of measured shapes")
    parser.add_argument("--steps", action="store_true", help="whole steps as predicted then and now")
    parser.add_argument("--calibration", type=Path, metavar="FOLDER", help="judge a calibration by sweeps that it has not seen")
    parser.add_argument("folder", type=Path, nargs="?", default=data_folder() / "h200" / "validations")
    options = parser.parse_args()
    if options.swept:
        print(swept())
        return 0
    if options.calibration:
        try:
            print(calibrated(options.calibration))
        except (ValueError, LokaSimError) as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    documents = read(options.folder)
    if not documents:
        parser.error("there is no document in that folder")
    for wanted, of in ((options.refined, refined), (options.again, again)):
        if wanted:
            print(of([document for document in documents if document["time"]]))
            return 0
    if options.now:
        print(times([judged_now(document) for document in documents if document["time"]]))
        return 0
    if options.steps:
        print(steps_now([document for document in documents if document["step"]]))
        return 0
    print("\n\n".join(part(documents) for part in (times, decisions, steps)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

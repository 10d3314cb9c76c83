"""Predicted against measured times, before and after refinement, never judged on what the refinement saw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loka_sim.dispatch.candidates import Row, launches
from loka_sim.dispatch.cost import Time, Times
from loka_sim.dispatch.decide import Accuracies, Decider, Policy, flat
from loka_sim.validation import judge

if TYPE_CHECKING:
    import pandas

    from loka_sim.whatif import WhatIf

KEY = ["kernel", "m", "n", "k", "groups"]
ENDS = ["time_us", "low_us", "high_us"]


def time_part(hardware: str, folder: Path, rows: pandas.DataFrame, refinement: Any) -> dict[str, Any]:
    """The document's part on times.

    Args:
        hardware: Whose shipped model it was before.
        folder: The calibration.
        rows: All measured rows, with `sweep`: `model`, which the refinement is made from, or `fresh`, which it is not.
        refinement: Made from the rows of `model`.
    """
    import pandas

    import perfmodel

    base, refined = perfmodel.load(hardware), perfmodel.load(hardware, folder)
    unknown = sorted(name for name in set(rows["kernel"]) if not base.knows(name))
    rows = rows[~rows["kernel"].isin(unknown)].drop_duplicates([*KEY, "sweep"], keep="last")
    # A fresh shape that the model happens to have is no fresh one.
    seen = pandas.MultiIndex.from_frame(rows.loc[rows["sweep"] == "model", KEY[1:]])
    fresh = (rows["sweep"] == "fresh") & ~pandas.MultiIndex.from_frame(rows[KEY[1:]]).isin(seen)
    parts = []
    for name, some in (("model", rows[rows["sweep"] == "model"]), ("fresh", rows[fresh])):
        if not len(some):
            continue
        some = some.reset_index(drop=True)
        if name == "model":
            after = some[KEY].merge(predicted_unseen(refinement), on=KEY, how="left")[ENDS]
        else:
            after = refined.predict(some).reset_index(drop=True)
        before = base.predict(some).reset_index(drop=True)
        joined = some[KEY].assign(set=name, measured_us=some["p50_us"], eager_us=some["eager_us"])
        for when, predicted in (("before", before), ("after", after)):
            for end, column in zip(("", "_low", "_high"), ENDS, strict=True):
                joined[f"{when}{end}_us"] = predicted[column].to_numpy()
        parts.append(joined)
    every = pandas.concat(parts, ignore_index=True)
    note = f"not in the shipped time model, and so not judged: {', '.join(unknown)}" if unknown else None
    return {
        "rows": _records(every), "summary": judge.time_summary(every), "offenders": judge.offenders(every), "note": note,
    }  # fmt: skip


def predicted_unseen(refinement: Any) -> pandas.DataFrame:
    """Every measured row (`KEY`) with its time and interval (`ENDS`) as predicted without its shape."""
    import pandas

    rows = refinement.rows[KEY].astype({key: "int64" for key in KEY[1:]}).reset_index(drop=True)
    return pandas.concat([rows, refinement.held_out], axis=1)


def _records(rows: pandas.DataFrame) -> list[dict[str, Any]]:
    """Plain values, figures of five digits; a missing one is None."""
    order = ["set", *KEY, "measured_us", *(f"{w}{e}_us" for w in ("before", "after") for e in ("", "_low", "_high")), "eager_us"]
    records = []
    for values in rows[order].itertuples(index=False):
        entry: dict[str, Any] = dict(zip(order, values, strict=True))
        for key, value in entry.items():
            if key in ("m", "n", "k", "groups"):
                entry[key] = int(value)
            elif isinstance(value, float):
                entry[key] = None if value != value else float(f"{value:.5g}")
        records.append(entry)
    return records


def unseen_times(answer: WhatIf, refinement: Any) -> Times:
    """An answer's times, those of measured shapes as predicted without them."""
    held_out = {
        Row(str(kernel), int(m), int(n), int(k), int(groups)): Time(float(time), float(low), float(high))
        for kernel, m, n, k, groups, time, low, high in predicted_unseen(refinement)[[*KEY, *ENDS]].itertuples(index=False)
    }
    return Times({**answer.times.of, **{row: time for row, time in held_out.items() if row in answer.times.of}})


def decided_unseen(answer: WhatIf, times: Times) -> list[tuple[Row, ...]]:
    """Launches of a model's sites, decided anew by other times; what was taken back for the whole step stays so."""
    decider = Decider(times, Policy(answer.settings.max_mere, answer.settings.min_speedup), answer.toolbox)
    keys, distinct = [], {}
    for site in answer.sites:
        accuracies: Accuracies = {
            (name, candidate.kernel): candidate.accuracy
            for name, decided in site.passes.items()
            for candidate in decided.candidates
            if candidate.accuracy is not None
        }
        keys.append((site.shape, tuple(sorted((pair, accuracy.mere) for pair, accuracy in accuracies.items()))))
        distinct[keys[-1]] = site.shape, accuracies
    assignments = zip(distinct, decider.assignments(list(distinct.values())), strict=True)
    launched = {key: flat(launches(key[0], assignment, decider.toolbox)) for key, assignment in assignments}
    return [
        launched[key] if site.step_gain_us is None else site.shape.bf16_rows for key, site in zip(keys, answer.sites, strict=True)
    ]


def of_decision(decided: Sequence[tuple[Row, ...]], times: Times, measured: Times) -> dict[str, Any]:
    """What a decision's launches take, predicted and measured, over the sites of which all were measured."""
    whole = [rows for rows in decided if rows and all(row in measured.of for row in rows)]
    return {
        "sites": len(whole), "predicted_us": sum(times.sum(rows) for rows in whole),
        "measured_us": sum(measured.sum(rows) for rows in whole),
    }  # fmt: skip

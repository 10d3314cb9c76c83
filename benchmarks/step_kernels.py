"""Kernels of profiled steps beside the predicted ones, as a table: what each takes inside a step.

    python benchmarks/step_kernels.py profiles/*.json --out data/h200/step_kernels.parquet

Takes what `benchmarks/step_profile.py` wrote, of one step the last. A fused kernel is the predicted one over the same elements
whose bytes are closest, if they are within a quarter, that multiplies scales behind a GEMM, rotates or draws random numbers, and
puts parts together or looks rows up if it does; second stages of sums over rows are added to their first. GEMMs go with those of
the specification that they are least apart from (`paired_gemms`). What finds no partner is left out; the share of the time that
did is printed.

    python benchmarks/step_kernels.py --recount --out data/h200/step_kernels.parquet

counts the kernels of the steps in the table anew, by the specifications as they are, and calls products by the kernels that add a
bias where these say so.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hil.files import write_atomic
from loka_sim import step_loops
from loka_sim.dispatch.baselines import BASELINES
from loka_sim.dispatch.candidates import Row, operand_makers
from loka_sim.dispatch.steps import EXPORT, RECIPE, as_run
from loka_sim.fp8_step import fused as fused_with_fp8
from loka_sim.fp8_step import taken, writes_more
from loka_sim.modelspec import Fused
from loka_sim.validation.runnable import TABLE_ROWS
from loka_sim.whatif import WhatIf, whatif
from loka_sim.whole_step import batched_products, described, launched, log_loss, table_gradient, with_partial_sums
from perfmodel import hardware
from perfmodel.fused import COLUMNS, baseline_us
from perfmodel.hardware import DEFAULT
from perfmodel.in_step import RESCALES, TURNED, VECTOR, family, is_counted
from perfmodel.kernels import BF16, BIASED, K_FASTEST, KERNELS, laid

CLOSE = 0.25  # of the logarithm of the bytes
STAGE = 8192  # elements that the second stage of a sum adds up at most
TABLE = "gradient of a table"
# Names of torch's own kernels: sums of FP32 that lie side by side, and what copies to rows that do not lie densely.
CALLED = {"partials": "reduce_kernel<128, 4", "copy": "elementwise_kernel<128, 4"}
SLOW = {"sin", "cos", "random"}  # operators that take longer than most kernels' bytes
# Operators that read by place: torch.compile's account has as many bytes for each part as for the whole, or as for one.
PLACED = {"cat", "slice_scatter"}
LOOKS_UP, REDUCES = {"embedding", "index", "gather"}, ("row", "column", "both")
"""Operators that read where data says, and kinds of reductions that may: the account has the whole table of what they look up."""
ADDS_BIAS = laid(BF16, BIASED)
BF16_BYTES, MORE = 2, 1.5
STEP = ("model", "batch", "variant")
COUNTS = ("step_launches", "step_batched")
BY_SITE = "by_site"
"""Of steps: as decided site by site, before the whole step took some of it back (`loka_sim.taken_back`)."""
MEASURED = ("kind", "table", "kept", "reduced", "bytes", "written", "rescales", "slow", "placed", "us", "left")
PAIRED = (*COLUMNS, "label", "us", "launches", "staged")


def measured_kernels(profile: dict[str, Any]) -> pd.DataFrame:
    """Triton kernels of a profile by torch.compile's own account: kind, sizes, bytes, operators, microseconds, launches."""
    found = []
    for row in profile["kernels"]:
        name = row["kernel"]
        if not name.startswith("triton_") or row.get("problem") or not row.get("sizes"):
            continue
        sizes = row["sizes"]
        kept, reduced = sizes.get("x", 1) * sizes.get("y", 1), sizes.get("r0_", 1)
        operators = {operator.split(".")[1].removeprefix("inductor_") for operator in row["operators"] if "." in operator}
        read, written = row["read_bytes"], row["written_bytes"]
        table = "embedding_dense" in name
        kind = "row" if reduced > 1 else "pointwise"
        # What reads parts that were put together has their operators, too: it reads no more than it writes.
        joined = "cat" in operators and "constant_pad_nd" not in operators and read < MORE * written
        looks_up = bool(operators & (LOOKS_UP - {"index"} if joined else LOOKS_UP)) and not table
        if reduced == 1 and any("index_put" in operator for operator in operators):
            kind = "scatter"
        elif looks_up and reduced == 1:
            kind, read = "gather", written
        elif read == 0:
            kind = "fill"
        found.append(
            {
                "kind": kind, "table": table and kind != "scatter", "kept": kept, "reduced": reduced, "bytes": read + written,
                "written": written, "rescales": _rescales(row["operators"]), "slow": bool(operators & SLOW),
                "placed": looks_up if kind == "row" else kind == "pointwise" and bool(operators & PLACED),
                "us": row["median_us"], "left": row["launches"],
            }
        )  # fmt: skip
    return pd.DataFrame(found, columns=list(MEASURED)).sort_values("us", ascending=False, ignore_index=True)


def _rescales(operators: dict[str, int]) -> bool:
    """Whether a kernel multiplies the scales of a GEMM's rows and columns: more scales are found than tensors are cast.

    A cast clamps twice, its scale once from below; the product of two scales only has these.
    """
    below, above = (operators.get(f"aten.clamp_{end}.default", 0) for end in ("min", "max"))
    return below - 2 * above >= 2


def predicted_kernels(answer: WhatIf, variant: str) -> tuple[list[Fused], list[Row]]:
    """Fused kernels of a step with dense gradients of its tables, and its GEMMs in the order of the specification."""
    sites = answer.sites
    if variant == "decision":
        chosen = [{name: entry.kernel for name, entry in site.passes.items()} for site in sites]
    else:
        baseline = next(baseline for baseline in BASELINES if baseline.name == variant)
        chosen = [baseline.assignment(site.site, site.shape) for site in sites]
    assigned = {}
    runner = EXPORT if variant == "decision" else RECIPE
    for site, kernels in zip(sites, chosen, strict=True):
        for name, operands in taken(site.shape, kernels, operand_makers(site.shape, kernels), runner).items():
            assigned[site.site.name, name] = operands
    step = step_loops.read(answer.spec.loops, answer.spec.batch, writes_more(chosen, runner))
    by_name = {site.site.name: (site, kernels) for site, kernels in zip(sites, chosen, strict=True)}
    order = [loop.site for loop in step.scheduled if loop.kind == "gemm" and loop.site[0]]
    for name, (site, _) in by_name.items():
        # A product with one number is no GEMM in the loops, but one where it runs.
        for missing in [which for which in site.shape.names if (name, which) not in order]:
            order.insert(order.index((name, "grad_weight")) if (name, "grad_weight") in order else len(order), (name, missing))
    gemms = []
    for name, which in order:
        site, kernels = by_name[name]
        gemms.append(as_run(site.shape.row(which, kernels[which]), answer.times.of))
    fused = fused_with_fp8(step, assigned) if assigned else list(answer.spec.fused)
    return [*fused, *table_gradient(answer.spec.tables, TABLE_ROWS)], gemms


def paired_fused(measured: pd.DataFrame, kernels: Sequence[Fused], batch: int) -> list[dict[str, Any]]:
    """Predicted kernels that were found, with their time and the number of their launches."""
    known = pd.DataFrame([_known(kernel, batch) for kernel in kernels])
    found: list[dict[str, Any]] = []
    for row in measured.itertuples():
        left = float(row.left)
        while left > 0:
            candidates = known[(known["left"] > 0) & _alike(known, row)]
            bytes_of = candidates["written_bytes"] + (0 if row.placed else candidates["read_bytes"])
            apart = np.abs(np.log((bytes_of + 1) / ((row.written if row.placed else row.bytes) + 1)))
            if not len(apart) or (apart.min() > CLOSE and row.kind not in ("scatter", "gather")):
                break
            best = apart.idxmin()
            number = min(left, known.at[best, "left"])
            known.at[best, "left"] -= number
            left -= number
            found.append({**known.loc[best, [*COLUMNS, "label"]], "us": row.us, "launches": number, "staged": 0.0})
        if left > 0 and row.kind == "row" and row.reduced <= STAGE:
            _add_stage(found, row, left)
    return found


def _known(kernel: Fused, batch: int) -> dict[str, Any]:
    operators, known = set(kernel.label.split()), described(kernel, batch)
    turned = kernel.kind != "column" and family(kernel.kind, kernel.label, known["kept"], known["unordered_bytes"]) == TURNED
    return {
        **known, "left": float(kernel.count), "table": kernel.label == TABLE, "label": kernel.label, "turned": turned,
        "rescales": any(operator.partition("*")[0] in RESCALES for operator in operators), "slow": bool(operators & SLOW),
        "placed": bool(operators & (LOOKS_UP if kernel.kind in REDUCES else PLACED)) and kernel.kind in ("pointwise", *REDUCES),
    }  # fmt: skip


def paired_called(kind: str, profile: dict[str, Any], kernels: Sequence[Fused], batch: int) -> list[dict[str, Any]]:
    """What torch itself runs of a kind (`CALLED`), the longer with what takes longer; of as many as are predicted the longest."""
    names = [row["kernel"] for row in profile["kernels"]]
    wanted = [kernel for kernel in kernels if kernel.kind == kind for _ in range(kernel.count)]
    ran = sorted(us for index, us in profile["launches"] if CALLED[kind] in names[index])
    if kind == "copy":
        ran = ran[max(len(ran) - len(wanted), 0) :]  # a step has some small ones more
    if len(ran) != len(wanted):
        return []
    found = pd.DataFrame([{**described(kernel, batch), "label": kernel.label} for kernel in wanted])
    if len(found):
        order = np.argsort(baseline_us(found.astype({"uneven": bool}), hardware.load(DEFAULT)), kind="stable")
        found = found.iloc[order].assign(us=ran, launches=1.0, staged=0.0)
        found = found.groupby([*COLUMNS, "label"], as_index=False).agg({"us": "mean", "launches": "sum", "staged": "sum"})
    return found.to_dict("records")


def _alike(known: pd.DataFrame, row: Any) -> pd.Series:
    if row.kind in ("scatter", "gather", "fill") or row.table:
        return (known["kind"] == row.kind) & (known["table"] == row.table) & (abs(known["kept"] / row.kept - 1) < 0.02)
    space = known["kept"] * known["reduced"] / (row.kept * row.reduced)
    ordinary = ~known["table"] & ~known["kind"].isin(["fill", "scatter", "gather", "external", "partials", "copy"])
    alike = ordinary & (abs(space - 1) < 0.02) & ((known["reduced"] > 1) == (row.reduced > 1))
    # A turned copy in 8 bits belongs to rows: kernels of other rows move as many bytes.
    alike &= ~known["turned"] | (abs(known["kept"] / row.kept - 1) < 0.02)
    return alike.where(known[["rescales", "slow", "placed"]].eq([row.rescales, row.slow, row.placed]).all(axis=1), False)


def _add_stage(found: Iterable[dict[str, Any]], row: Any, left: float) -> None:
    """Add what adds up the parts of a column's sums to their kernel's time: a kernel for each of the sums that it makes."""
    for first in found:
        sums = max(1, first["written_bytes"] // (BF16_BYTES * max(first["kept"], 1)))
        room = sums * first["launches"] - first["staged"]
        if first["kind"] == "column" and first["kept"] == row.kept and room > 0 and left > 0:
            number = min(left, room)
            first["us"] += row.us * number / first["launches"]
            first["staged"] += number
            left -= number


def paired_gemms(profile: dict[str, Any], rows: Sequence[Row], alone: Sequence[float]) -> list[dict[str, Any]]:
    """GEMMs with their time, what adds up their parts with them.

    Each launch goes with one row, so that together they are least apart: in precision, in how operands lie, in whether it adds
    a bias (older kernels do not say it), in whether cuBLAS cleared a counter before, in whether Hopper's own kernels take their
    sizes, in their times, and in their places in the step.

    Args:
        profile: Of the step.
        rows: As predicted, in the order of the specification.
        alone: Microseconds of each by itself.
    """
    from scipy.optimize import linear_sum_assignment

    names = [kernel["kernel"] for kernel in profile["kernels"]]
    ran: list[tuple[str, bool, float]] = []
    cleared = False
    for index, us in profile["launches"]:
        if profile["kernels"][index]["kind"] == "gemm":
            if "splitKreduce" not in names[index] and "reduce_1Block" not in names[index]:
                ran.append((names[index], cleared, us))
            elif ran:
                ran[-1] = (*ran[-1][:2], ran[-1][2] + us)
        cleared = names[index].startswith("Memset")
    if not ran:
        return []
    seen = [(name.startswith("nvjet_sm90_q"), _lie(name), counter, "nvjet" in name, "_bias_" in name) for name, counter, _ in ran]
    wanted = [
        (
            KERNELS[row.kernel].is_fp8,
            LIE[KERNELS[row.kernel].layout],
            bool(is_counted(*row[:4])),
            not any(size % VECTOR for size in row[1:4]),
            KERNELS[row.kernel].layout == BIASED,
        )
        for row in rows
    ]
    times = np.array([us for *_, us in ran])
    apart = np.minimum(np.abs(np.log(times[:, None] / np.array(alone)[None, :])), 1.0)
    apart += 3 * np.abs(np.linspace(0, 1, len(ran))[:, None] - np.linspace(0, 1, len(rows))[None, :])
    for i, (fp8, lie, counter, own, adds) in enumerate(seen):
        for j, (wants_fp8, wants_lie, batched, even, biased) in enumerate(wanted):
            apart[i, j] += 100 * (fp8 != wants_fp8) + (counter != batched) + (own != even) + (adds and not biased)
            apart[i, j] += not (batched or fp8) and lie != wants_lie
    # Of a precision of which another number ran than was predicted nothing is known.
    sure = [sum(fp8 == its for its, *_ in seen) == sum(fp8 == wants for wants, *_ in wanted) for fp8 in (False, True)]
    pairs = zip(*linear_sum_assignment(apart), strict=True)
    return [{**rows[j]._asdict(), "us": float(times[i])} for i, j in pairs if seen[i][0] == wanted[j][0] and sure[wanted[j][0]]]


LIE = {K_FASTEST: "tn", BIASED: "tn", ("row", "row"): "nn", ("column", "row"): "nt", ("column", "column"): "tt"}
"""How operands lie as cuBLAS says it, the right one first: transposed or not."""


def _lie(name: str) -> str:
    found = re.search(r"_([NT]{2})[NT]$|_([nt]{2})_(?:n_)?align", name)
    return next(word for word in found.groups() if word).lower() if found else ""


def counted(answer: WhatIf, kernels: Sequence[Fused], gemms: Sequence[Row]) -> tuple[int, int]:
    """GPU kernels of a step, and how many of its GEMMs are batched products."""
    return launched([*kernels, *log_loss()], answer.spec.batch) + len(gemms), batched_products(answer.spec)


def recounted(table: pd.DataFrame) -> pd.DataFrame:
    """A table with `step_launches` and `step_batched` anew, and with kernels that add a bias where most products of a size do."""
    # What was taken back since is decided no more.
    gone = table["variant"] == BY_SITE
    table, as_they_are = table[~gone], table[gone]
    steps = table[list(STEP)].drop_duplicates().itertuples(index=False, name=None)
    answers: dict[tuple[str, int], WhatIf] = {}
    found, biased = {}, set[tuple[Any, ...]]()
    for model, batch, variant in steps:
        if (model, batch) not in answers:
            answers[model, batch] = whatif(model, batch=int(batch))
        answer = answers[model, batch]
        kernels, gemms = predicted_kernels(answer, variant)
        found[model, batch, variant] = counted(answer, kernels, gemms)
        times = Counter(gemms)
        biased |= {
            (model, batch, *row[1:])
            for row, number in times.items()
            if row.kernel == ADDS_BIAS and number >= times[row._replace(kernel=BF16)]
        }
    counts = pd.DataFrame([(*step, *numbers) for step, numbers in found.items()], columns=[*STEP, *COUNTS])
    anew = table.drop(columns=[name for name in COUNTS if name in table]).merge(counts, on=list(STEP), how="left")
    table = pd.concat([anew, as_they_are], ignore_index=True)
    products = table["kernel"].isin([BF16, ADDS_BIAS]).to_numpy()
    which = ["model", "batch", "m", "n", "k", "groups"]
    adds = [row in biased for row in table.loc[products, which].itertuples(index=False, name=None)]
    table.loc[products, "kernel"] = np.where(adds, ADDS_BIAS, BF16)
    return table


def table_of(profile: dict[str, Any], answer: WhatIf) -> pd.DataFrame:
    """Every kernel of one step that found its partner."""
    kernels, gemms = predicted_kernels(answer, profile["variant"])
    every = with_partial_sums(kernels, profile["batch"])
    pairs = paired_fused(measured_kernels(profile), every, profile["batch"])
    for kind in CALLED:
        pairs += paired_called(kind, profile, every, profile["batch"])
    fused = pd.DataFrame(pairs, columns=list(PAIRED)).drop(columns="staged")
    # Adds that meet in small tables take longer, which `whole_step.conflicts` has.
    adds = fused["kind"] == "scatter"
    fused.loc[adds, "us"] = fused[adds].groupby(["kept", "read_bytes"])["us"].transform("median")
    products = pd.DataFrame(paired_gemms(profile, gemms, [answer.times.of[row].us for row in gemms]))
    if len(products):
        products = products.groupby(list(Row._fields), as_index=False).agg(us=("us", "mean"), launches=("us", "size"))
        products.insert(0, "kind", "gemm")
    table = pd.concat([fused, products], ignore_index=True)
    for name in reversed(STEP):
        table.insert(0, name, profile[name])
    table["step_us"] = 1e3 * profile["kernels_ms"]
    table["graph_us"] = 1e3 * (profile["graph_ms"] or np.nan)
    table["step_launches"], table["step_batched"] = counted(answer, kernels, gemms)
    share = (table["us"] * table["launches"]).sum() / (1e3 * profile["kernels_ms"])
    print(f"{profile['model']} {profile['batch']} {profile['variant']}: {share:.0%} of the time found", file=sys.stderr)
    return table


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profiles", type=Path, nargs="*", help="what benchmarks/step_profile.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="parquet file of the table, extended if it is there")
    parser.add_argument("--shared", action="store_true", help="other work ran on the GPU's machine beside these steps")
    parser.add_argument("--recount", action="store_true", help="count the kernels of the steps that are there anew")
    options = parser.parse_args()
    if options.recount:
        counted_anew = recounted(pd.read_parquet(options.out))
        write_atomic(options.out, lambda beside: counted_anew.to_parquet(beside, index=False))
        return 0
    if not options.profiles:
        parser.error("no profile to take kernels from; name what benchmarks/step_profile.py wrote, or give --recount")
    sidecar = options.out.with_suffix(".json")
    about = json.loads(sidecar.read_text()) if sidecar.exists() else {"schema_version": 1, "runs": []}
    tables: list[pd.DataFrame] = []
    answers: dict[tuple[str, int], WhatIf] = {}
    run: dict[str, Any] = {"shared": options.shared, "machine": None, "steps": []}
    profiles = (json.loads(path.read_text()) for path in options.profiles)
    for step, profile in {tuple(profile[name] for name in STEP): profile for profile in profiles}.items():
        key = (step[0], step[1])
        if key not in answers:
            answers[key] = whatif(step[0], batch=step[1])
        tables.append(table_of(profile, answers[key]).assign(shared=options.shared))
        run["machine"] = run["machine"] or profile["machine"]
        run["steps"].append(shlex.join(map(str, step)))
    for known in about["runs"]:
        known["steps"] = [step for step in known["steps"] if step not in run["steps"]]
    about["runs"] = [known for known in [*about["runs"], run] if known["steps"]]
    table = pd.concat(tables, ignore_index=True)
    if options.out.exists():
        before, new = pd.read_parquet(options.out), set(table[list(STEP)].itertuples(index=False, name=None))
        kept = [step not in new for step in before[list(STEP)].itertuples(index=False, name=None)]
        table = pd.concat([before[kept], table], ignore_index=True)
    write_atomic(sidecar, lambda beside: beside.write_text(json.dumps(about, indent=1) + "\n"))
    write_atomic(options.out, lambda beside: table.to_parquet(beside, index=False))
    print(f"{options.out}: {len(table)} kernels of {table.groupby(list(STEP)).ngroups} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())

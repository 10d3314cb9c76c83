"""The shipped time model on sweeps that nothing was fitted to: sweep by sweep, kernel by kernel, and in one table.

`benchmarks/time_model.py sweeps unseen fresh` runs it. Intervals are as they would be had the sweep had no say in them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd
from accuracy_tables import HEAD, accuracy_table, by_size, choices, line

import perfmodel
from perfmodel import fit
from perfmodel.calls import columns_of
from perfmodel.cells import EACH, FEW, WELL_KNOWN
from perfmodel.choice import DOUBT
from perfmodel.fresh import WRITTEN, family_of, of_model
from perfmodel.held_out import accuracy, choice_regret
from perfmodel.judge import SHAPE
from perfmodel.kernels import KERNELS
from perfmodel.measured import of_one_process
from perfmodel.prediction import few_neighbours

if TYPE_CHECKING:
    from time_model import Data

Array = npt.NDArray[np.float64]

# What the sweeps that no fit saw are, where they are not shapes drawn anew.
DRAWN = "Fresh shapes or operands"
TITLES = {
    "zoo": "Whole models", "blind": "Fresh shapes, of many processes", "blind2": "Fresh shapes, of many processes",
    "blind4": "Fresh shapes of `collect --gpu`", "blind14": "Shapes of any sizes",
    **dict.fromkeys(
        tuple(f"blind{number}" for number in (15, 16, *range(19, 26))), "Shapes of any sizes as people write them"
    ),
    "blind26": "Between the round sizes", "blind27": "Between the round sizes, and any",
    "blind28": "Products between the round sizes, and few of any",
    "blind_long": "Few products of long K", "blind_towers": "Few products of any sizes",
    "blind_towers2": "Few products of any sizes", "zoo_large": "Whole models' largest calls", "blind_large": "The largest calls",
    "blind_large2": "The largest calls", "blind_large3": "The largest calls",
    "blind_memory8": "Operands of the largest batches", "blind_memory10": "Operands of any sizes",
}  # fmt: skip
# Kernels of which `sweeps` tells one by one, torch's.
SHOWN = {
    "bf16": "bf16", "tens fast": "fp8_tensorwise_fast", "tens split": "fp8_tensorwise_split", "row fast": "fp8_rowwise_fast",
    "row split": "fp8_rowwise_split", "block128": "fp8_block128", "batched": "bf16_batched",
}  # fmt: skip
# An H200's first two of GEMMs, which many workers timed.
MANY_WORKERS = {"h200": ("blind", "blind2")}
# Those of few products of any sizes, mostly ones that 8 does not divide, of which few were fitted.
FEW_PRODUCTS = ("blind_long", "blind_towers", "blind_towers2")
# Those between the round sizes, which few layers have, on a GPU of which nothing is fitted.
BETWEEN = ("blind26", "blind27", "blind28")
# And what is kept apart, by what it is: of the largest batches; between the round sizes; of any, drawn unlike what was fitted.
APART = {
    **dict.fromkeys(("zoo_large", "blind_large", "blind_large2", "blind_large3", "blind_memory8"), "large"),
    **dict.fromkeys(BETWEEN, "between sizes"),
    **dict.fromkeys(WRITTEN, "any sizes"),
}


def unseen(data: Data) -> None:
    """The shipped model on sweeps that nothing was fitted to."""
    for sweep in fit.NEVER_SEEN:
        rows = data.unseen[data.unseen["sweep"] == sweep].reset_index(drop=True)
        if len(rows):
            predicted, bounds, settled = (
                rows["predicted"].to_numpy(),
                rows[["low", "high"]].to_numpy(),
                rows["settled"].to_numpy(),
            )
            title = f"{TITLES.get(sweep, DRAWN)} (sweep {sweep}): the shipped trees"
            accuracy_table(rows[settled].reset_index(drop=True), predicted[settled], bounds[settled], title)
            for whose, some in (("all", settled), ("at another's clock", ~settled), ("all, as timed", settled | ~settled)):
                if some.any():
                    print(line(whose, accuracy(rows["p50_us"].to_numpy()[some], predicted[some], bounds[some]), None))
    fresh(data, classes=True)
    as_if_short(data)
    in_doubt(data.unseen[data.unseen["sweep"].str.fullmatch(r"blind\d*")], perfmodel.load(data.hardware.name))
    by_neighbours(data)


def fresh(data: Data, classes: bool = False) -> None:
    """The shipped model on fresh sweeps: GEMMs kernel by kernel, others library by library; by size class, too, if `classes`."""
    gpu, sweep = data.hardware.name, data.unseen["sweep"]
    rows = data.unseen[data.unseen["settled"] & (sweep != "zoo") & ~sweep.isin(MANY_WORKERS.get(gpu, ()))].reset_index(drop=True)
    predicted, together, bounds = rows["predicted"].to_numpy(), rows["together"].to_numpy(), rows[["low", "high"]].to_numpy()
    kinds = {**dict.fromkeys(FEW_PRODUCTS, "few"), **APART}
    of = np.where(rows["own_clock"], "own clock", rows["sweep"].map(kinds).fillna("").to_numpy())
    names = np.array([family(*pair) for pair in zip(rows["kernel"], of, strict=True)], dtype=object)
    families = {
        name: names == name
        for name in dict.fromkeys(
            family(name, kind) for name in KERNELS for kind in ("", "own clock", *dict.fromkeys(kinds.values()))
        )
    }
    families = {name: mine for name, mine in families.items() if mine.any()}
    usual = ~np.isin(of, list(APART.values()))
    among = rows[usual].reset_index(drop=True)
    print(f"\n{HEAD}")
    for name, mine in families.items():
        regret = fit.regret_beside_bf16(among, together[usual], name)
        print(line(name, accuracy(rows["p50_us"].to_numpy()[mine], predicted[mine], bounds[mine]), regret).rstrip())
    choices(among, predicted[usual], ", each kernel told alone")
    apart = (("large", " of the largest calls"), ("between sizes", " between the round sizes"), ("any sizes", " of any sizes"))
    for some, what in ((usual, ""), *((of == kind, what) for kind, what in apart)):
        if some.any():
            choices(rows[some].reset_index(drop=True), together[some], what)
    if classes:
        by_size("fresh sweeps", families, rows, predicted, bounds)


def second(data: Data) -> None:
    """What choosing kernels by a second run of fresh shapes on another GPU costs, beside the shipped model's choice of them."""
    key, again = ["kernel", *SHAPE], data.everything[(data.everything["sweep"] == "second") & data.everything["settled"]]
    first = data.unseen[data.unseen["settled"]].drop_duplicates(key)
    rows = first.merge(again[[*key, "p50_us"]], on=key, suffixes=("", "_again"))
    for whose, column in (("a second run", "p50_us_again"), ("the model", "together")):
        if len(rows):
            choices(rows, rows[column].to_numpy(), f" by {whose}")


def as_if_short(data: Data) -> None:
    """What is bound by memory, of fresh sweeps of usual sizes, once more as if all that several workers timed had been short.

    Which timings were not is told by the model's expectations of others (`perfmodel.fit_alone`): here none has a say.
    """
    rows = data.unseen[~data.unseen["sweep"].isin(["zoo", *APART]) & ~data.unseen["own_clock"]]
    rows = rows[["gemm" not in KERNELS[name].kind for name in rows["kernel"]]]
    if not rows["alone"].any():
        return
    measured = of_one_process(rows, rows["alone"].to_numpy())["p50_us"].to_numpy()
    predicted, bounds = rows["predicted"].to_numpy(), rows[["low", "high"]].to_numpy()
    of = rows["kernel"].map(family_of).to_numpy()
    print(f"\nAs if all that several workers timed had been short (not so: {rows['alone'].sum()} rows)\n{HEAD}")
    for name in dict.fromkeys(of):
        print(line(name, accuracy(measured[of == name], predicted[of == name], bounds[of == name]), None))


def sweeps(data: Data) -> None:
    """The shipped model on each of the sweeps that nothing was fitted to: GEMMs, then what is bound by memory."""
    rows = data.unseen.assign(gemm=["gemm" in KERNELS[name].kind for name in data.unseen["kernel"]])
    shown = [(name, f"torch/{kernel}") for name, kernel in SHOWN.items()]
    print(
        f"\n{'MAPE / p90, %':14s} {'times of':>12s}"
        + "".join(f"{name:>12s}" for name in ("all", *SHOWN))
        + f"{'regret':>8s}{'inside':>8s}"
    )
    for sweep in fit.NEVER_SEEN:
        timed = rows[(rows["sweep"] == sweep) & rows["gemm"]]
        mine = timed[timed["settled"]].reset_index(drop=True)
        if len(mine):
            cells = "".join(_short(mine[mine["kernel"] == kernel]) for _, kernel in shown)
            cost = choice_regret(mine, mine["together"].to_numpy(), fit.TORCH_GEMMS)
            regret = f"{cost['geomean']:8.2%}" if cost else f"{'':8s}"
            print(f"{sweep:14s} {len(mine):5d} {len(timed):6d}{_short(mine)}{cells}{regret}{_covered(mine):8.1%}")
    names = ("loka/quantize_*", "fbgemm/quantize_*", "torch/quantize_*", "torch, other memory-bound")
    print(f"\n{'MAPE / inside, %':16s}" + "".join(f"{name:>28s}" for name in names))
    for sweep in fit.NEVER_SEEN:
        mine = rows[(rows["sweep"] == sweep) & ~rows["gemm"]]
        if len(mine):
            of, cells = mine["kernel"].map(family_of), ""
            for name in names:
                some = mine[of == name]
                off = np.abs(some["predicted"] / some["p50_us"] - 1).mean()
                cells += f"{f'{100 * off:.1f} / {100 * _covered(some):.0f} ({len(some)})' if len(some) else '-':>28s}"
            print(f"{sweep:16s}{cells}")


def _short(rows: pd.DataFrame) -> str:
    """MAPE and 90th percentile of fresh rows' errors in percent."""
    error = 100 * np.abs(rows["predicted"] / rows["p50_us"] - 1)
    return f"{f'{error.mean():.1f} / {error.quantile(0.9):.1f}' if len(rows) else '-':>12s}"


def _covered(rows: pd.DataFrame) -> float:
    """Share of fresh rows inside their intervals."""
    return float(((rows["p50_us"] >= rows["low"]) & (rows["p50_us"] <= rows["high"])).mean())


def family(kernel: str, of: str = "") -> str:
    """What a kernel is judged with (`perfmodel.fresh.family_of`).

    Those of torch.compile that its own clock chose among its candidates, in sweeps of before, are a family of their own; so are
    few products of any sizes, and what is kept `APART`, of all of a library's GEMMs, or other kernels, together.

    Args:
        kernel: Which.
        of: "own clock", "few", or a value of `APART`, for a row of such a sweep.
    """
    gemm = "gemm" in KERNELS[kernel].kind
    if of in APART.values():
        return f"{kernel.partition('/')[0]}'s {'GEMMs' if gemm else 'memory-bound'} ({of})"
    if (of == "own clock" and kernel.startswith("torch/") and not gemm) or (of == "few" and gemm):
        return f"{family_of(kernel)} ({of})"
    return family_of(kernel)


def in_doubt(rows: pd.DataFrame, model: perfmodel.PerfModel) -> None:
    """Share of settled timings inside the shipped intervals, by the doubt about the kernel that cuBLAS takes."""
    told = [name for name in rows["kernel"].unique() if model.choice(name) is not None]
    rows = rows[rows["kernel"].isin(told) & rows["settled"]].reset_index(drop=True)
    doubt = np.zeros(len(rows), dtype=np.int64)
    for name, index in rows.groupby("kernel").indices.items():
        doubt[index] = model.seen(str(name), columns_of(rows.iloc[index])).doubt
    predicted, bounds = rows["predicted"].to_numpy(), rows[["low", "high"]].to_numpy()
    powers = np.array([model.manifest["kernels"][name]["wider_in_doubt"] for name in rows["kernel"]])
    sure = predicted[:, None] * (bounds / predicted[:, None]) ** (1 / powers[np.arange(len(rows)), doubt, None])
    # As wide for all as covers as many.
    wider = np.quantile(np.maximum(*(np.log(rows["p50_us"].to_numpy() / predicted) / np.log(sure / predicted[:, None]).T)), 0.9)
    alike = predicted[:, None] * (sure / predicted[:, None]) ** wider
    print(f"\nGEMMs of {', '.join(sorted(rows['sweep'].unique()))}, settled, by the probability of the kernel that is told")
    print(f"{'':16s} {'n':>6s} {'MAPE':>6s} {'p90':>6s} {'covered':>8s} {'by one width for all':>21s}")
    edges = (1.0, *DOUBT, 0.0)
    for number, (high, low) in enumerate(zip(edges, edges[1:], strict=False)):
        mine = doubt == number
        if mine.any():
            measured = rows["p50_us"].to_numpy()[mine]
            found, even = (accuracy(measured, predicted[mine], ends[mine]) for ends in (bounds, alike))
            print(
                f"{f'{low:.0%} to {high:.0%}':16s} {found['n']:6.0f} {found['mape']:6.1%} {found['p90']:6.1%} "
                f"{found['coverage']:8.1%} {even['coverage']:21.1%}"
            )


def by_neighbours(data: Data) -> None:
    """Share of fresh timings inside by how many careful ones lie around, and if that had no say in how wide intervals are."""
    model = perfmodel.load(data.hardware.name)
    entries = model.manifest["kernels"]
    rows = data.unseen[data.unseen["sweep"] != "zoo"].reset_index(drop=True)
    kind, few = np.array([KERNELS[name].kind for name in rows["kernel"]], dtype=object), np.zeros(len(rows), dtype=np.int64)
    for name, index in rows.groupby("kernel").indices.items():
        few[index] = few_neighbours(columns_of(rows.iloc[index]), entries[str(name)])
    plain = {name: {**entry, "wider_where_few": [1.0] * (WELL_KNOWN + 1)} for name, entry in entries.items()}
    predicted, ends, asked = of_model(replace(model, manifest={**model.manifest, "kernels": plain}), rows)
    both, measured = (rows[["low", "high"]].to_numpy(), asked.raised(predicted, ends)), rows["p50_us"].to_numpy()
    print(
        "\nFresh timings by how many careful ones lie around; alike: if that had no say in intervals; +: their upper end, median"
    )
    head = "".join(f"{name:>9s}" for name in ("n", "MAPE", "covered", "alike", "+", "+ alike"))
    print(f"{'kernels':14s}{'N and K':>12s}{'around':>10s}{head}")
    edges = (0, *FEW, None)
    for of in dict.fromkeys(KERNELS[name].kind for name in KERNELS):
        for number in range(WELL_KNOWN + 1):
            mine = asked.heard & (kind == of) & (few == number)
            if mine.any():
                aligned, least = divmod(number, EACH)
                around = f"{edges[least]} to {edges[least + 1] - 1}" if edges[least + 1] else f"from {edges[least]}"
                each = [accuracy(measured[mine], predicted[mine], ends[mine]) for ends in both]
                above = [np.median(ends[mine, 1] / predicted[mine]) - 1 for ends in both]
                shares = "".join(f"{value:9.1%}" for value in (each[0]["mape"], *(one["coverage"] for one in each), *above))
                names = ("some odd", "8 divides", "32 divides K")[aligned] if "gemm" in of else ""
                print(f"{of:14s}{names:>12s}{around:>10s}{each[0]['n']:9.0f}{shares}")

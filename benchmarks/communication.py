"""Predicted collectives against measured ones that the prediction did not see, and what is said beyond measurement.

    python -m benchmarks.communication

Held out by whole message sizes: each size leaves the table, for every op, number of ranks and dtype, and the rest of the
table predicts it, interval included. Beside it two simpler models on the same rows: latency plus bytes over bandwidth,
fitted to the same rest, and bytes over the link's nominal bandwidth alone, as sharding planners do. Where sizes and dims were
measured that no table has (`collectives_fresh.parquet`), these judge, too, and kernels beside collectives are held out by whole
shapes where there are such pairs. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.collectives import size_text
from perfmodel import hardware as hardware_module
from perfmodel import overlap
from perfmodel.collectives import LARGE_BYTES, CollectiveModel, load
from perfmodel.compression import pays_from, pays_up_to_gbps
from perfmodel.data_folder import data_folder
from perfmodel.topology import OPS, preset, wire

FRESH = "collectives_fresh.parquet"
NVLINK_BYTES_PER_US = 450e3
"""Nominal, one direction, of an H100 or H200: 18 links of 25 GB/s."""

PUBLIC = (
    # What, ranks, op, GB/s, and whether of the bus: the bytes that each rank must send over the time, not its buffer's.
    ("DeepEP, README: dispatch over 2 hosts of 8, CX7 400 Gb/s", 16, "all_to_all", 90.0, False),
    ("DeepEP, README: dispatch over 4 hosts of 8, CX7 400 Gb/s", 32, "all_to_all", 61.0, False),
    ("nccl-tests issue 212: 8 H100 of a host, bus bandwidth of rings", 8, "all_gather", 370.0, True),
    ("nccl-tests issue 212: the same, all-reduce with NCCL_ALGO=RING", 8, "all_reduce", 370.0, True),
)


def held_out(model: CollectiveModel) -> pd.DataFrame:
    """Every measured row with what the rest of the table says of it."""
    rows = model.table[model.table["op"].isin(OPS)].reset_index(drop=True)
    parts = []
    for size in sorted(set(rows["bytes_per_rank"])):
        out = rows["bytes_per_rank"] == size
        rest = CollectiveModel(model.hardware, rows[~out])
        part = pd.concat([rows[out], rest.predict(rows[out])], axis=1)
        part["alpha_beta_us"] = [_alpha_beta(rest.table, row) for row in part.itertuples()]
        parts.append(part)
    result = pd.concat(parts).sort_index()
    waited = [wire(op, ranks) for op, ranks in zip(result["op"], result["ranks"], strict=True)]
    result["bandwidth_us"] = result["bytes_per_rank"] * waited / NVLINK_BYTES_PER_US
    return result


def fresh(model: CollectiveModel) -> pd.DataFrame | None:
    """Rows of sizes and dims that the table does not have, with what is predicted; None where none were measured."""
    path = data_folder() / model.hardware / FRESH
    if not path.is_file():
        return None
    rows = pd.read_parquet(path)
    rows = rows[rows["op"].isin(OPS)].reset_index(drop=True)
    return pd.concat([rows, model.predict(rows)], axis=1)


def beside(hardware: str) -> pd.DataFrame | None:
    """How far off it is, held out by whole shapes, how much longer kernels and collectives take at once; None without pairs."""
    model = overlap.load(hardware_module.load(hardware))
    if model is None:
        return None
    pairs = model.held_out
    records = []
    for ranks, some in (("all", pairs), *pairs.groupby("ranks")):
        for what, name in (("kernels", "slower"), ("collectives", "exchange_slower")):
            truth, error = some[name], (some[f"told_{name}"] / some[name] - 1).abs()
            one = (pairs[name].median() / truth - 1).abs()
            slow = (f"{truth.quantile(share):.2f}x" for share in (0.1, 0.5, 0.9))
            records.append((what, ranks, len(some), *slow, error.mean(), error.median(), error.quantile(0.9), one.mean()))
    columns = ["slower", "ranks", "n", "p10 of", "median of", "p90 of", "MAPE", "median", "p90", "one factor MAPE"]
    return pd.DataFrame(records, columns=columns)


def _alpha_beta(rest: pd.DataFrame, row: Any) -> float:
    """Latency plus bytes over bandwidth, fitted to the other sizes of a row's setting by least squares of relative errors."""
    names = ["op", "dtype", "split", "dim", "ranks", "groups"]
    own = rest[np.logical_and.reduce([rest[name] == getattr(row, name) for name in names])]
    size, time = own["bytes_per_rank"].to_numpy(float), own["p50_us"].to_numpy()
    alpha, beta = np.linalg.lstsq(np.stack([1 / time, size / time], axis=1), np.ones(len(time)), rcond=None)[0]
    return float(max(alpha, 0.0) + max(beta, 0.0) * row.bytes_per_rank)


def accuracy(rows: pd.DataFrame, others: Sequence[str] = ("alpha_beta_us", "bandwidth_us")) -> pd.DataFrame:
    """Errors by op, dtype and size class: of the model, of both simpler ones, and how often the interval holds."""
    records = []
    large = rows["bytes_per_rank"] >= LARGE_BYTES
    groups: list[tuple[str, pd.Series]] = [
        (f"{op}/{dtype}", (rows["op"] == op) & (rows["dtype"] == dtype))
        for op, dtype in sorted({(op, dtype) for op, dtype in zip(rows["op"], rows["dtype"], strict=True)})
    ]
    groups.append(("all", pd.Series(True, index=rows.index)))
    for name, own in groups:
        for label, part in (("below 1 MiB", rows[own & ~large]), ("from 1 MiB", rows[own & large])):
            truth = part["p50_us"]
            error = (part["time_us"] / truth - 1).abs()
            inside = (part["low_us"] <= truth) & (truth <= part["high_us"])
            if not len(part):
                continue
            simpler = ((part[column] / truth - 1).abs().mean() for column in others)
            records.append(
                (name, label, len(part), error.mean(), error.median(), error.quantile(0.9), error.max(), inside.mean(), *simpler)
            )
    names = {"alpha_beta_us": "alpha-beta MAPE", "bandwidth_us": "bandwidth MAPE"}
    columns = ["op", "size", "n", "MAPE", "median", "p90", "worst", "coverage", *(names[column] for column in others)]
    return pd.DataFrame(records, columns=columns)


def beyond_sizes(model: CollectiveModel) -> pd.DataFrame:
    """The largest sizes predicted without them: how far bandwidth goes on."""
    rows = model.table[model.table["op"].isin(OPS)]
    records = []
    for octaves in (1, 2, 3):
        top = rows.groupby(["op", "dtype"])["bytes_per_rank"].transform("max")
        kept = rows[rows["bytes_per_rank"] <= top / 2**octaves]
        asked = rows[rows["bytes_per_rank"] == top]
        found = CollectiveModel(model.hardware, kept).predict(asked)
        error = (found["time_us"] / asked["p50_us"] - 1).abs()
        inside = (found["low_us"] <= asked["p50_us"]) & (asked["p50_us"] <= found["high_us"])
        records.append((octaves, len(asked), error.mean(), error.max(), inside.mean()))
    return pd.DataFrame(records, columns=["octaves beyond", "n", "MAPE", "worst", "coverage"])


def beyond_ranks(model: CollectiveModel) -> pd.DataFrame:
    """The most ranks that were measured, predicted from fewer: equal bytes on the wire in equal time."""
    rows = model.table[model.table["op"].isin(OPS) & (model.table["dtype"] == "bf16") & (model.table["groups"] == 1)]
    most = rows["ranks"].max()
    records = []
    for (op, split), part in rows.groupby(["op", "split"]):
        curves = {key: curve for key, curve in model.curves.items() if (key.op, key.split, key.dtype) == (op, split, "bf16")}
        fewer = max((key for key in curves if key.ranks < most and key.groups == 1), key=lambda key: key.ranks)
        asked = part[part["ranks"] == most]
        found = curves[fewer](asked["bytes_per_rank"] * wire(str(op), int(most)) / wire(str(op), fewer.ranks))
        ratio = found / asked["p50_us"].to_numpy() - 1
        large = (asked["bytes_per_rank"] >= LARGE_BYTES).to_numpy()
        means = (np.abs(ratio[~large]).mean(), np.abs(ratio[large]).mean())
        records.append((f"{op}, {split}", fewer.ranks, most, len(asked), *means, ratio[large].mean()))
    columns = ["op", "from ranks", "to", "n", "MAPE below 1 MiB", "from 1 MiB", "bias from 1 MiB"]
    return pd.DataFrame(records, columns=columns)


def public_figures(model: CollectiveModel) -> pd.DataFrame:
    """Bandwidths that others publish, and the same by the model."""
    size = 2.0**32
    records = []
    for what, ranks, op, measured, bus in PUBLIC:
        asked = pd.DataFrame([{"op": op, "ranks": ranks, "bytes_per_rank": size}])
        found = (wire(op, ranks) if bus else 1.0) * size / model.predict(asked, preset("hgx_h100"))["time_us"].item() / 1e3
        records.append((what, measured, found, found / measured - 1))
    return pd.DataFrame(records, columns=["published", "GB/s", "model GB/s", "off"])


def where_fp8_pays(model: CollectiveModel, dims: Sequence[int] = (64, 128, 512)) -> tuple[pd.DataFrame, pd.DataFrame]:
    """From which size on FP8 pays, by ranks and dim; up to which network speed, by ranks and size."""

    def text(size: float | None) -> str:
        return "never" if size is None else f"{size / 2**20:.2g} MiB"

    def speed(ranks: int, size: int) -> str:
        found = pays_up_to_gbps(model, ranks, 128, size)
        return "never" if found is None else "any" if found == float("inf") else f"{found:,.0f} Gb/s"

    ranks = (2, 4, 8, 16, 64, 512, 4096)
    sizes = pd.DataFrame([[text(pays_from(model, r, d)) for d in dims] for r in ranks], index=ranks, columns=dims)
    asked = [2**17, 2**18, 2**19, 2**20, 2**22, 2**24]
    speeds = pd.DataFrame(
        [[speed(r, size) for size in asked] for r in ranks[3:]], index=ranks[3:], columns=[size_text(size) for size in asked]
    )
    return sizes.rename_axis("ranks"), speeds.rename_axis("ranks")


def _show(title: str, table: pd.DataFrame, percent: Sequence[str] = ()) -> None:
    form = {name: "{:.1%}".format for name in percent}
    print(f"\n{title}\n{table.to_string(index=table.index.name is not None, formatters=form, float_format='{:,.1f}'.format)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 where the errors are above what is stated: 5% from 1 MiB on, 15% below."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.communication", description=__doc__.splitlines()[0])
    parser.add_argument("--hardware", default="h200", help="whose table (default: h200)")
    parser.add_argument("--json", action="store_true", help="print the held-out table as JSON")
    options = parser.parse_args(arguments)
    try:
        model = load(options.hardware)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 3
    table = accuracy(held_out(model))
    limits = np.where(table["size"] == "from 1 MiB", 0.05, 0.15)
    within = bool((table["MAPE"] <= limits).all())
    if options.json:
        print(json.dumps(json.loads(table.to_json(orient="records")), indent=1))
        return 0 if within else 1
    shares = ["MAPE", "median", "p90", "worst", "coverage", "alpha-beta MAPE", "bandwidth MAPE"]
    _show("Held out by whole message sizes", table, shares)
    if (unseen := fresh(model)) is not None:
        _show("Sizes and dims that the table does not have", accuracy(unseen, ()), shares[:-2])
    if (pairs := beside(options.hardware)) is not None:
        said = "How many times as long kernels and collectives take at once, held out by whole shapes"
        _show(said, pairs, ["MAPE", "median", "p90", "one factor MAPE"])
    _show("Sizes beyond all measured, from the bandwidth of the largest left", beyond_sizes(model), ["MAPE", "worst", "coverage"])
    _show(
        "Ranks never measured, tried on measured ones", beyond_ranks(model), ["MAPE below 1 MiB", "from 1 MiB", "bias from 1 MiB"]
    )
    _show("Never measured here, against published figures", public_figures(model), ["off"])
    sizes, speeds = where_fp8_pays(model)
    _show("FP8 rowwise all-to-all pays from so many bytes a rank on, by dim (hosts of 8 with 400 Gb/s a GPU)", sizes)
    _show("... and up to such network speeds a GPU, by bytes a rank (dim 128)", speeds)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())

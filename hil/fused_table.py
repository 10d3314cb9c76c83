"""Measured fused kernels as a table: which kernel is what, with which bytes.

python -m hil.fused_table runs/fused.json --out data/h200/fused.parquet
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas

from hil import drawn_families
from hil.command import Parser
from hil.drawn_families import DRAWN
from hil.files import write_atomic
from hil.fused_families import CALLED, CUBES, LARGE_CUBES, MATRICES, sums_both_ways
from hil.quantized_families import SIZES
from perfmodel.fused import instructions_of
from perfmodel.in_step import SECTOR_BYTES

METHOD = "durations by torch.profiler of kernels as torch.compile fuses them, bytes by its own account; see hil/fused.py"
KEPT = ("command", "measured", "machine", "left_out")  # of a run, in a table's sidecar


def tabulated(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Kernels of `fused.json` as `perfmodel.fused` learns from them: what each does, its sizes, its bytes, its time.

    A gather is taken to read as many rows as it writes, a scatter to read and write as many as it adds; of a norm's
    backward the bytes follow from its size. Stages of reductions over columns are left out (`torch/bias_backward` of
    memory.parquet times them whole).
    """
    found = []
    for row in rows:
        name = row["kernel"]
        if not name.startswith(("triton_", CALLED)) or row["problem"]:
            continue
        sizes = row["sizes"]
        kept, reduced = sizes.get("x", 1) * sizes.get("y", 1), sizes.get("r0_", 1)
        entry = _entry(row["family"], name, kept, reduced, row["read_bytes"], row["written_bytes"], "y" in sizes)
        if entry is not None:
            operators = {operator.split(".")[1] for operator in row["operators"] if "." in operator} - {"convert_element_type"}
            sizes_of = {"family": row["family"], "kept": kept, "reduced": reduced}
            found.append({**sizes_of, **entry, "instructions": instructions_of(operators), "p50_us": row["time_us"]})
    return pandas.DataFrame(found).drop_duplicates()


def _entry(
    family: str, name: str, kept: int, reduced: int, read_bytes: int, written_bytes: int, tiled: bool
) -> dict[str, Any] | None:
    """Kind and bytes of a kernel; None of one that is a stage of a reduction."""
    entry = {"kind": "pointwise", "read_bytes": read_bytes, "written_bytes": written_bytes, "unordered_bytes": 0, "uneven": False}
    if name == CALLED:
        return {**entry, "kind": family.removesuffix(DRAWN)}
    sizes: tuple[tuple[int, int], ...] = MATRICES
    if family.removesuffix("_large").removesuffix(DRAWN) in TURNED:
        return _turned_entry(family, kept, reduced, entry)
    if family.endswith(DRAWN):
        family, sizes = family.removesuffix(DRAWN), drawn_families.MATRICES + drawn_families.LARGE + drawn_families.COPIED
    if family.startswith(("tensorwise_", "rowwise_")):
        return _quantized_entry(family, kept, reduced, entry, tiled)
    if family == "norm_backward" and (kept, reduced) in sizes:
        return {**entry, "kind": "both" if sums_both_ways(kept, reduced) and written_bytes > kept * reduced else "row"}
    if family == "norm_backward_copied" and (kept, reduced) in sizes:  # with the turned copy, or without
        kind = "both" if sums_both_ways(kept, reduced) else "row"
        return {**entry, "kind": kind, "unordered_bytes": kept * reduced if written_bytes >= 3 * kept * reduced else 0}
    if family == "norm_backward_copied" and tiled:
        return {**entry, "unordered_bytes": read_bytes}
    if reduced > 1:
        uneven = family in ("softmax", "softmax_more")
        of_rows = family in ("norm", "plain_norm") or family.startswith("softmax")
        return {**entry, "kind": "row", "uneven": uneven} if of_rows else None
    if family.startswith(("lookup", "small_lookup")):
        return {**entry, "kind": "gather", "read_bytes": written_bytes}
    if family == "pick":
        return {**entry, "kind": "gather", "read_bytes": 2 * kept}
    if family.startswith("table_gradient"):
        if read_bytes == 0:
            return {**entry, "kind": "fill"}
        if read_bytes == 2 * written_bytes:  # FP32 to bf16
            return entry
        # Of every sector one element is used.
        strided = SECTOR_BYTES * kept * STRIDED.get(family, 0)
        return {
            **entry, "kind": "scatter", "read_bytes": 6 * kept + strided, "written_bytes": 4 * kept, "unordered_bytes": strided
        }  # fmt: skip
    if read_bytes == 0:
        return {**entry, "kind": "fill"}
    if family in ("rotate", "cat"):
        return {**entry, "read_bytes": written_bytes}
    return {**entry, "unordered_bytes": read_bytes} if tiled else entry


# Of what these families read and write per element, the bytes across memory.
TURNED = {
    "turned_sum": 2, "turned_norm": 2, "norm_turned": 4, "turned_norm_backward": 2, "turned_sums_norm_backward": 4,
}  # fmt: skip


STRIDED = {"table_gradient_strided": 1, "table_gradient_strided1": 1, "table_gradient_strided3": 3}
"""How many gradients these families add up, of which each lies apart."""


def _turned_entry(family: str, kept: int, reduced: int, entry: dict[str, Any]) -> dict[str, Any] | None:
    cubes = LARGE_CUBES if family.endswith("_large") else drawn_families.CUBES if family.endswith(DRAWN) else CUBES
    cube = next(((b * t, d) for b, t, d in cubes if kept * reduced == b * t * d), None)
    if cube is None:
        return None
    family = family.removesuffix("_large").removesuffix(DRAWN)
    entry = {**entry, "unordered_bytes": TURNED[family] * kept * reduced}
    if reduced == 1:
        return entry
    if (kept, reduced) != cube:
        return None
    if family == "turned_sums_norm_backward":  # whose sums along memory read one FP32 tensor, written before
        return {**entry, "kind": "both" if sums_both_ways(*cube) else "row"}
    return {**entry, "kind": "row", "uneven": True}


def _quantized_entry(family: str, kept: int, reduced: int, entry: dict[str, Any], tiled: bool) -> dict[str, Any] | None:
    """Largest magnitudes run along memory, in stages; transposed copies lie across it."""
    readings = family.rpartition("_")[2]
    if reduced > 1:
        if family.startswith("rowwise_") and (kept, reduced) not in SIZES:
            return None  # a stage of the columns' magnitudes
        turned = kept * reduced if family.startswith("rowwise_") and readings == "rt" else 0
        return {**entry, "kind": "row", "unordered_bytes": turned}
    if "t" not in readings or not tiled:
        return entry
    return {**entry, "unordered_bytes": kept if readings == "rt" else entry["read_bytes"]}


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = Parser(prog="python -m hil.fused_table", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="what `python -m hil.fused compiled` wrote")
    parser.add_argument("--out", type=Path, required=True, help="parquet file of the table")
    parser.add_argument("--add", action="store_true", help="keep the rows that --out has; its sidecar names the new runs, too")
    options = parser.parse_args(arguments)
    sidecar = options.out.with_suffix(".json")
    if sidecar.resolve() in [file.resolve() for file in options.files]:
        parser.error(f"--out {options.out} has {sidecar}, which is to be read, for its sidecar; name another")
    runs = [json.loads(file.read_text()) for file in options.files]
    table = tabulated([row for run in runs for row in run["rows"]])
    about: dict[str, Any] = {"schema_version": 1, "method": METHOD, "runs": []}
    if options.add:
        table = pandas.concat([pandas.read_parquet(options.out), table], ignore_index=True).drop_duplicates()
        about = json.loads(sidecar.read_text())
    about["runs"] += [{**{k: run[k] for k in KEPT}, "rows": len(run["rows"])} for run in runs]
    write_atomic(sidecar, lambda beside: beside.write_text(json.dumps(about, indent=1) + "\n"))
    write_atomic(options.out, lambda beside: table.to_parquet(beside, index=False))
    print(f"{options.out}: {len(table)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())

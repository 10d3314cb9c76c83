"""Measured fused kernels as a table: which kernel is what, with which bytes."""

import json

import pandas as pd
import pytest

from hil import drawn_families, fused_table
from hil.fused_families import CALLED, CUBES, MATRICES
from hil.fused_table import tabulated


def row(family, kernel, sizes, read, written, operators=("aten.add.Tensor",), problem=""):
    return {
        "family": family, "kernel": kernel, "sizes": sizes, "read_bytes": read, "written_bytes": written,
        "operators": dict.fromkeys(operators, 1), "problem": problem, "time_us": 10.0,
    }  # fmt: skip


def one(*arguments, **named):
    (entry,) = tabulated([row(*arguments, **named)]).to_dict("records")
    return entry


def test_a_pointwise_kernel_keeps_torch_compiles_bytes():
    entry = one("sum2", "triton_poi_fused_add_0", {"x": 1024, "r0_": 1}, 4096, 2048, ("aten.add.Tensor", "aten.exp.default"))
    assert (entry["kind"], entry["kept"], entry["reduced"]) == ("pointwise", 1024, 1)
    assert (entry["read_bytes"], entry["written_bytes"], entry["unordered_bytes"]) == (4096, 2048, 0)
    assert entry["instructions"] == 10 + 1


def test_a_concatenation_reads_what_it_writes():
    """torch.compile counts each part as long as the whole."""
    assert one("cat", "triton_poi_fused_cat_0", {"x": 1024, "r0_": 1}, 4096, 2048)["read_bytes"] == 2048


def test_look_ups_and_adds_count_the_rows_not_the_table():
    entry = one("lookup26x64", "triton_poi_fused_embedding_1", {"x": 1024, "r0_": 1}, 10**6, 2048)
    assert (entry["kind"], entry["read_bytes"]) == ("gather", 2048)
    entry = one("table_gradient_uniform", "triton_poi_fused_embedding_dense_backward_1", {"y": 8, "x": 128}, 10**6, 4096)
    assert (entry["kind"], entry["read_bytes"], entry["written_bytes"]) == ("scatter", 6 * 1024, 4 * 1024)


def test_norms_of_turned_operands_read_across_memory():
    batch, tokens, dim = CUBES[0]
    elements = batch * tokens * dim
    sizes = {"x": batch * tokens, "r0_": dim}
    entry = one("turned_norm", "triton_red_fused_0", sizes, 4 * elements, 4 * elements)
    assert (entry["kind"], entry["unordered_bytes"], entry["uneven"]) == ("row", 2 * elements, True)
    entry = one("turned_sums_norm_backward", "triton_per_fused_0", sizes, 14 * elements, 2 * elements)
    assert (entry["kind"], entry["unordered_bytes"], entry["uneven"]) == ("both", 4 * elements, False)


@pytest.mark.parametrize(
    ("family", "kernel", "sizes", "problem"),
    [
        ("mask_and_sum", "triton_red_fused_sum_1", {"x": 2048, "r0_": 128}, ""),  # a stage of a sum over rows
        ("sum2", "void at::native::vectorized_elementwise_kernel", {}, ""),
        ("sum2", "triton_poi_fused_add_0", {"x": 16}, "AttributeError: numels"),
    ],
)
def test_what_is_no_kernel_of_known_bytes_is_left_out(family, kernel, sizes, problem):
    assert tabulated([row(family, kernel, sizes, 64, 64, problem=problem)]).empty


def test_a_norms_gradient_is_one_kernel_both_ways_where_it_is_large():
    large = next((m, n) for m, n in MATRICES if (m, n) == (524288, 128))
    elements = large[0] * large[1]
    entry = one("norm_backward", "triton_per_fused_0", {"x": large[0], "r0_": large[1]}, 4 * elements, 2 * elements)
    assert entry["kind"] == "both"
    entry = one("norm_backward", "triton_per_fused_1", {"x": 2048, "r0_": 512}, 4 * 2**20, 2 * 2**20)
    assert entry["kind"] == "row"


def fused_run(folder, name, *rows):
    path = folder / name
    about = {"command": f"python -m hil.fused compiled --out {name}", "measured": "now", "machine": {}, "left_out": []}
    path.write_text(json.dumps({**about, "rows": list(rows)}))
    return str(path)


def test_a_table_says_which_runs_it_is_made_of(tmp_path, capsys):
    exp = row("sum2", "triton_poi_fused_add_0", {"x": 1024, "r0_": 1}, 4096, 2048)
    more = row("sum2", "triton_poi_fused_add_1", {"x": 2048, "r0_": 1}, 8192, 4096)
    first, second = fused_run(tmp_path, "a.json", exp), fused_run(tmp_path, "b.json", exp, more)
    out = tmp_path / "fused.parquet"
    assert fused_table.main([first, "--out", str(out)]) == 0
    assert fused_table.main([second, "--out", str(out), "--add"]) == 0
    assert sorted(pd.read_parquet(out)["kept"]) == [1024, 2048]
    runs = json.loads((tmp_path / "fused.json").read_text())["runs"]
    assert [(run["command"].split()[-1], run["rows"]) for run in runs] == [("a.json", 1), ("b.json", 2)]
    with pytest.raises(SystemExit):
        fused_table.main([first, "--out", str(tmp_path / "a.parquet")])
    assert "which is to be read" in capsys.readouterr().err
    assert json.loads((tmp_path / "a.json").read_text())["rows"] == [exp]


def test_drawn_sizes_lie_between_the_round_ones_and_are_known_by_their_elements():
    assert len({b * t * d for b, t, d in drawn_families.CUBES}) == len(drawn_families.CUBES) == 20
    assert not {m * n for m, n in drawn_families.MATRICES} & {m * n for m, n in MATRICES}
    for m, n in drawn_families.LARGE:  # as torch.compile asks for it: `MixOrderReduction.can_fuse`
        assert m * n >= 5 * 2**20 and m >= max(4096, 2 * n)
    assert all(m % 16 == n % 16 == 0 for m, n in drawn_families.COPIED)


def test_drawn_sums_and_copies_are_those_of_a_step():
    """Sums lie by 8 elements; rows that are copied to begin at a multiple of 64, which their own length is not."""
    parts, copies = drawn_families.drawn_parts(), drawn_families.drawn_copies()
    assert len(set(parts)) > 250 and all(columns % 8 == 0 for _, columns in parts)
    assert len(copies) == 60 and all(columns % 8 == 0 and columns % 64 for _, columns in copies)


def test_a_norms_gradient_with_the_turned_copy_writes_that_across_memory():
    m, n = drawn_families.COPIED[2]
    sizes, read = {"x": m, "r0_": n}, 4 * m * n
    entry = one("norm_backward_copied_drawn", "triton_per_fused_0", sizes, read, 3 * m * n + 4 * n)
    assert (entry["kind"], entry["unordered_bytes"]) == ("both", m * n)
    entry = one("norm_backward_copied_drawn", "triton_per_fused_0", sizes, read, 2 * m * n + 4 * n)
    assert (entry["kind"], entry["unordered_bytes"]) == ("both", 0)


@pytest.mark.parametrize("kind", ["partials", "copy"])
def test_what_torch_itself_runs_is_a_kind_of_its_own(kind):
    assert one(kind, CALLED, {"x": 1920, "r0_": 384 if kind == "partials" else 1}, 4096, 2048)["kind"] == kind


@pytest.mark.parametrize(("family", "terms"), [("table_gradient_strided1_drawn", 1), ("table_gradient_strided3_drawn", 3)])
def test_gradients_that_lie_apart_are_read_a_sector_each(family, terms):
    entry = one(family, "triton_poi_fused_embedding_dense_backward_0", {"x": 1024, "r0_": 1}, 10**6, 4096)
    assert (entry["kind"], entry["unordered_bytes"]) == ("scatter", terms * 32 * 1024)

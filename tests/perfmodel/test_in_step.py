"""What kernels take inside a step: curves recovered from kernels made up, and those that ship held to profiled steps."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from perfmodel import fit_fused, fit_in_step, fused, hardware, in_step
from perfmodel.data_folder import data_folder

SHIPPED = in_step.load()
TABLE = pd.read_parquet(data_folder() / "h200" / "step_kernels.parquet")


def kernels(count: int, seed: int = 0) -> pd.DataFrame:
    """Kernels of three models, pointwise and GEMMs, each a thousandth of its step."""
    source = np.random.default_rng(seed)
    moved = 2 ** source.uniform(15, 29, count)
    gemm = source.random(count) < 0.5
    return pd.DataFrame(
        {
            "model": source.choice(["dlrm-small", "wukong-small", "x:dcnv2_3"], count), "batch": 512, "variant": "bf16",
            "kind": np.where(gemm, "gemm", "pointwise"), "kernel": np.where(gemm, "torch/bf16", None), "label": "add",
            "read_bytes": moved / 2, "written_bytes": moved / 2, "kept": 1, "unordered_bytes": 0,
            "launches": 1, "shared": False, "step_us": 1.0,
            "graph_us": 2.0, "step_launches": 4, "step_batched": 0, "m": 512, "n": 512, "k": 512,
        }
    )  # fmt: skip


def test_curves_are_found_again_whatever_a_few_kernels_do():
    table = kernels(3000)
    alone = 2 ** np.random.default_rng(1).uniform(1, 9, len(table))
    moved = np.log2(table["read_bytes"] + table["written_bytes"])
    gemms = (table["kind"] == "gemm").to_numpy()
    truth = np.where(gemms, 0.9, np.interp(moved, [15, 23, 29], [1.0, 0.7, 1.0]))
    noise = np.random.default_rng(2).normal(0, 0.03, len(table))
    table["us"] = alone * truth * np.exp(noise + (np.arange(len(table)) % 20 == 0) * 2.0)  # a twentieth takes seven times as long
    table["step_us"] = 300 * table["us"]  # that all count alike
    curves = fit_in_step.fit(table, alone)
    found = fit_in_step.factors(curves, table, alone)
    assert np.abs(found / truth - 1).max() < 0.06


def test_a_family_is_as_far_off_as_its_steps_are():
    table = kernels(300)
    table["us"] = 0.01
    off = {"dlrm-small": 1.1, "wukong-small": 0.95, "x:dcnv2_3": 1.02}
    found = fit_in_step.off_together(table, 0.01 * table["model"].map(off).to_numpy())
    logs = np.log(list(off.values()))
    for share in found.values():  # 2.92: Student's t of two degrees of freedom
        assert share == pytest.approx(2.92 * np.sqrt((logs**2).mean()), rel=0.2)


def test_intervals_are_as_wide_as_nine_steps_in_ten_need():
    table = pd.concat([kernels(100, seed).assign(batch=seed) for seed in range(30)], ignore_index=True)
    table["us"] = 0.01
    log_off = dict(zip(range(30), np.random.default_rng(5).normal(0, 0.1, 30), strict=True))
    steps = table["batch"].map(log_off) + table["model"].map({"dlrm-small": 0.0, "wukong-small": 0.02, "x:dcnv2_3": -0.02})
    predicted = 0.01 * np.exp(steps.to_numpy())
    found = fit_in_step.calibrated(table, predicted, {"pointwise": 0.5, "gemm_bf16": 0.5})
    # Both families of a step are off by the same here; each widths adds in quadrature.
    needed = np.quantile(np.abs(1 - np.exp(-steps.groupby([table["model"], table["batch"]]).first())), 0.9)
    assert found["pointwise"] == found["gemm_bf16"] == pytest.approx(fit_in_step.WHOLE * np.sqrt(2) * needed, rel=0.15)


def test_kinds_of_models_are_known_by_their_names():
    names = ["wukong-production", "wukong-small", "benchmarks.other_widths:wukong", "benchmarks.other_widths:wukong_7"]
    assert {fit_in_step.architecture(name) for name in names} == {"wukong"}
    assert {fit_in_step.architecture(f"benchmarks.drawn_models:drawn_{seed}") for seed in (3, 11, 83)} == {"drawn 3"}


def test_gaps_are_what_graphs_take_longer_than_their_kernels():
    """Behind kernels 0.25 us, half as much behind those of half of `SHORT_US`, around counted products 3 us more.

    A graph that lost a tenth to something else moves none of them.
    """
    counts = [(100, 0), (200, 9), (300, 2), (400, 40), (250, 12), (120, 6), (180, 1)]
    short = {120: 0.0, 250: 0.5, 300: 1.0}  # the share of kernels that are short, of some
    steps = [
        kernels(50).assign(
            batch=n, step_launches=n, step_batched=batched, step_us=1e3,
            us=np.where(np.arange(50) < 50 * short.get(n, 0), 1.0, 9.0),
            graph_us=1e3 + n / 4 * (1 - short.get(n, 0) / 2) + 3 * batched,
        )
        for n, batched in counts
    ]  # fmt: skip
    steps[2] = steps[2].assign(graph_us=1175.0)
    others = kernels(5).assign(shared=True, graph_us=9.0, us=5.0)
    assert fit_in_step.gaps_us(pd.concat([*steps, others])) == pytest.approx((0.25, 3.0), abs=0.002)


def test_counted_products_take_less_by_what_is_no_kernel():
    table = kernels(40).assign(kind="gemm", kernel="torch/bf16_batched", us=5.0)
    alone = np.full(40, 7.0)
    alone[::8] += 30.0  # larger ones say nothing
    assert fit_in_step.batched_us(table, alone) == pytest.approx(2.0)
    odd = table.assign(m=27)  # these are not counted
    assert fit_in_step.batched_us(odd, alone) == 0
    assert in_step.is_counted("torch/bf16_batched", [48, 27, 48], [8, 8, 8], [8, 8, 2]).tolist() == [True, False, False]
    assert SHIPPED.batched([7.0, 100.0]) == pytest.approx(1 - SHIPPED.batched_less_us / np.array([7.0, 100.0]))


def test_families_tell_quantization_from_the_rest():
    assert in_step.family("pointwise", "add cast mul", 64, 0) == "quantize_pointwise"
    assert in_step.family("row", "abs amax cast relu", 64, 0) == "quantize_reduction"
    assert in_step.family("row", "amax exp sub sum", 64, 0) == "reduction"  # a softmax
    assert in_step.family("external", "index_add", 64, 0) == "pointwise"
    assert in_step.family("row", "abs amax cast rescale_rounded*2", 64, 0) == "rescale"  # whose bytes are the least of it
    assert SHIPPED.fused(["rescale"], [2**20]) == 1
    assert in_step.family("unheard of", "add", 64, 0) == ""
    spread = [in_step.family("scatter", "add", 64, size) for size in (0, 32 * 64, 64 * 64)]
    assert spread == ["scatter", "scatter_strided", "scatter_turned"]


def test_small_kernels_find_what_they_read_in_the_cache():
    """The shipped curves: a megabyte from the L2, hundreds of them from memory; and large FP8 GEMMs have power to spare."""
    small, large, unknown = SHIPPED.fused(["pointwise", "pointwise", ""], [2**20, 2**28, 2**20])
    assert small < 0.85 < 0.9 < large and unknown == 1
    fp8, bf16 = SHIPPED.gemms([True, False], [300.0, 300.0])
    assert fp8 < bf16 < 1.1
    assert 0.1 < SHIPPED.gap_us < 1.0 < SHIPPED.batched_gap_us < 10
    assert SHIPPED.gaps_us([1.0, 2.0, 50.0]) == pytest.approx(SHIPPED.gap_us * np.array([0.5, 1.0, 1.0]))


def test_steps_of_models_left_out_are_nearer_with_the_curves_than_without():
    """Of the zoo's four kinds and a third of the others, by a fit for each that left it out."""
    h200, rows = hardware.load("h200"), fit_fused.read_rows(data_folder() / "h200")
    kinds = TABLE["model"].map(fit_in_step.architecture).to_numpy()
    others = [kind for kind in np.unique(kinds) if TABLE["model"][kinds == kind].str.contains("other_models").any()]
    left_out = ["dcnv2", "dlrm", "interformer", "wukong", *others[::3]]
    alone = fit_in_step.alone_us(TABLE, fit_fused.train(rows, h200), h200)
    apart = {}
    inside = np.full(len(TABLE), np.nan)
    for kind in left_out:
        inside[kinds == kind] = fit_in_step.told_by_others(TABLE, alone, rows, h200, kinds == kind)
    table, known = TABLE[np.isfinite(inside)], np.isfinite(inside)
    for name, times in (("alone", alone[known]), ("in a step", inside[known])):
        sums = table.assign(measured=table["us"] * table["launches"], predicted=times * table["launches"])
        totals = sums.groupby(fit_in_step.STEP)[["measured", "predicted"]].sum()
        off = np.abs(np.log(totals["measured"] / totals["predicted"]))
        other = totals.index.get_level_values("model").str.contains("other_models")
        apart[name], apart[name, "zoo"], apart[name, "other"] = off.mean(), off[~other].mean(), off[other].mean()
    assert apart["in a step", "zoo"] < 0.06 and apart["in a step"] < 0.7 * apart["alone"]
    assert apart["in a step", "other"] < 0.09 and apart["in a step", "other"] < 0.8 * apart["alone", "other"]


def test_a_file_of_another_version_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "h200" / "models"
    folder.mkdir(parents=True)
    shutil.copy(data_folder() / "h200" / "hardware.json", tmp_path / "h200")
    monkeypatch.setattr(hardware, "data_folder", lambda: tmp_path)
    assert in_step.load() is None
    (folder / in_step.FILE).write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(ValueError, match="schema version 99"):
        in_step.load()


def test_kernels_of_steps_teach_the_trees_by_what_they_would_take_alone():
    table = kernels(40).assign(us=3.0, reduced=1, uneven=False, instructions=2)
    table.loc[table.index[:4], ["kind", "label"]] = "row", "mul rescale"
    rows = pd.DataFrame({name: [] for name in (*fused.COLUMNS, "p50_us", "weight")})
    alone = np.full(len(table), 1.9)
    alone[10:20] = 0.9  # these take more than twice as long as was predicted, and are others
    found = fit_in_step.with_steps(rows, table, np.full(len(table), 1.5), alone)
    sums = (table["kind"] == "pointwise") & (table["label"] == "add")
    taught = (sums | (table["label"] == "mul rescale")) & (alone > 1)
    assert len(found) == taught.sum() and found["p50_us"].tolist() == [2.0] * taught.sum()
    assert found["weight"].to_numpy(dtype=float) == pytest.approx(fit_in_step.STEP_WEIGHT * 3.0)


def test_magnitudes_of_a_whole_tensor_are_a_family_of_their_own():
    assert in_step.family("row", "abs amax le where", 512, 0) == "magnitudes"
    assert in_step.family("row", "abs amax cast clamp_max mul", 2048, 0) == "quantize_reduction"
    assert in_step.family("row", "abs add amax mul rsqrt sub var_mean", 2048, 0) == "quantize_reduction"
    assert in_step.family("column", "abs amax", 512, 0) == "quantize_reduction"

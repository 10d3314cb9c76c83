"""What travels between GPUs: sizes by hand, times as the collectives' model says, settings that cannot be."""

import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest
import yaml

import loka_sim
from loka_sim.cluster import cluster_of
from loka_sim.communication import NETWORK, NVLINK, Communication, Parallel, communication, embedding_bytes
from loka_sim.dense_units import BUCKET_BYTES
from loka_sim.errors import UserError
from loka_sim.modelspec import Dim, Gemm, ModelSpec, Site, Table, linear_passes
from loka_sim.step_document import in_words
from perfmodel import collectives
from perfmodel.collectives import CollectiveModel
from perfmodel.data_folder import data_folder
from perfmodel.topology import Cluster, preset

HGX = preset("hgx_h200")


def linear(name, n, k, **fields):
    return Site(name, "linear", linear_passes(Dim(0, 1), Dim(n), Dim(k)), weight=f"{name}.weight", **fields)


def spec_of(*sites, dense=0, tables=()):
    return ModelSpec("m", 1024, sites, tables, dense)


def ask(op, ranks, size, cluster=HGX, **columns):
    frame = pd.DataFrame([{"op": op, "ranks": ranks, "bytes_per_rank": size, **columns}])
    return collectives.load("h200").predict(frame, cluster)["time_us"].item()


def units(found):
    return [(unit.sites, unit.size_bytes) for unit in found.units]


def test_embedding_bytes_by_hand(made_up_model):
    # 64 pooled values and 3 x 32 unpooled ones a sample, 2 bytes each.
    assert embedding_bytes(made_up_model) == 2048 * (64 + 3 * 32) * 2


def test_one_gpu_exchanges_nothing(made_up_times, made_up_model):
    assert communication(made_up_model, Parallel(), made_up_times()) is None


def test_replicated_gradients_fill_buckets_from_the_end(made_up_times):
    """MiB: a 10, b 20, c 6, d 26, and 3 that stand at no GEMM."""
    mib = 2**20
    sizes = {"a": 10, "b": 20, "c": 6, "d": 26}
    spec = spec_of(*(linear(name, size * 512, 1024) for name, size in sizes.items()), dense=65 * mib // 2)
    found = communication(spec, Parallel(4, HGX), made_up_times())
    assert units(found) == [(("a",), 13 * mib), (("b", "c"), 26 * mib), (("d",), 26 * mib)]
    assert found.dense_bytes == 65 * mib
    expected = ask("all_reduce", 4, 13 * mib) + 2 * ask("all_reduce", 4, 26 * mib)
    assert found.dense_us == pytest.approx(expected)
    assert all(call.stream == NVLINK and call.basis == "interpolated" for call in found.calls)


def test_what_stands_at_no_gemm_is_cut_into_buckets(made_up_times):
    spec = spec_of(linear("a", 16, 16), dense=16 * 16 + 30 * 2**20)
    found = communication(spec, Parallel(4, HGX), made_up_times())
    assert units(found) == [((), BUCKET_BYTES), ((), BUCKET_BYTES), (("a",), 10 * 2**20 + 512)]
    nowhere = communication(
        spec_of(Site("p", "bmm", {"output": Gemm(Dim(1), Dim(1), Dim(1))}), dense=7), Parallel(4), made_up_times()
    )
    assert units(nowhere) == [((), 14)]


def test_a_shared_weight_travels_once_and_what_depends_on_the_batch_is_none(made_up_times):
    first, second = linear("a", 1024, 1024), replace(linear("b", 1024, 1024), weight="a.weight")
    frozen = Site("c", "linear", {"output": Gemm(Dim(0, 1), Dim(64), Dim(64))}, weight="c.weight")
    product = Gemm(Dim(32), Dim(64), Dim(32), Dim(0, 1))
    batched = Site("d", "bmm", {"output": product, "grad_weight": product}, weight="d.weight")
    found = communication(spec_of(first, second, frozen, batched), Parallel(2, HGX), made_up_times())
    assert units(found) == [(("a",), 2 * 1024 * 1024)]


def test_fsdp_gathers_twice_and_scatters_once(made_up_times):
    spec = spec_of(linear("a", 4096, 4096), linear("b", 64, 4096), linear("c", 64, 4096))
    found = communication(spec, Parallel(64, HGX, "fsdp"), made_up_times())
    sizes = [2**25, 2 * 2 * 64 * 4096]
    assert units(found) == [(("a",), sizes[0]), (("b", "c"), sizes[1])]
    assert [call.call.op for call in found.units[0].calls] == ["all_gather", "all_gather", "reduce_scatter"]
    expected = sum(2 * ask("all_gather", 64, size) + ask("reduce_scatter", 64, size) for size in sizes)
    assert found.dense_us == pytest.approx(expected)
    assert all(call.stream == NETWORK and call.basis == "modelled" for call in found.calls)


def test_hsdp_shards_inside_hosts_and_reduces_shards_between(made_up_times):
    spec = spec_of(linear("a", 4096, 4096))
    found = communication(spec, Parallel(64, HGX, "hsdp"), made_up_times())
    size = 2**25
    gather, _, scatter, between = found.units[0].calls
    assert (gather.call.op, gather.call.ranks, gather.stream, gather.basis) == ("all_gather", 8, NVLINK, "extrapolated")
    assert (scatter.call.op, scatter.call.ranks, scatter.stream) == ("reduce_scatter", 8, NVLINK)
    assert (between.call.op, between.call.ranks, between.call.per_host, between.stream) == ("all_reduce", 8, 1, NETWORK)
    assert between.call.bytes_per_rank == size // 8
    assert between.time.us == pytest.approx(ask("all_reduce", 8, size / 8, per_host=1))
    # In one host there is nothing between.
    inside = communication(spec, Parallel(4, HGX, "hsdp"), made_up_times())
    assert [call.call.op for call in inside.units[0].reduce] == ["reduce_scatter"]


def test_embeddings_travel_compressed_at_the_tables_width_or_the_nearest_measured(made_up_times):
    for dims, expected in (((128, 256), 192), ((16, 16), 64), ((2048,), 512)):
        tables = tuple(Table(str(i), 1000, dim, "sum", 1.0) for i, dim in enumerate(dims))
        spec = spec_of(linear("a", 64, 64), tables=tables)
        found = communication(spec, Parallel(64, HGX, exchange="fp8_rowwise"), made_up_times())
        assert found.exchange.call.dim == expected
        assert found.exchange.call.bytes_per_rank == embedding_bytes(spec) == 1024 * sum(dims) * 2
        us = ask("all_to_all", 64, embedding_bytes(spec), dtype="fp8_rowwise", dim=expected)
        assert found.exchange_us == pytest.approx(2 * us)
    assert "in fp8_rowwise" in in_words(found)


def test_without_tables_or_parameters_nothing_travels(made_up_times):
    found = communication(spec_of(Site("p", "bmm", {"output": Gemm(Dim(1), Dim(1), Dim(1))})), Parallel(8, HGX), made_up_times())
    assert (found.calls, found.exchange_us, found.dense_us, found.basis) == ((), 0.0, 0, None)


def test_what_was_never_measured_has_no_figure_and_says_so(made_up_times, made_up_model, monkeypatch):
    table = collectives.load("h200").table
    model = CollectiveModel("my-gpu", table)
    times = made_up_times()
    monkeypatch.setattr(made_up_times, "collectives", model)
    found = communication(made_up_model, Parallel(16), times)
    assert found.missing == "ranks 16: no cluster is known for my-gpu; give hgx_h100, hgx_h200 or another's links"
    assert found.exchange_us is found.dense_us is found.basis is None
    assert in_words(found).startswith("No figure for communication between 16 GPUs: ranks 16: no cluster")

    def absent(self):
        raise FileNotFoundError("no collective was measured on mi300; run: torchrun -m hil.collectives")

    monkeypatch.setattr(made_up_times, "collectives", property(absent))
    assert "no collective was measured" in communication(made_up_model, Parallel(4, HGX), times).missing


def test_words_say_where_a_figure_comes_from(made_up_times, made_up_model):
    inside, eight, across = (in_words(communication(made_up_model, Parallel(n, HGX), made_up_times())) for n in (4, 8, 512))
    assert "extrapolated" not in inside and "model" not in inside
    assert "That is extrapolated" in eight
    assert "512 GPUs in 64 hosts (hgx_h200, 400 Gb/s a GPU)" in across and "not measured: 25% either way" in across


def test_compressed_embeddings_are_not_judged_and_that_is_said(made_up, made_up_model):
    said = {
        exchange: [s["text"] for s in loka_sim.whatif(made_up_model, gpus=16, exchange=exchange).to_dict()["statements"]]
        for exchange in ("bf16", "fp8_rowwise")
    }
    assert [any("in accuracy is not predicted" in text for text in texts) for texts in said.values()] == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "--gpus 0 is no positive whole number"),
        ({"gpus": 12}, "--gpus 12: hosts of hgx_h200 have 8 GPUs; give whole hosts, 8 or 16"),
        ({"gpus": 5000}, "--gpus 5000 is more than can be asked about; give at most 4,096"),
        ({"gpus": 8, "dense": "zero"}, "--dense zero is unknown; choose one of ddp, fsdp, hsdp"),
        ({"gpus": 8, "exchange": "int4"}, "--exchange int4 is unknown; choose one of bf16, fp16, fp8_rowwise"),
        ({"gpus": 8, "cluster": "hgx_h300"}, "--cluster hgx_h300 is neither a file nor one of hgx_h100, hgx_h200"),
        ({"gpus": 8, "cluster": "nowhere.yaml"}, "nowhere.yaml: no such file"),
    ],
)
def test_a_job_that_cannot_be_is_refused(made_up, made_up_model, options, message):
    with pytest.raises(UserError, match=message):
        loka_sim.whatif(made_up_model, **options)


def test_a_cluster_from_a_file(tmp_path):
    fields = {"name": "mine", "nic_gbps": 200, "gpus_per_host": 4, "rails": 4}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(fields))
    (tmp_path / "c.json").write_text(json.dumps(fields))
    expected = Cluster("mine", nic_gbps=200, gpus_per_host=4, rails=4)
    assert cluster_of(tmp_path / "c.yaml", "h200") == cluster_of(str(tmp_path / "c.json"), "h200") == expected
    assert cluster_of(expected, "h200") is expected
    assert cluster_of(None, "h200") == HGX and cluster_of(None, "my-gpu") is None
    (tmp_path / "bad.yaml").write_text("name: mine\nnic_gbps: 200\nnic_gbps: 400\n")
    with pytest.raises(UserError, match="key 'nic_gbps' stands twice"):
        cluster_of(tmp_path / "bad.yaml", "h200")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(UserError, match="the file is empty; write the cluster again"):
        cluster_of(tmp_path / "empty.yaml", "h200")
    (tmp_path / "typo.yaml").write_text("name: mine\nnic_gpbs: 200\n")
    with pytest.raises(UserError, match="typo.yaml: unknown field 'nic_gpbs'; write nic_gbps"):
        cluster_of(tmp_path / "typo.yaml", "h200")


def test_a_calibrations_own_collectives_are_used(tmp_path, made_up_model):
    """A calibration that is the shipped time model with collectives twice as slow."""
    shipped = data_folder() / "h200"
    shutil.copytree(shipped / "models", tmp_path / "perfmodel")
    shutil.copy(shipped / "hardware.json", tmp_path)
    manifest = {"schema_version": 1, "kind": "loka-sim/calibration", "hardware": "h200"}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    whole = loka_sim.whatif(made_up_model, gpus=4)
    same = loka_sim.whatif(made_up_model, gpus=4, calibration=tmp_path)
    assert same.communication.calls == whole.communication.calls
    table = collectives.load("h200").table
    table.assign(p50_us=2 * table["p50_us"]).to_parquet(tmp_path / "perfmodel" / "collectives.parquet")
    slow = loka_sim.whatif(made_up_model, gpus=4, calibration=tmp_path)
    assert slow.communication.exchange_us == pytest.approx(2 * whole.communication.exchange_us)
    assert slow.communication.dense_us == pytest.approx(2 * whole.communication.dense_us)


def test_a_communication_without_a_job_of_hosts_is_one_host():
    parallel = Parallel(4)
    assert (parallel.per_host, parallel.hosts) == (4, 1)
    assert Communication(parallel, 1, 2).basis is None

"""One training step as a timeline: order, overlap and sums, by hand and on a made-up model."""

import dataclasses
import gzip
import json

import numpy as np
import pytest

import loka_sim
from loka_sim.cli import main
from loka_sim.communication import NETWORK, NVLINK, Call, Collective, Communication, Parallel, Unit
from loka_sim.dispatch.cost import Time
from loka_sim.errors import UserError
from loka_sim.host_time import SEVERAL_US, called_on_several
from loka_sim.modelspec import Dim, ModelSpec, Site, linear_passes
from loka_sim.schemas import problem
from loka_sim.statements import statements
from loka_sim.step_document import step_document, write_trace
from loka_sim.step_plan import (
    BACKWARD,
    BF16,
    DECISION,
    FORWARD,
    GPUS_DEVIATION,
    LOOKUP,
    LOSS,
    OPTIMIZER,
    TABLE_UPDATE,
    Piece,
    plan,
    slowest,
    timelines,
)
from loka_sim.whole_step import Other, batched_products
from perfmodel.timeline import COMPUTE, HOST, schedule


def exact(us):
    return Time(us, us, us)


def piece(phase, name, us, site=None):
    return Piece(phase, name, "gemm", exact(us), site)


def collective(op, us, stream=NETWORK):
    return Collective(Call(op, 16, 1024, 8), stream, exact(us), "modelled")


def exchanged(units, exchange=None):
    return Communication(Parallel(16), 1, 1, exchange, tuple(units))


STEP = [
    piece(FORWARD, "a out", 10, "a"), piece(FORWARD, "b out", 20, "b"), piece(BACKWARD, "b grad", 40, "b"),
    piece(BACKWARD, "a grad", 20, "a"), piece(LOSS, "loss", 1), piece(OPTIMIZER, "adam", 5), piece(LOOKUP, "rows", 3),
    piece(TABLE_UPDATE, "rows' update", 4),
]  # fmt: skip


def times(made):
    return {op.name: (start, end) for op, start, end in zip(made.ops, made.starts, made.ends, strict=True)}


def test_one_gpu_runs_its_phases_in_order():
    made = schedule(plan(STEP))
    assert [op.name for op in made.ops] == ["rows", "a out", "b out", "loss", "b grad", "a grad", "rows' update", "adam"]
    assert made.total_us == 103 and made.exposed_us == 0


def test_replicated_by_hand():
    """rows 0-3, exchange 3-10, a 10-20, b 20-40, loss 40-41, b' 41-81, a' 81-101; b reduced 81-111, then the gradients
    of embeddings exchanged 111-118 and a reduced 118-128; the tables' update 118-122, the optimizer 128-133.
    """
    units = [Unit(("a",), 1, None, (collective("all_reduce", 10),)), Unit(("b",), 1, None, (collective("all_reduce", 30),))]
    found = times(schedule(plan(STEP, exchanged(units, collective("all_to_all", 7)))))
    assert found["embeddings"] == (3, 10) and found["a out"] == (10, 20)
    assert found["gradients 1"] == (81, 111) and found["a grad"] == (81, 101)
    assert found["gradients of embeddings"] == (111, 118) and found["gradients 0"] == (118, 128)
    assert found["rows' update"] == (118, 122) and found["adam"] == (128, 133)


def test_what_stands_around_the_layers_is_gathered_once_and_kept():
    """The model around a and b is gathered 0-5 and before all else; its gradients leave last. a and b as by themselves."""
    gather, scatter = collective("all_gather", 5, NVLINK), collective("reduce_scatter", 8, NVLINK)
    units = [Unit((), 1, gather, (scatter,), kept=True), *(Unit((name,), 1, gather, (scatter,)) for name in ("a", "b"))]
    made = schedule(plan(STEP[:4], exchanged(units)))
    found = times(made)
    assert found["parameters 0, forward"] == (0, 5) and "parameters 0, backward" not in found
    assert found["parameters 1, forward"] == (5, 10) and found["a out"] == (10, 20)
    assert found["parameters 2, backward"] == (40, 45) and found["a grad"] == (85, 105)
    assert found["gradients 1"] == (105, 113) and found["gradients 0"] == (113, 121)
    assert [op.kind for op in made.ops].count("all_gather") == len([c for unit in units for c in unit.calls]) - 3 == 5


def test_what_reads_no_table_runs_beside_the_exchanges():
    """a reads none: it runs 3-13 while embeddings travel 3-10 (b after it), and its backward while their gradients do."""
    alone = [dataclasses.replace(one, reads_tables=one.site != "a") for one in STEP]
    found = times(schedule(plan(alone, exchanged([], collective("all_to_all", 7)))))
    assert found["a out"] == (3, 13) and found["embeddings"] == (3, 10) and found["b out"] == (13, 33)
    assert found["b grad"] == (34, 74) and found["gradients of embeddings"] == (74, 81) and found["a grad"] == (74, 94)
    assert found["rows' update"] == (94, 98)
    # A longer exchange is waited for by b alone.
    found = times(schedule(plan(alone, exchanged([], collective("all_to_all", 70)))))
    assert found["a out"] == (3, 13) and found["b out"] == (73, 93)
    # Where nothing is known to read tables, all wait.
    none = [dataclasses.replace(one, reads_tables=False) for one in STEP]
    found = times(schedule(plan(none, exchanged([], collective("all_to_all", 7)))))
    assert found["a out"] == (10, 20) and found["gradients of embeddings"] == (101, 108)


def test_sharded_by_hand():
    """Gathers of 5 run one unit ahead; each backward gathers again; reductions of 8 share the fabric with gathers."""
    units = [
        Unit((name,), 1, collective("all_gather", 5, NVLINK), (collective("reduce_scatter", 8, NVLINK),)) for name in ("a", "b")
    ]
    found = times(schedule(plan(STEP[:4], exchanged(units))))
    assert found["parameters 0, forward"] == (0, 5) and found["a out"] == (5, 15)
    assert found["parameters 1, forward"] == (5, 10) and found["b out"] == (15, 35)
    # b is gathered again before its backward, and a meanwhile.
    assert found["parameters 1, backward"] == (35, 40) and found["b grad"] == (40, 80)
    assert found["parameters 0, backward"] == (40, 45) and found["a grad"] == (80, 100)
    assert found["gradients 1"] == (80, 88) and found["gradients 0"] == (100, 108)


def test_copies_stand_behind_a_gather_and_before_a_reduction():
    """As sharded by hand, with a copy of 1 behind each gather and before each reduction, on the compute stream."""
    gather, reduce = collective("all_gather", 5, NVLINK), (collective("reduce_scatter", 8, NVLINK),)
    units = [Unit((name,), 1000, gather, reduce, Time(1, 1, 1)) for name in ("a", "b")]
    made = schedule(plan(STEP[:4], exchanged(units)))
    found = times(made)
    assert found["parameters 0, forward: to their places"] == (5, 6) and found["a out"] == (6, 16)
    assert found["parameters 1, forward: to their places"] == (16, 17) and found["b out"] == (17, 37)
    assert found["parameters 1, backward: to their places"] == (42, 43) and found["b grad"] == (43, 83)
    assert found["gradients 1: into a bucket"] == (83, 84) and found["gradients 1"] == (84, 92)
    assert found["parameters 0, backward: to their places"] == (84, 85) and found["a grad"] == (85, 105)
    assert found["gradients 0: into a bucket"] == (105, 106) and found["gradients 0"] == (106, 114)
    copies = [op for op in made.ops if op.kind == "copy"]
    assert len(copies) == 6 and {op.details["bytes"] for op in copies} == {2000} and {op.stream for op in copies} == {COMPUTE}


def test_gathers_run_one_unit_ahead_whatever_stands_between():
    """Three units of two sites each, with kernels of no site among them: no gather begins before the last but one is entered."""
    sites = [piece(FORWARD, f"{unit}{i}", 10, f"{unit}{i}") for unit in "abc" for i in range(2)]
    loose = [piece(FORWARD, f"copy {i}", 1) for i in range(12)]
    units = [Unit((f"{unit}0", f"{unit}1"), 1, collective("all_gather", 2, NVLINK), ()) for unit in "abc"]
    found = times(schedule(plan([*sites, *loose], exchanged(units))))
    assert found["parameters 1, forward"][0] <= found["a0"][0]
    assert found["a1"][1] <= found["parameters 2, forward"][0] <= found["b0"][0]
    for name, number in (("a0", 0), ("b0", 1), ("c0", 2)):
        assert found[name][0] >= found[f"parameters {number}, forward"][1]


def test_hierarchical_reductions_follow_each_other_on_their_fabrics():
    reduce = (collective("reduce_scatter", 8, NVLINK), collective("all_reduce", 6, NETWORK))
    units = [Unit(("b",), 1, collective("all_gather", 5, NVLINK), reduce)]
    found = times(schedule(plan(STEP[:4], exchanged(units))))
    end = found["b grad"][1]
    assert found["gradients 0"] == (end, end + 8) and found["gradients 0 between hosts"] == (end + 8, end + 14)


def test_parameters_at_no_gemm_are_gathered_first_and_reduced_last():
    gather, reduce = collective("all_gather", 5, NVLINK), (collective("reduce_scatter", 8, NVLINK),)
    units = [Unit((), 1, gather, reduce), Unit(("a",), 1, gather, reduce)]
    found = times(schedule(plan(STEP[:4], exchanged(units))))
    assert found["parameters 0, forward"] == (0, 5) and found["a out"][0] == 10
    assert found["gradients 0"][0] == max(found["a grad"][1], found["gradients 1"][1])


def test_kernels_of_no_site_are_spread_over_their_phase():
    loose = [piece(FORWARD, f"copy {i}", 1) for i in range(2)]
    sites = [piece(FORWARD, name, 10, name) for name in "abcd"]
    names = [op.name for op in plan([*loose, *sites])]
    assert names == ["a", "copy 0", "b", "c", "copy 1", "d"]
    # What reads no table stays in front: the loose ones are taken to read them.
    alone = [dataclasses.replace(one, reads_tables=one.site not in "ab") for one in sites]
    assert [op.name for op in plan([*loose, *alone])] == ["a", "b", "c", "copy 0", "d", "copy 1"]
    # A unit's gradients still leave when its own site is through.
    units = [Unit(("b",), 1, None, (collective("all_reduce", 10),))]
    found = times(schedule(plan([*STEP[:4], *(piece(BACKWARD, f"copy {i}", 1) for i in range(4))], exchanged(units))))
    assert found["gradients 0"][0] == found["b grad"][1]


def test_a_communication_without_figures_is_left_out():
    assert plan(STEP, Communication(Parallel(16), 1, 1, missing="why")) == plan(STEP)


@pytest.fixture
def answer(made_up, made_up_model):
    return loka_sim.whatif(made_up_model, gpus=64)


def test_one_gpus_timeline_is_the_step_time(made_up, made_up_model):
    answer = loka_sim.whatif(made_up_model)
    for name, step in ((BF16, answer.steps[0]), (DECISION, answer.steps[-1])):
        made = answer.timelines[name]
        assert made.total_us == pytest.approx(step.total.us)
        assert made.streams == (COMPUTE,) and made.exposed_us == 0
        low, high = made.interval()
        assert (low, high) == pytest.approx((step.total.low_us, step.total.high_us), rel=0.02)
    assert answer.to_dict()["communication"] is None


def test_every_launch_of_the_decision_is_in_the_timeline_once(answer):
    launched = sorted(
        row for site in answer.sites for rows in (*(p.rows for p in site.passes.values()), site.around.rows) for row in rows
    )
    shown = sorted(
        tuple(op.details[key] for key in ("kernel", "m", "n", "k", "groups"))
        for op in answer.timelines[DECISION].ops
        if op.stream == COMPUTE and op.kind != "copy"
    )
    assert shown == [tuple(row) for row in launched]


def test_backward_runs_in_reverse_and_quantizers_before_their_gemm(answer):
    made = answer.timelines[DECISION]
    kernels = [op for op in made.ops if op.stream == COMPUTE and op.kind != "copy"]
    order = [op.details for op in kernels]
    assert [d["phase"] for d in order] == sorted((d["phase"] for d in order), key=[FORWARD, BACKWARD].index)
    names = [op.name.split()[0] for op in kernels]
    forward = list(dict.fromkeys(n for n, d in zip(names, order, strict=True) if d["phase"] == FORWARD))
    backward = list(dict.fromkeys(n for n, d in zip(names, order, strict=True) if d["phase"] == BACKWARD))
    assert forward == [site.site.name for site in answer.sites] == backward[::-1]
    kinds = [op.kind for op in made.ops if op.name.startswith("top.0 output")]
    assert kinds.index("gemm") == sum(kind in ("quantize", "layout") for kind in kinds)


@pytest.mark.parametrize("name", ["a", "a#2"])
def test_a_checkpointed_forward_runs_again_in_the_backward(made_up, name):
    passes = linear_passes(Dim(0, 1), Dim(64), Dim(64))
    again = Site(f"{name}#recompute", "linear", {"output": passes["output"]}, weight="a.weight")
    spec = ModelSpec("m", 64, (Site(name, "linear", passes, weight="a.weight"), again, Site("b", "linear", passes, weight="b.w")))
    names = [(op.details["phase"], op.name) for op in loka_sim.whatif(spec).timelines[BF16].ops]
    position = names.index((BACKWARD, f"{name}#recompute output"))
    assert names[position - 1][1] == "b grad_weight" and names[position + 1][1] == f"{name} grad_input"
    assert (FORWARD, f"{name}#recompute output") not in names


def test_kernels_beside_the_gemms_take_the_place_of_those_around_them(answer):
    others = [
        Other(FORWARD, "row", "norm", 100, 2, exact(10.0), True),
        Other(TABLE_UPDATE, "scatter", "rows", 100, 1, exact(7.0), True),
        Other(OPTIMIZER, "pointwise", "adamw", 100, 1, exact(64.0), True),
    ]  # fmt: skip
    made = dataclasses.replace(answer, others=tuple(others)).timelines[DECISION]
    order = [op.name for op in made.ops if op.stream == COMPUTE]
    phases = [op.details["phase"] for op in made.ops if op.stream == COMPUTE]
    assert phases == sorted(phases, key=[FORWARD, BACKWARD, TABLE_UPDATE, OPTIMIZER].index)
    assert {"row: norm", "row: norm (2)"} < set(order) and order[-1] == "pointwise: adamw"
    pace = slowest(64)
    assert made.sum_us()["optimizer"] == pytest.approx(pace * 64) and made.sum_us()["table update"] == pytest.approx(pace * 7)
    around = sum(site.around_us for site in answer.sites)
    assert around > 0
    assert made.busy_us(COMPUTE) == pytest.approx(answer.timelines[DECISION].busy_us(COMPUTE) + pace * (81 - around))


@pytest.mark.parametrize(("dense", "shards"), [("ddp", 1), ("fsdp", 64), ("hsdp", 8)])
def test_a_sharded_optimizer_works_on_its_shard(answer, dense, shards):
    others = (Other(OPTIMIZER, "pointwise", "adamw", 100, 1, exact(64.0), True),)
    sharded = dataclasses.replace(answer, others=others, parallel=dataclasses.replace(answer.parallel, dense=dense))
    assert sharded.timelines[DECISION].sum_us()["optimizer"] == pytest.approx(slowest(64) * 64 / shards)


def test_the_slowest_of_many_is_waited_for():
    assert slowest(1) == 1
    draws = np.random.default_rng(0).normal(1.0, GPUS_DEVIATION, (20_000, 512))
    for gpus in (2, 8, 64, 512):
        assert slowest(gpus) - 1 == pytest.approx(draws[:, :gpus].max(axis=1).mean() - 1, rel=0.06)


def test_on_several_gpus_a_host_launches_kernel_by_kernel(answer):
    alone, called = exact(10.0), exact(30.0)
    gap = (Other(FORWARD, "gap", "between kernels", 0, 1, alone, True, 0, called),)
    several = dataclasses.replace(answer, others=gap)
    assert several.timelines[BF16].sum_us()["gap"] == pytest.approx(slowest(64) * 30)
    one = dataclasses.replace(several, communication=None)
    assert one.timelines[BF16].sum_us()["gap"] == 10
    assert timelines(one, called=True)[BF16].sum_us()["gap"] == 30


def test_a_slow_host_is_the_bound_on_several_gpus_alone(answer):
    """1,000 kernels of 1 us on 64 GPUs; a host whose speed is known takes as much as that says."""
    kernels = Other(FORWARD, "pointwise", "add", 100, 1000, exact(1000.0), True)
    several = dataclasses.replace(answer, others=(kernels,))
    made = several.timelines[BF16]
    host = made.ops[0]
    launches = 1000 + sum(len(site.passes) for site in answer.sites)
    batched = batched_products(answer.spec)
    assert host.stream == HOST and host.details["launches"] == launches + batched
    assert host.us == called_on_several(launches + batched, answer.communication).us
    assert made.total_us == pytest.approx(host.us) and made.interval()[0] < host.us < made.interval()[1]
    assert host.us > made.busy_us(COMPUTE)
    fast = dataclasses.replace(several, host_step_us=100.0)
    gpus = max(end for op, end in zip(made.ops, made.ends, strict=True) if op.stream != HOST)
    assert fast.timelines[BF16].total_us == pytest.approx(gpus)
    said = [text for level, text in statements(several) if level == "warning"]
    decided = several.timelines[DECISION].ops[0]
    bound = f"The host is the bound: it launches the step's kernels in some {decided.us:,.0f} us"
    assert any(text.startswith(bound) for text in said)
    assert not any("host is the bound" in text.lower() for _, text in statements(fast))
    unless, slow = "The host is the bound, unless it is a fast one", "a slow host is the bound"
    for share, level, words in ((1.1, "warning", unless), (0.9, "note", slow)):
        like_it = dataclasses.replace(several, host_step_us=share * SEVERAL_US * gpus / decided.us)
        assert [said for said, text in statements(like_it) if words in text] == [level]
    # A CUDA graph needs no host, and of an unknown step nobody knows what is launched.
    one = dataclasses.replace(several, communication=None)
    assert HOST not in one.timelines[BF16].streams and HOST not in answer.timelines[BF16].streams
    assert HOST in timelines(one, called=True)[BF16].streams


def test_a_cluster_says_how_fast_its_hosts_are(tmp_path):
    (tmp_path / "mine.yaml").write_text("name: mine\npreset: hgx_h200\nhost_step_us: 3100\n")
    known, unknown = (loka_sim.whatif("wukong-small", gpus=2, cluster=path) for path in (tmp_path / "mine.yaml", None))
    (host, *_), (any_host, *_) = (answer.timelines[BF16].ops for answer in (known, unknown))
    assert host.us == pytest.approx(any_host.us * 3100 / SEVERAL_US)
    assert host.high_us / host.low_us < any_host.high_us / any_host.low_us
    assert known.to_dict()["communication"]["cluster"]["host_step_us"] == 3100


def test_what_fsdp_shards_is_said():
    said = {}
    for model, dense in (("wukong-small", "fsdp"), ("dlrm-small", "hsdp"), ("wukong-small", "ddp")):
        answer = loka_sim.whatif(model, gpus=2, dense=dense)
        said[model, dense] = " ".join(text for _, text in statements(answer))
    assert "FSDP shards 3 layers, and the model around them." in said["wukong-small", "fsdp"]
    assert "FSDP shards parts of 25 MiB" in said["dlrm-small", "hsdp"] and "FSDP" not in said["wukong-small", "ddp"]


def test_a_zoo_models_step_is_its_whole_forward_and_backward_and_the_update():
    answer = loka_sim.whatif("dlrm-small")
    update = sum(other.time.us for other in answer.others if other.phase in (TABLE_UPDATE, OPTIMIZER))
    assert update > 0
    for name, step in ((BF16, answer.steps[0]), (DECISION, answer.steps[-1])):
        assert answer.timelines[name].total_us == pytest.approx(step.whole.us + update)


def test_the_document_fits_its_schema_and_adds_up(answer):
    document = step_document(answer)
    assert problem(document, "step") is None
    assert json.loads(json.dumps(document)) == document
    calls = sum(call["count"] * call["time_us"] for call in document["collectives"])
    for step in document["steps"].values():
        assert step["streams"][NETWORK]["busy_us"] == pytest.approx(calls, rel=1e-4)
        assert sum(step["critical_us"].values()) == pytest.approx(step["step_us"], rel=1e-4)
        assert step["exposed_us"] == pytest.approx(step["step_us"] - step["streams"][COMPUTE]["busy_us"], rel=1e-3)
        assert step["step_low_us"] <= step["step_us"] <= step["step_high_us"]
    shown = answer.to_dict()["communication"]
    for lane in shown["lanes"]:
        assert sum(end - start for start, end, _ in lane["spans"]) == pytest.approx(
            shown["streams"][lane["stream"]]["busy_us"], rel=0.01
        )
    assert shown["step_us"] == document["steps"]["decision"]["step_us"]
    assert shown["speedup"] == document["speedup"]
    assert problem(answer.to_dict(), "whatif") is None


def test_slower_links_and_more_gpus_take_longer(made_up, made_up_model):
    from perfmodel.topology import preset

    slow = dataclasses.replace(preset("hgx_h200"), name="slow", nic_gbps=25.0)
    steps = [
        loka_sim.whatif(made_up_model, gpus=gpus, cluster=cluster).timelines[DECISION].total_us
        for gpus, cluster in ((1, None), (4, None), (16, None), (16, slow))
    ]
    assert steps == sorted(steps) and len(set(steps)) == 4


@pytest.mark.parametrize("dense", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("gpus", [2, 8, 16, 4096])
def test_any_job_can_be_asked_about(made_up, made_up_model, dense, gpus):
    answer = loka_sim.whatif(made_up_model, gpus=gpus, dense=dense, exchange="fp8_rowwise")
    assert answer.communication.missing is None
    made = answer.timelines[DECISION]
    communication = sum(call.time.us for call in answer.communication.calls)
    assert sum(made.busy_us(stream) for stream in made.streams if stream != COMPUTE) == pytest.approx(communication)
    assert made.total_us <= made.busy_us(COMPUTE) + communication + 1e-6
    assert problem(answer.to_dict(), "whatif") is None and problem(step_document(answer), "step") is None


def run(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_verb(capsys, made_up, made_up_model, tmp_path, monkeypatch):
    from loka_sim.modelspec import save

    monkeypatch.chdir(tmp_path)  # paths are printed as they were given, however long
    save(made_up_model, tmp_path / "m.json")
    words = ["step", "m.json", "--gpus", "16", "--dense", "hsdp"]
    code, out, err = run(capsys, *words, "--trace", "t.json")
    assert code == 0 and err == ""
    assert max(map(len, out.splitlines())) <= 100
    for text in ("16 x H200 in 2 hosts of hgx_h200", "communication, exposed", "nvlink, busy", "network, busy", "t.json"):
        assert text in out
    code, out, _ = run(capsys, *words, "--json")
    document = json.loads(out)
    assert code == 0 and problem(document, "step") is None
    assert document["command"].split()[:3] == ["loka-sim", "step", "m.json"]
    trace = json.loads((tmp_path / "t.json").read_text())
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(shown) == sum(step["operations"] for step in document["steps"].values())
    assert trace["otherData"]["gpus"] == 16
    code, out, _ = run(capsys, "step", "m.json")
    assert code == 0 and "communication" not in out.split("Dense step")[0]


def test_whatif_writes_the_same_trace(capsys, made_up, made_up_model, tmp_path):
    from loka_sim.modelspec import save

    save(made_up_model, tmp_path / "m.json")
    run(capsys, "whatif", str(tmp_path / "m.json"), "--gpus", "8", "--trace", str(tmp_path / "w.json"))
    run(capsys, "step", str(tmp_path / "m.json"), "--gpus", "8", "--trace", str(tmp_path / "s.json.gz"))
    first = json.loads((tmp_path / "w.json").read_text())
    second = json.loads(gzip.decompress((tmp_path / "s.json.gz").read_bytes()))
    assert first["traceEvents"] == second["traceEvents"]


def test_a_trace_that_cannot_be_written(answer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_trace(answer, tmp_path / "file" / "t.json", "")


def test_a_dispatch_tables_own_step(capsys, made_up, made_up_model, tmp_path):
    """The table of the decision runs the decision's step; one in bf16 alone the bf16 step; another model's is refused."""
    from loka_sim.modelspec import save

    save(made_up_model, tmp_path / "m.json")
    model = str(tmp_path / "m.json")
    run(capsys, "whatif", model, "--out", str(tmp_path / "run"))
    run(capsys, "whatif", model, "--min-speedup", "10", "--out", str(tmp_path / "none"))
    for folder, same in (("run", "decision"), ("none", "bf16")):
        words = ["step", model, "--gpus", "16", "--table", str(tmp_path / folder)]
        code, out, err = run(capsys, *words, "--json", "--trace", str(tmp_path / "t.json"))
        assert code == 0, err
        document = json.loads(out)
        assert problem(document, "step") is None
        assert document["steps"]["table"] == document["steps"][same]
        trace = json.loads((tmp_path / "t.json").read_text())
        names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
        assert names == ["the dispatch table", "loka-sim's decision", "bf16"]
        code, out, _ = run(capsys, *words)
        assert code == 0 and "as the table says" in out and max(map(len, out.splitlines())) <= 100
    assert document["steps"]["decision"]["step_us"] < document["steps"]["bf16"]["step_us"]
    code, _, err = run(capsys, "step", "wukong-small", "--table", str(tmp_path / "run"))
    assert code == 3 and "is of made-up" in err and "not of wukong-small" in err
    table = json.loads((tmp_path / "run" / "dispatch_table.json").read_text())
    table["sites"] = table["sites"][1:]
    (tmp_path / "less.json").write_text(json.dumps(table))
    code, _, err = run(capsys, "step", model, "--table", str(tmp_path / "less.json"))
    assert code == 3 and "says nothing of site bottom.0, output" in err


def test_several_numbers_of_gpus_side_by_side(capsys, made_up, made_up_model, tmp_path):
    from loka_sim.modelspec import save

    save(made_up_model, tmp_path / "m.json")
    words = ["step", str(tmp_path / "m.json"), "--dense", "hsdp", "--gpus"]
    code, out, err = run(capsys, *words, "1,4,64", "--json")
    document = json.loads(out)
    assert code == 0 and err == "" and problem(document, "scaling") is None
    assert document["command"].startswith(f"loka-sim step {words[1]} --batch 2048 --dense hsdp --gpus 1,4,64")
    assert [row["basis"] for row in document["rows"]] == [None, "interpolated", "modelled"]
    # Each row is what the verb says of that number alone.
    for row in document["rows"]:
        alone = json.loads(run(capsys, *words, str(row["gpus"]), "--json")[1])["steps"]["decision"]
        assert {key: row[key] for key in ("step_us", "step_low_us", "step_high_us", "exposed_us")} == {
            key: alone[key] for key in ("step_us", "step_low_us", "step_high_us", "exposed_us")
        }
        assert row["samples_per_s"] == pytest.approx(row["gpus"] * 2048 / row["step_us"] * 1e6, rel=1e-4)
    assert [row["efficiency"] for row in document["rows"]] == sorted(
        (row["efficiency"] for row in document["rows"]), reverse=True
    )
    assert document["rows"][0]["efficiency"] == 1 and document["rows"][0]["communication_us"] == 0
    code, out, _ = run(capsys, *words, "1,4,64")
    assert code == 0 and "efficiency" in out and max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "4,x"], "'4,x' is no number"),
        (["--gpus", "4,12"], "--gpus 12: hosts of hgx_h200 have 8 GPUs"),
        (["--gpus", "4,8", "--trace", "t.json"], "--trace is of one number of GPUs"),
        (["--gpus", "4,8", "--table", "t.json"], "--table is of one number of GPUs"),
    ],
)
def test_side_by_side_refuses_what_cannot_be(capsys, made_up, words, message):
    code, out, err = run(capsys, "step", "wukong-small", *words)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_numbers_of_gpus_without_figures_are_said(capsys, made_up, made_up_times, made_up_model, monkeypatch):
    from loka_sim.scaling import scaling, scaling_document
    from perfmodel import collectives

    answer = loka_sim.whatif(made_up_model)
    table = collectives.load("h200").table
    monkeypatch.setattr(made_up_times, "collectives", collectives.CollectiveModel("h200", table[table["ranks"] == 2]))
    document = scaling_document(scaling(answer, [1, 2, 4]))
    assert problem(document, "scaling") is None
    assert "step_us" in document["rows"][1] and "between one number of ranks only" in document["rows"][2]["missing"]
    with pytest.raises(UserError, match="no number of GPUs has a figure"):
        scaling_document(scaling(answer, [4, 8]))

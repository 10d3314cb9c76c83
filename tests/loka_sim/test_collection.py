"""A collection without a GPU: sweeps of a made-up machine, everything else as it is."""

import gzip
import hashlib
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import loka_sim
import perfmodel
from hil import choices, launches
from hil.asking import KERNELS_ASKED
from hil.collect import FAMILIES, legal_runners
from loka_sim import calibration, collection
from loka_sim.ceilings import hardware_of
from loka_sim.collection import collect
from loka_sim.errors import DataError, UserError
from loka_sim.validation import measuring
from perfmodel.judge import SHAPE
from perfmodel.kernels import KERNELS
from perfmodel.opened import choice_file

MACHINE = {
    "gpu": "NVIDIA H100 80GB HBM3", "capability": "9.0", "l2_bytes": 50 * 2**20, "multiprocessors": 132, "memory_bytes": 85e9,
}  # fmt: skip
HOST_US = 4321.0
SLOWER = {"gemm": 1.1, "batched_gemm": 1.1, "quantize": 1.4, "layout": 1.4, "pointwise": 1.4}


class MadeUp:
    """A machine that is an H200 with a slower memory, and as many GPUs as it is told; it measures so many shapes a family."""

    def __init__(self, shapes, gpus=1, kernels=None):
        self.shapes, self.gpus, self.kernels, self.asked, self.run = shapes, gpus, kernels, [], []
        self.unanswered, self.pairs = set(), 300

    def __call__(self, folder):
        self.folder = folder
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def measure(self, name, wanted, seconds, gemms=0.5):
        assert name == "lrm"
        self.gemms = gemms
        self.asked.append((wanted["gemm"][0][1], seconds))
        model = perfmodel.load("h200")
        known = set(self.kernels or model.manifest["kernels"])
        for family, items in wanted.items():
            rows = [
                (runner.name, s.m, s.n, s.k, s.groups)
                for s, patterns in items[: self.shapes[family]]
                for runner in legal_runners(s, FAMILIES[family], patterns)
                if runner.name in known
            ]
            frame = pd.DataFrame(rows, columns=["kernel", "m", "n", "k", "groups"])
            noise = np.random.default_rng(1).normal(1, 0.02, len(frame))
            frame["p50_us"] = model.predict(frame)["time_us"] * noise
            frame["p50_us"] *= frame["kernel"].map(lambda kernel: SLOWER[KERNELS[kernel].kind])
            frame = frame.assign(p10_us=0.99 * frame["p50_us"], p90_us=1.01 * frame["p50_us"], sweep="lrm", eager_us=np.nan)
            path = self.folder / f"{family}.parquet"
            pd.concat([pd.read_parquet(path), frame] if path.exists() else [frame]).to_parquet(path)

    def process(self, module, arguments, accept=(0,), seconds=None):
        """What quick launches and asking leave behind: of torch/bf16 alone, and the networks that are shipped."""
        self.run.append((module, arguments, seconds))
        folder, kernels = Path(arguments[1]), arguments[arguments.index("--kernels") + 1 :]
        if module == "hil.launches":
            model, path = perfmodel.load("h200"), folder / "launches.parquet"
            shapes = launches.drawn(4200, int(arguments[5]), ("torch/bf16",))[:2400]
            frame = pd.DataFrame([("torch/bf16", s.m, s.n, s.k, s.groups) for s in shapes], columns=["kernel", *SHAPE])
            frame["time_us"] = SLOWER["gemm"] * model.predict(frame)["time_us"]
            frame = frame if "torch/bf16" in kernels else frame.assign(kernel=kernels[0])
            pd.concat([pd.read_parquet(path), frame] if path.exists() else [frame]).to_parquet(path)
        else:
            assert module == "hil.choices"
            shipped = perfmodel.data_folder() / "h200"
            (folder / "choices").mkdir(exist_ok=True)
            judged = json.loads((shipped / "choices.json").read_text())["kernels"]
            for name in set(kernels) - self.unanswered:
                shutil.copyfile(shipped / "choices" / choice_file(name), folder / "choices" / choice_file(name))
            known = {name: found for name, found in judged.items() if (folder / "choices" / choice_file(name)).exists()}
            (folder / "choices.json").write_text(json.dumps({"kernels": known}))
        return 0

    def collectives(self, folder, gpus, seconds):
        self.asked.append(("collectives", seconds))
        assert gpus == self.gpus
        table = pd.read_parquet(perfmodel.data_folder() / "h200" / "collectives.parquet")
        times = [name for name in table if name.endswith("_us")]
        table.assign(**{name: 3 * table[name] for name in times}).to_parquet(folder / "collectives.parquet")

    def overlap(self, folder, gpus, seconds):
        self.asked.append(("overlap", seconds))
        table = pd.read_parquet(perfmodel.data_folder() / "h100" / "overlap.parquet").iloc[: self.pairs]
        table.assign(beside_us=1.5 * table["alone_us"]).to_parquet(folder / "overlap.parquet")
        return self.pairs


def on(machine, monkeypatch, capability="9.0"):
    import torch

    import hil.fingerprint

    monkeypatch.setattr(hil.fingerprint, "fingerprint", lambda: {**MACHINE, "capability": capability})
    # It is like an H200, and as if no other GPU were shipped.
    monkeypatch.setattr(perfmodel.hardware, "available", lambda: ["h200"])
    monkeypatch.setattr(measuring, "host_step_us", lambda folder: HOST_US)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: machine.gpus)
    monkeypatch.setattr(collection, "require_gpu", lambda: None)
    monkeypatch.setattr(measuring, "Sweeps", machine)
    monkeypatch.setattr(measuring, "collectives", machine.collectives)
    monkeypatch.setattr(measuring, "overlap", machine.overlap)
    monkeypatch.setattr(measuring, "run", machine.process)
    return machine


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Six minutes on four GPUs: too few rows for a fit."""
    folder = tmp_path_factory.mktemp("collected") / "h100"
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine = on(MadeUp({"gemm": 120, "memory": 30}, gpus=4), monkeypatch)
        document = collect(folder, minutes=6, command=["loka-sim", "collect"])
    return folder, document, machine


def test_a_short_one_corrects_a_related_gpu(short):
    folder, document, machine = short
    assert document["hardware"] == "h100-80gb-hbm3" and document["model"] == "h200's, corrected"
    assert [name for name, _ in machine.asked] == [("torch/*",), "collectives", "overlap"]
    # Each part has what is left until its share of the six minutes ends; a tenth of them makes the model.
    ends = [0.75 * 360, collection.COLLECTING * 0.9 * 360, 0.9 * 360]
    assert [seconds for _, seconds in machine.asked] == pytest.approx(ends, abs=20)
    # Too short for a fit: nothing is launched quickly, and cuBLAS is not asked.
    assert machine.gemms == 0.5 and not machine.run
    gemms = document["held_out"]["torch/bf16"]
    assert gemms["n"] > 50 and gemms["mape"] < 0.05
    said = " ".join(document["left_out"])
    assert "gemm: 120 of 6,112 shapes" in said and "memory: 30 of 379 shapes" in said
    assert "of torch's kernels have fewer than 30 rows" in said
    assert "collectives" not in said
    assert json.loads((folder / "manifest.json").read_text())["hardware"] == "h100-80gb-hbm3"
    assert calibration.load(folder).host_step_us == HOST_US


def test_its_times_are_the_machines(short):
    model, shipped = perfmodel.load("h100-80gb-hbm3", short[0]), perfmodel.load("h200")
    assert model.hardware.name == "h100-80gb-hbm3" and model.hardware.gpu == MACHINE["gpu"]
    fresh = pd.DataFrame(
        [("torch/bf16", 3072, 1536, 2048), ("torch/quantize_rowwise", 9216, 1, 1280), ("torch/transpose_e4m3", 5120, 1, 3072)],
        columns=["kernel", "m", "n", "k"],
    )
    ratio = model.predict(fresh)["time_us"] / shipped.predict(fresh)["time_us"]
    assert ratio.tolist() == pytest.approx([1.1, 1.4, 1.4], rel=0.04)


def test_a_whatif_uses_it_and_its_collectives(short):
    answers = [loka_sim.whatif("wukong", batch=512, gpus=4, calibration=where) for where in (None, short[0])]
    shipped, own = (answer.to_dict()["communication"] for answer in answers)
    assert own["all_to_all_us"] == pytest.approx(3 * shipped["all_to_all_us"], rel=0.01)
    assert answers[1].hardware["name"] == "h100-80gb-hbm3"
    assert answers[1].steps[0].total.us > 1.08 * answers[0].steps[0].total.us
    across = loka_sim.whatif("wukong", batch=512, gpus=16, calibration=short[0]).communication
    # What kernels and collectives cost each other was measured there, too.
    slower = perfmodel.load("h100-80gb-hbm3", short[0]).overlap.held_out["told_slower"]
    assert slower.tolist() == pytest.approx([1.5] * len(slower), rel=1e-3)
    assert across.missing is None and across.like is None and across.parallel.cluster.name == "hgx_h100"


def test_too_few_pairs_are_left_out(tmp_path, monkeypatch):
    machine = on(MadeUp({"gemm": 120, "memory": 30}, gpus=2), monkeypatch)
    machine.pairs = collection.LEAST_PAIRS - 1
    said = " ".join(collect(tmp_path / "few", minutes=6)["left_out"])
    assert "kernels beside collectives: 99 pairs are too few" in said
    copied = {path.name for path in (tmp_path / "few" / "perfmodel").iterdir()}
    assert "collectives.parquet" in copied and "overlap.parquet" not in copied


def test_a_gpu_of_no_kind_that_is_shipped_has_a_fit_of_its_own(tmp_path, monkeypatch):
    kernels = ["torch/bf16", "torch/fp8_rowwise_fast", "torch/relu_forward"]
    on(MadeUp({"gemm": 140, "memory": 70}, kernels=kernels), monkeypatch, capability="9.9")
    document = collect(tmp_path / "own", minutes=6, name="mine")
    assert document["model"] == "fitted to this GPU alone" and set(document["held_out"]) == set(kernels)
    assert perfmodel.load("mine", tmp_path / "own").hardware.capability == (9, 9)
    assert any(text.startswith("collectives: one GPU") for text in document["left_out"])


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Seventeen minutes on one GPU of no kind that is shipped."""
    folder = tmp_path_factory.mktemp("collected") / "own"
    kernels = ["torch/bf16", "torch/fp8_rowwise_fast", "torch/relu_forward", "loka/fp8_rowwise_fast"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine = on(MadeUp({"gemm": 140, "memory": 70}, kernels=kernels), monkeypatch, capability="9.9")
        document = collect(folder, minutes=17, name="mine")
    return folder, document, machine


def test_a_long_one_launches_quickly_and_asks_other_libraries(long):
    folder, document, machine = long
    assert [asked for asked, _ in machine.asked] == [
        ("torch/*",), ("deepgemm/*", "fbgemm/*", "loka/*", "torchao/*", "transformer_engine/*")
    ]  # fmt: skip
    # Each part's end, of 17 minutes: what passes meanwhile is little.
    assert [seconds for _, seconds in machine.asked] == pytest.approx([0.44 * 1020, 0.8 * 1020], abs=60)
    assert machine.gemms == collection.GEMMS and document["model"] == "fitted to this GPU alone"
    modules, (batched, torchs, others, _), seconds = zip(*machine.run, strict=True)
    assert modules == ("hil.launches", "hil.launches", "hil.launches", "hil.choices")
    assert torchs[1] == str(folder / "timings") and float(torchs[torchs.index("--minutes") + 1]) == 4.5
    assert batched[batched.index("--kernels") + 1 :] == ["torch/bf16_batched"]
    assert float(batched[batched.index("--minutes") + 1]) == pytest.approx(collection.ALONE * 0.59 * 17, abs=0.2)
    # torch's GEMMs, the grouped ones, too, which have few careful rows; then those of libraries that are here.
    asked = [set(one[one.index("--kernels") + 1 :]) for one in (torchs, others)]
    torch_gemms = {n for n, spec in KERNELS.items() if "gemm" in spec.kind and n.startswith("torch/") and spec.of is None}
    assert asked[0] == torch_gemms - {"torch/bf16_batched"} and "torch/fp8_grouped_rowwise_fast" in asked[0]
    assert {"loka/fp8_rowwise_fast", "loka/fp8_tensorwise_split"} <= asked[1] and not asked[1] & torch_gemms
    assert len({batched[5], torchs[5], others[5]}) == 3 and seconds[1] == pytest.approx(60 * 4.5 + measuring.GRACE_S)
    assert set(document["held_out"]) == {"torch/bf16", "torch/fp8_rowwise_fast", "torch/relu_forward", "loka/fp8_rowwise_fast"}


def test_its_processes_understand_what_they_are_told(long, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU: they would begin")
    for module, arguments, _ in long[2].run:
        main = {"hil.launches": launches.main, "hil.choices": choices.main}[module]
        assert main(arguments) == 3 and "no CUDA GPU here" in capsys.readouterr().err


def test_it_asks_cublas_with_this_gpus_own_figures_and_the_networks_travel(long):
    folder, document, machine = long
    (asking,) = [arguments for module, arguments, _ in machine.run if module == "hil.choices"]
    value = dict(zip(asking[::2], asking[1::2], strict=False))
    assert value["--out"] == str(folder / "timings") and value["--hardware-spec"] == str(folder / "hardware.json")
    assert asking[asking.index("--kernels") + 1 :] == list(KERNELS_ASKED)
    # Of 85 GB, 9 for each process.
    assert float(value["--minutes"]) == 1.0 and 1 <= int(value["--workers"]) <= 9
    assert not any("cuBLAS chooses" in text for text in document["left_out"])
    manifest = json.loads((folder / "perfmodel" / "manifest.json").read_text())
    assert manifest["kernels"]["torch/bf16"]["choice"] and not manifest["kernels"]["torch/relu_forward"]["choice"]
    network, asked = (folder / part / choice_file("torch/bf16") for part in ("perfmodel", "timings/choices"))
    assert json.loads(gzip.decompress(network.read_bytes())) == json.loads(gzip.decompress(asked.read_bytes()))
    shutil.rmtree(moved := folder.parent / "moved", ignore_errors=True)
    shutil.copytree(folder, moved, ignore=shutil.ignore_patterns("timings"))
    fresh = pd.DataFrame([("torch/bf16", 3072, 1536, 2048), ("torch/bf16", 8192, 96, 640)], columns=["kernel", "m", "n", "k"])
    told = perfmodel.load("mine", moved).predict(fresh)["time_us"] / perfmodel.load("h200").predict(fresh)["time_us"]
    assert told.tolist() == pytest.approx([1.1, 1.1], rel=0.1)


def test_what_is_there_is_not_launched_nor_asked_again_and_its_figures_stay(long, tmp_path, monkeypatch):
    folder = tmp_path / "own"
    shutil.copytree(long[0], folder)
    before = json.loads((folder / "hardware.json").read_text())
    machine = on(MadeUp({"gemm": 160, "memory": 70}, kernels=["torch/bf16", "torch/relu_forward"]), monkeypatch, capability="9.9")
    monkeypatch.setitem(SLOWER, "gemm", 0.9)
    monkeypatch.setattr(collection, "make_model", lambda *_: ({"model": "the same", "held_out": {}}, []))
    collect(folder, minutes=28, name="other")
    # The networks know the GPU by these figures.
    assert not machine.run and len(machine.asked) == 2
    assert json.loads((folder / "hardware.json").read_text()) == {**before, "name": "other"}
    # A network that is gone is asked for alone.
    (folder / "timings" / "choices" / choice_file("torch/bf16")).unlink()
    collect(folder, minutes=28, name="other")
    asking = [arguments for module, arguments, _ in machine.run if module == "hil.choices"]
    assert [arguments[arguments.index("--kernels") + 1 :] for arguments in asking] == [["torch/bf16"]]


def test_asking_that_fails_or_has_no_time_is_said_and_not_fatal(tmp_path, monkeypatch):
    spec, ran = tmp_path / "hardware.json", []

    def fails(module, arguments, seconds):
        ran.append(seconds)
        raise DataError("python -m hil.choices ended with code 1; its last lines above say why")

    monkeypatch.setattr(measuring, "run", fails)
    said = collection.ask(tmp_path, spec, 102.0, 4, None)
    assert ran == [102.0 + measuring.GRACE_S] and said[0].startswith("which kernels cuBLAS chooses, for torch/bf16, ")
    # Half a minute is not enough to start, ask and learn.
    assert collection.ask(tmp_path, spec, 30.0, 4, None) == said and len(ran) == 1
    machine = MadeUp({})
    machine.unanswered = {"torch/fp8_block128"}
    monkeypatch.setattr(measuring, "run", machine.process)
    assert collection.ask(tmp_path, spec, 102.0, 4, None) == [
        "which kernels cuBLAS chooses, for torch/fp8_block128; the same command asks again"
    ]


def test_the_parts_of_a_long_run_leave_each_what_it_needs():
    # As measured on an H200 beside 16 cores: 12 rows of torch's memory-bound kernels in a second, 24 s to start their processes.
    for minutes in (15, 17, 28):
        shares = collection.Shares.of(minutes, 1, True)
        ends = [60 * minutes * end for end in (shares.sweeps, shares.launches, shares.libraries, shares.choices)]
        assert shares.own and ends == sorted(ends) and shares.collectives == shares.choices
        assert 12 * ((1 - collection.GEMMS) * (ends[0] - 7) - 24) > 2410, "rows until the last of torch's kernels has its 60"
        memory = (1 - collection.GEMMS) * (1 - collection.LAUNCHING) * (ends[2] - ends[1])
        assert 23 * (memory - 4) > 1452, "likewise of other libraries', at 23 rows in a second"
        assert ends[3] - ends[2] >= 90 and 60 * minutes - ends[3] >= 90, "asking and learning; a fit"
    alone, several = (collection.Shares.of(20, gpus, True) for gpus in (1, 8))
    assert several.collectives - several.choices == pytest.approx(0.1) and several.choices < alone.choices
    assert not collection.Shares.of(14.9, 1, False).own


def test_a_fit_that_takes_too_long_gives_way_to_a_correction(tmp_path, monkeypatch):
    waited = []

    class Slow:
        def __init__(self, module, arguments):
            assert module == "perfmodel.fit"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait(self, accept=(0,), seconds=None):
            waited.append(seconds)

    on(MadeUp({"gemm": 60, "memory": 30}), monkeypatch)
    monkeypatch.setattr(measuring, "Child", Slow)
    monkeypatch.setattr("perfmodel.fit.LEAST_ROWS_START", 0)
    document = collect(tmp_path / "own", minutes=6)
    assert document["model"] == "h200's, corrected" and 0 <= waited[0] <= 360
    assert "a fit of its own: it would take longer than the minutes given" in document["left_out"]


def test_the_sweeps_hold_enough_of_every_kernel_for_a_fit_and_begin_with_a_fair_sample():
    from perfmodel.fit import LEAST_ROWS_FIT

    for family, items in collection.drawn(("torch/*",)).items():
        legal = [[runner.name for runner in legal_runners(shape, FAMILIES[family], patterns)] for shape, patterns in items]
        count = Counter(name for names in legal for name in names)
        mine = [name for name in perfmodel.load("h200").manifest["kernels"] if name.startswith("torch/")]
        wanted = {name for name in mine if KERNELS[name].kind in FAMILIES[family]}
        if family == "gemm":
            wanted |= {name for name in KERNELS if name.startswith("torch/fp8_grouped")}
        assert wanted and all(count[name] >= LEAST_ROWS_FIT for name in wanted)
        first = Counter(name for names in legal[: len(legal) // 4] for name in names)
        # Of what takes blocks of 128 x 128 alone, as much as a fit needs has been measured before the half of all shapes.
        blocks = {name for name in wanted if family == "memory" and "block" in name and "norm" not in name}
        assert all(first[name] == pytest.approx(count[name] / 4, abs=4 + 0.1 * count[name]) for name in wanted - blocks)
        sooner = Counter(name for names in legal[: len(legal) // 2] for name in names)
        assert all(sooner[name] >= LEAST_ROWS_FIT for name in blocks)
        assert len(dict.fromkeys(shape for shape, _ in items)) == len(items)


@pytest.fixture(scope="module")
def fits(tmp_path_factory):
    return tmp_path_factory.mktemp("fits")


@pytest.fixture
def fitted_once(fits, monkeypatch):
    """A fit of the same timings, figures and start as an earlier test's is not made again: what that one wrote is copied."""
    child = measuring.Child

    class Kept:
        def __init__(self, module, arguments):
            given = dict(zip(arguments[::2], arguments[1::2], strict=True))
            read = [*sorted(Path(given["--timings"]).rglob("*.*")), Path(given["--hardware-spec"])]
            found = hashlib.sha256(repr((module, given.get("--start"), [(p.name, p.read_bytes()) for p in read])).encode())
            self.out, self.kept = Path(given["--out"]), fits / found.hexdigest()
            self.child = None if self.kept.exists() else child(module, arguments)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            if self.child:
                self.child.__exit__(*error)

        def wait(self, accept=(0,), seconds=None):
            if self.child is None:
                shutil.copytree(self.kept, self.out)
                return 0
            if (code := self.child.wait(accept, seconds)) == 0:
                shutil.copytree(self.out, self.kept)
            return code

    monkeypatch.setattr(measuring, "Child", Kept)


def test_a_fit_need_not_hold_what_other_libraries_lack(tmp_path, monkeypatch, fitted_once):
    kernels = ["torch/bf16", "torch/fp8_rowwise_fast", "torch/relu_forward"]
    on(MadeUp({"gemm": 140, "memory": 70}, kernels=kernels), monkeypatch)
    related = perfmodel.load("h200")
    some = {name: related.manifest["kernels"][name] for name in [*kernels, "loka/fp8_rowwise_fast"]}
    monkeypatch.setattr(collection, "_related", lambda _: replace(related, manifest={**related.manifest, "kernels": some}))
    errors = iter([0.2, 0.1])  # of the correction, of the fit
    monkeypatch.setattr(collection, "_mean_error", lambda *_: next(errors))
    document = collect(tmp_path / "own", minutes=6)
    assert document["model"] == "fitted to this GPU, from where the H200's ends" and set(document["held_out"]) == set(kernels)
    manifest = json.loads((tmp_path / "own" / "perfmodel" / "manifest.json").read_text())
    assert manifest["start"] == {"hardware": "h200", "kernels_fingerprint": perfmodel.load("h200").kernels_fingerprint}
    assert json.loads((tmp_path / "own" / "hardware.json").read_text())["like"] == "h200"
    assert "not in it, for they have fewer than 30 rows: loka/fp8_rowwise_fast" in document["left_out"]


def test_a_fit_that_predicts_worse_than_a_correction_lies_beside_it(tmp_path, monkeypatch, fitted_once):
    kernels = ["torch/bf16", "torch/fp8_rowwise_fast", "torch/relu_forward"]
    on(MadeUp({"gemm": 140, "memory": 70}, kernels=kernels), monkeypatch)
    monkeypatch.setattr("hil.kernels.availability.available_kernels", lambda *_: tuple(kernels))
    document = collect(tmp_path / "own", minutes=6)
    assert document["model"] == "h200's, corrected"
    (said,) = [text for text in document["left_out"] if text.startswith("a fit of its own: ")]
    fit = tmp_path / "own" / "fit"
    assert said.endswith(f"--calibration {fit}")
    errors = [float(part) for part in re.findall(r"([0-9.]+)% off|corrected one ([0-9.]+)%", said) for part in part if part]
    assert errors[0] > errors[1] > 0
    assert calibration.load(fit).hardware == "h100-80gb-hbm3"
    # It predicts what it was fitted to, by itself.
    rows = pd.read_parquet(tmp_path / "own" / "timings" / "gemm.parquet")
    own = perfmodel.load("h100-80gb-hbm3", fit).predict(rows)["time_us"]
    assert np.median(np.abs(own / rows["p50_us"] - 1)) < 0.05
    answer = loka_sim.whatif("wukong", batch=512, calibration=tmp_path / "own")
    assert answer.hardware["name"] == "h100-80gb-hbm3"


def test_nothing_measured_is_no_calibration(tmp_path, monkeypatch):
    machine = on(MadeUp({}), monkeypatch)
    monkeypatch.setattr(machine, "measure", lambda *_: None)
    with pytest.raises(DataError, match="nothing was measured within 5 minutes"):
        collect(tmp_path / "none", minutes=5)
    with pytest.raises(UserError, match="--minutes 1.5 is too short"):
        collect(tmp_path / "none", minutes=1.5)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        collect(tmp_path, minutes=5)


def test_a_machines_ceilings_are_its_fastest_rows():
    rows = pd.DataFrame(
        [
            ("torch/bf16", 1000, 1000, 1000, 1, 4.0), ("torch/bf16", 1000, 1000, 1000, 1, 5.0),
            ("torch/fp8_rowwise_fast", 1000, 1000, 1000, 1, 2.0), ("torch/relu_forward", 2**14, 1, 2**14, 1, 400.0),
            ("torch/relu_forward", 256, 1, 256, 1, 0.001),
        ],
        columns=["kernel", "m", "n", "k", "groups", "p50_us"],
    )  # fmt: skip
    found = hardware_of("h100", MACHINE, rows)
    assert found["peak_bf16_tflops"] == 500.0 and found["peak_fp8_tflops"] == 1000.0
    # Of what does not fit into the L2 alone: 4 bytes an element.
    assert found["copy_bandwidth_tbs"] == pytest.approx(2**30 / 400e6, abs=0.01)
    with pytest.raises(DataError, match="no FP8 GEMM kernel"):
        hardware_of("h100", MACHINE, rows[rows["kernel"] != "torch/fp8_rowwise_fast"])


def test_the_screen_says_which_model_it_is_and_what_is_missing(short, monkeypatch, capsys, tmp_path):
    from loka_sim.cli import main

    monkeypatch.setattr(collection, "collect", lambda out, **given: {**short[1], "asked": given})
    assert main(["collect", "--gpu", "--out", str(tmp_path / "x"), "--minutes", "6"]) == 0
    said = capsys.readouterr().out
    assert max(len(line) for line in said.splitlines() if not line.startswith("next: ")) <= 100
    assert "time model: h200's, corrected" in said and "torch/bf16" in said
    assert "! memory: 30 of 379 shapes were measured" in said and "next: loka-sim whatif wukong --calibration" in said

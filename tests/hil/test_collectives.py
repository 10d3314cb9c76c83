"""Measuring collectives: the ops and their checks against simulated ranks, and whole dry runs over gloo on the CPU."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from hil import collectives, collectives_calls
from hil.collectives_calls import Case, Place, build

OPS = [
    ("all_to_all", "equal"), ("all_to_all", "uneven"), ("all_reduce", "equal"),
    ("reduce_scatter", "equal"), ("all_gather", "equal"),
]  # fmt: skip
RANKS = 4


class Simulated:
    """Stands in for torch.distributed: notes what each rank's call hands over, and does it once all have."""

    def __init__(self):
        self.handed = []

    def all_to_all_single(self, out, source, receive=None, send=None, group=None):
        self.handed.append((out, source, receive, send))

    def all_reduce(self, buffer, group=None):
        self.handed.append((buffer, buffer.clone(), None, None))

    def reduce_scatter_tensor(self, out, source, group=None):
        self.handed.append((out, source, None, None))

    all_gather_into_tensor = reduce_scatter_tensor

    def deliver(self, op):
        outs, sources = [handed[0] for handed in self.handed], [handed[1] for handed in self.handed]
        for rank, out in enumerate(outs):
            if op == "all_to_all":
                sent = [
                    source.split(send or [len(source) // RANKS] * RANKS) for _, source, _, send in self.handed
                ]  # fmt: skip
                receive = self.handed[rank][2]
                assert receive is None or [len(pieces[rank]) for pieces in sent] == receive
                out.copy_(torch.cat([pieces[rank] for pieces in sent]))
            elif op == "all_gather":
                out.copy_(torch.cat(sources))
            else:
                total = torch.stack([source.double() for source in sources]).sum(0)
                out.copy_(total if op == "all_reduce" else total.chunk(RANKS)[rank])
        self.handed.clear()


def place(rank, number=0):
    return Place(torch.device("cpu"), None, rank, RANKS, number)


@pytest.fixture
def ranks(monkeypatch):
    """Builds the calls of all ranks of a case, and runs them once against simulated ranks."""
    simulated = Simulated()
    monkeypatch.setattr(collectives_calls, "dist", simulated)

    def run(op, split, size=4096, numbers=(0,) * RANKS):
        case = Case(op, "bf16", split, 0, RANKS, 1, size)
        calls = [build(case, place(rank, number)) for rank, number in enumerate(numbers)]
        for call in calls:
            call.prepare()
        before = [call.wrong() for call in calls]
        for call in calls:
            call.launch()
        outs = [handed[0] for handed in simulated.handed]
        simulated.deliver(op)
        return calls, outs, before

    return run


@pytest.mark.parametrize(("op", "split"), OPS)
def test_right_results_pass_and_one_wrong_element_does_not(ranks, op, split):
    calls, outs, before = ranks(op, split)
    # Before the op nothing is right: what was not written shows.
    assert all(before)
    assert [call.wrong() for call in calls] == [""] * RANKS
    outs[2][5] += 1
    assert [bool(call.wrong()) for call in calls] == [False, False, True, False]


@pytest.mark.parametrize(("op", "split"), OPS)
def test_data_of_another_group_is_found(ranks, op, split):
    calls, _, _ = ranks(op, split, numbers=(0, 0, 0, 1))
    assert all(call.wrong() for call in calls[:3])


def test_swapped_chunks_are_found(ranks):
    calls, outs, _ = ranks("all_to_all", "equal")
    out = outs[1]
    quarter = len(out) // 4
    out[: 2 * quarter] = torch.cat([out[quarter : 2 * quarter], out[:quarter]])
    assert calls[1].wrong()


def test_an_uneven_split_is_as_skewed_as_said(ranks, monkeypatch):
    simulated = Simulated()
    monkeypatch.setattr(collectives_calls, "dist", simulated)
    size = 2**20
    for rank in range(RANKS):
        build(Case("all_to_all", "bf16", "uneven", 0, RANKS, 1, size), place(rank)).launch()
    sent = [2 * len(source) / size for _, source, _, _ in simulated.handed]
    assert sent == pytest.approx([0.5 + rank / (RANKS - 1) for rank in range(RANKS)], abs=0.01)
    assert {2 * len(out) for out, *_ in simulated.handed} == {size}


def test_settings_hold_the_host_and_groups_of_it():
    assert collectives.settings(2) == [(2, 1)]
    assert collectives.settings(4) == [(4, 1), (2, 2), (2, 1)]
    assert collectives.settings(8) == [(8, 1), (4, 2), (2, 4), (4, 1), (2, 1)]


def torchrun(out, *options, ranks=2):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "hil.collectives", "--out", str(out), "--device", "cpu", "--codec-sizes", "32768", "--dims", "", *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_a_dry_run_stops_resumes_and_keeps_what_it_had(tmp_path):
    stopped = torchrun(tmp_path, "--sizes", "4096,8192", "--minutes", "0", ranks=4)
    assert stopped.returncode != 0
    assert "the same command continues" in stopped.stderr
    assert not (tmp_path / "collectives.parquet").exists()
    first = torchrun(tmp_path, "--sizes", "4096", ranks=4)
    assert first.returncode == 0, first.stderr[-3000:]
    table = pd.read_parquet(tmp_path / "collectives.parquet")
    keys = [field.name for field in dataclasses.fields(Case)]
    # Three settings of five ops and fp16, and a copy.
    assert len(table) == len(table.drop_duplicates(keys)) == 3 * 6 + 1
    assert set(zip(table["ranks"], table["groups"], strict=True)) == {(4, 1), (2, 2), (2, 1)}
    assert (table["least_us"] <= table["p10_us"]).all() and (table["p90_us"] <= table["most_us"]).all()
    again = torchrun(tmp_path, "--sizes", "4096,8192", ranks=4)
    assert again.returncode == 0, again.stderr[-3000:]
    longer = pd.read_parquet(tmp_path / "collectives.parquet")
    assert len(longer) == 2 * 15 + 3 + 1
    pd.testing.assert_frame_equal(longer[longer["run"] == 0].reset_index(drop=True), table)
    runs = json.loads((tmp_path / "collectives.json").read_text())["runs"]
    assert [run["rows"] for run in runs] == [19, 15]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["collectives.json", "collectives.parquet"]


def test_a_table_of_another_gpu_or_layout_is_not_mixed_in(tmp_path, monkeypatch):
    from hil import collectives_table

    monkeypatch.setattr(collectives_table, "dist", SimpleNamespace(get_world_size=lambda: 2))
    arguments = torch.device("cpu"), [], 1.0
    table = collectives_table.Table.open(tmp_path, *arguments)
    row = dataclasses.asdict(Case("copy", "bf16", "equal", 0, 2, 1, 4096))
    table.add([{**row, "p50_us": 1.0}])
    assert collectives_table.Table.open(tmp_path, *arguments).keys == {Case(**row)}
    sidecar = json.loads((tmp_path / "collectives.json").read_text())
    sidecar["runs"][0]["gpu"] = "NVIDIA H100"
    (tmp_path / "collectives.json").write_text(json.dumps(sidecar))
    with pytest.raises(ValueError, match="NVIDIA H100"):
        collectives_table.Table.open(tmp_path, *arguments)
    pd.DataFrame([{"op": "copy", "p50_us": 1.0}]).to_parquet(tmp_path / "collectives.parquet")
    with pytest.raises(ValueError, match="older layout"):
        collectives_table.Table.open(tmp_path, *arguments)


def test_without_gpus_it_says_what_to_do(capsys):
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    assert collectives.main(["--out", "unused"]) == 3
    assert "torchrun --nproc-per-node" in capsys.readouterr().err


EXCHANGE = """
import torch, torch.distributed as dist
from hil.compressed import CompressedAllToAll, DTYPES
from hil.collectives_calls import mismatch
dist.init_process_group("gloo")
rank = dist.get_rank()
counts = torch.tensor([[3, 8], [5, 1]])  # counts[a, b]: rows that a sends b
rows = [torch.randn(int(counts[r].sum()), 64, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(2)]
sent = torch.cat([rows[r].split(counts[r].tolist())[rank] for r in range(2)])
for dtype in DTYPES:
    exchange = CompressedAllToAll(dtype, 64, counts[rank].tolist(), counts[:, rank].tolist(), None, "cpu")
    out = torch.full_like(sent, 77.0)
    exchange(rows[rank], out)
    wrong = "" if torch.equal(out, sent) else "differs"
    if dtype != "bf16":
        wrong = mismatch(dtype, out, sent)
        assert mismatch(dtype, out.roll(1, 0), sent), dtype
    assert not wrong, (dtype, wrong)
    if rank == 0:
        print(f"{dtype} {exchange.sent_bytes}", flush=True)
dist.destroy_process_group()
"""


def test_compressed_exchanges_of_uneven_rows(tmp_path):
    pytest.importorskip("triton")
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    # Rank 0's 11 rows: 2 bytes a value, or 1 and a scale a row, payloads padded to 16 bytes.
    for line in ("bf16 1408", "fp16 1408", f"fp8_rowwise {11 * 64 + 16 + 32}", f"fp8_rowwise_unfused {11 * 68}"):
        assert line in done.stdout.splitlines()

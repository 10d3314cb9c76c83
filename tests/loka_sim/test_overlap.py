"""What a step's kernels and collectives cost each other while they run at the same time."""

import numpy as np
import pytest

import loka_sim
from loka_sim.communication import NETWORK, NVLINK
from loka_sim.overlap import IN_STEP, slower
from loka_sim.step_plan import BF16
from perfmodel import hardware
from perfmodel.timeline import COMPUTE, HOST, Op

H200 = hardware.load("h200")


class Overlap:
    """Kernels take longer by their share of the peak and of the bandwidth, collectives 3 times as long."""

    def __init__(self):
        self.asked = []

    def slower(self, kernels, op, exchange_us):
        self.asked.append((op, exchange_us, kernels))
        return 1 + kernels.peak + kernels.bandwidth, np.full(len(kernels.us), 3.0)


class Timing:
    hardware = H200
    manifest = {"kernels": {}}

    def __init__(self, overlap):
        self.overlap = overlap


def op(name, stream, us=10.0, **details):
    return Op(name, stream, us, us, us, details=details)


GEMM = op("gemm", COMPUTE, 20.0, kernel="torch/bf16", m=1024, n=1024, k=1024, groups=1)
FUSED = op("fused", COMPUTE, 20.0, bytes=4e7)
GAP = op("gap", COMPUTE, bytes=0)
INSIDE, ACROSS = (op(name, name, op="all_reduce", bytes_per_rank=2**25) for name in (NVLINK, NETWORK))


def test_each_pair_by_its_own_shares():
    model = Overlap()
    ask = slower([GEMM, FUSED, GAP, INSIDE, ACROSS], Timing(model))
    peak = 2 * 1024**3 / (20 * H200.peak_bf16_tflops * 1e6)
    bandwidth = 6 * 1024**2 / (20 * H200.copy_bandwidth_tbs * 1e6)
    assert ask(GEMM, INSIDE) == pytest.approx((1 + IN_STEP * (peak + bandwidth), 3))
    assert ask(FUSED, INSIDE) == pytest.approx((1 + IN_STEP * 4e7 / (20 * H200.copy_bandwidth_tbs * 1e6), 3))
    assert ask(GAP, INSIDE) == (1, 1)
    # What waits for the network is not slowed by what computes.
    assert ask(GEMM, ACROSS) == pytest.approx((1 + IN_STEP * (peak + bandwidth), 1))
    assert [entry[:2] for entry in model.asked] == [("all_reduce", 10.0)]
    assert model.asked[0][2].tiles.tolist() == [0, 64]


def test_nothing_is_asked_where_nothing_is_known_or_exchanged():
    assert slower([GEMM, INSIDE], Timing(None)) is None
    assert slower([GEMM, FUSED, op("launches", HOST)], Timing(Overlap())) is None


def test_a_damaged_table_of_pairs_is_named(monkeypatch):
    def damaged(hardware, calibration):
        raise ValueError("overlap.parquet holds no row; measure again with: torchrun -m hil.overlap.")

    monkeypatch.setattr("perfmodel.overlap.load", damaged)
    answer = loka_sim.whatif("dlrm-small", batch=512, gpus=4)
    assert answer.communication.missing == "overlap.parquet holds no row; measure again with: torchrun -m hil.overlap"
    assert "No figure for communication between 4 GPUs: overlap.parquet" in answer.to_dict()["communication"]["text"]


def test_a_step_on_several_gpus_is_slowed_and_says_so():
    answer = loka_sim.whatif("wukong", batch=2048, gpus=4, hardware="h100")
    made = answer.timelines[BF16]
    assert 0.05 * made.total_us < made.slowed_us < 0.2 * made.total_us
    spent = dict(zip((entry.name for entry in made.ops), made.spent_us, strict=True))
    bare = sum(call.time.us for call in answer.communication.calls)
    assert bare < sum(made.busy_us(stream) for stream in made.streams if stream not in (COMPUTE, HOST)) < 3 * bare
    # The optimizer waits for the last reduction: nothing runs beside it.
    update = next(entry for entry in made.ops if entry.kind == "optimizer")
    assert spent[update.name] == pytest.approx(update.us)
    document = answer.to_dict()
    assert document["communication"]["slowed_us"] > 0
    said = " ".join(entry["text"] for entry in document["statements"])
    assert "Kernels and collectives that run at once slow each other, as measured between 2 and 4 GPUs of the H100." in said
    assert "one by one, 3 us between two. The slowest GPU is waited for, 1.3% slower than the mean." in said

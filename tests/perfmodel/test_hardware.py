"""Which shipped GPU serves another one, and what its data say of that."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from perfmodel import collectives, fused, hardware, in_step
from perfmodel.optimizers import MEASURED_ON
from perfmodel.topology import PRESETS, is_hgx, usual

COLUMNS = ("kind", "kept", "reduced", "read_bytes", "written_bytes", "unordered_bytes", "uneven", "instructions")


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"name": "h200"}, "h200"),
        ({"gpu": "NVIDIA H200"}, "h200"),
        ({"gpu": "NVIDIA H100 80GB HBM3", "copy_bandwidth_tbs": 4.4}, "h100"),
        ({"name": "h200", "gpu": "NVIDIA H100 80GB HBM3"}, "h200"),
        ({"gpu": "NVIDIA H100 PCIe"}, "h100"),
        ({"gpu": "NVIDIA H100 PCIe", "copy_bandwidth_tbs": 1.8}, "h100"),
        ({"name": "gh200", "copy_bandwidth_tbs": 3.9}, "h200"),
        ({"name": "h100", "having": "collectives.parquet"}, "h200"),
        ({"name": "h100", "having": "models/manifest.json"}, "h100"),
        ({"name": "h200", "having": "nothing.json"}, None),
    ],
)
def test_the_nearest_gpu_is_itself_or_one_with_a_memory_like_its_own(two_gpus, known, expected):
    assert hardware.nearest((9, 0), **known) == expected
    assert hardware.nearest([9, 0], **known) == expected
    assert hardware.nearest((10, 0), **known) is None


def test_what_is_not_there_is_named_with_what_is(two_gpus):
    for other in (None, 3, "H200", "", "../data/h200"):
        with pytest.raises(ValueError, match=re.escape(f"hardware {other!r} has no data; choose one of: h100, h200")):
            hardware.load(other)
    with pytest.raises(ValueError, match="hardware 'a100' has no data; choose one of: h100, h200$"):
        hardware.load("a100")
    for load in (fused.load, in_step.load):
        with pytest.raises(ValueError, match="hardware 'a100' has no data"):
            load("a100")
    assert MEASURED_ON in hardware.available()


def pointwise(*moved):
    rows = [("pointwise", size // 4, 1, size // 2, size // 2, 0, False, 1) for size in moved]
    return pd.DataFrame(rows, columns=COLUMNS)


def test_kernels_alone_take_longer_by_the_bandwidth_and_are_as_far_from_it(two_gpus):
    sizes = [2**12, 2**29]
    here, there = (fused.load(name) for name in ("h100", "h200"))
    assert (here.hardware.name, here.fitted.name, here.in_step.hardware.name) == ("h100", "h200", "h200")
    slower = here.predict(pointwise(*sizes))["time_us"] / there.predict(pointwise(*sizes))["time_us"]
    assert slower.tolist() == pytest.approx([1.0, 4.39 / 3.06], abs=0.01)
    own = replace(here.hardware, name="mine", gpu="Mine", copy_bandwidth_tbs=1.53)
    assert fused.load(own).hardware == own
    half = fused.load(own).predict(pointwise(2**29))["time_us"] / here.predict(pointwise(2**29))["time_us"]
    assert half.tolist() == pytest.approx([2.0], abs=0.01)
    # What computes longer than its bytes take does so on any memory.
    long = pointwise(2**26).assign(instructions=1000)
    assert here.predict(long)["time_us"].tolist() == pytest.approx(there.predict(long)["time_us"].tolist())


# MiB that kernels of wukong-production's step moved, and microseconds on an H200 and on an H100.
IN_STEPS = [
    (32, 7.62, 8.48), (64, 15.30, 17.89), (96, 29.41, 37.09), (192, 51.78, 64.99), (384, 62.08, 87.46), (768, 185.4, 268.8)
]  # fmt: skip


def test_inside_a_step_what_the_l2_holds_is_as_fast_on_both(two_gpus):
    here, there = (fused.load(name) for name in ("h100", "h200"))
    rows = pointwise(*(2**20 * size for size, *_ in IN_STEPS))
    assert (there.elsewhere(rows) == 1).all()
    slower = here.elsewhere(rows) * here.times(rows)[0][:, 0] / there.times(rows)[0][:, 0]
    measured = np.array([h100 / h200 for _, h200, h100 in IN_STEPS])
    assert slower == pytest.approx(measured, rel=0.12) and np.abs(slower / measured - 1).mean() < 0.07
    small = pointwise(2**14, 2**20)
    alike = here.elsewhere(small) * here.times(small)[0][:, 0] / there.times(small)[0][:, 0]
    assert (alike < 1.05).all()
    assert in_step.from_memory([2**20, 2**40], here.hardware).tolist() == pytest.approx([0.2, 1.0], abs=1e-4)


def asked(dtype="bf16", **more):
    columns = {"op": "all_to_all", "ranks": 4, "bytes_per_rank": [2.0**20, 2.0**26], "dtype": dtype, "dim": 128}
    return pd.DataFrame({**columns, **more})


def test_collectives_are_those_of_the_same_links(two_gpus):
    here, there = (collectives.load(name) for name in ("h100", "h200"))
    assert (here.hardware, here.like, here.measured_on, there.like) == ("h100", "h200", "h200", None)
    pd.testing.assert_frame_equal(here.predict(asked()), there.predict(asked()))
    assert here.predict(asked(ranks=16)).equals(there.predict(asked(ranks=16), PRESETS["hgx_h100"]))
    # 64 MiB of bf16 are read and half of that written, and back: that takes longer, and nothing else does.
    more = here.predict(asked("fp8_rowwise"))["time_us"] - there.predict(asked("fp8_rowwise"))["time_us"]
    assert more.iloc[1] == pytest.approx(3 * 2**26 / 1e6 * (1 / 3.06 - 1 / 4.39), rel=0.5)
    assert 0 < more.iloc[0] < 0.1 * more.iloc[1]
    with pytest.raises(ValueError, match="was not measured on h200; there are"):
        here.predict(asked("int8"))


def test_collectives_of_other_links_are_not(two_gpus):
    h100 = hardware.load("h100")
    assert collectives.load(replace(h100, name="h100-80gb-hbm3")).like == "h200"
    for gpu in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA H800"):
        assert not is_hgx(gpu)
        with pytest.raises(FileNotFoundError, match="no collective was measured on mine"):
            collectives.load(replace(h100, name="mine", gpu=gpu))


def test_usual_hosts_are_known_by_the_name():
    assert usual("h100") is usual("h100-80gb-hbm3") is PRESETS["hgx_h100"] and usual("h200") is PRESETS["hgx_h200"]
    assert usual("h100-pcie") is usual("h100-nvl") is usual("my-gpu") is None

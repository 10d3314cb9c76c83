"""Larger calls take longer: exactly so beyond what was measured, inside but for a stated slack, as the library's own times."""

import numpy as np
import pandas as pd
import pytest

import perfmodel
from perfmodel import KERNELS
from perfmodel.model import PerfModel
from perfmodel.prediction import ROOFLINE_SHARE, WIDER_GEMM, WIDER_MEMORY, at_edge, octaves_beyond

SLACK = 1 / 3  # of `PerfModel.predict`
GEMMS = ("torch/bf16", "torch/fp8_tensorwise_fast", "torch/fp8_tensorwise_split", "torch/fp8_rowwise_fast", "torch/fp8_block128")
MEMORY = ("torch/quantize_tensorwise", "torch/quantize_rowwise", "torch/rmsnorm_forward", "torch/transpose_e4m3")


@pytest.fixture(scope="module")
def model() -> PerfModel:
    return perfmodel.load("h200")


def drawn(kernel: str, count: int, beyond: float = 1.0, seed: int = 0) -> pd.DataFrame:
    """Calls with sizes that are multiples of 128, as far as the kernel was measured, or `beyond` times that."""
    generator = np.random.default_rng(seed)
    limits = perfmodel.load("h200").manifest["kernels"][kernel]["range"]
    names = "mnk" if "gemm" in KERNELS[kernel].kind else "mk"
    sizes = {
        name: 128 * np.exp2(generator.uniform(0, np.log2(beyond * limits[name][1] / 256), count)).astype(int) for name in names
    }
    frame = pd.DataFrame({"kernel": kernel, "n": 1, **sizes})
    product = frame["m"].astype(float) * frame["n"] * frame["k"]
    return frame[product <= beyond * limits["product"][1]].reset_index(drop=True)


def doubled(model: PerfModel, frame: pd.DataFrame, name: str) -> np.ndarray:
    """How many times as long a call takes with one size doubled."""
    return (model.predict(frame.assign(**{name: 2 * frame[name]}))["time_us"] / model.predict(frame)["time_us"]).to_numpy()


@pytest.mark.parametrize("kernel", GEMMS)
@pytest.mark.parametrize("beyond", [1.0, 16.0])
def test_doubling_a_size_hardly_ever_shortens_a_gemm(model, kernel, beyond):
    frame = drawn(kernel, 4000, beyond)
    ratios = np.concatenate([doubled(model, frame, name) for name in "mnk"])
    assert len(ratios) > 3000
    assert ratios.min() > 1 - SLACK
    assert (ratios < 0.95).mean() < 0.02
    # Eight times as many rows are more than most cliffs are high.
    assert (model.predict(frame.assign(m=8 * frame["m"]))["time_us"] > 0.85 * model.predict(frame)["time_us"]).all()


@pytest.mark.parametrize("kernel", [*GEMMS, *MEMORY])
def test_beyond_what_was_measured_no_size_shortens_a_call_by_doubling(model, kernel):
    limits = model.manifest["kernels"][kernel]["range"]
    for name in "mnk" if kernel in GEMMS else "mk":
        frame = drawn(kernel, 300, seed=1)
        for octave in range(6):
            # Of a remainder by 256 that doubling keeps, so that no call becomes better aligned.
            frame[name] = 256 * int(np.ceil(1 + limits[name][1] / 256)) * 2**octave
            assert (doubled(model, frame, name) >= 1 - 1e-12).all()


def test_a_size_outside_is_cut_to_the_edge_with_its_alignment():
    measured = {"m": [1.0, 8192.0], "n": [1.0, 8200.0], "k": [1.0, 300.0], "groups": [1.0, 1.0]}
    sizes = tuple(np.array(x, dtype=float) for x in ([8192, 8193, 20000], [100, 8201, 9000], [300, 301, 1024], [1, 2, 512]))
    m, n, k, groups = at_edge(sizes, measured)
    assert m.tolist() == [8192, 7937, 8192 - (8192 - 20000) % 256] and (m % 256)[1:].tolist() == [1, 20000 % 256]
    assert n[0] == 100 and (n <= 8200).all() and (n[1:] % 256).tolist() == [8201 % 256, 9000 % 256]
    # Where no size of that remainder lies in the upper half, the edge itself is taken.
    assert k.tolist() == [300, 300, 256] and groups.tolist() == [1, 1, 1]


def test_octaves_beyond_by_hand():
    measured = {"m": [16.0, 1024.0], "n": [1.0, 64.0], "k": [4.0, 512.0], "groups": [1.0, 1.0], "product": [64.0, 2.0**22]}
    sizes = tuple(
        np.array(size, dtype=float)
        for size in ([1024, 2048, 4, 1024, 8192, 16], [64, 1, 1, 64, 32, 1], [64, 4, 16, 512, 16, 4], [1, 1, 1, 1, 8, 1])
    )
    # Inside; M doubled; a quarter of the least M; only the product, 8 times; M and groups 8 times; at every lower edge.
    assert octaves_beyond(sizes, measured).tolist() == [0, 1, 0, 3, 3, 0]


@pytest.mark.parametrize("kernel", [*GEMMS, *MEMORY])
def test_the_further_beyond_the_wider_the_interval(model, kernel):
    """By as much as it says for each octave, on both sides unless the roofline ends it, and `explain` says so."""
    limits = model.manifest["kernels"][kernel]["range"]
    # The tallest operands that were measured are narrow.
    n, k = (128, 128) if kernel in GEMMS else (1, 64)
    size = {"m": 256 * int(limits["m"][1] // 256), "n": n, "k": k}
    above, below, ended, powers = [], [], [], []
    for octave in range(5):
        call = {"kernel": kernel, **size, "m": size["m"] * 2**octave}
        found = model.predict(pd.DataFrame([call])).iloc[0]
        said = model.explain(call)
        above.append(np.log(found["high_us"] / found["time_us"]))
        below.append(np.log(found["time_us"] / found["low_us"]))
        ended.append(found["low_us"] <= ROOFLINE_SHARE * said.roofline_us * (1 + 1e-9))
        powers.append(said.wider_beyond)
        assert (said.wider_beyond > 1) == ("extrapolation, its interval" in said.words())
        assert bool(said.outside) == (octave > 0) and ("outside the measured sizes" in said.words()) == (octave > 0)
    beyond = np.log2(size["m"] / limits["m"][1]) + np.arange(1, 5)
    each = WIDER_GEMM if kernel in GEMMS else WIDER_MEMORY
    np.testing.assert_allclose(powers, [1.0, *(1 + each * beyond)])
    assert (np.diff(above[1:]) > 0).all()
    assert ((np.diff(below[1:]) > 0) | ended[2:]).all()

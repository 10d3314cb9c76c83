"""FP8 messages: the kernels, run by Triton's interpreter on the CPU, against numerics; equal to the last bit.

The interpreter must be chosen before triton is imported, so this file runs itself once more with TRITON_INTERPRET=1.
"""

import importlib.util
import os

import pytest
import torch

from hil.codec import Layout, Packer, Unpacker, split_rows
from numerics import quantize

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter, with TRITON_INTERPRET=1")
LAYOUTS = [
    Layout(64, (5, 3)), Layout(128, (1, 0, 37)), Layout(256, (33, 7, 2, 40)), Layout(512, (9,)), Layout(96, (7, 31, 2)),
    Layout(16, (0, 1)),
]  # fmt: skip
_FILL = 7


def draw(layout, dtype=torch.bfloat16, seed=0):
    """Rows far apart in size, one of zeros, one with both zeros and with steps of the grid."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(layout.total_rows, layout.dim, generator=generator)
    x *= torch.exp2(6 * torch.randn(layout.total_rows, 1, generator=generator))
    if layout.total_rows > 3:
        x[1] = 0
        x[2, :8] = torch.tensor([448.0, -0.0, 0.0, 2.0**-10, -(2.0**-9), 1.5 * 2.0**-9, 447.0, -17.0])
    return x.to(dtype)


def pack(layout, x):
    message = layout.message("cpu")
    message.fill_(_FILL)
    Packer(layout, "cpu")(x, message)
    return message


def unpack(layout, message, dtype):
    out = torch.full((layout.total_rows, layout.dim), 77.0, dtype=dtype)
    Unpacker(layout, "cpu")(message, out)
    return out


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's run")
def test_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_codes_and_scales_are_numerics(layout, dtype):
    x = draw(layout, dtype).clamp(-60000, 60000)
    message, wanted = pack(layout, x), quantize(x, "e4m3/rowwise")
    row = byte = 0
    for rows, size in zip(layout.rows, layout.payload_bytes, strict=True):
        codes, scales, padding = message[byte : byte + size].split([rows * layout.dim, 4 * rows, size - rows * (layout.dim + 4)])
        assert torch.equal(codes.view(rows, layout.dim), wanted.codes[row : row + rows])
        assert torch.equal(scales.view(torch.float32), wanted.scales[row : row + rows, 0])
        assert bool((padding == _FILL).all())
        row, byte = row + rows, byte + size
    assert byte == len(message)


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_unpacked_values_are_numerics(layout):
    x = draw(layout, seed=1)
    wanted = quantize(x, "e4m3/rowwise").dequantize()
    message = pack(layout, x)
    assert torch.equal(unpack(layout, message, torch.float32).view(torch.int32), wanted.view(torch.int32))
    # The interpreter cuts to bfloat16 where GPUs round (tests/gpu).
    cut = (wanted.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(unpack(layout, message, torch.bfloat16).float(), cut)


@interpreted
def test_every_code_unpacks():
    layout = Layout(256, (1,))
    message = layout.message("cpu")
    message[:256] = torch.arange(256, dtype=torch.uint8)
    message[256:260] = torch.tensor([1.0]).view(torch.uint8)
    wanted = message[:256].view(torch.float8_e4m3fn).float()
    # 0x7f and 0xff, NaN, are not written by the packer, and are another number in the interpreter.
    known = ~wanted.isnan()
    assert int(known.sum()) == 254
    assert torch.equal(unpack(layout, message, torch.float32)[0][known], wanted[known])


@interpreted
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_row_that_is_not_finite_arrives_as_nan_and_no_other(value):
    layout = Layout(64, (3, 2))
    x = draw(layout, seed=2)
    clean = unpack(layout, pack(layout, x), torch.float32)
    x[3, 17] = value
    got = unpack(layout, pack(layout, x), torch.float32)
    assert bool(got[3].isnan().all())
    kept = [0, 1, 2, 4]
    assert torch.equal(got[kept], clean[kept])


@interpreted
def test_a_message_from_several_ranks():
    """What two ranks pack for a third, put together, unpacks as their rows: payloads stand alone."""
    sends = [Layout(64, (3, 5)), Layout(64, (4, 6))]
    rows = [draw(layout, seed=3 + number) for number, layout in enumerate(sends)]
    payloads = [pack(layout, x).split(layout.payload_bytes)[1] for layout, x in zip(sends, rows, strict=True)]
    got = unpack(Layout(64, (5, 6)), torch.cat(payloads), torch.float32)
    wanted = torch.cat([rows[0][3:], rows[1][4:]])
    assert torch.equal(got, quantize(wanted, "e4m3/rowwise").dequantize())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_payloads_are_aligned_and_hold_all(layout):
    places = layout.places("cpu")
    assert places[-1].tolist() == [layout.total_rows, layout.message_bytes]
    for rows, size, (_, byte) in zip(layout.rows, layout.payload_bytes, places[:-1].tolist(), strict=True):
        assert byte % 16 == size % 16 == (rows * layout.dim) % 16 == 0
        assert 0 <= size - rows * (layout.dim + 4) < 16


@pytest.mark.parametrize(
    ("dim", "rows", "message"), [(40, (1,), "dim 40"), (0, (1,), "dim 0"), (64, (), "rows"), (64, (-1,), "rows")]
)
def test_a_layout_that_cannot_be_is_refused(dim, rows, message):
    with pytest.raises(ValueError, match=message):
        Layout(dim, rows)


@needs_triton
@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [((7, 64), None, "contiguous \\(8, 64\\)"), ((64, 8), None, "contiguous \\(8, 64\\)"), ((8, 64), 3, "message is \\(3,\\)")],
)
def test_tensors_that_do_not_fit_are_refused(shape, size, message):
    layout = Layout(64, (5, 3))
    buffer = layout.message("cpu")[:size]
    with pytest.raises(ValueError, match=message):
        Packer(layout, "cpu")(torch.zeros(shape, dtype=torch.bfloat16), buffer)
    with pytest.raises(ValueError, match=message):
        Unpacker(layout, "cpu")(buffer, torch.zeros(shape, dtype=torch.bfloat16))


def test_rows_are_split_without_loss():
    assert split_rows(10, 4) == (2, 2, 2, 4)
    assert split_rows(8, 2, [0.5, 1.5]) == (2, 6)
    with pytest.raises(ValueError, match="weights: 1 for 2"):
        split_rows(8, 2, [1.0])

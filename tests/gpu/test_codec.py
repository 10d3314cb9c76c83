"""The FP8 codec on a Hopper GPU: equal to numerics to the last bit, and close to a copy's bandwidth."""

import pytest
import torch

from hil.codec import Layout, Packer, Unpacker
from hil.timing import capture, launches_for, time_interleaved
from numerics import quantize


@pytest.mark.parametrize(
    "layout", [Layout(64, (5, 0, 3001)), Layout(128, (1000, 1000)), Layout(512, (9, 700)), Layout(96, (77,))], ids=str
)
def test_message_and_rows_are_numerics(layout):
    """Fresh rows far apart in size, subnormal bfloat16 among them, against torch on the CPU."""
    x = (torch.randn(layout.total_rows, layout.dim) * torch.exp2(20 * torch.randn(layout.total_rows, 1))).bfloat16()
    x = torch.where(x.isfinite(), x, 1.0)
    x[1] = 0
    x[3, :4] = torch.tensor([1e-39, -1e-40, 0.0, -0.0])
    wanted = quantize(x, "e4m3/rowwise")
    message = layout.message("cuda").fill_(7)
    out = torch.full(x.shape, 77.0, dtype=torch.bfloat16, device="cuda")
    Packer(layout, "cuda")(x.cuda(), message)
    Unpacker(layout, "cuda")(message, out)
    row = 0
    for rows, payload in zip(layout.rows, message.cpu().split(layout.payload_bytes), strict=True):
        codes, scales, padding = payload.split([rows * layout.dim, 4 * rows, len(payload) - rows * (layout.dim + 4)])
        assert torch.equal(codes.view(rows, layout.dim), wanted.codes[row : row + rows])
        assert torch.equal(scales.view(torch.float32), wanted.scales[row : row + rows, 0])
        assert bool((padding == 7).all())
        row += rows
    assert torch.equal(out.cpu().view(torch.int16), wanted.dequantize().bfloat16().view(torch.int16))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_arrives_as_nan(value):
    layout = Layout(64, (3, 2))
    x = torch.randn(5, 64, device="cuda").bfloat16()
    x[3, 17] = value
    message, out = layout.message("cuda"), torch.empty_like(x)
    Packer(layout, "cuda")(x, message)
    Unpacker(layout, "cuda")(message, out)
    assert out.isnan().all(dim=1).tolist() == [False, False, False, True, False]
    assert int(out.isnan().sum()) == 64


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("megabytes", [8, 64])
def test_three_quarters_of_a_copys_bandwidth(dim, megabytes):
    size = megabytes * 2**20
    layout = Layout(dim, (size // 2 // dim // 4,) * 4)
    launches = launches_for(size + layout.message_bytes)
    x = torch.randn(launches, layout.total_rows, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    messages = [layout.message("cuda") for _ in range(launches)]
    packer, unpacker = Packer(layout, "cuda"), Unpacker(layout, "cuda")
    graphs = [
        capture(lambda i: out[i].copy_(x[i]), launches)[0],
        capture(lambda i: packer(x[i], messages[i]), launches)[0],
        capture(lambda i: unpacker(messages[i], out[i]), launches)[0],
    ]
    copied, packed, unpacked = (timing.quantile(0.5) for timing in time_interleaved([(graph, launches) for graph in graphs]))
    share = (size + layout.message_bytes) / (2 * size)
    shares = {"pack": share * copied / packed, "unpack": share * copied / unpacked}
    print(
        f"{megabytes} MB, dim {dim}: copy {2 * size / copied / 1e6:.2f} TB/s; "
        + ", ".join(f"{k} {v:.0%}" for k, v in shares.items())
    )
    assert min(shares.values()) >= 0.75, shares

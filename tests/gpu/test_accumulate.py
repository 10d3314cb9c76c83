"""The emulated tensor core against the real one: equal to the last bit on fresh shapes and distributions."""

import random

import pytest
import torch

from numerics import fp8_matmul

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA GPU of compute capability 9.0",
    ),
]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DISTRIBUTIONS = {
    "normal": lambda shape, generator: torch.randn(shape, generator=generator),
    "positive": lambda shape, generator: torch.randn(shape, generator=generator).abs(),
    "relu": lambda shape, generator: (torch.randn(shape, generator=generator) + 0.2).clamp(min=0),
    "lognormal": lambda shape, generator: torch.randn(shape, generator=generator).mul(2).exp(),
    "scaled rows": lambda shape, generator: (
        torch.randn(shape, generator=generator) * torch.randn((shape[0], 1), generator=generator).mul(3).exp()
    ),
}


def operand(draw: random.Random, rows: int, k: int, dtype: torch.dtype) -> tuple[str, torch.Tensor]:
    """FP8 values of a random distribution, sized anywhere from the format's subnormals to its range."""
    name = draw.choice(list(DISTRIBUTIONS))
    values = DISTRIBUTIONS[name]((rows, k), torch.Generator().manual_seed(draw.getrandbits(63)))
    top = torch.finfo(dtype).max
    values = values * (top * 2.0 ** -draw.uniform(0, 8) / values.abs().max())
    return name, values.clamp(-top, top).cuda().to(dtype)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=lambda pair: "x".join(map(str, pair)))
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "split"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_equal_to_the_last_bit(scaling, fast, formats):
    for _ in range(4):
        seed = random.SystemRandom().getrandbits(48)
        draw = random.Random(seed)
        # Tensorwise, cuBLAS splits a long K where outputs are few; many outputs and a moderate K keep a sum in one piece.
        m, n = (16 * draw.randint(64 if scaling == "tensorwise" else 2, 160) for _ in range(2))
        k = 16 * draw.randint(2, 128)
        (name_a, a), (name_b, b) = operand(draw, m, k, formats[0]), operand(draw, n, k, formats[1])
        rows, columns = ((), ()) if scaling == "tensorwise" else ((m, 1), (1, n))
        generator = torch.Generator().manual_seed(seed)
        scale_a, scale_b = (torch.rand(shape, generator=generator).add(0.5).cuda() for shape in (rows, columns))
        for dtype in (torch.float32, torch.bfloat16) if scaling == "tensorwise" else (torch.bfloat16,):
            try:
                real = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
            except (RuntimeError, ValueError) as error:
                if scaling == "rowwise" and formats[1] is E5M2:
                    pytest.skip(f"torch refuses an e5m2 second operand rowwise: {str(error).splitlines()[0]}")
                raise
            ours = fp8_matmul(
                a, b, accumulation="hopper_fast" if fast else "hopper_split",
                scale_a=scale_a, scale_b=scale_b.reshape(-1) if columns else scale_b, out_dtype=dtype,
            )  # fmt: skip
            unequal = int((real != ours).sum())
            assert unequal == 0, (
                f"seed {seed}: {unequal} of {m * n} outputs differ, largest by {float((real - ours).abs().max()):.3g}; "
                f"{m}x{n}x{k}, {name_a} by {name_b}, {dtype}"
            )

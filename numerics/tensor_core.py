"""How Hopper's tensor cores and the kernels around them sum products over K, as data.

One step takes `group` products along K and the accumulator, aligns them to the largest exponent among them, cuts each
toward zero `fraction_bits` below it, adds them, and keeps `kept_bits` fraction bits of the normalized sum, again cut toward
zero. `numerics.reference` does that one number at a time, `numerics.accumulate` at speed. Source: H200 outputs, compared bit
for bit (`python benchmarks/exactness.py`), and X. Xie et al., mmasim 2.1.1, which has the same constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numerics.sizes import check_shape, is_whole


@dataclass(frozen=True)
class TensorCore:
    """The summation of one kind of kernel.

    Attributes:
        formats: Formats of the operands that it takes.
        group: Products that one step adds.
        fraction_bits: Fraction bits kept below the largest exponent while a step adds.
        kept_bits: Fraction bits of the accumulator between steps.
        promotion: Elements of K after which the accumulator goes into an FP32 sum and starts again at zero; None for never.
        order: Places inside each 32 elements of K, in the order in which the groups take them; None as they lie.
        split_block: Elements of K in a piece that cuBLAS does not divide when it splits K.
    """

    formats: tuple[str, ...]
    group: int
    fraction_bits: int
    kept_bits: int
    promotion: int | None = None
    order: tuple[int, ...] | None = None
    split_block: int = 128

    @property
    def fits_float32(self) -> bool:
        """Whether a step's sum, in units of its last bit, is a whole number below 2**24."""
        # A significand product is below 4, and there are `group` of them and the accumulator.
        return self.fraction_bits + 2 + self.group.bit_length() <= 24


_FP8 = ("e4m3", "e5m2")
# Below this exponent bf16 and FP16 products are not aligned any further (mmasim: of a zero, -133).
LEAST_EXPONENT = -133

TENSOR_CORES: dict[str, TensorCore] = {
    # FP8 wgmma: 13 bits. `split` is cuBLAS and CUTLASS without fast accumulation.
    "hopper_fast": TensorCore(_FP8, 32, 13, 13),
    "hopper_split": TensorCore(_FP8, 32, 13, 13, promotion=128),
    # FP8 through FP16 mma.sync, as Triton does for tiles of fewer than 64 rows: a thread's register holds four FP8 values
    # of K, of which the first mma takes the first two and the second the others.
    "hopper_mma": TensorCore(_FP8, 16, 25, 23, order=tuple(sorted(range(32), key=lambda place: (place % 4 > 1, place)))),
    "hopper_bf16": TensorCore(("bf16",), 16, 25, 23, split_block=64),
}
ACCUMULATIONS = (*TENSOR_CORES, "fp32", "exact")


def split_parts(k: int, split_k: int, block: int, align: int = 1) -> list[slice]:
    """The parts of K that cuBLAS (CUDA 13.0) sums apart.

    K over the parts, cut to a whole number and then rounded up to whole blocks, `align` of them at a time. Where the parts fall
    short of K by a remainder of that first division, the last of K is in no part: so it is on an H200, and the result lacks it
    (16 of K = 82,960 in 24 parts, 16 of 38,416 in bf16 in 30; `tests/gpu/test_accumulate.py` shows it).

    Raises:
        ValueError: `split_k` is not positive.
    """
    if not is_whole(split_k):
        raise ValueError(f"split_k = {split_k!r}; give the number of parts that K is split into, 1 for none")
    length = max(math.ceil(math.ceil(k // split_k / block) / align), 1) * align * block
    return [slice(start, min(start + length, k)) for start in range(0, k, length)][:split_k]


def estimated_split_k(m: int, n: int, k: int) -> int:
    """Parts into which cuBLAS splits K of an FP8 tensorwise GEMM on an H200: an estimate from its shape.

    cuBLAS (CUDA 13.0) splits when K has over 40 blocks of 128 and few tiles of 64 x 32 outputs would leave multiprocessors
    idle: into about a part per 20 blocks, as long as all parts' tiles fit the 132 multiprocessors. How often this is the
    real number is measured by `python benchmarks/exactness.py`; rowwise kernels do not split.

    Raises:
        ValueError: a size is no positive whole number.
    """
    check_shape((m, n, k))
    blocks = math.ceil(k / 128)
    tiles = min(math.ceil(m / 64) * math.ceil(n / 32), math.ceil(n / 64) * math.ceil(m / 32))
    parts = min(blocks // 20, 132 // tiles)
    if blocks <= 40 or parts < 2:
        return 1
    return math.ceil(blocks / math.ceil(blocks / parts))

"""GEMM shapes as large recommendation models have them, drawn from a seed.

Three kinds: activations by weights (M = batch, or batch times feature rows), weight gradients (K = that), and the
batched products of explicit feature interactions. About one feature size in ten is no multiple of 16 (13 dense inputs,
a 1-wide prediction, the 479 of DLRM's interaction), where only bf16 is legal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from hil.kernels.base import Shape
from perfmodel.choice import LARGE_FLOP, LARGE_VALUES

_ROUND_FEATURES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_ODD_FEATURES = (1, 2, 10, 13, 26, 27, 39, 100, 351, 367, 479, 845, 1000, 3337, 6045)
_MAX_FLOPS, _MAX_OPERAND = LARGE_FLOP, LARGE_VALUES
# Of the shapes of the largest batches alone.
_LARGEST_FLOPS, _LARGEST_OPERAND, _LARGEST_OUTPUT = 2e13, 2**31, 2**30


def _log_uniform(rng: np.random.Generator, smallest: int, largest: int) -> float:
    return float(np.exp(rng.uniform(np.log(smallest), np.log(largest))))


def _to_multiple(value: float, step: int) -> int:
    """The multiple of a step next to a size, at least the step."""
    return step * max(1, round(value / step))


def _feature(rng: np.random.Generator, largest: int = 8192, odd: float = 0.08) -> int:
    draw = rng.random()
    if draw < odd:
        choice = [f for f in _ODD_FEATURES if f <= largest]
        return int(rng.choice(choice))
    if draw < 0.6:
        choice = [f for f in _ROUND_FEATURES if f <= largest]
        return int(rng.choice(choice))
    return _to_multiple(_log_uniform(rng, 16, largest), 16)


def _rows(rng: np.random.Generator, smallest: int = 256, largest: int = 65536) -> int:
    if rng.random() < 0.6:
        exponents = np.arange(np.log2(smallest), np.log2(largest) + 1)
        return int(2 ** rng.choice(exponents))
    return _to_multiple(_log_uniform(rng, smallest, largest), 64)


def gemm_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct GEMM shapes: 45% batch as M, 30% batch as K, 25% with rows far above the batch on one of them.

    M (or K, for a weight gradient) is 256 to 65,536; up to 524,288 with features of at most 1,024, as where a layer acts
    on every feature of every sample.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        draw = rng.random()
        tall = draw >= 0.75
        rows = _rows(rng, 16384, 524288) if tall else _rows(rng)
        first, second = (_feature(rng, 1024 if tall else 8192) for _ in range(2))
        as_k = (0.45 <= draw < 0.75) or draw >= 0.88
        shape = Shape(first, second, rows) if as_k else Shape(rows, first, second)
        if (
            2.0 * shape.m * shape.n * shape.k <= _MAX_FLOPS
            and max(shape.m * shape.k, shape.n * shape.k, shape.m * shape.n) <= _MAX_OPERAND
        ):
            shapes[shape] = None
    return list(shapes)


def tall_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct GEMM shapes of layers that act on every feature of every sample of a large batch.

    Rows 131,072 to 2,097,152, as M or (four in ten) as K; features at most 512.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        rows = _rows(rng, 131072, 2097152)
        first, second = (_feature(rng, 512) for _ in range(2))
        shape = Shape(first, second, rows) if rng.random() < 0.4 else Shape(rows, first, second)
        if max(shape.m * shape.k, shape.n * shape.k, shape.m * shape.n) <= _MAX_OPERAND:
            shapes[shape] = None
    return list(shapes)


def wide_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct GEMM shapes of very wide layers: one feature size of 4,096 to 32,768, the other of 64 or more.

    Rows 256 to 16,384, as M or (three in ten) as K.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        rows = _rows(rng, 256, 16384)
        wide = 256 * max(16, round(_log_uniform(rng, 4096, 32768) / 256))
        pair = [wide, max(64, _feature(rng, 16384, 0.05))]
        first, second = pair if rng.random() < 0.5 else pair[::-1]
        shape = Shape(first, second, rows) if rng.random() < 0.3 else Shape(rows, first, second)
        if 2.0 * shape.m * shape.n * shape.k <= 2 * _MAX_FLOPS:
            shapes[shape] = None
    return list(shapes)


def large_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct GEMM shapes of the largest batches: over 2.2 TFLOP, or an operand of over 2^29 values, which no other has.

    4 in 10 are layers that act on every feature of every sample, of 524,288 to 8,388,608 rows, as M or (four in ten) as K, and 16
    to 2,048 features; 3 in 10 wide layers of 4,096 to 65,536 rows; the rest products of 8 to 512, one a sample or several.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        draw, as_k = rng.random(), rng.random() < 0.4
        if draw < 0.7:
            tall = draw < 0.4
            rows = _rows(rng, *((524288, 8388608) if tall else (4096, 65536)))
            first, second = (_feature(rng, 2048, 0.05) if tall else 128 * int(rng.integers(16, 257)) for _ in range(2))
            shape = Shape(first, second, rows) if as_k else Shape(rows, first, second)
        else:
            m, n, k = (_to_multiple(_log_uniform(rng, 8, 512), 8) for _ in range(3))
            shape = Shape(m, n, k, _rows(rng, 8192, 262144))
        work, output = 2.0 * shape.groups * shape.m * shape.n * shape.k, shape.groups * shape.m * shape.n
        large = work > _MAX_FLOPS or shape.largest_operand > _MAX_OPERAND
        if large and work <= _LARGEST_FLOPS and shape.largest_operand <= _LARGEST_OPERAND and output <= _LARGEST_OUTPUT:
            shapes[shape] = None
    return list(shapes)


def short_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct GEMM shapes of large results (M N from 2^20) of a short K, as layers on every embedding have them.

    M 512 to 524,288, N up to 32,768, in three of ten exchanged; K up to 512. Sizes are features or multiples of 1 to 64, of M
    powers of two, too.
    """
    rng = np.random.default_rng(seed)

    def size(smallest: int, largest: int) -> int:
        return _to_multiple(_log_uniform(rng, smallest, largest), int(2 ** min(6, int(rng.integers(0, 12)))))

    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        rows = _rows(rng, 512, 524288) if rng.random() < 0.5 else size(512, 524288)
        columns = _feature(rng, 16384, 0.02) if rng.random() < 0.4 else size(64, 32768)
        k = _feature(rng, 512, 0.05) if rng.random() < 0.5 else _to_multiple(_log_uniform(rng, 8, 512), 16)
        shape = Shape(columns, rows, k) if rng.random() < 0.3 else Shape(rows, columns, k)
        if 2**20 <= rows * columns <= _MAX_OPERAND and 2.0 * rows * columns * k <= _MAX_FLOPS:
            shapes[shape] = None
    return list(shapes)


def _odd_size(rng: np.random.Generator, largest: int) -> int:
    value = _log_uniform(rng, 1, largest)
    if rng.random() < 0.2:
        return int(2 ** round(np.log2(value)))
    return _to_multiple(value, int(2 ** rng.integers(0, 7)))


def odd_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct GEMM shapes of any sizes, which layers seldom have, with divisors from 1 to 64 and powers of two alike.

    One side of 1 to 1,048,576 as M (half of them), as K (three in ten) or no larger than the others; those 1 to 16,384.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        draw, first, second = rng.random(), _odd_size(rng, 16384), _odd_size(rng, 16384)
        rows = _odd_size(rng, 1048576 if draw < 0.8 else 16384)
        shape = Shape(first, second, rows) if 0.5 <= draw < 0.8 else Shape(rows, first, second)
        work = 2.0 * shape.m * shape.n * shape.k
        if max(shape.m * shape.k, shape.n * shape.k, shape.m * shape.n) <= _MAX_OPERAND and work <= _MAX_FLOPS:
            shapes[shape] = None
    return list(shapes)


def batched_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct batched GEMMs: one small product per sample, 256 to 16,384 samples."""
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    sizes = (1, 8, 13, 16, 24, 26, 27, 32, 48, 64, 96, 128, 160, 192, 256)
    while len(shapes) < count:
        m, n, k = (int(rng.choice(sizes)) if rng.random() < 0.7 else int(rng.integers(4, 320)) for _ in range(3))
        shape = Shape(m, n, k, _rows(rng, 256, 16384))
        if shape.groups * max(m * k, n * k, m * n) <= _MAX_OPERAND // 2:
            shapes[shape] = None
    return list(shapes)


def interaction_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct batched GEMMs as explicit interactions have them: sizes mostly multiples of 8, groups 256 to 65,536."""
    rng = np.random.default_rng(seed)

    def size() -> int:
        draw = rng.random()
        if draw < 0.5:
            return int(rng.choice((8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)))
        if draw < 0.8:
            return _to_multiple(_log_uniform(rng, 8, 512), 8)
        return int(rng.choice((1, 2, 4, 13, 26, 27, 36, 39, 100, 351)))

    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        m, n, k, groups = size(), size(), size(), _rows(rng, 256, 65536)
        work = 2.0 * groups * m * n * k
        if groups * max(m * k, n * k, m * n) <= _MAX_OPERAND and work <= _MAX_FLOPS:
            shapes[Shape(m, n, k, groups)] = None
    return list(shapes)


def grouped_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct grouped GEMMs of experts, task towers and layers of one feature each: 2 to 512 groups of equal rows.

    Forward and input gradients have the batch as M of every group, weight gradients (three in ten) as K. N and K are
    multiples of 16, so that FP8 is legal.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        groups = int(rng.choice((2, 4, 8, 16, 26, 32, 64, 128, 256, 512)))
        rows, (first, second) = _rows(rng, 64, 16384), (_feature(rng, 2048, 0.0) for _ in range(2))
        shape = Shape(first, second, rows, groups) if rng.random() < 0.3 else Shape(rows, first, second, groups)
        work = 2.0 * groups * shape.m * shape.n * shape.k
        if groups * max(shape.m * shape.k, shape.n * shape.k, shape.m * shape.n) <= _MAX_OPERAND and work <= _MAX_FLOPS:
            shapes[shape] = None
    return list(shapes)


def tower_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct batched GEMMs of a few towers or features each: as `grouped_shapes`, of any sizes, few of which FP8 takes.

    2 to 512 groups; rows 16 to 65,536 as M or (four in ten) 256 to 262,144 as K of every group; N and K 1 to 2,048.
    """
    rng = np.random.default_rng(seed)

    def size(smallest: int, largest: int) -> int:
        return _to_multiple(_log_uniform(rng, smallest, largest), int(2 ** rng.integers(0, 6)))

    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        groups, as_k = round(_log_uniform(rng, 2, 512)), rng.random() < 0.4
        smallest, largest = (256, 262144) if as_k else (16, 65536)
        rows = _rows(rng, smallest, largest) if rng.random() < 0.5 else size(smallest, largest)
        first, second = (_feature(rng, 2048, 1.0) if rng.random() < 0.4 else size(1, 2048) for _ in range(2))
        shape = Shape(first, second, rows, groups) if as_k else Shape(rows, first, second, groups)
        work = 2.0 * groups * shape.m * shape.n * shape.k
        if groups * max(shape.m * shape.k, shape.n * shape.k, shape.m * shape.n) <= _MAX_OPERAND and work <= _MAX_FLOPS:
            shapes[shape] = None
    return list(shapes)


def odd_batched_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct batched GEMMs of any sizes, divisors as `odd_shapes`: 2 to 65,536 products, N and K 1 to 4,096.

    M 1 to 4,096, too; in one of four 1 to 65,536 as M, in another as K.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        draw, groups = rng.random(), max(2, _odd_size(rng, 65536))
        first, second, rows = _odd_size(rng, 4096), _odd_size(rng, 4096), _odd_size(rng, 65536 if draw < 0.5 else 4096)
        shape = Shape(first, second, rows, groups) if draw < 0.25 else Shape(rows, first, second, groups)
        if shape.largest_operand <= _MAX_OPERAND and 2.0 * groups * shape.m * shape.n * shape.k <= _MAX_FLOPS:
            shapes[shape] = None
    return list(shapes)


def _written_size(rng: np.random.Generator, smallest: int, largest: int) -> int:
    """A size as people write one down: by steps of an octave, by digits, a multiple of 16, or any."""
    value, draw = _log_uniform(rng, smallest, largest), rng.random()
    if draw < 0.3:
        step = 2.0 ** (np.floor(np.log2(value)) - 2)
    elif draw < 0.6:
        step = 10.0 ** (np.floor(np.log10(value)) - int(rng.integers(0, 2)))
    else:
        step = 16.0 if draw < 0.8 else 1.0
    return max(1, round(max(1, round(value / step)) * step))


def any_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct GEMMs as people write sizes down, to judge by: no other draw, and nothing fitted, is rounded so.

    Sizes are log-uniform: 3 in 10 brought to four steps an octave, 3 in 10 to one or two decimal digits, 2 in 10 to multiples of
    16, 2 in 10 left as they are; in half of the shapes N and K are multiples of 16 besides. 7 in 10 are single, M 64 to 524,288,
    N and K 16 to 16,384; the others 2 to 4,096 products, M and N 8 to 2,048, K 8 to 4,096. In 3 of 10 M and K are exchanged.
    """
    rng = np.random.default_rng(seed)
    size = partial(_written_size, rng)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        single, aligned, swapped = (rng.random() < share for share in (0.7, 0.5, 0.3))
        if single:
            m, n, k, groups = size(64, 524288), size(16, 16384), size(16, 16384), 1
        else:
            m, n, k, groups = size(8, 2048), size(8, 2048), size(8, 4096), size(2, 4096)
        if swapped:
            m, k = k, m
        if aligned:
            n, k = _to_multiple(n, 16), _to_multiple(k, 16)
        shape = Shape(m, n, k, groups)
        if shape.largest_operand <= _MAX_OPERAND // 2 and 2.0 * groups * m * n * k <= _MAX_FLOPS:
            shapes[shape] = None
    return list(shapes)


def broad_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct GEMMs large and small of sizes between the round ones: log-uniform, not brought to what is usual.

    M is of any divisor; N and K are multiples of 16 together (65%), of 8 together (15%), or each as it falls. Three in four are
    single, M 32 to 524,288, N and K 16 to 16,384; the others 2 to 4,096 products, M and N 8 to 2,048, K 8 to 8,192. In three of
    ten M and K are exchanged.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        single, draw, swapped = rng.random() < 0.75, rng.random(), rng.random() < 0.3
        ends = ((32, 524288), (16, 16384), (16, 16384)) if single else ((8, 2048), (8, 2048), (8, 8192))
        m, n, k = (round(_log_uniform(rng, smallest, largest)) for smallest, largest in ends)
        if swapped:
            m, k = k, m
        if draw < 0.8:
            n, k = (_to_multiple(size, 16 if draw < 0.65 else 8) for size in (n, k))
        shape = Shape(m, n, k, 1 if single else round(_log_uniform(rng, 2, 4096)))
        if shape.largest_operand <= _MAX_OPERAND and 2.0 * shape.groups * shape.m * shape.n * shape.k <= _MAX_FLOPS:
            shapes[shape] = None
    return list(shapes)


def mixed_shapes(count: int, seed: int) -> list[Shape]:
    """`gemm_shapes` with a tenth as many `batched_shapes` spread among them."""
    shapes = gemm_shapes(count, seed)
    batched = batched_shapes(max(1, count // 10), seed)
    step = max(1, len(shapes) // len(batched))
    for position, shape in enumerate(batched):
        shapes.insert(position * (step + 1), shape)
    return shapes


def _operands(count: int, seed: int, draw: Callable[[np.random.Generator], tuple[int, int]]) -> list[Shape]:
    """`count` distinct (rows, columns) as a draw has them, of up to 2^28 values."""
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        rows, columns = draw(rng)
        if rows * columns <= _MAX_OPERAND // 2:
            shapes[Shape(rows, 1, columns)] = None
    return list(shapes)


def memory_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct (rows, columns) of operands that GEMMs read: activations, gradients and weights.

    Rows 256 to 524,288 for activations, features for weights (three in ten).
    """

    def draw(rng: np.random.Generator) -> tuple[int, int]:
        kind = rng.random()
        if kind < 0.3:
            return _feature(rng, odd=0.0), _feature(rng, odd=0.0)
        if kind < 0.5:
            return _rows(rng, 16384, 524288), _feature(rng, 1024, odd=0.0)
        return _rows(rng), _feature(rng, odd=0.0)

    return _operands(count, seed, draw)


def large_memory_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct (rows, columns) of the largest batches: over 524,288 rows, or over 2^28 values; up to 2^30 values.

    Seven in ten are of layers that act on every feature of every sample, up to 8,388,608 rows of 16 to 1,024 columns; the others
    8,192 to 131,072 rows of multiples of 128 columns, 2,048 or more.
    """
    rng = np.random.default_rng(seed)
    shapes: dict[Shape, None] = {}
    while len(shapes) < count:
        if rng.random() < 0.7:
            rows, columns = _rows(rng, 524288, 8388608), _feature(rng, 1024, 0.05)
        else:
            rows, columns = _rows(rng, 8192, 131072), _to_multiple(_log_uniform(rng, 2048, 65536), 128)
        if (rows > 524288 or rows * columns > _MAX_OPERAND // 2) and rows * columns <= 2 * _MAX_OPERAND:
            shapes[Shape(rows, 1, columns)] = None
    return list(shapes)


def wide_memory_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct (rows, columns) of the operands of `wide_shapes`."""
    operands: dict[Shape, None] = {}
    for shape in wide_shapes(4 * count, seed):
        for rows, columns in ((shape.m, shape.k), (shape.n, shape.k)):
            if max(rows, columns) > 8192 and rows * columns <= _MAX_OPERAND // 2:
                operands[Shape(rows, 1, columns)] = None
    return list(operands)[:count]


def narrow_memory_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct (rows, columns) at the edges: inputs and outputs of few or odd features, few rows, small weights.

    Rows 256 to 524,288 of 1 to 96 or an odd number of columns; 1 to 1,024 rows of up to 16,384 columns; weights of such layers.
    """

    def few(rng: np.random.Generator, largest: int) -> int:
        return int(_log_uniform(rng, 1, largest + 1))

    def draw(rng: np.random.Generator) -> tuple[int, int]:
        kind = rng.random()
        if kind < 0.5:
            return _rows(rng, 256, 524288), few(rng, 96) if rng.random() < 0.8 else _feature(rng, odd=1.0)
        if kind < 0.8:
            return few(rng, 1024), _feature(rng, 16384, odd=0.3)
        return _feature(rng, 2048, odd=0.3), _feature(rng, odd=0.5)

    return _operands(count, seed, draw)


def any_memory_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct (rows, columns) as people write sizes down, to judge by: rounded as `any_shapes`, as nothing fitted is.

    Rows 16 to 1,048,576, columns 8 to 16,384.
    """
    return _operands(count, seed, lambda rng: (_written_size(rng, 16, 1048576), _written_size(rng, 8, 16384)))


def broad_memory_shapes(count: int, seed: int) -> list[Shape]:
    """`count` distinct (rows, columns) between the round ones: log-uniform, rows 16 to 1,048,576, columns 8 to 16,384.

    3 in 10 sizes are left as they fall, the others are multiples of 2, 4, ... 128, each alike often.
    """

    def size(rng: np.random.Generator, smallest: int, largest: int) -> int:
        return _to_multiple(_log_uniform(rng, smallest, largest), 2 ** max(0, int(rng.integers(-2, 8))))

    return _operands(count, seed, lambda rng: (size(rng, 16, 1048576), size(rng, 8, 16384)))


# Sweeps that can be drawn, by family and name, with how many shapes they take by default.
SWEEPS = {
    ("gemm", "lrm"): (mixed_shapes, 4000),
    ("gemm", "tall"): (tall_shapes, 500),
    ("gemm", "wide"): (wide_shapes, 500),
    ("gemm", "large"): (large_shapes, 160),
    ("gemm", "odd"): (odd_shapes, 700),
    ("gemm", "odd_batched"): (odd_batched_shapes, 700),
    ("gemm", "interaction"): (interaction_shapes, 1600),
    ("gemm", "grouped"): (grouped_shapes, 500),
    ("gemm", "tower"): (tower_shapes, 1600),
    ("gemm", "any"): (any_shapes, 400),
    ("gemm", "broad"): (broad_shapes, 1000),
    ("memory", "lrm"): (memory_shapes, 320),
    ("memory", "wide"): (wide_memory_shapes, 100),
    ("memory", "narrow"): (narrow_memory_shapes, 120),
    ("memory", "large"): (large_memory_shapes, 60),
    ("memory", "any"): (any_memory_shapes, 60),
    ("memory", "broad"): (broad_memory_shapes, 60),
}

"""How a memory-bound kernel is launched: what torch.compile and our own kernels work out from a size before they run.

A kernel's time jumps where its launch does: a reduction that is cut into parts that are not even, a row that does not fill its
block, a program more than the GPU runs at once. These rules say where, for the model to learn by how much.

torch.compile (2.11; `torch/_inductor/choices.py`, `reduction_split_factor`, and `ir.py`, `Reduction.num_splits`) cuts a reduction
with few results into parts, which a second kernel reduces. Our own kernels are in `numerics/gpu*.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
Columns = dict[str, Array]

# Of an H200: multiprocessors and their threads. torch.compile's rule: elements a thread reduces, at least and at most, threads
# of a program, results from which on a reduction along memory or across it is not cut, and the length of one that never is.
_MULTIPROCESSORS, _THREADS = 132, 2048
_LEAST, _MOST, _PROGRAM = 32, 512, 256
_WHOLE_INNER, _WHOLE_OUTER, _WHOLE_LENGTH = 2 * _MULTIPROCESSORS, 2 * 32 * _MULTIPROCESSORS, 8192
# A divisor this near to the wanted size of a part is taken instead.
_NEAR_INNER, _NEAR_OUTER, _NEAR_MOST = 30, 20, 50
_LEAST_ROWS, _MOST_ROWS = 16, 128  # that a program of a kernel takes which sums both ways
_RESULTS = 4  # that a reduction has at most: gradients of a norm's weight and bias, beside what is reduced with them


def _ceil(size: Whole, divisor: Whole | int) -> Whole:
    return -(-size // divisor)


def _next_power(size: Whole) -> Whole:
    return 1 << np.ceil(np.log2(np.maximum(size, 1))).astype(np.int64)


def _power_in(size: Whole, most: int = 1 << 20) -> Array:
    """log2 of the largest power of two that divides a size, at most `most`."""
    return np.log2(np.minimum(size & -size, most))


def _near_divisor(size: Whole, wanted: Whole, reach: int) -> Whole:
    """The divisor of each size that is nearest to what is wanted, of two the smaller; 0 where none is nearer than `reach`."""
    found, left = np.zeros_like(size), np.arange(len(size))
    for distance in range(reach):
        for candidate in (wanted - distance, wanted + distance):
            tried = np.maximum(candidate[left], 1)
            fits = (candidate[left] > 0) & (size[left] % tried == 0)
            found[left[fits]] = tried[fits]
            left = left[~fits]
    return found


def _parts(length: Whole, results: Whole, inner: bool) -> Whole:
    """Parts into which torch.compile cuts each reduction: `results` of `length` elements, that lie side by side or far apart."""
    total, device = length * results, _MULTIPROCESSORS * _THREADS
    if inner:
        each, near = _PROGRAM, _NEAR_INNER
        programs = _ceil(np.full_like(results, device // (2 * _PROGRAM)), results)
        whole = (results >= _WHOLE_INNER) | (length <= _WHOLE_LENGTH)
    else:
        each, near = 4, _NEAR_OUTER
        programs = _ceil(np.full_like(results, device // _PROGRAM), _ceil(results, 128))
        whole = (results >= _WHOLE_OUTER) | (length <= _LEAST)
    size = np.full_like(length, _LEAST)
    some = np.flatnonzero(~whole & (total >= _LEAST * device) & (total < _MOST * device))
    wanted = _ceil(length, each * programs)[some]
    divisor = _near_divisor(length[some], wanted, near)
    size[some] = np.where(divisor > 0, np.maximum(divisor, _LEAST), wanted)
    many = np.flatnonzero(~whole & (total >= _MOST * device))
    divisor = _near_divisor(length[many], np.full_like(many, _MOST), _NEAR_MOST)
    size[many] = np.where(divisor > 0, divisor, _MOST)
    return np.where(whole, 1, _ceil(length, each * size))


def stages(kinds: npt.ArrayLike, kept: npt.ArrayLike, reduced: npt.ArrayLike, written_bytes: npt.ArrayLike) -> Whole:
    """Kernels that torch.compile makes of fused kernels: a cut reduction's parts are added up by one more for each result.

    Args:
        kinds: As of `perfmodel.fused`: `row` reduces along memory, `column` across it; `both` has `partial_sums`.
        kept: Elements of a result.
        reduced: Elements that are reduced for each of them.
        written_bytes: Of all results together, in bf16.
    """
    names = np.asarray(kinds, dtype=np.str_)
    results, length, written = (np.maximum(np.asarray(of, dtype=np.int64), 1) for of in (kept, reduced, written_bytes))
    found = np.ones(len(names), dtype=np.int64)
    for kind in ("row", "column"):
        mine = names == kind
        cut = np.flatnonzero(mine)[_parts(length[mine], results[mine], kind == "row") > 1]
        # What also writes its elements has few results beside.
        found[cut] += np.clip(written[cut] // (2 * results[cut]), 1, _RESULTS)
    return found


def partial_sums(kept: npt.ArrayLike, reduced: npt.ArrayLike, written_bytes: npt.ArrayLike) -> tuple[Whole, Whole]:
    """Of kernels that reduce both ways at once: the parts that each leaves of a sum over all rows, and how many such sums it has.

    torch itself adds the parts up afterwards (`torch/_inductor/codegen/simd.py`, `_codegen_mix_order_reduction`, 2.11 and 2.13).

    Args:
        kept: Rows.
        reduced: Elements of a row.
        written_bytes: Of elements in one byte or two, and of the sums in two.
    """
    rows, columns, written = (np.maximum(np.asarray(of, dtype=np.int64), 1) for of in (kept, reduced, written_bytes))
    each = np.clip(_next_power(rows // (8 * _MULTIPROCESSORS) + 1) // 2, _LEAST_ROWS, _MOST_ROWS)
    return _ceil(rows, each), np.clip(written % (rows * columns) // (2 * columns), 1, _RESULTS)


def _cut(name: str, length: Whole, results: Whole, inner: bool) -> Columns:
    """What a cut reduction is like: its parts, whether they are even, how a part is aligned, and how full the GPU is."""
    parts = _parts(length, results, inner)
    part = _ceil(length, parts)
    waves = parts * results / (4 * _MULTIPROCESSORS) if inner else parts * np.ceil(results / 64) / (8 * _MULTIPROCESSORS)
    return {
        f"{name}_parts": parts.astype(float), f"{name}_even": (length % parts == 0).astype(float),
        f"{name}_align_part": _power_in(part), f"{name}_part": part.astype(float),
        f"{name}_wave_fill": waves / np.ceil(waves),
    }  # fmt: skip


def _programs(programs: Whole, at_once: int, **more: Array) -> Columns:
    """Programs of a launch, of which a multiprocessor runs this many at once."""
    waves = programs / (at_once * _MULTIPROCESSORS)
    filled = {"programs": programs.astype(float), "waves": np.ceil(waves), "wave_fill": waves / np.ceil(waves)}
    return {**filled, **more}


def run_height(rows: Whole, length: Whole) -> Whole:
    """Rows that a program of our quantizers of rows takes at once."""
    width = _next_power(length)
    return np.maximum(np.minimum(np.maximum(2048 // width, 1), _next_power(rows)), 128 // width)


def _apart(columns: Whole) -> Array:
    """How far words of two columns are moved by themselves, 1, or 0 where a vector of four is.

    Our kernels know the power of two in a row's length (`numerics.sizes.unit_of`): where 8 does not divide its columns, a mask
    keeps words from going together.
    """
    return np.where(columns % 2, 0.0, 1 - (_power_in(columns, 8) - 1) / 2)


def _runs(rows: Whole, length: Whole, odd: Array) -> Columns:
    """Our quantizers of rows: as many to a program as fill it, unmasked where they fit (`numerics.gpu_words`, `numerics.gpu`)."""
    width, height = _next_power(length), run_height(rows, length)
    even = (width == length) & (rows % height == 0)
    fill = rows * length / (_ceil(rows, height) * height * width)
    unmasked = np.where(even, 1.0, np.where(length % 2, 0.0, 1 - _apart(length)))
    return _programs(_ceil(rows, height), 8, unmasked=unmasked, even=even.astype(float), fill=fill, odd=odd)


def _odd(rows: Whole, columns: Whole) -> Columns:
    """What a turned result cannot be cast by: rows four at a time (it is copied then), columns two or eight at a time."""
    return {"odd": (columns % 2 > 0).astype(float), "copied": (rows % 4 > 0).astype(float), "by_word": _apart(columns)}


def _tiles(rows: Whole, columns: Whole, at_once: int, wide: int = 128) -> Columns:
    """Tiles of 128 rows, 128 or `wide` columns each, of which the programs that run at once may take several."""
    tiles = _ceil(rows, 128) * _ceil(columns, wide)
    return _programs(tiles, at_once, fill=rows * columns / (tiles * 128 * wide), **_odd(rows, columns))


def few_lines(rows: Whole, columns: Whole) -> npt.NDArray[np.bool_]:
    """Where programs of a cast reduce the maxima of all tiles of their lines (`numerics.gpu_tiles.takes_lines`)."""
    small = (rows * columns <= 2**23) & (np.maximum(_ceil(rows, 128), _ceil(columns, 128)) <= 64)
    return small & (rows % 4 == 0) & (columns % 2 == 0)


def _both_of_lines(rows: Whole, columns: Whole) -> Columns:
    """Both layouts under scales of lines: a search and a cast of tiles, or a launch apart that makes scales of maxima."""
    few, tiles = few_lines(rows, columns), _tiles(rows, columns, 3)
    down, across = _ceil(rows, 128).astype(float), _ceil(columns, 128).astype(float)
    searched = {**tiles, "down": down, "across": across, "chunk": np.full_like(down, 128), "line_fill": tiles["fill"]}
    apart = {**_tiles(rows, columns, 2), **_lines(rows, columns)}
    return {name: np.where(few, searched[name], column) for name, column in apart.items()}


def _strips(rows: Whole, columns: Whole) -> Columns:
    """Strips of 64 columns that programs share, of which a multiprocessor runs four at once (`numerics.gpu_strips`)."""
    strips, most = _ceil(columns, 64), 4 * _MULTIPROCESSORS
    members = np.minimum(_next_power(_ceil(rows, 512)), 512)
    for _ in range(10):
        members = np.where((2 * strips * members <= most) & (members * 128 < rows), 2 * members, members)
    steps = _ceil(rows, members * 128)
    fill = rows * columns / (strips * members * steps * 128 * 64)
    counts = {"members": members.astype(float), "steps": steps.astype(float)}
    return _programs(strips * members, 4, fill=fill, **counts, **_odd(rows, columns))


def _lines(rows: Whole, columns: Whole) -> Columns:
    """The search for maxima of rows and of columns by programs of a warp (`numerics.gpu.line_scales`)."""
    across = _ceil(columns, 256)
    chunk = 16 * _ceil(_ceil(rows, 16) * across, 2112)
    down = _ceil(rows, chunk)
    fill = rows * columns / (across * down * chunk * 256)
    return {"down": down.astype(float), "across": across.astype(float), "chunk": chunk.astype(float), "line_fill": fill}


def _flat(size: Whole, block: int, at_once: int, vector: int) -> Columns:
    """Blocks of a flat tensor: read by vectors where these divide it, else by words, of an odd size value by value."""
    blocks = _ceil(size, block)
    by_word, odd = (size % vector > 0).astype(float), (size % 2 > 0).astype(float)
    unmasked = (size % block == 0).astype(float)
    return _programs(blocks, at_once, fill=size / (blocks * block), odd=odd, by_word=by_word, unmasked=unmasked)


def _loka(what: str, rows: Whole, columns: Whole) -> Columns:
    size = rows * columns
    odd_columns = (columns % 2 > 0).astype(float)
    if what == "rowwise":
        return _runs(rows, columns, odd_columns)
    if what == "block1x128":
        return _runs(np.maximum(size // 128, 1), np.full_like(rows, 128), odd_columns)
    if what == "tensorwise":
        return _flat(size, 8192, 2, vector=32)
    if what == "tensorwise_delayed":
        return _flat(size, 8192, 4, vector=16)
    if what == "rowwise_transposed":
        # Words of two columns are what strips are made of: an odd number of them goes the way of both layouts.
        return {**_strips(rows, columns), **{name: odd_columns * count for name, count in _lines(rows, columns).items()}}
    if what == "rowwise_dual":
        return _both_of_lines(rows, columns)
    if what == "block1x128_dual":
        return _tiles(rows, columns, 3)
    if what == "block1x128_transposed":
        return _tiles(rows, columns, 4, wide=64)
    return _tiles(rows, columns, 2)


def _torch(what: str, rows: Whole, columns: Whole) -> Columns:
    size = rows * columns
    one = np.ones_like(rows)
    across = what == "bias_backward" or what in ("layernorm_backward", "rmsnorm_backward", "quantize_rowwise_transposed")
    along = what in ("quantize_rowwise", "layernorm_forward", "rmsnorm_forward", "layernorm_backward", "rmsnorm_backward")
    found: Columns = {}
    if what.startswith("quantize_tensorwise"):
        found |= _cut("all", size, one, inner=True)
    if across:
        found |= _cut("down", rows, columns, inner=False)
    if along:
        found |= _cut("along", columns, rows, inner=True)
    return found


def plan(kernel: str, m: Array, k: Array) -> Columns:
    """Features of the launch of a kernel on (rows, columns) = (m, k), by name; none of a kernel whose rules are not known."""
    library, _, what = kernel.partition("/")
    rules: dict[str, Callable[[str, Whole, Whole], Columns]] = {"loka": _loka, "torch": _torch}
    if library not in rules:
        return {}
    return rules[library](what.removeprefix("quantize_") if library == "loka" else what, m.astype(np.int64), k.astype(np.int64))


# GPU kernels of a call, where it is not one: by whether torch.compile cuts the reduction that counts, and of ours and FBGEMM's.
_OF_CUT = {
    "quantize_tensorwise": (1, 3), "quantize_tensorwise_transposed": (2, 3), "quantize_rowwise": (1, 2),
    "quantize_rowwise_transposed": (1, 3), "bias_backward": (1, 2), "layernorm_backward": (2, 4), "rmsnorm_backward": (2, 3),
    "layernorm_forward": (1, 2), "rmsnorm_forward": (1, 2),
}  # fmt: skip
_OF_CALL = {"torch/quantize_block1x128_transposed": 2, "fbgemm/quantize_tensorwise": 2}


def launches(kernels: Iterable[str], m: npt.ArrayLike, k: npt.ArrayLike) -> Array:
    """GPU kernels that each call launches, by the names of its kernel and its (rows, columns).

    Told from what calls of several kernels lost when other processes used the GPU beside them: a third of a microsecond each.
    """
    names, rows, columns = np.asarray(list(kernels), dtype=object), np.asarray(m, dtype=float), np.asarray(k, dtype=float)
    found = np.ones(len(names))
    for name in dict.fromkeys(names):
        index = np.flatnonzero(names == name)
        library, _, what = name.partition("/")
        found[index] = _OF_CALL.get(name, 1)
        if name == "loka/quantize_rowwise_dual":
            found[index] = 3.0 - few_lines(rows[index].astype(np.int64), columns[index].astype(np.int64))
        if library == "torch" and what in _OF_CUT:
            known = plan(name, rows[index], columns[index])
            parts = next(known[column] for column in known if column.endswith("_parts"))
            found[index] = np.where(parts > 1, _OF_CUT[what][1], _OF_CUT[what][0])
    return found

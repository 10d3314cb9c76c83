"""A step's loops, forward and backward together: whose GEMM each is, and how a specification's file holds them.

Where products are scaled by their rows and columns where they are read, as torchao's rowwise recipe has it, torch.compile writes
more of what is computed of them: the backward's loops as they are then are lines of the phase `scaled`, if they are others.

A loop is one line of a file: phase, kind, elements kept, elements reduced, flags and shape; operators; what it reads
(`buffer/part:bytes:flags`; w: every element its own, t: in another order than it lies, a: across memory), a part that is fetched
with others as `fetched~part`; what it writes; of a GEMM also its site, pass and operands. Sizes are affine in the batch, as
dimensions are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from loka_sim.errors import UserError
from loka_sim.loops import ACROSS, FETCHED, TURNED, Access, Lowered, Reads, Scheduled
from loka_sim.modelspec import PASSES, Dim, Site, padded

OPERANDS = {"output": ("x", "w"), "grad_input": ("g", "w"), "grad_weight": ("g", "x")}
"""Left and right operand of each pass."""

SCALED = "scaled"
"""The phase of loops that are the backward's where products are scaled behind it."""
COPIES = frozenset({"clone", "constant_pad_nd"})


def joined(graphs: dict[str, Lowered], backward_of: str = "backward") -> Lowered:
    """Forward and backward with one numbering of buffers: what the forward keeps for the backward is one buffer in both."""
    forward, backward = graphs["forward"], graphs.get(backward_of, Lowered())
    step = Lowered([loop.copy(loop.reads) for loop in forward.scheduled], dict(forward.sizes), set(forward.outputs))
    known = {**forward.inputs, **forward.results}
    first = len(step.sizes)
    index = {buffer: first + buffer for buffer in backward.sizes}
    for name, buffer in backward.inputs.items():
        if name in known:
            index[buffer] = known[name]
            step.outputs.discard(known[name])  # it stays because it is read, not because it is a result
    for buffer, size in backward.sizes.items():
        step.sizes.setdefault(index[buffer], size)
    step.outputs |= {index[buffer] for buffer in backward.outputs}
    for loop in backward.scheduled:
        reads = {(index[buffer], part and f"b.{part}"): access for (buffer, part), access in loop.reads.items()}
        writes = {index[buffer]: size for buffer, size in loop.writes.items()}
        operands = {name: (index[b], part and f"b.{part}", numel) for name, (b, part, numel) in loop.operands.items()}
        step.scheduled.append(
            Scheduled(
                loop.label, loop.kind, loop.space, reads, writes, loop.gathers, loop.uneven, loop.operators, True, loop.gemm,
                operands, flat=loop.flat, much=loop.much, shape=loop.shape,
            )
        )  # fmt: skip
    return step


def phases(step: Lowered) -> dict[str, Lowered]:
    """Forward and backward apart: nothing fuses over the loss."""
    result = {}
    for phase, backward in (("forward", False), ("backward", True)):
        loops = [loop for loop in step.scheduled if loop.backward == backward]
        elsewhere = {buffer for loop in step.scheduled if loop.backward != backward for buffer, _ in loop.reads}
        result[phase] = Lowered(loops, step.sizes, step.outputs | elsewhere)
    return result


def find_sites(step: Lowered, sites: Sequence[Site], batch: int) -> set[tuple[str, str]]:
    """Say of each GEMM whose pass it is, by its sizes, its operands and its order; of some that cannot be said.

    Returns:
        Site and pass of those with padded sizes.
    """
    forward = [loop for loop in step.scheduled if loop.gemm and not loop.backward]
    backward = [loop for loop in step.scheduled if loop.gemm and loop.backward]
    copied = _copies(step)
    found: list[tuple[Site, Scheduled]] = []
    for site in sites:
        loop = next((loop for loop in forward if _fits(loop, site, "output", batch)), None)
        if loop is not None:
            forward.remove(loop)
            _name(loop, site, "output", batch)
            found.append((site, loop))
    for site, output in reversed(found):
        gradients: set[int] = set()
        for name, tensor in (("grad_input", "w"), ("grad_weight", "x")):
            if name not in site.passes:
                continue
            # By the tensor of the forward; where the backward computes that anew, by the gradient that both passes read.
            buffer = output.operands[tensor][0]
            buffers = {copied.get(buffer, buffer)} | gradients
            candidates = [loop for loop in backward if _fits(loop, site, name, batch) and _read(loop, copied) & buffers]
            if candidates:
                backward.remove(candidates[0])
                _name(candidates[0], site, name, batch)
                gradient = candidates[0].operands["g"][0]
                gradients = {copied.get(gradient, gradient)}
    by_name, named = {site.name: site for site in sites}, [loop for loop in step.scheduled if loop.site[0]]
    return {loop.site for loop in named if not _same(loop, _sizes(by_name[loop.site[0]], loop.site[1], batch)[0])}


def _copies(step: Lowered) -> dict[int, int]:
    """Of buffers that hold what another one does, in another order or with zeros behind: which."""
    found: dict[int, int] = {}
    for loop in step.scheduled:
        sources = {buffer for buffer, _ in loop.reads}
        if loop.operators <= COPIES and len(sources) == 1:
            (source,) = sources
            found |= dict.fromkeys(loop.writes, found.get(source, source))
    return found


def _read(loop: Scheduled, copied: Mapping[int, int]) -> set[int]:
    return {copied.get(buffer, buffer) for buffer, _, _ in loop.operands.values()}


Sizes = tuple[int, int, int, int]


def _sizes(site: Site, name: str, batch: int) -> tuple[Sizes, Sizes]:
    """Groups, m, n and k of a pass, as they are and padded."""
    groups, (m, n, k) = site.passes[name].groups.at(batch), site.passes[name].shape(batch)
    return (groups, m, n, k), (groups, padded(m), padded(n), padded(k))


def _fits(loop: Scheduled, site: Site, name: str, batch: int) -> bool:
    return any(_same(loop, sizes) for sizes in _sizes(site, name, batch))


def _same(loop: Scheduled, sizes: Sizes) -> bool:
    groups, m, n, k = sizes
    return loop.gemm in ((groups, m, n, k), (groups, n, m, k))


def _name(loop: Scheduled, site: Site, name: str, batch: int) -> None:
    straight = loop.gemm in _sizes(site, name, batch)
    left, right = OPERANDS[name] if straight else reversed(OPERANDS[name])
    loop.operands = {left: loop.operands["left"], right: loop.operands["right"]}
    loop.site = (site.name, name)


# Files.


def line(batches: Sequence[int], sizes: Sequence[int]) -> Dim:
    """The straight line through two sizes, to whole elements or bytes a sample."""
    per_batch = max(0, round((sizes[1] - sizes[0]) / (batches[1] - batches[0])))
    return Dim(sizes[0] - per_batch * batches[0], per_batch)


def without(step: Lowered, unwanted: Callable[[Scheduled], bool]) -> Lowered:
    """The step without some loops; what they would have read leaves it."""
    gone = [loop for loop in step.scheduled if unwanted(loop)]
    rest = [loop for loop in step.scheduled if not any(loop is other for other in gone)]
    return Lowered(rest, step.sizes, step.outputs | {buffer for loop in gone for buffer, _ in loop.reads})


def written(loops: Sequence[Lowered], batches: Sequence[int]) -> tuple[str, ...]:
    """A step's loops as lines, from their sizes at two batches.

    Args:
        loops: The same step at each batch.
        batches: In samples.
    """

    def dim(*sizes: int) -> str:
        return str(line(batches, sizes))

    one, two = loops
    parts: dict[tuple[int, str], str] = {}

    def key(buffer: int, part: str) -> str:
        if not part:
            return str(buffer)
        fetched, _, _ = part.rpartition(FETCHED)
        names = [parts.setdefault((buffer, name), str(len(parts))) for name in ([fetched, part] if fetched else [part])]
        return f"{buffer}/{FETCHED.join(names)}"

    lines = []
    for first, second in zip(one.scheduled, two.scheduled, strict=True):
        flags = "".join(
            flag for flag, on in (("g", first.gathers), ("u", first.uneven), ("m", first.much), ("f", first.flat)) if on
        )
        head = [
            ("forward", "backward")[first.backward],
            first.kind,
            *(dim(*pair) for pair in zip(first.space, second.space, strict=True)),
        ]
        sizes = ",".join(dim(*pair) for pair in zip(first.shape, second.shape, strict=True))
        reads = [
            f"{key(*at)}:{dim(a.read_bytes, b.read_bytes)}:{'w' * a.whole}{('', 't', 'a')[a.turned]}"
            for (at, a), b in zip(first.reads.items(), second.reads.values(), strict=True)
        ]
        writes = [
            f"{buffer}:{dim(a, b)}{':o' * (buffer in one.outputs)}"
            for (buffer, a), b in zip(first.writes.items(), second.writes.values(), strict=True)
        ]
        operators = [first.label, *sorted(first.operators - {first.label})]
        fields = [" ".join([*head, *filter(None, (flags, sizes and f"[{sizes}]"))]), " ".join(operators), " ".join(reads)]
        fields.append(" ".join(writes))
        if first.site[0]:
            named = zip(first.operands.items(), second.operands.values(), strict=True)
            operands = [f"{name}={key(b, part)}:{dim(n, other[2])}" for (name, (b, part, n)), other in named]
            fields += [" ".join(operands), f"{first.site[1]} {first.site[0]}"]
        lines.append(" | ".join(fields))
    made = {buffer for loop in one.scheduled for buffer in loop.writes}
    given = sorted({buffer for buffer, _ in parts} - made)
    inputs = [f"{buffer}:{dim(one.sizes[buffer], two.sizes[buffer])}" for buffer in given]
    return (f"forward input 0 0 | | | {' '.join(inputs)}", *lines)


def read(lines: Sequence[str], batch: int, scaled: bool = False) -> Lowered:
    """A step's loops at a batch, from a file's lines.

    Args:
        lines: Of the file.
        batch: In samples.
        scaled: The backward's loops are those of products that are scaled where they are read.

    Raises:
        UserError: a line is none.
    """
    step = Lowered()
    scaled = scaled and any(line.startswith(SCALED) for line in lines)
    left_out = "backward" if scaled else SCALED
    for number, line in enumerate(lines):
        if line.startswith(left_out):
            continue
        try:
            _read_line(step, line, batch)
        except (ValueError, KeyError, IndexError) as error:
            raise UserError(f"loops[{number}]: {str(error)[:80]}; capture the model again, or leave `loops` out") from None
    for loop in step.scheduled:
        for (buffer, _), access in loop.reads.items():
            step.sizes[buffer] = max(step.sizes.get(buffer, 0), access.read_bytes)
    return step


def _read_line(step: Lowered, line: str, batch: int) -> None:
    head, operators, reads, writes, *rest = (part.strip() for part in line.split("|"))
    phase, kind, kept, reduced, *flags = head.split()
    found: Reads = {}
    for text in reads.split():
        at, size, how = text.split(":")
        turned = ACROSS if "a" in how else TURNED if "t" in how else 0
        found[_key(at)] = Access(_at(size, batch), "w" in how, turned)
    made = {}
    for text in writes.split():
        buffer, size, *output = text.split(":")
        made[int(buffer)] = step.sizes[int(buffer)] = _at(size, batch)
        if output:
            step.outputs.add(int(buffer))
    if kind == "input":
        return
    label, *others = operators.split() or [""]
    shape = tuple(_at(size, batch) for word in flags if word[0] == "[" for size in word[1:-1].split(","))
    flags = [word for word in flags if word[0] != "["]
    loop = Scheduled(
        label, kind, (_at(kept, batch), _at(reduced, batch)), found, made, "g" in "".join(flags), "u" in "".join(flags),
        frozenset({label, *others}), phase != "forward", flat="f" in "".join(flags), much="m" in "".join(flags), shape=shape,
    )  # fmt: skip
    if rest:
        for text in rest[0].split():
            name, _, operand = text.partition("=")
            at, size = operand.split(":")
            loop.operands[name] = (*_key(at), _at(size, batch))
        which, _, site = rest[1].partition(" ")
        if which not in PASSES:
            raise ValueError(f"{which!r} is no pass")
        loop.site = (site, which)
    step.scheduled.append(loop)


def _key(text: str) -> tuple[int, str]:
    buffer, _, part = text.partition("/")
    return int(buffer), part


def _at(text: str, batch: int) -> int:
    return max(Dim.parse(text).at(batch) if "batch" in text else int(text), 0)

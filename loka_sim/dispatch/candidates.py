"""What each pass of a site may run, and what each choice launches: GEMMs, quantization, layout changes.

The three passes of a site with output (M, N, K) read three tensors: x (M, K), w (N, K), g (M, N), the last
being the output's gradient. Each tensor is read twice, contracted along its columns by one pass and along
its rows by another:

    output       (M, N, K)   left x, right w                  both along their columns
    grad_input   (M, K, N)   left g, right w transposed
    grad_weight  (N, K, M)   left g transposed, right x transposed

so quantized operands can be shared between passes: a decision is about a site, not about a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from loka_sim.dispatch.operands import TORCH, TRANSPOSE, Launch, Row, Toolbox, Way, least
from loka_sim.modelspec import PASSES, Site
from perfmodel.kernels import BF16, BF16_BATCHED, BIASED, K_FASTEST, KERNELS, Layout, laid, library_of

Assignment = Mapping[str, str]
"""Kernel name per pass."""


class Use(NamedTuple):
    """One operand of a pass: which tensor, and whether it is contracted along the tensor's rows (read transposed)."""

    tensor: str
    transposed: bool


OPERANDS: dict[str, tuple[Use, Use]] = {
    "output": (Use("x", False), Use("w", False)),
    "grad_input": (Use("g", False), Use("w", True)),
    "grad_weight": (Use("g", True), Use("x", True)),
}
"""Left and right operand of each pass."""


@dataclass(frozen=True)
class SiteShape:
    """A site's GEMMs at one batch; what a decision depends on beside accuracy.

    Attributes:
        passes: (name, m, n, k, groups) of the passes the model computes, in the order they run.
        stored_transposed: Tensors of x, w, g that the model stores with their rows contiguous, as (K, M)
            for x, (K, N) for w and (N, M) for g.
        padded: Those of `passes` that bf16 runs with other sizes, and these.
        biased: The model adds a bias to the output, which bf16's kernel does itself.
    """

    passes: tuple[tuple[str, int, int, int, int], ...]
    stored_transposed: frozenset[str] = frozenset()
    padded: tuple[tuple[str, int, int, int, int], ...] = ()
    biased: bool = False

    def __hash__(self) -> int:
        """Found once: shapes are looked up again and again."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.passes, self.stored_transposed, self.padded, self.biased))

    @classmethod
    def of(cls, site: Site, batch: int) -> SiteShape:
        """A site of a model at a batch per GPU, in samples."""
        passes = tuple(
            (name, *site.passes[name].shape(batch), site.passes[name].groups.at(batch)) for name in PASSES if name in site.passes
        )
        output = site.passes["output"]
        stored = {tensor for tensor, flag in (("x", output.layout_a == "column"), ("w", output.layout_b == "row")) if flag}
        if "grad_input" in site.passes and site.passes["grad_input"].layout_a == "column":
            stored.add("g")
        padded = tuple(
            (name, *gemm.shape_in_bf16(batch), gemm.groups.at(batch)) for name, gemm in site.passes.items() if gemm.padded
        )
        return cls(passes, frozenset(stored), padded, site.bias)

    @cached_property
    def least(self) -> SiteShape:
        """The smallest site that may run the same kernels, its operands made in the same ways."""
        passes = ((name, least(m), least(n), least(k), groups) for name, m, n, k, groups in self.passes)
        return SiteShape(tuple(passes), self.stored_transposed, biased=self.biased)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the passes."""
        return tuple(entry[0] for entry in self.passes)

    @cached_property
    def _gemms(self) -> dict[str, tuple[int, int, int, int]]:
        return {name: (m, n, k, groups) for name, m, n, k, groups in self.passes}

    @cached_property
    def _tensors(self) -> dict[str, tuple[int, int]]:
        m, n, k, groups = self.gemm("output")
        sizes = {"x": (m, k), "w": (n, k), "g": (m, n)}
        turned = {tensor: size[::-1] if tensor in self.stored_transposed else size for tensor, size in sizes.items()}
        return {tensor: (groups * rows, columns) for tensor, (rows, columns) in turned.items()}

    @cached_property
    def _reads(self) -> dict[str, tuple[Use, Use]]:
        turned = {
            use: Use(use.tensor, use.transposed != (use.tensor in self.stored_transposed))
            for pair in OPERANDS.values()
            for use in pair
        }
        return {name: (turned[left], turned[right]) for name, (left, right) in OPERANDS.items()}

    def gemm(self, name: str) -> tuple[int, int, int, int]:
        """(m, n, k, groups) of a pass."""
        return self._gemms[name]

    @cached_property
    def _in_bf16(self) -> dict[str, tuple[int, int, int, int]]:
        return self._gemms | {name: (m, n, k, groups) for name, m, n, k, groups in self.padded}

    def layout(self, name: str) -> Layout:
        """How the operands of a pass lie in bf16, which reads them as they are stored, and whether a bias is added."""
        left, right = self.reads(name)
        m, n, k, groups = self.gemm(name)
        # A single row lies either way.
        lies = "column" if left.transposed and m > 1 else "row", "row" if right.transposed else "column"
        # What adds a bias to a vector or to an outer product is no kernel of cuBLASLt (`isInputCompliesAddmmCudaLt`, torch 2.11).
        adds = self.biased and name == "output" and lies == K_FASTEST and groups == 1 and n > 1 and k > 1
        return BIASED if adds else lies

    @cached_property
    def _rows_in_bf16(self) -> dict[str, Row]:
        return {name: Row(laid(kernel, self.layout(name)), *self._in_bf16[name]) for name, kernel in self.bf16().items()}

    def row(self, name: str, kernel: str) -> Row:
        """What a pass launches for its product: in bf16 the kernel of its layout, with what torch.compile pads."""
        return self._rows_in_bf16[name] if kernel in (BF16, BF16_BATCHED) else Row(kernel, *self._gemms[name])

    def tensor(self, tensor: str) -> tuple[int, int]:
        """Rows and columns of x (M, K), w (N, K) or g (M, N) as the model stores it; the rows of all groups together."""
        return self._tensors[tensor]

    def reads(self, name: str) -> tuple[Use, Use]:
        """Left and right operand of a pass: the tensor, and whether it is read transposed to how it is stored."""
        return self._reads[name]

    def bf16(self) -> dict[str, str]:
        """The assignment that leaves every pass in bf16."""
        return {name: BF16_BATCHED if groups != 1 else BF16 for name, _, _, _, groups in self.passes}

    @cached_property
    def bf16_rows(self) -> tuple[Row, ...]:
        """What that launches."""
        return tuple(self._rows_in_bf16.values())


def illegal(shape: SiteShape, name: str, kernel: str, toolbox: Toolbox = TORCH) -> str | None:
    """Why a pass cannot run a kernel, in words; None when it can.

    There must be a legal quantizer for each operand too.
    """
    m, n, k, groups = shape.gemm(name)
    spec = KERNELS[kernel]
    if groups != 1 and spec.kind != "batched_gemm":
        return f"{groups} GEMMs in one batched call, and {kernel} has no batched form"
    if groups == 1 and spec.kind == "batched_gemm":
        return f"{kernel} is for batched calls"
    reason = spec.illegal(m, n, k, toolbox.capability, groups)
    if reason or not spec.is_fp8:
        return reason
    for (tensor, turned), takes in zip(shape.reads(name), (spec.takes_a, spec.takes_b), strict=True):
        assert takes is not None
        if groups != 1 and turned:
            return f"{tensor} is read transposed in each of {groups} groups, and no quantizer does that"
        if not toolbox.ways(takes, frozenset({turned}), *shape.tensor(tensor)):
            return _unmade(takes, turned, *shape.tensor(tensor), toolbox)
    return None


def _unmade(takes: str, turned: bool, height: int, width: int, toolbox: Toolbox) -> str:
    """Why no quantizer makes an operand."""
    for quantizer in toolbox.quantizers:
        spec = KERNELS[quantizer]
        if spec.makes == takes and spec.readings == (turned,):
            return f"{quantizer}: {spec.illegal(height, 1, width, toolbox.capability)}"
    libraries = ", ".join(dict.fromkeys(library_of(name) for name in toolbox.quantizers)) or "these libraries"
    return f"no quantizer of {libraries} makes {takes}{' of the transposed tensor' if turned else ''}"


def legal_fp8(shape: SiteShape, name: str, toolbox: Toolbox = TORCH) -> tuple[str, ...]:
    """FP8 kernels that a pass may run."""
    return _legal_fp8(shape.least, name, toolbox.unpriced)


@cache
def _legal_fp8(shape: SiteShape, name: str, toolbox: Toolbox) -> tuple[str, ...]:
    return tuple(kernel for kernel in toolbox.gemms if illegal(shape, name, kernel, toolbox) is None)


def _read(shape: SiteShape, assignment: Assignment) -> dict[tuple[str, str], dict[bool, str]]:
    """Per tensor and what is taken of it: the pass that takes each quantized reading."""
    found: dict[tuple[str, str], dict[bool, str]] = {}
    for name, kernel in assignment.items():
        spec = KERNELS[kernel]
        if not spec.is_fp8:
            continue
        for (tensor, turned), takes in zip(shape.reads(name), (spec.takes_a, spec.takes_b), strict=True):
            if takes is not None:
                found.setdefault((tensor, takes), {})[turned] = name
    return found


def launches(shape: SiteShape, assignment: Assignment, toolbox: Toolbox = TORCH) -> dict[str, tuple[Row, ...]]:
    """Every kernel that an assignment launches, under the pass that needs it: its GEMM first.

    A quantizer stands under the pass that reads its result, and under the one that runs first where two do; a transposition
    of a shared result under the pass that reads it transposed. So the passes' rows add up to the site's, none counted twice.

    Args:
        shape: The site.
        assignment: Kernel per pass; passes left out launch nothing.
        toolbox: What makes the operands.
    """
    key = shape, tuple(assignment.items())
    if key not in toolbox.launched:
        made = (
            (readers, toolbox.fastest(takes, frozenset(readers), *shape.tensor(tensor)))
            for (tensor, takes), readers in _read(shape, assignment).items()
        )
        toolbox.launched[key] = _launched(shape, assignment, made)
    return toolbox.launched[key]


def launches_said(
    shape: SiteShape, assignment: Assignment, makers: Mapping[str, Mapping[str, str]]
) -> dict[str, tuple[Row, ...]]:
    """As `launches`, the operands made by the kernels that a dispatch table names.

    Args:
        shape: The site.
        assignment: Kernel per pass.
        makers: Per pass and quantized tensor of x, w, g, the kernel that it comes from, as `operand_makers` says it.

    Raises:
        KeyError: of a quantized tensor nothing is said.
    """
    made: list[tuple[dict[bool, str], Way]] = []
    for (tensor, _), readers in _read(shape, assignment).items():
        height, width = shape.tensor(tensor)
        readings: dict[str, list[bool]] = {}
        for reading, name in readers.items():
            readings.setdefault(makers[name][tensor], []).append(reading)
        made.append((readers, tuple(Launch(Row(k, height, 1, width), tuple(some)) for k, some in readings.items())))
    return _launched(shape, assignment, made)


def _launched(
    shape: SiteShape, assignment: Assignment, made: Iterable[tuple[Mapping[bool, str], Way]]
) -> dict[str, tuple[Row, ...]]:
    """GEMMs, and what makes each tensor: with the passes that take its readings."""
    rows = {name: [shape.row(name, kernel)] for name, kernel in assignment.items()}
    for readers, way in made:
        for launch in way:
            first = min((readers[reading] for reading in launch.readings), key=PASSES.index)
            rows[first].append(launch.row)
    return {name: tuple(launched) for name, launched in rows.items()}


def operand_makers(shape: SiteShape, assignment: Assignment, toolbox: Toolbox = TORCH) -> dict[str, dict[str, str]]:
    """Per pass: the kernel that each of its quantized tensors comes from, in the reading that the pass takes."""
    found: dict[str, dict[str, str]] = {name: {} for name in assignment}
    for (tensor, takes), readers in _read(shape, assignment).items():
        for launch in toolbox.fastest(takes, frozenset(readers), *shape.tensor(tensor)):
            for reading in launch.readings:
                found[readers[reading]][tensor] = launch.row.kernel
    return found


def shared_tensors(shape: SiteShape, assignment: Assignment, name: str, toolbox: Toolbox = TORCH) -> tuple[str, ...]:
    """Tensors of x, w, g of whose quantization another pass of the assignment has a use too."""
    found = []
    for (tensor, takes), readers in _read(shape, assignment).items():
        if len(readers) == 2 and name in readers.values():
            way = toolbox.fastest(takes, frozenset(readers), *shape.tensor(tensor))
            if len(way) == 1 or way[1].row.kernel == TRANSPOSE:
                found.append(tensor)
    return tuple(found)


def possible_rows(shape: SiteShape, toolbox: Toolbox = TORCH) -> KeysView[Row]:
    """Every row that some assignment of legal kernels may launch, bf16 included, by whichever way its operands are made.

    They come in one order, whatever the process.
    """
    gemms, makers = _possible(shape.least, toolbox.unpriced)
    tensors = {tensor: shape.tensor(tensor) for tensor, _ in makers}
    found = [shape.row(name, kernel) for name, kernel in gemms]
    found += [Row(kernel, tensors[tensor][0], 1, tensors[tensor][1]) for tensor, kernel in makers]
    return dict.fromkeys(found).keys()


@cache
def _possible(shape: SiteShape, toolbox: Toolbox) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(pass, GEMM) and (tensor, kernel that makes a reading of it) of all assignments of legal kernels."""
    gemms, makers = set(shape.bf16().items()), set[tuple[str, str]]()
    readings: dict[tuple[str, str], set[bool]] = {}
    for name in shape.names:
        (left, left_turned), (right, right_turned) = shape.reads(name)
        for kernel in legal_fp8(shape, name, toolbox):
            gemms.add((name, kernel))
            takes_a, takes_b = str(KERNELS[kernel].takes_a), str(KERNELS[kernel].takes_b)
            readings.setdefault((left, takes_a), set()).add(left_turned)
            readings.setdefault((right, takes_b), set()).add(right_turned)
    for (tensor, takes), needed in readings.items():
        for some in {frozenset(needed), *(frozenset({reading}) for reading in needed)}:
            for way in toolbox.ways(takes, some, *shape.tensor(tensor)):
                makers.update((tensor, launch.row.kernel) for launch in way)
    return sorted(gemms), sorted(makers)

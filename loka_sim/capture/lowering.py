"""From an aten graph to the buffers that a compiler materializes: which results are written, and what each reads.

Follows the rules of torch.compile's lowering: a pointwise result is computed inside whatever uses it, and written only
for a GEMM or another library call, as an output of the graph, where several uses would each repeat more than
`MOST_READS` reads, or where it has gathered more than `MOST_READS_AT_ALL` reads or `MOST_OPERATIONS` operations; reductions,
scatters and concatenations of many parts are written. Views cost nothing and narrow what is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from loka_sim.capture.attention import attention_loop
from loka_sim.capture.joined import computed_where_used
from loka_sim.capture.operators import (
    ATTENTION,
    BAGS,
    EXTERNAL,
    FILLS,
    GATHERS,
    GEMMS,
    RANDOM,
    REDUCTIONS,
    SCATTERS,
    VIEWS,
    WHOLE_VIEWS,
    along_memory,
    distinct,
    how_turned,
    is_outer,
    may_be_fp8,
    of_two,
    operations,
    operator_name,
    reduced_dims,
    repeated_within,
    several_indices,
    shape_of,
    trailing,
    value_of,
)  # fmt: skip
from loka_sim.capture.results import BIAS, MOST_READS, MOST_READS_AT_ALL, SCALING, Root, View, add, inline
from loka_sim.capture.views import PADDED_FROM, PADDED_TO_BYTES, factors, lying, steps, viewed
from loka_sim.loops import ACROSS, ADDED, DENSE, FETCHED, PICKED, PUT, Access, Lowered, Reads, Scheduled

MOST_JOINED = 8  # torch._inductor.config: inputs up to which a concatenation is computed where it is used (2.11 and 2.13)
# torch._inductor.config.unroll_reductions_threshold: shorter reductions are no loops (`Reduction.create`).
UNROLLED_BELOW, UNROLLED = 8, set("sum mean amax amin prod any all".split())
SECTOR_BYTES = 32  # what a GPU fetches at least


class Lowering:
    """Lowers one graph; `run` does it."""

    def __init__(self, graph: fx.Graph, scaled_at: int = 0) -> None:
        """Start with nothing written."""
        self.graph, self.scaled_at = graph, scaled_at
        self.result = Lowered()
        self._views: dict[fx.Node, View | list[View]] = {}
        self._joined: set[int] = set()  # concatenations that are written where they are made
        self._copies: dict[int, Root] = {}  # without padding, by whose

    def run(self) -> Lowered:
        """Walk the graph once."""
        for node in self.graph.nodes:
            if node.op == "placeholder":
                if isinstance(value := value_of(node), torch.Tensor):
                    root = self._root(value, "input")
                    root.buffer = self._buffer(distinct(value) * value.element_size())
                    self._views[node] = View(root, "", value.numel(), True)
                    self.result.inputs[node.name] = root.buffer
                    of_forward = node.name.startswith("addmm")  # its product with a bias, by its node's name
                    root.behind = BIAS if self.scaled_at and of_forward else None
            elif node.op == "call_function":
                self._call(node)
                if any(user.op == "output" for user in node.users):  # lies as it was traced, where it is free to
                    for view in self._all(node):
                        view.root.as_traced = view.root.as_traced is not False
            elif node.op == "output":
                for leaf in node.all_input_nodes:
                    for view in self._all(leaf):
                        view = self._given_back(leaf, view)
                        buffer = self._realize(view)
                        self.result.outputs.add(buffer)
                        if view.numel == view.root.numel:
                            self.result.results[leaf.name] = buffer
        return self.result

    # Buffers and views.

    def _buffer(self, size_bytes: int) -> int:
        index = len(self.result.sizes)
        self.result.sizes[index] = size_bytes
        return index

    @staticmethod
    def _root(value: Any, label: str) -> Root:
        return Root(distinct(value), value.element_size(), label, shape=shape_of(value))

    def _all(self, node: fx.Node) -> list[View]:
        found = self._views.get(node, [])
        return found if isinstance(found, list) else [found]

    def _inputs(self, node: fx.Node) -> list[tuple[View, int]]:
        """Views that a node reads, and whether it reads them in another order than they lie."""
        value = value_of(node)
        found = []
        for source in node.all_input_nodes:
            known, loop = value_of(source), isinstance(value, torch.Tensor)
            turned, within = (how_turned(known, value), repeated_within(known, value)) if loop else (0, False)
            found += [(replace(view, whole=False) if within else view, turned) for view in self._all(source)]
        return found

    def _reads(self, view: View, turned: int = 0) -> Reads:
        root = view.root
        if root.buffer is not None:
            size = min(view.numel * root.itemsize * view.spread, self.result.sizes[root.buffer])
            return {(root.buffer, view.part): Access(size, view.whole, turned)}
        share = min(1.0, view.numel / max(root.numel, 1))
        found = {}
        for (buffer, part), access in root.reads.items():
            size = math.ceil(access.read_bytes * share)
            if share < 1:  # a part along what lies closest: every sector, for few of its elements
                many = SECTOR_BYTES // root.itemsize if access.turned == ACROSS else view.spread
                size = min(access.read_bytes, size * many)
            order = 0 if access.turned == turned else max(access.turned, turned)
            found[buffer, part or (view.part if share < 1 else "")] = Access(size, access.whole and view.whole, order)
        return found

    def _realize(self, view: View) -> int:
        root = view.root
        if root.buffer is None:
            kind = "pointwise" if root.reads or root.label not in FILLS else "fill"
            root.buffer = self._buffer(root.numel * root.itemsize)
            self._schedule(root.label, kind, (root.numel, 1), root.reads, [root.buffer], root.gathers, root.operators)
            self.result.scheduled[-1].much, self.result.scheduled[-1].shape = root.computes_much, root.shape
        return root.buffer

    def _schedule(
        self,
        label: str,
        kind: str,
        space: tuple[int, int],
        reads: Reads,
        made: Iterable[int],
        gathers: bool = False,
        operators: frozenset[str] = frozenset(),
    ) -> None:
        writes = {buffer: self.result.sizes[buffer] for buffer in made}
        self.result.scheduled.append(Scheduled(label, kind, space, dict(reads), writes, gathers, False, operators | {label}))

    def _made(self, node: fx.Node) -> list[int]:
        """Buffers for every tensor that a node returns, which is written at once."""
        value = value_of(node)
        views, buffers = [], []
        for item in value if isinstance(value, tuple | list) else [value]:
            root = self._root(item, operator_name(node)) if isinstance(item, torch.Tensor) else Root(1, 1, "")
            root.buffer, root.as_traced = self._buffer(root.numel * root.itemsize), True
            buffers.append(root.buffer)
            views.append(View(root, "", root.numel, True))
        self._views[node] = views if isinstance(value, tuple | list) else views[0]
        return buffers

    # Operators.

    def _call(self, node: fx.Node) -> None:
        name, value = operator_name(node), value_of(node)
        if name in VIEWS:
            self._view(node, name, value)
        elif name in GEMMS and not is_outer(node, name):
            self._library(node, "gemm")
        elif name in REDUCTIONS and self._input(node) is not None and not of_two(node, value):
            if name in UNROLLED and 1 < self._input(node).numel() // max(value.numel(), 1) < UNROLLED_BELOW:
                self._unrolled(node, name)
            else:
                self._reduction(node, name)
        elif name in SCATTERS:
            self._scatter(node, name)
        elif name in BAGS:
            self._bag(node, name)
        elif name in ATTENTION:
            self._attention(node, ATTENTION[name])
        elif name == "cat":
            self._cat(node, value)
        elif name in EXTERNAL or not isinstance(value, torch.Tensor):
            self._library(node, "external")
        elif name == "copy_":
            self._copy(node)
        else:
            self._pointwise(node, name, value)

    def _input(self, node: fx.Node) -> Any:
        first = node.args[0] if node.args else None
        return value_of(first) if isinstance(first, fx.Node) else None

    def _view(self, node: fx.Node, name: str, value: Any) -> None:
        source = self._views[node.args[0]]  # type: ignore[index]
        if name == "getitem":
            self._views[node] = source[node.args[1]] if isinstance(source, list) else source  # type: ignore[index]
            return
        assert isinstance(source, View)
        if isinstance(value, tuple | list):
            self._views[node] = [
                View(source.root, f"{node.name}.{index}", distinct(item), False) for index, item in enumerate(value)
            ]
            return
        whole = name in WHOLE_VIEWS or (name == "expand" and trailing(value))
        numel = min(source.numel, distinct(value))
        part = node.name if numel < source.numel else source.part
        step = min((step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1 and step), default=1)
        spread = max(source.spread, min(step, SECTOR_BYTES // value.element_size()), 1)
        if numel < source.numel and spread > source.spread:
            part = f"{node.args[0]}.{spread}{FETCHED}{part}"
        self._views[node] = view = View(source.root, part, numel, source.whole and whole, spread)
        self._used_often(node, view)

    def _pointwise(self, node: fx.Node, name: str, value: torch.Tensor) -> None:
        root = self._root(value, name)
        root.operators, root.computed = frozenset({name}), operations(node, name)
        source = node.args[GATHERS[name]] if name in GATHERS else None
        # What is written to other places is read from other ones than a loop reads that writes it elsewhere.
        placed, put = "", []
        if name == "slice_scatter":
            placed, put = "@" + ":".join(map(str, node.args[2:])), self._all(node.args[1])  # type: ignore[arg-type]
        for view, turned in self._inputs(node):
            gathered = isinstance(source, fx.Node) and view in self._all(source)
            for key, access in self._reads(view, 0 if gathered else turned).items():
                if gathered:  # of what is computed here, only what is looked up
                    looked_up = root.numel * access.read_bytes / max(view.numel, 1)
                    if view.root.buffer is not None:  # what is read again is in the L2
                        looked_up = min(root.numel, view.root.numel) * view.root.itemsize
                    access = Access(math.ceil(looked_up), False)
                add(root.reads, (key[0], key[1] + placed) if view in put else key, access)
            inline(root, view)
        root.gathers |= name in GATHERS
        if name == "index" and several_indices(node):
            root.operators |= {PICKED}
        self._views[node] = view = View(root, "", root.numel, True)
        self._used_often(node, view)
        self._gathered_much(view)
        if name in RANDOM:
            self._realize(view)

    def _gathered_much(self, view: View) -> None:
        """Write what even one use would have to compute from too much."""
        if view.root.readings > MOST_READS_AT_ALL or view.root.computes_much:
            self._realize(view)

    def _used_often(self, node: fx.Node, view: View) -> None:
        """Write what several uses would each have to compute from many reads, or what is a result and used, too."""
        much = view.root.readings > MOST_READS or view.root.computes_much
        if len(node.users) > 1 and (much or any(user.op == "output" for user in node.users)):
            self._realize(view)

    def _unrolled(self, node: fx.Node, name: str) -> None:
        """A reduction of few elements: computed where its result is used, from all of them."""
        value = value_of(node)
        root = self._root(value, name)
        root.operators = frozenset({name})
        (view,) = self._all(node.args[0])  # type: ignore[arg-type]
        count = self._input(node).numel() // value.numel()
        for number in range(count):
            for (buffer, part), access in self._reads(view).items():  # all parts together are fetched once
                each = f"{part.replace(FETCHED, '.')}/{count}{FETCHED}{number}"
                add(root.reads, (buffer, each), Access(access.read_bytes, False, access.turned))
            root.computed |= {("", (node, number))}
            inline(root, replace(view, part=f"{view.part}{node.name}.{number}"))
        self._views[node] = view = View(root, "", root.numel, True)
        self._used_often(node, view)
        self._gathered_much(view)

    def _reduction(self, node: fx.Node, name: str) -> None:
        source = self._input(node)
        (view, *_) = self._all(node.args[0])  # type: ignore[arg-type]
        reads, inside = self._reads(view), view.root if view.root.buffer is None else Root(1, 1, name)
        made = self._made(node)
        value = value_of(node)
        kept = max((value[0] if isinstance(value, tuple | list) else value).numel(), 1)
        kind = "row" if along_memory(node, source) else "column"
        self._schedule(name, kind, (kept, max(source.numel() // kept, 1)), reads, made, inside.gathers, inside.operators)
        self.result.scheduled[-1].shape = shape_of(source, reduced_dims(node, source)) if kind == "row" else ()
        self.result.scheduled[-1].uneven = any(not read.whole or read.turned == ACROSS for read in reads.values())

    def _written_first(self, views: Iterable[View]) -> Reads:
        """What a kernel reads that nothing fuses into: its operands must be there."""
        reads: Reads = {}
        for view in views:
            self._realize(view)
            for key, access in self._reads(view).items():
                add(reads, key, Access(access.read_bytes, False))
        return reads

    def _given_back(self, leaf: fx.Node, view: View) -> View:
        """A result of the graph in memory as it was traced: a copy where a product had it laid otherwise."""
        base, chain = viewed(leaf)
        if value_of(base).is_contiguous():
            return self._dense(base, chain, view)
        if view.root.as_traced is not False:
            return view
        lies = lying(base, chain)
        same = lies is not None and steps(lies) == steps(value_of(leaf))
        return view if same else self._copied(base, view)

    def _multiplied(self, operand: fx.Node) -> View:
        """A product's operand as the compiler hands it over (`ExternKernel.convert_to_reinterpret_view`, torch 2.11 and 2.13).

        A view of what is computed has that written, its sizes as they are counted; a view that this order does not allow is
        copied, for each product anew.
        """
        (view,) = self._all(operand)
        base, chain = viewed(operand)
        known, root = value_of(base), view.root
        of_a_part = view.numel != root.numel or known.numel() != root.numel
        if not chain or base.op == "placeholder" or of_a_part:
            return view
        if known.is_contiguous():
            return self._dense(base, chain, view)
        if root.as_traced or any(access.turned == ACROSS for access in root.reads.values()):
            return view  # what is made in tiles is written as the view lies (InterFormer's steps, torch 2.11)
        root.as_traced = False
        return view if lying(base, chain) is not None else self._copied(base, view)

    def _dense(self, base: fx.Node, chain: list[fx.Node], view: View) -> View:
        """A result whose views are handed over: copied once where padding between its rows does not allow them."""
        root = view.root
        if view.numel != root.numel or lying(base, chain) is not None:
            return view
        if id(root) not in self._copies:
            reads: Reads = {(self._realize(view), DENSE): Access(root.numel * root.itemsize, False)}
            self._copies[id(root)] = copy = Root(root.numel, root.itemsize, "clone", as_traced=True)
            copy.buffer = self._buffer(copy.numel * copy.itemsize)
            self._schedule(DENSE, "pointwise", (copy.numel, 1), reads, [copy.buffer], operators=frozenset({"clone"}))
        return replace(view, root=self._copies[id(root)])

    def _copied(self, base: fx.Node, view: View) -> View:
        """A result that lies as it is counted, written once more as it was traced: by the loop that made it if that runs so."""
        self._realize(view)
        known = value_of(base)
        turned = how_turned(torch.empty_like(known, memory_format=torch.contiguous_format), known)
        apart = any(access.turned for access in view.root.reads.values())
        reads = self._reads(view, turned if apart else 0)
        copy = Root(view.root.numel, view.root.itemsize, "clone", as_traced=True)
        copy.buffer = self._buffer(copy.numel * copy.itemsize)
        self._schedule("clone", "pointwise", (copy.numel, 1), reads, [copy.buffer])
        self.result.scheduled[-1].flat = apart
        return replace(view, root=copy)

    def _library(self, node: fx.Node, kind: str) -> None:
        multiplied = {operand: self._multiplied(operand) for operand in factors(node)} if kind == "gemm" else {}
        sources = ([multiplied[read]] if read in multiplied else self._all(read) for read in node.all_input_nodes)
        reads = self._written_first(view for source in sources for view in source)
        if kind == "gemm":
            self._spread(node, reads)
        made = self._made(node)
        self._schedule(operator_name(node), kind, (0, 0), reads, made)
        if kind == "gemm":
            self._operands(node, multiplied)
            if self.scaled_at and may_be_fp8(self.result.scheduled[-1], self.scaled_at):
                self._all(node)[0].root.behind = SCALING

    def _spread(self, node: fx.Node, reads: Reads) -> None:
        """The bias of a product whose rows are padded: copied to each row first, and read from there by the product.

        cuBLAS adds a bias by itself to dense rows only (`aten/src/ATen/native/cuda/Blas.cpp`, 2.11); in bf16 torch.compile leaves
        it to the product also where all that uses the sum goes element by element (`config.keep_addmm_fused_for_half_dtypes`).
        """
        value = value_of(node)
        columns, size = value.shape[-1], value.numel() * value.element_size()
        padded = columns > PADDED_FROM and columns * value.element_size() % PADDED_TO_BYTES > 0
        bias = node.args[0]
        if operator_name(node) != "addmm" or not padded or not isinstance(bias, fx.Node) or value_of(bias).dim() != 1:
            return
        (view,) = self._all(bias)
        spread, nothing = self._buffer(size), self._buffer(0)
        self._schedule("copy", "copy", (value.numel(), 1), self._reads(view), [spread])
        self._schedule(ADDED, "external", (value.numel(), 1), {(spread, ""): Access(size, False)}, [nothing])
        reads[spread, ""] = Access(0, False)

    def _operands(self, node: fx.Node, multiplied: dict[fx.Node, View]) -> None:
        """Note a GEMM's sizes and what it multiplies."""
        nodes = factors(node)
        left, right = (value_of(operand) for operand in nodes)
        gemm = self.result.scheduled[-1]
        gemm.gemm = (left.shape[0] if left.dim() == 3 else 1, left.shape[-2], right.shape[-1], left.shape[-1])
        for name, operand in zip(("left", "right"), nodes, strict=True):
            view = multiplied[operand]
            assert view.root.buffer is not None
            gemm.operands[name] = (view.root.buffer, view.part, view.numel)

    def _bag(self, node: fx.Node, name: str) -> None:
        """A table is read, or its gradient added to, row by row: as many as there are ids."""
        kind, whole, ids = BAGS[name]
        arguments = (node.args[position] for position in whole)
        reads = self._written_first(view for read in arguments if isinstance(read, fx.Node) for view in self._all(read))
        made = self._made(node)
        value = value_of(node)
        table = value_of(node.args[0]) if kind == "gather" else value  # type: ignore[arg-type]
        rows = value_of(node.args[ids]).numel()  # type: ignore[arg-type]
        moved = rows * table.shape[-1] * table.element_size()
        table_buffer = self._buffer(moved)
        reads[(table_buffer, "")] = Access(moved, False)
        self._schedule(name, kind, (rows * table.shape[-1], 1), reads, made)
        if kind == "scatter":
            self.result.scheduled[-1].writes[made[0]] = moved

    def _attention(self, node: fx.Node, kind: str) -> None:
        """Queries, keys and values, and backward the result, its sums and its gradient; the kernel's name says its sizes."""
        reads = self._written_first(view for view, _ in self._inputs(node))
        label, space = attention_loop(node, kind)
        self._schedule(label, kind, space, reads, self._made(node))

    def _scatter(self, node: fx.Node, name: str) -> None:
        """A destination that is written first, then added to at indices."""
        target, *others = node.all_input_nodes
        value = value_of(node)
        reads: Reads = {}
        for source in others:
            for view in self._all(source):
                for key, access in self._reads(view).items():
                    add(reads, key, access)
        shape = max((shape_of(value_of(source)) for source in others), key=math.prod)
        numel = math.prod(shape)
        root = self._root(value, name)
        destination = self._destination(self._all(target)[0])
        root.buffer = self._buffer(root.numel * root.itemsize)
        added = numel * root.itemsize
        add(reads, (destination, ""), Access(added, False))
        operators = frozenset({name, PUT} if name == "index_put" and several_indices(node) else {name})
        loop = Scheduled(name, "scatter", (numel, 1), reads, {root.buffer: added}, operators=operators, shape=shape)
        self.result.scheduled.append(loop)
        self._views[node] = View(root, "", root.numel, True)

    def _destination(self, view: View) -> int:
        """A buffer of its own for every scatter, also where a graph has one constant for several."""
        root = view.root
        if root.buffer is None and root.label in FILLS:
            root = Root(root.numel, root.itemsize, root.label)
        return self._realize(View(root, "", root.numel, True))

    def _cat(self, node: fx.Node, value: torch.Tensor) -> None:
        """Few parts: computed where the result is used. Many: every part is copied to its place by a loop of its own.

        Of few that are not computed where they are used what takes long is written before: what is picked one by one.
        """
        parts, root = self._inputs(node), self._root(value, "cat")
        computed = computed_where_used(node, [view for view, _ in parts], self.result.scheduled, self._joined)
        for view, _ in parts:
            if not computed and view.root.buffer is None and PICKED in view.root.operators:
                self._realize(view)
        if len(parts) <= MOST_JOINED:
            root.computed = operations(node, "cat")
            reading = [self._reads(view, turned) for view, turned in parts]
            times = Counter(key for each in reading for key in each)
            for number, ((view, _), each) in enumerate(zip(parts, reading, strict=True)):
                for (buffer, part), access in each.items():  # what several parts read they read at places of their own
                    own = f"{part.replace(FETCHED, '.') or 'all'}{FETCHED}{number}" if times[buffer, part] > 1 else part
                    add(root.reads, (buffer, own), Access(access.read_bytes, False, access.turned))
                inline(root, replace(view, part=f"{view.part}@{number}"))
            self._views[node] = view = View(root, "", root.numel, True)
            self._used_often(node, view)
            self._gathered_much(view)
            if not computed:
                self._joined.add(self._realize(view))
            return
        made = []
        for view, turned in parts:
            piece = self._buffer(view.numel * root.itemsize)
            made.append(piece)
            inside = view.root if view.root.buffer is None else Root(1, 1, "cat")
            reads, operators = self._reads(view, turned), inside.operators
            self._schedule("cat", "pointwise", (view.numel, 1), reads, [piece], inside.gathers, operators)
        root.buffer = self._buffer(root.numel * root.itemsize)
        reads = {(piece, ""): Access(0, False) for piece in made}
        self.result.scheduled.append(Scheduled("cat", "place", (0, 0), reads, {root.buffer: 0}))
        self._views[node] = View(root, "", root.numel, True)

    def _copy(self, node: fx.Node) -> None:
        reads: Reads = {}
        for view in self._all(node.args[1]):  # type: ignore[arg-type]
            reads |= self._reads(view)
        made = self._made(node)
        self._schedule("copy_", "pointwise", (value_of(node).numel(), 1), reads, made)


def lower(graph: fx.Graph, scaled_at: int = 0) -> Lowered:
    """The loops of one graph, forward or backward.

    Args:
        graph: It.
        scaled_at: The batch, if what reads a product that may be FP8 also multiplies it by scales, as torchao's rowwise recipe
            has it: more is written then, as there is more to compute anew.
    """
    return Lowering(graph, scaled_at).run()

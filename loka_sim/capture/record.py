"""What a run computes: every GEMM that reaches aten, with its module, its site and its pass.

A forward GEMM is known by the autograd node that it makes (its sequence number). A GEMM in the backward runs inside a
node: the same number finds its site, and the operand that it shares with the forward says which pass it is.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from loka_sim.capture.operators import ATTENTION

aten = torch.ops.aten
# Position of the left operand among the arguments.
GEMMS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
# Products that FlopCounterMode does not count: said by name, so that nobody takes them for nothing.
PRODUCTS = set("mm addmm bmm addbmm mv addmv dot vdot matmul gemm linear convolution conv trilinear cdist pdist rnn fft".split())
NO_PRODUCTS = ("linalg_vector_norm", "linalg_cross", "linalg_diagonal", "mkldnn_max_pool2d")


def is_product(name: str) -> bool:
    """Whether the name of an aten operator that nobody counts says that it multiplies matrices."""
    return name not in NO_PRODUCTS and (bool(PRODUCTS & set(name.split("_"))) or name.lstrip("_").startswith("linalg_"))


# Files whose frames stand between an operator's caller and the recorder.
BETWEEN = (__file__, "torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/_ops.py", "torch/utils/_python_dispatch.py")
OWN_NODES = ("MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0")
COPIES = (aten._to_copy, aten.clone)
LOOK_UPS = (aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only)


@dataclass
class RawGemm:
    """One pass at one batch: sizes in elements (a text where data decide them), layouts as in `Gemm`."""

    m: int | str
    n: int | str
    k: int | str
    groups: int | str
    layout_a: str
    layout_b: str

    @property
    def flops(self) -> int:
        """2 M N K over all groups; 0 where data decide a size."""
        sizes = [size for size in (self.m, self.n, self.k, self.groups) if isinstance(size, int)]
        return 2 * math.prod(sizes) if len(sizes) == 4 else 0

    def transposed(self) -> RawGemm:
        """The same product computed as its transpose: operands change places."""
        flip = {"row": "column", "column": "row", "strided": "strided"}
        return RawGemm(self.n, self.m, self.k, self.groups, flip[self.layout_b], flip[self.layout_a])


@dataclass(eq=False)
class RawSite:
    """A site at one batch, as `Site`; `left` and `right` are the storages its operands were seen in."""

    name: str
    module: str
    op: str
    passes: dict[str, RawGemm]
    weight: str | None
    bias: bool
    needs: tuple[bool, bool] | None
    left: set[int]
    right: set[int]
    norm: str | None = None
    activation: str | None = None
    ambiguous: set[str] = field(default_factory=set)
    recompute: bool = False
    recomputed: bool = False
    reads_tables: bool = False


@dataclass
class RawTable:
    """An embedding table at one batch: `ids` looked up by all samples."""

    rows: int
    dim: int
    pooling: str
    ids: int


def storage(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; only while somebody holds it."""
    return tensor.untyped_storage()._cdata


def layout(tensor: torch.Tensor) -> str:
    """`row` if the last dimension is contiguous, `column` if the one before is, else `strided`."""
    (rows, columns), (row_step, column_step) = map(known, tensor.shape[-2:]), map(known, tensor.stride()[-2:])
    if column_step == 1 and (rows == 1 or isinstance(row_step, str) or isinstance(columns, str) or row_step >= columns):
        return "row"
    if row_step == 1 and (columns == 1 or isinstance(column_step, str) or isinstance(rows, str) or column_step >= rows):
        return "column"
    return "row" if columns == 1 else "column" if rows == 1 else "strided"


def known(size: int | torch.SymInt) -> int | str:
    """A size, or the text of one that depends on data: a text can be compared without asking for its value."""
    return size if isinstance(size, int) else str(size)


def measure(left: torch.Tensor, right: torch.Tensor) -> RawGemm:
    """The product of two matrices, or of two stacks of as many."""
    groups = known(left.shape[0]) if left.dim() == 3 else 1
    m, n, k = known(left.shape[-2]), known(right.shape[-1]), known(left.shape[-1])
    return RawGemm(m, n, k, groups, layout(left), layout(right))


class Recorder(TorchDispatchMode):
    """Runs what it is given on `device` and keeps the sites, the tables and what cannot be accounted for."""

    supports_higher_order_operators = True

    def __init__(self, names: dict[int, str], device: str) -> None:
        """Start empty.

        Args:
            names: Fully qualified name of each storage that belongs to a parameter or buffer.
            device: Where everything runs: `meta`, or what fake tensors claim.
        """
        super().__init__()
        self.names = names
        self.device = device
        self.modules: list[str] = []
        self.sites: list[RawSite] = []
        self.tables: dict[str, RawTable] = {}
        self.unaccounted: Counter[str] = Counter()
        self.last_op = ""
        self._nodes: dict[int, list[RawSite]] = {}
        self._others: dict[int, str] = {}  # module of what is no GEMM, by its node
        self._results: dict[int, RawSite] = {}
        self._counts: Counter[str] = Counter()
        self._repeated = -1
        self._alive: list[Any] = []  # a storage that is freed would give its identity to another
        self._pending: list[tuple[RawSite, torch.Tensor]] = []
        self._looked_up: set[int] = set()  # storages of what is made from rows of tables

    @property
    def module(self) -> str:
        """Name of the module whose forward is running."""
        return self.modules[-1] if self.modules else "(root)"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        self._settle()
        self.last_op = str(func)
        if isinstance(func, torch._ops.HigherOrderOperator):
            self.unaccounted[f"{self.module}: {func}"] += 0
            result = func(*args, **kwargs)
            self._follow(None, args, kwargs, result)
            return result
        args, kwargs = self._placed(func, args, kwargs)
        packet = func._overloadpacket
        if packet not in flop_registry and func is not torch.ops.prim.device.default:  # which cannot be asked
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self._follow(packet, args, kwargs, result)
        self._record(packet, args, kwargs, result)
        return result

    def _follow(self, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what a forward makes from rows of tables, and from what is made from them."""
        if torch._C._current_autograd_node() is not None:
            return
        read, made = (
            [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
            for tree in ((args, kwargs), result)
        )
        if packet in LOOK_UPS or any(storage(leaf) in self._looked_up for leaf in read):
            self._alive += made
            self._looked_up.update(map(storage, made))

    def _placed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments on the capture's device: what the model makes on another one (a constant, a mask) follows."""
        if self.device != "meta":
            return args, kwargs
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(leaf.is_meta for leaf in leaves):
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda leaf: leaf if leaf.is_meta else torch.empty_like(leaf, device="meta"), (args, kwargs)
            )
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": torch.device("meta")}
        return args, kwargs

    def _record(self, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = packet.__name__
        if packet in GEMMS and result.is_floating_point():
            self._gemm(packet, args, result)
        elif name in ATTENTION:
            pass  # kernels beside the GEMMs
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            kind = f"{name} of {result.dtype}".replace("torch.", "") if packet in GEMMS else name  # complex, or whole numbers
            self._other(kind, flops if isinstance(flops, int) else 0)
        elif packet in COPIES:
            if storage(args[0]) in self.names:  # a weight cast to another type, or laid out anew, is still that weight
                self._alive.append(result)
                self.names.setdefault(storage(result), self.names[storage(args[0])])
        elif packet in (aten.add, aten.add_):
            self._bias(args[0], args[1])
        elif packet in LOOK_UPS:
            mode = args[4] if len(args) > 4 else kwargs.get("mode", 0)
            self._table(args[0], args[1], "none" if packet is aten.embedding else ("sum", "mean", "max")[mode])
        elif packet._qualified_op_name.split("::")[0] not in ("aten", "prim", "prims", "profiler"):
            self._other(packet._qualified_op_name, 0)
        elif is_product(name):
            self._other(name, 0)

    def _other(self, name: str, flops: int) -> None:
        """Note what is no site: under the module that ran it forward."""
        node, module = torch._C._current_autograd_node(), self.module
        if node is None:
            self._others[torch._C._autograd._get_sequence_nr() - 1] = module
        else:
            module = self._others.get(node._sequence_nr(), module)
        self.unaccounted[f"{module}: {name}"] += flops

    def _table(self, weight: torch.Tensor, ids: torch.Tensor, pooling: str) -> None:
        name = self.names.get(storage(weight), f"{self.module}.weight").removesuffix(".weight")
        table = self.tables.setdefault(name, RawTable(weight.shape[0], weight.shape[1], pooling, 0))
        count = known(ids.numel())
        if torch._C._current_autograd_node() is not None:
            return  # a checkpoint looks up again what is there
        if isinstance(count, int):
            table.ids += count
        else:
            self.unaccounted[f"{name}: look-ups depend on the data"] += 0

    def _bias(self, result: Any, addend: Any) -> None:
        """Note the bias of a linear layer that aten computes as a product and an addition."""
        if isinstance(result, torch.Tensor) and isinstance(addend, torch.Tensor):
            for product, bias in ((result, addend), (addend, result)):
                vector = bias.numel() == bias.shape[-1] if bias.dim() else False
                if vector and storage(bias) in self.names and storage(product) in self._results:
                    self._results[storage(product)].bias = True

    def _gemm(self, packet: Any, args: Any, result: torch.Tensor) -> None:
        left, right = args[GEMMS[packet] : GEMMS[packet] + 2]
        self._alive += [left, right, result]
        node = torch._C._current_autograd_node()
        if node is None:
            self._forward(packet, args, left, right, result)
        elif self._direct() or not (torch.is_grad_enabled() or self.modules):
            self._backward(node._sequence_nr(), left, right)
        else:
            self._forward(packet, args, left, right, result, again=True)

    @staticmethod
    def _direct() -> bool:
        """Whether the backward engine itself asked, and not Python code that it called (a hook, a checkpoint)."""
        frame = sys._getframe(2)
        while frame.f_back and frame.f_code.co_filename.endswith(BETWEEN):
            frame = frame.f_back
        return frame.f_code.co_name == "_engine_run_backward"

    def _forward(self, packet: Any, args: Any, left: Any, right: Any, result: Any, again: bool = False) -> None:
        gemm, needs = measure(left, right), (left.requires_grad, right.requires_grad)
        if storage(left) in self.names and storage(right) not in self.names:
            # A weight on the left: the same product, transposed, has it on the right as all other sites do.
            gemm, needs, left, right = gemm.transposed(), needs[::-1], right, left
        weight = self.names.get(storage(right))
        bias = bool(GEMMS[packet]) and storage(args[0]) in self.names
        weight_like = packet in (aten.mm, aten.addmm) and weight is not None and gemm.layout_b == "column"
        op = "linear" if weight_like else packet.__name__
        site = RawSite("", self.module, op, {"output": gemm}, weight, bias, None, {storage(left)}, {storage(right)})
        original = self._original(site) if again else None
        if original:
            site.name = f"{original.name}#recompute"
            site.recompute = original.recomputed = True
            site.reads_tables = original.reads_tables
            original.left |= site.left
            original.right |= site.right
        else:
            site.reads_tables = again or bool({storage(left), storage(right)} & self._looked_up)
            self._counts[self.module] += 1
            site.name = self.module if self._counts[self.module] == 1 else f"{self.module}#{self._counts[self.module]}"
        self.sites.append(site)
        self._results[storage(result)] = owner = original or site
        if torch.is_grad_enabled():
            owner.needs = needs
        self._nodes.setdefault(torch._C._autograd._get_sequence_nr() - 1, []).append(owner)
        self._pending.append((owner, result))

    def _original(self, again: RawSite) -> RawSite | None:
        """The site of the first forward that `again` repeats.

        Of several calls of one module the one with the same operand, else the next after the last one repeated, else
        the latest: the backward repeats whole checkpoints last first, and each of them first to last.
        """
        gemm = again.passes["output"]
        sizes, module = (gemm.m, gemm.n, gemm.k, gemm.groups), again.module if self.modules else None
        fitting = []
        for index, site in enumerate(self.sites):
            other = site.passes["output"]
            same = sizes == (other.m, other.n, other.k, other.groups) and site.weight == again.weight
            if same and not site.recomputed and not site.recompute and module in (None, site.module):
                fitting.append(index)
        ranked = sorted(fitting, key=lambda index: (not self.sites[index].left & again.left, index <= self._repeated))
        if not ranked:
            return None
        first = ranked[0]
        self._repeated = first if self.sites[first].left & again.left or first > self._repeated else ranked[-1]
        return self.sites[self._repeated]

    def _settle(self) -> None:
        """Take the last forward GEMMs' nodes from their results, now that they are there.

        A node is made before its operator runs, so its number is nearly always the last one given out: not if autograd
        had to rebuild an operand's history in between, or a custom function called another one before its product.
        The result knows, until something changes it in place.
        """
        if not self._pending or not torch.is_grad_enabled():
            return  # inside a custom function, whose node its results get when it ends
        for site, result in self._pending:
            node = result.grad_fn
            if node is not None and (site.needs is None or node.name() in OWN_NODES):
                owners = self._nodes.setdefault(node._sequence_nr(), [])
                if site not in owners:
                    owners.append(site)
        self._pending.clear()

    def _backward(self, number: int, left: torch.Tensor, right: torch.Tensor) -> None:
        gemm, operands = measure(left, right), {storage(left), storage(right)}
        # Inside a custom function that calls another one, the last number is not the function's: there the operands tell.
        unknown = [site for site in reversed(self.sites) if site.needs is None and operands & (site.left | site.right)]
        for site in (*self._nodes.get(number, ()), *unknown):
            for name in self._likely(site, operands):
                found = self._oriented(site, name, gemm, storage(left))
                if found and name not in site.passes:
                    site.passes[name] = found
                    return
        where = self._nodes[number][0].name if number in self._nodes else self._others.get(number, "(backward)")
        self.unaccounted[f"{where}: a ({gemm.m}, {gemm.n}, {gemm.k}) GEMM of the backward that is no pass of a site"] += (
            gemm.flops
        )

    @staticmethod
    def _likely(site: RawSite, operands: set[int]) -> list[str]:
        """The passes that a backward GEMM may be, the likeliest first: a gradient is made from the other operand."""
        if site.needs in ((True, False), (False, True)):
            return ["grad_input" if site.needs[0] else "grad_weight"]
        uses_left, uses_right = bool(operands & site.left), bool(operands & site.right)
        return ["grad_weight", "grad_input"] if uses_left and not uses_right else ["grad_input", "grad_weight"]

    @staticmethod
    def _oriented(site: RawSite, name: str, gemm: RawGemm, left: int) -> RawGemm | None:
        """The GEMM as pass `name` of `site` writes it, transposed if need be; None if its sizes are not that pass's."""
        output = site.passes["output"]
        m, n, k, shared = (
            (output.m, output.k, output.n, site.right) if name == "grad_input" else (output.n, output.k, output.m, site.left)
        )
        if gemm.k != k or (gemm.m, gemm.n) not in ((m, n), (n, m)):
            return None
        # A square one is told by its operand: the forward's stands on the right.
        transposed = (gemm.m, gemm.n) != (m, n) or (m == n and left in shared)
        return gemm.transposed() if transposed else gemm

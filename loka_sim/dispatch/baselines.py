"""What a user would do without a decision per GEMM: torchao's conversions, of every linear or behind its auto filter.

Thresholds: torchao 0.18, `torchao.float8.float8_linear_utils`, found on an H100; the batch plays no part in them.
Recipes: `Float8LinearConfig.from_recipe_name`: fast accumulation in `output`, off in the two gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loka_sim.dispatch.candidates import SiteShape, legal_fp8
from loka_sim.dispatch.operands import TORCH, Toolbox
from loka_sim.modelspec import Site


@dataclass(frozen=True)
class Baseline:
    """One way to convert a model without looking at its GEMMs one by one.

    Attributes:
        name: Key in documents.
        label: Name on screen.
        description: What it converts.
        scaling: `tensorwise` or `rowwise`; None for bf16.
        wants: Whether it converts a linear of (n output features, k input features).
    """

    name: str
    label: str
    description: str
    scaling: str | None
    wants: Callable[[int, int], bool]

    def assignment(self, site: Site, shape: SiteShape, torch: Toolbox = TORCH) -> dict[str, str]:
        """Kernel per pass that this conversion gives a site.

        All passes of a module change together. A module with a pass that its kernels refuse stays bf16: torchao
        would fail there, so whoever converts it must leave it out.
        """
        stays = shape.bf16()
        if self.scaling is None or not is_linear(site):
            return stays
        _, n, k, _ = shape.gemm("output")
        converted = {name: f"torch/fp8_{self.scaling}_{'fast' if name == 'output' else 'split'}" for name in shape.names}
        able = self.wants(n, k) and all(kernel in legal_fp8(shape, name, torch) for name, kernel in converted.items())
        return converted if able else stays


def is_linear(site: Site) -> bool:
    """Whether a site is a `torch.nn.Linear`, which is all that torchao converts.

    The second GEMM of one module (`module#2`) is converted with the first.
    """
    return site.op == "linear" and site.weight == f"{site.name.partition('#')[0]}.weight".lstrip(".")


def _sixteen(n: int, k: int) -> bool:
    return n % 16 == 0 and k % 16 == 0


def filter_tensorwise(n: int, k: int) -> bool:
    """Whether torchao's auto filter converts a linear under its tensorwise recipe."""
    return _sixteen(n, k) and not (k <= 4096 and n <= 1024)


def filter_rowwise(n: int, k: int) -> bool:
    """Whether torchao's auto filter converts a linear under its rowwise recipe."""
    return _sixteen(n, k) and not (n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048))


BASELINES = (
    Baseline("bf16", "bf16", "nothing converted", None, lambda n, k: False),
    Baseline("naive_tensorwise", "all FP8, tensorwise",
             "every linear that the kernels accept, torchao's tensorwise recipe", "tensorwise", lambda n, k: True),
    Baseline("naive_rowwise", "all FP8, rowwise",
             "every linear that the kernels accept, torchao's rowwise recipe", "rowwise", lambda n, k: True),
    Baseline("filter_tensorwise", "torchao filter, tensorwise",
             "linears that torchao's auto filter passes, tensorwise recipe", "tensorwise", filter_tensorwise),
    Baseline("filter_rowwise", "torchao filter, rowwise",
             "linears that torchao's auto filter passes, rowwise recipe", "rowwise", filter_rowwise),
)  # fmt: skip

"""A capture's trace loses no gradient: its backward has every product that a model's own backward runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loka_sim.capture import capture

B = 8
CALLS = {
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.25, device=x.device, dtype=x.dtype)),
    "relu6": F.relu6,
    "selu": F.selu,
    "mish": F.mish,
    "dropout": lambda x: F.dropout(x, 0.1),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.1, training=True),
    "a number where negative": lambda x: torch.where(x > 0, x, 0.5),
    "deviation": lambda x: x.detach() / x.std(-1, keepdim=True),
    "variance": lambda x: x.detach() * x.var(-1, keepdim=True),
    "rms norm": lambda x: F.rms_norm(x, (16,)),
    "distance": lambda x: x.detach() * F.pairwise_distance(x, x.detach() + 1).unsqueeze(-1),
    "triplet": lambda x: x.detach() * F.triplet_margin_loss(x, x.detach() + 1, x.detach() - 1),
    "attention": lambda x: F.scaled_dot_product_attention(*x.view(-1, 1, 2, 8).expand(3, -1, -1, -1, -1)).reshape(-1, 16),
}


class Between(nn.Module):
    """Something between two layers."""

    def __init__(self, call):
        super().__init__()
        self.first, self.call, self.second = nn.Linear(16, 16), call, nn.Linear(16, 16)

    def forward(self, x):
        return self.second(self.call(self.first(x)))


class Classes(nn.Module):
    """A layer's results as classes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, classes):
        return F.cross_entropy(self.second(self.first(x)), classes)


@pytest.mark.parametrize("name", CALLS)
def test_the_backward_goes_on_behind(name):
    check(capture(Between(CALLS[name]), torch.randn(B, 16)))


def test_the_backward_goes_on_behind_a_loss_over_classes():
    check(capture(Classes(), (torch.randn(B, 16), torch.zeros(B, dtype=torch.long))))


def check(spec):
    """Products of the traced backward against those that eager autograd ran."""
    assert not spec.untraced
    products = [line for line in spec.loops if line.startswith("backward gemm")]
    assert len(products) == sum(name != "output" for site in spec.sites for name in site.passes) >= 3


def test_torchs_kernels_for_meta_are_there_again():
    prelu, meta = torch.ops.aten.prelu.default, torch._C.DispatchKey.Meta
    before = prelu.py_kernels.get(meta)
    capture(Between(CALLS["prelu"]), torch.randn(B, 16))
    assert before is None or prelu.py_kernels[meta] is before

"""What a capture cannot do, said in one line with the module, the operation and the mend; and what fake tensors save."""

import threading
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from loka_sim.capture import capture
from loka_sim.errors import UserError
from loka_sim.modelspec import PASSES, Dim

pytestmark = pytest.mark.usefixtures("gemms_alone")


class Inner(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.linear, self.run = nn.Linear(8, 8), run

    def forward(self, x):
        return self.run(self.linear(x))


class Outer(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.first, self.inner, self.top = nn.Linear(8, 8), Inner(run), nn.Linear(8, 1)

    def forward(self, x):
        return self.top(self.inner(self.first(x)))


def refusal(model, inputs=None):
    with pytest.raises(UserError) as caught:
        capture(model, torch.randn(4, 8) if inputs is None else inputs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("run", "operation"),
    [
        (lambda x: x if x.sum() > 0 else -x, "bool"),
        (lambda x: [x] * int(x[0, 0]), "int"),
        (lambda x: torch.as_tensor(x.detach().numpy()), "numpy"),
    ],
)
def test_a_model_that_reads_values_is_refused_by_module_and_operation(run, operation):
    text = refusal(Outer(run))
    assert text.startswith("Outer, module inner, operation ") and operation in text
    assert text.endswith("let no shape or branch depend on tensor values, or write a spec file")


def test_a_mask_that_feeds_no_product_is_captured_on_fake_tensors():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, wanted):
            return self.linear(x).squeeze(1)[wanted].sigmoid().sum()

    (site,) = capture(Masked(), (torch.randn(4, 8), torch.ones(4, dtype=torch.bool))).sites
    assert set(site.passes) == {"output", "grad_weight"}


def test_a_factor_read_from_the_data_is_captured_on_fake_tensors():
    spec = capture(Outer(lambda x: x * x.sum().item()), torch.randn(4, 8))
    assert [site.name for site in spec.sites] == ["first", "inner.linear", "top"]
    assert [set(site.passes) for site in spec.sites[1:]] == [set(PASSES)] * 2


def test_a_product_whose_size_the_data_decide_is_said_by_name():
    class Selected(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.expert = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x, wanted):
            return self.expert(self.linear(x)[wanted])

    spec = capture(Selected(), (torch.randn(4, 8), torch.ones(4, dtype=torch.bool)))
    assert [site.name for site in spec.sites] == ["linear"]
    assert spec.unaccounted == ("expert: output: m depends on the data (its FLOPs are not known)",)


def test_a_model_that_asks_for_its_device_is_captured_on_fake_tensors():
    def ask(x):
        if x.device.type == "meta":
            raise NotImplementedError("no kernel for this device")
        return x

    spec = capture(Outer(ask), torch.randn(4, 8))
    assert [site.name for site in spec.sites] == ["first", "inner.linear", "top"]
    assert set(spec.sites[1].passes) == set(PASSES)


def test_inputs_that_do_not_fit_are_said():
    text = refusal(Outer(F.relu), torch.randn(4, 9))
    assert text.startswith("Outer, module first, operation linear: ") and text.endswith("check that the inputs fit the model")


class Named(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.linear, self.forward = nn.Linear(8, 8), forward.__get__(self)


def both(self, dense, ids):
    return self.linear(dense) + ids[:, None]


def dense_and_more(self, dense, scale=None):
    return self.linear(dense) if scale is None else self.linear(dense) * scale


def one(self, batch):
    return self.linear(batch["dense"])


@pytest.mark.parametrize(
    ("forward", "keys", "said"),
    [
        (both, ("dense", "idz"), "takes no 'idz' and needs 'ids'"),
        (both, ("dense",), "needs 'ids'"),
        (both, ("dense", "ids", "labels"), "takes no 'labels'"),
    ],
)
def test_a_key_that_forward_lacks_is_named(forward, keys, said):
    inputs = {key: torch.randn(4, 8) if key == "dense" else torch.ones(4) for key in keys}
    text = refusal(Named(forward), inputs)
    assert text == f"inputs: Named.forward {said}; name the dict's keys after its arguments, or pass a tuple"


def test_a_key_that_forward_lacks_is_named_where_the_dict_could_be_its_one_argument():
    text = refusal(Named(dense_and_more), {"dense": torch.randn(4, 8), "scala": torch.ones(4, 1)})
    assert text.startswith("Named, ") and text.endswith(
        "; forward takes no 'scala', so that the dict was its one argument: name the keys after forward's arguments"
    )
    assert refusal(Named(one), {"dense": torch.randn(4, 9)}).endswith("; check that the inputs fit the model")
    assert [site.name for site in capture(Named(one), {"dense": torch.randn(4, 8)}).sites] == ["linear"]


def test_a_batch_written_in_the_model_is_said():
    text = refusal(Outer(lambda x: x.view(4, 2, 4).flatten(1)))
    assert text.startswith("Outer, module inner, operation view: fails at batch 8: ")
    assert text.endswith("take sizes from the inputs' shapes (it ran at batch 4)")


@pytest.mark.parametrize("inputs", [(), (3,), {"x": "text"}, (torch.tensor(1.0),)])
def test_inputs_without_a_batch_are_refused(inputs):
    assert "no tensor has a dimension 0 that could be the batch" in refusal(nn.Linear(8, 8), inputs)


@dataclass
class Batch:
    dense: torch.Tensor
    scale: torch.Tensor


class OfBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch):
        return self.linear(batch.dense) * batch.scale


def test_tensors_that_a_dataclass_hides_are_said_and_the_mend_is_one():
    inputs = (Batch(torch.randn(4, 8), torch.ones(4, 1)),)
    text = refusal(OfBatch(), inputs)
    assert text.startswith("inputs: a Batch hides its tensors; call torch.utils._pytree.register_dataclass(Batch) first")
    torch.utils._pytree.register_dataclass(Batch)
    try:
        (site,) = capture(OfBatch(), inputs).sites
    finally:
        torch.utils._pytree._deregister_pytree_node(Batch)
    assert site.passes["output"].m == Dim(0, 1)


def test_an_empty_batch_is_refused():
    assert "pass at least one sample" in refusal(nn.Linear(8, 8), torch.empty(0, 8))


def test_sparse_inputs_are_refused():
    assert "torch.sparse_coo" in refusal(nn.Linear(8, 8), (torch.randn(4, 8), torch.eye(4).to_sparse()))


def test_a_model_that_cannot_be_copied_is_refused():
    model = nn.Linear(8, 8)
    model.lock = threading.Lock()
    assert refusal(model).startswith("Linear cannot be copied for the capture (cannot pickle '_thread.lock' object); keep")


def test_lazy_parameters_are_refused_by_name():
    model = nn.Sequential(nn.LazyLinear(4))
    assert refusal(model).startswith("0.weight: a lazy parameter has no shape yet; run one batch")


def test_an_error_in_the_backward_is_one_line_too():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("first line\nsecond line")

    assert "first line" in refusal(Outer(Broken.apply))


def test_a_backward_that_fails_is_the_models_to_mend():
    """A ReLU's result, changed in place before its gradient: its tensor's type has `Meta` in its name here."""
    text = refusal(Outer(lambda x: x.relu().mul_(2)))
    assert text.startswith("Outer, module (root), operation backward: one of the variables needed for gradient computation")
    assert text.endswith("; mend the model, whose own training step fails so")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Outer(lambda x: x.relu().mul_(2))(torch.randn(4, 8)).sum().backward()


def test_products_that_no_fp8_kernel_could_run_are_no_sites():
    """Complex ones, whose FLOPs are said as FlopCounterMode counts them."""

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.mix = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

        def forward(self, x):
            y = self.linear(x)
            return (torch.complex(y, y) @ self.mix).abs()

    spec, x = capture(Spectral(), torch.randn(4, 8)), torch.randn(4, 8)
    with FlopCounterMode(display=False) as counter:
        Spectral()(x).sum().backward()
    assert [site.name for site in spec.sites] == ["linear"]
    product = 2 * 4 * 8 * 8
    assert spec.unaccounted == (f"(root): mm of complex64 ({3 * product} FLOPs at batch 4)",)
    assert spec.flops() + 3 * product == counter.get_total_flops()

"""Attention as torch's own kernels, where it has some, and as products where it has none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import benchmarks.more_models
from loka_sim.capture import capture
from loka_sim.errors import UserError
from loka_sim.modelspec import load, save
from loka_sim.whatif import whatif

B, HEADS, TOKENS, FEATURES = 16, 4, 50, 16
WIDTH = HEADS * FEATURES


class Attention(nn.Module):
    """Heads over tokens."""

    def __init__(self, features=FEATURES, causal=False, masked=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * features), nn.Linear(HEADS * features, 8)
        self.causal, self.masked = causal, masked

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.zeros(TOKENS, TOKENS, device=x.device, dtype=x.dtype) if self.masked else None
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(found.transpose(1, 2).flatten(2))


def captured(model):
    return capture(model, torch.randn(B, TOKENS, WIDTH))


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_one_kernel_forward_and_one_entry_backward(causal):
    spec = captured(Attention(causal=causal))
    assert not spec.untraced and not spec.unaccounted and [site.name for site in spec.sites] == ["qkv", "out"]
    forward, backward = (kernel for kernel in spec.fused if kernel.kind.startswith("attention"))
    assert (forward.phase, forward.kind, backward.phase, backward.kind) == (
        "forward",
        "attention",
        "backward",
        "attention_backward",
    )
    name = f"attention:{TOKENS}x{TOKENS}x{FEATURES}" + causal * ":causal"
    assert forward.label == backward.label == name
    queries, size = HEADS * TOKENS, 2 * HEADS * TOKENS * FEATURES  # bytes of one operand in bf16
    assert forward.kept.per_batch == backward.kept.per_batch == queries
    assert forward.reduced.const == (TOKENS // 2 if causal else TOKENS) * FEATURES
    assert forward.read_bytes.per_batch == 3 * size and forward.written_bytes.per_batch == size + 4 * queries
    assert backward.read_bytes.per_batch == 5 * size + 4 * queries and backward.written_bytes.per_batch == 3 * size


@pytest.mark.parametrize("options", [{"masked": True}, {"features": 160}], ids=["a mask", "many features"])
def test_what_torch_has_no_such_kernel_for_is_products(options):
    spec = captured(Attention(**options))
    assert not spec.untraced and len(spec.sites) == 4 and not any(kernel.kind.startswith("attention") for kernel in spec.fused)


def test_heads_that_8_does_not_divide_are_padded():
    """As an H200 ran 12 features (torch 2.11): three operands with zeros behind, and flash attention of 16."""
    spec = captured(Attention(features=12))
    assert not spec.untraced and [site.name for site in spec.sites] == ["qkv", "out"]
    assert {kernel.label for kernel in spec.fused if kernel.kind.startswith("attention")} == {
        f"attention:{TOKENS}x{TOKENS}x16:padded"
    }
    padded = [kernel for kernel in spec.fused if "constant_pad_nd" in kernel.label and kernel.phase == "forward"]
    assert sum(kernel.count * kernel.written_bytes.per_batch for kernel in padded) == 3 * 2 * HEADS * TOKENS * 16


class Written(Attention):
    """The same by hand: products and a softmax, which torch.compile takes for attention."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) / FEATURES**0.5, -1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_what_is_written_by_hand_is_the_same_kernels():
    """As an H200 ran it (torch 2.11): cuDNN's kernels and no products; the gradient of the result is copied before.

    The result itself, too, where the backward reads it both as it is and as the next product's operand.
    """
    spec, called = captured(Written()), captured(Attention())
    assert not spec.untraced and [site.name for site in spec.sites] == ["qkv", "out"]
    attention = [kernel for kernel in spec.fused if kernel.kind.startswith("attention")]
    assert attention == [kernel for kernel in called.fused if kernel.kind.startswith("attention")]
    assert [kernel.phase for kernel in spec.fused if kernel.label == "clone"] == ["forward", "backward"]


def test_scores_that_are_used_otherwise_stay_products():
    class Looked(Attention):
        def forward(self, x):
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            weights = torch.softmax(q @ k.transpose(-2, -1) / FEATURES**0.5, -1)
            return self.out((weights @ v).transpose(1, 2).flatten(2)), weights

    spec = captured(Looked())
    assert not spec.untraced and len(spec.sites) == 4 and not any(kernel.kind.startswith("attention") for kernel in spec.fused)


def test_torchs_own_layers_attend_so_too():
    before = F.scaled_dot_product_attention
    spec = captured(nn.TransformerEncoderLayer(WIDTH, HEADS, 128, dropout=0.1, batch_first=True))
    assert not spec.untraced and F.scaled_dot_product_attention is before
    assert [kernel.kind for kernel in spec.fused if kernel.kind.startswith("attention")] == ["attention", "attention_backward"]
    assert all(site.passes["output"].groups.at(B) == 1 for site in spec.sites)


def test_a_file_holds_it_and_a_name_that_says_no_sizes_is_refused(tmp_path):
    spec = captured(Attention(causal=True))
    save(spec, tmp_path / "spec.json")
    assert load(tmp_path / "spec.json") == spec
    (tmp_path / "spec.json").write_text(
        (tmp_path / "spec.json").read_text().replace('"attention:50x50x16:causal"', '"attention:50"')
    )
    with pytest.raises(UserError, match=r"label: 'attention:50' names no attention; write attention:QUERIESxKEYSxFEATURES"):
        load(tmp_path / "spec.json")


def test_its_time_is_in_the_whole_step():
    spec = captured(Attention(causal=True))
    found = [other for other in whatif(spec, batch=4096).others if other.kind.startswith("attention")]
    assert len(found) == 2 and all(other.measured and other.time.low_us < other.time.us < other.time.high_us for other in found)
    # No faster than its bytes, read and written once; tiles of 128 queries are filled by 50, and by 16 features of 64.
    for other in found:
        assert 1 < other.time.us / (other.moved_bytes / 4.4e6) < 20


def test_by_hand_with_heads_that_torch_has_no_kernel_for_it_is_traced_all_the_same():
    """Twelve features a head: what a pass puts in its place lies otherwise, so that a view of that is a copy."""
    with torch.device("meta"):
        model, inputs = benchmarks.more_models.sim_wide()
    spec = capture(model, inputs)
    assert not spec.untraced and len(spec.sites) == 11

"""The zoo: structure after the papers, checked against independent formulas; sizes; what Mods change."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from loka_sim import zoo
from loka_sim.errors import UserError
from loka_sim.inputs import InputShape
from loka_sim.mods.modules import BlockNorm, LayerFactory
from loka_sim.zoo import interformer, wukong
from loka_sim.zoo.common import BatchedProduct, LowRankCross, PairwiseDot, Tables

SMALL = [name for name in zoo.NAMES if name.endswith("-small")]
# GFLOP per sample of one training step (forward and backward), as FlopCounterMode counts it.
GFLOP_PER_SAMPLE = {
    "dlrm-production": (0.0146, 0.0149),
    "dcnv2-production": (0.095, 0.097),
    "wukong-production": (22.8, 25.2),
    "interformer-production": (26.6, 29.4),
}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def gflop_per_sample(name: str, batch: int = 16) -> float:
    model = zoo.build(name)
    with FlopCounterMode(display=False) as counter:
        model(*zoo.example_inputs(name, batch)).sum().backward()
    return counter.get_total_flops() / batch / 1e9


@pytest.mark.parametrize("name", sorted(GFLOP_PER_SAMPLE))
def test_production_models_have_the_stated_work(name):
    low, high = GFLOP_PER_SAMPLE[name]
    assert low <= gflop_per_sample(name) <= high


@pytest.mark.parametrize("mods", ["none", "all"])
@pytest.mark.parametrize("name", SMALL)
def test_small_models_run_forward_and_backward(name, mods):
    model = zoo.build(name, mods=mods, device="cpu")
    logits = model(*zoo.example_inputs(name, 32, device="cpu", seed=1))
    assert logits.shape == (32,)
    assert logits.std() > 0
    logits.square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name


def test_mlperf_sizes():
    dlrm, dcn = zoo.build("dlrm"), zoo.build("dcnv2")

    def shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
        return {n: (m.in_features, m.out_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}

    top = {"top.1": (1024, 1024), "top.2": (1024, 512), "top.3": (512, 256), "predict": (256, 1)}
    bottom = {"bottom.0": (13, 512), "bottom.1": (512, 256), "bottom.2": (256, 128)}
    assert shapes(dlrm) == bottom | {"top.0": (480, 1024)} | top
    cross = {f"cross.{i}.{part}": size for i in range(3) for part, size in (("v", (3456, 512)), ("u", (512, 3456)))}
    assert shapes(dcn) == bottom | cross | {"top.0": (3456, 1024)} | top
    assert sum(table.num_embeddings for table in dlrm.tables) == 204_184_588
    assert all(table.embedding_dim == 128 for table in dlrm.tables)


@pytest.mark.parametrize("model", sorted(zoo.MODELS))
def test_both_sizes_share_their_names(model):
    def roles(name: str) -> set[str]:
        modules = zoo.build(name).named_modules()
        return {re.sub(r"\b\d+\b", "*", n) for n, m in modules if isinstance(m, (nn.Linear, BatchedProduct))}

    assert roles(f"{model}-small") == roles(f"{model}-production")


def test_low_rank_cross_is_the_papers_formula():
    layer = LowRankCross(LayerFactory(), 12, 5)
    x0, x = torch.randn(3, 12), torch.randn(3, 12)
    u, v, b = (p.detach().double().numpy() for p in (layer.u.weight, layer.v.weight, layer.u.bias))
    expected = np.empty((3, 12))
    for sample in range(3):
        for i in range(12):
            product = sum(u[i, r] * v[r, j] * float(x[sample, j]) for r in range(5) for j in range(12))
            expected[sample, i] = float(x0[sample, i]) * (product + b[i]) + float(x[sample, i])
    np.testing.assert_allclose(layer(x0, x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert layer.v.bias is None


def test_pairwise_dot_is_every_pair_once():
    x = torch.randn(2, 5, 7)
    out = PairwiseDot(5)(x)
    expected = [[float(x[s, i] @ x[s, j]) for i in range(5) for j in range(i)] for s in range(2)]
    assert out.shape == (2, 16)
    np.testing.assert_allclose(out[:, :10].numpy(), expected, rtol=1e-5, atol=1e-5)
    assert (out[:, 10:] == 0).all()


def test_wukong_optimized_fm_is_x_xt_y():
    block = wukong.FactorizationMachineBlock(wukong.SMALL, 6, LayerFactory())
    x = torch.randn(2, 6, 16)
    y = block.project.weight.detach().T  # (n, k)
    expected = np.zeros((2, 6, wukong.SMALL.rank))
    for sample in range(2):
        for i in range(6):
            for column in range(wukong.SMALL.rank):
                expected[sample, i, column] = sum(float(x[sample, i] @ x[sample, j]) * float(y[j, column]) for j in range(6))
    np.testing.assert_allclose(block.interactions(x).detach().numpy(), expected, rtol=1e-3, atol=1e-4)


def test_wukong_layer_adds_and_normalizes():
    layer = wukong.WukongLayer(wukong.SMALL, 32, LayerFactory())
    x = torch.randn(2, 32, 16)
    compressed = torch.stack([layer.lcb.weight @ sample for sample in x])  # W_L X
    expected = torch.cat((layer.fmb(x), compressed), dim=1) + x
    expected = (expected - expected.mean(-1, keepdim=True)) / (expected.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert layer.residual is None and layer.lcb.bias is None
    assert wukong.WukongLayer(wukong.SMALL, 20, LayerFactory()).residual is not None


def test_attention_agrees_with_torch():
    config = interformer.SMALL
    ours = interformer.Attention(config, LayerFactory())
    theirs = nn.MultiheadAttention(config.dim, config.heads, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.eye(config.dim).repeat(3, 1))
        theirs.in_proj_bias.zero_()
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    query, key, value = torch.randn(3, 2, 9, config.dim)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 1:5] = True
    expected, _ = theirs(query, key, value, key_padding_mask=padding)
    actual = ours(ours.split(query), ours.split(key), ours.split(value), padding)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_rotation_depends_on_distance_only():
    query, key = torch.randn(8), torch.randn(8)
    rotated_query = interformer.rotate(query.expand(1, 1, 12, 8))[0, 0]
    rotated_key = interformer.rotate(key.expand(1, 1, 12, 8))[0, 0]
    torch.testing.assert_close(rotated_query[7] @ rotated_key[4], rotated_query[11] @ rotated_key[8])
    angles = 5 / 10_000 ** (np.arange(0, 8, 2) / 8)
    expected = (query.numpy()[0::2] + 1j * query.numpy()[1::2]) * np.exp(1j * angles)
    np.testing.assert_allclose(rotated_query[5, 0::2].numpy() + 1j * rotated_query[5, 1::2].numpy(), expected, rtol=1e-5)


def test_personalized_ffn_multiplies_by_a_matrix_per_sample():
    arch = interformer.SequenceArch(interformer.SMALL, LayerFactory())
    x_sum, s = torch.randn(2, 4, 16), torch.randn(2, 10, 16)
    seen = {}
    arch.pffn_norm.register_forward_hook(lambda module, inputs, output: seen.update(pffn=inputs[0]))
    arch(x_sum, s, torch.zeros(2, 10, dtype=torch.bool))
    weight = torch.einsum("bcd,ec->bde", x_sum, arch.generate.weight)  # X_sum W, (d, d) per sample
    torch.testing.assert_close(seen["pffn"], torch.einsum("bde,bte->btd", weight, s), rtol=1e-4, atol=1e-5)


def test_interformer_flows_in_both_directions():
    name = "interformer-small"
    model = zoo.build(name, device="cpu").eval()
    dense, ids, sequence = zoo.example_inputs(name, 2, device="cpu")
    seen = {}
    layer = model.layers[1]
    layer.interaction.register_forward_hook(lambda module, inputs, output: seen.update(x=output))
    layer.sequence.register_forward_hook(lambda module, inputs, output: seen.update(s=output))
    model(dense, ids, sequence)
    before = dict(seen)
    changed = sequence.clone()
    changed[:, 3] = (sequence[:, 3] + 1) % 8_191 + 1
    model(dense, ids, changed)
    assert not torch.equal(before["x"], seen["x"])  # the sequence reaches the non-sequence tokens
    model(dense + 1.0, ids, sequence)
    assert not torch.equal(before["s"], seen["s"])  # and the other way round


def test_interformer_ignores_padding():
    name = "interformer-small"
    model = zoo.build(name, device="cpu").eval()
    dense, ids, sequence = zoo.example_inputs(name, 2, device="cpu")
    sequence[:, :20] = 0
    expected = model(dense, ids, sequence)
    with torch.no_grad():
        model.sequence_table.weight[0] += 3.0
    torch.testing.assert_close(model(dense, ids, sequence), expected)


@pytest.mark.parametrize("features", [7, 256, 512, 600])
def test_block_norm_is_the_naive_loop(features):
    x = torch.randn(3, features) * 5
    out = BlockNorm(features)(x)
    for row in range(3):
        for start in range(0, features, 256):
            block = x[row, start : start + 256].double().numpy()
            expected = block / np.sqrt(np.mean(block**2) + 1e-5)
            np.testing.assert_allclose(out[row, start : start + 256].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert not list(BlockNorm(features).parameters())


def test_mods_change_the_modules_they_name():
    plain, changed = zoo.build("interformer-small"), zoo.build("interformer-small", mods="all")
    kinds = {type(module) for module in changed.modules()}
    assert nn.LayerNorm not in kinds and BlockNorm in kinds
    assert nn.SiLU not in kinds and nn.Hardswish in kinds
    biased = [n for n, m in changed.named_modules() if isinstance(m, nn.Linear) and m.bias is not None]
    assert biased == ["predict"]
    assert {nn.LayerNorm, nn.SiLU} <= {type(module) for module in plain.modules()}
    assert nn.ReLU in {type(module) for module in zoo.build("wukong-small", mods="hardswish").modules()}


def test_tables_look_up_their_own_column():
    tables = Tables((5, 7), 3)
    out = tables(torch.tensor([[1, 6], [4, 0]]))
    assert torch.equal(out[0, 1], tables[1].weight[6]) and torch.equal(out[1, 0], tables[0].weight[4])


def test_another_shape_of_input():
    shape = InputShape(dense=3, rows=(11, 5), sequence_rows=20, sequence_length=6)
    model = zoo.build("interformer-small", device="cpu", shape=shape)
    inputs = zoo.example_inputs("interformer-small", 4, device="cpu", shape=shape)
    assert [tuple(tensor.shape) for tensor in inputs] == [(4, 3), (4, 2), (4, 6)]
    assert model(*inputs).shape == (4,)


def test_building_repeats_with_the_seed():
    first, second = (_seeded("wukong-small") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def _seeded(name: str) -> nn.Module:
    torch.manual_seed(5)
    return zoo.build(name, device="cpu")


def test_wrong_names_are_refused_in_one_line():
    with pytest.raises(UserError, match=r"^unknown zoo model 'wukon'; choose from dlrm-small.*interformer-production$"):
        zoo.build("wukon")
    with pytest.raises(UserError, match=r"^unknown mod 'nobias'; choose from no_bias, blocknorm, hardswish, all, none$"):
        zoo.build("dlrm-small", mods=("nobias",))
    with pytest.raises(UserError, match=r"^batch = 0: give a whole number of at least 1$"):
        zoo.example_inputs("dlrm-small", 0)

import pytest
import torch

from hil.collect import legal_runners, main, read_shapes
from hil.kernels.base import Shape
from perfmodel import GEMM_KERNELS


def names(shape, kinds):
    return {runner.name for runner in legal_runners(shape, kinds)}


def test_legal_runners():
    kinds = ("gemm", "batched_gemm")
    assert names(Shape(256, 128, 128), kinds) == set(GEMM_KERNELS)
    assert names(Shape(256, 100, 128), kinds) == {"torch/bf16"}
    assert names(Shape(255, 128, 128), kinds) == set(GEMM_KERNELS) - {"torch/fp8_block128"}
    assert names(Shape(27, 27, 128, 2048), kinds) == {"torch/bf16_batched"}
    memory = names(Shape(256, 1, 384), ("quantize", "layout", "pointwise"))
    assert "torch/quantize_rowwise" in memory and "torch/blocknorm_forward" not in memory
    assert "torch/blocknorm_forward" in names(Shape(256, 1, 128), ("pointwise",))


def test_shapes_from_a_file(tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text("m,n,k,groups\n1,2,3,4\n5,6,7,1\n")
    assert read_shapes(path) == [Shape(1, 2, 3, 4), Shape(5, 6, 7)]
    path.write_text("m,n,k\n1,2,3\n")
    assert read_shapes(path) == [Shape(1, 2, 3)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_without_a_gpu_nothing_is_written(tmp_path, capsys):
    assert main(["gemm", "--out", str(tmp_path / "out")]) == 3
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""Times of kernels, quantization, collectives and steps on a GPU, predicted from measurements."""

from perfmodel.data_folder import data_folder
from perfmodel.hardware import HardwareSpec
from perfmodel.kernels import GEMM_KERNELS, KERNELS, KernelSpec
from perfmodel.model import PerfModel
from perfmodel.saved import load
from perfmodel.topology import Cluster

__all__ = ["GEMM_KERNELS", "KERNELS", "Cluster", "HardwareSpec", "KernelSpec", "PerfModel", "data_folder", "load"]

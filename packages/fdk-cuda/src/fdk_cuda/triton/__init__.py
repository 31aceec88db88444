"""Kernels in Triton: every format, forward and backward, on any recent NVIDIA GPU."""

from fdk_cuda.triton.backend import TritonBackend, TritonLayout
from fdk_cuda.triton.tune import tune_layers

__all__ = ["TritonBackend", "TritonLayout", "tune_layers"]

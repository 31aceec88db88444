"""Kernels in Triton: every format, forward and backward, on any recent NVIDIA GPU."""

from fdk_cuda.triton.autotune import tune_layers
from fdk_cuda.triton.backend import TritonBackend, TritonLayout

__all__ = ["TritonBackend", "TritonLayout", "tune_layers"]

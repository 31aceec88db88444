"""Triton kernels for every format, forward and backward, on compute capability 8.0 and later."""

from fdk_cuda.triton import rotation as rotation  # registers its kernel
from fdk_cuda.triton import round_columns as round_columns  # registers its kernel
from fdk_cuda.triton.autotune import tune_layers
from fdk_cuda.triton.backend import TritonBackend, TritonLayout

__all__ = ["TritonBackend", "TritonLayout", "tune_layers"]

"""Kernels in Triton: every format, forward and backward, on any recent NVIDIA GPU."""

from fdk_cuda.triton.backend import TritonBackend, TritonLayout
from fdk_formats.backends import register

__all__ = ["TritonBackend", "TritonLayout"]

register(TritonBackend())

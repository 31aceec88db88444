"""Marlin: CUDA kernels over weights in fragment order, bound by the time to read them."""

from fdk_cuda.marlin.backend import (
    MARLIN,
    MARLIN_LUT,
    MarlinBackend,
    MarlinLayout,
    marlin_backends,
)
from fdk_cuda.marlin.precompile import precompile

__all__ = ["MARLIN", "MARLIN_LUT", "MarlinBackend", "MarlinLayout", "marlin_backends", "precompile"]

"""Marlin: hand-written kernels over fragment-order weights, at the rate of reading them."""

from fdk_cuda.marlin.backend import (
    MARLIN,
    MARLIN_LUT,
    MarlinBackend,
    MarlinLayout,
    marlin_backends,
)
from fdk_cuda.marlin.precompile import precompile

__all__ = ["MARLIN", "MARLIN_LUT", "MarlinBackend", "MarlinLayout", "marlin_backends", "precompile"]

"""Linear layers with 1- to 8-bit weights on NVIDIA GPUs. Importing registers the backends."""

import importlib.util

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, precompile
from fdk_formats.backends import register

__version__ = "0.1.0"
__all__ = ["precompile"]

register(MARLIN)
register(MARLIN_LUT)
# Triton has wheels for Linux only; where it is missing its backend is too.
if importlib.util.find_spec("triton") is not None:
    from fdk_cuda.triton import TritonBackend

    register(TritonBackend())

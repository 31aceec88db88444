"""Linear layers with 1- to 8-bit weights on NVIDIA GPUs. Importing registers the backends."""

import importlib.util

__version__ = "0.1.0"

# Triton has wheels for Linux only. Elsewhere the package imports, and brings no backend.
if importlib.util.find_spec("triton") is not None:
    from fdk_cuda import triton as triton

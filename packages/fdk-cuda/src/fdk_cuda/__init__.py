"""Linear layers with 1- to 8-bit weights on NVIDIA GPUs. Importing registers the backends."""

import importlib.util

from fdk_cuda import dispatch_report
from fdk_cuda.marlin import marlin_backends, precompile
from fdk_formats.backends import register

__version__ = "0.1.0"
__all__ = ["dispatch_report", "precompile", "register_backends"]


def register_backends(*, batch_invariant: bool = False) -> None:
    """Registers ``marlin``, ``marlin-lut`` and ``triton`` again, for layers packed from now on.

    Args:
        batch_invariant: a row of y does not depend on m, in all three backends. It costs time: see
            docs/design/marlin.md and docs/design/triton.md.
    """
    for backend in marlin_backends(batch_invariant=batch_invariant):
        register(backend)
    # Triton has wheels for Linux only.
    if importlib.util.find_spec("triton") is not None:
        from fdk_cuda.triton import TritonBackend

        register(TritonBackend(batch_invariant=batch_invariant))


register_backends()

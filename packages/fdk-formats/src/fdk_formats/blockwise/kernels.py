"""Kernels of the blockwise ops: four functions per device type, and their registry."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fdk_formats.backends import all_backends
from fdk_formats.torch_internals import is_traced

# (flat, code, block_size) -> (packed, absmax)
Quantise8bit = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
# (packed, absmax, code, block_size, dtype) -> flat
Dequantise8bit = Callable[[Tensor, Tensor, Tensor, int, torch.dtype], Tensor]
# (flat, kind, block_size) -> (packed, absmax)
Quantise4bit = Callable[[Tensor, str, int], tuple[Tensor, Tensor]]
# (packed, absmax, code, block_size, numel, dtype) -> flat
Dequantise4bit = Callable[[Tensor, Tensor, Tensor, int, int, torch.dtype], Tensor]


@dataclass(frozen=True)
class Kernels:
    """Four functions on checked, contiguous, one-dimensional tensors of one device.

        flat   :: [n, float32 | float16 | bfloat16]   n may be 0
        code   :: [256, float32] ascending, or [16, float32] in the order of the 4-bit codes
        absmax :: [ceil(n / block_size), float32]
        packed :: [n, uint8] at 8 bits, [ceil(n/2), uint8] at 4 (first code in the high bits)

    ``block_size`` is a power of two from 32 to 4096 at 4 bits, and any positive number at 8. NaN or
    infinity in ``flat`` must appear as NaN or infinity in its block's absmax, where the op raises.
    Implementations return the bytes of ``TORCH_KERNELS``;
    ``fdk_formats.testing.blockwise.check_kernels`` compares them.
    """

    quantise_8bit: Quantise8bit
    dequantise_8bit: Dequantise8bit
    quantise_4bit: Quantise4bit
    dequantise_4bit: Dequantise4bit


_REGISTERED: dict[str, Kernels] = {}


def register_kernels(device_type: str, kernels: Kernels, *, default: bool = False) -> None:
    """Registers the kernels of the blockwise ops for a device type.

    The latest call wins; register ``TORCH_KERNELS`` to undo it. Packages with kernels register them
    on import, and the ops import those that are installed.

    Args:
        device_type: ``cpu``, ``cuda`` or another.
        kernels: the four functions.
        default: True, for packages, to keep kernels that are registered already.

    Raises:
        TypeError: if ``kernels`` is not a ``Kernels``.
        RuntimeError: if torch has no such device type.
    """
    if not isinstance(kernels, Kernels):
        raise TypeError(f"register_kernels: wanted a Kernels, got {type(kernels).__name__}")
    device_type = torch.device(device_type).type
    if not (default and device_type in _REGISTERED):
        _REGISTERED[device_type] = kernels


def kernels_for(device: torch.device) -> Kernels:
    """Returns the kernels registered for a device; torch's while tracing, or without others."""
    from fdk_formats.blockwise.torch_kernels import TORCH_KERNELS

    # Registered kernels read memory, which traced tensors do not have.
    if is_traced():
        return TORCH_KERNELS
    if device.type not in _REGISTERED:
        all_backends()  # imports installed packages, which register their kernels
    return _REGISTERED.get(device.type, TORCH_KERNELS)

"""The seam behind the blockwise ops: four flat functions for each type of device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fdk_formats.backends import all_backends
from fdk_formats.torch_internals import in_dispatch_mode, in_transform

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
    """The work of the blockwise ops on checked, contiguous, one-dimensional tensors.

        flat   :: [n, float32 | float16 | bfloat16]
        code   :: [256, float32] ascending, or [16, float32] in the order of the 4-bit codes
        absmax :: [ceil(n / block_size), float32]
        packed :: [n, uint8] at 8 bits, [ceil(n/2), uint8] at 4 (first code in the high bits)

    ``block_size`` is a power of two from 32 to 4096 at 4 bits, and any positive number at 8.
    All tensors lie on one device, and n may be 0. A NaN or infinity in ``flat`` must come out as a
    NaN or infinity in its block's absmax: the op raises there, and the codes do not matter. Every
    implementation gives the bytes of ``TORCH_KERNELS``:
    ``fdk_formats.testing.blockwise.check_kernels`` compares them.
    """

    quantise_8bit: Quantise8bit
    dequantise_8bit: Dequantise8bit
    quantise_4bit: Quantise4bit
    dequantise_4bit: Dequantise4bit


_REGISTERED: dict[str, Kernels] = {}


def register_kernels(device_type: str, kernels: Kernels, *, default: bool = False) -> None:
    """Makes the blockwise ops use ``kernels`` for tensors of ``device_type`` (``cpu``, ``cuda``).

    The latest call counts; registering ``TORCH_KERNELS`` is how to go back. A package that brings
    kernels registers them when it is imported, which the ops do where it is installed.

    Args:
        default: gives way to what is registered already, for packages.

    Raises:
        TypeError: where ``kernels`` is no ``Kernels``.
        RuntimeError: where torch knows no such type of device.
    """
    if not isinstance(kernels, Kernels):
        raise TypeError(f"register_kernels: wanted a Kernels, got {type(kernels).__name__}")
    device_type = torch.device(device_type).type
    if not (default and device_type in _REGISTERED):
        _REGISTERED[device_type] = kernels


def kernels_for(device: torch.device) -> Kernels:
    """The kernels registered for the type of ``device``; the torch ones, or while torch traces."""
    from fdk_formats.blockwise.torch_kernels import TORCH_KERNELS

    # Kernels of packages read memory: what is traced, or has none, is for torch.
    if is_traced():
        return TORCH_KERNELS
    if device.type not in _REGISTERED:
        all_backends()  # imports the installed packages, which bring kernels too
    return _REGISTERED.get(device.type, TORCH_KERNELS)


def is_traced() -> bool:
    """Whether ``torch.compile`` traces, or a mode or a transform of torch.func watches every op."""
    return torch.compiler.is_compiling() or in_dispatch_mode() or in_transform()

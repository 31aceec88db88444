"""Kernels that round groups of weights to a small codebook, and their registry.

``CodebookEncoder`` calls those of the device, or does the same in torch. They are what a search for
scales and a training step spend their time on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fdk_formats.torch_internals import is_traced

# Codebooks with more distinct entries are rounded to in torch.
MAX_ENTRIES = 16

# (midpoints, entries, groups, scale) -> (codes, rounded)
Round = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# (midpoints, entries, groups, scale, importance) -> errors
SquaredErrors = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
# (midpoints, entries, groups, scale, importance) -> (product, square)
Products = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RoundingKernels:
    """Three functions on contiguous float32 tensors of one device.

        midpoints  :: [entries - 1]       ascending
        entries    :: [entries]           2 to MAX_ENTRIES
        groups     :: [rows, k/G, G]
        scale      :: [rows, k/G]
        importance :: [1 or rows, k/G, G], or None for ones

    The code of a weight is the number of midpoints below weight / scale, an IEEE division; where
    the scale is zero the quotient counts as zero.

    - ``round`` returns the codes, uint8, and entry times scale, both in the shape of ``groups`` and
      bit for bit those of torch.
    - ``squared_errors`` returns, for each group, the sum of importance times the squared error.
    - ``products`` returns, for each group, the sums of importance times weight times entry, and of
      importance times squared entry.
    """

    round: Round
    squared_errors: SquaredErrors
    products: Products


_REGISTERED: dict[str, RoundingKernels] = {}


def register_rounding_kernels(device_type: str, kernels: RoundingKernels) -> None:
    """Registers the kernels for a device type; packages with kernels do so on import.

    Args:
        device_type: ``cpu``, ``cuda`` or another.
        kernels: the functions.
    """
    _REGISTERED[torch.device(device_type).type] = kernels


def rounding_kernels_for(device: torch.device, entries: int) -> RoundingKernels | None:
    """Returns the kernels for a device and a number of distinct entries.

    None while tracing, because kernels read memory, and where there are none.
    """
    if not 1 < entries <= MAX_ENTRIES or is_traced():
        return None
    if device.type not in _REGISTERED:
        from fdk_formats.backends import all_backends

        all_backends()  # imports installed packages, which register their kernels
    return _REGISTERED.get(device.type)

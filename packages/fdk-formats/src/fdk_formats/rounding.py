"""Kernels that round weights to a small codebook, and their registry.

``CodebookEncoder`` and ``compensate`` call those of the device, or do the same in torch. They are
what a search for scales, a training step and error compensation spend their time on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

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
# (midpoints, entries, wanted, reference, feedback, scale, zero) -> (codes, residual)
RoundColumns = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]
]


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


K = TypeVar("K")

_REGISTERED: dict[str, RoundingKernels] = {}
_COLUMNS: dict[str, tuple[RoundColumns, int]] = {}  # with the most entries


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
    return find_kernel(_REGISTERED, device)


def register_round_columns(
    device_type: str, kernel: RoundColumns, max_entries: int = MAX_ENTRIES
) -> None:
    """Registers, for a device type, a kernel that rounds columns one after the other.

    It takes contiguous float32 tensors of one device and returns the codes, ``[b, n, uint8]``, and
    the residual, what rounding leaves of the reference, ``[b, n, float32]``:

        midpoints :: [entries - 1]  ascending
        entries   :: [entries]      2 to max_entries
        wanted    :: [b, n]
        reference :: [b, n]
        feedback  :: [b, b]         below the diagonal; the rest is not used
        scale     :: [b, n]
        zero      :: [b, n], or None for zeros

    For column i, with ``u = wanted_i + sum_{j < i} feedback_ij residual_j``, the code is the number
    of midpoints below ``u / scale_i + zero_i``, where a scale of zero makes the quotient zero, and
    ``residual_i = reference_i - (entry - zero_i) scale_i``.

    Args:
        device_type: ``cpu``, ``cuda`` or another.
        kernel: the function. The order of the sum is its own.
        max_entries: codebooks with more distinct entries are left to torch.
    """
    _COLUMNS[torch.device(device_type).type] = kernel, max_entries


def round_columns_for(device: torch.device, entries: int) -> RoundColumns | None:
    """Returns the kernel for a device and a number of distinct entries, or None."""
    kernel, max_entries = find_kernel(_COLUMNS, device) or (None, 0)
    return kernel if 1 < entries <= max_entries else None


def find_kernel(registry: dict[str, K], device: torch.device) -> K | None:
    """Returns what a registry has for the type of a device, or None."""
    if device.type not in registry:
        from fdk_formats.backends import all_backends

        all_backends()  # imports installed packages, which register their kernels
    return registry.get(device.type)

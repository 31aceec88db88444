"""Packing canonical tensors into tiles, the layout of native/common/layout.h, and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fdk_cpu import _native
from fdk_cpu.memory import weight_memory
from fdk_cpu.native_args import FLOAT_NAMES, bytes_of
from fdk_cpu.runtime import num_threads
from fdk_formats.tensor import CanonicalWeight


@dataclass(frozen=True)
class Tiles:
    """The tiles of a weight ``[n, k]``.

    Attributes:
        shape: ``(n, k)``.
        group_size: weights that share a scale.
        bits: width of a code.
    """

    shape: tuple[int, int]
    group_size: int
    bits: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of codes and number of scales; zeros for a weight without outputs."""
        if self.shape[0] == 0:
            return 0, 0
        sizes: tuple[int, int] = _native.layout_sizes(*self.shape, self.group_size, self.bits)
        return sizes

    def pack_codes(self, packed: Tensor, codes: Tensor | None = None) -> Tensor:
        """Pack canonical codes, into ``codes`` if given."""
        packed = packed.contiguous()
        codes = weight_memory(self.sizes[0], torch.uint8) if codes is None else codes
        if self.shape[0] != 0:
            sizes = (*self.shape, self.group_size, self.bits)
            _native.pack_codes(*sizes, bytes_of(packed), bytes_of(codes), num_threads())
        return codes

    def unpack_codes(self, codes: Tensor) -> Tensor:
        """Return the canonical codes."""
        n, k = self.shape
        packed = torch.empty((n, (k * self.bits + 7) // 8), dtype=torch.uint8, device="cpu")
        if n != 0:
            sizes = (n, k, self.group_size, self.bits)
            _native.unpack_codes(*sizes, bytes_of(codes), bytes_of(packed), num_threads())
        return packed

    def pack_groups(self, groups: Tensor, packed: Tensor | None = None) -> Tensor:
        """Pack scales or zero points, into ``packed`` if given."""
        groups = groups.contiguous()
        packed = weight_memory(self.sizes[1], groups.dtype) if packed is None else packed
        if self.shape[0] != 0:
            sizes = (*self.shape, self.group_size, groups.element_size())
            _native.pack_groups(*sizes, bytes_of(groups), bytes_of(packed))
        return packed

    def unpack_groups(self, packed: Tensor) -> Tensor:
        """Return the canonical scales or zero points."""
        n, k = self.shape
        groups = torch.empty((n, k // self.group_size), dtype=packed.dtype, device="cpu")
        if n != 0:
            sizes = (n, k, self.group_size, groups.element_size())
            _native.unpack_groups(*sizes, bytes_of(packed), bytes_of(groups))
        return groups


def supported_dtypes(q: CanonicalWeight) -> tuple[torch.dtype, ...]:
    """Return the dtypes of x that a packed weight supports.

    Rows are padded with code 0 up to a multiple of ``_native.TILE_K``. Its value must be finite in
    the dtype, because it is multiplied with zeros.
    """
    first = 0.0 if q.codebook is None else q.codebook[..., 0].abs().max().item()
    padded = q.shape[-1] % _native.TILE_K != 0
    return tuple(dtype for dtype in FLOAT_NAMES if not (padded and first > torch.finfo(dtype).max))

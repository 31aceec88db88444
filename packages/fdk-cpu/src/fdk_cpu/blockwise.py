"""The blockwise ops of ``fdk_formats`` in C++: the same bytes as the torch kernels, faster.

Importing this module registers them for CPU tensors.
"""

from functools import lru_cache

import torch
from torch import Tensor

from fdk_cpu import _native
from fdk_cpu.native_args import FLOAT_NAMES, bytes_of
from fdk_cpu.runtime import num_threads
from fdk_formats.blockwise.codebooks import ascending_codes, four_bit_code
from fdk_formats.blockwise.kernels import Kernels, register_kernels


def quantise_8bit(flat: Tensor, code: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """See ``Kernels.quantise_8bit``."""
    nearest = _nearest_code(code.numpy().tobytes(), bytes(range(len(code))))
    return _quantise(flat, nearest, block_size, len(flat))


def quantise_4bit(flat: Tensor, kind: str, block_size: int) -> tuple[Tensor, Tensor]:
    """See ``Kernels.quantise_4bit``."""
    code = four_bit_code(kind).numpy().tobytes()
    nearest = _nearest_code(code, bytes(ascending_codes(kind)))
    return _quantise(flat, nearest, block_size, (len(flat) + 1) // 2)


def dequantise_8bit(
    packed: Tensor, absmax: Tensor, code: Tensor, block_size: int, dtype: torch.dtype
) -> Tensor:
    """See ``Kernels.dequantise_8bit``."""
    return _dequantise(8, packed, absmax, code, block_size, len(packed), dtype)


def dequantise_4bit(
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    block_size: int,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    """See ``Kernels.dequantise_4bit``."""
    return _dequantise(4, packed, absmax, code, block_size, numel, dtype)


KERNELS = Kernels(
    quantise_8bit=quantise_8bit,
    dequantise_8bit=dequantise_8bit,
    quantise_4bit=quantise_4bit,
    dequantise_4bit=dequantise_4bit,
)


@lru_cache(maxsize=16)
def _nearest_code(code: bytes, order: bytes) -> _native.NearestCode:
    """Cache the search tables of a codebook: 256 KiB each, built in about a millisecond."""
    values = torch.frombuffer(bytearray(code), dtype=torch.float32)
    return _native.NearestCode(bytes_of(values), order)


def _quantise(
    flat: Tensor, nearest: _native.NearestCode, block_size: int, size: int
) -> tuple[Tensor, Tensor]:
    packed = flat.new_empty(size, dtype=torch.uint8)
    absmax = flat.new_empty(-(-len(flat) // block_size), dtype=torch.float32)
    nearest.quantise(
        FLOAT_NAMES[flat.dtype],
        bytes_of(flat),
        block_size,
        bytes_of(packed),
        bytes_of(absmax),
        num_threads(),
    )
    return packed, absmax


def _dequantise(
    bits: int,
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    block_size: int,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    out = packed.new_empty(numel, dtype=dtype)
    _native.dequantise_blocks(
        bits,
        bytes_of(code),
        FLOAT_NAMES[dtype],
        bytes_of(packed),
        bytes_of(absmax),
        block_size,
        bytes_of(out),
        num_threads(),
    )
    return out


register_kernels("cpu", KERNELS, default=True)

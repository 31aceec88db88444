"""Rotation of activations in C++, for layers of rotated formats.

Importing this module registers the kernel for CPU tensors.
"""

import torch
from torch import Tensor

from fdk_cpu import _native
from fdk_cpu.native_args import FLOAT_NAMES, bytes_of
from fdk_cpu.runtime import num_threads
from fdk_formats.format import MIN_ROTATION_BLOCK
from fdk_formats.rotation import register_rotation_kernel


def rotate(x: Tensor, block: int, inverse: bool) -> Tensor | None:
    """See ``register_rotation_kernel``."""
    dtype = FLOAT_NAMES.get(x.dtype)
    if dtype is None or block < MIN_ROTATION_BLOCK:
        return None
    y = torch.empty_like(x)
    _native.rotate(dtype, bytes_of(x), block, inverse, bytes_of(y), num_threads())
    return y


register_rotation_kernel("cpu", rotate)

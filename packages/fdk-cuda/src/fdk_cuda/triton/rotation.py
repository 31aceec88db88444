"""Rotation of activations on a GPU, for layers of rotated formats.

Importing this module registers the kernel for CUDA tensors.
"""

import math
from functools import cache

import torch
from torch import Tensor

from fdk_cuda.gpu import unsupported_gpu
from fdk_cuda.triton.compiled_launch import (
    INTERPRETED,
    compile_and_launch,
    launch_compiled,
    on_device_of,
)
from fdk_cuda.triton.kernels.rotation import rotation_kernel
from fdk_cuda.triton.toolchain import why_no_launcher
from fdk_formats.format import MIN_ROTATION_BLOCK
from fdk_formats.rotation import register_rotation_kernel, signs_on

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Values of a program: a row of 4,096 is rotated by four.
VALUES = 1024
WARPS = 4


def rotate(x: Tensor, block: int, inverse: bool) -> Tensor | None:
    """See ``register_rotation_kernel``."""
    if x.dtype not in DTYPES or block < MIN_ROTATION_BLOCK or not _runs_on(x.device):
        return None
    # The interpreter truncates to bf16 where a GPU rounds.
    out = torch.empty_like(x, dtype=torch.float32 if INTERPRETED else x.dtype)
    count = x.numel() // block
    tensors, key = (x, signs_on(x.device), out), ("rotate", count, block, x.dtype, inverse)
    with on_device_of(x):
        if not launch_compiled(key, tensors):
            blocks = VALUES // block
            constants = {
                "BLOCK": block,
                "BITS": block.bit_length() - 1,
                "SCALE": 1 / math.sqrt(block),
                "INVERSE": inverse,
                "BLOCKS": blocks,
            }
            grid = (-(-count // blocks),)
            compile_and_launch(
                key, rotation_kernel, grid, tensors, (count,), constants, num_warps=WARPS
            )
    return out.to(x.dtype)


@cache
def _runs_on(device: torch.device) -> bool:
    return INTERPRETED or not (unsupported_gpu(device) or why_no_launcher())


register_rotation_kernel("cuda", rotate)

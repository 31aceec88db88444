"""Rounding for error compensation on a GPU: a launch for a block of columns.

In torch each column takes some eight launches, which is most of the time of quantising a large
model: 39,000 columns in a block of an 8B llama, in each of four passes and sweeps at 4 bits.
Importing this module registers the kernel for CUDA tensors.
"""

from functools import cache

import torch
from torch import Tensor

from fdk_cuda.gpu import unsupported_gpu
from fdk_cuda.triton.compiled_launch import INTERPRETED, on_device_of
from fdk_cuda.triton.kernels.round_columns import round_columns_kernel
from fdk_cuda.triton.toolchain import why_no_launcher
from fdk_formats import compensate
from fdk_formats.rounding import register_round_columns

MAX_ENTRIES = 256
# Rows of a program: with 128 columns, 32 numbers of float32 in each of its threads.
ROWS = 32
WARPS = 4


def round_columns(
    midpoints: Tensor,
    entries: Tensor,
    wanted: Tensor,
    reference: Tensor,
    feedback: Tensor,
    scale: Tensor,
    zero: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``register_round_columns``."""
    if not _runs_on(wanted.device):
        return compensate.round_columns(
            midpoints, entries, wanted, reference, feedback, scale, zero
        )
    columns, rows = wanted.shape
    codes, residual = torch.empty_like(wanted, dtype=torch.uint8), torch.empty_like(wanted)
    with on_device_of(wanted):
        round_columns_kernel[(-(-rows // ROWS),)](
            midpoints,
            entries,
            wanted,
            reference,
            feedback,
            scale,
            scale if zero is None else zero,
            codes,
            residual,
            len(entries),
            columns,
            rows,
            BITS=(len(entries) - 1).bit_length(),
            HAS_ZERO=zero is not None,
            COLUMNS=max(16, 1 << (columns - 1).bit_length()),
            ROWS=ROWS,
            num_warps=WARPS,
        )
    return codes, residual


@cache
def _runs_on(device: torch.device) -> bool:
    return INTERPRETED or not (unsupported_gpu(device) or why_no_launcher())


register_round_columns("cuda", round_columns, MAX_ENTRIES)

"""Tensor maps: descriptions of a matrix for Hopper's tensor copies."""

import ctypes
from functools import lru_cache

import torch

from fdk_cuda.nvrtc.driver import check, cuda, in_context

BYTES = 128
# Alignment of the matrix's address and of the bytes of a row.
ALIGNMENT = 16


@lru_cache(maxsize=4096)
def swizzled_map(
    pointer: int, rows: int, columns: int, box_rows: int, dtype: torch.dtype, device: int
) -> bytes:
    """Returns the map of a row-major matrix ``[rows, columns, dtype]``, in boxes 128 bytes wide.

    A box arrives in shared memory swizzled over 128 bytes, as wgmma reads it, with zeros outside
    the matrix. Maps are cached: encoding one takes longer than a launch.

    Args:
        pointer: address of the matrix, a multiple of ``ALIGNMENT``, as a row's bytes are.
        rows, columns: sizes of the matrix.
        box_rows: rows of a box, at most 256.
        dtype: bfloat16 or float16.
        device: index of the GPU that holds it.

    Raises:
        RuntimeError: the driver rejects the sizes.
    """
    api = cuda()
    types = api.CUtensorMapDataType
    kind = (
        types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        if dtype == torch.float16
        else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    )
    size = dtype.itemsize
    encoded = in_context(
        device,
        api.cuTensorMapEncodeTiled,
        kind,
        2,
        pointer,
        [api.cuuint64_t(columns), api.cuuint64_t(rows)],
        [api.cuuint64_t(columns * size)],
        [api.cuuint32_t(128 // size), api.cuuint32_t(box_rows)],
        [api.cuuint32_t(1), api.cuuint32_t(1)],
        api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    made = check(encoded, f"mapping a matrix of {rows} x {columns} in boxes of {box_rows} rows")
    return ctypes.string_at(int(made.getPtr()), BYTES)

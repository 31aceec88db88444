# mypy: ignore-errors
"""Pre- and post-passes of the products: permute x, reduce split-K."""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.decode import column_of, stored_columns


# x   :: [m, k, dtype]
# out :: [m, width, dtype], width = k_tiles * TILE_K
@triton.jit
def permute_kernel(
    x_ptr,
    out_ptr,
    k,
    width,
    groups,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Permutes columns of x to the order of positions and units, with zeros for padding."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = column_of(step=i // 16, upper=i // 8 % 2, t=i // 2 % 4, pair=i % 2, PAIRED=PAIRED)
    column, live = stored_columns(column, k, groups, GROUP, PADDED_GROUP)
    x = tl.load(x_ptr + row * k + column, mask=live & (i < width), other=0.0)
    tl.store(out_ptr + row * width + i, x, mask=i < width)


# partial :: [SPLIT_K, stride, float32], of which the first size = m * n are added
# bias    :: [n, dtype]
# out     :: [m * n, dtype]
@triton.jit
def reduce_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    size,
    stride,
    n,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Adds the partial sums of split k (or n) in a fixed order, then the bias."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT_K):
        total += tl.load(partial_ptr + part * stride.to(tl.int64) + at, mask=at < size, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % n, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < size)

# mypy: ignore-errors
"""y = x @ W_hat.T for many rows of x: weights decoded in registers, straight into the product.

The product is computed as W_hat @ x.T with W_hat as the tensor cores' operand A, which they take
from registers; x goes through shared memory. The scale is multiplied into the decoded weight and
rounded, exactly as ``dequantise`` rounds it.
"""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.decode import (
    PART,
    column_of,
    load_tables,
    load_words,
    prepare,
    stored_columns,
)
from fdk_cuda.triton.kernels.dequantise import join_part, scaled_part

_PART = tl.constexpr(PART)


@triton.jit
def settled(acc):
    """The same, by no instruction: a use of the sums within the loop.

    Without it Triton 3.6 splits a product with operand A in registers into one asynchronous piece
    each 16 columns and waits after each, ptxas finds accumulators that it must keep (C7515), and
    every wgmma waits for the one before. With it eight of them run as one.
    """
    return tl.inline_asm_elementwise("", "=r,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


# x   :: [m, k, dtype]
# out :: [m, k_tiles * TILE_K, dtype]
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
    """Columns of x in the order of the weight's positions and units, zero where it is padded."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = column_of(i // 16, i // 8 % 2, i // 2 % 4, i % 2, PAIRED)
    column, live = stored_columns(column, k, groups, GROUP, PADDED_GROUP)
    x = tl.load(x_ptr + row * k + column, mask=live & (i < width), other=0.0)
    tl.store(out_ptr + row * width + i, x, mask=i < width)


# x      :: [m, k_tiles * TILE_K, dtype], from permute_kernel
# words  :: [n_tiles, k_tiles, WORDS, 2, 32, 4, int32]
# scale  :: [n_tiles, groups, 8, 2], zero alike
# out    :: [m, n, dtype], or [SPLIT_K, m, n, float32] without bias
@triton.jit(do_not_specialize=["m"])
def gemm_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    values_ptr,
    lanes_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    k_tiles,
    groups,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    POSITIONS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    R: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    TABLE: tl.constexpr,
):
    """A program computes 16 * R * WARPS outputs of BLOCK_M rows, over its share of the k tiles."""
    COUNT: tl.constexpr = min(_PART, POSITIONS)
    WIDTH: tl.constexpr = 16 * COUNT
    TILE_K: tl.constexpr = 16 * POSITIONS
    BLOCK_N: tl.constexpr = 16 * R * WARPS
    CODES: tl.constexpr = (BITS, AFFINE, ASSEMBLY, TABLE, X_DTYPE, DOT_DTYPE)
    GROUPING: tl.constexpr = (PADDED_GROUP, SEGMENT, ONE_GROUP)
    n_tiles = tl.cdiv(n, 16)
    blocks_m = tl.cdiv(m, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    # Programs that share rows of x run side by side, GROUP_M blocks of them at a time.
    pid = tl.program_id(0)
    first_m = pid // (GROUP_M * blocks_n) * GROUP_M
    size_m = min(blocks_m - first_m, GROUP_M)
    block_m = first_m + pid % (GROUP_M * blocks_n) % size_m
    block_n = pid % (GROUP_M * blocks_n) // size_m
    share = tl.cdiv(k_tiles, tl.num_programs(1))
    first_k = tl.program_id(1) * share
    last_k = min(first_k + share, k_tiles)

    tables = load_tables(values_ptr, lanes_ptr, CODES, WARPS)[0]

    # words [R * half, (warp, lane, 4)]: a warp holds rows 16 w to 16 w + 15 of every WARPS tiles
    half = tl.arange(0, 2 * R)
    i = tl.arange(0, WARPS * 128)
    tile = (block_n * (R * WARPS) + half // 2 * WARPS)[:, None] + (i // 128)[None, :]
    word_at = tile * k_tiles * (WORDS * 256) + (half % 2 * 128)[:, None] + (i % 128)[None, :]
    has_rows = tile < n_tiles
    # scale [R, (warp, g, t, half)]
    i = tl.arange(0, WARPS * 64)
    tile = (block_n * (R * WARPS) + tl.arange(0, R) * WARPS)[:, None] + (i // 64)[None, :]
    scale_at = tile * groups * 16 + (i // 8 % 8 * 2 + i % 2)[None, :]
    has_scale = tile < n_tiles

    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    x_row = row.to(tl.int64)[:, None] * (k_tiles * TILE_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile_k in tl.range(first_k, last_k, num_stages=STAGES):
        words = load_words(words_ptr, word_at + tile_k * (WORDS * 256), has_rows, WORDS)
        words = prepare(words, CODES)
        for part in tl.static_range(POSITIONS // COUNT):
            first = tile_k * TILE_K + part * WIDTH
            column = first + tl.arange(0, WIDTH)
            x = tl.load(x_ptr + x_row + column[None, :], mask=(row < m)[:, None], other=0.0)
            if X_DTYPE != DOT_DTYPE:
                x = x.to(tl.float32)
            weights = scaled_part(
                words,
                tables,
                values_ptr,
                scale_ptr,
                zero_ptr,
                scale_at,
                has_scale,
                first,
                groups,
                part,
                COUNT,
                CODES,
                GROUPING,
                R,
                WARPS,
            )
            joined = join_part(weights, COUNT, R, WARPS)
            if COUNT == 8:
                w = tl.permute(joined, [0, 2, 1, 3, 9, 8, 7, 5, 4, 6])
            else:
                w = tl.permute(joined, [0, 2, 1, 3, 8, 7, 5, 4, 6])
            w = tl.reshape(w, [BLOCK_N, WIDTH])
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
            if ASSEMBLY:
                acc = settled(acc)

    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[:, None]
    at = (tl.program_id(1) * m + row).to(tl.int64)[:, None] * n + column[None, :]
    live = (row < m)[:, None] & (column < n)[None, :]
    tl.store(out_ptr + at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=live)


# partial :: [SPLIT_K, stride, float32], of which the first m * n are added
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
    """Adds the parts of a product in order, then the bias."""
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

# ruff: noqa: D103
# mypy: ignore-errors
"""y = x @ W_hat.T for a few rows of x: every warp takes its own stretch of k.

The product is computed as W_hat @ x.T, one batched tensor-core product whose batch is the warps of
a program; their sums meet once, at the end, in a fixed order. Nothing but that sum goes through
shared memory: words, x and scales are read straight into the places that the product wants.
"""

import triton
import triton.language as tl

from fdk_cuda.triton.decode import PART, decode_part, decode_scale, load_tables, load_words

_PART = tl.constexpr(PART)


@triton.jit
def spread(scale, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """``[N_TILES, (warp, g, t, half)]`` as ``[warp, N_TILES, half, g, 1, t, 1]``."""
    scale = tl.reshape(scale, [N_TILES, WARPS, 8, 4, 2])
    return tl.permute(scale, [1, 0, 4, 2, 3])[:, :, :, :, None, :, None]


@triton.jit
def as_operand(value, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """``[(N_TILES, half), (warp, g, t, upper, pair)]`` as ``[warp, row, unit]``."""
    value = tl.reshape(value, [N_TILES, 2, WARPS, 8, 4, 2, 2])
    return tl.reshape(tl.permute(value, [2, 0, 1, 3, 5, 4, 6]), [WARPS, 16 * N_TILES, 16])


# x      :: [m, k, dtype]
# words  :: [n_tiles, k_tiles, WORDS, 2, 32, 4, int32]
# scale  :: [n_tiles, groups, 8, 2]
# zero   :: as scale, or scale again where there are none
# values :: [dtype 2, 2^bits, int16]      lanes :: [dtype 2, 2, 32, int32]
# bias   :: [n, dtype]
# out    :: [m, n, dtype]
@triton.jit(do_not_specialize=["m"])
def small_kernel(
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
    k,
    k_tiles,
    groups,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    PAIRED: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHUFFLE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    N_TILES: tl.constexpr,
    M_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
):
    TILE_K: tl.constexpr = 16 * POSITIONS
    BLOCK_N: tl.constexpr = 16 * N_TILES
    BLOCK_M: tl.constexpr = 8 * M_TILES
    COUNT: tl.constexpr = min(_PART, POSITIONS)
    tl.static_assert(TILE_K % SEGMENT == 0)
    tile_n = tl.program_id(0) * N_TILES
    first_m = tl.program_id(1) * BLOCK_M
    n_tiles = tl.cdiv(n, 16)

    tables = load_tables(lanes_ptr, BITS, AFFINE, SHUFFLE, X_DTYPE)

    # Two dimensions each: the last is what neighbouring lanes read, and Triton then gives every
    # lane just the elements that the product wants from it. With more dimensions than that,
    # releases order them differently (3.6: 8 times slower, through shared memory).
    # words [N_TILES * half, (warp, lane, 4)]
    half = tl.arange(0, 2 * N_TILES)
    i = tl.arange(0, WARPS * 128)
    word_at = ((tile_n + half // 2) * k_tiles * (WORDS * 256) + half % 2 * 128)[:, None]
    word_at += (i // 128 * (WORDS * 256) + i % 128)[None, :]
    has_rows = (tile_n + half // 2 < n_tiles)[:, None]
    warp_w = (i // 128)[None, :]

    # x [M_TILES, (warp, row of x 8, t, EACH)]: what a lane needs of one or two positions
    EACH: tl.constexpr = 8 if PAIRED else 4
    STEP: tl.constexpr = 2 if PAIRED else 1
    i = tl.arange(0, WARPS * 32 * EACH)
    x_row = (first_m + tl.arange(0, M_TILES) * 8)[:, None] + (i // (4 * EACH) % 8)[None, :]
    unit = (i % (4 * EACH))[None, :]
    warp_x = (i // (32 * EACH))[None, :]

    # scale [N_TILES, (warp, g, t, half)]: every t reads the same
    tile = tile_n + tl.arange(0, N_TILES)
    i = tl.arange(0, WARPS * 64)
    warp_s = (i // 64)[None, :]
    scale_at = (tile * groups * 16)[:, None] + (i // 8 % 8 * 2 + i % 2)[None, :]
    has_scale = (tile < n_tiles)[:, None]

    acc = tl.zeros([WARPS, N_TILES, 2, 8, M_TILES, 4, 2], tl.float32)
    sums = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    x_sums = tl.zeros([WARPS, 16, BLOCK_M], tl.float32)
    ones = tl.full([WARPS, 16, 16], 1.0, DOT_DTYPE)
    words = load_words(words_ptr, word_at, has_rows & (warp_w < k_tiles), WORDS)
    for first in tl.range(0, k_tiles, WARPS, num_stages=STAGES):
        if PREFETCH:
            now = words
            live = has_rows & (first + WARPS + warp_w < k_tiles)
            words = load_words(words_ptr, word_at + (first + WARPS) * (WORDS * 256), live, WORDS)
        else:
            live = has_rows & (first + warp_w < k_tiles)
            now = load_words(words_ptr, word_at + first * (WORDS * 256), live, WORDS)
        for part in tl.static_range(POSITIONS // COUNT):
            values = decode_part(
                now,
                tables,
                values_ptr,
                part,
                COUNT,
                BITS,
                AFFINE,
                SHUFFLE,
                X_DTYPE,
                DOT_DTYPE,
            )
            for q in tl.static_range(0, COUNT, STEP):
                if (part * COUNT + q) * 16 % SEGMENT == 0:
                    sums = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
                    x_sums = tl.zeros([WARPS, 16, BLOCK_M], tl.float32)
                column = (first + warp_x) * TILE_K + ((part * COUNT + q) * 16 + unit)
                if GROUP == PADDED_GROUP:
                    live = column < k
                else:
                    live = (column % PADDED_GROUP < GROUP) & (column < groups * PADDED_GROUP)
                    column = column // PADDED_GROUP * GROUP + column % PADDED_GROUP
                at = tl.max_contiguous(x_row * k + column, [1, EACH])
                x = tl.load(x_ptr + at, mask=live & (x_row < m), other=0.0)
                if X_DTYPE != DOT_DTYPE:
                    x = x.to(tl.float32)
                # [M_TILES, warp, row of x, t, odd, upper, pair] -> [warp, unit, row of x, odd]
                x = tl.reshape(x, [M_TILES, WARPS, 8, 4, STEP, 2, 2])
                x = tl.permute(x, [1, 5, 3, 6, 0, 2, 4])
                if PAIRED:
                    x, odd_x = tl.split(tl.reshape(x, [WARPS, 16, BLOCK_M, 2]))
                    w = as_operand(values[q], N_TILES, WARPS)
                    sums = tl.dot(w, x, sums, input_precision="ieee")
                    w = as_operand(values[q + 1], N_TILES, WARPS)
                    sums = tl.dot(w, odd_x, sums, input_precision="ieee")
                    if AFFINE:
                        x_sums = tl.dot(ones, x, x_sums, input_precision="ieee")
                        x_sums = tl.dot(ones, odd_x, x_sums, input_precision="ieee")
                else:
                    x = tl.reshape(x, [WARPS, 16, BLOCK_M])
                    w = as_operand(values[q], N_TILES, WARPS)
                    sums = tl.dot(w, x, sums, input_precision="ieee")
                    if AFFINE:
                        x_sums = tl.dot(ones, x, x_sums, input_precision="ieee")
                if (part * COUNT + q + STEP) * 16 % SEGMENT == 0:
                    group = warp_s * 0
                    if not ONE_GROUP:
                        group = (first + warp_s) * TILE_K + (part * COUNT + q) * 16
                        group = group // PADDED_GROUP
                    inside = has_scale & (group < groups)
                    at = scale_at + group * 16
                    scale = decode_scale(tl.load(scale_ptr + at, mask=inside, other=0))
                    scale = spread(scale, N_TILES, WARPS)
                    segment = tl.reshape(sums, [WARPS, N_TILES, 2, 8, M_TILES, 4, 2])
                    if AFFINE:
                        zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
                        ones_x = tl.reshape(x_sums, [WARPS, 1, 2, 8, M_TILES, 4, 2])
                        segment -= spread(zero, N_TILES, WARPS) * ones_x
                    acc += segment * scale

    y = tl.sum(tl.reshape(acc, [WARPS, BLOCK_N, BLOCK_M]), 0)
    row = tile_n * 16 + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    m_row = first_m + tl.arange(0, BLOCK_M)
    live = (m_row < m)[None, :] & (row < n)[:, None]
    tl.store(out_ptr + m_row[None, :] * n + row[:, None], y.to(out_ptr.dtype.element_ty), mask=live)

# mypy: ignore-errors
"""Dequantise a whole weight to memory."""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.decode import (
    BLOCK_POSITIONS,
    join_positions,
    load_tables,
    load_words,
    prepare,
    scaled_positions,
    stored_columns,
)

_BLOCK_POSITIONS = tl.constexpr(BLOCK_POSITIONS)


# words  :: [n_tiles, k_tiles, WORDS, 2, 32, 4, int32]
# scale  :: [n_tiles, n_groups, 8, 2, dtype]
# zero   :: like scale; without zero points, scale
# values, lanes :: see decode.lookup_tables
# out    :: [n, k, dtype]
@triton.jit(do_not_specialize=["rounds"])
def dequantise_kernel(
    words_ptr,
    scale_ptr,
    zero_ptr,
    values_ptr,
    lanes_ptr,
    out_ptr,
    n,
    k,
    k_tiles,
    groups,
    rounds,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    PAIRED: tl.constexpr,
    AFFINE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Computes W_hat = (value - zero) * scale, with value = codebook[code] or the code.

    Every warp decodes one tile of k and, with AHEAD, ``rounds`` tiles of n, loading the words of
    the next tile before it stores one. Without AHEAD there is one tile.
    """
    COUNT: tl.constexpr = min(_BLOCK_POSITIONS, POSITIONS)
    WIDTH: tl.constexpr = 16 * COUNT
    CODES: tl.constexpr = (BITS, AFFINE, ASSEMBLY, TABLE, X_DTYPE, DOT_DTYPE)
    GROUPING: tl.constexpr = (PADDED_GROUP, SEGMENT, ONE_GROUP)
    n_tiles = tl.cdiv(n, 16)
    first_n = tl.program_id(0) * (rounds if AHEAD else 1)
    last_n = min(first_n + (rounds if AHEAD else 1), n_tiles)
    size = tl.cast(k_tiles, tl.int64) * (WORDS * 256)  # Triton may know it as 1

    # words [half, (warp, lane, 4)]
    half = tl.arange(0, 2)
    i = tl.arange(0, WARPS * 128)
    tile_k = tl.program_id(1) * WARPS + i // 128
    word_at = (half * 128)[:, None] + (tile_k * (WORDS * 256) + i % 128)[None, :]
    has_words = (half >= 0)[:, None] & (tile_k < k_tiles)[None, :]
    words = load_words(words_ptr + first_n * size, word_at, has_words, WORDS)
    tables = load_tables(values_ptr, lanes_ptr, CODES, WARPS)[0]

    # scale [1, (warp, g, t, half)]
    i = tl.arange(0, WARPS * 64)
    scale_at = (i // 8 % 8 * 2 + i % 2)[None, :]
    tile_s = (tl.program_id(1) * WARPS + i // 64)[None, :]
    tile_k = tl.program_id(1) * WARPS + tl.arange(0, WARPS)
    for tile_n in tl.range(first_n, last_n, num_stages=1):
        later = words
        if AHEAD:
            at = words_ptr + (tile_n + 1) * size
            later = load_words(at, word_at, has_words & (tile_n + 1 < last_n), WORDS)
        now = prepare(words, CODES)
        row = tile_n * 16 + tl.arange(0, 16)
        for part in tl.static_range(POSITIONS // COUNT):
            first = tile_k * (16 * POSITIONS) + part * WIDTH
            weights = scaled_positions(
                now,
                tables,
                values_ptr,
                scale_ptr,
                zero_ptr,
                tile_n * groups * 16 + scale_at,
                scale_at >= 0,
                tile_s * (16 * POSITIONS) + part * WIDTH,
                groups,
                part,
                COUNT,
                CODES,
                GROUPING,
                1,
                WARPS,
            )
            joined = join_positions(weights, COUNT, 1, WARPS)
            # To [WARPS, N_TILES, half, g, columns], in either order of columns.
            if PAIRED:
                if COUNT == 8:
                    w = tl.permute(joined, [2, 0, 1, 3, 9, 8, 4, 7, 5, 6])
                else:
                    w = tl.permute(joined, [2, 0, 1, 3, 8, 4, 7, 5, 6])
            elif COUNT == 8:
                w = tl.permute(joined, [2, 0, 1, 3, 9, 8, 7, 4, 5, 6])
            else:
                w = tl.permute(joined, [2, 0, 1, 3, 8, 7, 4, 5, 6])
            w = tl.reshape(w, [WARPS, 16, WIDTH])
            column = first[:, None] + tl.arange(0, WIDTH)[None, :]
            column, live = stored_columns(column, k, groups, GROUP, PADDED_GROUP)
            at = row.to(tl.int64)[None, :, None] * k + column[:, None, :]
            live = live[:, None, :] & (row < n)[None, :, None]
            tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=live)
        words = later

# mypy: ignore-errors
"""GEMM, y = x @ W_hat.T for tens of rows of x: weights are decoded into operand A in registers.

The product is computed as W_hat @ x.T, with x in shared memory. The scale is multiplied into the
decoded weight, which is rounded exactly as ``dequantise`` rounds it.
"""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.decode import (
    BLOCK_POSITIONS,
    join_positions,
    load_tables,
    load_words,
    prepare,
    scaled_positions,
)

_BLOCK_POSITIONS = tl.constexpr(BLOCK_POSITIONS)


@triton.jit
def use_in_loop(acc):
    """Returns the sums by empty assembly, which counts as a use of them within the loop.

    Without it Triton 3.6 splits a product with operand A in registers into asynchronous products of
    16 columns and waits after each; ptxas then serialises every wgmma (C7515). With it eight of
    them run as one.
    """
    return tl.inline_asm_elementwise("", "=r,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def gemm_sums(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    values_ptr,
    lanes_ptr,
    x_row,
    has_x,
    tile_n,
    tile_step,
    n_tiles,
    k_tiles,
    first_k,
    last_k,
    groups,
    WORDS: tl.constexpr,
    POSITIONS: tl.constexpr,
    CODES: tl.constexpr,
    GROUPING: tl.constexpr,
    N_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes the sums of 16 * N_TILES * WARPS outputs of rows of x over some tiles of k.

    The outputs are those of the tiles ``tile_n + i * tile_step + warp``. Pointers to words and
    scales are those of one weight. ``CODES``: see ``decode_positions``. ``GROUPING``: see
    ``scaled_positions``.

    Args:
        x_row: ``[BLOCK_M, 1, int64]``, offsets of rows of x.
        has_x: ``[BLOCK_M, 1]``, mask of these.

    Returns:
        ``[(N_TILES, WARPS, 16), BLOCK_M, float32]``.
    """
    COUNT: tl.constexpr = min(_BLOCK_POSITIONS, POSITIONS)
    WIDTH: tl.constexpr = 16 * COUNT
    TILE_K: tl.constexpr = 16 * POSITIONS
    BLOCK_N: tl.constexpr = 16 * N_TILES * WARPS
    ASSEMBLY: tl.constexpr = CODES[2]
    X_DTYPE: tl.constexpr = CODES[4]
    DOT_DTYPE: tl.constexpr = CODES[5]
    tables = load_tables(values_ptr, lanes_ptr, CODES, WARPS)[0]

    # words [N_TILES * half, (warp, lane, 4)]: warp w holds tile w of every WARPS tiles
    half = tl.arange(0, 2 * N_TILES)
    i = tl.arange(0, WARPS * 128)
    tile = (tile_n + half // 2 * tile_step)[:, None] + (i // 128)[None, :]
    word_at = tile * k_tiles * (WORDS * 256) + (half % 2 * 128)[:, None] + (i % 128)[None, :]
    has_rows = tile < n_tiles
    # scale [N_TILES, (warp, g, t, half)]
    i = tl.arange(0, WARPS * 64)
    tile = (tile_n + tl.arange(0, N_TILES) * tile_step)[:, None] + (i // 64)[None, :]
    scale_at = tile * groups * 16 + (i // 8 % 8 * 2 + i % 2)[None, :]
    has_scale = tile < n_tiles

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile_k in tl.range(first_k, last_k, num_stages=STAGES):
        words = load_words(words_ptr, word_at + tile_k * (WORDS * 256), has_rows, WORDS)
        words = prepare(words, CODES)
        for part in tl.static_range(POSITIONS // COUNT):
            first = tile_k * TILE_K + part * WIDTH
            column = first + tl.arange(0, WIDTH)
            x = tl.load(x_ptr + x_row + column[None, :], mask=has_x, other=0.0)
            if X_DTYPE != DOT_DTYPE:
                x = x.to(tl.float32)
            weights = scaled_positions(
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
                N_TILES,
                WARPS,
            )
            joined = join_positions(weights, COUNT, N_TILES, WARPS)
            if COUNT == 8:
                w = tl.permute(joined, [0, 2, 1, 3, 9, 8, 7, 5, 4, 6])
            else:
                w = tl.permute(joined, [0, 2, 1, 3, 8, 7, 5, 4, 6])
            w = tl.reshape(w, [BLOCK_N, WIDTH])
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
            if ASSEMBLY:
                acc = use_in_loop(acc)
    return acc


# x      :: [m, k_tiles * TILE_K, dtype], permuted by permute_kernel
# words  :: [n_tiles, k_tiles, WORDS, 2, 32, 4, int32]
# scale  :: [n_tiles, n_groups, 8, 2, dtype]
# zero   :: like scale; without zero points, scale
# values, lanes :: see decode.lookup_tables
# bias   :: [n, dtype]
# out    :: [m, n, dtype], or [split_k, m, n, float32] without bias
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
    N_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Computes y = x @ W_hat.T + bias.

    A program computes 16 * N_TILES * WARPS outputs of BLOCK_M rows, over its share of the k tiles.
    """
    TILE_K: tl.constexpr = 16 * POSITIONS
    BLOCK_N: tl.constexpr = 16 * N_TILES * WARPS
    CODES: tl.constexpr = (BITS, AFFINE, ASSEMBLY, TABLE, X_DTYPE, DOT_DTYPE)
    GROUPING: tl.constexpr = (PADDED_GROUP, SEGMENT, ONE_GROUP)
    n_tiles = tl.cdiv(n, 16)
    blocks_m = tl.cdiv(m, BLOCK_M)
    blocks_n = tl.cdiv(n, BLOCK_N)
    # Neighbouring programs share rows of x, GROUP_M blocks at a time, for the L2.
    pid = tl.program_id(0)
    first_m = pid // (GROUP_M * blocks_n) * GROUP_M
    size_m = min(blocks_m - first_m, GROUP_M)
    block_m = first_m + pid % (GROUP_M * blocks_n) % size_m
    block_n = pid % (GROUP_M * blocks_n) // size_m
    share = tl.cdiv(k_tiles, tl.num_programs(1))
    first_k = tl.program_id(1) * share
    last_k = min(first_k + share, k_tiles)

    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = gemm_sums(
        x_ptr,
        words_ptr,
        scale_ptr,
        zero_ptr,
        values_ptr,
        lanes_ptr,
        row.to(tl.int64)[:, None] * (k_tiles * TILE_K),
        (row < m)[:, None],
        block_n * (N_TILES * WARPS),
        WARPS,
        n_tiles,
        k_tiles,
        first_k,
        last_k,
        groups,
        WORDS,
        POSITIONS,
        CODES,
        GROUPING,
        N_TILES,
        WARPS,
        BLOCK_M,
        STAGES,
    )

    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[:, None]
    at = (tl.program_id(1) * m + row).to(tl.int64)[:, None] * n + column[None, :]
    live = (row < m)[:, None] & (column < n)[None, :]
    tl.store(out_ptr + at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=live)

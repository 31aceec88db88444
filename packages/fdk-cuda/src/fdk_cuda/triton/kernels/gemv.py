# ruff: noqa: RUF005
# mypy: ignore-errors
"""GEMV and small-m product, y = x @ W_hat.T for up to 16 rows of x: k split between warps.

The product is computed as W_hat @ x.T, one batched tensor-core product whose batch is the warps of
a program. Their sums are added once, at the end and in a fixed order. Only these sums go through
shared memory: words, x and scales are loaded into the registers where the product needs them.
"""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.decode import (
    BLOCK_POSITIONS,
    decode_positions,
    decode_scale,
    load_pair,
    load_tables,
    load_words,
    prepare,
    stored_columns,
)
from fdk_cuda.triton.kernels.ptx_smem import add_constraints, add_warps, table_bytes

_BLOCK_POSITIONS = tl.constexpr(BLOCK_POSITIONS)
# Whether the pair of a row is loaded once, or for every element of x. Triton 3.6 gives the many
# loads a layout of their own and exchanges 32 KiB of pointers through shared memory, more than a
# program has; Triton 3.7 runs out of registers with the few.
_FEW_LOADS = tl.constexpr(triton.__version__.startswith("3.6."))


@triton.jit
def spread(scale, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """Reshapes ``[N_TILES, (warp, g, t, half)]`` to ``[warp, N_TILES, half, g, 1, t, 1]``."""
    scale = tl.reshape(scale, [N_TILES, WARPS, 8, 4, 2])
    return tl.permute(scale, [1, 0, 4, 2, 3])[:, :, :, :, None, :, None]


@triton.jit
def as_minus(zero, N_TILES: tl.constexpr, WARPS: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """Broadcasts -zero, ``[N_TILES, (warp, g, t, half)]``, to operand A, ``[warp, row, unit]``."""
    minus = spread((-zero.to(tl.float32)).to(DOT_DTYPE), N_TILES, WARPS)
    minus = tl.broadcast_to(minus, [WARPS, N_TILES, 2, 8, 2, 4, 2])
    return tl.reshape(minus, [WARPS, 16 * N_TILES, 16])


@triton.jit
def as_operand(value, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """Reshapes ``[(N_TILES, half), (warp, g, t, upper, pair)]`` to ``[warp, row, unit]``."""
    value = tl.reshape(value, [N_TILES, 2, WARPS, 8, 4, 2, 2])
    return tl.reshape(tl.permute(value, [2, 0, 1, 3, 5, 4, 6]), [WARPS, 16 * N_TILES, 16])


# One thread prefetches some bytes to L2.
_FETCH = tl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
    "setp.gt.and.s32 p, $2, 0, p; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
)


@triton.jit
def fetch(pointer, size):
    """Prefetches ``size`` bytes, a multiple of 16, to L2 (compute capability 9.0 and later)."""
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [pointer.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_scales(
    stored,
    tile,
    part: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_K: tl.constexpr,
    SEGMENT: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    AFFINE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Loads scales and zero points of a part of a tile, one of each per segment, undecoded.

    ``stored``: pointers to both, a mask of rows, and the number of groups.
    """
    scale_at, zero_at, inside, groups = stored
    scales = ()
    zeros = ()
    for i in tl.static_range(max(1, WIDTH // SEGMENT)):
        if EXACT and TILE_K % PADDED_GROUP == 0:
            # The compile-time part is added last: it becomes the immediate offset of the load.
            offset = tile * (TILE_K // PADDED_GROUP * 16)
            extra = (part * WIDTH + i * SEGMENT) // PADDED_GROUP * 16
            live = inside & (tile * TILE_K < groups * PADDED_GROUP)
            scale = tl.load(scale_at + offset + extra, mask=live, other=0)
            zero = scale
            if AFFINE:
                zero = tl.load(zero_at + offset + extra, mask=live, other=0)
        else:
            group = tile * 0
            if not ONE_GROUP:
                group = (tile * TILE_K + (part * WIDTH + i * SEGMENT)) // PADDED_GROUP
            live = inside & (group < groups)
            scale, zero = load_pair(scale_at, zero_at, group * 16, live, AFFINE)
        scales = scales + (scale,)
        zeros = zeros + (zero,)
    return scales, zeros


@triton.jit
def rows_of(rows, index, ROWS: tl.constexpr):
    """Returns the rows of x that have an index among those of a product.

    ``rows``: pointer to an order, the first and the end of the indices, and how many pairs share a
    row of x. ``ROWS``: 0 index is the row of x; 1 it is a pair; 2 ``order[index]`` is a pair.
    """
    order_ptr, _, end, sharing = rows
    if ROWS == 2:
        index = tl.load(order_ptr + index, mask=index < end, other=0)
    return index if ROWS == 0 else index // sharing


@triton.jit
def gemv_sums(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    values_ptr,
    lanes_ptr,
    rows,
    tile_n,
    tile_step,
    n_tiles,
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
    EXACT: tl.constexpr,
    PAIRED: tl.constexpr,
    AFFINE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    N_TILES: tl.constexpr,
    M_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    FETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
    MINUS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Computes the sums of N_TILES tiles of outputs and 8 * M_TILES rows of x.

    The tiles are ``tile_n + i * tile_step``. ``rows``: see ``rows_of``. Pointers to x, words and
    scales are those of one weight.

    Returns:
        ``[WARPS, BLOCK_N, BLOCK_M, float32]``, of which the first warp has the whole sums; in the
        interpreter ``[1, BLOCK_N, BLOCK_M]``.
    """
    TILE_K: tl.constexpr = 16 * POSITIONS
    BLOCK_N: tl.constexpr = 16 * N_TILES
    BLOCK_M: tl.constexpr = 8 * M_TILES
    # Shorter parts keep 3 bits within 128 registers without spills.
    COUNT: tl.constexpr = 4 if MINUS and BITS == 3 else min(_BLOCK_POSITIONS, POSITIONS)
    PARTS: tl.constexpr = POSITIONS // COUNT
    WIDTH: tl.constexpr = 16 * COUNT
    TILE: tl.constexpr = WORDS * 256
    CODES: tl.constexpr = (BITS, AFFINE, ASSEMBLY, True, X_DTYPE, DOT_DTYPE)
    ITEM: tl.constexpr = scale_ptr.dtype.element_ty.primitive_bitwidth // 8
    # Scales are loaded one part ahead while they are few. With 2 bits and 8 warps they would spill
    # 8 bytes on sm_100.
    SCALES_AHEAD: tl.constexpr = N_TILES * max(1, WIDTH // SEGMENT) <= 4 and BITS != 2
    tl.static_assert(TILE_K % SEGMENT == 0)
    first_m = rows[1]
    end_m = rows[2]

    if OVERLAP:
        # The next kernel may start and load weights, which no kernel writes.
        tl.extra.cuda.gdc_launch_dependents()
    if FETCH:
        for j in tl.static_range(N_TILES):
            inside = tile_n + j * tile_step < n_tiles
            fetch(
                scale_ptr + (tile_n + j * tile_step) * groups * 16,
                tl.where(inside, groups * 16 * ITEM, 0),
            )
            size = min(FETCH * WARPS, k_tiles) * (TILE * 4)
            fetch(words_ptr + (tile_n + j * tile_step) * k_tiles * TILE, tl.where(inside, size, 0))

    # Loads are two-dimensional, the last dimension across neighbouring lanes: Triton then gives
    # each lane the elements that the product needs from it. With more dimensions Triton 3.6 orders
    # them differently and goes through shared memory, 8 times slower.
    # words [N_TILES * half, (warp, lane, 4)]
    half = tl.arange(0, 2 * N_TILES)
    i = tl.arange(0, WARPS * 128)
    word_at = ((tile_n + half // 2 * tile_step) * k_tiles * TILE + half % 2 * 128)[:, None]
    word_at += (i // 128 * TILE + i % 128)[None, :]
    word_at = words_ptr + word_at
    has_rows = (tile_n + half // 2 * tile_step < n_tiles)[:, None]
    warp_w = (i // 128)[None, :]
    ring = ()
    for j in tl.static_range(AHEAD):
        valid = has_rows & (j * WARPS + warp_w < k_tiles)
        ring = ring + load_words(word_at, j * WARPS * TILE, valid, WORDS)

    # x [M_TILES, (warp, row of x 8, t, EACH)]: a lane needs EACH columns for one or two positions
    EACH: tl.constexpr = 8 if PAIRED else 4
    STEP: tl.constexpr = 2 if PAIRED else 1
    i = tl.arange(0, WARPS * 32 * EACH)
    m_row = (first_m + tl.arange(0, M_TILES) * 8)[:, None] + (i // (4 * EACH) % 8)[None, :]
    if ROWS == 2 and _FEW_LOADS:
        x_row = rows_of(rows, first_m + tl.arange(0, BLOCK_M), ROWS)
        x_row = tl.reshape(x_row, [M_TILES, 1, 8, 1])
        x_row = tl.broadcast_to(x_row, [M_TILES, WARPS, 8, 4 * EACH])
        x_row = tl.reshape(x_row, [M_TILES, WARPS * 32 * EACH])
    else:
        x_row = rows_of(rows, m_row, ROWS)
    unit = (i % (4 * EACH))[None, :]
    warp_x = (i // (32 * EACH))[None, :]
    x_at = x_ptr + tl.max_contiguous(x_row * k + (warp_x * TILE_K + unit), [1, EACH])

    # scale [N_TILES, (warp, g, t, half)]: the same for every t
    tile = tile_n + tl.arange(0, N_TILES) * tile_step
    i = tl.arange(0, WARPS * 64)
    warp_s = (i // 64)[None, :]
    scale_at = (tile * groups * 16)[:, None] + (i // 8 % 8 * 2 + i % 2)[None, :]
    has_scale = (tile < n_tiles)[:, None]
    zero_at = zero_ptr + scale_at
    stored = (scale_ptr + scale_at, zero_at, has_scale, groups)

    acc = tl.zeros([WARPS, N_TILES, 2, 8, M_TILES, 4, 2], tl.float32)
    sums = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    x_sums = tl.zeros([WARPS, 16, BLOCK_M], tl.float32)
    ones = tl.full([WARPS, 16, 16], 1.0, DOT_DTYPE)
    minus = tl.zeros([WARPS, BLOCK_N, 16], DOT_DTYPE)
    # Filling a table is a barrier for all warps: the loads ahead are in flight by then.
    tables, table = load_tables(values_ptr, lanes_ptr, CODES, WARPS)
    scales, zeros = load_scales(
        stored, warp_s, 0, WIDTH, TILE_K, SEGMENT, ONE_GROUP, PADDED_GROUP, AFFINE, EXACT
    )
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # the previous kernel may write x
    for first in tl.range(0, k_tiles, WARPS, num_stages=1):
        ahead = first + AHEAD * WARPS
        valid = has_rows & (ahead + warp_w < k_tiles)
        ring = ring + load_words(word_at, ahead * TILE, valid, WORDS)
        now = prepare(ring[:WORDS], CODES)
        ring = ring[WORDS:]
        if FETCH:
            for j in tl.static_range(N_TILES):
                tiles = min(k_tiles - (first + FETCH * WARPS), WARPS)
                later = ((tile_n + j * tile_step) * k_tiles + first + FETCH * WARPS) * TILE
                fetch(
                    words_ptr + later,
                    tl.where(tile_n + j * tile_step < n_tiles, tiles * (TILE * 4), 0),
                )
        x_tile = x_at + first * TILE_K
        has_x = (m_row < end_m) & (first + warp_x < k_tiles)
        for part in tl.static_range(PARTS):
            scale_tile = first + warp_s
            if part + SCALES_AHEAD == PARTS:
                scale_tile += WARPS
            # The scales of this part, or of the next one, which may be in the next tile.
            new_scales, new_zeros = load_scales(
                stored,
                scale_tile,
                0 if part + SCALES_AHEAD == PARTS else part + SCALES_AHEAD,
                WIDTH,
                TILE_K,
                SEGMENT,
                ONE_GROUP,
                PADDED_GROUP,
                AFFINE,
                EXACT,
            )
            if not SCALES_AHEAD:
                scales = new_scales
                zeros = new_zeros
            values = decode_positions(now, tables, values_ptr, part, COUNT, CODES)
            for q in tl.static_range(0, COUNT, STEP):
                if (part * COUNT + q) * 16 % SEGMENT == 0:
                    sums = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
                    x_sums = tl.zeros([WARPS, 16, BLOCK_M], tl.float32)
                    if MINUS:
                        minus = as_minus(zeros[q * 16 // SEGMENT], N_TILES, WARPS, DOT_DTYPE)
                if EXACT:
                    x = tl.load(x_tile + (part * COUNT + q) * 16, mask=has_x, other=0.0)
                else:
                    column = (first + warp_x) * TILE_K + ((part * COUNT + q) * 16 + unit)
                    column, live = stored_columns(column, k, groups, GROUP, PADDED_GROUP)
                    at = tl.max_contiguous(x_row * k + column, [1, EACH])
                    x = tl.load(x_ptr + at, mask=live & (m_row < end_m), other=0.0)
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
                    if MINUS:
                        sums = tl.dot(minus, x, sums, input_precision="ieee")
                        sums = tl.dot(minus, odd_x, sums, input_precision="ieee")
                    elif AFFINE:
                        x_sums = tl.dot(ones, x, x_sums, input_precision="ieee")
                        x_sums = tl.dot(ones, odd_x, x_sums, input_precision="ieee")
                else:
                    x = tl.reshape(x, [WARPS, 16, BLOCK_M])
                    w = as_operand(values[q], N_TILES, WARPS)
                    sums = tl.dot(w, x, sums, input_precision="ieee")
                    if MINUS:
                        sums = tl.dot(minus, x, sums, input_precision="ieee")
                    elif AFFINE:
                        x_sums = tl.dot(ones, x, x_sums, input_precision="ieee")
                if (part * COUNT + q + STEP) * 16 % SEGMENT == 0:
                    scale = decode_scale(scales[q * 16 // SEGMENT])
                    scale = spread(scale, N_TILES, WARPS)
                    segment = tl.reshape(sums, [WARPS, N_TILES, 2, 8, M_TILES, 4, 2])
                    if AFFINE and not MINUS:
                        zero = zeros[q * 16 // SEGMENT].to(tl.float32)
                        ones_x = tl.reshape(x_sums, [WARPS, 1, 2, 8, M_TILES, 4, 2])
                        segment -= spread(zero, N_TILES, WARPS) * ones_x
                    acc += segment * scale
            if SCALES_AHEAD:
                scales = new_scales
                zeros = new_zeros

    y = tl.reshape(acc, [WARPS, BLOCK_N, BLOCK_M])
    if ASSEMBLY:
        # [WARPS, BLOCK_N, BLOCK_M]; only the first warp has the whole sums
        SUMS: tl.constexpr = 4 * N_TILES * M_TILES
        y = tl.inline_asm_elementwise(
            add_warps(N_TILES, M_TILES, WARPS, table_bytes(BITS, AFFINE)),
            add_constraints(SUMS),
            [y, table],
            dtype=tl.float32,
            is_pure=False,
            pack=SUMS,
        )
    else:
        y = tl.sum(y, 0)[None]
    return y


# x      :: [m, k, dtype]
# words  :: [n_tiles, k_tiles, WORDS, 2, 32, 4, int32]
# scale  :: [n_tiles, n_groups, 8, 2, dtype]
# zero   :: like scale; without zero points, scale
# values :: [dtype 2, 2^bits, int16]
# lanes  :: [dtype 2, 2, 32, int32]
# bias   :: [n, dtype]
# out    :: [m, n, dtype]
# k_tiles is not specialised: where it is known to be 1, Triton 3.6 removes the loop and emits
# ``add_warps`` twice, each with its own shared memory.
@triton.jit(do_not_specialize=["m", "k_tiles"])
def gemv_kernel(
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
    EXACT: tl.constexpr,
    PAIRED: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    N_TILES: tl.constexpr,
    M_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    FETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
    MINUS: tl.constexpr,
):
    """Computes y = x @ W_hat.T + bias: 16 * N_TILES outputs of 8 * M_TILES rows a program."""
    tile_n = tl.program_id(0) * N_TILES
    first_m = tl.program_id(1) * 8 * M_TILES
    y = gemv_sums(
        x_ptr,
        words_ptr,
        scale_ptr,
        zero_ptr,
        values_ptr,
        lanes_ptr,
        (x_ptr, first_m, m, 1),
        tile_n,
        1,
        tl.cdiv(n, 16),
        k,
        k_tiles,
        groups,
        BITS,
        WORDS,
        POSITIONS,
        GROUP,
        PADDED_GROUP,
        SEGMENT,
        ONE_GROUP,
        EXACT,
        PAIRED,
        AFFINE,
        ASSEMBLY,
        X_DTYPE,
        DOT_DTYPE,
        N_TILES,
        M_TILES,
        WARPS,
        AHEAD,
        FETCH,
        OVERLAP,
        MINUS,
        ROWS=0,
    )
    row = (tile_n * 16 + tl.arange(0, 16 * N_TILES))[None, :, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    m_row = (first_m + tl.arange(0, 8 * M_TILES))[None, None, :]
    # Only the first warp stores.
    warp = tl.arange(0, WARPS if ASSEMBLY else 1)[:, None, None]
    at = out_ptr + (m_row * n + row + warp * 0)
    live = (m_row < m) & (row < n) & (warp == 0)
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=live)

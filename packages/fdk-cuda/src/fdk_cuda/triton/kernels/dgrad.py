# ruff: noqa: RUF005, D103
# mypy: ignore-errors
"""dx = dy @ W_hat from the same codes, for some tens of rows of dy: nothing dequantised is stored.

The product is computed as W_hat.T @ dy.T. A lane's codes are elements of operand A of W_hat @ x.T,
so each block of 8 x 8 codes is transposed between lanes before it is decoded. A program takes the
columns of one tile, or of a part of it. Its warps share n, and add up through shared memory by
assembly; several programs share a tile by splitting n further, and ``reduce_kernel`` adds theirs.
Both in a fixed order.
"""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.decode import (
    PART,
    column_of,
    decode_part,
    load_tables,
    prepare,
    stored_columns,
)
from fdk_cuda.triton.kernels.dequantise import scaled
from fdk_cuda.triton.kernels.dgrad_tiles import (
    as_operand_y,
    as_row_scale,
    as_rows,
    joined,
    load_codes,
    load_scales,
    load_y,
    scales_y,
    transpose_words,
)
from fdk_cuda.triton.kernels.ptx_assembly import results
from fdk_cuda.triton.kernels.ptx_smem import (
    add_shares,
    reserve,
    shares_constraints,
    transposed_bytes,
)

_PART = tl.constexpr(PART)


# y      :: [m, n, dtype]
# words  :: [n_tiles, k_tiles, WORDS, 2, 32, 4, int32]
# scale  :: [n_tiles, groups, 8, 2], zero alike
# values :: [dtype 2, 2^bits, int16]      lanes :: [dtype 2, 2, 32, int32]
# out    :: [m, k, dtype], or [split_n, m, k, float32]
@triton.jit(do_not_specialize=["m"])
def transposed_kernel(
    y_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    values_ptr,
    lanes_ptr,
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
    ASSEMBLY: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    COUNT: tl.constexpr,
    R: tl.constexpr,
    M_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    TABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    PARTS: tl.constexpr = POSITIONS // COUNT
    CODES: tl.constexpr = (BITS, AFFINE, ASSEMBLY, TABLE, X_DTYPE, DOT_DTYPE)
    place = None
    if ASSEMBLY:
        # For all parts, each of which would declare its own.
        place = tl.inline_asm_elementwise(
            reserve(transposed_bytes(BITS, AFFINE, TABLE, WARPS)),
            "=r",
            [],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    # The assembly of a part is its own: each program runs one of these. At 3 bits the last takes
    # longer than others, and programs 132 apart meet on a processor of an H200: these take turns.
    turn = tl.program_id(0) + tl.program_id(2) * tl.num_programs(0)
    own = (turn + turn // 128) % PARTS
    for part in tl.static_range(PARTS):
        if own == part:
            transposed_part(
                (y_ptr, words_ptr, scale_ptr, zero_ptr, values_ptr, lanes_ptr, out_ptr),
                (m, n, k, k_tiles, groups),
                place,
                part,
                PARTS,
                CODES,
                (WORDS, POSITIONS, COUNT, PAIRED),
                (GROUP, PADDED_GROUP, SEGMENT, ONE_GROUP),
                (R, M_TILES, WARPS, AHEAD, OVERLAP),
            )


@triton.jit
def transposed_part(
    tensors,
    sizes,
    place,
    part: tl.constexpr,
    PARTS: tl.constexpr,
    CODES: tl.constexpr,
    LAYOUT: tl.constexpr,
    OF_GROUP: tl.constexpr,
    CONFIG: tl.constexpr,
):
    """The columns of the positions of one part of a tile; arguments as ``transposed_kernel`` has.

    ``CODES``: see ``decode_part``.
    """
    y_ptr, words_ptr, scale_ptr, zero_ptr, values_ptr, lanes_ptr, out_ptr = tensors
    m, n, k, k_tiles, groups = sizes
    AFFINE: tl.constexpr = CODES[1]
    ASSEMBLY: tl.constexpr = CODES[2]
    X_DTYPE: tl.constexpr = CODES[4]
    DOT_DTYPE: tl.constexpr = CODES[5]
    WORDS: tl.constexpr = LAYOUT[0]
    POSITIONS: tl.constexpr = LAYOUT[1]
    COUNT: tl.constexpr = LAYOUT[2]
    PAIRED: tl.constexpr = LAYOUT[3]
    GROUP: tl.constexpr = OF_GROUP[0]
    PADDED_GROUP: tl.constexpr = OF_GROUP[1]
    SEGMENT: tl.constexpr = OF_GROUP[2]
    ONE_GROUP: tl.constexpr = OF_GROUP[3]
    R: tl.constexpr = CONFIG[0]
    M_TILES: tl.constexpr = CONFIG[1]
    WARPS: tl.constexpr = CONFIG[2]
    AHEAD: tl.constexpr = CONFIG[3]
    OVERLAP: tl.constexpr = CONFIG[4]
    BLOCK_M: tl.constexpr = 8 * M_TILES
    SEGMENTS: tl.constexpr = 1 if ONE_GROUP else max(1, 16 * COUNT // SEGMENT)
    EACH: tl.constexpr = COUNT // SEGMENTS  # positions that share a scale
    PIECE: tl.constexpr = min(COUNT, _PART)
    STEP: tl.constexpr = R * WARPS
    # The scale goes to y, of which there is less, where that is as exact: in bf16, which keeps
    # small numbers.
    IS_EXPONENT: tl.constexpr = scale_ptr.dtype.element_ty == tl.uint8
    SCALE_Y: tl.constexpr = scales_y(
        X_DTYPE, scale_ptr.dtype.element_ty, zero_ptr.dtype.element_ty, AFFINE
    )
    n_tiles = tl.cdiv(n, 16)
    own_k = tl.program_id(0) // PARTS
    first_column = own_k * (16 * POSITIONS) + part * (16 * COUNT)
    first_m = tl.program_id(1) * BLOCK_M
    share = tl.cdiv(tl.cdiv(n_tiles, STEP), tl.num_programs(2)) * STEP
    first_n = tl.program_id(2) * share
    last_n = min(first_n + share, n_tiles)

    # words [R * half, (warp, lane, 4)]
    half = tl.arange(0, 2 * R)
    i = tl.arange(0, WARPS * 128)
    word_tile = (half // 2)[:, None] + (i // 128 * R)[None, :]
    word_at = (half % 2 * 128)[:, None] + (own_k * (WORDS * 256) + i % 128)[None, :]
    word_at += word_tile * (k_tiles * (WORDS * 256))
    # scale [R, (warp, g, t, pair, half)]: every g reads the same
    scale_tile = tl.arange(0, R)[:, None] + (i // 128 * R)[None, :]
    scale_at = tl.max_contiguous(scale_tile * (groups * 16) + (i % 16)[None, :], [1, 4])
    # y [(M_TILES, R, half), (warp, row of y, t, pair)]
    i = tl.arange(0, WARPS * 64)
    part_y = tl.arange(0, M_TILES * R * 2)
    y_row = (first_m + part_y // (2 * R) * 8)[:, None] + (i // 8 % 8)[None, :]
    y_column = (i // 64 * (16 * R) + i % 8)[None, :] + (part_y % (2 * R) * 8)[:, None]
    y_at = tl.max_contiguous(y_row * n + y_column, [1, 2])
    y_at = y_ptr + y_at
    has_y = y_row < m
    pointers = (words_ptr + word_at, scale_ptr + scale_at, zero_ptr + scale_at)
    limits = (word_tile, scale_tile, last_n)
    strides = (k_tiles * (WORDS * 256), groups)
    GROUPING: tl.constexpr = (SEGMENTS, SEGMENT, PADDED_GROUP, ONE_GROUP, AFFINE)

    # Of groups that are short there are too many scales for the registers.
    SCALES_AHEAD: tl.constexpr = AHEAD if SEGMENTS <= 2 else 0
    ring = ()
    for j in tl.static_range(AHEAD):
        ring = ring + (load_codes(pointers, limits, strides, first_n + j * STEP, WORDS),)
    scale_ring = ()
    for j in tl.static_range(SCALES_AHEAD):
        scale_ring = scale_ring + (
            load_scales(pointers, limits, strides, first_n + j * STEP, first_column, GROUPING),
        )
    # Filling a table waits for all warps: what is ahead is on its way by then.
    tables = load_tables(values_ptr, lanes_ptr, CODES, WARPS, place)[0]
    if OVERLAP:
        # The next kernel may start, which adds what this one stores, and waits for that.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # y may be what the kernel before this one writes
    ys = ()
    for j in tl.static_range(AHEAD):
        ys = ys + (load_y(y_at, y_column, has_y, n, first_n + j * STEP, M_TILES, R, WARPS),)

    acc = ()
    for _ in tl.static_range(COUNT):
        acc = acc + (tl.zeros([WARPS, 16, BLOCK_M], tl.float32),)
    minus = ()
    for _ in tl.static_range(SEGMENTS):
        minus = minus + (tl.zeros([WARPS, 16, BLOCK_M], tl.float32),)
    for tile in tl.range(first_n, last_n, STEP, num_stages=1):
        later = tile + AHEAD * STEP
        ring = ring + (load_codes(pointers, limits, strides, later, WORDS),)
        ys = ys + (load_y(y_at, y_column, has_y, n, later, M_TILES, R, WARPS),)
        scales_of = tile + SCALES_AHEAD * STEP
        scale_ring = scale_ring + (
            load_scales(pointers, limits, strides, scales_of, first_column, GROUPING),
        )
        words = ring[0]
        y = ys[0]
        scales, zeros = scale_ring[0]
        ring = ring[1:]
        ys = ys[1:]
        scale_ring = scale_ring[1:]
        words = prepare(transpose_words(words, WORDS, R, WARPS, ASSEMBLY), CODES)
        values = ()
        for piece in tl.static_range(COUNT // PIECE):
            values = values + decode_part(
                words, tables, values_ptr, part * (COUNT // PIECE) + piece, PIECE, CODES
            )
        sums = ()
        new_minus = ()
        for at in tl.static_range(SEGMENTS):
            scale = as_row_scale(scales[at], IS_EXPONENT, R, WARPS)
            zero = scale
            if AFFINE:
                zero = as_row_scale(zeros[at], False, R, WARPS)
            operand = as_operand_y(y, scale, SCALE_Y, M_TILES, R, WARPS, DOT_DTYPE)
            if SCALE_Y and AFFINE:
                # Of every column of the segment the same.
                rows = tl.broadcast_to(-zero.to(tl.float32), [R, 2, WARPS, 8, 4, 2, 2])
                rows = as_rows(rows.to(DOT_DTYPE), R, WARPS)
                new_minus = new_minus + (tl.dot(rows, operand, minus[at], input_precision="ieee"),)
            else:
                new_minus = new_minus + (minus[at],)
            for q in tl.static_range(at * EACH, at * EACH + EACH):
                w = tl.reshape(values[q], [R, 2, WARPS, 8, 4, 2, 2])
                if not SCALE_Y:
                    w = scaled(w, scale, zero, CODES)
                w = as_rows(w, R, WARPS)
                sums = sums + (tl.dot(w, operand, acc[q], input_precision="ieee"),)
        acc = sums
        minus = new_minus
    if SCALE_Y and AFFINE:
        sums = ()
        for q in tl.static_range(COUNT):
            sums = sums + (acc[q] + minus[q // EACH],)
        acc = sums

    # Of each warp, positions of its own.
    OWN: tl.constexpr = COUNT // WARPS
    if ASSEMBLY:
        totals = tl.inline_asm_elementwise(
            add_shares(COUNT, M_TILES, WARPS),
            shares_constraints(COUNT, M_TILES, WARPS),
            acc + (place,),
            dtype=results(tl.float32, OWN),
            is_pure=False,
            pack=4 * M_TILES,
        )
    else:
        totals = ()
        of_warp = tl.arange(0, WARPS)[:, None, None]
        for j in tl.static_range(OWN):
            total = tl.zeros([WARPS, 16, BLOCK_M], tl.float32)
            for w in tl.static_range(WARPS):
                total = tl.where(of_warp == w, tl.sum(acc[w * OWN + j], 0)[None], total)
            totals = totals + (total,)
    # [WARPS, (upper, t, pair), BLOCK_M, position in bits] to [WARPS, column, BLOCK_M]
    total = joined(totals, OWN)
    total = tl.reshape(tl.permute(total, [0, 3, 1, 2]), [WARPS, OWN * 16, BLOCK_M])
    i = tl.arange(0, OWN * 16)[None, :]
    position = tl.arange(0, WARPS)[:, None] * OWN + i // 16
    column = column_of(position, i // 8 % 2, i // 2 % 4, i % 2, PAIRED) + first_column
    column, live = stored_columns(column, k, groups, GROUP, PADDED_GROUP)
    row = first_m + tl.arange(0, BLOCK_M)
    at = (tl.program_id(2) * m + row).to(tl.int64)[None, None, :] * k + column[:, :, None]
    live = live[:, :, None] & (row < m)[None, None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)

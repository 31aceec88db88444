# ruff: noqa: RUF005
# mypy: ignore-errors
"""Backward product dx = dy @ W_hat for up to 64 rows of dy, from the same packed codes.

The product is computed as W_hat.T @ dy.T. Codes are in the fragment order of operand A of
W_hat @ x.T, so each block of 8 x 8 codes is transposed between lanes before it is decoded. A
program computes the columns of a tile of k, or of a part of one. Its warps split n and add their
sums through shared memory; programs may split n further, and ``reduce_kernel`` adds their partial
sums. Both orders of addition are fixed.
"""

import re

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.decode import (
    BLOCK_POSITIONS,
    column_of,
    decode_positions,
    decode_scale,
    load_pair,
    load_tables,
    load_words,
    prepare,
    scaled,
    stored_columns,
)
from fdk_cuda.triton.kernels.ptx_decode import TRANSPOSE, results
from fdk_cuda.triton.kernels.ptx_smem import (
    add_shares,
    dgrad_smem_bytes,
    reserve,
    shares_constraints,
)

_BLOCK_POSITIONS = tl.constexpr(BLOCK_POSITIONS)

# The layout that the transposition needs: a lane holds four neighbours in a row, and lanes follow
# each other. The second form is the same as linear-layout bases.
_RIGHT = (
    "sizePerThread = [1, 4], threadsPerWarp = [1, 32]",
    "[0, 1], [0, 2], [1, 0]], lane = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]",
)


def is_in_layout(ttgir: str) -> bool:
    """Returns whether a compiled kernel transposes codes in the layout for which that is correct.

    Triton chooses the layout; it chooses another where scale and zero point differ in dtype or are
    bytes.
    """
    names = set(re.findall(r"movmatrix.*-> tensor<[^,>]*, (#\w+)>", ttgir))
    layouts = dict(re.findall(r"^(#\w+) = (.*)", ttgir, re.MULTILINE))
    return bool(names) and all(any(right in layouts[name] for right in _RIGHT) for name in names)


@triton.jit
def transpose_words(
    words, WORDS: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Transposes words ``[(N_TILES, half), (warp, g, t, upper, pair)]`` between lanes.

    Before, g is the row and (t, pair) the unit; after, (t, pair) is the row and g the unit.
    """
    result = ()
    for i in tl.static_range(WORDS):
        word = words[i]
        if ASSEMBLY:
            word = tl.inline_asm_elementwise(
                TRANSPOSE, "=&r,=&r,r,r", [word], dtype=tl.int32, is_pure=True, pack=2
            )
        else:
            word = tl.reshape(word, [2 * N_TILES, WARPS, 4, 2, 4, 2, 2])
            word = tl.permute(word, [0, 1, 4, 6, 2, 5, 3])
            word = tl.reshape(word, [2 * N_TILES, WARPS * 128])
        result = result + (word,)
    return result


@triton.constexpr_function
def scales_y(x_dtype: tl.dtype, scale_dtype: tl.dtype, zero_dtype: tl.dtype, affine: bool) -> bool:
    """Returns whether dy is bf16 and bf16 holds scale and zero point exactly."""
    exact = (tl.bfloat16, tl.uint8)
    return x_dtype == tl.bfloat16 and scale_dtype in exact and (not affine or zero_dtype in exact)


@triton.jit
def as_row_scale(scale, EXPONENT: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """Reshapes ``[N_TILES, (warp, g, t, pair, half)]`` to ``[N_TILES, half, warp, g, t, 1, pair]``.

    Decodes exponents to float32.
    """
    if EXPONENT:
        scale = decode_scale(scale)
    scale = tl.permute(tl.reshape(scale, [N_TILES, WARPS, 8, 4, 2, 2]), [0, 5, 1, 2, 3, 4])
    return scale[:, :, :, :, :, None, :]


@triton.jit
def load_scales(pointers, limits, sizes, tile, first_column, GROUPING: tl.constexpr):
    """Loads scales and zero points of the tiles from ``tile`` on, one of each per segment.

    ``GROUPING``: number of segments, columns of a segment, padded group size, whether a row is one
    group, whether there are zero points.
    """
    SEGMENTS: tl.constexpr = GROUPING[0]
    SEGMENT: tl.constexpr = GROUPING[1]
    PADDED_GROUP: tl.constexpr = GROUPING[2]
    ONE_GROUP: tl.constexpr = GROUPING[3]
    AFFINE: tl.constexpr = GROUPING[4]
    _, scale_at, zero_at = pointers
    _, scale_tile, last_n = limits
    groups = sizes[1]
    scales = ()
    zeros = ()
    for i in tl.static_range(SEGMENTS):
        group = 0
        if not ONE_GROUP:
            group = (first_column + i * SEGMENT) // PADDED_GROUP
        at = (tile * groups + group) * 16
        inside = (tile + scale_tile < last_n) & (group < groups)
        scale, zero = load_pair(scale_at, zero_at, at, inside, AFFINE)
        scales = scales + (scale,)
        zeros = zeros + (zero,)
    return scales, zeros


@triton.jit
def load_codes(pointers, limits, sizes, tile, WORDS: tl.constexpr):
    """Loads the words of the tiles from ``tile`` on, 0 from ``last_n`` on."""
    word_tile, _, last_n = limits
    at = tl.cast(tile, tl.int64) * sizes[0]
    return load_words(pointers[0], at, (tile + word_tile < last_n) & (word_tile >= 0), WORDS)


@triton.jit
def load_y(
    at, y_column, has_y, n, tile, M_TILES: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr
):
    """Loads ``[M_TILES, N_TILES, half, warp, row of y, t, pair]`` of the tiles from ``tile`` on.

    Past this program's tiles y is multiplied by scales of 0, but must be finite.
    """
    live = has_y & (tile * 16 + y_column < n)
    y = tl.load(at + tl.max_contiguous(tile * 16 + y_column * 0, [1, 2]), mask=live, other=0.0)
    return tl.reshape(y, [M_TILES, N_TILES, 2, WARPS, 8, 4, 2])


@triton.jit
def as_rows(weight, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """Reshapes ``[N_TILES, half, warp, g, t, upper, pair]`` to ``[warp, (upper, g), row]``."""
    return tl.reshape(tl.permute(weight, [2, 5, 3, 0, 1, 4, 6]), [WARPS, 16, 16 * N_TILES])


@triton.jit
def as_operand_y(
    y,
    scale,
    SCALE_Y: tl.constexpr,
    M_TILES: tl.constexpr,
    N_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Arranges y as operand B, ``[warp, row of W_hat, row of y]``, scaled if SCALE_Y."""
    if SCALE_Y:
        scale = tl.reshape(scale, [1, N_TILES, 2, WARPS, 8, 4, 2])
        y = (y.to(tl.float32) * scale.to(tl.float32)).to(DOT_DTYPE)
    else:
        y = y.to(DOT_DTYPE)
    y = tl.permute(y, [3, 1, 2, 5, 6, 0, 4])
    return tl.reshape(y, [WARPS, 16 * N_TILES, 8 * M_TILES])


@triton.jit
def joined(parts, COUNT: tl.constexpr):
    """Stacks 1, 2, 4 or 8 tensors in a last dimension, in order."""
    A: tl.constexpr = parts[0].shape[0]
    B: tl.constexpr = parts[0].shape[1]
    C: tl.constexpr = parts[0].shape[2]
    if COUNT == 1:
        return parts[0][:, :, :, None]
    elif COUNT == 2:
        return tl.join(parts[0], parts[1])
    elif COUNT == 4:
        # The last dimension that ``join`` adds is the higher bit.
        total = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        return tl.reshape(total, [A, B, C, 4])
    else:
        low = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        high = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        return tl.reshape(tl.join(low, high), [A, B, C, 8])


# y      :: [m, n, dtype], the gradient dy
# words  :: [n_tiles, k_tiles, WORDS, 2, 32, 4, int32]
# scale  :: [n_tiles, n_groups, 8, 2, dtype]
# zero   :: like scale; without zero points, scale
# values :: [dtype 2, 2^bits, int16]
# lanes  :: [dtype 2, 2, 32, int32]
# out    :: [m, k, dtype], or [split_n, m, k, float32]
@triton.jit(do_not_specialize=["m"])
def dgrad_kernel(
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
    N_TILES: tl.constexpr,
    M_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    TABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes dx = dy @ W_hat: COUNT positions of a tile, 8 * M_TILES rows of dy a program."""
    PARTS: tl.constexpr = POSITIONS // COUNT
    CODES: tl.constexpr = (BITS, AFFINE, ASSEMBLY, TABLE, X_DTYPE, DOT_DTYPE)
    place = None
    if ASSEMBLY:
        # Once for all parts: each branch below would declare its own.
        place = tl.inline_asm_elementwise(
            reserve(dgrad_smem_bytes(BITS, AFFINE, TABLE, WARPS)),
            "=r",
            [],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    # Each part has its own assembly, and a program runs one of them. At 3 bits the last one takes
    # longer; parts are staggered because programs 132 apart share a processor of an H200.
    turn = tl.program_id(0) + tl.program_id(2) * tl.num_programs(0)
    own = (turn + turn // 128) % PARTS
    for part in tl.static_range(PARTS):
        if own == part:
            dgrad_part(
                (y_ptr, words_ptr, scale_ptr, zero_ptr, values_ptr, lanes_ptr, out_ptr),
                (m, n, k, k_tiles, groups),
                place,
                part,
                PARTS,
                CODES,
                (WORDS, POSITIONS, COUNT, PAIRED),
                (GROUP, PADDED_GROUP, SEGMENT, ONE_GROUP),
                (N_TILES, M_TILES, WARPS, AHEAD, OVERLAP),
            )


@triton.jit
def dgrad_part(
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
    """Computes the columns of one part of a tile; arguments as those of ``dgrad_kernel``.

    ``CODES``: see ``decode_positions``.
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
    N_TILES: tl.constexpr = CONFIG[0]
    M_TILES: tl.constexpr = CONFIG[1]
    WARPS: tl.constexpr = CONFIG[2]
    AHEAD: tl.constexpr = CONFIG[3]
    OVERLAP: tl.constexpr = CONFIG[4]
    BLOCK_M: tl.constexpr = 8 * M_TILES
    SEGMENTS: tl.constexpr = 1 if ONE_GROUP else max(1, 16 * COUNT // SEGMENT)
    EACH: tl.constexpr = COUNT // SEGMENTS  # positions per scale
    PIECE: tl.constexpr = min(COUNT, _BLOCK_POSITIONS)
    STEP: tl.constexpr = N_TILES * WARPS
    # Scale y instead of W, which is less work, if that is as exact: bf16 has the range of fp32.
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

    # words [N_TILES * half, (warp, lane, 4)]
    half = tl.arange(0, 2 * N_TILES)
    i = tl.arange(0, WARPS * 128)
    word_tile = (half // 2)[:, None] + (i // 128 * N_TILES)[None, :]
    word_at = (half % 2 * 128)[:, None] + (own_k * (WORDS * 256) + i % 128)[None, :]
    word_at += word_tile * (k_tiles * (WORDS * 256))
    # scale [N_TILES, (warp, g, t, pair, half)]: the same for every g
    scale_tile = tl.arange(0, N_TILES)[:, None] + (i // 128 * N_TILES)[None, :]
    scale_at = tl.max_contiguous(scale_tile * (groups * 16) + (i % 16)[None, :], [1, 4])
    # y [(M_TILES, N_TILES, half), (warp, row of y, t, pair)]
    i = tl.arange(0, WARPS * 64)
    part_y = tl.arange(0, M_TILES * N_TILES * 2)
    y_row = (first_m + part_y // (2 * N_TILES) * 8)[:, None] + (i // 8 % 8)[None, :]
    y_column = (i // 64 * (16 * N_TILES) + i % 8)[None, :] + (part_y % (2 * N_TILES) * 8)[:, None]
    y_at = tl.max_contiguous(y_row * n + y_column, [1, 2])
    y_at = y_ptr + y_at
    has_y = y_row < m
    pointers = (words_ptr + word_at, scale_ptr + scale_at, zero_ptr + scale_at)
    limits = (word_tile, scale_tile, last_n)
    strides = (k_tiles * (WORDS * 256), groups)
    GROUPING: tl.constexpr = (SEGMENTS, SEGMENT, PADDED_GROUP, ONE_GROUP, AFFINE)

    # Short groups have too many scales for the registers.
    SCALES_AHEAD: tl.constexpr = AHEAD if SEGMENTS <= 2 else 0
    ring = ()
    for j in tl.static_range(AHEAD):
        ring = ring + (load_codes(pointers, limits, strides, first_n + j * STEP, WORDS),)
    scale_ring = ()
    for j in tl.static_range(SCALES_AHEAD):
        scale_ring = scale_ring + (
            load_scales(pointers, limits, strides, first_n + j * STEP, first_column, GROUPING),
        )
    # Filling a table is a barrier for all warps: the loads ahead are in flight by then.
    tables = load_tables(values_ptr, lanes_ptr, CODES, WARPS, place)[0]
    if OVERLAP:
        # The next kernel, which reduces the partial sums, may start; it waits for this one.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # the previous kernel may write y
    ys = ()
    for j in tl.static_range(AHEAD):
        ys = ys + (load_y(y_at, y_column, has_y, n, first_n + j * STEP, M_TILES, N_TILES, WARPS),)

    acc = ()
    for _ in tl.static_range(COUNT):
        acc = acc + (tl.zeros([WARPS, 16, BLOCK_M], tl.float32),)
    minus = ()
    for _ in tl.static_range(SEGMENTS):
        minus = minus + (tl.zeros([WARPS, 16, BLOCK_M], tl.float32),)
    for tile in tl.range(first_n, last_n, STEP, num_stages=1):
        later = tile + AHEAD * STEP
        ring = ring + (load_codes(pointers, limits, strides, later, WORDS),)
        ys = ys + (load_y(y_at, y_column, has_y, n, later, M_TILES, N_TILES, WARPS),)
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
        words = prepare(transpose_words(words, WORDS, N_TILES, WARPS, ASSEMBLY), CODES)
        values = ()
        for piece in tl.static_range(COUNT // PIECE):
            values = values + decode_positions(
                words, tables, values_ptr, part * (COUNT // PIECE) + piece, PIECE, CODES
            )
        sums = ()
        new_minus = ()
        for at in tl.static_range(SEGMENTS):
            scale = as_row_scale(scales[at], IS_EXPONENT, N_TILES, WARPS)
            zero = scale
            if AFFINE:
                zero = as_row_scale(zeros[at], False, N_TILES, WARPS)
            operand = as_operand_y(y, scale, SCALE_Y, M_TILES, N_TILES, WARPS, DOT_DTYPE)
            if SCALE_Y and AFFINE:
                # The same for every column of the segment.
                rows = tl.broadcast_to(-zero.to(tl.float32), [N_TILES, 2, WARPS, 8, 4, 2, 2])
                rows = as_rows(rows.to(DOT_DTYPE), N_TILES, WARPS)
                new_minus = new_minus + (tl.dot(rows, operand, minus[at], input_precision="ieee"),)
            else:
                new_minus = new_minus + (minus[at],)
            for q in tl.static_range(at * EACH, at * EACH + EACH):
                w = tl.reshape(values[q], [N_TILES, 2, WARPS, 8, 4, 2, 2])
                if not SCALE_Y:
                    w = scaled(w, scale, zero, CODES)
                w = as_rows(w, N_TILES, WARPS)
                sums = sums + (tl.dot(w, operand, acc[q], input_precision="ieee"),)
        acc = sums
        minus = new_minus
    if SCALE_Y and AFFINE:
        sums = ()
        for q in tl.static_range(COUNT):
            sums = sums + (acc[q] + minus[q // EACH],)
        acc = sums

    # Each warp receives the sums of its positions.
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
    column = (
        column_of(step=position, upper=i // 8 % 2, t=i // 2 % 4, pair=i % 2, PAIRED=PAIRED)
        + first_column
    )
    column, live = stored_columns(column, k, groups, GROUP, PADDED_GROUP)
    row = first_m + tl.arange(0, BLOCK_M)
    at = (tl.program_id(2) * m + row).to(tl.int64)[None, None, :] * k + column[:, :, None]
    live = live[:, :, None] & (row < m)[None, None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)

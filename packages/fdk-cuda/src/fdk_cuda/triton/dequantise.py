# ruff: noqa: RUF005
# mypy: ignore-errors
"""W_hat from arranged codes, and the same in registers as an operand of a larger product."""

import triton
import triton.language as tl

from fdk_cuda.triton.decode import (
    PART,
    decode_part,
    decode_scale,
    load_tables,
    load_words,
)

_PART = tl.constexpr(PART)


@triton.jit
def scaled_part(
    words,
    tables,
    values_ptr,
    scale_ptr,
    zero_ptr,
    scale_at,
    has_scale,
    first_column,
    groups,
    part: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    AFFINE: tl.constexpr,
    SHUFFLE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    R: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The weights of ``COUNT`` positions, each ``[R, half, WARPS, g, t, 4]``, as a tuple.

    ``scale_at :: [R, (WARPS, g, t, half)]`` points to the scale of group 0 of each row, and
    ``first_column`` (a scalar, or of that shape) is the first padded column.
    """
    values = decode_part(
        words, tables, values_ptr, part, COUNT, BITS, AFFINE, SHUFFLE, X_DTYPE, DOT_DTYPE
    )
    scale = tl.zeros([1], tl.float32)
    zero = tl.zeros([1], tl.float32)
    weights = ()
    for q in tl.static_range(COUNT):
        if q == 0 or q * 16 % SEGMENT == 0:
            group = first_column * 0
            if not ONE_GROUP:
                group = (first_column + q * 16) // PADDED_GROUP
            inside = has_scale & (group < groups)
            scale = decode_scale(tl.load(scale_ptr + scale_at + group * 16, mask=inside, other=0))
            scale = tl.permute(tl.reshape(scale, [R, WARPS, 8, 4, 2]), [0, 4, 1, 2, 3])
            scale = scale[:, :, :, :, :, None]
            if AFFINE:
                zero = tl.load(zero_ptr + scale_at + group * 16, mask=inside, other=0)
                zero = tl.reshape(zero.to(tl.float32), [R, WARPS, 8, 4, 2])
                zero = tl.permute(zero, [0, 4, 1, 2, 3])[:, :, :, :, :, None]
        w = tl.reshape(values[q], [R, 2, WARPS, 8, 4, 4]).to(tl.float32)
        if AFFINE:
            w = w - zero
        weights = weights + ((w * scale).to(DOT_DTYPE),)
    return weights


@triton.jit
def join_part(weights, COUNT: tl.constexpr, R: tl.constexpr, WARPS: tl.constexpr):
    """Positions side by side: ``[R, half, WARPS, g, t, upper, pair, p0, p1(, p2)]``."""
    low = tl.join(tl.join(weights[0], weights[1]), tl.join(weights[2], weights[3]))
    if COUNT == 8:
        high = tl.join(tl.join(weights[4], weights[5]), tl.join(weights[6], weights[7]))
        return tl.reshape(tl.join(low, high), [R, 2, WARPS, 8, 4, 2, 2, 2, 2, 2])
    else:
        return tl.reshape(low, [R, 2, WARPS, 8, 4, 2, 2, 2, 2])


# words  :: [n_tiles, k_tiles, WORDS, 2, 32, 4, int32]
# scale  :: [n_tiles, groups, 8, 2], zero alike
# out    :: [n, k, dtype]
@triton.jit
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
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    PAIRED: tl.constexpr,
    AFFINE: tl.constexpr,
    SHUFFLE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    R: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Every warp takes a tile of its own along k; R tiles along n."""
    COUNT: tl.constexpr = min(_PART, POSITIONS)
    WIDTH: tl.constexpr = 16 * COUNT
    tile_n = tl.program_id(0) * R
    n_tiles = tl.cdiv(n, 16)
    tables = load_tables(lanes_ptr, BITS, SHUFFLE)

    # words [R * half, (warp, lane, 4)]
    half = tl.arange(0, 2 * R)
    i = tl.arange(0, WARPS * 128)
    tile_k = tl.program_id(1) * WARPS + i // 128
    word_at = ((tile_n + half // 2) * k_tiles * (WORDS * 256) + half % 2 * 128)[:, None]
    word_at += (tile_k * (WORDS * 256) + i % 128)[None, :]
    mask = (tile_n + half // 2 < n_tiles)[:, None] & (tile_k < k_tiles)[None, :]
    words = load_words(words_ptr, word_at, mask, WORDS)

    # scale [R, (warp, g, t, half)]
    i = tl.arange(0, WARPS * 64)
    tile = tile_n + tl.arange(0, R)
    scale_at = (tile * groups * 16)[:, None] + (i // 8 % 8 * 2 + i % 2)[None, :]
    has_scale = (tile < n_tiles)[:, None]
    tile_s = (tl.program_id(1) * WARPS + i // 64)[None, :]
    tile_k = tl.program_id(1) * WARPS + tl.arange(0, WARPS)

    row = tile_n * 16 + tl.arange(0, 16 * R)
    for part in tl.static_range(POSITIONS // COUNT):
        first = tile_k * (16 * POSITIONS) + part * WIDTH
        weights = scaled_part(
            words,
            tables,
            values_ptr,
            scale_ptr,
            zero_ptr,
            scale_at,
            has_scale,
            tile_s * (16 * POSITIONS) + part * WIDTH,
            groups,
            part,
            COUNT,
            BITS,
            PADDED_GROUP,
            SEGMENT,
            ONE_GROUP,
            AFFINE,
            SHUFFLE,
            X_DTYPE,
            DOT_DTYPE,
            R,
            WARPS,
        )
        joined = join_part(weights, COUNT, R, WARPS)
        # To [WARPS, R, half, g, then the columns, in either order of arrangement.py]
        if PAIRED:
            if COUNT == 8:
                w = tl.permute(joined, [2, 0, 1, 3, 9, 8, 4, 7, 5, 6])
            else:
                w = tl.permute(joined, [2, 0, 1, 3, 8, 4, 7, 5, 6])
        elif COUNT == 8:
            w = tl.permute(joined, [2, 0, 1, 3, 9, 8, 7, 4, 5, 6])
        else:
            w = tl.permute(joined, [2, 0, 1, 3, 8, 7, 4, 5, 6])
        w = tl.reshape(w, [WARPS, 16 * R, WIDTH])
        column = first[:, None] + tl.arange(0, WIDTH)[None, :]
        if GROUP == PADDED_GROUP:
            live = column < k
        else:
            live = (column % PADDED_GROUP < GROUP) & (column < groups * PADDED_GROUP)
            column = column // PADDED_GROUP * GROUP + column % PADDED_GROUP
        at = row.to(tl.int64)[None, :, None] * k + column[:, None, :]
        live = live[:, None, :] & (row < n)[None, :, None]
        tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=live)

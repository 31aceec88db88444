# ruff: noqa: RUF005
# mypy: ignore-errors
"""W_hat from arranged codes, and the same in registers as an operand of a larger product."""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.decode import (
    PART,
    decode_part,
    decode_scale,
    load_tables,
    load_words,
    prepare,
    stored_columns,
)
from fdk_cuda.triton.kernels.ptx_assembly import results, table_of
from fdk_cuda.triton.kernels.ptx_decode import of_two, of_two_constraints

_PART = tl.constexpr(PART)
# Two products, each rounded once: exactly what float32 arithmetic and a cast give. With -0 added,
# for there is no product of bf16 pairs before sm_90.
_PRODUCT = {
    tl.bfloat16: "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
    tl.float16: "mul.rn.f16x2 $0, $1, $2;",
}


@triton.constexpr_function
def product(dtype: tl.dtype) -> str:
    """The assembly of a product of pairs."""
    return _PRODUCT[dtype]


@triton.jit
def load_scale(
    scale_ptr, zero_ptr, at, inside, R: tl.constexpr, WARPS: tl.constexpr, AFFINE: tl.constexpr
):
    """Scale and zero point, ``at :: [R, (warp, g, t, half)]`` as ``[R, half, warp, g, t, 1]``.

    A scale of 16 bits stays as it is stored. Without zero points the second is the first again.
    """
    scale = tl.load(scale_ptr + at, mask=inside, other=0)
    if scale.dtype == tl.uint8:
        scale = decode_scale(scale)
    scale = tl.permute(tl.reshape(scale, [R, WARPS, 8, 4, 2]), [0, 4, 1, 2, 3])
    scale = scale[:, :, :, :, :, None]
    zero = scale
    if AFFINE:
        zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
        zero = tl.permute(tl.reshape(zero, [R, WARPS, 8, 4, 2]), [0, 4, 1, 2, 3])
        zero = zero[:, :, :, :, :, None]
    return scale, zero


@triton.jit
def scaled(value, scale, zero, CODES: tl.constexpr):
    """``(value - zero) * scale`` of a position, rounded once; the last dimension is of pairs."""
    AFFINE: tl.constexpr = CODES[1]
    ASSEMBLY: tl.constexpr = CODES[2]
    X_DTYPE: tl.constexpr = CODES[4]
    DOT_DTYPE: tl.constexpr = CODES[5]
    if ASSEMBLY and not AFFINE and scale.dtype == X_DTYPE:
        return tl.inline_asm_elementwise(
            product(X_DTYPE), "=r,r,r", [value, scale], dtype=scale.dtype, is_pure=True, pack=2
        )
    else:
        w = value.to(tl.float32)
        if AFFINE == 2:
            # Both products are exact (``Weight.fused``), and so the bits are those of the other way
            # wherever value - zero is exact too: for all zero points but tiny ones that are not 0.
            scale = scale.to(tl.float32)
            minus = tl.broadcast_to(-(zero.to(tl.float32) * scale), w.shape)
            return tl.fma(w, tl.broadcast_to(scale, w.shape), minus).to(DOT_DTYPE)
        if AFFINE:
            w = w - zero.to(tl.float32)
        return (w * scale.to(tl.float32)).to(DOT_DTYPE)


@triton.jit
def two_values(values_ptr, scale, zero, CODES: tl.constexpr):
    """Of affine codes of one bit, scaled: the first twice, and the bits where the second differs.

    Both in the shape of scale and zero.
    """
    X_DTYPE: tl.constexpr = CODES[4]
    values_ptr += table_of(X_DTYPE) * 2
    scale = scale.to(tl.float32)
    low = tl.load(values_ptr).to(X_DTYPE, bitcast=True).to(tl.float32)
    high = tl.load(values_ptr + 1).to(X_DTYPE, bitcast=True).to(tl.float32)
    zero = zero.to(tl.float32)
    low = (low - zero) * scale
    high = (high - zero) * scale
    low = low.to(X_DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = high.to(X_DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low * 0x10001, (low ^ high) * 0x10001


@triton.jit
def chosen(
    word,
    values_ptr,
    scale,
    zero,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    SAME: tl.constexpr,
    CODES: tl.constexpr,
):
    """The weights of ``COUNT`` positions of affine codes of one bit, each in the shape of ``word``.

    Words side by side have one scale and zero point where ``SAME``.
    """
    value, other = two_values(values_ptr, scale, zero, CODES)
    return tl.inline_asm_elementwise(
        of_two(FIRST, COUNT, SAME),
        of_two_constraints(COUNT),
        [word, value, other],
        dtype=results(CODES[4], COUNT),
        is_pure=True,
        pack=2,
    )


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
    CODES: tl.constexpr,
    GROUPING: tl.constexpr,
    R: tl.constexpr,
    WARPS: tl.constexpr,
):
    """The weights of ``COUNT`` positions, each ``[R, half, WARPS, g, t, 4]``, as a tuple.

    ``scale_at :: [R, (WARPS, g, t, half)]`` points to the scale of group 0 of each row, and
    ``first_column`` (a scalar, or of that shape) is the first padded column. ``CODES``: see
    ``decode_part``. ``GROUPING``: the group size as it is stored, of how many columns a segment is,
    and whether a row is one group.
    """
    AFFINE: tl.constexpr = CODES[1]
    PADDED_GROUP: tl.constexpr = GROUPING[0]
    SEGMENT: tl.constexpr = GROUPING[1]
    ONE_GROUP: tl.constexpr = GROUPING[2]
    values = decode_part(words, tables, values_ptr, part, COUNT, CODES)
    weights = ()
    for q in tl.static_range(COUNT):
        if q == 0 or q * 16 % SEGMENT == 0:
            group = first_column * 0
            if not ONE_GROUP:
                group = (first_column + q * 16) // PADDED_GROUP
            inside = has_scale & (group < groups)
            at = scale_at + group * 16
            scale, zero = load_scale(scale_ptr, zero_ptr, at, inside, R, WARPS, AFFINE)
        w = tl.reshape(values[q], [R, 2, WARPS, 8, 4, 4])
        w = scaled(w, scale, zero, CODES)
        weights = weights + (w,)
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
    """Every warp takes a tile of its own along k, and some along n, one by one.

    With AHEAD the words of the next are loaded before one is stored; without it there is one.
    """
    COUNT: tl.constexpr = min(_PART, POSITIONS)
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
            weights = scaled_part(
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
            joined = join_part(weights, COUNT, 1, WARPS)
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
            w = tl.reshape(w, [WARPS, 16, WIDTH])
            column = first[:, None] + tl.arange(0, WIDTH)[None, :]
            column, live = stored_columns(column, k, groups, GROUP, PADDED_GROUP)
            at = row.to(tl.int64)[None, :, None] * k + column[:, None, :]
            live = live[:, None, :] & (row < n)[None, :, None]
            tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=live)
        words = later

# ruff: noqa: RUF005, D103
# mypy: ignore-errors
"""dx = dy @ W_hat from the same codes, for some tens of rows of dy: nothing dequantised is stored.

The product is computed as W_hat.T @ dy.T. A lane's codes are elements of operand A of W_hat @ x.T,
so each block of 8 x 8 codes is transposed between lanes before it is decoded. A warp takes the
columns of one tile, or of a part of it, and several programs share a tile by splitting n; parts
are added in a fixed order. (Warps that shared n had to add up within a program: 65 us where a
quarter of the programs took 30, 8192 x 8192, 4 bits, H200.)
"""

import re

import triton
import triton.language as tl

from fdk_cuda.triton.decode import decode_part, decode_scale, load_tables, load_words
from fdk_cuda.triton.dequantise import scaled

# Both units of a lane: their halves side by side are two neighbours in a row of 8 x 8 elements of
# 16 bits. A lane gets two neighbours in a column, and takes them apart again.
_TRANSPOSE = tl.constexpr(
    "{ .reg .b32 l, h; prmt.b32 l, $2, $3, 0x5410; prmt.b32 h, $2, $3, 0x7632; "
    "movmatrix.sync.aligned.m8n8.trans.b16 l, l; movmatrix.sync.aligned.m8n8.trans.b16 h, h; "
    "prmt.b32 $0, l, h, 0x5410; prmt.b32 $1, l, h, 0x7632; }"
)


# A lane's place in a matrix of codes is right where it holds four neighbours in a row, or the same
# written as bases, and lanes follow each other.
_RIGHT = (
    "sizePerThread = [1, 4], threadsPerWarp = [1, 32]",
    "[0, 1], [0, 2], [1, 0]], lane = [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]]",
)


def is_in_layout(ttgir: str) -> bool:
    """Whether a compiled kernel transposes codes in the layout in which that is right.

    Triton chooses it. Where scale and zero point differ in dtype, or are bytes, it takes another.
    """
    names = set(re.findall(r"movmatrix.*-> tensor<[^,>]*, (#\w+)>", ttgir))
    layouts = dict(re.findall(r"^(#\w+) = (.*)", ttgir, re.MULTILINE))
    return bool(names) and all(any(right in layouts[name] for right in _RIGHT) for name in names)


@triton.jit
def transpose_words(
    words, WORDS: tl.constexpr, R: tl.constexpr, WARPS: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """``[(R, half), (warp, g, t, upper, pair)]``, where (t, pair) was the unit and g the row.

    Afterwards g is the unit and (t, pair) the row.
    """
    result = ()
    for i in tl.static_range(WORDS):
        word = words[i]
        if ASSEMBLY:
            word = tl.inline_asm_elementwise(
                _TRANSPOSE, "=&r,=&r,r,r", [word], dtype=tl.int32, is_pure=True, pack=2
            )
        else:
            word = tl.reshape(word, [2 * R, WARPS, 4, 2, 4, 2, 2])
            word = tl.permute(word, [0, 1, 4, 6, 2, 5, 3])
            word = tl.reshape(word, [2 * R, WARPS * 128])
        result = result + (word,)
    return result


@triton.constexpr_function
def scales_y(x_dtype: tl.dtype, scale_dtype: tl.dtype, zero_dtype: tl.dtype, affine: bool) -> bool:
    """Whether bf16 holds scale and zero point exactly, and x is bf16."""
    exact = (tl.bfloat16, tl.uint8)
    return x_dtype == tl.bfloat16 and scale_dtype in exact and (not affine or zero_dtype in exact)


@triton.jit
def load_row_scale(ptr, at, inside, EXPONENT: tl.constexpr, R: tl.constexpr, WARPS: tl.constexpr):
    """``at :: [R, (warp, g, t, pair, half)]`` as ``[R, half, warp, g, t, 1, pair]``."""
    scale = tl.load(ptr + tl.max_contiguous(at, [1, 4]), mask=inside, other=0)
    if EXPONENT:
        scale = decode_scale(scale)
    scale = tl.permute(tl.reshape(scale, [R, WARPS, 8, 4, 2, 2]), [0, 5, 1, 2, 3, 4])
    return scale[:, :, :, :, :, None, :]


@triton.jit
def as_rows(weight, R: tl.constexpr, WARPS: tl.constexpr):
    """``[R, half, warp, g, t, upper, pair]`` as ``[warp, (upper, g), row of W_hat]``."""
    return tl.reshape(tl.permute(weight, [2, 5, 3, 0, 1, 4, 6]), [WARPS, 16, 16 * R])


@triton.jit
def as_operand_y(
    y,
    scale,
    SCALE_Y: tl.constexpr,
    M_TILES: tl.constexpr,
    R: tl.constexpr,
    WARPS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """``[M_TILES, R, half, warp, row of y, t, pair]`` as ``[warp, row of W_hat, row of y]``."""
    if SCALE_Y:
        scale = tl.reshape(scale, [1, R, 2, WARPS, 8, 4, 2])
        y = (y.to(tl.float32) * scale.to(tl.float32)).to(DOT_DTYPE)
    else:
        y = y.to(DOT_DTYPE)
    y = tl.permute(y, [3, 1, 2, 5, 6, 0, 4])
    return tl.reshape(y, [WARPS, 16 * R, 8 * M_TILES])


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
    STAGES: tl.constexpr,
    TABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    PARTS: tl.constexpr = POSITIONS // COUNT
    # The assembly of a part is its own: each program runs one of these.
    for part in tl.static_range(PARTS):
        if tl.program_id(0) % PARTS == part:
            transposed_part(
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
                part,
                COUNT,
                PARTS,
                BITS,
                WORDS,
                POSITIONS,
                GROUP,
                PADDED_GROUP,
                SEGMENT,
                ONE_GROUP,
                PAIRED,
                AFFINE,
                ASSEMBLY,
                X_DTYPE,
                DOT_DTYPE,
                R,
                M_TILES,
                WARPS,
                STAGES,
                TABLE,
                OVERLAP,
            )


@triton.jit
def transposed_part(
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
    part: tl.constexpr,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
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
    R: tl.constexpr,
    M_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    TABLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The columns of the positions of one part of a tile."""
    BLOCK_M: tl.constexpr = 8 * M_TILES
    ONE_SEGMENT: tl.constexpr = ONE_GROUP or SEGMENT % (16 * COUNT) == 0
    # The scale goes to y, of which there is less, where that is as exact: in bf16, which keeps
    # small numbers.
    IS_EXPONENT: tl.constexpr = scale_ptr.dtype.element_ty == tl.uint8
    SCALE_Y: tl.constexpr = scales_y(
        X_DTYPE, scale_ptr.dtype.element_ty, zero_ptr.dtype.element_ty, AFFINE
    )
    n_tiles = tl.cdiv(n, 16)
    first_k = tl.program_id(0) // PARTS * WARPS
    first_m = tl.program_id(1) * BLOCK_M
    share = tl.cdiv(tl.cdiv(n_tiles, R), tl.num_programs(2)) * R
    first_n = tl.program_id(2) * share
    last_n = min(first_n + share, n_tiles)
    tables = load_tables(values_ptr, lanes_ptr, BITS, AFFINE, ASSEMBLY, TABLE, WARPS, X_DTYPE)[0]

    # words [R * half, (warp, lane, 4)]
    half = tl.arange(0, 2 * R)
    i = tl.arange(0, WARPS * 128)
    word_tile = (half // 2)[:, None]
    word_k = (first_k + i // 128)[None, :]
    word_at = word_k * (WORDS * 256) + (half % 2 * 128)[:, None] + (i % 128)[None, :]
    # scale [R, (warp, g, t, pair, half)]: every g reads the same
    scale_tile = tl.arange(0, R)[:, None]
    scale_at = (i % 16)[None, :]
    # y [(M_TILES, R, half), (warp, row of y, t, pair)]: every warp reads the same
    i = tl.arange(0, WARPS * 64)
    part_y = tl.arange(0, M_TILES * R * 2)
    y_row = (first_m + part_y // (2 * R) * 8)[:, None] + (i // 8 % 8)[None, :]
    y_column = (i % 8)[None, :] + (part_y % (2 * R) * 8)[:, None]

    acc = ()
    for _ in tl.static_range(COUNT):
        acc = acc + (tl.zeros([WARPS, 16, BLOCK_M], tl.float32),)
    zeros = tl.zeros([WARPS, 16, BLOCK_M], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # y may be what the kernel before this one writes
    for tile in tl.range(first_n, last_n, R, num_stages=STAGES):
        at = (tile + word_tile).to(tl.int64) * (k_tiles * (WORDS * 256)) + word_at
        words = load_words(words_ptr, at, (tile + word_tile < last_n) & (word_k < k_tiles), WORDS)
        at = y_row * n + (tile * 16 + y_column)
        # What lies beyond this program's tiles meets words that were not loaded, but has to be
        # finite, and scales that are 0.
        live = (y_row < m) & (tile * 16 + y_column < n)
        y = tl.load(y_ptr + tl.max_contiguous(at, [1, 2]), mask=live, other=0.0)
        y = tl.reshape(y, [M_TILES, R, 2, WARPS, 8, 4, 2])
        words = transpose_words(words, WORDS, R, WARPS, ASSEMBLY)
        values = decode_part(
            words,
            tables,
            values_ptr,
            part,
            COUNT,
            BITS,
            AFFINE,
            ASSEMBLY,
            TABLE,
            X_DTYPE,
            DOT_DTYPE,
        )
        sums = ()
        for q in tl.static_range(COUNT):
            if q == 0 or (part * COUNT + q) * 16 % SEGMENT == 0:
                group = word_k * 0
                if not ONE_GROUP:
                    group = (word_k * (16 * POSITIONS) + (part * COUNT + q) * 16) // PADDED_GROUP
                at = ((tile + scale_tile) * groups + group) * 16 + scale_at
                inside = (tile + scale_tile < last_n) & (group < groups)
                scale = load_row_scale(scale_ptr, at, inside, IS_EXPONENT, R, WARPS)
                zero = scale
                if AFFINE:
                    zero = load_row_scale(zero_ptr, at, inside, False, R, WARPS)
                operand = as_operand_y(y, scale, SCALE_Y, M_TILES, R, WARPS, DOT_DTYPE)
                if SCALE_Y and AFFINE:
                    minus = tl.broadcast_to(-zero.to(tl.float32), [R, 2, WARPS, 8, 4, 2, 2])
                    minus = as_rows(minus.to(DOT_DTYPE), R, WARPS)
                    if ONE_SEGMENT:
                        zeros = tl.dot(minus, operand, zeros, input_precision="ieee")
            w = tl.reshape(values[q], [R, 2, WARPS, 8, 4, 2, 2])
            if not SCALE_Y:
                w = scaled(w, scale, zero, AFFINE, ASSEMBLY, X_DTYPE, DOT_DTYPE)
            total = tl.dot(as_rows(w, R, WARPS), operand, acc[q], input_precision="ieee")
            if SCALE_Y and AFFINE and not ONE_SEGMENT:
                total = tl.dot(minus, operand, total, input_precision="ieee")
            sums = sums + (total,)
        acc = sums
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if SCALE_Y and AFFINE and ONE_SEGMENT:
        sums = ()
        for q in tl.static_range(COUNT):
            sums = sums + (acc[q] + zeros,)
        acc = sums

    # [WARPS, (upper, t, pair), BLOCK_M, position in bits] to [WARPS, column, BLOCK_M]
    total = tl.join(tl.join(acc[0], acc[1]), tl.join(acc[2], acc[3]))
    if COUNT == 8:
        high = tl.join(tl.join(acc[4], acc[5]), tl.join(acc[6], acc[7]))
        total = tl.permute(tl.join(total, high), [0, 5, 4, 3, 1, 2])
    else:
        total = tl.permute(total, [0, 4, 3, 1, 2])
    total = tl.reshape(total, [WARPS, COUNT * 16, BLOCK_M])
    i = tl.arange(0, COUNT * 16)
    position, upper, t, pair = i // 16, i // 8 % 2, i // 2 % 4, i % 2
    if PAIRED:
        column = position // 2 * 32 + 8 * t + 4 * (position % 2) + 2 * upper + pair
    else:
        column = position * 16 + 4 * t + 2 * upper + pair
    column += part * (16 * COUNT)
    column = (first_k + tl.arange(0, WARPS))[:, None] * (16 * POSITIONS) + column[None, :]
    if GROUP == PADDED_GROUP:
        live = column < k
    else:
        live = (column % PADDED_GROUP < GROUP) & (column < groups * PADDED_GROUP)
        column = column // PADDED_GROUP * GROUP + column % PADDED_GROUP
    row = first_m + tl.arange(0, BLOCK_M)
    at = (tl.program_id(2) * m + row).to(tl.int64)[None, None, :] * k + column[:, :, None]
    live = live[:, :, None] & (row < m)[None, None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)

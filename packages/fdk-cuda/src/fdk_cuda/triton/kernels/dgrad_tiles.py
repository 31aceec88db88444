# ruff: noqa: RUF005
# mypy: ignore-errors
"""What ``transposed_kernel`` loads of a tile, and its operands: codes transposed between lanes."""

import re

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.decode import decode_scale, load_pair, load_words

# Both units of a lane: their halves side by side are two neighbours in a row of 8 x 8 elements of
# 16 bits. A lane gets two neighbours in a column, and takes them apart again.
TRANSPOSE = tl.constexpr(
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
                TRANSPOSE, "=&r,=&r,r,r", [word], dtype=tl.int32, is_pure=True, pack=2
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
def as_row_scale(scale, EXPONENT: tl.constexpr, R: tl.constexpr, WARPS: tl.constexpr):
    """What was loaded, ``[R, (warp, g, t, pair, half)]``, as ``[R, half, warp, g, t, 1, pair]``."""
    if EXPONENT:
        scale = decode_scale(scale)
    scale = tl.permute(tl.reshape(scale, [R, WARPS, 8, 4, 2, 2]), [0, 5, 1, 2, 3, 4])
    return scale[:, :, :, :, :, None, :]


@triton.jit
def load_scales(pointers, limits, sizes, tile, first_column, GROUPING: tl.constexpr):
    """Scales and zero points of the tiles from ``tile`` on, one of each a segment of columns.

    ``GROUPING``: how many segments, of how many columns, the group size as it is stored, whether a
    row is one group, whether there are zero points.
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
    """Words of the tiles from ``tile`` on, 0 from ``last_n`` on."""
    word_tile, _, last_n = limits
    at = tl.cast(tile, tl.int64) * sizes[0]
    return load_words(pointers[0], at, (tile + word_tile < last_n) & (word_tile >= 0), WORDS)


@triton.jit
def load_y(
    at, y_column, has_y, n, tile, M_TILES: tl.constexpr, R: tl.constexpr, WARPS: tl.constexpr
):
    """``[M_TILES, R, half, warp, row of y, t, pair]``, of the tiles from ``tile`` on.

    What lies beyond this program's tiles meets words that were not loaded, but has to be finite,
    and scales that are 0.
    """
    live = has_y & (tile * 16 + y_column < n)
    y = tl.load(at + tl.max_contiguous(tile * 16 + y_column * 0, [1, 2]), mask=live, other=0.0)
    return tl.reshape(y, [M_TILES, R, 2, WARPS, 8, 4, 2])


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


@triton.jit
def joined(parts, COUNT: tl.constexpr):
    """1, 2, 4 or 8 tensors side by side in a last dimension, in their order."""
    A: tl.constexpr = parts[0].shape[0]
    B: tl.constexpr = parts[0].shape[1]
    C: tl.constexpr = parts[0].shape[2]
    if COUNT == 1:
        return parts[0][:, :, :, None]
    elif COUNT == 2:
        return tl.join(parts[0], parts[1])
    elif COUNT == 4:
        # The last of the dimensions that ``join`` makes is the higher bit.
        total = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        return tl.reshape(total, [A, B, C, 4])
    else:
        low = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        high = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        return tl.reshape(tl.join(low, high), [A, B, C, 8])

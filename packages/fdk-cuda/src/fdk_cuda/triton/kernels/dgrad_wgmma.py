# ruff: noqa: RUF005
# mypy: ignore-errors
"""dx = dy @ W_hat from the same codes on Hopper, for tens and hundreds of rows of dy, by wgmma.

The product is computed as W_hat.T @ dy.T, in Gluon as ``many_kernel`` and for its reasons. Codes
are transposed between lanes as in ``transposed_kernel``: what a lane then holds of a tile of 16
rows of W_hat, at one position, is its part of operand A of a product of 16 rows. A warp has one,
two or four positions of a tile along k, as sums of 256, 128 or 64 rows of dy leave registers: so
many products with the same dy. Those of the next tiles of 16 rows are decoded meanwhile. dy needs
no permuting: rows of W_hat lie in their order.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fdk_cuda.triton.configs import MANY_WARPS
from fdk_cuda.triton.kernels.decode import (
    decode_part,
    decode_scale,
    load_tables,
    prepare,
    stored_columns,
)
from fdk_cuda.triton.kernels.dequantise import chosen, scaled
from fdk_cuda.triton.kernels.dgrad_tiles import TRANSPOSE
from fdk_cuda.triton.kernels.tma_pipeline import after, fetch_x, new_ring

_WARPS = gl.constexpr(MANY_WARPS)
# Positions that are decoded at once, of which a warp takes some, and tiles of a stage of dy.
_DECODED = gl.constexpr(4)
_TILES = gl.constexpr(4)
_WORDS = gl.constexpr(gl.BlockedLayout([2, 4], [1, 32], [1, MANY_WARPS], [1, 0]))
# [half, (warp, g, t), upper, pair]
_WEIGHTS = gl.constexpr(
    gl.BlockedLayout([2, 1, 2, 2], [1, 32, 1, 1], [1, MANY_WARPS, 1, 1], [3, 2, 1, 0])
)
_ROWS = gl.constexpr(gl.SliceLayout(2, _WEIGHTS.value))
_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [MANY_WARPS, 1], [1, 0]))
_STORED = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [MANY_WARPS, 1], [1, 0]))
# Of the lower halves of two words, see transposed.py: what is left above is of no position here.
_TRANSPOSE_LOWER = gl.constexpr(
    "{ .reg .b32 l; prmt.b32 l, $2, $3, 0x5410; movmatrix.sync.aligned.m8n8.trans.b16 l, l; "
    "mov.b32 $0, l; shr.u32 $1, l, 16; }"
)


@gluon.jit
def load_tile(pointers, tile_n, n_tiles, sizes, AFFINE: gl.constexpr):
    """Words, scale and zero point of a tile of 16 rows; those of the last for what is beyond.

    There dy is 0, or nothing is multiplied.
    """
    words_ptr, scale_ptr, zero_ptr = pointers
    of_words, of_scales = sizes
    tile_n = gl.minimum(tile_n, n_tiles - 1)
    word = gl.load(words_ptr + tile_n * of_words)
    scale = gl.load(scale_ptr + tile_n * of_scales)
    zero = scale
    if AFFINE:
        zero = gl.load(zero_ptr + tile_n * of_scales)
    return word, scale, zero


@gluon.jit
def as_rows_of_weights(scale):
    """``[(warp, g, t), (pair, half)]`` as ``[half, (warp, g, t), 1, pair]``."""
    scale = gl.permute(gl.reshape(scale, [_WARPS * 32, 2, 2]), [2, 0, 1])
    return gl.expand_dims(gl.convert_layout(scale, _ROWS), 2)


@gluon.jit
def operands_of_tile(
    stored,
    shift,
    tables,
    values_ptr,
    COUNT: gl.constexpr,
    CODES: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """The weights of a tile at each position, ``[128, 16]``, where wgmma takes operand A from."""
    word, scale, zero = stored
    if CODES[0] * COUNT < 32:
        word = word >> shift
        word = tl.inline_asm_elementwise(
            _TRANSPOSE_LOWER, "=&r,=&r,r,r", [word], dtype=tl.int32, is_pure=True, pack=2
        )
    else:
        word = tl.inline_asm_elementwise(
            TRANSPOSE, "=&r,=&r,r,r", [word], dtype=tl.int32, is_pure=True, pack=2
        )
    if scale.dtype == tl.uint8:
        scale = decode_scale(scale)
    scale = as_rows_of_weights(scale)
    zero = as_rows_of_weights(zero)
    weights = ()
    if CODES[0] == 1 and CODES[1]:
        word = gl.reshape(word, [2, _WARPS * 32, 2, 2])
        word = gl.convert_layout(word, _WEIGHTS, assert_trivial=True)
        weights = chosen(word, values_ptr, scale, zero, 0, _DECODED, False, CODES)
    else:
        now = prepare((word,), CODES)
        values = decode_part(now, tables, values_ptr, 0, _DECODED, CODES)
        for q in gl.static_range(COUNT):
            value = gl.reshape(values[q], [2, _WARPS * 32, 2, 2])
            value = gl.convert_layout(value, _WEIGHTS, assert_trivial=True)
            weights = weights + (scaled(value, scale, zero, CODES),)
    operands = ()
    for q in gl.static_range(COUNT):
        w = weights[q]
        # [half, warp, g, t, upper, pair] to [(warp, upper, g), (half, t, pair)]
        w = gl.permute(gl.reshape(w, [2, _WARPS, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
        w = gl.reshape(w, [16 * _WARPS, 16])
        operands = operands + (gl.convert_layout(w, OPERAND, assert_trivial=True),)
    return operands


@gluon.jit
def operands_of_round(
    ring,
    shift,
    tables,
    values_ptr,
    COUNT: gl.constexpr,
    ROUND: gl.constexpr,
    CODES: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """Those of ``ROUND`` tiles, one after the other."""
    operands = ()
    for i in gl.static_range(ROUND):
        operands = operands + operands_of_tile(
            ring[i], shift, tables, values_ptr, COUNT, CODES, OPERAND
        )
    return operands


@gluon.jit
def products(w, y, acc, first: gl.constexpr, COUNT: gl.constexpr):
    """The sums of each position, ``[128, BLOCK_M]``, with products that run.

    Of operands ``w[first]`` and on, ``[128, 16]``, and of y, ``[16, BLOCK_M]``.
    """
    result = ()
    for q in gl.static_range(COUNT):
        result = result + (hopper.warpgroup_mma(w[first + q], y, acc[q], is_async=True),)
    return result


@gluon.jit
def waited(acc, left: gl.constexpr, COUNT: gl.constexpr):
    """The sums, ``COUNT`` of ``[128, BLOCK_M]``, where so many products at most still run."""
    if COUNT == 4:
        return hopper.warpgroup_mma_wait(left, deps=[acc[0], acc[1], acc[2], acc[3]])
    elif COUNT == 2:
        return hopper.warpgroup_mma_wait(left, deps=[acc[0], acc[1]])
    else:
        return (hopper.warpgroup_mma_wait(left, deps=[acc[0]]),)


# y_desc :: [m, n, dtype], in blocks of [BLOCK_M, 64]
# words  :: [n_tiles, k_tiles, 1, 2, 32, 4, int32]
# scale  :: [n_tiles, groups, 8, 2], zero alike
# out    :: [m, k, dtype], or [parts, m, k, float32]
@gluon.jit(do_not_specialize=["m"])
def many_transposed_kernel(
    y_desc,
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
    BITS: gl.constexpr,
    WORDS: gl.constexpr,
    POSITIONS: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED_GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    PAIRED: gl.constexpr,
    AFFINE: gl.constexpr,
    X_DTYPE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    COUNT: gl.constexpr,
    ROUND: gl.constexpr,
):
    """A program computes 8 * COUNT positions side by side of BLOCK_M rows, over its rows of W.

    ROUND tiles of 16 rows are decoded while products of as many run. Programs of different parts of
    n follow each other.
    """
    gl.static_assert(WORDS == 1)
    gl.static_assert(PAIRED)  # Groups of multiples of 64, and whole rows, are.
    PARTS: gl.constexpr = POSITIONS // COUNT
    WIDTH: gl.constexpr = 16 * COUNT
    CODES: gl.constexpr = (BITS, AFFINE, True, True, X_DTYPE, X_DTYPE)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[_WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    n_tiles = (n + 15) // 16
    blocks_m = gl.cdiv(m, BLOCK_M)
    block_m = gl.program_id(0) % blocks_m
    first_part = gl.program_id(0) // blocks_m * _WARPS
    share = gl.cdiv(gl.cdiv(n_tiles, _TILES), gl.num_programs(1))
    first = gl.program_id(1) * share
    last = gl.minimum(first + share, gl.cdiv(n_tiles, _TILES))

    # words [half, (warp, lane, 4)]; what is beyond the last column is not stored
    half = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, _WORDS)), 1)
    i = gl.expand_dims(gl.arange(0, _WARPS * 128, gl.SliceLayout(0, _WORDS)), 0)
    part = gl.minimum(first_part + i // 128, k_tiles * PARTS - 1)
    shift = part % PARTS * (COUNT * BITS)
    word_at = part // PARTS * 256 + half * 128 + i % 128
    # scale [(warp, g, t), (pair, half)]: every g reads the same
    i = gl.expand_dims(gl.arange(0, _WARPS * 32, gl.SliceLayout(1, _SCALES)), 1)
    scale_at = i % 4 * 4 + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, _SCALES)), 0)
    if not ONE_GROUP:
        group = (first_part + i // 32) * WIDTH // PADDED_GROUP
        scale_at += gl.minimum(group, groups - 1) * 16
    pointers = words_ptr + word_at, scale_ptr + scale_at, zero_ptr + scale_at
    sizes = (k_tiles * 256, groups * 16)

    # Affine ones of 2 and 4 bits, three ahead, take 8 bytes of stack (Triton 3.7.1).
    AHEAD: gl.constexpr = 2 * ROUND if ROUND > 1 else 2 if AFFINE else 3
    ring = ()
    for j in gl.static_range(AHEAD):
        ring = ring + (load_tile(pointers, first * _TILES + j, n_tiles, sizes, AFFINE),)
    tables = load_tables(values_ptr, lanes_ptr, CODES, _WARPS)[0]
    w = operands_of_round(ring, shift, tables, values_ptr, COUNT, ROUND, CODES, OPERAND)

    y_stages, barriers = new_ring(y_desc, X_DTYPE, BLOCK_M, STAGES)
    row = block_m * BLOCK_M
    tl.extra.cuda.gdc_wait()  # dy is what the kernel before this one writes
    fetch_x(y_desc, y_stages, barriers, 0, row, first, last, STAGES - 1, STAGES)

    acc = ()
    for _ in gl.static_range(COUNT):
        acc = acc + (gl.zeros([16 * _WARPS, BLOCK_M], gl.float32, SUMS),)
    stage = 0
    phase = 0
    for step in range(first, last):
        mbarrier.wait(barriers.index(stage), phase)
        for j in gl.static_range(_TILES // ROUND):
            for of in gl.static_range(ROUND):
                y = y_stages.index(stage).slice(16 * (j * ROUND + of), 16, dim=1).permute((1, 0))
                acc = products(w, y, acc, of * COUNT, COUNT)
            # Those of the round before are done: its registers are free, and the stage of the last.
            acc = waited(acc, COUNT * ROUND, COUNT)
            if j == 0:
                free = gl.where(stage == 0, STAGES - 1, stage - 1)
                ahead = step + (STAGES - 1)
                fetch_x(y_desc, y_stages, barriers, free, row, ahead, last, 1, STAGES)
            for of in gl.static_range(ROUND):
                at = step * _TILES + (j * ROUND + of + AHEAD)
                ring = ring[1:] + (load_tile(pointers, at, n_tiles, sizes, AFFINE),)
            w = operands_of_round(ring, shift, tables, values_ptr, COUNT, ROUND, CODES, OPERAND)
        stage, phase = after(stage, phase, STAGES)
    tl.extra.cuda.gdc_launch_dependents()
    acc = waited(acc, 0, COUNT)
    # Sums are stored where dy lay, which the other group's last products may still read.
    tl.debug_barrier()
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(barriers.index(i))

    # [(warp, upper, t, pair), row of dy, positions] to [row of dy, (warp, column)]
    if COUNT == 4:
        total = gl.join(gl.join(acc[0], acc[1]), gl.join(acc[2], acc[3]))
        total = gl.reshape(total, [_WARPS, 2, 4, 2, BLOCK_M, 2, 2])
        total = gl.permute(total, [4, 0, 6, 2, 5, 1, 3])
    elif COUNT == 2:
        total = gl.reshape(gl.join(acc[0], acc[1]), [_WARPS, 2, 4, 2, BLOCK_M, 2])
        total = gl.permute(total, [4, 0, 2, 5, 1, 3])
    else:
        total = gl.permute(gl.reshape(acc[0], [_WARPS, 2, 4, 2, BLOCK_M]), [4, 0, 2, 1, 3])
    total = gl.reshape(total, [BLOCK_M, _WARPS * WIDTH])
    total = gl.convert_layout(total.to(out_ptr.dtype.element_ty), _STORED)
    i = gl.arange(0, _WARPS * WIDTH, gl.SliceLayout(0, _STORED))
    column = first_part * WIDTH + i
    if COUNT == 1:  # The parts of a pair take turns, four columns each.
        column = column // 32 * 32 + i % 16 // 4 * 8 + i // 16 % 2 * 4 + i % 4
        column = tl.max_contiguous(tl.multiple_of(column, 4), 4)
    column, live = stored_columns(column, k, groups, GROUP, PADDED_GROUP)
    out_row = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, _STORED))
    at = (gl.program_id(1) * m + out_row).to(gl.int64)
    at = gl.expand_dims(at, 1) * k + gl.expand_dims(column, 0)
    live = gl.expand_dims(out_row < m, 1) & gl.expand_dims(live, 0)
    gl.store(out_ptr + at, total, mask=live)

# ruff: noqa: RUF005
# mypy: ignore-errors
"""Backward product on Hopper, dx = dy @ W_hat for tens and hundreds of rows of dy, by wgmma.

The product is computed as W_hat.T @ dy.T, in Gluon for the reasons of ``gemm_wgmma_kernel``. Codes
are transposed between lanes as in ``dgrad_kernel``. A lane's values of a tile of 16 rows of W_hat,
at one position, are then its fragment of operand A of a product over these 16 rows. A warp owns
one, two or four positions of a tile of k: as many as the sums of 256, 128 or 64 rows of dy leave
registers for. All of them are multiplied by the same dy, while the next tiles of 16 rows are
decoded. dy needs no permutation: rows of W_hat are stored in order.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fdk_cuda.triton.configs.gpus import WGMMA_WARPS
from fdk_cuda.triton.kernels.decode import (
    decode_positions,
    decode_scale,
    load_tables,
    prepare,
    scaled,
    select_scaled,
    stored_columns,
)
from fdk_cuda.triton.kernels.ptx_decode import TRANSPOSE
from fdk_cuda.triton.kernels.tma_pipeline import after, fetch_x, new_ring

_WARPS = gl.constexpr(WGMMA_WARPS)
# Positions that are decoded at once, of which a warp uses some; tiles of n of a stage of dy.
_DECODED = gl.constexpr(4)
_TILES = gl.constexpr(4)
_WORDS = gl.constexpr(gl.BlockedLayout([2, 4], [1, 32], [1, WGMMA_WARPS], [1, 0]))
# [half, (warp, g, t), upper, pair]
_WEIGHTS = gl.constexpr(
    gl.BlockedLayout([2, 1, 2, 2], [1, 32, 1, 1], [1, WGMMA_WARPS, 1, 1], [3, 2, 1, 0])
)
_ROWS = gl.constexpr(gl.SliceLayout(2, _WEIGHTS.value))
_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [WGMMA_WARPS, 1], [1, 0]))
_STORED = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [WGMMA_WARPS, 1], [1, 0]))
# TRANSPOSE for the lower halves of two words: the upper halves hold positions of other warps.
_TRANSPOSE_LOWER = gl.constexpr(
    "{ .reg .b32 l; prmt.b32 l, $2, $3, 0x5410; movmatrix.sync.aligned.m8n8.trans.b16 l, l; "
    "mov.b32 $0, l; shr.u32 $1, l, 16; }"
)


@gluon.jit
def load_tile(pointers, tile_n, n_tiles, sizes, AFFINE: gl.constexpr):
    """Loads words, scale and zero point of a tile of 16 rows.

    Past the last tile it loads the last again: dy is 0 there, or there is no product.
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
    """Reshapes ``[(warp, g, t), (pair, half)]`` to ``[half, (warp, g, t), 1, pair]``."""
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
    """Decodes the weights of a tile at each position, ``[128, 16]``, into operand A."""
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
        weights = select_scaled(word, values_ptr, scale, zero, 0, _DECODED, False, CODES)
    else:
        now = prepare((word,), CODES)
        values = decode_positions(now, tables, values_ptr, 0, _DECODED, CODES)
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
    """Decodes ``ROUND`` tiles, see ``operands_of_tile``."""
    operands = ()
    for i in gl.static_range(ROUND):
        operands = operands + operands_of_tile(
            ring[i], shift, tables, values_ptr, COUNT, CODES, OPERAND
        )
    return operands


@gluon.jit
def products(w, y, acc, first: gl.constexpr, COUNT: gl.constexpr):
    """Issues a product for each position and returns the sums, ``[128, BLOCK_M]`` each.

    Operands are ``w[first]`` and on, ``[128, 16]``, and y, ``[16, BLOCK_M]``.
    """
    result = ()
    for q in gl.static_range(COUNT):
        result = result + (hopper.warpgroup_mma(w[first + q], y, acc[q], is_async=True),)
    return result


@gluon.jit
def waited(acc, left: gl.constexpr, COUNT: gl.constexpr):
    """Waits until at most ``left`` products run; returns the sums, COUNT of ``[128, BLOCK_M]``."""
    if COUNT == 4:
        return hopper.warpgroup_mma_wait(left, deps=[acc[0], acc[1], acc[2], acc[3]])
    elif COUNT == 2:
        return hopper.warpgroup_mma_wait(left, deps=[acc[0], acc[1]])
    else:
        return (hopper.warpgroup_mma_wait(left, deps=[acc[0]]),)


# y_desc :: [m, n, dtype], the gradient dy, in blocks of [BLOCK_M, 64]
# words  :: [n_tiles, k_tiles, 1, 2, 32, 4, int32]
# scale  :: [n_tiles, n_groups, 8, 2, dtype]
# zero   :: like scale; without zero points, scale
# values, lanes :: see decode.lookup_tables
# out    :: [m, k, dtype], or [split_n, m, k, float32]
@gluon.jit(do_not_specialize=["m"])
def dgrad_wgmma_kernel(
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
    """Computes dx = dy @ W_hat.

    A program computes 8 * COUNT neighbouring positions of BLOCK_M rows of dy, over its share of n.
    ROUND tiles of 16 rows of W are decoded while products of as many run.
    """
    gl.static_assert(WORDS == 1)
    gl.static_assert(PAIRED)  # true for groups of multiples of 64, and for whole rows
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

    # words [half, (warp, lane, 4)]; columns past the last are computed, not stored
    half = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, _WORDS)), 1)
    i = gl.expand_dims(gl.arange(0, _WARPS * 128, gl.SliceLayout(0, _WORDS)), 0)
    part = gl.minimum(first_part + i // 128, k_tiles * PARTS - 1)
    shift = part % PARTS * (COUNT * BITS)
    word_at = part // PARTS * 256 + half * 128 + i % 128
    # scale [(warp, g, t), (pair, half)]: the same for every g
    i = gl.expand_dims(gl.arange(0, _WARPS * 32, gl.SliceLayout(1, _SCALES)), 1)
    scale_at = i % 4 * 4 + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, _SCALES)), 0)
    if not ONE_GROUP:
        group = (first_part + i // 32) * WIDTH // PADDED_GROUP
        scale_at += gl.minimum(group, groups - 1) * 16
    pointers = words_ptr + word_at, scale_ptr + scale_at, zero_ptr + scale_at
    sizes = (k_tiles * 256, groups * 16)

    # Three ahead, affine formats of 2 and 4 bits would spill 8 bytes (Triton 3.7.1).
    AHEAD: gl.constexpr = 2 * ROUND if ROUND > 1 else 2 if AFFINE else 3
    ring = ()
    for j in gl.static_range(AHEAD):
        ring = ring + (load_tile(pointers, first * _TILES + j, n_tiles, sizes, AFFINE),)
    tables = load_tables(values_ptr, lanes_ptr, CODES, _WARPS)[0]
    w = operands_of_round(ring, shift, tables, values_ptr, COUNT, ROUND, CODES, OPERAND)

    y_stages, barriers = new_ring(y_desc, X_DTYPE, BLOCK_M, STAGES)
    row = block_m * BLOCK_M
    tl.extra.cuda.gdc_wait()  # the previous kernel writes dy
    fetch_x(y_desc, y_stages, barriers, 0, row, first, last, STAGES - 1, STAGES)

    acc = ()
    for _ in gl.static_range(COUNT):
        acc = acc + (gl.zeros([16 * _WARPS, BLOCK_M], gl.float32, SUMS),)
    stage = 0
    phase = 0
    for step in range(first, last):
        mbarrier.wait(barriers.index(stage), phase)
        for j in gl.static_range(_TILES // ROUND):
            for r in gl.static_range(ROUND):
                y = y_stages.index(stage).slice(16 * (j * ROUND + r), 16, dim=1).permute((1, 0))
                acc = products(w, y, acc, r * COUNT, COUNT)
            # The products of the previous round are done: its registers and stage are free.
            acc = waited(acc, COUNT * ROUND, COUNT)
            if j == 0:
                free = gl.where(stage == 0, STAGES - 1, stage - 1)
                ahead = step + (STAGES - 1)
                fetch_x(y_desc, y_stages, barriers, free, row, ahead, last, 1, STAGES)
            for r in gl.static_range(ROUND):
                at = step * _TILES + (j * ROUND + r + AHEAD)
                ring = ring[1:] + (load_tile(pointers, at, n_tiles, sizes, AFFINE),)
            w = operands_of_round(ring, shift, tables, values_ptr, COUNT, ROUND, CODES, OPERAND)
        stage, phase = after(stage, phase, STAGES)
    tl.extra.cuda.gdc_launch_dependents()
    acc = waited(acc, 0, COUNT)
    # Sums are stored over dy, which the other warp group's last products may still read.
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
    if COUNT == 1:  # Parts alternate, four columns each, in the paired order.
        column = column // 32 * 32 + i % 16 // 4 * 8 + i // 16 % 2 * 4 + i % 4
        column = tl.max_contiguous(tl.multiple_of(column, 4), 4)
    column, live = stored_columns(column, k, groups, GROUP, PADDED_GROUP)
    out_row = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, _STORED))
    at = (gl.program_id(1) * m + out_row).to(gl.int64)
    at = gl.expand_dims(at, 1) * k + gl.expand_dims(column, 0)
    live = gl.expand_dims(out_row < m, 1) & gl.expand_dims(live, 0)
    gl.store(out_ptr + at, total, mask=live)

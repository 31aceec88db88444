# ruff: noqa: RUF005
# mypy: ignore-errors
"""dx = dy @ W_hat from the same codes on Hopper, for tens and hundreds of rows of dy, by wgmma.

The product is computed as W_hat.T @ dy.T, in Gluon as ``many_kernel`` and for its reasons. Codes
are transposed between lanes as in ``transposed_kernel``: what a lane then holds of a tile of 16
rows of W_hat, at one position, is its part of operand A of a product of 16 rows. A warp has a tile
along k, four positions of it are four products with the same dy, and those of the tile of 16 rows
that follows are decoded meanwhile. dy needs no permuting: rows of W_hat lie in their order.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fdk_cuda.triton.assembly import results
from fdk_cuda.triton.configs import MANY_POSITIONS, MANY_WARPS
from fdk_cuda.triton.decode import (
    decode_part,
    decode_scale,
    load_pair,
    load_tables,
    prepare,
    stored_columns,
)
from fdk_cuda.triton.dequantise import scaled, two_values
from fdk_cuda.triton.pieces import of_two, of_two_constraints
from fdk_cuda.triton.ring import after, fetch_x, new_ring
from fdk_cuda.triton.transposed_tiles import TRANSPOSE

_WARPS = gl.constexpr(MANY_WARPS)
# Positions that a program decodes, and tiles of a stage of dy.
_COUNT = gl.constexpr(MANY_POSITIONS)
_TILES = gl.constexpr(4)
_WORDS = gl.constexpr(gl.BlockedLayout([2, 4], [1, 32], [1, MANY_WARPS], [1, 0]))
# [half, (warp, g, t), upper, pair]
_WEIGHTS = gl.constexpr(
    gl.BlockedLayout([2, 1, 2, 2], [1, 32, 1, 1], [1, MANY_WARPS, 1, 1], [3, 2, 1, 0])
)
_ROWS = gl.constexpr(gl.SliceLayout(2, _WEIGHTS.value))
_STORED = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [MANY_WARPS, 1], [1, 0]))
# Of the lower halves of two words, see transposed.py: what is left above is of no position here.
_TRANSPOSE_LOWER = gl.constexpr(
    "{ .reg .b32 l; prmt.b32 l, $2, $3, 0x5410; movmatrix.sync.aligned.m8n8.trans.b16 l, l; "
    "mov.b32 $0, l; shr.u32 $1, l, 16; }"
)


@gluon.jit
def load_tile(pointers, tile_n, last_n, sizes, AFFINE: gl.constexpr):
    """Words, scale and zero point of a tile of 16 rows; 0 from ``last_n`` on."""
    words_ptr, scale_ptr, zero_ptr, has_words, has_scale = pointers
    of_words, of_scales = sizes
    live = tile_n < last_n
    word = gl.load(words_ptr + tile_n * of_words, mask=has_words & live, other=0)
    scale, zero = load_pair(scale_ptr, zero_ptr, tile_n * of_scales, has_scale & live, AFFINE)
    return word, scale, zero


@gluon.jit
def operands_of_tile(
    stored,
    shift,
    tables,
    values_ptr,
    CODES: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """The weights of a tile at each position, ``[128, 16]``, where wgmma takes operand A from."""
    word, scale, zero = stored
    if CODES[0] * _COUNT < 32:
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
    scale = gl.expand_dims(scale, 2)
    zero = gl.expand_dims(zero, 2)
    weights = ()
    if CODES[6]:
        value, other = two_values(values_ptr, scale, zero, CODES)
        word = gl.reshape(word, [2, _WARPS * 32, 2, 2])
        word = gl.convert_layout(word, _WEIGHTS, assert_trivial=True)
        weights = tl.inline_asm_elementwise(
            of_two(0, _COUNT, False),
            of_two_constraints(_COUNT),
            [word, value, other],
            dtype=results(CODES[4], _COUNT),
            is_pure=True,
            pack=2,
        )
    else:
        now = prepare((word,), CODES)
        values = decode_part(now, tables, values_ptr, 0, _COUNT, CODES)
        for q in gl.static_range(_COUNT):
            value = gl.reshape(values[q], [2, _WARPS * 32, 2, 2])
            value = gl.convert_layout(value, _WEIGHTS, assert_trivial=True)
            weights = weights + (scaled(value, scale, zero, CODES),)
    operands = ()
    for q in gl.static_range(_COUNT):
        w = weights[q]
        # [half, warp, g, t, upper, pair] to [(warp, upper, g), (half, t, pair)]
        w = gl.permute(gl.reshape(w, [2, _WARPS, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
        w = gl.reshape(w, [16 * _WARPS, 16])
        operands = operands + (gl.convert_layout(w, OPERAND, assert_trivial=True),)
    return operands


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
    TWO: gl.constexpr = False,
):
    """A program computes four positions of eight tiles along k of BLOCK_M rows, over its rows of W.

    Programs of different parts of n follow each other.
    """
    gl.static_assert(WORDS == 1)
    PARTS: gl.constexpr = POSITIONS // _COUNT
    TILE_K: gl.constexpr = 16 * POSITIONS
    CODES: gl.constexpr = (BITS, AFFINE, True, True, X_DTYPE, X_DTYPE, TWO and BITS == 1)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[_WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    n_tiles = (n + 15) // 16
    blocks_m = gl.cdiv(m, BLOCK_M)
    block_m = gl.program_id(0) % blocks_m
    part = gl.program_id(0) // blocks_m % PARTS
    block_k = gl.program_id(0) // blocks_m // PARTS
    share = gl.cdiv(gl.cdiv(n_tiles, _TILES), gl.num_programs(1))
    first = gl.program_id(1) * share
    last = gl.minimum(first + share, gl.cdiv(n_tiles, _TILES))
    last_n = gl.minimum(last * _TILES, n_tiles)
    shift = part * (_COUNT * BITS)

    # words [half, (warp, lane, 4)]
    half = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, _WORDS)), 1)
    i = gl.expand_dims(gl.arange(0, _WARPS * 128, gl.SliceLayout(0, _WORDS)), 0)
    tile_k = block_k * _WARPS + i // 128
    word_at = tile_k * 256 + half * 128 + i % 128
    has_words = (tile_k < k_tiles) & (half >= 0)
    # scale [half, (warp, g, t), pair]: every g reads the same
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, _ROWS)))
    half = gl.expand_dims(gl.expand_dims(half, 1), 2)
    i = gl.arange(0, _WARPS * 32, gl.SliceLayout(0, gl.SliceLayout(2, _ROWS)))
    i = gl.expand_dims(gl.expand_dims(i, 0), 2)
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, _ROWS)))
    pair = gl.expand_dims(gl.expand_dims(pair, 0), 1)
    group = i * 0
    if not ONE_GROUP:
        group = ((block_k * _WARPS + i // 32) * TILE_K + part * (16 * _COUNT)) // PADDED_GROUP
    scale_at = group * 16 + i % 4 * 4 + pair * 2 + half
    has_scale = (group < groups) & (pair >= 0) & (half >= 0)
    pointers = (
        words_ptr + word_at,
        scale_ptr + scale_at,
        zero_ptr + scale_at,
        has_words,
        has_scale,
    )
    sizes = (k_tiles * 256, groups * 16)

    # Affine ones of 2 and 4 bits, three ahead, take 8 bytes of stack (Triton 3.7.1).
    AHEAD: gl.constexpr = 2 if AFFINE else 3
    ring = ()
    for j in gl.static_range(AHEAD):
        ring = ring + (load_tile(pointers, first * _TILES + j, last_n, sizes, AFFINE),)
    tables = load_tables(values_ptr, lanes_ptr, CODES, _WARPS)[0]
    w = operands_of_tile(ring[0], shift, tables, values_ptr, CODES, OPERAND)

    y_stages, barriers = new_ring(y_desc, X_DTYPE, BLOCK_M, STAGES)
    row = block_m * BLOCK_M
    tl.extra.cuda.gdc_wait()  # dy is what the kernel before this one writes
    fetch_x(y_desc, y_stages, barriers, 0, row, first, last, STAGES - 1, STAGES)

    acc0 = gl.zeros([16 * _WARPS, BLOCK_M], gl.float32, SUMS)
    acc1 = gl.zeros([16 * _WARPS, BLOCK_M], gl.float32, SUMS)
    acc2 = gl.zeros([16 * _WARPS, BLOCK_M], gl.float32, SUMS)
    acc3 = gl.zeros([16 * _WARPS, BLOCK_M], gl.float32, SUMS)
    stage = 0
    phase = 0
    for step in range(first, last):
        mbarrier.wait(barriers.index(stage), phase)
        for j in gl.static_range(_TILES):
            y = y_stages.index(stage).slice(16 * j, 16, dim=1).permute((1, 0))
            acc0 = hopper.warpgroup_mma(w[0], y, acc0, is_async=True)
            acc1 = hopper.warpgroup_mma(w[1], y, acc1, is_async=True)
            acc2 = hopper.warpgroup_mma(w[2], y, acc2, is_async=True)
            acc3 = hopper.warpgroup_mma(w[3], y, acc3, is_async=True)
            # Those of the tile before are done: its registers are free, and the stage of the last.
            acc0, acc1, acc2, acc3 = hopper.warpgroup_mma_wait(4, deps=[acc0, acc1, acc2, acc3])
            if j == 0:
                free = gl.where(stage == 0, STAGES - 1, stage - 1)
                ahead = step + (STAGES - 1)
                fetch_x(y_desc, y_stages, barriers, free, row, ahead, last, 1, STAGES)
            later = load_tile(pointers, step * _TILES + (j + AHEAD), last_n, sizes, AFFINE)
            ring = ring[1:] + (later,)
            w = operands_of_tile(ring[0], shift, tables, values_ptr, CODES, OPERAND)
        stage, phase = after(stage, phase, STAGES)
    tl.extra.cuda.gdc_launch_dependents()
    acc0, acc1, acc2, acc3 = hopper.warpgroup_mma_wait(0, deps=[acc0, acc1, acc2, acc3])
    # Sums are stored where dy lay, which the other group's last products may still read.
    tl.debug_barrier()
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(barriers.index(i))

    # [(warp, upper, t, pair), row of dy, p0, p1] to [row of dy, (warp, column)]
    total = gl.join(gl.join(acc0, acc1), gl.join(acc2, acc3))
    total = gl.reshape(total, [_WARPS, 2, 4, 2, BLOCK_M, 2, 2])
    if PAIRED:
        total = gl.permute(total, [4, 0, 6, 2, 5, 1, 3])
    else:
        total = gl.permute(total, [4, 0, 6, 5, 2, 1, 3])
    total = gl.reshape(total, [BLOCK_M, _WARPS * 16 * _COUNT])
    total = gl.convert_layout(total.to(out_ptr.dtype.element_ty), _STORED)
    i = gl.arange(0, _WARPS * 16 * _COUNT, gl.SliceLayout(0, _STORED))
    column = (block_k * _WARPS + i // (16 * _COUNT)) * TILE_K + i % (16 * _COUNT)
    column += part * (16 * _COUNT)
    column, live = stored_columns(column, k, groups, GROUP, PADDED_GROUP)
    out_row = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, _STORED))
    at = (gl.program_id(1) * m + out_row).to(gl.int64)
    at = gl.expand_dims(at, 1) * k + gl.expand_dims(column, 0)
    live = gl.expand_dims(out_row < m, 1) & gl.expand_dims(live, 0)
    gl.store(out_ptr + at, total, mask=live)

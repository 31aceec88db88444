# ruff: noqa: RUF005
# mypy: ignore-errors
"""GEMM on Hopper, y = x @ W_hat.T for hundreds of rows of x: weights are decoded during wgmma.

It is written in Gluon because ``tl.dot`` waits for a product with operand A in registers before
other instructions may use them. Here TMA loads x into a pipeline of stages, a product is issued and
left to run, and the next 64 columns are decoded into other registers meanwhile. The decoded values
equal those of ``gemm_kernel`` bit for bit.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fdk_cuda.triton.configs.gpus import WGMMA_WARPS
from fdk_cuda.triton.kernels.decode import (
    decode_positions,
    decode_scale,
    load_pair,
    load_tables,
    prepare,
    scaled,
    select_scaled,
)
from fdk_cuda.triton.kernels.ptx_smem import exchange_constraints, exchange_halves
from fdk_cuda.triton.kernels.tma_pipeline import STEP, after, fetch_x, new_ring, store_by_tma

# Positions of a step of 64 columns.
_COUNT = gl.constexpr(4)
_WARPS = gl.constexpr(WGMMA_WARPS)
# A lane's fragment of operand A: [half, (warp, g, t), (upper, pair)].
_WEIGHTS = gl.constexpr(gl.BlockedLayout([2, 1, 4], [1, 32, 1], [1, WGMMA_WARPS, 1], [2, 1, 0]))
_ROWS = gl.constexpr(gl.SliceLayout(2, _WEIGHTS.value))
_WORDS = gl.constexpr(gl.BlockedLayout([2, 4], [1, 32], [1, WGMMA_WARPS], [1, 0]))


@gluon.jit
def words_of_tile(ptr, at, inside, WORDS: gl.constexpr):
    """Loads the words of a tile of k."""
    words = ()
    for i in gl.static_range(WORDS):
        words = words + (gl.load(ptr + at + i * 256, mask=inside, other=0),)
    return words


@gluon.jit
def scale_of_step(
    scale_ptr,
    zero_ptr,
    at,
    inside,
    step,
    groups,
    PADDED_GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    AFFINE: gl.constexpr,
):
    """Loads scale and zero point of every row for a step; 0 past the last group, like x."""
    group = 0
    if not ONE_GROUP:
        group = step * STEP // PADDED_GROUP
        inside = inside & (group < groups)
    return load_pair(scale_ptr + at, zero_ptr + at, group * 16, inside, AFFINE)


@gluon.jit
def operand_of_step(
    words,
    tables,
    values_ptr,
    scales,
    part: gl.constexpr,
    CODES: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """Decodes and scales the weights of a step, ``[128, 64]``, into operand A."""
    scale, zero = scales
    if scale.dtype == tl.uint8:
        scale = decode_scale(scale)
    scale = gl.expand_dims(scale, 2)
    zero = gl.expand_dims(zero, 2)
    weights = ()
    if CODES[0] == 1 and CODES[1]:
        word = gl.reshape(words[0], [2, _WARPS * 32, 4])
        word = gl.convert_layout(word, _WEIGHTS, assert_trivial=True)
        weights = select_scaled(word, values_ptr, scale, zero, part * _COUNT, _COUNT, True, CODES)
    else:
        values = decode_positions(words, tables, values_ptr, part, _COUNT, CODES)
        for q in gl.static_range(_COUNT):
            value = gl.reshape(values[q], [2, _WARPS * 32, 4])
            value = gl.convert_layout(value, _WEIGHTS, assert_trivial=True)
            weights = weights + (scaled(value, scale, zero, CODES),)
    w = gl.join(gl.join(weights[0], weights[1]), gl.join(weights[2], weights[3]))
    # [half, warp, g, t, upper, pair, p0, p1] to [(warp, half, g), (p1, p0, upper, t, pair)]
    w = gl.reshape(w, [2, _WARPS, 8, 4, 2, 2, 2, 2])
    w = gl.permute(w, [1, 0, 2, 7, 6, 4, 3, 5])
    return gl.convert_layout(gl.reshape(w, [16 * _WARPS, STEP]), OPERAND, assert_trivial=True)


@gluon.jit
def exchanged(acc, BLOCK_M: gl.constexpr):
    """Adds the sums of a cluster of two; returns this program's half, ``[128, BLOCK_M / 2]``.

    ``acc :: [128, BLOCK_M]`` is a program's share of k. The first program gets the first rows of x.
    """
    halves = gl.permute(gl.reshape(acc, [16 * _WARPS, 2, BLOCK_M // 2]), [0, 2, 1])
    low, high = gl.split(halves)
    return tl.inline_asm_elementwise(
        exchange_halves(BLOCK_M // 4, 32 * _WARPS),
        exchange_constraints(BLOCK_M // 4),
        [low, high],
        dtype=tl.float32,
        is_pure=False,
        pack=BLOCK_M // 4,
    )


# x_desc   :: [m, k_tiles * TILE_K, dtype], permuted by permute_kernel, in blocks of [BLOCK_M, 64]
# words    :: [n_tiles, k_tiles, WORDS, 2, 32, 4, int32]
# scale    :: [n_tiles, n_groups, 8, 2, dtype]
# zero     :: like scale; without zero points, scale
# values, lanes :: see decode.lookup_tables
# bias     :: [n, dtype]
# out_desc :: [m, n, dtype], or [splits / CLUSTER * blocks_m * BLOCK_M, n, float32], in blocks of
#             [BLOCK_M / CLUSTER, 128]
@gluon.jit(do_not_specialize=["m"])
def gemm_wgmma_kernel(
    x_desc,
    words_ptr,
    scale_ptr,
    zero_ptr,
    values_ptr,
    lanes_ptr,
    bias_ptr,
    out_desc,
    m,
    n,
    k_tiles,
    groups,
    splits,
    BITS: gl.constexpr,
    WORDS: gl.constexpr,
    POSITIONS: gl.constexpr,
    PADDED_GROUP: gl.constexpr,
    ONE_GROUP: gl.constexpr,
    AFFINE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    X_DTYPE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    CLUSTER: gl.constexpr,
):
    """Computes y = x @ W_hat.T + bias.

    A program computes 128 outputs of BLOCK_M rows, over its share of the k tiles. Programs that
    share k are neighbours. With a CLUSTER of 2, pairs of them add their sums through distributed
    shared memory, and each stores half of the rows.
    """
    PARTS: gl.constexpr = POSITIONS // _COUNT
    BLOCK_N: gl.constexpr = 16 * _WARPS
    TILE: gl.constexpr = WORDS * 256
    CODES: gl.constexpr = (BITS, AFFINE, True, True, X_DTYPE, X_DTYPE)
    # Words are loaded two tiles ahead where a tile has one word; otherwise half a tile ahead (two
    # steps or more), for lack of registers.
    FAR: gl.constexpr = WORDS == 1
    # Two steps of x are fetched at once where possible: half of the barriers.
    FETCH: gl.constexpr = 2 if PARTS % 2 == 0 else 1
    gl.static_assert(FAR or PARTS >= 4)
    gl.static_assert(ONE_GROUP or PADDED_GROUP % STEP == 0)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[_WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    n_tiles = (n + 15) // 16
    blocks_m = gl.cdiv(m, BLOCK_M)
    split = gl.program_id(0) % splits
    tile = gl.program_id(0) // splits
    block_m = tile % blocks_m
    block_n = tile // blocks_m
    share = gl.cdiv(k_tiles, splits)
    first_k = split * share
    last_k = gl.minimum(first_k + share, k_tiles)
    first = first_k * PARTS
    last = last_k * PARTS

    # words [half, (warp, lane, 4)]
    half = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, _WORDS)), 1)
    i = gl.expand_dims(gl.arange(0, _WARPS * 128, gl.SliceLayout(0, _WORDS)), 0)
    tile_n = block_n * _WARPS + i // 128
    word_at = tile_n * k_tiles * TILE + half * 128 + i % 128
    has_rows = (tile_n < n_tiles) & (half >= 0)
    # scale [half, (warp, g, t)]
    half = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, _ROWS)), 1)
    i = gl.expand_dims(gl.arange(0, _WARPS * 32, gl.SliceLayout(0, _ROWS)), 0)
    tile_n = block_n * _WARPS + i // 32
    scale_at = tile_n * groups * 16 + i // 4 % 8 * 2 + half
    has_scale = (tile_n < n_tiles) & (half >= 0)

    # A share may be empty: 9 tiles in 4 shares are 3, 3, 3 and 0.
    own_k = gl.minimum(first_k, k_tiles - 1)
    words = words_of_tile(words_ptr, word_at + own_k * TILE, has_rows, WORDS)
    words_ahead = words
    if FAR:
        next_k = gl.minimum(first_k + 1, last_k - 1)
        words_ahead = words_of_tile(words_ptr, word_at + next_k * TILE, has_rows, WORDS)
    tables = load_tables(values_ptr, lanes_ptr, CODES, _WARPS)[0]
    scales = scale_of_step(
        scale_ptr, zero_ptr, scale_at, has_scale, first, groups, PADDED_GROUP, ONE_GROUP, AFFINE
    )
    now = prepare(words, CODES)
    w = operand_of_step(now, tables, values_ptr, scales, 0, CODES, OPERAND)
    scales = scale_of_step(
        scale_ptr, zero_ptr, scale_at, has_scale, first + 1, groups, PADDED_GROUP, ONE_GROUP, AFFINE
    )

    x_stages, barriers = new_ring(x_desc, X_DTYPE, BLOCK_M, STAGES)
    row = block_m * BLOCK_M
    tl.extra.cuda.gdc_wait()  # the previous kernel writes x
    fetch_x(x_desc, x_stages, barriers, 0, row, first, last, STAGES - 1, STAGES)

    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
    stage = 0
    phase = 0
    for tile_k in range(first_k, last_k):
        words_later = words_ahead
        if FAR:
            next_k = gl.minimum(tile_k + 2, last_k - 1)
            words_later = words_of_tile(words_ptr, word_at + next_k * TILE, has_rows, WORDS)
        for part in gl.static_range(PARTS):
            step = tile_k * PARTS + part
            mbarrier.wait(barriers.index(stage), phase)
            x = x_stages.index(stage).permute((1, 0))
            acc = hopper.warpgroup_mma(w, x, acc, is_async=True)
            # The previous product is done: its stage and its registers are free.
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            if (part + 1) % FETCH == 0:
                free = gl.where(stage < FETCH, stage + (STAGES - FETCH), stage - FETCH)
                ahead = step + (STAGES - FETCH)
                fetch_x(x_desc, x_stages, barriers, free, row, ahead, last, FETCH, STAGES)
            later = scale_of_step(
                scale_ptr,
                zero_ptr,
                scale_at,
                has_scale,
                step + 2,
                groups,
                PADDED_GROUP,
                ONE_GROUP,
                AFFINE,
            )
            if not FAR and part == PARTS // 2:
                next_k = gl.minimum(tile_k + 1, last_k - 1)
                words_ahead = words_of_tile(words_ptr, word_at + next_k * TILE, has_rows, WORDS)
            if part + 1 == PARTS:
                now = prepare(words_ahead, CODES)
            w = operand_of_step(now, tables, values_ptr, scales, (part + 1) % PARTS, CODES, OPERAND)
            scales = later
            stage, phase = after(stage, phase, STAGES)
        if FAR:
            words_ahead = words_later
    tl.extra.cuda.gdc_launch_dependents()
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    # Sums are stored over x, which the other warp group's last product may still read.
    tl.debug_barrier()
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(barriers.index(stage))

    if HAS_BIAS:
        output = block_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
        has_output = (output < n) & (split == 0)
        bias = gl.load(bias_ptr + output, mask=has_output, other=0.0).to(gl.float32)
        acc = acc + gl.expand_dims(bias, 1)
    out_row = split // CLUSTER * blocks_m * BLOCK_M + row
    if CLUSTER == 2:
        acc = exchanged(acc, BLOCK_M)
        # Results overwrite the sums that were received.
        tl.debug_barrier()
        out_row += split % 2 * (BLOCK_M // 2)
    # Stored through shared memory: 128 addresses a thread would not fit registers.
    y = gl.allocate_shared_memory(out_desc.dtype, [BLOCK_M // CLUSTER, BLOCK_N], out_desc.layout)
    y.permute((1, 0)).store(acc.to(out_desc.dtype))
    hopper.fence_async_shared()
    tl.debug_barrier()
    store_by_tma(out_desc, [out_row, block_n * BLOCK_N], y)
    tma.store_wait(0)

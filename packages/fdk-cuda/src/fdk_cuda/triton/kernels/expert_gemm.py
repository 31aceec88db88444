# mypy: ignore-errors
"""Grouped GEMM with a stack of experts, many rows of x per expert: ``gemm_kernel`` with tiles."""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.expert_gemv import pair_at, swiglu, tile_of
from fdk_cuda.triton.kernels.gemm import gemm_sums


@triton.jit
def block_of(pid, blocks_m, blocks_n, GROUP_M: tl.constexpr):
    """Returns the blocks along m and n of a program.

    Neighbouring programs share rows of x, GROUP_M blocks at a time, for the L2.
    """
    first_m = pid // (GROUP_M * blocks_n) * GROUP_M
    size_m = min(blocks_m - first_m, GROUP_M)
    block_m = first_m + pid % (GROUP_M * blocks_n) % size_m
    block_n = pid % (GROUP_M * blocks_n) // size_m
    return block_m, block_n


# x       :: [pairs / sharing, k_tiles * TILE_K, dtype], permuted by permute_kernel
# words to out :: see ``expert_gemv_kernel``
@triton.jit(do_not_specialize=["max_tiles"])
def expert_gemm_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    values_ptr,
    lanes_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    routing_ptr,
    out_ptr,
    max_tiles,
    sharing,
    experts,
    n,
    k_tiles,
    groups,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    POSITIONS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROUTING: tl.constexpr,
    OWN_TABLES: tl.constexpr,
    SWIGLU: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    N_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Computes y of up to BLOCK_M pairs of one expert, for 16 * N_TILES * WARPS outputs.

    SWIGLU takes two tiles per warp, of the first and of the second half of the outputs.
    """
    tl.static_assert(N_TILES == 2 or not SWIGLU)
    BLOCK_N: tl.constexpr = 16 * N_TILES * WARPS
    TILE_K: tl.constexpr = 16 * POSITIONS
    CODES: tl.constexpr = (BITS, AFFINE, ASSEMBLY, TABLE, X_DTYPE, DOT_DTYPE)
    GROUPING: tl.constexpr = (PADDED_GROUP, SEGMENT, ONE_GROUP)
    n_tiles = tl.cdiv(n, 16)
    pid = tl.program_id(0)
    tile, block_n = block_of(pid, max_tiles, tl.cdiv(n, BLOCK_N), GROUP_M)
    expert, first, end = tile_of(tiles_ptr, tiles_ptr, tile, max_tiles, experts, True)
    if expert < 0:
        return
    if SWIGLU:
        tile_n = block_n * WARPS
        tile_step = n_tiles // 2
    else:
        tile_n = block_n * (N_TILES * WARPS)
        tile_step = WARPS
    # Rows of no expert are sums over nothing.
    is_known = expert < experts
    depth = tl.where(is_known, k_tiles, 0)
    expert = tl.where(is_known, expert, 0).to(tl.int64)
    scale_at = expert * (n_tiles * groups) * 16
    table = expert if OWN_TABLES else 0
    index = first + tl.arange(0, BLOCK_M)
    pair = pair_at(order_ptr, index, end, True).to(tl.int64)
    acc = gemm_sums(
        x_ptr,
        words_ptr + expert * (n_tiles * k_tiles) * (WORDS * 256),
        scale_ptr + scale_at,
        zero_ptr + scale_at,
        values_ptr + table * (2 << BITS),
        lanes_ptr + table * 128,
        (pair // sharing)[:, None] * (k_tiles * TILE_K),
        (index < end)[:, None],
        tile_n,
        tile_step,
        n_tiles,
        k_tiles,
        0,
        depth,
        groups,
        WORDS,
        POSITIONS,
        CODES,
        GROUPING,
        N_TILES,
        WARPS,
        BLOCK_M,
        STAGES,
    )
    i = tl.arange(0, BLOCK_N)
    row = (tile_n + i // (16 * WARPS) * tile_step + i // 16 % WARPS) * 16 + i % 16
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * n + row, mask=(row < n) & is_known, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    width = n
    if SWIGLU:
        acc = tl.permute(tl.reshape(acc, [2, 16 * WARPS, BLOCK_M]), [1, 2, 0])
        gate, up = tl.split(acc)
        acc = swiglu(gate, up)
        row = tile_n * 16 + tl.arange(0, 16 * WARPS)
        width = n // 2
    if HAS_ROUTING:
        routing = tl.load(routing_ptr + pair, mask=index < end, other=0.0)
        acc *= routing.to(tl.float32)[None, :]
    at = pair[:, None] * width + row[None, :]
    live = (index < end)[:, None] & (row < width)[None, :]
    tl.store(out_ptr + at, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=live)

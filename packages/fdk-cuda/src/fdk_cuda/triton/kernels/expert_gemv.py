# mypy: ignore-errors
"""Product with a stack of experts, few rows of x per expert: ``gemv_kernel`` with an expert."""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.gemv import gemv_sums


@triton.jit
def tile_of(tiles_ptr, ids_ptr, tile, max_tiles, experts, SORTED: tl.constexpr):
    """Returns expert, first and end index of a tile; of a single pair if not sorted.

    The expert is ``experts`` where rows are zeros, and -1 where there is no tile.
    """
    if SORTED:
        expert = tl.load(tiles_ptr + tile)
        first = tl.load(tiles_ptr + max_tiles + tile)
        end = tl.load(tiles_ptr + 2 * max_tiles + tile)
    else:
        id = tl.load(ids_ptr + tile)
        expert = tl.where((id >= 0) & (id < experts), id, experts).to(tl.int32)
        first = tile
        end = tile + 1
    return expert, first, end


@triton.jit
def pair_at(order_ptr, index, end, SORTED: tl.constexpr):
    """Returns the pairs at indices."""
    return tl.load(order_ptr + index, mask=index < end, other=0) if SORTED else index


@triton.jit
def swiglu(gate, up):
    """Computes ``silu(gate) * up``."""
    return gate * tl.sigmoid(gate) * up


# x       :: [pairs / sharing, k, dtype]
# words   :: [experts, n_tiles, k_tiles, WORDS, 2, 32, 4, int32]
# scale   :: [experts, n_tiles, n_groups, 8, 2, dtype]
# zero    :: like scale; without zero points, scale
# values  :: [experts or 1, dtype 2, 2^bits, int16]
# lanes   :: [experts or 1, dtype 2, 2, 32, int32]
# bias    :: [experts, n, dtype]
# ids     :: [pairs, int32 | int64]
# order   :: [pairs, int32]
# tiles   :: [3 * max_tiles + 1, int32]
# routing :: [pairs, floating]
# out     :: [pairs, n, dtype]; with SWIGLU [pairs, n / 2, dtype]; with routing float32
# k_tiles is not specialised: see ``gemv_kernel``.
@triton.jit(do_not_specialize=["max_tiles", "k_tiles"])
def expert_gemv_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    values_ptr,
    lanes_ptr,
    bias_ptr,
    ids_ptr,
    order_ptr,
    tiles_ptr,
    routing_ptr,
    out_ptr,
    max_tiles,
    sharing,
    experts,
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
    EXACT: tl.constexpr,
    PAIRED: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROUTING: tl.constexpr,
    OWN_TABLES: tl.constexpr,
    SORTED: tl.constexpr,
    SWIGLU: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    X_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    N_TILES: tl.constexpr,
    M_TILES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    FETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
    MINUS: tl.constexpr,
):
    """Computes y of up to 8 * M_TILES pairs of one expert, for 16 * N_TILES outputs.

    SWIGLU takes two tiles, of the first and of the second half of the outputs.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # the previous kernels write x, ids and tiles
    tl.static_assert(N_TILES == 2 or not SWIGLU)
    expert, first, end = tile_of(tiles_ptr, ids_ptr, tl.program_id(1), max_tiles, experts, SORTED)
    if expert < 0:
        return
    n_tiles = tl.cdiv(n, 16)
    if SWIGLU:
        tile_n = tl.program_id(0)
        tile_step = n_tiles // 2
    else:
        tile_n = tl.program_id(0) * N_TILES
        tile_step = 1
    # Rows of no expert are sums over nothing.
    is_known = expert < experts
    depth = tl.where(is_known, k_tiles, 0)
    expert = tl.where(is_known, expert, 0).to(tl.int64)
    scale_at = expert * (n_tiles * groups) * 16
    table = expert if OWN_TABLES else 0
    y = gemv_sums(
        x_ptr,
        words_ptr + expert * (n_tiles * k_tiles) * (WORDS * 256),
        scale_ptr + scale_at,
        zero_ptr + scale_at,
        values_ptr + table * (2 << BITS),
        lanes_ptr + table * 128,
        (order_ptr, first, end, sharing),
        tile_n,
        tile_step,
        n_tiles,
        k,
        depth,
        groups,
        BITS,
        WORDS,
        POSITIONS,
        GROUP,
        PADDED_GROUP,
        SEGMENT,
        ONE_GROUP,
        EXACT,
        PAIRED,
        AFFINE,
        ASSEMBLY,
        X_DTYPE,
        DOT_DTYPE,
        N_TILES,
        M_TILES,
        WARPS,
        AHEAD,
        FETCH,
        False,
        MINUS,
        ROWS=2 if SORTED else 1,
    )
    i = tl.arange(0, 16 * N_TILES)
    row = ((tile_n + i // 16 * tile_step) * 16 + i % 16)[None, :, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * n + row, mask=(row < n) & is_known, other=0.0)
        y += bias.to(tl.float32)
    width = n
    WARP_DIM: tl.constexpr = WARPS if ASSEMBLY else 1
    if SWIGLU:
        y = tl.permute(tl.reshape(y, [WARP_DIM, 2, 16, 8 * M_TILES]), [0, 2, 3, 1])
        gate, up = tl.split(y)
        y = swiglu(gate, up)
        row = (tile_n * 16 + tl.arange(0, 16))[None, :, None]
        width = n // 2
    index = (first + tl.arange(0, 8 * M_TILES))[None, None, :]
    pair = pair_at(order_ptr, index, end, SORTED)
    if HAS_ROUTING:
        y *= tl.load(routing_ptr + pair, mask=index < end, other=0.0).to(tl.float32)
    # Only the first warp stores.
    warp = tl.arange(0, WARP_DIM)[:, None, None]
    at = out_ptr + (pair * width + row + warp * 0)
    live = (index < end) & (row < width) & (warp == 0)
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=live)

# ruff: noqa: RUF005
# mypy: ignore-errors
"""What ``small_kernel`` loads beside words, and its operands."""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.decode import load_pair


@triton.jit
def spread(scale, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """``[N_TILES, (warp, g, t, half)]`` as ``[warp, N_TILES, half, g, 1, t, 1]``."""
    scale = tl.reshape(scale, [N_TILES, WARPS, 8, 4, 2])
    return tl.permute(scale, [1, 0, 4, 2, 3])[:, :, :, :, None, :, None]


@triton.jit
def as_minus(zero, N_TILES: tl.constexpr, WARPS: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """``[N_TILES, (warp, g, t, half)]`` as operand A, ``[warp, row, unit]``: all units alike."""
    minus = spread((-zero.to(tl.float32)).to(DOT_DTYPE), N_TILES, WARPS)
    minus = tl.broadcast_to(minus, [WARPS, N_TILES, 2, 8, 2, 4, 2])
    return tl.reshape(minus, [WARPS, 16 * N_TILES, 16])


@triton.jit
def as_operand(value, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """``[(N_TILES, half), (warp, g, t, upper, pair)]`` as ``[warp, row, unit]``."""
    value = tl.reshape(value, [N_TILES, 2, WARPS, 8, 4, 2, 2])
    return tl.reshape(tl.permute(value, [2, 0, 1, 3, 5, 4, 6]), [WARPS, 16 * N_TILES, 16])


# One thread asks for some bytes to be brought to the L2; nobody waits for them.
_FETCH = tl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
    "setp.gt.and.s32 p, $2, 0, p; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
)


@triton.jit
def fetch(pointer, size):
    """Brings ``size`` bytes, a multiple of 16, to the L2 (compute capability 9.0 and later)."""
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [pointer.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_scales(
    stored,
    tile,
    part: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_K: tl.constexpr,
    SEGMENT: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    AFFINE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Scales and zero points of a part of a tile as they are stored, one of each a segment.

    ``stored``: pointers to both, which of them are inside, and the number of groups.
    """
    scale_at, zero_at, inside, groups = stored
    scales = ()
    zeros = ()
    for i in tl.static_range(max(1, WIDTH // SEGMENT)):
        if EXACT and TILE_K % PADDED_GROUP == 0:
            # What is known when compiling is added last: it is the offset of the load.
            offset = tile * (TILE_K // PADDED_GROUP * 16)
            extra = (part * WIDTH + i * SEGMENT) // PADDED_GROUP * 16
            live = inside & (tile * TILE_K < groups * PADDED_GROUP)
            scale = tl.load(scale_at + offset + extra, mask=live, other=0)
            zero = scale
            if AFFINE:
                zero = tl.load(zero_at + offset + extra, mask=live, other=0)
        else:
            group = tile * 0
            if not ONE_GROUP:
                group = (tile * TILE_K + (part * WIDTH + i * SEGMENT)) // PADDED_GROUP
            live = inside & (group < groups)
            scale, zero = load_pair(scale_at, zero_at, group * 16, live, AFFINE)
        scales = scales + (scale,)
        zeros = zeros + (zero,)
    return scales, zeros

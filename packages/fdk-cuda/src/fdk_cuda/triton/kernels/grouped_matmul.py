# mypy: ignore-errors
"""Grouped product with a stack of 16-bit matrices, for gradients and as a baseline."""

import triton
import triton.language as tl

from fdk_cuda.triton.kernels.expert_gemm import block_of
from fdk_cuda.triton.kernels.expert_gemv import pair_at, tile_of


# a     :: [pairs / sharing, k, dtype]
# b     :: [count, k, n, dtype] by strides: the matrices of ``count`` experts from ``first_expert``
# order :: [pairs, int32]
# tiles :: [3 * max_tiles + 1, int32]
# out   :: [pairs, n, dtype]
@triton.jit(do_not_specialize=["max_tiles", "first_expert"])
def grouped_matmul_kernel(
    a_ptr,
    b_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    max_tiles,
    sharing,
    experts,
    first_expert,
    count,
    n,
    k,
    stride_k,
    stride_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Computes ``a @ b[expert]`` for tiles of the experts in ``b``; zeros for pairs of none."""
    pid = tl.program_id(0)
    tile, block_n = block_of(pid, max_tiles, tl.cdiv(n, BLOCK_N), GROUP_M)
    expert, first, end = tile_of(tiles_ptr, tiles_ptr, tile, max_tiles, experts, True)
    own = expert - first_expert
    is_none = (expert == experts) & (first_expert == 0)
    if not (is_none | ((own >= 0) & (own < count) & (expert < experts))):
        return
    depth = tl.where(is_none, 0, k)
    b_ptr += tl.where(is_none, 0, own).to(tl.int64) * n * k
    index = first + tl.arange(0, BLOCK_M)
    pair = pair_at(order_ptr, index, end, True).to(tl.int64)
    column = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    a_at = a_ptr + (pair // sharing)[:, None] * k + at[None, :]
    b_at = b_ptr + at[:, None] * stride_k + column[None, :] * stride_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, depth, BLOCK_K):
        inside = start + at < k
        a = tl.load(a_at + start, mask=(index < end)[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            b_at + start * stride_k, mask=inside[:, None] & (column < n)[None, :], other=0.0
        )
        acc = tl.dot(a.to(DOT_DTYPE), b.to(DOT_DTYPE), acc, input_precision="ieee")
    live = (index < end)[:, None] & (column < n)[None, :]
    out_at = out_ptr + pair[:, None] * n + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=live)

# mypy: ignore-errors
"""Add the weighted results of a token's experts."""

import triton
import triton.language as tl


# partial :: [pairs, n, float32 | dtype]; rows of pairs of no expert are not read
# ids     :: [pairs, int32 | int64]
# routing :: [pairs, floating], unless results are weighted
# out     :: [pairs / TOP_K, n, dtype]
@triton.jit
def expert_reduce_kernel(
    partial_ptr,
    ids_ptr,
    routing_ptr,
    out_ptr,
    n,
    experts,
    HAS_ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Adds the results of TOP_K experts in their order: no atomics, so always the same bits.

    HAS_ROUTING multiplies them with their weights first.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        id = tl.load(ids_ptr + pair)
        live = (column < n) & (id >= 0) & (id < experts)
        y = tl.load(partial_ptr + pair * n + column, mask=live, other=0.0).to(tl.float32)
        if HAS_ROUTING:
            y *= tl.load(routing_ptr + pair).to(tl.float32)
        total += y
    tl.store(out_ptr + token * n + column, total.to(out_ptr.dtype.element_ty), mask=column < n)

# mypy: ignore-errors
"""Gather rows of x in the order of their experts, which tensor copies need."""

import triton
import triton.language as tl


# x     :: [pairs / sharing, k, dtype]
# order :: [pairs, int32]
# out   :: [pairs, width, dtype]
@triton.jit
def expert_gather_kernel(
    x_ptr,
    order_ptr,
    out_ptr,
    k,
    width,
    sharing,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Copies the row of x of each pair, with zeros from column k on."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = (tl.load(order_ptr + index) // sharing).to(tl.int64)
    x = tl.load(x_ptr + row * k + column, mask=column < k, other=0.0)
    tl.store(out_ptr + index * width + column, x, mask=column < width)

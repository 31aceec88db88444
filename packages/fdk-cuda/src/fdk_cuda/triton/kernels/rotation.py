# mypy: ignore-errors
"""Rotate activations in blocks by signs and a Hadamard matrix."""

import triton
import triton.language as tl


# x, out :: [count, BLOCK, dtype]
# signs  :: [256, float32]
@triton.jit
def rotation_kernel(
    x_ptr,
    signs_ptr,
    out_ptr,
    count,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SCALE: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Rotates BLOCKS blocks: a sum and a difference for each bit of the index, lowest bit first.

    Sums go to the first half and differences to the second, so that the next bit is the lowest.
    After all bits the values are in order.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.arange(0, BLOCK)
    at = row[:, None] * BLOCK + column[None, :]
    live = (row < count)[:, None]
    sign = tl.load(signs_ptr + column)[None, :]
    value = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    if not INVERSE:
        value *= sign
    for _ in tl.static_range(BITS):
        low, high = tl.split(tl.reshape(value, (BLOCKS, BLOCK // 2, 2)))
        halves = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
        value = tl.reshape(halves, (BLOCKS, BLOCK))
    value *= SCALE
    if INVERSE:
        value *= sign
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=live)

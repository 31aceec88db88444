# mypy: ignore-errors
"""Round columns of a weight one after the other, each making up for those before it."""

import triton
import triton.language as tl


# midpoints :: [entries - 1, float32]
# table     :: [entries, float32]
# wanted, reference, scale, zero :: [columns, rows, float32]
# feedback  :: [columns, columns, float32]
# codes     :: [columns, rows, uint8]
# residual      :: [columns, rows, float32]
@triton.jit
def round_columns_kernel(
    midpoints_ptr,
    table_ptr,
    wanted_ptr,
    reference_ptr,
    feedback_ptr,
    scales_ptr,
    zeros_ptr,
    codes_ptr,
    residual_ptr,
    entries,
    columns,
    rows,
    BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rounds ROWS rows; what a column leaves is added to all later ones at once, in registers."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    live = row < rows
    wanted = tl.load(
        wanted_ptr + column[:, None] * rows + row[None, :],
        mask=(column < columns)[:, None] & live[None, :],
        other=0.0,
    )
    for i in range(columns):
        at = i * rows + row
        value = tl.sum(tl.where((column == i)[:, None], wanted, 0.0), axis=0)
        scale = tl.load(scales_ptr + at, mask=live, other=0.0)
        is_zero = scale == 0.0
        quotient = tl.div_rn(value, tl.where(is_zero, 1.0, scale))
        quotient = tl.where(is_zero, 0.0, quotient)
        zero = tl.zeros([ROWS], tl.float32)
        if HAS_ZERO:
            zero = tl.load(zeros_ptr + at, mask=live, other=0.0)
            quotient += zero
        code = tl.zeros([ROWS], tl.int32)
        for bit in tl.static_range(BITS):
            probe = code + (1 << (BITS - 1 - bit))
            midpoint = tl.load(midpoints_ptr + probe - 1, mask=probe < entries, other=float("inf"))
            code = tl.where(quotient > midpoint, probe, code)
        rounded = (tl.load(table_ptr + code) - zero) * scale
        residual = tl.load(reference_ptr + at, mask=live, other=0.0) - rounded
        tl.store(codes_ptr + at, code.to(tl.uint8), mask=live)
        tl.store(residual_ptr + at, residual, mask=live)
        is_later = (column > i) & (column < columns)
        factor = tl.load(feedback_ptr + column * columns + i, mask=is_later, other=0.0)
        wanted += factor[:, None] * residual[None, :]

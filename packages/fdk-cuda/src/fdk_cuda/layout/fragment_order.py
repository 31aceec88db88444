"""Order of a weight's elements in the A fragments of ``mma.m16n8k16``.

The weight is operand A: 16 rows (outputs) by 16 columns (inputs) per tensor-core step. In one step,
lane ``4 * g + t`` of a warp (g = 0..7, t = 0..3) holds four registers of two values each:

    row    = 8 * half + g                half 0 or 1
    column = 2 * t + 8 * upper + pair    upper 0 or 1, pair 0 or 1      (PTX's own order)

The columns of a product may be permuted freely if x is permuted with them. Two orders are used.
``column_of`` gives the column, in memory, of what a lane holds in step ``step``:

    paired   32 * (step // 2) + 8 * t + 4 * (step % 2) + 2 * upper + pair
    single   16 * step + 4 * t + 2 * upper + pair

In the paired order a lane's columns in two steps are eight neighbours: it reads its activations for
both by one 16-byte load. It needs a multiple of 32 columns with one scale; the single order needs
16. Marlin uses the paired order, Triton either.

The order follows Marlin (Frantar et al., 2024, arXiv 2408.11743), which permutes the weight offline
so that a lane loads its fragments as consecutive bytes.
"""

# Rows of a fragment: halves of eight rows g. Columns of a step: lanes t, upper, pair.
HALVES, ROWS, LANE_COLUMNS, UPPERS, PAIRS = 2, 8, 4, 2, 2


def row_of(half: int, g: int) -> int:
    """Returns the row of a fragment, 0 to 15, that lanes ``4 * g + t`` hold."""
    return ROWS * half + g


def column_of(step: int, t: int, upper: int, pair: int, *, paired: bool = True) -> int:
    """Returns the column in memory of what lane t of four holds in a step.

    Args:
        step: tensor-core step along k.
        t: lane within a group of four.
        upper: 0 for the lower eight columns of the step as PTX counts them, 1 for the upper.
        pair: index of the value in a register, 0 or 1.
        paired: the order, see the module.
    """
    if paired:
        return 32 * (step // 2) + 8 * t + 4 * (step % 2) + 2 * upper + pair
    return 16 * step + 4 * t + 2 * upper + pair


def row_axes() -> tuple[int, int]:
    """Returns the shape ``[half, g]`` as which 16 rows are viewed."""
    return HALVES, ROWS


def column_axes(steps: int, *, paired: bool = True) -> tuple[int, int, int, int, int]:
    """Returns the shape as which the columns of a number of steps are viewed.

    ``tensor.view(..., *column_axes(steps))`` has the axes
    ``[step // width, t, step % width, upper, pair]``, where width is 2 if paired, else 1.

    Raises:
        ValueError: for an odd number of steps in the paired order.
    """
    width = 2 if paired else 1
    if steps % width:
        raise ValueError(f"the paired order needs an even number of steps, got {steps}")
    return steps // width, LANE_COLUMNS, width, UPPERS, PAIRS

"""Order of a weight's elements in tensor-core fragments, shared by Marlin and Triton."""

from fdk_cuda.layout.fragment_order import (
    LANE_COLUMNS,
    column_axes,
    column_of,
    row_axes,
    row_of,
)

__all__ = ["LANE_COLUMNS", "column_axes", "column_of", "row_axes", "row_of"]

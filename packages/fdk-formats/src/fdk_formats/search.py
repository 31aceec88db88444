"""The nearest code of a value, and the scale of least squared error of a group."""

import torch
from torch import Tensor

from fdk_formats.format import Format
from fdk_formats.groups import Chunk, GroupedWeight, check_finite
from fdk_formats.scales import SCALE_DTYPES, decode_scale, divide, encode_scale, statistic

# Up to this many midpoints, comparing with each beats a binary search (see `nearest`).
MAX_COMPARED = 15


def nearest(value: Tensor, table: Tensor) -> Tensor:
    """The codes, uint8, of float32 values: how many midpoints of the table are below each."""
    middle = (table[1:] + table[:-1]) / 2
    if len(middle) > MAX_COMPARED:
        return torch.bucketize(value, middle, out_int32=True).to(torch.uint8)
    codes = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    for border in middle:
        codes += value > border
    return codes


def search_scales(
    source: GroupedWeight, format: Format, table: Tensor, unit: float, start: Tensor | None
) -> Tensor:
    raise NotImplementedError

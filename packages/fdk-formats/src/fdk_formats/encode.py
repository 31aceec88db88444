"""Encoding: the code whose value is nearest to a weight, the lower code of a tie."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fdk_formats.rounding import RoundingKernels, rounding_kernels_for

# Cells for the lookup of ``CodebookEncoder``: the smallest table (for the cache) in which no cell
# holds two midpoints. A codebook that needs more than the last is searched with bucketize.
CELL_COUNTS = (1 << 12, 1 << 15, 1 << 18)
# Up to so many midpoints are compared with one by one: 2.5 ns a weight at 2 bits, with cells 6.2.
FEW_MIDPOINTS = 3


def divide(value: Tensor, by: Tensor) -> Tensor:
    """Divides float32 tensors that broadcast; zero where the divisor is zero."""
    return value / torch.where(by == 0, torch.inf, by)


def weighted_sum(values: Tensor, importance: Tensor | None) -> Tensor:
    """Sums float32 ``values :: [..., G]`` over each group, times their importance: ``[...]``.

    torch splits a sum among its threads only where the result is a single number. One group alone
    is therefore summed in float64, so that the number of threads does not show in the result.
    """
    weighted = values if importance is None else values * importance
    is_single = weighted.shape[:-1].numel() == 1
    return weighted.sum(-1, dtype=torch.float64 if is_single else None).to(torch.float32)


def affine_codes(groups: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Encodes by ``ceil(w / scale + zero_point - 1/2)``, clamped to 0 to 2^bits - 1.

    Each step is one float32 operation. The ceiling gives a tie to the lower code.

    Args:
        groups: weights, ``[..., G, float32]``.
        scale: decoded scales, ``[..., float32]``.
        zero_point: ``[..., float32]``.
        bits: width of a code.

    Returns:
        The codes, ``[..., G, uint8]``.
    """
    value = divide(groups, scale[..., None]).add_(zero_point[..., None])
    return value.sub_(0.5).ceil_().clamp_(0, (1 << bits) - 1).to(torch.uint8)


class CodebookEncoder:
    """Encodes float32 values with a codebook: a code is the number of midpoints below the value.

    A tie goes to the lower code, and the higher one of two equal entries is never used. A table of
    cells replaces the binary search where every midpoint has a cell to itself: the cell gives the
    code up to one comparison (2^24 values on 2 CPU cores: 0.04 s instead of 0.9 s at 4 bits).

    On other devices than a CPU no value of the codebook is read by Python, which would wait for the
    device.

    Args:
        codebook: ``[2^bits, float32]``, ascending; an entry may repeat.
    """

    def __init__(self, codebook: Tensor) -> None:
        self.codebook = codebook
        self.cells: _CellTable | None = None
        self.first: Tensor | None
        if codebook.device.type != "cpu":
            self.entries, self.midpoints = codebook, (codebook[1:] + codebook[:-1]) / 2
            # The midpoint of two equal entries is their value: it leads to the higher one.
            self.first = torch.searchsorted(codebook, codebook).to(torch.uint8)
            return
        entries, repeats = codebook.unique_consecutive(return_counts=True)
        first = repeats.cumsum(0) - repeats
        # If only the last entry repeats, as in `int`, indices of distinct entries are codes.
        self.first = None if first[-1] == len(first) - 1 else first.to(torch.uint8)
        self.entries = entries
        self.midpoints = (entries[1:] + entries[:-1]) / 2
        tables = (_cell_table(self.midpoints, count) for count in CELL_COUNTS)
        self.cells = next(filter(None, tables), None)

    def codes(self, value: Tensor) -> Tensor:
        """Returns the codes, uint8, in the shape of ``value``."""
        entries = self._distinct_entries(value)
        if self.first is None:
            return entries
        index = entries.reshape(-1).to(torch.int32)
        return self.first.index_select(0, index).view(value.shape)

    def _distinct_entries(self, value: Tensor) -> Tensor:
        """Returns indices, uint8, into ``entries``."""
        if 0 < len(self.midpoints) <= FEW_MIDPOINTS:
            first, *others = self.midpoints.unbind()
            result: Tensor = (value > first).view(torch.uint8)
            for midpoint in others:
                result += (value > midpoint).view(torch.uint8)
            return result
        if self.cells is None:
            return torch.bucketize(value, self.midpoints, out_int32=True).to(torch.uint8)
        flat = value.reshape(-1)
        cell = self.cells.of(flat)
        codes = self.cells.below.index_select(0, cell)
        codes += flat > self.cells.midpoint.index_select(0, cell)
        return codes.view(value.shape)

    def values(self, value: Tensor) -> Tensor:
        """Returns the codebook entries of the codes, float32, in the shape of ``value``."""
        codes = self.codes(value).view(-1).to(torch.int32)
        return self.codebook.index_select(0, codes).view(value.shape)

    def round(
        self, groups: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Rounds groups of weights; returns their codes, uint8, and values, float32.

        Args:
            groups: ``[rows, k/G, G, float32]``, contiguous.
            scale: decoded scales, ``[rows, k/G]``.
            dtype: what the codebook is rounded to before it is multiplied, see ``decode``.
        """
        if (kernels := self._kernels) is None:
            codes = self.codes(divide(groups, scale[..., None]))
            table = self.codebook.to(dtype).to(torch.float32)
            values = table.index_select(0, codes.view(-1).to(torch.int32)).view(groups.shape)
            return codes, values.mul_(scale[..., None])
        entries = self.entries.to(dtype).to(torch.float32)
        codes, values = kernels.round(self.midpoints, entries, groups, scale)
        if self.first is not None:
            codes = self.first.index_select(0, codes.view(-1).to(torch.int32)).view(codes.shape)
        return codes, values

    def squared_errors(self, groups: Tensor, scale: Tensor, importance: Tensor | None) -> Tensor:
        """Returns the squared error of each rounded group, ``[rows, k/G]``.

        Args:
            groups: see ``round``.
            scale: see ``round``.
            importance: weights of the sum, ``[1 or rows, k/G, G, float32]``; None for ones.
        """
        if (kernels := self._kernels) is not None:
            return kernels.squared_errors(self.midpoints, self.entries, groups, scale, importance)
        scale = scale[..., None]
        entries = self.values(divide(groups, scale))
        return weighted_sum(entries.mul_(scale).sub_(groups).square_(), importance)

    def least_squares(self, groups: Tensor, scale: Tensor, importance: Tensor | None) -> Tensor:
        """Returns the scale of least squared error for the codes that ``scale`` gives.

        Args:
            groups: see ``squared_errors``, as for the other arguments.
            scale: see there.
            importance: see there.
        """
        if (kernels := self._kernels) is not None:
            given = self.midpoints, self.entries, groups, scale, importance
            product, square = kernels.products(*given)
            return divide(product, square)
        entries = self.values(divide(groups, scale[..., None]))
        product = weighted_sum(groups * entries, importance)
        return divide(product, weighted_sum(entries.square_(), importance))

    @property
    def _kernels(self) -> RoundingKernels | None:
        return rounding_kernels_for(self.codebook.device, len(self.entries))


@dataclass(frozen=True)
class _CellTable:
    """Equal cells over the range of the midpoints, with at most one midpoint each.

    The cell index is a monotonic function of the value, whatever its rounding. So midpoints of
    lower cells are below the value, those of higher cells are not, and comparing with the midpoint
    of the value's own cell makes the count exact.

        below    :: [cells, uint8]     midpoints in lower cells
        midpoint :: [cells, float32]   the midpoint in the cell, or infinity
    """

    low: float
    step: float
    below: Tensor
    midpoint: Tensor

    def of(self, value: Tensor) -> Tensor:
        """Returns the cell of each value, int32."""
        return _cell(value, self.low, self.step, len(self.below))


def _cell(value: Tensor, low: float, step: float, count: int) -> Tensor:
    return (value - low).mul_(step).clamp_(0, count - 1).to(torch.int32)


def _cell_table(midpoints: Tensor, count: int) -> _CellTable | None:
    """Builds a table; None if two midpoints share a cell or float32 cannot divide their range."""
    if not len(midpoints):
        return None
    low, high = midpoints[0].item(), midpoints[-1].item()
    span = high - low if len(midpoints) > 1 else 1.0
    if not 1e-30 < span < 1e30:
        return None
    step = (count - 1) / span
    cell = _cell(midpoints, low, step, count)
    held = torch.bincount(cell, minlength=count)
    if held.max() > 1:
        return None
    midpoint = torch.full((count,), torch.inf, dtype=midpoints.dtype, device=midpoints.device)
    midpoint[cell] = midpoints
    return _CellTable(low, step, (held.cumsum(0) - held).to(torch.uint8), midpoint)

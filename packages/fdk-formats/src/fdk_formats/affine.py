"""Affine formats: W_hat = (code - zero_point) * scale, from the range of each group."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fdk_formats.format import Format
from fdk_formats.groups import Chunk, GroupedWeight, check_finite, weighted_sum
from fdk_formats.packing import pack, packed_width
from fdk_formats.scales import SCALE_DTYPES, decode_scale, divide, encode_scale, largest_scale
from fdk_formats.search import clipped
from fdk_formats.tensor import QuantisedTensor, zero_point_dtype

# The largest float zero point. Groups far from zero, or all of one value, take a wider scale
# instead: beyond 2^8 a bf16 zero point has no resolution of one code left, and a power of two times
# the scale gives a constant group back as exactly as a bf16 scale holds it.
ZERO_LIMIT = {"bf16": 2.0**8, "e8m0": 2.0**8, "fp16": 2.0**8, "fp32": 2.0**16}
REFITS = 4


@dataclass(frozen=True)
class _Grid:
    """Stored scale and zero point of each group, ``[rows, k/G]``."""

    scale: Tensor
    zero: Tensor

    def where(self, mask: Tensor, other: "_Grid") -> "_Grid":
        """This grid where ``mask``, the other one elsewhere."""
        return _Grid(
            torch.where(mask, self.scale, other.scale), torch.where(mask, self.zero, other.zero)
        )


def quantise_affine(source: GroupedWeight, format: Format) -> QuantisedTensor:
    """Quantises a weight to ``(code - zero_point) * scale``.

    ``minmax``: scale = (hi - lo) / (2^b - 1), rounded to its dtype; zero point = -lo / scale,
    rounded to its own. Integer zero points need a range that includes zero, and widen it so; float
    ones (as HQQ has them, Badri and Shaji 2023) take the range as it is. ``search`` shrinks the
    range step by step and refits scale and zero point by least squares, where that is better.

    The code is ``ceil(w / scale + zero_point - 1/2)``, each step in float32, cut to 0 to 2^b - 1:
    the nearest, the lower one of a tie.
    """
    n, k = source.weight.shape
    device = source.weight.device
    packed = torch.empty((n, packed_width(format.bits, k)), dtype=torch.uint8, device=device)
    scale = torch.empty(source.shape, dtype=SCALE_DTYPES[format.scale_dtype], device=device)
    zero = torch.empty(source.shape, dtype=zero_point_dtype(format), device=device)
    for chunk in source.chunks():
        fit = _AffineFit(chunk, format)
        grid = fit.minmax() if format.scale_rule == "minmax" else fit.search()
        codes = nearest_affine(
            chunk.groups, decode_scale(grid.scale), grid.zero.to(torch.float32), format.bits
        )
        packed[chunk.rows] = pack(codes.flatten(1), format.bits)
        scale[chunk.rows], zero[chunk.rows] = grid.scale, grid.zero
    return QuantisedTensor(format=format, shape=(n, k), packed=packed, scale=scale, zero_point=zero)


def nearest_affine(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The codes, uint8, of ``groups :: [..., G]`` under decoded ``scale`` and ``zero :: [...]``."""
    value = divide(groups, scale[..., None]).add_(zero[..., None])
    return value.sub_(0.5).ceil_().clamp_(0, (1 << bits) - 1).to(torch.uint8)


class _AffineFit:
    """Scales and zero points for one chunk; errors are relative to each group's magnitude."""

    def __init__(self, chunk: Chunk, format: Format) -> None:
        self.groups, self.importance, self.format = chunk.groups, chunk.importance, format
        self.top = (1 << format.bits) - 1
        self.lo, self.hi = chunk.groups.amin(-1), chunk.groups.amax(-1)
        self.peak = torch.maximum(-self.lo, self.hi)
        check_finite(chunk, self.peak)

    def minmax(self) -> _Grid:
        """The grid over the whole range."""
        return self._grid(self.lo, self.hi)

    def search(self) -> _Grid:
        """The grid of least squared error that was found."""
        self.value = divide(self.groups, self.peak[..., None])
        mean = weighted_sum(self.value, None) / self.value.shape[-1] * self.peak
        best = self.minmax()
        error = self._error(best)
        half = torch.maximum(self.hi - mean, mean - self.lo)
        for reach in clipped(self.groups - mean[..., None]):
            share = divide(reach, half)
            lo, hi = mean + (self.lo - mean) * share, mean + (self.hi - mean) * share
            best, error = self._better(self._grid(lo, hi, clipping=True), best, error)
        for _ in range(REFITS):
            best, error = self._better(self._least_squares(best), best, error)
        return best

    def _grid(self, lo: Tensor, hi: Tensor, clipping: bool = False) -> _Grid:
        if self.format.zero_point == "int":
            lo, hi = lo.clamp(max=0), hi.clamp(min=0)
        scale = (hi - lo) / self.top
        if self.format.zero_point == "float":
            limit = ZERO_LIMIT[self.format.scale_dtype]
            scale = torch.maximum(scale, torch.maximum(-lo, hi) / limit)
        if clipping:
            scale = scale.clamp(max=largest_scale(self.format.scale_dtype))
        stored = encode_scale(scale, self.format.scale_dtype, round_up=not clipping)
        zero = divide(-lo, decode_scale(stored))
        if self.format.zero_point == "int":
            zero = zero.round().clamp(0, self.top)
        return _Grid(stored, zero.to(zero_point_dtype(self.format)))

    def _better(self, grid: _Grid, best: _Grid, error: Tensor) -> tuple[_Grid, Tensor]:
        found = self._error(grid)
        better = found < error
        return grid.where(better, best), torch.where(better, found, error)

    def _least_squares(self, grid: _Grid) -> _Grid:
        """The grid of least error under the codes that a grid gives."""
        _, _, codes = self._codes(grid)
        weight = self._sum(torch.ones_like(codes))
        centre, mean = divide(self._sum(codes), weight), divide(self._sum(self.value), weight)
        ratio = self._slope(codes, centre, mean)
        if self.format.zero_point == "int":
            zero = (centre - divide(mean, ratio)).round().clamp(0, self.top)
            ratio = self._slope(codes, zero, torch.zeros_like(zero))
        limit = largest_scale(self.format.scale_dtype)
        stored = encode_scale((ratio * self.peak).clamp(0, limit), self.format.scale_dtype)
        if self.format.zero_point == "float":
            limit = ZERO_LIMIT[self.format.scale_dtype]
            ratio = divide(decode_scale(stored), self.peak)
            zero = (centre - divide(mean, ratio)).clamp(-limit, limit)
        return _Grid(stored, zero.to(zero_point_dtype(self.format)))

    def _slope(self, codes: Tensor, centre: Tensor, mean: Tensor) -> Tensor:
        """The slope of the least-squares line from codes to values, through (centre, mean)."""
        offset = codes - centre[..., None]
        product = self._sum(offset * (self.value - mean[..., None]))
        return divide(product, self._sum(offset.square_()))

    def _error(self, grid: _Grid) -> Tensor:
        ratio, zero, codes = self._codes(grid)
        return self._sum((self.value - (codes - zero[..., None]) * ratio[..., None]).square_())

    def _codes(self, grid: _Grid) -> tuple[Tensor, Tensor, Tensor]:
        """Scales relative to the peak, zero points and codes of a grid, all float32."""
        ratio = divide(decode_scale(grid.scale), self.peak)
        zero = grid.zero.to(torch.float32)
        codes = nearest_affine(self.value, ratio, zero, self.format.bits)
        return ratio, zero, codes.to(torch.float32)

    def _sum(self, values: Tensor) -> Tensor:
        return weighted_sum(values, self.importance)

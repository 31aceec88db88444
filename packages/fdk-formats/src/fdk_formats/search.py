"""The scale of least squared error of each group."""

import torch
from torch import Tensor

from fdk_formats.encode import Nearest
from fdk_formats.format import Format
from fdk_formats.groups import GroupedWeight, weighted_sum
from fdk_formats.scales import decode_scale, divide, encode_scale, largest_scale, statistic

# Candidates: the largest magnitude maps to the unit, to a little less (the first), or is clipped,
# down to CLIP of the rms, where one bit has its optimum.
CANDIDATES = 16
WIDEN = 1.1
CLIP = 0.7
REFITS = 3


def search_scales(
    source: GroupedWeight, format: Format, codebook: Tensor, unit: float, start: Tensor
) -> tuple[Tensor, float]:
    """Stored scales ``[n, k/G]`` of lower squared error than ``start``, or the same; their error.

    Each group tries a geometric grid of scales and then, with the codes of the best, the scale of
    least squares, a few times over. Every candidate is rounded to its dtype before it is judged,
    and taken only where it is better. The error is that of the whole weight, squared and weighed.
    """
    best, nearest, error = start.clone(), Nearest(codebook), 0.0
    for chunk in source.chunks():
        group = _GroupError(chunk.groups, chunk.importance, nearest)
        search = _Best(group, format.scale_dtype, best[chunk.rows])
        for candidate in clipped(chunk.groups):
            search.offer(candidate / unit)
        for _ in range(REFITS):
            search.offer(group.least_squares(search.scale))
        best[chunk.rows] = search.scale
        error += group.total(search.error)
    return best, error


def clipped(groups: Tensor) -> list[Tensor]:
    """Magnitudes to map to the end of the grid, from over the largest to under the rms."""
    top, low = statistic(groups, "absmax") * WIDEN, statistic(groups, "rms") * CLIP
    top = top.clamp(max=torch.finfo(torch.float32).max)
    ratio = divide(low, top)
    return [top * ratio ** (i / (CANDIDATES - 1)) for i in range(CANDIDATES)]


class _Best:
    """The best stored scale of each group so far, and its error."""

    def __init__(self, group: "_GroupError", scale_dtype: str, start: Tensor) -> None:
        self.group, self.scale_dtype = group, scale_dtype
        self.scale, self.error = start, group.of(start)

    def offer(self, scale: Tensor) -> None:
        limit = largest_scale(self.scale_dtype)
        low = 0.0 if self.scale_dtype == "e8m0" else -limit
        stored = encode_scale(scale.clamp(low, limit), self.scale_dtype)
        error = self.group.of(stored)
        better = error < self.error
        self.scale = torch.where(better, stored, self.scale)
        self.error = torch.where(better, error, self.error)


class _GroupError:
    """The squared error of groups at a scale, relative to their largest magnitude.

    Relative, so that squares neither overflow nor underflow float32.
    """

    def __init__(self, groups: Tensor, importance: Tensor | None, nearest: Nearest) -> None:
        self.nearest, self.importance = nearest, importance
        self.peak = statistic(groups, "absmax")
        self.value = divide(groups, self.peak[..., None])

    def of(self, stored: Tensor) -> Tensor:
        """The error of each group, ``[rows, k/G]``."""
        ratio, decoded = self._decoded(stored)
        return self._sum((self.value - decoded * ratio).square_())

    def total(self, error: Tensor) -> float:
        """The sum over the groups, no longer relative; numpy's order does not depend on threads."""
        square = self.peak.to(torch.float64).square()
        return float((error * square).cpu().numpy().sum())

    def least_squares(self, stored: Tensor) -> Tensor:
        """The scale of least error under the codes that ``stored`` gives."""
        _, decoded = self._decoded(stored)
        product, square = self._sum(self.value * decoded), self._sum(decoded.square())
        return divide(product, square) * self.peak

    def _decoded(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        ratio = divide(decode_scale(stored), self.peak)[..., None]
        return ratio, self.nearest.values(divide(self.value, ratio))

    def _sum(self, values: Tensor) -> Tensor:
        return weighted_sum(values, self.importance)

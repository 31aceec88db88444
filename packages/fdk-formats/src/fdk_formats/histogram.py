"""A weighted histogram of normalised weights: all that the k-means of one tensor needs of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Samples = Callable[[], Iterator[tuple[Tensor, Tensor]]]

# A bin is a float32 without the last DROPPED bits of its mantissa: 2^13 bins in each of the OCTAVES
# below the largest magnitude, and one for all that is smaller. Bins that widen with the magnitude
# keep their detail near zero when one outlier stretches the range.
DROPPED = 10
OCTAVES = 24
# So few bins in use hold discrete or nearly constant data: each is split into its single floats.
FEW = 512


@dataclass(frozen=True)
class Points:
    """Weighted points on a line: ascending positions, and positive masses."""

    position: Array
    mass: Array


def weighted_points(samples: Samples, peak: float) -> Points:
    """The points of a histogram over chunks of (values, masses).

    Each bin in use is one point, at the mean of its values, so that the sums over bins are those
    over the values. Where few bins are in use each point is one float32 value exactly.

        samples() -> (value :: [..., float32], mass :: [..., float64]), chunk after chunk; called
                     twice where few bins are in use

    ``peak`` is the largest magnitude of all values. Sums are float64 and, on a CPU, in the order of
    the values, whatever the number of threads.
    """
    shape = _Bins(peak)
    mass, moment = _accumulate(samples, shape.key, shape.count)
    used = mass.nonzero().flatten()
    if 0 < len(used) <= FEW:
        rank = torch.zeros(shape.count, dtype=torch.int32, device=mass.device)
        rank[used] = torch.arange(len(used), dtype=torch.int32, device=mass.device)

        def fine_key(value: Tensor) -> Tensor:
            low = value.view(torch.int32) & ((1 << DROPPED) - 1)
            return (rank[shape.key(value)] << DROPPED) + low

        mass, moment = _accumulate(samples, fine_key, len(used) << DROPPED)
        used = mass.nonzero().flatten()
    mass, moment = mass[used].cpu(), moment[used].cpu()
    position = (moment / mass).numpy()
    order = np.argsort(position, kind="stable")
    return Points(position[order], mass.numpy()[order])


class _Bins:
    """Which bin a float32 falls into, ascending with the value."""

    def __init__(self, peak: float) -> None:
        top = int(np.float32(peak).view(np.int32)) >> DROPPED
        self.floor = max(0, top - (OCTAVES << (23 - DROPPED)))
        self.zero = top - self.floor
        self.count = 2 * self.zero + 1

    def key(self, value: Tensor) -> Tensor:
        word = value.view(torch.int32)
        size = (((word & 0x7FFFFFFF) >> DROPPED) - self.floor).clamp_(min=0)
        return torch.where(word < 0, self.zero - size, self.zero + size)


def _accumulate(
    samples: Samples, key: Callable[[Tensor], Tensor], count: int
) -> tuple[Tensor, Tensor]:
    mass = moment = torch.zeros(0, device="cpu")  # what no samples at all leave
    for value, weight in samples():
        index = key(value).view(-1)
        part = torch.bincount(index, weights=weight.view(-1), minlength=count)
        first = torch.bincount(index, weights=(weight * value).view(-1), minlength=count)
        mass, moment = (mass + part, moment + first) if len(mass) else (part, first)
    return mass, moment

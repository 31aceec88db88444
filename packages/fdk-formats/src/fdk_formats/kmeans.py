"""k-means of one tensor's values: the optimal codebook of 2^b entries, with no random choice.

In one dimension clusters are intervals, so dynamic programming finds the global optimum. It works
on a histogram of a few hundred to a few thousand atoms; Lloyd's iterations then refine the result
on every bin. docs/design/decisions.md compares it with k-means++.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
# Yields (values :: [..., float32], masses :: [..., float64]), chunk after chunk; called repeatedly.
Samples = Callable[[], Iterator[tuple[Tensor, Tensor]]]

# A histogram bin is a float32 without its last DROPPED mantissa bits: 2^13 bins per octave for
# OCTAVES below the largest magnitude, and one bin for everything smaller. Bins relative to the
# magnitude keep their resolution near zero when one outlier stretches the range.
DROPPED = 10
OCTAVES = 24
# With so few bins in use (discrete or nearly constant data), bins are split into single floats.
FEW_BINS = 512

# Atoms of the dynamic programming per centroid, and their limits. Before Lloyd's iterations 16 per
# centroid are within 0.1 % of the optimum, for up to 256 centroids.
ATOMS_PER_CENTROID = 32
MIN_ATOMS = 1024
MAX_ATOMS = 4096
# An outlier is one atom, however far from its neighbours; the share of atoms that its density asks
# for beyond that goes to the others. Slightly more than an even share keeps it from being merged.
LEVELLING_ROUNDS = 20
OUTLIER_SHARE = 1.25
MAX_ITERATIONS = 1000
NEGLIGIBLE = 1e-15  # share of the total mass, lost in the rounding of prefix sums
SYMMETRY_LOSS = 5e-4  # share of the squared error, accepted to make two centroids -c and c


def fit_centroids(samples: Samples, guess: Sequence[float]) -> Tensor:
    """Fits a codebook to weighted values.

    Args:
        samples: the values and their masses, in chunks.
        guess: ascending centroids to start from as well; the result is never worse.

    Returns:
        As many ascending centroids as ``guess`` has, float32, on the CPU. Two centroids are made
        -c and c where that costs next to nothing: kernels then use the bit as a sign.
    """
    peak = max((value.abs().max().item() for value, _ in samples()), default=0.0)
    points = weighted_points(samples, peak)
    centroids = optimal_centroids(points, len(guess), np.array(guess))
    if len(guess) == 2:
        centroids = symmetric_pair(points, centroids)
    return torch.from_numpy(centroids.astype(np.float32))


def refit_centroids(samples: Samples, start: Tensor) -> Tensor:
    """Refits a codebook to values that have changed a little, by Lloyd's iterations alone.

    Args:
        samples: the values and their masses, in chunks.
        start: ascending centroids, ``[count, float32]``. One without values stays.

    Returns:
        Ascending centroids, float32, on the CPU; see ``fit_centroids`` for two of them.
    """
    peak = max((value.abs().max().item() for value, _ in samples()), default=0.0)
    points = weighted_points(samples, peak)
    centroids = start.cpu().numpy().astype(np.float64)
    if len(points.position) > len(centroids):
        line = _Line(points)
        centroids = line.refine(centroids - line.origin) + line.origin
    if len(centroids) == 2:
        centroids = symmetric_pair(points, centroids)
    return torch.from_numpy(centroids.astype(np.float32))


# Histogram


@dataclass(frozen=True)
class Points:
    """Weighted points on a line: ascending positions, and positive masses."""

    position: Array
    mass: Array


def weighted_points(samples: Samples, peak: float) -> Points:
    """Reduces samples to a histogram with one point per bin in use.

    A point is at the mean of its bin, so sums over bins equal sums over values. Sums are float64
    and, on a CPU, in the order of the values whatever the number of threads.

    Args:
        samples: values and masses; read twice where few bins are in use, and each point is then
            one float32 value exactly.
        peak: the largest magnitude of all values.
    """
    bins = _Bins(peak)
    mass, moment = _accumulate(samples, bins.key, bins.count)
    used = mass.nonzero().flatten()
    if 0 < len(used) <= FEW_BINS:
        rank = torch.zeros(bins.count, dtype=torch.int32, device=mass.device)
        rank[used] = torch.arange(len(used), dtype=torch.int32, device=mass.device)

        def fine_key(value: Tensor) -> Tensor:
            low = value.view(torch.int32) & ((1 << DROPPED) - 1)
            return (rank[bins.key(value)] << DROPPED) + low

        mass, moment = _accumulate(samples, fine_key, len(used) << DROPPED)
        used = mass.nonzero().flatten()
    mass, moment = mass[used].cpu(), moment[used].cpu()
    position = (moment / mass).numpy()
    order = np.argsort(position, kind="stable")
    return Points(position[order], mass.numpy()[order])


class _Bins:
    """The histogram bin of a float32, ascending with the value."""

    def __init__(self, peak: float) -> None:
        top = int(np.float32(peak).view(np.int32)) >> DROPPED
        self.floor = max(0, top - (OCTAVES << (23 - DROPPED)))
        self.zero = top - self.floor
        self.count = 2 * self.zero + 1

    def key(self, value: Tensor) -> Tensor:
        """Returns the bin of each value, int32."""
        word = value.view(torch.int32)
        size = (((word & 0x7FFFFFFF) >> DROPPED) - self.floor).clamp_(min=0)
        return torch.where(word < 0, self.zero - size, self.zero + size)


def _accumulate(
    samples: Samples, key: Callable[[Tensor], Tensor], count: int
) -> tuple[Tensor, Tensor]:
    """Sums mass and mass * value in each of ``count`` bins."""
    mass = moment = torch.zeros(0, device="cpu")  # the result if there are no samples
    for value, weight in samples():
        index = key(value).view(-1)
        masses = torch.bincount(index, weights=weight.view(-1), minlength=count)
        moments = torch.bincount(index, weights=(weight * value).view(-1), minlength=count)
        mass, moment = (mass + masses, moment + moments) if len(mass) else (masses, moments)
    return mass, moment


# Centroids


def optimal_centroids(points: Points, count: int, guess: Array) -> Array:
    """Finds ``count`` ascending centroids of least weighted squared error.

    The result is exact if there are no more points than centroids (the last one is then repeated),
    otherwise within 0.1 % of the optimum, and never worse than ``guess :: [count]``.
    """
    if len(points.position) == 0:
        return np.zeros(count)
    if len(points.position) <= count:
        return np.pad(points.position, (0, count - len(points.position)), mode="edge")
    line = _Line(points)
    starts = [line.optimum(count), guess - line.origin]
    refined = [line.refine(start) for start in starts]
    return np.asarray(max(refined, key=line.gain) + line.origin)


def symmetric_pair(points: Points, pair: Array) -> Array:
    """Replaces two centroids by the best -c and c, if that costs at most ``SYMMETRY_LOSS``."""
    if len(points.position) <= len(pair):
        return pair
    level = np.average(np.abs(points.position), weights=points.mass)
    symmetric = np.array([-level, level])
    allowed = (1 + SYMMETRY_LOSS) * _squared_error(points, pair)
    return symmetric if _squared_error(points, symmetric) <= allowed else pair


def _squared_error(points: Points, pair: Array) -> float:
    """Sums point by point: the spread less ``_Line.gain`` would cancel for two tight clusters."""
    distance = np.minimum(np.abs(points.position - pair[0]), np.abs(points.position - pair[1]))
    return float(np.sum(points.mass * distance**2))


class _Line:
    """Prefix sums of points about their mean: the sums over any interval in two reads."""

    def __init__(self, points: Points) -> None:
        heavy = points.mass > NEGLIGIBLE * points.mass.sum()
        position, mass = points.position[heavy], points.mass[heavy]
        self.origin = float(np.average(position, weights=mass))
        self.position = position - self.origin
        moment = mass * self.position
        self.mass = np.concatenate(([0.0], np.cumsum(mass)))
        self.moment = np.concatenate(([0.0], np.cumsum(moment)))

    def optimum(self, count: int) -> Array:
        """Returns the centroids of the best partition into intervals of whole atoms."""
        if len(self.position) <= count:
            return np.pad(self.position, (0, count - len(self.position)), mode="edge")
        borders = self._atoms(min(max(MIN_ATOMS, ATOMS_PER_CENTROID * count), MAX_ATOMS))
        chosen = borders[best_partition(self.mass[borders], self.moment[borders], count)]
        mass, moment = np.diff(self.mass[chosen]), np.diff(self.moment[chosen])
        return np.asarray(moment / mass)

    def _atoms(self, count: int) -> Indices:
        """Returns borders of atoms with equal shares of the cube root of the density.

        So do the clusters of an optimal codebook (Panter and Dite 1951): each is then made of
        about as many atoms.
        """
        total = len(self.position)
        if total <= count:
            return np.arange(total + 1)
        width = np.gradient(self.position)
        share = np.cbrt(np.diff(self.mass) * width * width)
        for _ in range(LEVELLING_ROUNDS):
            share = np.minimum(share, OUTLIER_SHARE * share.sum() / count)
        share = np.cumsum(share)
        inner = np.searchsorted(share, share[-1] * np.arange(1, count) / count)
        return np.unique(np.concatenate(([0], inner, [total])))

    def refine(self, centroids: Array) -> Array:
        """Runs Lloyd's iterations; an empty cluster keeps its centroid."""
        best, clusters = centroids, self._clusters(centroids)
        gain = _gain(best, clusters)
        for _ in range(MAX_ITERATIONS):
            mass, moment = clusters
            moved = np.where(mass > 0, moment / np.where(mass > 0, mass, 1), best)
            clusters = self._clusters(moved)
            before, gain = gain, _gain(moved, clusters)
            if gain <= before:
                break
            best = moved
        return best

    def _clusters(self, centroids: Array) -> tuple[Array, Array]:
        """Returns mass and moment of the cluster of each centroid."""
        middle = (centroids[1:] + centroids[:-1]) / 2
        inner = np.searchsorted(self.position, middle, side="right")  # ties go to the lower one
        borders = np.concatenate(([0], inner, [len(self.position)]))
        return np.diff(self.mass[borders]), np.diff(self.moment[borders])

    def gain(self, centroids: Array) -> float:
        """Returns how much lower the squared error is than with every point at the mean."""
        return _gain(centroids, self._clusters(centroids))


def _gain(centroids: Array, clusters: tuple[Array, Array]) -> float:
    mass, moment = clusters
    return float(np.sum(centroids * (2 * moment - centroids * mass)))


def best_partition(mass: Array, moment: Array, count: int) -> Indices:
    """Partitions a line of atoms into ``count`` intervals of least squared error.

    Dynamic programming over the number of intervals. The best start of the last interval never
    moves left when an atom is added, so each layer is filled by divide and conquer in
    O(atoms log atoms) (Wu 1991; Grønlund et al. 2017), here all nodes of one depth at a time.

    Args:
        mass: prefix sums, ``[atoms + 1]`` with a leading zero.
        moment: likewise.
        count: fewer than there are atoms.

    Returns:
        The borders, ``[count + 1]``.
    """
    atoms = len(mass) - 1
    assert atoms > count
    gain = np.full(atoms + 1, -np.inf)
    gain[0] = 0.0
    layers = []
    for _ in range(count):
        gain, last = _layer(gain, mass, moment)
        layers.append(last)
    borders = [atoms]
    for last in reversed(layers):
        borders.append(int(last[borders[-1]]))
    return np.array(borders[::-1])


def _layer(gain: Array, mass: Array, moment: Array) -> tuple[Array, Indices]:
    """Returns the best gains with one more interval, and the start of that interval."""
    atoms = len(mass) - 1
    stride = 1 << atoms.bit_length()
    best = np.full(atoms + 1, -np.inf)
    start = np.full(2 * stride, atoms, dtype=np.intp)  # entries past the atoms set no bound
    start[0] = 0
    while stride := stride >> 1:
        ends = np.arange(stride, atoms + 1, 2 * stride)
        lowest = start[ends - stride]
        highest = np.maximum(lowest, np.minimum(start[ends + stride], ends - 1))
        best[ends], start[ends] = _best_starts(gain, mass, moment, ends, lowest, highest)
    return best, start[: atoms + 1]


def _best_starts(
    gain: Array, mass: Array, moment: Array, ends: Indices, lowest: Indices, highest: Indices
) -> tuple[Array, Indices]:
    """Returns, per end, the best gain and start from lowest to highest, the first of a tie."""
    counts = highest - lowest + 1
    offsets = np.cumsum(counts) - counts
    start = np.arange(counts.sum()) + np.repeat(lowest - offsets, counts)
    end = np.repeat(ends, counts)
    value = gain[start] + (moment[end] - moment[start]) ** 2 / (mass[end] - mass[start])
    best = np.maximum.reduceat(value, offsets)
    hits = np.flatnonzero(value == np.repeat(best, counts))
    return best, start[hits[np.searchsorted(hits, offsets)]]

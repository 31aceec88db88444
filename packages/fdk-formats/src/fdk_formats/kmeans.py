"""The best codebook of one tensor: weighted k-means on a line, to its global optimum.

In one dimension clusters are intervals, so the optimum is reachable: dynamic programming finds it
for a few hundred atoms, and Lloyd's iterations settle it on all points. Nothing is random.
See docs/decisions/0001-exact-kmeans.md for what it gains over k-means++.
"""

import numpy as np
from numpy.typing import NDArray

from fdk_formats.histogram import Array, Points

Indices = NDArray[np.intp]

# Atoms of the dynamic programming, for each centroid and at least: with 16 the error is within
# 0.1 % of the optimum before Lloyd's iterations, and 0.05 % after (up to 256 centroids).
ATOMS_PER_CENTROID = 32
MIN_ATOMS = 1024
MAX_ATOMS = 4096
# A lone outlier is one atom, however far from its neighbours; what its density would ask beyond
# that goes to the others. A little more than an even share keeps it from being merged.
LEVELLING = 20
LONE_SHARE = 1.25
MAX_ITERATIONS = 1000
NEGLIGIBLE = 1e-15  # of the whole mass: less does not show in its prefix sums
MIRRORED_LOSS = 5e-4  # of the squared error, that two centroids may lose by being -c and c


def optimal_centroids(points: Points, count: int, guess: Array) -> Array:
    """``count`` ascending centroids of least weighted squared error over the points.

    Exact where the points are no more than the centroids (the last is repeated then), otherwise
    within 0.1 % of the optimum. Never worse than the centroids of ``guess :: [count]``.
    """
    if len(points.position) == 0:
        return np.zeros(count)
    if len(points.position) <= count:
        return np.pad(points.position, (0, count - len(points.position)), mode="edge")
    line = _Line(points)
    starts = [line.optimum(count), guess - line.origin]
    settled = [line.settle(start) for start in starts]
    return np.asarray(max(settled, key=line.gain) + line.origin)


def mirrored(points: Points, pair: Array) -> Array:
    """The best of all -c and c in place of two centroids, where that costs next to nothing.

    Kernels take a bit as a sign then, without a table. ``pair`` itself where the squared error
    would be more than ``MIRRORED_LOSS`` above its own.
    """
    if len(points.position) <= len(pair):
        return pair
    level = np.average(np.abs(points.position), weights=points.mass)
    found = np.array([-level, level])
    allowed = (1 + MIRRORED_LOSS) * _squared_error(points, pair)
    return found if _squared_error(points, found) <= allowed else pair


def _squared_error(points: Points, pair: Array) -> float:
    """Weighted, summed point by point.

    As the spread less ``_Line.gain`` it is a difference of two sums, and of one that is 1e-16 of
    them, as two tight heaps leave, no digit is right.
    """
    distance = np.minimum(np.abs(points.position - pair[0]), np.abs(points.position - pair[1]))
    return float(np.sum(points.mass * distance**2))


class _Line:
    """Prefix sums of points, taken about their mean: the sums over any interval in two reads."""

    def __init__(self, points: Points) -> None:
        heavy = points.mass > NEGLIGIBLE * points.mass.sum()
        position, mass = points.position[heavy], points.mass[heavy]
        self.origin = float(np.average(position, weights=mass))
        self.position = position - self.origin
        moment = mass * self.position
        self.mass = np.concatenate(([0.0], np.cumsum(mass)))
        self.moment = np.concatenate(([0.0], np.cumsum(moment)))

    def optimum(self, count: int) -> Array:
        """Centroids of the best partition whose borders are borders of atoms."""
        if len(self.position) <= count:
            return np.pad(self.position, (0, count - len(self.position)), mode="edge")
        borders = self._atoms(min(max(MIN_ATOMS, ATOMS_PER_CENTROID * count), MAX_ATOMS))
        chosen = borders[best_partition(self.mass[borders], self.moment[borders], count)]
        mass, moment = np.diff(self.mass[chosen]), np.diff(self.moment[chosen])
        return np.asarray(moment / mass)

    def _atoms(self, count: int) -> Indices:
        """Borders of atoms that hold even shares of the cube root of the density.

        So do the clusters of an optimal codebook (Panter and Dite 1951), so that each of them is
        made of about as many atoms.
        """
        total = len(self.position)
        if total <= count:
            return np.arange(total + 1)
        width = np.gradient(self.position)
        share = np.cbrt(np.diff(self.mass) * width * width)
        for _ in range(LEVELLING):
            share = np.minimum(share, LONE_SHARE * share.sum() / count)
        share = np.cumsum(share)
        inner = np.searchsorted(share, share[-1] * np.arange(1, count) / count)
        return np.unique(np.concatenate(([0], inner, [total])))

    def settle(self, centroids: Array) -> Array:
        """Lloyd's iterations; an empty cluster keeps its centroid."""
        best, gain = centroids, self.gain(centroids)
        for _ in range(MAX_ITERATIONS):
            mass, moment = self._clusters(best)
            moved = np.where(mass > 0, moment / np.where(mass > 0, mass, 1), best)
            before, gain = gain, self.gain(moved)
            if gain <= before:
                break
            best = moved
        return best

    def _clusters(self, centroids: Array) -> tuple[Array, Array]:
        middle = (centroids[1:] + centroids[:-1]) / 2
        inner = np.searchsorted(self.position, middle, side="right")  # a tie goes down
        borders = np.concatenate(([0], inner, [len(self.position)]))
        return np.diff(self.mass[borders]), np.diff(self.moment[borders])

    def gain(self, centroids: Array) -> float:
        """How much lower the error is than with every point at the mean."""
        mass, moment = self._clusters(centroids)
        return float(np.sum(centroids * (2 * moment - centroids * mass)))


def best_partition(mass: Array, moment: Array, count: int) -> Indices:
    """Borders ``[count + 1]`` of the partition of a line into intervals of least squared error.

    ``mass`` and ``moment`` are prefix sums, ``[atoms + 1]`` with a leading zero. Dynamic
    programming over the number of intervals; the best last border never moves left when an atom
    is added, so each layer is filled by divide and conquer in O(atoms log atoms) (Wu 1991;
    Grønlund et al. 2017), here all nodes of one depth at a time.
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
    """The best gains with one more interval, and where that interval begins."""
    atoms = len(mass) - 1
    stride = 1 << atoms.bit_length()
    best = np.full(atoms + 1, -np.inf)
    start = np.full(2 * stride, atoms, dtype=np.intp)  # beyond the atoms: no bound
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
    """For each end the best start of its interval from lowest to highest, the first of a tie."""
    counts = highest - lowest + 1
    offsets = np.cumsum(counts) - counts
    start = np.arange(counts.sum()) + np.repeat(lowest - offsets, counts)
    end = np.repeat(ends, counts)
    value = gain[start] + (moment[end] - moment[start]) ** 2 / (mass[end] - mass[start])
    best = np.maximum.reduceat(value, offsets)
    hits = np.flatnonzero(value == np.repeat(best, counts))
    return best, start[hits[np.searchsorted(hits, offsets)]]

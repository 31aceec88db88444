"""k-means: optimal centroids, and the histogram they are computed from."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fdk_formats.kmeans import (
    FEW_BINS,
    SYMMETRY_LOSS,
    Points,
    best_partition,
    optimal_centroids,
    symmetric_pair,
    weighted_points,
)


def uniform(count):
    return np.linspace(-1, 1, count)


def points_of(values, mass=None):
    position, where = np.unique(values, return_inverse=True)
    return Points(position, np.bincount(where, weights=mass).astype(np.float64))


def cost(points, centroids):
    middle = (centroids[1:] + centroids[:-1]) / 2
    nearest = centroids[np.searchsorted(middle, points.position, side="left")]
    return float(np.sum(points.mass * (points.position - nearest) ** 2))


def exact_cost(points, count):
    """Computes the optimum by the O(K n^2) recurrence."""
    n = len(points.position)
    mass, first, second = (
        np.concatenate([[0], np.cumsum(points.mass * points.position**p)]) for p in range(3)
    )
    i, j = np.triu_indices(n + 1, 1)
    within = np.full((n + 1, n + 1), np.inf)
    within[i, j] = second[j] - second[i] - (first[j] - first[i]) ** 2 / (mass[j] - mass[i])
    best = np.full(n + 1, np.inf)
    best[0] = 0
    for _ in range(count):
        best = np.min(best[:, None] + within, axis=0)
    return float(best[n])


def samples_of(*chunks, masses=None):
    def samples():
        for i, chunk in enumerate(chunks):
            value = torch.tensor(chunk, dtype=torch.float32)
            mass = torch.ones(len(chunk)) if masses is None else torch.tensor(masses[i])
            yield value, mass.to(torch.float64)

    return samples


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 9)), min_size=9, max_size=40),
    st.integers(2, 8),
)
def test_best_partition_is_the_optimum(data, count):
    values, mass = np.array(data, dtype=np.float64).T
    points = points_of(values, mass)
    if len(points.position) <= count:
        return
    sums = [np.concatenate([[0], np.cumsum(points.mass * points.position**p)]) for p in (0, 1)]
    borders = best_partition(sums[0], sums[1], count)
    assert borders[0] == 0
    assert borders[-1] == len(points.position)
    assert (np.diff(borders) > 0).all()
    mass, first = np.diff(sums[0][borders]), np.diff(sums[1][borders])
    gained = np.sum(first**2 / mass)
    total = np.sum(points.mass * points.position**2)
    assert_allclose(total - gained, exact_cost(points, count), rtol=1e-9, atol=1e-9)


def shapes(n):
    rng = np.random.default_rng(7)
    normal = rng.standard_normal((n // 32, 32))
    return {
        "normal": normal.ravel(),
        "absmax": (normal / np.abs(normal).max(1, keepdims=True)).ravel(),
        "student": rng.standard_t(5, n),
        "outliers": rng.standard_cauchy(n),
        "two heaps": np.concatenate([rng.normal(-5, 0.01, n // 2), rng.normal(3, 1, n // 2)]),
        "flat": rng.uniform(-1, 1, n),
        "mostly zero": np.where(rng.random(n) < 0.9, 0, rng.standard_normal(n)),
        "far away": 1e6 + rng.standard_normal(n),
        "huge": 1e35 * rng.standard_normal(n),
    }


@pytest.mark.parametrize("name", shapes(32))
@pytest.mark.parametrize("count", [2, 4, 16, 64, 256])
def test_optimal_centroids_reach_the_optimum(name, count):
    # More points than atoms; the partition of all points is the exact optimum.
    values = shapes(6400)[name]
    points = points_of(values)
    centroids = optimal_centroids(points, count, uniform(count))
    assert (np.diff(centroids) >= 0).all()
    centred = points.position - points.position.mean()
    sums = [np.concatenate([[0], np.cumsum(points.mass * centred**p)]) for p in (0, 1)]
    if len(points.position) <= count:
        best = 0.0
    else:
        borders = best_partition(sums[0], sums[1], count)
        middle = np.diff(sums[1][borders]) / np.diff(sums[0][borders]) + points.position.mean()
        best = cost(points, middle)
    assert cost(points, centroids) <= best * 1.001


def test_optimal_centroids_with_a_thin_tail():
    # Outliers in the tail must be separate atoms.
    points, count = points_of(shapes(12800)["normal"]), 256
    mass = np.concatenate([[0], np.cumsum(points.mass)])
    moment = np.concatenate([[0], np.cumsum(points.mass * points.position)])
    borders = best_partition(mass, moment, count)
    best = np.diff(moment[borders]) / np.diff(mass[borders])
    found = optimal_centroids(points, count, uniform(count))
    assert cost(points, found) <= cost(points, best) * 1.001
    # A guess that is better than the result of the atoms is kept.
    assert cost(points, optimal_centroids(points, count, best)) <= cost(points, best) * (1 + 1e-9)


@settings(max_examples=40)
@given(st.lists(st.integers(-1000, 1000), min_size=3, max_size=60), st.integers(1, 4))
def test_optimal_centroids_of_few_points(data, bits):
    points, count = points_of(np.array(data, dtype=np.float64)), 1 << bits
    centroids = optimal_centroids(points, count, uniform(count))
    assert centroids.shape == (count,)
    assert (np.diff(centroids) >= 0).all()
    if len(points.position) <= count:
        assert set(centroids) == set(points.position)
    else:
        assert cost(points, centroids) <= exact_cost(points, count) * (1 + 1e-9) + 1e-9


def test_optimal_centroids_never_worse_than_the_guess():
    values = np.repeat(uniform(16), 40) + np.tile(np.linspace(-1e-4, 1e-4, 40), 16)
    points = points_of(values)
    guess = uniform(16)
    assert cost(points, optimal_centroids(points, 16, guess)) <= cost(points, guess)
    wild = np.sort(np.random.default_rng(0).uniform(-9, 9, 16))
    assert cost(points, optimal_centroids(points, 16, wild)) <= cost(points, guess)


@pytest.mark.parametrize("count", [16, 64])
def test_optimal_centroids_are_the_means_of_their_clusters(count):
    values = np.sort(np.random.default_rng(0).normal(size=40_000))
    centroids = optimal_centroids(points_of(values), count, uniform(count))
    codes = np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values)
    means = np.bincount(codes, weights=values) / np.bincount(codes)
    assert_allclose(centroids, means, rtol=1e-9)


def test_optimal_centroids_by_hand():
    points = Points(np.array([0.0, 1.0, 10.0, 12.0]), np.array([1.0, 3.0, 1.0, 1.0]))
    assert_allclose(optimal_centroids(points, 2, uniform(2)), [0.75, 11.0])
    nothing = Points(np.zeros(0), np.zeros(0))
    assert optimal_centroids(nothing, 4, uniform(4)).tolist() == [0.0] * 4


@settings(max_examples=60)
@given(st.integers(0, 99), st.floats(-0.1, 0.1), st.booleans())
def test_symmetric_pair_costs_next_to_nothing(seed, mean, heavy):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(2000) + mean
    points = points_of(values, rng.random(2000) if heavy else None)
    pair = optimal_centroids(points, 2, uniform(2))
    found = symmetric_pair(points, pair)
    levels = np.linspace(0.5, 1.2, 701)
    best = min(cost(points, np.array([-level, level])) for level in levels)
    if best <= (1 + SYMMETRY_LOSS) * cost(points, pair):
        assert found[0] == -found[1]
        assert cost(points, found) <= min(best, (1 + SYMMETRY_LOSS) * cost(points, pair))
    elif found is not pair:
        assert cost(points, found) <= (1 + SYMMETRY_LOSS) * cost(points, pair)


def test_symmetric_pair_by_hand():
    points = Points(np.array([-2.0, -1.0, 1.0, 3.0]), np.array([1.0, 1.0, 1.0, 1.0]))
    pair = np.array([-1.5, 2.0])  # their error is 2.5, that of -1.75 and 1.75 is 2.75
    assert symmetric_pair(points, pair) is pair
    even = Points(np.array([-2.001, -1.0, 1.0, 2.0]), np.array([1.0, 1.0, 1.0, 1.0]))
    assert_allclose(symmetric_pair(even, np.array([-1.5005, 1.5])), [-1.50025, 1.50025])
    nothing = Points(np.zeros(0), np.zeros(0))
    assert symmetric_pair(nothing, np.zeros(2)).tolist() == [0.0, 0.0]
    lone = Points(np.array([-1.0, 5.0]), np.array([1.0, 1.0]))
    assert symmetric_pair(lone, np.array([-1.0, 5.0])).tolist() == [-1.0, 5.0]
    # Two tight clusters: in units of e^2 the error is 4, that of -c and c 5, the spread 4 / e^2.
    e = 1e-9
    heaps = Points(np.array([-1 - e, -1 + e, 1, 1 + 2 * e]), np.ones(4))
    pair = np.array([-1, 1 + e])
    assert symmetric_pair(heaps, pair) is pair


def test_optimal_centroids_ignore_masses_that_vanish():
    rng = np.random.default_rng(3)
    values = rng.standard_normal(3000)
    mass = np.where(rng.random(3000) < 0.5, 1.0, 1e-40)
    kept = points_of(values[mass == 1])
    found = optimal_centroids(points_of(values, mass), 8, uniform(8))
    assert_allclose(found, optimal_centroids(kept, 8, uniform(8)), rtol=1e-9)


def test_weighted_points_of_discrete_data():
    # Values closer than a bin is wide are still separate points.
    values = [1.0, float(np.nextafter(np.float32(1), np.float32(2))), -0.25, 0.0, -0.0, 3.0]
    points = weighted_points(samples_of(values, values[:2]), peak=3.0)
    assert points.position.tolist() == [-0.25, 0.0, values[0], values[1], 3.0]
    assert points.mass.tolist() == [1.0, 2.0, 2.0, 2.0, 1.0]


def test_weighted_points_sum_masses():
    samples = samples_of([1.0, 2.0, 1.0, 5.0], masses=[[1.0, 0.5, 2.0, 0.0]])
    points = weighted_points(samples, peak=5.0)
    assert points.position.tolist() == [1.0, 2.0]
    assert points.mass.tolist() == [3.0, 0.5]


@pytest.mark.parametrize("power", [-100, -20, 0, 100])
def test_weighted_points_keep_the_sums(power):
    rng = np.random.default_rng(5)
    values = (rng.standard_normal(40000) * 2.0**power).astype(np.float32)
    values[0] *= 1000
    samples = samples_of(values[:30000].tolist(), values[30000:].tolist())
    points = weighted_points(samples, peak=float(np.abs(values).max()))
    wide = values.astype(np.float64)
    assert len(points.position) > FEW_BINS
    assert (np.diff(points.position) > 0).all()
    assert points.mass.sum() == len(values)
    assert_allclose(points.mass @ points.position, wide.sum(), rtol=1e-9)
    # A bin loses the variance inside it, 2^-28 of the square of the value.
    assert_allclose(points.mass @ points.position**2, wide @ wide, rtol=2.0**-26)


def test_weighted_points_of_nothing():
    assert len(weighted_points(samples_of(), peak=0.0).position) == 0
    assert len(weighted_points(samples_of([0.0], masses=[[0.0]]), peak=0.0).position) == 0

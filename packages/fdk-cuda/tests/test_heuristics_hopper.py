"""Plans for many rows of x on Hopper: coverage, tables, overrides, and batch invariance."""

import itertools
from dataclasses import replace

import pytest
from marlin_compile import BF16, FP32, HOPPER, SHAPES, VARIANTS

from fdk_cuda.marlin.heuristics_hopper import (
    MAX_INVARIANT_M,
    MIN_STEPS,
    HopperPlan,
    grouped_plans,
    has_table,
    hopper_cost,
    hopper_plans,
    hopper_shapes,
    plan_grouped,
    plan_hopper,
    plan_hopper_invariant,
)
from fdk_cuda.marlin.heuristics_small_m import Device
from fdk_cuda.marlin.instantiations import Variant, hopper_program
from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.marlin.tuned_overrides import hopper_overrides
from fdk_formats.format import BITS

FEW = replace(HOPPER, sm_count=6)


@pytest.mark.parametrize("bits", BITS)
def test_grouped_plans(bits):
    """Tiles cover the outputs of an expert, fit, and are wider where experts have more rows."""
    for affine, (n, k) in itertools.product((False, True), ((64, 64), (1000, 1088), (28672, 4096))):
        geometry = Geometry(bits, n, k, 64, BF16, affine)
        for plan in grouped_plans(geometry, HOPPER):
            shape = plan.shape
            assert (shape.cluster, shape.k_groups) == (1, 1)
            assert (plan.n_tiles - 1) * shape.tile_n < geometry.padded_n
            assert geometry.padded_n <= plan.n_tiles * shape.tile_n
            assert plan.shared_bytes <= HOPPER.shared_bytes
            assert geometry.padded_k % (64 * shape.k_blocks) == 0
        rows = [16, 64, 128, 1024]
        plans = [plan_grouped(geometry, 8 * each, 8, HOPPER) for each in rows]
        assert set(plans) <= set(grouped_plans(geometry, HOPPER))
        if n == 28672:
            tile_ms = [plan.shape.tile_m for plan in plans]
            assert tile_ms == sorted(tile_ms)
            assert tile_ms[0] <= 64 < 128 <= tile_ms[-1]


@pytest.mark.parametrize("bits", BITS)
def test_plans_cover_everything_once(bits):
    """Tiles cover y, whole and split ones together, and shared memory suffices."""
    for device, affine, (n, k), m in itertools.product(
        (HOPPER, FEW),
        (False, True),
        ((1, 64), (1000, 1088), (8192, 8192), (28672, 8192)),
        (17, 64, 65, 256, 1024, 5000),
    ):
        scale = FP32 if affine else BF16
        geometry = Geometry(bits, n, k, 32 if affine else 64, scale, affine)
        plans = list(hopper_plans(geometry, m, device))
        assert plan_hopper(geometry, m, device) in plans
        for plan in plans:
            shape = plan.shape
            tiles = plan.n_tiles * plan.m_tiles
            assert (
                (plan.n_tiles - 1) * shape.tile_n < geometry.padded_n <= plan.n_tiles * shape.tile_n
            )
            assert (plan.m_tiles - 1) * shape.tile_m < m <= plan.m_tiles * shape.tile_m
            box_rows = plan.box_rows(m)
            assert box_rows <= shape.tile_m
            # At most one row of padding per tile.
            assert m <= plan.m_tiles * box_rows < m + plan.m_tiles
            assert plan.shared_bytes <= device.shared_bytes
            assert plan.grid <= device.sm_count
            assert plan.grid % shape.cluster == 0
            assert geometry.padded_k % (64 * shape.k_blocks) == 0
            ways = plan.splits * shape.cluster
            assert ways == 1 or geometry.padded_k // 64 >= MIN_STEPS * ways
            if plan.splits == 1:
                assert (plan.whole_tiles, plan.partial_tiles) == (tiles, 0)
            else:
                assert plan.partial_tiles == (tiles - plan.whole_tiles) * plan.splits > 0
                # Splits follow when each block has run its whole tiles, at most one per block.
                assert plan.whole_tiles % plan.grid == 0
                assert plan.partial_tiles <= device.sm_count
            # A cluster runs one tile: its partial sums reuse the pipeline's stages.
            assert shape.cluster == 1 or plan.grid == tiles * shape.cluster


def test_predicted_cost_grows_with_m():
    """The predicted cost grows up to 512 rows."""
    for n, k in SHAPES:
        geometry = Geometry(4, n, k, 64, BF16, False)
        plans = (plan_hopper(geometry, m, HOPPER) for m in range(17, 513))
        times = [hopper_cost(geometry, plan, HOPPER) for plan in plans]
        assert all(later >= before for before, later in itertools.pairwise(times))


@pytest.mark.parametrize("row", hopper_overrides(), ids=str)
def test_overrides(row):
    """Some m use the plan of a larger m, which is faster."""
    device = HOPPER
    geometry = Geometry(row.bits, row.n, row.k, 64, BF16, row.zero_point)
    more = plan_hopper(geometry, row.plan_m, device)
    assert (more.shape.tile_m, more.shape.cluster, more.m_tiles) == (160, 1, 2)
    for m in range(row.m_first, row.m_last + 1):
        assert plan_hopper(geometry, m, device) == more
        assert more in hopper_plans(geometry, m, device)
    assert plan_hopper(geometry, row.m_first - 1, device) != more
    few = replace(device, sm_count=114)
    costs = (hopper_cost(geometry, p, few) for p in hopper_plans(geometry, row.m_first, few))
    assert hopper_cost(geometry, plan_hopper(geometry, row.m_first, few), few) == min(costs)
    affine = replace(geometry, has_zero_point=True)
    assert plan_hopper(affine, row.m_first, device).shape.tile_m == 96


@pytest.mark.parametrize(
    ("bits", "affine", "scale", "tile_m", "wanted"),
    [
        (1, False, BF16, 128, True),
        (2, False, BF16, 160, False),
        (1, True, BF16, 64, False),
        (2, False, FP32, 64, False),
        (4, True, FP32, 256, True),
        (8, True, BF16, 64, False),
        (8, False, BF16, 256, True),
    ],
)
def test_formats_with_a_table(bits, affine, scale, tile_m, wanted):
    geometry = Geometry(bits, 8192, 8192, 64, scale, affine)
    assert has_table(geometry, tile_m) == wanted
    shapes = [s for s in hopper_shapes(geometry, HOPPER) if s.tile_m == tile_m]
    assert shapes
    assert all(shape.has_table == wanted for shape in shapes)


def test_stages_are_shorter_where_long_ones_do_not_fit():
    """8 bits with a table, 128 rows of x, three consumer groups."""
    geometry = Geometry(8, 8192, 8192, 64, BF16, False)
    k_blocks = {
        (shape.tile_m, shape.consumers, shape.k_groups): shape.k_blocks
        for shape in hopper_shapes(geometry, HOPPER)
    }
    assert k_blocks[128, 3, 1] == 1
    assert k_blocks[128, 2, 1] == 2
    # Groups that share rows read a block each.
    assert k_blocks[64, 4, 2] == 2


@pytest.mark.parametrize("bits", BITS)
def test_consumer_groups(bits):
    """Three groups have 192 rows; pairs share 128 rows, with 64 rows of x only in clusters."""
    geometry = Geometry(bits, 8192, 8192, 64, BF16, False)
    shapes = hopper_shapes(geometry, HOPPER)
    assert {s.tile_n for s in shapes if s.consumers == 3} == {192}
    pairs = {(s.tile_n, s.tile_m, s.cluster) for s in shapes if s.k_groups == 2}
    assert pairs == {(128, 32, 1), (128, 32, 2), (128, 64, 2)}


def test_signs_have_no_table():
    """Without a table the pipeline has the most stages."""
    geometry = Geometry(1, 8192, 8192, 64, BF16, False, has_signs=True)
    assert not has_table(geometry, 64)
    shapes = hopper_shapes(geometry, HOPPER)
    assert {s.stages for s in shapes if s.tile_m == 64} == {8}
    for signs in (0, 1):
        other = replace(geometry, has_signs=bool(signs))
        shape = plan_hopper(other, 64, HOPPER).shape
        options = hopper_program(Variant.of(other, BF16), shape).options
        assert {f"-DSIGNS={signs}", f"-DHAS_TABLE={1 - signs}"} <= set(options)


def test_codes_of_a_grid_are_computed():
    geometry = Geometry(8, 8192, 8192, 64, BF16, False, False, 127)
    assert not has_table(geometry, 64)
    assert not any(shape.has_table for shape in hopper_shapes(geometry, HOPPER))
    options = hopper_program(VARIANTS[-2], plan_hopper(geometry, 64, HOPPER).shape)
    assert "-DGRID_ZERO_POINT=-1" in options.options
    variant = Variant.of(geometry, BF16)
    options = hopper_program(variant, plan_hopper(geometry, 64, HOPPER).shape)
    assert "-DGRID_ZERO_POINT=127" in options.options


INVARIANT_SHAPES = ((1, 64), (37, 192), (1000, 1088), (4096, 4096), (4096, 14336), (28672, 8192))
SOME_M = (*range(1, 66), 96, 97, 128, 200, 256, 257, 512, MAX_INVARIANT_M)


def units(plan: HopperPlan, stages: int) -> list[tuple[int, int, int]]:
    """Lists tile and stages of each unit of work, as tile_scheduler.cuh counts them."""
    found = []
    tiles = plan.n_tiles * plan.m_tiles
    for index in range(plan.whole_tiles + (tiles - plan.whole_tiles) * plan.splits):
        part = index - plan.whole_tiles
        tile = index if part < 0 else plan.whole_tiles + part // plan.splits
        rank, parts = (0, 1) if part < 0 else (part % plan.splits, plan.splits)
        found.append((tile, stages * rank // parts, stages * (rank + 1) // parts))
    return found


def orders(plan: HopperPlan, geometry: Geometry) -> set[tuple[tuple[int, int], ...]]:
    """Returns the ways in which tiles split k: one where all tiles agree."""
    by_tile: dict[int, list[tuple[int, int]]] = {}
    for tile, first, last in units(plan, geometry.padded_k // (64 * plan.shape.k_blocks)):
        by_tile.setdefault(tile, []).append((first, last))
    assert sorted(by_tile) == list(range(plan.n_tiles * plan.m_tiles))
    return {tuple(parts) for parts in by_tile.values()}


@pytest.mark.parametrize("device", [HOPPER, FEW], ids=["132", "6"])
@pytest.mark.parametrize(("bits", "signs"), [*((bits, False) for bits in BITS), (1, True)])
def test_invariant_plans_sum_in_one_order(bits: int, signs: bool, device: Device) -> None:
    for n, k in INVARIANT_SHAPES:
        geometry = Geometry(bits, n, k, 64, BF16, False, has_signs=signs)
        seen = set()
        for m in SOME_M:
            plan = plan_hopper_invariant(geometry, m, device)
            found = orders(plan, geometry)
            assert len(found) == 1, (plan, found)
            seen.add((plan.shape, *found))
            assert plan.shape.cluster == 1
            assert (plan.m_tiles - 1) * plan.shape.tile_m < m
            assert m <= plan.m_tiles * plan.shape.tile_m
            assert plan.grid <= device.sm_count
            assert plan.shared_bytes <= device.shared_bytes
            # Scratch for partial sums stays small.
            assert plan.partial_tiles * plan.shape.tile_n * plan.shape.tile_m * 4 <= 128 << 20
        assert len(seen) == 1, seen


def test_ordinary_plans_sum_in_several_orders() -> None:
    """Plans that are not batch-invariant differ, so the test above can fail."""
    geometry = Geometry(4, 4096, 4096, 64, BF16, False)
    seen = set()
    for m in (32, 64, 256):
        plan = plan_hopper(geometry, m, HOPPER)
        seen.add((plan.shape, frozenset(orders(plan, geometry))))
    assert len(seen) > 1

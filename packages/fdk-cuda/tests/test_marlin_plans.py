"""Plans of the Marlin kernels: each row of W_hat once, and what takes least time, as timed."""

import itertools
from dataclasses import replace

import pytest
import torch
from marlin_devices import DEVICES, check_resources

from fdk_cuda.marlin.heuristics_hopper import (
    MIN_STEPS,
    TIMED_ROWS,
    hopper_cost,
    hopper_plans,
    plan_hopper,
)
from fdk_cuda.marlin.heuristics_small_m import (
    MAX_ROWS,
    PLANES_WARPS,
    SPREAD_ROWS,
    cost,
    plan_small,
    small_plans,
    small_shapes,
    timed_cut,
)
from fdk_cuda.marlin.instantiations import Variant, small_m_program
from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.marlin.tuned_overrides import TIMED_FEW_ROWS, TIMED_PLANS
from fdk_formats.format import BITS


def check_passes(plan, geometry):
    """Passes take all rows, and only a last one that has less for all has short tiles."""
    shape, units = plan.shape, plan.grid // plan.split
    rows, tile = geometry.rows // (32 * shape.row_groups), shape.fragments // 2
    if shape.short_blocks:
        left = rows - plan.whole_passes * tile * units
        assert plan.passes == plan.whole_passes + 1
        assert plan.whole_passes > 0 or shape.by_planes
        assert 0 < shape.short_blocks < tile
        assert (shape.short_blocks - 1) * units < left <= shape.short_blocks * units
    else:
        assert plan.passes == plan.whole_passes
        assert rows % tile == 0
        assert (plan.passes - 1) * units < rows // tile <= plan.passes * units


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_plans_fit_every_device(device):
    """Every block's work is whole: tiles and stages are all taken, shared memory suffices."""
    for bits, affine, scale in itertools.product(
        BITS, (False, True), (torch.bfloat16, torch.float32)
    ):
        for (n, k), group in itertools.product(((1, 64), (4096, 4096), (28672, 8192)), (32, 64)):
            geometry = Geometry(bits, n, k, group, scale, affine)
            for m in range(1, MAX_ROWS + 1):
                plan = plan_small(geometry, torch.bfloat16, m, device)
                assert plan.shared_bytes <= device.shared_bytes
                assert plan.grid % plan.split == 0
                assert plan.grid <= device.processors
                check_passes(plan, geometry)
                stages = geometry.columns // (64 * plan.shape.k_blocks)
                warps = plan.shape.warps // plan.shape.row_groups * plan.split
                assert (plan.rounds - 1) * warps < stages <= plan.rounds * warps
                assert m <= plan.stored_columns <= 8 * plan.shape.column_tiles
                assert plan.sum_buffers > 0 or plan.passes == 1
                assert 1 << plan.log_share == plan.shape.rows * plan.stored_columns // plan.split


@pytest.mark.parametrize("bits", BITS)
def test_hopper_plans_take_everything_once(bits):
    """Tiles cover y, whole ones and parts make all of them, shared memory suffices."""
    many = DEVICES["sm_90a"]
    few = replace(many, processors=6)
    for device, affine, (n, k), m in itertools.product(
        (many, few),
        (False, True),
        ((1, 64), (1000, 1088), (8192, 8192), (28672, 8192)),
        (17, 64, 65, 256, 1024, 5000),
    ):
        scale = torch.float32 if affine else torch.bfloat16
        geometry = Geometry(bits, n, k, 32 if affine else 64, scale, affine)
        plans = list(hopper_plans(geometry, m, device))
        assert plan_hopper(geometry, m, device) in plans
        for plan in plans:
            shape = plan.shape
            tiles = plan.row_tiles * plan.column_tiles
            assert (plan.row_tiles - 1) * shape.rows < geometry.rows <= plan.row_tiles * shape.rows
            assert (plan.column_tiles - 1) * shape.columns < m <= plan.column_tiles * shape.columns
            box_rows = plan.box_rows(m)
            assert box_rows <= shape.columns
            # No more zeros than a row for each tile.
            assert m <= plan.column_tiles * box_rows < m + plan.column_tiles
            assert plan.shared_bytes <= device.shared_bytes
            assert plan.grid <= device.processors
            assert plan.grid % shape.cluster == 0
            assert geometry.columns % (64 * shape.k_blocks) == 0
            ways = plan.splits * shape.cluster
            assert ways == 1 or geometry.columns // 64 >= MIN_STEPS * ways
            if plan.splits == 1:
                assert (plan.whole_tiles, plan.parts) == (tiles, 0)
            else:
                assert plan.parts == (tiles - plan.whole_tiles) * plan.splits > 0
                # Parts come when every block has had its whole tiles, at most one to a block.
                assert plan.whole_tiles % plan.grid == 0
                assert plan.parts <= device.processors
            # A cluster takes one tile: its sums meet over the stages of the ring.
            assert shape.cluster == 1 or plan.grid == tiles * shape.cluster


def test_hopper_plans_expect_more_rows_to_cost_more():
    """Up to 512 rows, more of them are never expected to take less time."""
    for n, k in ((4096, 4096), (8192, 8192), (28672, 8192)):
        geometry = Geometry(4, n, k, 64, torch.bfloat16, False)
        device = DEVICES["sm_90a"]
        plans = (plan_hopper(geometry, m, device) for m in range(17, 513))
        times = [hopper_cost(geometry, plan, device) for plan in plans]
        assert all(later >= before for before, later in itertools.pairwise(times))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "affine"), [(torch.bfloat16, True), (torch.float16, False)])
def test_planes_spill_nothing(dtype, affine):
    """Every shape that takes a row by planes, at the most warps; and Hopper alone has them."""
    variant = Variant(1, dtype, torch.bfloat16, 1, affine)
    assert not any(s.by_planes for s in small_shapes(variant, 1, DEVICES["sm_120"]))
    assert not any(s.by_planes for s in small_shapes(variant, 2, DEVICES["sm_90a"]))
    shapes = [s for s in small_shapes(variant, 1, DEVICES["sm_90a"]) if s.by_planes]
    assert {s.warps for s in shapes} == set(PLANES_WARPS)
    for shape in shapes:
        if shape.warps == max(PLANES_WARPS):
            check_resources(small_m_program(variant, shape), "sm_90a", shape)


def test_lone_short_tiles_of_planes():
    """192 blocks of 32 rows are 64 tiles of three: clusters of two leave four processors idle."""
    geometry = Geometry(1, 6144, 6144, 64, torch.bfloat16, False)
    plans = small_plans(geometry, Variant.of(geometry, torch.bfloat16), 1, DEVICES["sm_90a"])
    plan = next(plan for plan in plans if plan.whole_passes == 0 and plan.split == 2)
    assert (plan.shape.short_blocks, plan.split, plan.grid, plan.passes) == (3, 2, 128, 1)
    check_passes(plan, geometry)


def test_hopper_plans_that_were_timed():
    """Rows of x that take the plan of more of them, which took less time (docs/kernels)."""
    device = DEVICES["sm_90a"]
    for (bits, n, k), rows in TIMED_ROWS.items():
        geometry = Geometry(bits, n, k, 64, torch.bfloat16, False)
        more = plan_hopper(geometry, rows.stop, device)
        assert (more.shape.columns, more.shape.cluster, more.column_tiles) == (160, 1, 2)
        assert all(plan_hopper(geometry, m, device) == more for m in rows)
        assert all(more in hopper_plans(geometry, m, device) for m in rows)
        assert plan_hopper(geometry, rows.start - 1, device) != more
        few = replace(device, processors=114)
        costs = (hopper_cost(geometry, p, few) for p in hopper_plans(geometry, rows.start, few))
        assert hopper_cost(geometry, plan_hopper(geometry, rows.start, few), few) == min(costs)
        affine = replace(geometry, has_zero_point=True)
        assert plan_hopper(affine, rows.start, device).shape.columns == 96


def test_long_loops_of_digits_have_enough_under_way():
    """Two plans that the model of costs would otherwise not tell apart. Hopper takes planes."""
    geometry = Geometry(1, 6144, 21504, 64, torch.bfloat16, False)
    plan = cheapest_plan(geometry, 1, replace(DEVICES["sm_90a"], is_hopper=False))
    assert (plan.shape.digit_rows, plan.shape.stage_blocks, plan.passes) == (1, 8, 2)
    check_resources(small_m_program(Variant.of(geometry, torch.bfloat16), plan.shape), "sm_90a")


@pytest.mark.parametrize(("bits", "n", "k"), TIMED_PLANS, ids=lambda value: str(value))
def test_timed_plans(bits, n, k):
    """They go before those that cost least, for one row of codebooks on 132 processors."""
    geometry = Geometry(bits, n, k, 64, torch.bfloat16, False)
    h200 = DEVICES["sm_90a"]
    for dtype in (torch.bfloat16, torch.float16):
        plan = plan_small(geometry, dtype, 1, h200)
        shape = plan.shape
        found = shape.fragments, shape.k_blocks, shape.row_groups, shape.warps, plan.split
        assert found == TIMED_PLANS[bits, n, k]
        assert plan != cheapest_plan(geometry, 1, h200)
        check_passes(plan, geometry)
        check_resources(small_m_program(Variant.of(geometry, dtype), shape), "sm_90a", shape)
    affine = Geometry(bits, n, k, 64, torch.bfloat16, True)
    fewer = replace(h200, processors=114)
    others = [(affine, 1, h200), (geometry, 2, h200), (geometry, 1, fewer)]
    if timed_cut(geometry, 2):
        others.remove((geometry, 2, h200))
    for other, m, device in others:
        assert plan_small(other, torch.bfloat16, m, device) == cheapest_plan(other, m, device)


@pytest.mark.parametrize("key", TIMED_FEW_ROWS, ids=str)
def test_timed_plans_of_few_rows(key):
    """They go before those that cost least, for as many rows as they were timed with."""
    affine, rows, bits, n, k = key
    geometry, h200 = Geometry(bits, n, k, 64, torch.bfloat16, affine), DEVICES["sm_90a"]
    served = {1: (1,), SPREAD_ROWS: range(2, SPREAD_ROWS + 1), MAX_ROWS: range(9, MAX_ROWS + 1)}
    for m in served[rows]:
        plan = plan_small(geometry, torch.bfloat16, m, h200)
        shape = plan.shape
        found = shape.fragments, shape.k_blocks, shape.row_groups, shape.warps, plan.split
        assert found == TIMED_FEW_ROWS[key]
        assert plan != cheapest_plan(geometry, m, h200)
        check_passes(plan, geometry)
    check_resources(small_m_program(Variant.of(geometry, torch.bfloat16), shape), "sm_90a", shape)
    m = SPREAD_ROWS + 1
    assert plan_small(geometry, torch.bfloat16, m, h200) == cheapest_plan(geometry, m, h200)


def test_what_was_timed_for_16_rows_is_for_codebooks_on_hopper():
    """From 5 bits on 128 rows a warp by timed plans alone; 1 bit where weights are scaled."""
    h200 = DEVICES["sm_90a"]
    for bits, device, affine in itertools.product((5, 6), DEVICES.values(), (False, True)):
        geometry = Geometry(bits, 28672, 8192, 64, torch.bfloat16, affine)
        variant = Variant.of(geometry, torch.bfloat16)
        tall = [s for s in small_shapes(variant, MAX_ROWS, device) if s.fragments == 8]
        assert bool(tall) == (device is h200 and not affine)
        assert cheapest_plan(geometry, MAX_ROWS, device).shape not in tall
    geometry = Geometry(1, 4096, 4096, 64, torch.float16, False)
    assert timed_cut(geometry, MAX_ROWS)
    assert not Variant.of(geometry, torch.bfloat16).scales_weights
    plan = plan_small(geometry, torch.bfloat16, MAX_ROWS, h200)
    assert plan == cheapest_plan(geometry, MAX_ROWS, h200)


def cheapest_plan(geometry, m, device):
    """By the model of costs."""
    plans = small_plans(geometry, Variant.of(geometry, torch.bfloat16), m, device)
    return min(plans, key=lambda plan: cost(geometry, plan))

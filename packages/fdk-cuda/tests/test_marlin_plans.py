"""Plans of the Marlin kernels: each row of W_hat once, and what takes least time, as timed."""

import itertools
from dataclasses import replace

import pytest
import torch
from marlin_devices import DEVICES, check_resources

from fdk_cuda.marlin.heuristics_hopper import (
    MIN_STEPS,
    hopper_cost,
    hopper_plans,
    plan_hopper,
)
from fdk_cuda.marlin.heuristics_small_m import (
    BITPLANE_WARPS,
    MAX_M,
    plan_small,
    small_m_cost,
    small_plans,
    small_shapes,
)
from fdk_cuda.marlin.instantiations import Variant, small_m_program
from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.marlin.tuned_overrides import hopper_overrides, small_m_override, small_m_overrides
from fdk_formats.format import BITS


def check_passes(plan, geometry):
    """Passes take all rows, and only a last one that has less for all has short tiles."""
    shape, units = plan.shape, plan.grid // plan.cluster
    rows, tile = geometry.padded_n // (32 * shape.n_groups), shape.fragments // 2
    if shape.short_blocks:
        left = rows - plan.whole_passes * tile * units
        assert plan.passes == plan.whole_passes + 1
        assert plan.whole_passes > 0 or shape.is_bitplane
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
            for m in range(1, MAX_M + 1):
                plan = plan_small(geometry, torch.bfloat16, m, device)
                assert plan.shared_bytes <= device.shared_bytes
                assert plan.grid % plan.cluster == 0
                assert plan.grid <= device.sm_count
                check_passes(plan, geometry)
                stages = geometry.padded_k // (64 * plan.shape.k_blocks)
                warps = plan.shape.warps // plan.shape.n_groups * plan.cluster
                assert (plan.rounds - 1) * warps < stages <= plan.rounds * warps
                assert m <= plan.stored_m <= 8 * plan.shape.m_tiles
                assert plan.sum_buffers > 0 or plan.passes == 1
                assert 1 << plan.log_share == plan.shape.tile_n * plan.stored_m // plan.cluster


@pytest.mark.parametrize("bits", BITS)
def test_hopper_plans_take_everything_once(bits):
    """Tiles cover y, whole ones and parts make all of them, shared memory suffices."""
    many = DEVICES["sm_90a"]
    few = replace(many, sm_count=6)
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
            tiles = plan.n_tiles * plan.m_tiles
            assert (
                (plan.n_tiles - 1) * shape.tile_n < geometry.padded_n <= plan.n_tiles * shape.tile_n
            )
            assert (plan.m_tiles - 1) * shape.tile_m < m <= plan.m_tiles * shape.tile_m
            box_rows = plan.box_rows(m)
            assert box_rows <= shape.tile_m
            # No more zeros than a row for each tile.
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
                # Parts come when every block has had its whole tiles, at most one to a block.
                assert plan.whole_tiles % plan.grid == 0
                assert plan.partial_tiles <= device.sm_count
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
    assert not any(s.is_bitplane for s in small_shapes(variant, 1, DEVICES["sm_120"]))
    assert not any(s.is_bitplane for s in small_shapes(variant, 2, DEVICES["sm_90a"]))
    shapes = [s for s in small_shapes(variant, 1, DEVICES["sm_90a"]) if s.is_bitplane]
    assert {s.warps for s in shapes} == set(BITPLANE_WARPS)
    for shape in shapes:
        if shape.warps == max(BITPLANE_WARPS):
            check_resources(small_m_program(variant, shape), "sm_90a", shape)


def test_lone_short_tiles_of_planes():
    """192 blocks of 32 rows are 64 tiles of three: clusters of two leave four SMs idle."""
    geometry = Geometry(1, 6144, 6144, 64, torch.bfloat16, False)
    plans = small_plans(geometry, Variant.of(geometry, torch.bfloat16), 1, DEVICES["sm_90a"])
    plan = next(plan for plan in plans if plan.whole_passes == 0 and plan.cluster == 2)
    assert (plan.shape.short_blocks, plan.cluster, plan.grid, plan.passes) == (3, 2, 128, 1)
    check_passes(plan, geometry)


@pytest.mark.parametrize("row", hopper_overrides(), ids=str)
def test_hopper_overrides(row):
    """Rows of x that use the plan of more of them, which took less time (docs/design/hopper.md)."""
    device = DEVICES["sm_90a"]
    geometry = Geometry(row.bits, row.n, row.k, 64, torch.bfloat16, row.zero_point)
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


def test_long_loops_of_digits_have_enough_under_way():
    """Two plans that the model of costs would otherwise not tell apart. Hopper takes planes."""
    geometry = Geometry(1, 6144, 21504, 64, torch.bfloat16, False)
    plan = cheapest_plan(geometry, 1, replace(DEVICES["sm_90a"], is_hopper=False))
    assert (plan.shape.limb_rows, plan.shape.stage_blocks, plan.passes) == (1, 8, 2)
    check_resources(small_m_program(Variant.of(geometry, torch.bfloat16), plan.shape), "sm_90a")


@pytest.mark.parametrize("row", small_m_overrides(), ids=str)
def test_small_m_overrides(row):
    """They go before the plan that costs least, for their rows of x, on a Hopper of 132 SMs."""
    geometry = Geometry(row.bits, row.n, row.k, 64, torch.bfloat16, row.zero_point)
    h200, fewer = DEVICES["sm_90a"], replace(DEVICES["sm_90a"], sm_count=114)
    for m in range(row.m_first, row.m_last + 1):
        plan = plan_small(geometry, torch.bfloat16, m, h200)
        assert plan.cut == row.cut
        assert plan != cheapest_plan(geometry, m, h200)
        check_passes(plan, geometry)
        assert plan_small(geometry, torch.bfloat16, m, fewer) == cheapest_plan(geometry, m, fewer)
    check_resources(small_m_program(Variant.of(geometry, torch.bfloat16), plan.shape), "sm_90a")
    affine = replace(geometry, has_zero_point=not row.zero_point)
    m_after = row.m_last + 1
    for other, m in ((affine, row.m_last), (geometry, m_after)):
        if m <= MAX_M and small_m_override(other, m) is None:
            assert plan_small(other, torch.bfloat16, m, h200) == cheapest_plan(other, m, h200)


def test_small_m_overrides_are_for_fp16_too():
    """Of one row of x: the plans are timed with bf16."""
    for row in small_m_overrides():
        if row.m_last == 1 and not row.zero_point:
            geometry = Geometry(row.bits, row.n, row.k, 64, torch.bfloat16, False)
            assert plan_small(geometry, torch.float16, 1, DEVICES["sm_90a"]).cut == row.cut


def test_what_was_timed_for_16_rows_is_for_codebooks_on_hopper():
    """From 5 bits on 128 rows a warp by timed plans alone; 1 bit where weights are scaled."""
    h200 = DEVICES["sm_90a"]
    for bits, device, affine in itertools.product((5, 6), DEVICES.values(), (False, True)):
        geometry = Geometry(bits, 28672, 8192, 64, torch.bfloat16, affine)
        variant = Variant.of(geometry, torch.bfloat16)
        tall = [s for s in small_shapes(variant, MAX_M, device) if s.fragments == 8]
        assert bool(tall) == (device is h200 and not affine)
        assert cheapest_plan(geometry, MAX_M, device).shape not in tall
    geometry = Geometry(1, 4096, 4096, 64, torch.float16, False)
    assert small_m_override(geometry, MAX_M)
    assert not Variant.of(geometry, torch.bfloat16).scales_weights
    plan = plan_small(geometry, torch.bfloat16, MAX_M, h200)
    assert plan == cheapest_plan(geometry, MAX_M, h200)


def cheapest_plan(geometry, m, device):
    """By the model of costs."""
    plans = small_plans(geometry, Variant.of(geometry, torch.bfloat16), m, device)
    return min(plans, key=lambda plan: small_m_cost(geometry, plan))

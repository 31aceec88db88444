"""Plans for up to 16 rows of x: each element of W_hat once, by the plan that is fastest."""

import itertools
from dataclasses import replace

import pytest
from marlin_compile import BF16, DEVICES, FP16, FP32, HOPPER, check_spills

from fdk_cuda.marlin.heuristics_small_m import (
    MAX_M,
    plan_small,
    small_m_cost,
    small_plans,
    small_shapes,
)
from fdk_cuda.marlin.instantiations import Variant, small_m_program
from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.marlin.tuned_overrides import small_m_override, small_m_overrides
from fdk_formats.format import BITS


def check_passes(plan, geometry):
    """Passes cover all rows; only a last pass with less work for every block has short tiles."""
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


def cheapest_plan(geometry, m, device):
    """Returns the plan of least predicted cost."""
    plans = small_plans(geometry, Variant.of(geometry, BF16), m, device)
    return min(plans, key=lambda plan: small_m_cost(geometry, plan))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_plans_fit_every_device(device):
    """Tiles and stages are covered once, and shared memory suffices."""
    for bits, affine, scale in itertools.product(BITS, (False, True), (BF16, FP32)):
        for (n, k), group in itertools.product(((1, 64), (4096, 4096), (28672, 8192)), (32, 64)):
            geometry = Geometry(bits, n, k, group, scale, affine)
            for m in range(1, MAX_M + 1):
                plan = plan_small(geometry, BF16, m, device)
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


@pytest.mark.parametrize(
    ("bits", "dtype", "scale", "per_row", "affine", "rows"),
    [
        (1, BF16, BF16, 1, False, (1, 4)),
        (1, BF16, FP32, 1, False, (1, 4)),
        (1, BF16, FP16, 1, True, (1, 4)),
        (1, FP16, BF16, 1, True, (1,)),
        # A product of a scale and a zero point would be rounded.
        (1, BF16, FP32, 1, True, ()),
        (1, BF16, BF16, 2, False, ()),
        (2, BF16, BF16, 1, False, ()),
        (2, BF16, FP16, 1, True, (1,)),
        (2, BF16, FP32, 1, True, ()),
        (2, FP16, BF16, 2, True, ()),
        (3, BF16, BF16, 1, True, ()),
    ],
)
def test_widths_that_use_int8_limbs(bits, dtype, scale, per_row, affine, rows):
    variant = Variant(bits, dtype, scale, per_row, affine)
    assert variant.limb_rows == rows
    for m in range(1, 9):
        chosen = {shape.limb_rows for shape in small_shapes(variant, m, HOPPER)}
        assert chosen == {0, *[r for r in rows if r >= m][:1]}


def test_bitplane_plans_of_short_tiles_alone():
    """192 blocks of 32 rows are 64 tiles of three: clusters of two leave four SMs idle."""
    geometry = Geometry(1, 6144, 6144, 64, BF16, False)
    plans = small_plans(geometry, Variant.of(geometry, BF16), 1, HOPPER)
    plan = next(plan for plan in plans if plan.whole_passes == 0 and plan.cluster == 2)
    assert (plan.shape.short_blocks, plan.cluster, plan.grid, plan.passes) == (3, 2, 128, 1)
    check_passes(plan, geometry)


def test_limbs_with_long_k_have_longer_stages():
    """The cost model prefers more bytes in flight. Hopper uses bit planes instead."""
    geometry = Geometry(1, 6144, 21504, 64, BF16, False)
    plan = cheapest_plan(geometry, 1, replace(HOPPER, is_hopper=False))
    assert (plan.shape.limb_rows, plan.shape.stage_blocks, plan.passes) == (1, 8, 2)
    check_spills(small_m_program(Variant.of(geometry, BF16), plan.shape))


@pytest.mark.parametrize("row", small_m_overrides(), ids=str)
def test_small_m_overrides(row):
    """Overrides replace the plan of least cost, for their m, on a Hopper GPU with 132 SMs."""
    geometry = Geometry(row.bits, row.n, row.k, 64, BF16, row.zero_point)
    h200, fewer = HOPPER, replace(HOPPER, sm_count=114)
    for m in range(row.m_first, row.m_last + 1):
        plan = plan_small(geometry, BF16, m, h200)
        assert plan.cut == row.cut
        assert plan != cheapest_plan(geometry, m, h200)
        check_passes(plan, geometry)
        assert plan_small(geometry, BF16, m, fewer) == cheapest_plan(geometry, m, fewer)
    check_spills(small_m_program(Variant.of(geometry, BF16), plan.shape))
    affine = replace(geometry, has_zero_point=not row.zero_point)
    m_after = row.m_last + 1
    for other, m in ((affine, row.m_last), (geometry, m_after)):
        if m <= MAX_M and small_m_override(other, m) is None:
            assert plan_small(other, BF16, m, h200) == cheapest_plan(other, m, h200)


def test_overrides_apply_to_fp16():
    """Overrides for m = 1 were timed with bf16 and apply to fp16."""
    for row in small_m_overrides():
        if row.m_last == 1 and not row.zero_point:
            geometry = Geometry(row.bits, row.n, row.k, 64, BF16, False)
            assert plan_small(geometry, FP16, 1, HOPPER).cut == row.cut


def test_overrides_for_16_rows():
    """From 5 bits on only overrides use 128 rows per warp; at 1 bit they need scaled weights."""
    h200 = HOPPER
    for bits, device, affine in itertools.product((5, 6), DEVICES.values(), (False, True)):
        geometry = Geometry(bits, 28672, 8192, 64, BF16, affine)
        variant = Variant.of(geometry, BF16)
        tall = [s for s in small_shapes(variant, MAX_M, device) if s.fragments == 8]
        assert bool(tall) == (device is h200 and not affine)
        assert cheapest_plan(geometry, MAX_M, device).shape not in tall
    geometry = Geometry(1, 4096, 4096, 64, FP16, False)
    assert small_m_override(geometry, MAX_M)
    assert not Variant.of(geometry, BF16).scales_weights
    plan = plan_small(geometry, BF16, MAX_M, h200)
    assert plan == cheapest_plan(geometry, MAX_M, h200)

"""Plans for few rows of each expert of a stack."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from marlin_compile import BF16, FP16, FP32, HOPPER, check_spills, geometry_of, variant_id

from fdk_cuda.marlin.heuristics_experts import (
    MAX_EXPERTS,
    TILE_ROWS,
    expected_tiles,
    expert_plans,
    most_pairs,
    plan_experts,
    tile_rows,
)
from fdk_cuda.marlin.instantiations import Variant, small_m_experts_program
from fdk_cuda.marlin.layout import BLOCK_K
from fdk_formats.format import BITS

ROWS = (1, TILE_ROWS)
# The plain variant, and those that need the most registers.
VARIANTS = [
    Variant(bits, *kind)
    for bits in BITS
    for kind in (
        (BF16, BF16, 1, False),
        (BF16, BF16, 1, True),
        (FP16, FP32, 2, True),
        (BF16, FP16, 2, False),
    )
]


@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_plans_fit(variant):
    """Every kind of weight has plans for all rows, and units that cover its outputs."""
    for n, k in ((64, 128), (1536, 2048), (2048, 1408), (28672, 4096)):
        geometry = geometry_of(variant, n, k)
        for rows in ROWS:
            plans = list(expert_plans(geometry, variant, rows, HOPPER))
            assert plans, (n, k, rows)
            for plan in plans:
                shape = plan.shape
                assert plan.n_units * shape.tile_n == geometry.padded_n
                assert plan.shared_bytes <= HOPPER.shared_bytes
                assert shape.warps % plan.split == 0
                # Every warp has a stage, which the pipeline counts on.
                assert plan.split <= geometry.padded_k // (BLOCK_K * shape.k_blocks)
                assert plan.rows <= (1 if shape.is_spread else TILE_ROWS)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "rows"),
    [
        (1, 2, 8, 1),
        (4, 2, 8, 8),
        (16, 2, 8, 8),
        (64, 2, 8, None),
        (4, 8, 128, 1),
        (16, 8, 128, 8),
        (64, 8, 128, 8),
        (512, 8, 128, None),
        (64, 6, 64, 8),
        (85, 6, 64, 8),
        (86, 6, 64, None),
        (512, 6, 64, None),
    ],
)
def test_rows_of_a_tile(tokens, top_k, experts, rows):
    assert tile_rows(tokens, top_k, experts) == rows


def test_expected_tiles():
    assert expected_tiles(8, 128, 1) == 8
    assert expected_tiles(1, 8, 8) == pytest.approx(1)
    # Nearly all experts are hit, and a tile has all rows of most.
    assert 120 < expected_tiles(512, 128, 8) < 132
    assert expected_tiles(512, 8, 8) == pytest.approx(68, abs=1)


def test_pairs_that_a_thread_block_sorts():
    assert most_pairs(8) > 8000
    # Few rows need no parts, but for means above 7 of the most experts.
    for experts in (128, 256, 384, MAX_EXPERTS):
        assert most_pairs(experts) > 7 * experts


def test_few_units_share_inputs():
    """One token splits the inputs over warps; many experts leave each warp its own outputs."""
    variant = Variant(4, BF16, BF16, 1, False)
    for n, k in ((1536, 2048), (2048, 768)):
        geometry = geometry_of(variant, n, k)
        one = plan_experts(geometry, BF16, 8, 128, 1, HOPPER)
        many = plan_experts(geometry, BF16, 512, 128, 8, HOPPER)
        assert one.split > 1
        assert many.split == 1


# test_every_kernel.py compiles every shape of every variant.
@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v.dtype == FP16 or v.bits == 4], ids=variant_id
)
def test_spills_nothing(variant):
    """Every shape with the most warps, hence the fewest registers, that plans give it."""
    geometry, widest = geometry_of(variant), {}
    for rows in ROWS:
        for plan in expert_plans(geometry, variant, rows, HOPPER):
            shape = plan.shape
            key = shape.fragments, shape.is_spread
            if key not in widest or shape.warps > widest[key].warps:
                widest[key] = shape
    for shape in widest.values():
        check_spills(small_m_experts_program(variant, shape))

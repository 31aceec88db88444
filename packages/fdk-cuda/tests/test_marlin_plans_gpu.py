"""Plans of the kernels for few rows on a GPU: whichever is taken, the answer is the same."""

import itertools
from dataclasses import replace

import pytest
import torch
from marlin_cases import BITS, DTYPES, FEW, pack, random_x, run_plan

from fdk_cuda.marlin.heuristics_small_m import plan_small, small_plans
from fdk_cuda.marlin.instantiations import Variant
from fdk_cuda.marlin.testing import exact_weight
from fdk_formats.testing import nrmse

pytestmark = pytest.mark.gpu


def plans_to_try(plans, *, with_short_tiles):
    """A third of the plans of each split and kernel; the splits of a shape follow one another."""
    kernels = itertools.product((1, 2, 4), (False, True), (False, True))
    for kernel in kernels:
        own = [
            p for p in plans if (p.cluster, p.shape.limb_rows > 0, p.shape.is_bitplane) == kernel
        ]
        yield from [p for p in own if p.shape.short_blocks > 0 or not with_short_tiles][::3]


# 1216 rows: short tiles that start early.
PLAN_CASES = [
    *((f"custom{bits}-g64", m, n) for bits in BITS for m in (1, 7, 16) for n in (1000, 1216)),
    *((f"custom{bits}-g64", m, 1216) for bits in BITS for m in (2, 4)),
    *((f"affine{bits}-g64", m, 1216) for bits in BITS for m in (1, 16)),
    *((f"affine1-g64-{more}", m, 1216) for more in ("zint", "fp16") for m in (1, 3)),
    *((f"affine2-g64-{more}", 1, 1216) for more in ("zint", "fp16")),
]


@pytest.mark.parametrize(("format", "m", "n"), PLAN_CASES)
def test_every_plan(format, m, n):
    """Each shape of tile, number of warps and split that a plan may have gives the same answer."""
    q, layout = pack(format, n, 1024)
    x = random_x(m, 1024)
    oracle = x.double() @ exact_weight(q, x.dtype).T
    variant = Variant.of(layout.geometry, x.dtype)
    plans = list(small_plans(layout.geometry, variant, m, FEW))
    assert any(plan.passes > 1 for plan in plans)
    tried = list(plans_to_try(plans, with_short_tiles=n == 1216))
    assert {plan.cluster for plan in tried} == {1, 2, 4}
    if n == 1000:
        assert {p.cluster for p in tried if p.shape.short_blocks == 0} == {1, 2, 4}
    if any(rows >= m for rows in variant.limb_rows):
        assert {p.cluster for p in tried if p.shape.limb_rows} == {1, 2, 4}
    for plan in tried:
        y = run_plan(layout, x, plan)
        assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(x.dtype), oracle) + 1e-5, plan


HOPPER_CASES = [
    *(("affine1-g64", m, 1216) for m in (1, 8)),
    *(("affine3-g64", m, 1216) for m in (1, 8, 16)),
    *((f"{codebook}-g64", 4, 1216) for codebook in ("affine2", "affine4", "custom2", "custom4")),
    # Whole tiles of 256 rows: short ones leave the sums no room.
    *((f"custom{bits}-g64", 16, 768) for bits in (5, 6)),
]


@pytest.mark.parametrize(("format", "m", "n"), HOPPER_CASES)
def test_tiles_and_warps_of_hopper(format, m, n):
    """Which plans give to it alone; the instructions are those of every GPU."""
    q, layout = pack(format, n, 2048)
    x = random_x(m, 2048)
    oracle = x.double() @ exact_weight(q, x.dtype).T
    variant = Variant.of(layout.geometry, x.dtype)
    plans, elsewhere = (
        set(small_plans(layout.geometry, variant, m, device))
        for device in (replace(FEW, is_hopper=True), FEW)
    )
    only_here = [p for p in plans - elsewhere if p.shape.warps >= 12 or p.shape.fragments == 8]
    assert only_here
    for plan in only_here:
        y = run_plan(layout, x, plan)
        assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(x.dtype), oracle) + 1e-5, plan


# One and two scales to a row of a block, codebooks and signs.
SCALED_FORMATS = ["custom1-g64", "custom1-g32", "custom1-row", "binary1-g64", "binary1-g32"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", SCALED_FORMATS)
def test_plans_that_scale_weights(format, dtype):
    """1 bit, 9 rows of x and more: y is that of W_hat, and W_hat itself where x has a lone 1."""
    scale = {torch.bfloat16: "", torch.float16: "-fp16"}[dtype]
    q, layout = pack(f"{format}{scale}", 1216, 1024, dtype)
    variant = Variant.of(layout.geometry, dtype)
    assert (variant.scale_dtype, variant.has_signs) == (dtype, format.startswith("binary"))
    W = q.dequantise(dtype)
    plans = list(small_plans(layout.geometry, variant, 16, replace(FEW, is_hopper=True)))
    assert all(plan.shape.scales_weights for plan in plans)
    assert {plan.cluster for plan in plans} == {1, 2, 4}
    assert any(plan.shape.short_blocks for plan in plans)
    for plan, m in itertools.product(plans[::2], (9, 16)):
        x = random_x(m, 1024, dtype=dtype)
        oracle = x.double() @ W.double().T
        y = run_plan(layout, x, plan)
        assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(dtype), oracle) + 1e-5, plan
    # All 64 columns of a block, 16 at a time, each in a block of its own.
    block = torch.arange(16, device="cuda")
    for plan, quarter in itertools.product(plans[::3], range(4)):
        columns = 64 * block + 16 * quarter + block
        lone = torch.nn.functional.one_hot(columns, 1024).to(dtype)
        assert torch.equal(run_plan(layout, lone, plan), W.T[columns]), plan


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("format", [f"custom{bits}-g64" for bits in BITS] + ["affine4-g32"])
def test_copies_of_older_gpus(format, m):
    """The path of compute capability 8, which this GPU can take too."""
    q, layout = pack(format, 1000, 1024)
    x = random_x(m, 1024)
    oracle = x.double() @ exact_weight(q, x.dtype).T
    device = replace(FEW, has_clusters=False, shared_bytes=101376)
    plan = plan_small(layout.geometry, x.dtype, m, device)
    y = run_plan(layout, x, plan, "-DFORCE_CP_ASYNC")
    assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(x.dtype), oracle) + 1e-5

"""Kernels for up to 16 rows of x on a GPU: every plan gives the same answer.

The 1-bit and affine 2-bit GEMV multiply x in fixed point, by int8 limbs or by bit planes: exact,
close and non-finite results have separate tests.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from marlin_cases import (
    BITS,
    DTYPES,
    FEW,
    FEW_HOPPER,
    check_rounded_once,
    pack,
    random_x,
    run_plan,
)

from fdk_cuda.marlin.heuristics_small_m import plan_small, small_plans
from fdk_cuda.marlin.instantiations import Variant
from fdk_cuda.marlin.runtime import device_limits
from fdk_cuda.marlin.testing import exact_weight

pytestmark = pytest.mark.gpu
BF16, FP16 = DTYPES


def plans_of(layout, dtype, m, device):
    return list(small_plans(layout.geometry, Variant.of(layout.geometry, dtype), m, device))


def some_plans(plans, *, with_short_tiles):
    """Yields a third of the plans of each cluster size and kernel."""
    for kernel in itertools.product((1, 2, 4), (False, True), (False, True)):
        own = [
            p for p in plans if (p.cluster, p.shape.limb_rows > 0, p.shape.is_bitplane) == kernel
        ]
        yield from [p for p in own if p.shape.short_blocks > 0 or not with_short_tiles][::3]


# With 1216 rows of W a block runs short tiles early.
PLAN_CASES = [
    *((f"custom{bits}-g64", m, n) for bits in BITS for m in (1, 7, 16) for n in (1000, 1216)),
    *((f"custom{bits}-g64", m, 1216) for bits in BITS for m in (2, 4)),
    *((f"affine{bits}-g64", m, 1216) for bits in BITS for m in (1, 16)),
    *((f"affine1-g64-{more}", m, 1216) for more in ("zint", "fp16") for m in (1, 3)),
    *((f"affine2-g64-{more}", 1, 1216) for more in ("zint", "fp16")),
]


@pytest.mark.parametrize(("format", "m", "n"), PLAN_CASES)
def test_plans(format, m, n):
    q, layout = pack(format, n, 1024)
    x = random_x(m, 1024)
    oracle = x.double() @ exact_weight(q, x.dtype).T
    plans = plans_of(layout, x.dtype, m, FEW)
    assert any(plan.passes > 1 for plan in plans)
    tried = list(some_plans(plans, with_short_tiles=n == 1216))
    assert {plan.cluster for plan in tried} == {1, 2, 4}
    if n == 1000:
        assert {p.cluster for p in tried if p.shape.short_blocks == 0} == {1, 2, 4}
    if any(rows >= m for rows in Variant.of(layout.geometry, x.dtype).limb_rows):
        assert {p.cluster for p in tried if p.shape.limb_rows} == {1, 2, 4}
    for plan in tried:
        check_rounded_once(run_plan(layout, x, plan), oracle, plan)


HOPPER_CASES = [
    *(("affine1-g64", m, 1216) for m in (1, 8)),
    *(("affine3-g64", m, 1216) for m in (1, 8, 16)),
    *((f"{codebook}-g64", 4, 1216) for codebook in ("affine2", "affine4", "custom2", "custom4")),
    # Whole tiles of 256 rows: with short ones the partial sums do not fit.
    *((f"custom{bits}-g64", 16, 768) for bits in (5, 6)),
]


@pytest.mark.parametrize(("format", "m", "n"), HOPPER_CASES)
def test_plans_of_hopper_alone(format, m, n):
    """Plans offered on Hopper only; their code runs on any GPU, so they are tested on this one."""
    q, layout = pack(format, n, 2048)
    x = random_x(m, 2048)
    oracle = x.double() @ exact_weight(q, x.dtype).T
    plans, elsewhere = (set(plans_of(layout, x.dtype, m, gpu)) for gpu in (FEW_HOPPER, FEW))
    only_here = [p for p in plans - elsewhere if p.shape.warps >= 12 or p.shape.fragments == 8]
    assert only_here
    for plan in only_here:
        check_rounded_once(run_plan(layout, x, plan), oracle, plan)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "format", ["custom1-g64", "custom1-g32", "custom1-row", "binary1-g64", "binary1-g32"]
)
def test_plans_that_scale_weights(format, dtype):
    """At 1 bit and m >= 9, y is the product with W_hat; one-hot x gives W_hat itself."""
    q, layout = pack(f"{format}{'-fp16' if dtype == FP16 else ''}", 1216, 1024, dtype)
    variant = Variant.of(layout.geometry, dtype)
    assert (variant.scale_dtype, variant.has_signs) == (dtype, format.startswith("binary"))
    W = q.dequantise(dtype)
    plans = plans_of(layout, dtype, 16, FEW_HOPPER)
    assert all(plan.shape.scales_weights for plan in plans)
    assert {plan.cluster for plan in plans} == {1, 2, 4}
    assert any(plan.shape.short_blocks for plan in plans)
    for plan, m in itertools.product(plans[::2], (9, 16)):
        x = random_x(m, 1024, dtype=dtype)
        check_rounded_once(run_plan(layout, x, plan), x.double() @ W.double().T, plan)
    # All 64 columns of a block, 16 at a time, each in another block.
    block = torch.arange(16, device="cuda")
    for plan, quarter in itertools.product(plans[::3], range(4)):
        columns = 64 * block + 16 * quarter + block
        one_hot = torch.nn.functional.one_hot(columns, 1024).to(dtype)
        assert torch.equal(run_plan(layout, one_hot, plan), W.T[columns]), plan


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("format", [f"custom{bits}-g64" for bits in BITS] + ["affine4-g32"])
def test_cp_async_of_older_gpus(format, m):
    """The code path of compute capability 8, forced on this GPU."""
    q, layout = pack(format, 1000, 1024)
    x = random_x(m, 1024)
    device = replace(FEW, has_clusters=False, shared_bytes=101376)
    plan = plan_small(layout.geometry, x.dtype, m, device)
    y = run_plan(layout, x, plan, "-DFORCE_CP_ASYNC")
    check_rounded_once(y, x.double() @ exact_weight(q, x.dtype).T)


def run_fixed_point(layout, x, kernel):
    """Returns y by ``limbs`` or ``bitplane``, whatever a plan would choose."""
    limits = device_limits(x.device.index)
    if kernel == "bitplane" and not limits.is_hopper:
        pytest.skip("only Hopper has the GEMV by bit planes")
    # Elsewhere 1 bit at m = 1 uses limbs.
    plans = plans_of(layout, x.dtype, len(x), replace(limits, is_hopper=kernel == "bitplane"))
    chosen = [p for p in plans if p.shape.limb_rows and p.shape.is_bitplane == (kernel != "limbs")]
    return run_plan(layout, x, chosen[0])


FIXED_POINT = [
    *(("limbs", f, BF16, m) for f in ("custom1-g64", "affine1-g64-zint") for m in (1, 2, 4)),
    *(("limbs", f, FP16, 1) for f in ("custom1-g64", "affine1-row-fp16", "affine2-row-fp16")),
    *(("limbs", f, BF16, 1) for f in ("affine2-g64-zint", "affine2-g128")),
    *(("bitplane", f, BF16, 1) for f in ("custom1-g64", "custom1-g64-fp32", "affine1-g64-zint")),
    *(("bitplane", f, FP16, 1) for f in ("custom1-g128", "affine1-row-fp16")),
]


@pytest.mark.parametrize(("kernel", "format", "dtype", "m"), FIXED_POINT, ids=str)
def test_fixed_point(kernel, format, dtype, m):
    """x is in fixed point relative to the largest of a group: exact where it fits, else close."""
    q, layout = pack(format, 4000, 2048, dtype)
    W = exact_weight(q, dtype)
    x = random_x(m, 2048, dtype=dtype)
    for scale in (1.0, 2.0**-12, 32.0):  # fp16: into subnormal numbers
        scaled = x * scale
        check_rounded_once(run_fixed_point(layout, scaled, kernel), scaled.double() @ W.T, scale)
    # An outlier costs precision in its group alone: 2^-13 to 2^-20 of it for each value.
    x[0, 100] = 1000.0
    oracle, y = x.double() @ W.T, run_fixed_point(layout, x, kernel)
    check_rounded_once(y, oracle)
    error = (y.double() - oracle).abs().amax(dim=1)
    assert (error <= oracle.abs().amax(dim=1) * torch.finfo(dtype).eps).all()
    assert not run_fixed_point(layout, torch.zeros_like(x), kernel).any()
    # A single 1 in each row, at another column: the dequantised weight, bit for bit.
    W_hat = q.dequantise(dtype)
    for column in range(0, 2048, 131 if kernel == "limbs" else 31):
        columns = [(column + 700 * row) % 2048 for row in range(m)]
        x = torch.nn.functional.one_hot(torch.tensor(columns, device="cuda"), 2048).to(dtype)
        assert torch.equal(run_fixed_point(layout, x, kernel), W_hat[:, columns].T), column
        if kernel == "bitplane":
            assert torch.equal(run_fixed_point(layout, -x, kernel), -W_hat[:, columns].T), column


@pytest.mark.parametrize(
    ("kernel", "format", "m"),
    [
        *(("limbs", format, m) for format in ("custom1-g64", "affine1-g64") for m in (1, 3)),
        ("limbs", "affine2-g64", 1),
        *(("bitplane", format, 1) for format in ("custom1-g64", "affine1-g64")),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_fixed_point_propagates_non_finite_values(value, kernel, format, m):
    """They reach their own row of x and no other."""
    layout = pack(format, 4000, 2048)[1]
    x = random_x(m, 2048)
    x[-1, 77] = value
    y = run_fixed_point(layout, x, kernel)
    assert not y[-1].isfinite().any()
    assert y[:-1].isfinite().all()


@pytest.mark.parametrize("exponent", [-106, -90, -40, 60, 120])
@pytest.mark.parametrize("format", ["custom1-g64", "affine1-g64-zint"])
def test_bitplanes_of_large_and_small_values(format, exponent):
    """2^-106 is the smallest magnitude of which the bit planes hold every bit."""
    q, layout = pack(format, 512, 1024)
    x = random_x(1, 1024) * 2.0**exponent
    y = run_fixed_point(layout, x, "bitplane")
    check_rounded_once(y, x.double() @ exact_weight(q, x.dtype).T)


@pytest.mark.parametrize("n", [192, 576, 1000, 1216])
@pytest.mark.parametrize("format", ["custom1-g64", "affine1-g64-zint"])
def test_bitplane_plans(format, n):
    """Blocks run several tiles: short ones in a last pass, and short ones alone."""
    q, layout = pack(format, n, 2304)
    x = random_x(1, 2304)
    run_fixed_point(layout, x, "bitplane")  # skips where there is no Hopper
    oracle = x.double() @ exact_weight(q, x.dtype).T
    plans = [p for p in plans_of(layout, x.dtype, 1, FEW_HOPPER) if p.shape.is_bitplane]
    assert {plan.cluster for plan in plans} == {1, 2, 4}
    for plan in plans[:: 1 if n == 192 else 2]:
        check_rounded_once(run_plan(layout, x, plan), oracle, plan)

"""Few rows of x by digits, 1 bit and affine 2: what is exact, what is close, what is not finite."""

from dataclasses import replace

import pytest
import torch
from marlin_cases import pack, random_x, run_plan

from fdk_cuda.marlin.heuristics_small_m import small_plans
from fdk_cuda.marlin.instantiations import Variant
from fdk_cuda.marlin.runtime import device_limits
from fdk_cuda.marlin.testing import exact_weight
from fdk_formats.testing import nrmse

pytestmark = pytest.mark.gpu


def run_by_digits(layout, x):
    """y by gemv_int8_limbs.cu, whatever a plan would take."""
    variant = Variant.of(layout.geometry, x.dtype)
    # Hopper takes one row of 1 bit by planes.
    limits = replace(device_limits(x.device.index), is_hopper=False)
    plans = small_plans(layout.geometry, variant, len(x), limits)
    return run_plan(layout, x, next(plan for plan in plans if plan.shape.limb_rows))


DIGIT_CASES = [
    *((f, torch.bfloat16, m) for f in ("custom1-g64", "affine1-g64-zint") for m in (1, 2, 4)),
    *((f, torch.float16, 1) for f in ("custom1-g64", "affine1-row-fp16", "affine2-row-fp16")),
    *((f, torch.bfloat16, 1) for f in ("affine2-g64-zint", "affine2-g128")),
]


@pytest.mark.parametrize(("format", "dtype", "m"), DIGIT_CASES, ids=str)
def test_by_digits(format, dtype, m):
    """x of some bits by the largest of a group: exact where it fits, close where it does not."""
    q, layout = pack(format, 4000, 2048, dtype)
    W = exact_weight(q, dtype)
    x = random_x(m, 2048, dtype=dtype)
    for scale in (1.0, 2.0**-12, 32.0):  # fp16: into subnormal numbers
        scaled = x * scale
        oracle = scaled.double() @ W.T
        limit = 1.2 * nrmse(oracle.to(dtype), oracle) + 1e-5
        assert nrmse(run_by_digits(layout, scaled), oracle) <= limit, scale
    # An outlier takes digits from its group alone: 2^-20 of it from each value, or 2^-13.
    x[0, 100] = 1000.0
    oracle, y = x.double() @ W.T, run_by_digits(layout, x)
    assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(dtype), oracle) + 1e-5
    error = (y.double() - oracle).abs().amax(dim=1)
    assert (error <= oracle.abs().amax(dim=1) * torch.finfo(dtype).eps).all()
    assert not run_by_digits(layout, torch.zeros_like(x)).any()
    # A single value in each row, one past another: the dequantised weight, bit for bit.
    W_hat = q.dequantise(dtype)
    for column in range(0, 2048, 131):
        columns = [(column + 700 * row) % 2048 for row in range(m)]
        x = torch.nn.functional.one_hot(torch.tensor(columns, device="cuda"), 2048).to(dtype)
        assert torch.equal(run_by_digits(layout, x), W_hat[:, columns].T), column


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_digits_show_what_is_not_finite(value, m):
    """In its own row of x, and in no other."""
    for format in ("custom1-g64", "affine1-g64", "affine2-g64")[: 3 if m == 1 else 2]:
        layout = pack(format, 4000, 2048)[1]
        x = random_x(m, 2048)
        x[-1, 77] = value
        y = run_by_digits(layout, x)
        assert not y[-1].isfinite().any()
        assert y[:-1].isfinite().all()

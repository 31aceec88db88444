"""One row of x by planes of bits, 1 bit: what is exact, what is close, what is not finite."""

import pytest
import torch
from marlin_cases import pack, random_x, run_plan

from fdk_cuda.marlin.heuristics_small_m import Device, small_plans
from fdk_cuda.marlin.instantiations import Variant
from fdk_cuda.marlin.runtime import device_limits
from fdk_cuda.marlin.testing import exact_weight
from fdk_formats.testing import nrmse

pytestmark = pytest.mark.gpu


def plans_by_planes(layout, dtype):
    """Those that a GPU's plan is chosen from."""
    limits = device_limits(layout.packed.device.index)
    plans = list(small_plans(layout.geometry, Variant.of(layout.geometry, dtype), 1, limits))
    if not limits.is_hopper:
        pytest.skip("only Hopper takes a row by planes")
    return [plan for plan in plans if plan.shape.is_bitplane]


CASES = [
    *((f, torch.bfloat16) for f in ("custom1-g64", "custom1-g64-fp32", "affine1-g64-zint")),
    *((f, torch.float16) for f in ("custom1-g128", "affine1-row-fp16")),
]


@pytest.mark.parametrize(("format", "dtype"), CASES, ids=str)
def test_by_planes(format, dtype):
    """x of 16 bits by the largest of a group: exact where it fits, close where it does not."""
    q, layout = pack(format, 4000, 2048, dtype)
    W = exact_weight(q, dtype)
    plan = plans_by_planes(layout, dtype)[0]
    x = random_x(1, 2048, dtype=dtype)
    for scale in (1.0, 2.0**-12, 32.0):  # fp16: into subnormal numbers
        scaled = x * scale
        oracle = scaled.double() @ W.T
        limit = 1.2 * nrmse(oracle.to(dtype), oracle) + 1e-5
        assert nrmse(run_plan(layout, scaled, plan), oracle) <= limit, scale
    # An outlier takes bits from its group alone: 2^-15 of it from each value.
    x[0, 100] = 1000.0
    oracle, y = x.double() @ W.T, run_plan(layout, x, plan)
    assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(dtype), oracle) + 1e-5
    error = (y.double() - oracle).abs().amax()
    assert error <= oracle.abs().amax() * torch.finfo(dtype).eps
    assert not run_plan(layout, torch.zeros_like(x), plan).any()
    # A single value: the dequantised weight, bit for bit.
    W_hat = q.dequantise(dtype)
    for column in range(0, 2048, 31):
        x = torch.zeros_like(x)
        x[0, column] = 1
        assert torch.equal(run_plan(layout, x, plan), W_hat[:, [column]].T), column
        assert torch.equal(run_plan(layout, -x, plan), -W_hat[:, [column]].T), column


@pytest.mark.parametrize("exponent", [-106, -90, -40, 60, 120])
@pytest.mark.parametrize("format", ["custom1-g64", "affine1-g64-zint"])
def test_planes_of_large_and_small_values(format, exponent):
    """Nor do their sums lose what the planes hold: 2^-106 is the last that has all of them."""
    q, layout = pack(format, 512, 1024)
    x = random_x(1, 1024) * 2.0**exponent
    oracle = x.double() @ exact_weight(q, x.dtype).T
    y = run_plan(layout, x, plans_by_planes(layout, x.dtype)[0])
    assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(x.dtype), oracle) + 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_planes_show_what_is_not_finite(value):
    for format in ("custom1-g64", "affine1-g64"):
        layout = pack(format, 4000, 2048)[1]
        x = random_x(1, 2048)
        x[0, 77] = value
        assert not run_plan(layout, x, plans_by_planes(layout, x.dtype)[0]).isfinite().any()


# Few SMs: several tiles to a block, short ones in a last pass and by themselves.
FEW = Device(sm_count=6, shared_bytes=232448, has_clusters=True, is_hopper=True)


@pytest.mark.parametrize("n", [192, 576, 1000, 1216])
@pytest.mark.parametrize("format", ["custom1-g64", "affine1-g64-zint"])
def test_every_plan_of_planes(format, n):
    """Each shape of tile, number of warps and split that a plan may have gives the same answer."""
    q, layout = pack(format, n, 2304)
    plans_by_planes(layout, torch.bfloat16)  # skips where there is no Hopper
    x = random_x(1, 2304)
    oracle = x.double() @ exact_weight(q, x.dtype).T
    limit = 1.2 * nrmse(oracle.to(x.dtype), oracle) + 1e-5
    variant = Variant.of(layout.geometry, x.dtype)
    plans = [p for p in small_plans(layout.geometry, variant, 1, FEW) if p.shape.is_bitplane]
    assert {plan.cluster for plan in plans} == {1, 2, 4}
    for plan in plans[:: 1 if n == 192 else 2]:
        assert nrmse(run_plan(layout, x, plan), oracle) <= limit, plan

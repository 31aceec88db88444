"""The GEMM for many rows on a Hopper GPU: conformance, every plan, awkward shapes, many runs."""

import os

import pytest
import torch
from marlin_cases import (
    BITS,
    DTYPES,
    FEW_HOPPER,
    KIT,
    ON_HOPPER,
    check,
    check_rounded_once,
    pack,
    random_x,
    repeats_bit_for_bit,
)
from torch.nn.functional import linear

from fdk_cuda.marlin import MARLIN, MARLIN_LUT
from fdk_cuda.marlin.heuristics_hopper import hopper_plans
from fdk_cuda.marlin.ops import MAX_HOPPER_ROWS, small_m_limit
from fdk_cuda.marlin.runtime import device_limits, hopper_runner, run_hopper
from fdk_formats.testing import cases, check_backend, nrmse, poisoned

pytestmark = ON_HOPPER

WIDE_FORMATS = [
    *(f"custom{bits}-g64" for bits in BITS),
    *("affine4-g32", "affine8-g128-fp32-zint", "affine8-g64-zint", "affine3-g64-fp16-zint"),
    *("binary1-g64", "binary1-g32-fp16"),
]
# Tiles with three consumer groups or pairs use the decoders of the others: compiling all takes
# minutes.
EVERY_TILE_FORMATS = WIDE_FORMATS if os.environ.get("FDK_TEST_EVERY_KERNEL") else WIDE_FORMATS[::3]


@pytest.mark.parametrize("case", list(cases(codebooks=("custom",), ms=(33,), **KIT)), ids=str)
def test_hopper_codebook_conformance(case):
    check_backend(MARLIN_LUT, case)


@pytest.mark.parametrize("case", list(cases(codebooks=("affine",), ms=(65,), **KIT)), ids=str)
def test_hopper_affine_conformance(case):
    check_backend(MARLIN, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", WIDE_FORMATS)
def test_every_hopper_plan(format, dtype):
    """Each tile, number of consumer groups and split gives the same answer, on few SMs too."""
    n, k, m = 1000, 1088, 150
    if format == "affine8-g128-fp32-zint":
        k = 1152
    q, layout = pack(format, n, k, dtype)
    x, bias = random_x(m, k, dtype=dtype), random_x(n, dtype=dtype, seed=7)
    W_hat = q.dequantise(dtype).double()
    oracle = linear(x.double(), W_hat, bias.double())
    geometry = layout.geometry
    many = device_limits(x.device.index)
    seen = set()
    for device in (FEW_HOPPER, many):
        for plan in hopper_plans(geometry, m, device):
            has_other_groups = plan.shape.consumers == 3 or plan.shape.k_groups == 2
            if has_other_groups and format not in EVERY_TILE_FORMATS:
                continue
            seen.add((plan.splits, plan.shape.cluster, plan.whole_tiles > plan.grid))
            runner = hopper_runner(geometry, dtype, m, plan, x.device.index)
            for use_bias in (bias, None):
                with poisoned():
                    y = run_hopper(runner, x, layout.packed, layout.codebook, use_bias, n)
                wanted = oracle if use_bias is not None else x.double() @ W_hat.T
                check_rounded_once(y, wanted, plan)
    assert {(1, 1, True), (1, 1, False), (2, 1, True), (3, 1, False), (1, 2, False)} <= seen


@pytest.mark.parametrize(("n", "k"), [(1, 64), (37, 96), (130, 1000), (999, 264), (64, 4104)])
@pytest.mark.parametrize("format", ["custom4-row", "custom1-row", "binary1-row", "affine3-row"])
def test_hopper_awkward_shapes(format, n, k):
    """Odd n, n below a tile, k that no step divides, x that TMA cannot read."""
    for columns in (k, k + 3):
        q, layout = pack(format, n, columns)
        bias = random_x(n, seed=3)
        for m in (17, 31, 64, 65, 130, 257):
            check(layout, q, random_x(m, columns, seed=m), bias)


@pytest.mark.parametrize("format", [*WIDE_FORMATS, "int8-g64-signmax"])
def test_hopper_decodes_exactly(format):
    """One-hot rows of x give the dequantised weight, bit for bit, at every column."""
    n, k = 200, 640
    for dtype in DTYPES:
        q, layout = pack(format, n, k, dtype)
        y = layout(torch.eye(k, dtype=dtype, device="cuda"))
        assert torch.equal(y, q.dequantise(dtype).T)


@pytest.mark.parametrize("bits", [4, 8])
def test_hopper_thousands_of_rows(bits):
    """8 bits are dequantised first from here on."""
    q, layout = pack(f"custom{bits}-g64", 1000, 1088)
    check(layout, q, random_x(MAX_HOPPER_ROWS + 1, 1088), random_x(1000, seed=2))


@pytest.mark.parametrize(
    ("format", "n"), [("affine8-g64", 8200), ("int8-g64-signmax", 8200), ("custom8-g64", 16400)]
)
def test_hopper_few_rows_of_large_weights(format, n):
    q, layout = pack(format, n, 8192)
    assert small_m_limit(str(q.format), n, 8192, 0) == 8
    W_hat = q.dequantise(torch.bfloat16).double()
    for m in (8, 9, 16):
        x, bias = random_x(m, 8192, seed=m), random_x(n, seed=2)
        oracle = linear(x.double(), W_hat, bias.double())
        for _ in range(2):  # the second call may come from the launch cache
            with poisoned():
                y = layout(x, bias)
            # Up to 8 rows the weight is not rounded.
            allowed = 2.2 if m == 8 else 1.2
            assert nrmse(y, oracle) <= allowed * nrmse(oracle.bfloat16(), oracle) + 1e-5, m


@pytest.mark.parametrize("m", [17, 64, 256, 1024])
@pytest.mark.parametrize("format", [*(f"custom{bits}-g64" for bits in BITS), "binary1-g64"])
def test_hopper_repeats_bit_for_bit(format, m):
    q, layout = pack(format, 4096, 4096)
    x = random_x(m, 4096)
    first = check(layout, q, x)
    assert repeats_bit_for_bit(lambda: layout(x), first)

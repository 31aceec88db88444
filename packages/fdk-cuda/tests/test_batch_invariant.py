"""Batch-invariant Marlin backends: a row of y does not depend on m."""

import pytest
import torch
from marlin_cases import pack, random_x
from torch.nn.functional import linear

import fdk_cuda
from fdk_cuda.marlin import marlin_backends, ops
from fdk_cuda.marlin.heuristics_hopper import INVARIANT_M
from fdk_cuda.marlin.runtime import device_limits
from fdk_formats import all_backends
from fdk_formats.format import BITS
from fdk_formats.testing import Case, cases, check_backend, nrmse, poisoned

BACKENDS = {backend.name: backend for backend in marlin_backends(batch_invariant=True)}


def test_register_backends() -> None:
    names = ("marlin", "marlin-lut", "triton")
    try:
        fdk_cuda.register_backends(batch_invariant=True)
        assert all(all_backends()[name].batch_invariant for name in names)
    finally:
        fdk_cuda.register_backends()
    assert not any(all_backends()[name].batch_invariant for name in names)


FORMATS = [
    *(f"custom{bits}-g64" for bits in BITS),
    *("affine4-g32", "affine8-g64-zint", "binary1-g64", "binary1-g32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1000, 1088), (4096, 4096), (28672, 1024)], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_do_not_depend_on_m(format: str, n: int, k: int) -> None:
    q, layout = pack(format, n, k, batch_invariant=True)
    assert layout.geometry.has_signs == format.startswith("binary")
    x, bias = random_x(3000, k), random_x(n, seed=2)
    with poisoned():
        whole = layout(x, bias)
    if device_limits(0).is_hopper:  # elsewhere the weight is not rounded
        oracle = linear(x.double(), q.dequantise(x.dtype).double(), bias.double())
        assert nrmse(whole, oracle) <= 1.2 * nrmse(oracle.to(x.dtype), oracle) + 1e-5
    for m in (*range(1, 65), 200, 256, 257, 1024, 1025):
        with poisoned():
            first, last = layout(x[:m], bias), layout(x[-m:], bias)
        assert torch.equal(first, whole[:m]), f"the first {m} rows"
        assert torch.equal(last, whole[-m:]), f"the last {m} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_rows_do_not_depend_on_m_elsewhere(format: str) -> None:
    """GPUs other than Hopper run small_m.cu, 16 rows of x at a time."""
    q, layout = pack(format, 1000, 1088, batch_invariant=True)
    arguments = layout.packed, layout.codebook, str(q.format)
    x = random_x(150, 1088)
    whole = ops.small_linear(x, *arguments, None, *q.shape, True)
    for m in (*range(1, 65), 96, 97):
        for rows in (slice(None, m), slice(-m, None)):
            y = ops.small_linear(x[rows], *arguments, None, *q.shape, True)
            assert torch.equal(y, whole[rows]), (m, rows)


INVARIANT_CASES = list(
    cases(
        bits=BITS,
        codebooks=("custom", "affine"),
        group_sizes=(32, None),
        dtypes=(torch.bfloat16, torch.float16),
        ms=(1, INVARIANT_M + 1),
        device="cuda",
    )
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", INVARIANT_CASES, ids=str)
def test_conformance(case: Case) -> None:
    check_backend(BACKENDS["marlin" if case.format.is_affine else "marlin-lut"], case)

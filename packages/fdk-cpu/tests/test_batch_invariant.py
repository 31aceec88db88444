"""Batch-invariant products: a row of y does not depend on the other rows of x."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fdk_cpu
from fdk_formats import Format, QuantisedLinear
from fdk_formats.testing import Case, check_backend

BACKEND = fdk_cpu.CpuBackend(batch_invariant=True)
# Around the widths of panels, with several blocks of W_hat in both directions, padded rows, groups
# of every kind and the rows of x that one pass takes.
MS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 24, 25, 31, 32, 33, 40, 49, 64, 65, 1030)
CASES = [
    Case(Format(codebook, bits, group), m=max(MS), n=n, k=k, dtype=dtype, seed=bits)
    for codebook, bits, group, n, k, dtype in (
        ("custom", 1, 64, 131, 2112, torch.bfloat16),
        ("custom", 2, 16, 70, 144, torch.float16),
        ("custom", 4, 64, 97, 1088, torch.bfloat16),
        ("custom", 8, 128, 50, 640, torch.float32),
        ("affine", 3, 32, 61, 4160, torch.bfloat16),
        ("affine", 7, 48, 53, 240, torch.float32),
        ("custom", 5, None, 9, 333, torch.bfloat16),
    )
]


@pytest.fixture
def registered() -> Iterator[None]:
    fdk_cpu.register_backends(batch_invariant=True)
    yield
    fdk_cpu.register_backends()


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_those_of_any_batch(isa: str, case: Case, activations: str) -> None:
    layout = BACKEND.pack(case.quantised(), dtype=case.dtype, activations=activations)
    x, bias = case.random(case.m, case.k), case.random(case.n)
    wanted = torch.cat([layout(row, bias) for row in x[:65].split(1)])
    try:
        for threads in (1, 3):
            fdk_cpu.set_num_threads(threads)
            for m in MS:
                start = max(0, min(7, 65 - m))
                y = layout(x[start : start + m], bias)
                rows = min(m, 65 - start)
                assert torch.equal(y[:rows], wanted[start : start + rows]), (m, threads)
    finally:
        fdk_cpu.set_num_threads(None)


def test_the_usual_mode_differs() -> None:
    """Shows that the test above can fail."""
    case = CASES[2]
    layout = fdk_cpu.CpuBackend().pack(case.quantised(), dtype=case.dtype)
    x = case.random(64, case.k)
    alone = torch.cat([layout(row) for row in x.split(1)])
    assert not torch.equal(layout(x), alone)


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kit(isa: str, case: Case, m: int) -> None:
    small = Case(case.format, m, case.n, case.k, case.dtype, seed=case.seed)
    check_backend(BACKEND, small)


def test_layers(registered: None) -> None:
    torch.manual_seed(0)
    layer = QuantisedLinear.from_linear(nn.Linear(256, 96), "int4-g64")
    x = torch.randn(2, 20, 256)
    with torch.no_grad():
        batch = layer(x)
        assert torch.equal(layer(x[1, 3]), batch[1, 3])
    traced = layer(x.requires_grad_())
    assert torch.equal(traced, batch)

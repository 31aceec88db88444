"""Rotating activations: the bits of torch's functions, in every instruction set."""

import pytest
import torch

import fdk_cpu
from fdk_cpu.rotation import rotate
from fdk_formats.rotation import rotate_in_torch


@pytest.fixture(params=fdk_cpu.instruction_sets())
def instruction_set(request):
    fdk_cpu.set_instruction_set(request.param)
    yield request.param
    fdk_cpu.set_instruction_set("auto")


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_torch(dtype, inverse, instruction_set):
    for rows, k in ((1, 16), (3, 32), (2, 192), (5, 384), (3, 768), (300, 512)):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(k)).to(dtype)
        block = min(k & -k, 256)
        for threads in (1, 3):
            fdk_cpu.set_num_threads(threads)
            found = rotate(x, block, inverse)
            fdk_cpu.set_num_threads(None)
            assert torch.equal(found, rotate_in_torch(x, block, inverse)), (rows, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_that_are_not_finite_spread_over_their_block(dtype, instruction_set):
    x = torch.ones(2, 48, dtype=dtype)
    x[0, 17] = torch.nan
    y = rotate(x, 16, False)
    assert y[0, 16:32].isnan().all()
    assert y[0, :16].isfinite().all()
    assert y[1].isfinite().all()


def test_left_to_torch():
    assert rotate(torch.ones(1, 16, dtype=torch.float64), 16, False) is None
    assert rotate(torch.ones(1, 24), 8, False) is None
    assert rotate(torch.ones(0, 16), 16, False).shape == (0, 16)


def test_bad_arguments():
    native, x = fdk_cpu._native, torch.ones(48)
    place = x.data_ptr(), x.nbytes
    with pytest.raises(ValueError, match="a power of two from 16 to 256, got 24"):
        native.rotate("fp32", place, 24, False, place, 1)
    with pytest.raises(ValueError, match="x, of whole blocks, must be 128 bytes, got 192"):
        native.rotate("fp32", place, 32, False, place, 1)
    with pytest.raises(ValueError, match="y must be 192 bytes, got 64"):
        native.rotate("fp32", place, 16, False, (x.data_ptr(), 64), 1)

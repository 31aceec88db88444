"""The start and the wait of Inductor's kernels; test_inductor_pdl_gpu.py runs them."""

import types

import pytest
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.utils import IndentedBuffer

from fdk_cuda.inductor import METHODS, start_kernels_early

START, WAIT = TritonKernel.GDC_LAUNCH, TritonKernel.GDC_WAIT


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    """Changes Inductor for one test."""
    for name in METHODS:
        monkeypatch.setattr(TritonKernel, name, getattr(TritonKernel, name))
    assert start_kernels_early()


def kernel(*, is_enabled=True, is_loop=False):
    """A stand-in for a kernel whose code is being generated."""
    return types.SimpleNamespace(
        GDC_LAUNCH=START,
        GDC_WAIT=WAIT,
        _enable_pdl_codegen=lambda: is_enabled,
        inside_reduction=is_loop,
        range_trees=[types.SimpleNamespace(is_loop=is_loop)],
        body=IndentedBuffer(),
    )


def lines(buffer):
    return buffer.getvalue().splitlines()


def test_wait_comes_before_every_access_and_after_the_start():
    own, code = kernel(), IndentedBuffer()
    code.writeline("xindex = xoffset + tl.arange(0, XBLOCK)")
    for access in ("tmp0 = tl.load(in_ptr0)", "tl.store(out_ptr0, tmp0)"):
        TritonKernel._handle_pdl_before_access(own, code, access)
        code.writeline(access)
        TritonKernel._handle_pdl_after_load(own, code, None)
    before = [line for line in lines(code) if line != WAIT]
    TritonKernel._filter_pdl(own, code)
    assert lines(code) == [START, WAIT, *before]


def test_wait_precedes_a_loop():
    own, loop = kernel(is_loop=True), IndentedBuffer()
    TritonKernel._handle_pdl_before_access(own, loop, "load")
    assert lines(own.body) == [WAIT]
    assert not lines(loop)


def test_nothing_changes_without_the_option():
    own, code = kernel(is_enabled=False), IndentedBuffer()
    code.writeline("tl.store(out_ptr0, 0)")
    before = lines(code)
    TritonKernel._handle_pdl_before_access(own, code, "store")
    TritonKernel._filter_pdl(own, code)
    assert lines(code) == before


def test_torch_without_these_methods_is_left_alone(monkeypatch):
    monkeypatch.delattr(TritonKernel, METHODS[-1])
    first = getattr(TritonKernel, METHODS[0])
    assert not start_kernels_early()
    assert getattr(TritonKernel, METHODS[0]) is first

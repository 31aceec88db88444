"""The kernels that dispatch_report names for each m, on emulated GPUs."""

import importlib
import importlib.util

import pytest
import torch

from fdk_cuda import dispatch_report
from fdk_cuda.marlin import ops, runtime
from fdk_cuda.marlin.heuristics_small_m import Device
from fdk_formats.backends import Problem
from fdk_formats.format import Format

BF16 = torch.bfloat16
HAS_TRITON = importlib.util.find_spec("triton") is not None
HOPPER = Device(132, 232448, has_clusters=True, is_hopper=True)
ADA = Device(142, 101376, has_clusters=False)


@pytest.fixture
def gpu(monkeypatch):
    """Returns a function that sets the GPU of the test."""

    def is_now(device, capability):
        for module in (runtime, ops):
            monkeypatch.setattr(module, "device_limits", lambda index: device)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
        forget()

    yield is_now
    forget()


def forget():
    """Clears what is cached about the GPU."""
    ops.small_m_limit.cache_clear()
    if HAS_TRITON:
        launch = importlib.import_module("fdk_cuda.triton.launch")
        launch.gpu_at.cache_clear()
        launch.can_overlap.cache_clear()


def explain(text, backend, n=4096, k=4096, device="cuda:0"):
    return dispatch_report.explain(
        Problem(Format.parse(text), n, k, BF16, torch.device(device)), backend
    )


def test_ranges():
    assert dispatch_report.ranges(lambda m: "a") == "any number a"
    assert dispatch_report.ranges(lambda m: "a" if m < 3 or m == 4 else "b") == (
        "1 to 2 a, 3 to 3 b, 4 to 4 a, from 5 b"
    )


def test_marlin_on_hopper(gpu):
    gpu(HOPPER, (9, 0))
    wide = "1 to 16 small_m, from 17 hopper_gemm"
    backward = "1 to 2048 hopper_dgrad, from 2049 dequantise + cuBLAS"
    assert explain("custom4-g64", "marlin-lut") == f"rows of x: {wide}; of dy: {backward}"
    looked_up = "1 to 16 small_m, 17 to 2048 hopper_gemm, from 2049 dequantise + cuBLAS"
    gradient = "1 to 1024 hopper_dgrad, from 1025 dequantise + cuBLAS"
    assert explain("custom8-g64", "marlin-lut") == f"rows of x: {looked_up}; of dy: {gradient}"
    # Large weights of 8 bits use hopper_gemm with nine or more rows.
    large = explain("custom8-g64", "marlin-lut", 28672, 8192)
    assert large.startswith("rows of x: 1 to 8 small_m, 9 to 2048 hopper_gemm, ")


def test_marlin_of_a_grid(gpu):
    """Both kernels are reported: most weights of int8 contain a code that needs a table."""
    gpu(HOPPER, (9, 0))
    computed = explain("int8-g64-signmax", "marlin")
    assert "255" not in computed
    assert explain("int8-g64", "marlin") == (
        f"{computed}; where a code is 255, {explain('custom8-g64', 'marlin')}"
    )


def test_marlin_elsewhere(gpu):
    gpu(ADA, (8, 9))
    assert explain("custom4-g64", "marlin-lut") == (
        "rows of x: 1 to 96 small_m, from 97 dequantise + cuBLAS; "
        "of dy: any number dequantise + cuBLAS"
    )
    assert explain("int8-g64", "marlin") == explain("custom4-g64", "marlin-lut")


def test_report_matches_the_dispatch(gpu):
    gpu(HOPPER, (9, 0))
    forward, _ = dispatch_report.marlin_choices(Format.parse("custom8-g64"), 4096, 4096, 0)
    names = {"dequantise": "dequantise + cuBLAS"}
    for m in (1, 16, 17, 2048, 2049):
        kernel = ops.kernel_for(
            m, is_hopper=True, small_m_limit=16, decodes_slowly=True, batch_invariant=False
        )
        assert forward(m) == names.get(kernel, kernel)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_triton(gpu, capability):
    gpu(ADA, capability)
    text = explain("custom5-g64", "triton")
    assert text.startswith("rows of x: 1 to 16 gemv_kernel, 17 to ")
    assert "dequantise + cuBLAS" in text.split(";")[0]
    assert "; of dy: " in text
    assert (" gemm_wgmma_kernel" in text) == (capability == (9, 0))


def test_other_backends_report_nothing():
    assert explain("custom4-g64", "cpu") == explain("custom4-g64", None) == ""
    assert explain("custom4-g64", "marlin-lut", device="cpu") == ""


def test_other_backends_do_not_query_the_gpu(monkeypatch):
    """No GPU may be present, which can be why no backend was chosen."""

    def missing():
        raise RuntimeError("no GPU")

    monkeypatch.setattr(torch.cuda, "current_device", missing)
    assert explain("custom4-g64", "torch", device="cuda") == explain(
        "custom4-g64", None, device="cuda"
    )
    assert explain("custom4-g64", None, device="cuda") == ""

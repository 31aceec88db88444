"""Weights without outputs, n = 0: empty results of the right shape, in both directions."""

from dataclasses import replace

import pytest
import torch

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, precompile
from fdk_cuda.marlin.backend import MarlinLayout
from fdk_cuda.marlin.ops import dequantise
from fdk_formats.format import Format
from fdk_formats.linear import QuantisedLinear
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing import random_quantised

FORMATS = ("custom1-g64", "custom3-g32", "int8-g64", "affine2-g128", "affine8-row-zint")
K = 384
# Both backends accept integer codebooks.
BACKENDS_OF_FORMATS = [
    (format, backend)
    for format in FORMATS
    for backend in ("auto", "marlin", "marlin-lut")
    if not format.startswith({"marlin": "custom", "marlin-lut": "affine"}.get(backend, " "))
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def empty(format: str, device: str) -> QuantisedTensor:
    q = random_quantised(Format.parse(format), 1, K).to(device)
    by_row = {name: t[:0] for name, t in q.tensors().items() if name != "codebook"}
    return replace(q, shape=(0, K), **by_row)


def empty_layout(format: str, device: str) -> MarlinLayout:
    q = empty(format, device)
    layout = (MARLIN if q.format.is_affine else MARLIN_LUT).pack(q, dtype=torch.bfloat16)
    assert isinstance(layout, MarlinLayout)
    return layout


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_packed_and_back(format: str, device: str) -> None:
    q, layout = empty(format, device), empty_layout(format, device)
    assert layout.packed.shape[:2] == (0, K // 64)
    unpacked = layout.unpack()
    assert (unpacked.format, unpacked.shape) == (q.format, (0, K))
    for name, tensor in q.tensors().items():
        found = unpacked.tensors()[name]
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_dequantised(format: str, device: str) -> None:
    """Nothing is launched, since a grid has at least one block."""
    layout = empty_layout(format, device)
    W_hat = dequantise(layout.packed, layout.codebook, format, 0, K)
    assert (W_hat.shape, W_hat.dtype, W_hat.device.type) == ((0, K), torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("format", "backend"), BACKENDS_OF_FORMATS)
def test_layers(format: str, backend: str) -> None:
    """Each shape is called twice: the second call would use a cached launch."""
    q = empty(format, "cuda")
    bias = torch.nn.Parameter(torch.empty(0, device="cuda", dtype=torch.bfloat16))
    layer = QuantisedLinear.from_quantised(q, bias=bias, backend=backend, dtype=torch.bfloat16)
    for shape in ((K,), (0, K), (1, K), (2, 3, K), (64, K), (3000, K)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            with torch.no_grad():
                assert layer(x).shape == (*shape[:-1], 0)
        leaf = x.requires_grad_()
        layer(leaf).sum().backward()
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.gpu
def test_precompile() -> None:
    assert precompile([(format, 0, K) for format in FORMATS], gradient=True) == 0

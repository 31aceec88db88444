"""The reference weights for answers of the Marlin kernels."""

from dataclasses import replace

import pytest
import torch

from fdk_cuda.marlin.instantiations import TileShape
from fdk_cuda.marlin.testing import exact_weight, multiplied_weight
from fdk_formats.format import Format
from fdk_formats.packing import pack
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing import random_quantised

SHAPE = TileShape(4, 2, 1, 2, 16)


def test_exact_weight_by_hand():
    q = QuantisedTensor(
        format=Format("custom", 1, 16),
        shape=(1, 32),
        packed=pack(torch.tensor([[0] * 16 + [1] * 16], dtype=torch.uint8), 1),
        scale=torch.tensor([[3.0, 1.0078125]], dtype=torch.bfloat16),
        codebook=torch.tensor([-2.0, 1.0078125]),
    )
    # 1.0078125 squared has 15 bits: bf16 would round it.
    wanted = [-6.0] * 16 + [1.01568603515625] * 16
    assert exact_weight(q, torch.bfloat16).tolist() == [wanted]


@pytest.mark.parametrize("scales", ["bf16", "fp32", "e8m0"])
@pytest.mark.parametrize("format", ["custom4-g32", "affine3-g32-zint", "affine2-g32"])
def test_exact_weight_rounds_to_the_dequantised_weight(format, scales):
    q = random_quantised(replace(Format.parse(format), scale_dtype=scales), 24, 96)
    exact = exact_weight(q, torch.float32)
    torch.testing.assert_close(exact.float(), q.dequantise(torch.float32), rtol=2**-22, atol=0)


def test_multiplied_weight():
    q = random_quantised(Format.parse("custom1-g64"), 24, 128)
    rounded, exact = q.dequantise(torch.bfloat16).double(), exact_weight(q, torch.bfloat16)
    assert not torch.equal(rounded, exact)
    for shape, wanted in (
        (None, rounded),
        (SHAPE, exact),
        (replace(SHAPE, scales_weights=True), rounded),
    ):
        assert torch.equal(multiplied_weight(q, torch.bfloat16, shape), wanted)

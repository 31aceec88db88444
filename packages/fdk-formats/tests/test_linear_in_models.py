"""Quantised layers called as nn.Linear is."""

import pytest
import torch
from torch import nn

from fdk_formats import QuantisedLinear


def layer(n=24, k=64, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    made = QuantisedLinear.from_linear(
        nn.Linear(k, n).to(dtype), "int8-g32", backend="reference", **settings
    )
    return made


def test_input_by_keyword():
    x = torch.randn(3, 64)
    assert torch.equal(layer()(input=x), layer()(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_as_nn_linear(dtype, x_dtype, bias_dtype):
    quantised, x = layer(dtype=torch.bfloat16), torch.randn(3, 64, dtype=x_dtype)
    quantised.bias.data = quantised.bias.data.to(bias_dtype)
    plain = nn.Linear(64, 24)
    plain.weight = nn.Parameter(quantised.dequantise(dtype), requires_grad=False)
    plain.bias = nn.Parameter(quantised.bias.detach().clone())
    with torch.autocast("cpu", dtype):
        y, wanted = quantised(x), plain(x)
    assert y.dtype == wanted.dtype == dtype
    assert torch.equal(y, wanted)
    y.float().sum().backward()
    assert quantised.bias.grad.dtype == bias_dtype

"""Tensors that autograd keeps of a layer whose parameters are replaced at each call."""

import weakref

import torch
from torch import nn

from fdk_formats import QuantisedLinear


def test_saved_tensors_are_canonical():
    """A layer whose parameters are replaced at each call saves no layout for backward."""
    torch.manual_seed(0)
    layer = QuantisedLinear.from_linear(nn.Linear(64, 24), "int4-g32", backend="reference")
    wanted = layer.dequantise()
    tensors = layer.quantised.tensors()
    for name, tensor in tensors.items():
        replaced = nn.Parameter(tensor.clone(), requires_grad=False)
        layer._parameters[f"weight_{name}"] = replaced
    given = torch.randn(3, 64, requires_grad=True)
    y = layer(given)
    layout = weakref.ref(layer.stored.layout)
    assert layout() is not None
    for name, tensor in tensors.items():
        layer._parameters[f"weight_{name}"] = nn.Parameter(tensor, requires_grad=False)
    assert layout() is None
    y.sum().backward()
    torch.testing.assert_close(given.grad, torch.ones(3, 24) @ wanted)

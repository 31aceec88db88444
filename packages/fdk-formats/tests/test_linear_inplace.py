"""In-place operations on a layer's output, which ``nn.Linear`` allows."""

import pytest
import torch
from torch import nn

from fdk_formats import QuantisedLinear, fuse_layers, quantise_model

INPUTS = {
    "vector": lambda: torch.randn(64),
    "rows": lambda: torch.randn(3, 64),
    "3-D": lambda: torch.randn(2, 3, 64),
    "4-D": lambda: torch.randn(2, 1, 3, 64),
    "no rows": lambda: torch.randn(2, 0, 64),
    "transposed": lambda: torch.randn(64, 3).t(),
    "strided": lambda: torch.randn(2, 3, 128)[..., ::2],
    "permuted": lambda: torch.randn(3, 2, 64).transpose(0, 1),
    "expanded": lambda: torch.randn(1, 1, 64).expand(2, 3, 64),
}


def source(bias=True):
    torch.manual_seed(0)
    return nn.Linear(64, 24, bias=bias)


def dequantised(quantised):
    """Returns an nn.Linear with the weight of a quantised layer."""
    linear = nn.Linear(64, 24)
    linear.weight = nn.Parameter(quantised.dequantise().float(), requires_grad=False)
    linear.bias = nn.Parameter(quantised.bias.detach().clone())
    return linear


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_output_can_be_changed_in_place(make, activations, needs_grad, backend):
    quantised = QuantisedLinear.from_linear(
        source(), "int4-g32", backend=backend, activations=activations
    )
    x = make().requires_grad_(needs_grad)
    for _ in range(2):  # packs, then is packed
        wanted = quantised(x).relu()
        y = torch.relu_(quantised(x))
        assert torch.equal(y, wanted)
        y = quantised(x)
        y += 1
        y *= 2
        y[..., 0] = 0
        y.zero_()
    if needs_grad:
        grads = [
            torch.autograd.grad(f(quantised(x)).sum(), x)[0] for f in (torch.relu, torch.relu_)
        ]
        assert torch.equal(*grads)


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_under_autocast(make, backend):
    quantised = QuantisedLinear.from_linear(source(), "int4-g32", backend=backend)
    model = nn.Sequential(quantised, nn.ReLU(inplace=True))
    x = make().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        wanted = quantised(x).relu()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, wanted)
    y.float().sum().backward()
    assert x.grad.shape == x.shape


def test_under_create_graph(backend):
    quantised = QuantisedLinear.from_linear(source(), "int4-g32", backend=backend)
    plain = dequantised(quantised)
    found = []
    for linear in (quantised, plain):
        torch.manual_seed(1)
        x = torch.randn(2, 3, 64, requires_grad=True)
        y = linear(x).pow(3)
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        dx.mul_(2)  # as gradient clipping does
        found.append(torch.autograd.grad(dx.pow(2).sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_without_gradients(make, backend, no_grad):
    quantised = QuantisedLinear.from_linear(source(), "int4-g32", backend=backend)
    with no_grad():
        x = make()
        wanted = quantised(x) + 1
        y = quantised(x)
        y += 1
    assert torch.equal(y, wanted)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 24), nn.Linear(64, 24, bias=False)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return nn.functional.silu(gate, inplace=True).mul_(up)


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_fused_layers(shape, needs_grad, backend):
    torch.manual_seed(0)
    model = quantise_model(Gated(), "int4-g32", backend=backend, progress=False)
    x = torch.randn(shape)
    wanted = model(x)
    assert fuse_layers(model) == [("gate_proj", "up_proj")]
    x.requires_grad_(needs_grad)
    torch.testing.assert_close(model(x), wanted)
    if needs_grad:
        model(x).sum().backward()
        assert x.grad.isfinite().all()


def test_the_example_of_relu(backend):
    source = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True))
    model = quantise_model(source, "int4-g64", backend=backend, progress=False)
    assert (model(torch.randn(2, 3, 64)) >= 0).all()


def test_fused_layers_can_be_changed_in_place_one_after_another(backend):
    class Projections(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(64, 64), nn.Linear(64, 32)

        def forward(self, x):
            return self.gate_proj(x).relu_(), self.up_proj(x).mul_(2)  # relu_ saves its result

    torch.manual_seed(0)
    source, x = Projections(), torch.randn(2, 3, 64, requires_grad=True)
    gradients = []
    for fuse in (False, True):
        model = quantise_model(source, "int4-g64", backend=backend, fuse=fuse, progress=False)
        model(x.detach())
        gradients.append(torch.autograd.grad(sum(y.sum() for y in model(x)), x)[0])
    torch.testing.assert_close(*gradients)

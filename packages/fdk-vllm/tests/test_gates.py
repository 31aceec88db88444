"""Gates of experts against their formulas in float64."""

import pytest
import torch

from fdk_vllm.gates import Gate, gate_of, swiglu

X = torch.linspace(-20, 20, 64).view(4, 16)


def clamped(gate, up, limit, alpha, beta):
    gate, up = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    return gate / (1 + (-alpha * gate).exp()) * (up + beta)


def gelu(gate):
    return gate.double() * (1 + torch.erf(gate.double() / 2**0.5)) / 2


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("silu", None, None, None), clamped(X[:, :8], X[:, 8:], 1e9, 1, 0)),
        (("silu", 2.0, None, None), clamped(X[:, :8], X[:, 8:], 2, 1, 0)),
        (("swigluoai_uninterleave", 3.0, 1.5, 1.0), clamped(X[:, :8], X[:, 8:], 3, 1.5, 1)),
        (("swigluoai", None, None, None), clamped(X[:, ::2], X[:, 1::2], 7, 1.702, 1)),
        (("gelu", None, None, None), gelu(X[:, :8]) * X[:, 8:]),
        (("silu_no_mul", None, None, None), X.double() / (1 + (-X.double()).exp())),
        (("gelu_no_mul", None, None, None), gelu(X)),
        (("relu2_no_mul", None, None, None), X.double().clamp(min=0) ** 2),
    ],
)
def test_formulas(arguments, wanted):
    torch.testing.assert_close(gate_of(*arguments)(X).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu_tanh_no_mul"])
def test_tanh_is_near_the_exact_gelu(name):
    gate = gate_of(name, None, None, None)
    exact = gate_of(name.replace("_tanh", ""), None, None, None)
    torch.testing.assert_close(gate(X), exact(X), rtol=1e-2, atol=2e-2)
    assert not torch.equal(gate(X), exact(X))


def test_gates_and_values_may_come_apart():
    assert torch.equal(Gate("first", None)(X[:, :8], X[:, 8:]), swiglu(X[:, :8], X[:, 8:]))


def test_dtype_is_that_of_the_parts():
    assert gate_of("silu", 2.0, None, None)(X.bfloat16()).dtype == torch.bfloat16


def test_unknown_gates_are_refused():
    with pytest.raises(ValueError, match=r"fdk computes experts with silu, .*, got situ: leave"):
        gate_of("situ", None, None, None)

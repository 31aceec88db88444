"""Products with stacks that are not packed: values, gradients, errors."""

import pytest
import torch
from torch import nn
from torch.library import opcheck

from fdk_formats.expert_linear import expert_linear


def case(dtype=torch.float64, *, shared=True):
    torch.manual_seed(0)
    x = torch.randn(5, 8, dtype=dtype) if shared else torch.randn(5, 2, 8, dtype=dtype)
    # Expert 2 gets no token, and a pair has no expert.
    ids = torch.tensor([[0, 1], [1, 3], [3, 3], [0, -1], [1, 0]])
    return x, ids, torch.randn(4, 6, 8, dtype=dtype), torch.randn(4, 6, dtype=dtype)


def looped(x, ids, weight, bias):
    """Computes the products pair by pair."""
    rows = []
    for token, own in enumerate(ids.tolist()):
        for place, expert in enumerate(own):
            row = x[token] if x.ndim == 2 else x[token, place]
            y = nn.functional.linear(row, weight[expert], None if bias is None else bias[expert])
            rows.append(y if expert >= 0 else torch.zeros_like(y))
    return torch.stack(rows).view(*ids.shape, -1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_of_two_orders(shared, has_bias):
    x, ids, weight, bias = case(shared=shared)
    bias = bias if has_bias else None
    torch.testing.assert_close(expert_linear(x, ids, weight, bias), looped(x, ids, weight, bias))
    given = [each.requires_grad_() for each in (x, weight, *([bias] if has_bias else []))]

    def function(x, weight, bias=None):
        return expert_linear(x, ids, weight, bias)

    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


def test_opcheck():
    x, ids, weight, bias = case(torch.float32)
    op = torch.ops.fdk_formats.expert_linear.default
    opcheck(op, (x.requires_grad_(), ids, weight.requires_grad_(), bias.requires_grad_()))
    grad = torch.ops.fdk_formats.expert_linear_grad_weight.default
    opcheck(grad, (torch.randn(5, 2, 6).requires_grad_(), x, ids, 4))


def test_no_tokens():
    x, ids, weight, bias = case()
    weight.requires_grad_()
    expert_linear(x[:0], ids[:0], weight, bias).sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_experts_are_cast_where_they_are_used():
    x, ids, weight, bias = case(torch.bfloat16)
    weight.requires_grad_()
    wide = weight.detach().float().requires_grad_()
    y, narrow = expert_linear(x, ids, wide, bias), expert_linear(x, ids, weight, bias)
    assert torch.equal(y, narrow)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), wide)
    (expected,) = torch.autograd.grad(narrow.float().square().sum(), weight)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, expected.float())


def test_arguments_that_do_not_fit():
    x, ids, weight, bias = case(torch.float32)
    with pytest.raises(TypeError, match=r"weight must be floating, got torch\.int64"):
        expert_linear(x, ids, weight.long(), bias)
    with pytest.raises(ValueError, match=r"weight must be \[experts, n, k\], got \["):
        expert_linear(x, ids, weight[0], bias)
    with pytest.raises(ValueError, match="expert_ids must be 0 to 3, or -1 for none, got -1 to 4"):
        expert_linear(x, ids.where(ids < 3, 4), weight, bias)
    with pytest.raises(ValueError, match=r"bias must be torch\.float32 \[4, 6\], got .* \[6\]"):
        expert_linear(x, ids, weight, bias[0])

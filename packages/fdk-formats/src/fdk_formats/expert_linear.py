"""Products of tokens with the experts of a stack in 16 or 32 bits, with gradients of the stack.

``expert_linear`` is one op of torch, so that torch.compile does not trace into the loop over
experts, whose sizes depend on the router. It is linear in x and in the stack, and the gradient of
each is such a product again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from fdk_formats.expert_ops import (
    check_arguments,
    check_range,
    expert_products,
    grad_bias,
    rows_of_pairs,
    tokens_of_experts,
)
from fdk_formats.ops import define_op, no_autocast

NAME = "expert_linear"


def expert_linear(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``y[t, j] = x @ weight[e].T + bias[e]`` with ``e = expert_ids[t, j]``.

    x, weight and bias have gradients, of any order.

    Args:
        x: ``[t, k]``, where each token goes to all its experts, or ``[t, top_k, k]``.
        expert_ids: ``[t, top_k]``, int32 or int64; -1 for no expert, whose y is zero.
        weight: ``[experts, n, k]``, floating; of another dtype than x, an expert at a time is cast.
        bias: ``[experts, n]`` in the dtype of x, or None.

    Returns:
        ``[t, top_k, n]`` in the dtype of x.

    Raises:
        TypeError: if x or weight is not floating, the ids are not integers, or the dtypes differ.
        ValueError: if the shapes or devices do not fit, or (on a CPU) an id is out of range.
    """
    y: Tensor = _op(x, expert_ids, weight, bias)
    return y


def _check(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not weight.is_floating_point():
        raise TypeError(f"{NAME}: weight must be floating, got {weight.dtype}")
    if weight.ndim != 3:
        raise ValueError(f"{NAME}: weight must be [experts, n, k], got {list(weight.shape)}")
    check_arguments(NAME, x, expert_ids, weight, bias, None, *weight.shape)


def _run(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, expert_ids, weight, bias)
    check_range(NAME, expert_ids, len(weight))
    with no_autocast(x.device.type):
        return expert_products(
            x, expert_ids, lambda expert: weight[expert].to(x.dtype), bias, weight.shape
        )


def _fake(x: Tensor, expert_ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, expert_ids, weight, bias)
    return x.new_empty((*expert_ids.shape, weight.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, expert_ids, weight, bias = inputs
    needs_x, _, needs_weight, *_ = ctx.needs_input_grad
    ctx.is_shared, ctx.experts, ctx.weight_dtype = x.ndim == 2, len(weight), weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(expert_ids, x if needs_weight else None, weight if needs_x else None)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    expert_ids, x, weight = ctx.saved_tensors
    dx = d_weight = d_bias = None
    if ctx.needs_input_grad[0]:
        dx = _op(grad_y, expert_ids, weight.transpose(1, 2), None)
        dx = dx.sum(1) if ctx.is_shared else dx
    if ctx.needs_input_grad[2]:
        d_weight = _grad_weight_op(grad_y, x, expert_ids, ctx.experts).to(ctx.weight_dtype)
    if ctx.needs_input_grad[3]:
        d_bias = grad_bias(grad_y, expert_ids, ctx.experts).to(ctx.bias_dtype)
    return dx, None, d_weight, d_bias


def _run_grad_weight(
    grad_y: Tensor,  # [t, top_k, n, dtype]
    x: Tensor,  # [t, k, dtype] or [t, top_k, k]
    expert_ids: Tensor,  # [t, top_k]
    experts: int,
) -> Tensor:
    """Computes ``sum of grad_y[t, j] x[t, j].T`` over the pairs of each expert: [experts, n, k]."""
    n, k = grad_y.shape[-1], x.shape[-1]
    grads, rows = grad_y.reshape(-1, n), rows_of_pairs(x, expert_ids)
    result = x.new_zeros(experts, n, k)
    with no_autocast(x.device.type):
        for expert, own in tokens_of_experts(expert_ids, experts):
            torch.mm(grads[own].t(), rows[own], out=result[expert])
    return result


def _fake_grad_weight(grad_y: Tensor, x: Tensor, expert_ids: Tensor, experts: int) -> Tensor:
    return x.new_empty((experts, grad_y.shape[-1], x.shape[-1]))


def _setup_grad_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad_y, x, expert_ids, _ = inputs
    ctx.save_for_backward(grad_y, x, expert_ids)


def _backward_grad_weight(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
    grad_y, x, expert_ids = ctx.saved_tensors
    d_grad = dx = None
    if ctx.needs_input_grad[0]:
        d_grad = _op(x, expert_ids, change, None)
    if ctx.needs_input_grad[1]:
        dx = _op(grad_y, expert_ids, change.transpose(1, 2), None)
        dx = dx.sum(1) if x.ndim == 2 else dx
    return d_grad, dx, None, None


_library = Library("fdk_formats", "FRAGMENT")
_op = define_op(
    _library,
    f"{NAME}(Tensor x, Tensor expert_ids, Tensor weight, Tensor? bias) -> Tensor",
    run=_run,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_grad_weight_op = define_op(
    _library,
    f"{NAME}_grad_weight(Tensor grad_y, Tensor x, Tensor expert_ids, int experts) -> Tensor",
    run=_run_grad_weight,
    fake=_fake_grad_weight,
    backward=_backward_grad_weight,
    setup_context=_setup_grad_weight,
)

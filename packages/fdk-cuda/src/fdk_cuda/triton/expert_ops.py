"""The ``fdk_cuda::triton_expert_linear`` op with its gradient, and the MLP of experts."""

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from fdk_cuda.triton import launch
from fdk_cuda.triton.configs.experts import (
    ExpertConfig,
    expert_config,
    invariant_config,
    max_gemv_tokens,
)
from fdk_cuda.triton.expert_launch import (
    Routing,
    expert_dgrad,
    expert_linear,
    expert_reduce,
    route,
)
from fdk_cuda.triton.layout import PackedLayout
from fdk_cuda.triton.ops import check_dtype, layout_of
from fdk_cuda.triton.packed_weight import PackedWeight
from fdk_formats.expert_ops import define_expert_op
from fdk_formats.ops import define_op


def triton_expert_linear(
    x: Tensor,  # [t, k, bf16 | fp16] or [t, top_k, k]
    expert_ids: Tensor,  # [t, top_k, int32 | int64]
    words: Tensor,  # see layout.py, one for each expert
    scale: Tensor,
    zero_point: Tensor | None,
    values: Tensor,  # see decode.lookup_tables, one for each expert or one for all
    lanes: Tensor,
    bits: int,
    group_size: int,
    batch_invariant: bool,
    bias: Tensor | None,  # [experts, n, dtype of x]
    routing_weights: Tensor | None,  # [t, top_k]
    experts: int,
    n: int,
    k: int,
) -> Tensor:
    """Computes ``x @ W_hat[expert_ids].T + bias``, see ``ExpertLayout.forward``."""
    check_dtype("x", x)
    tokens, top_k = expert_ids.shape
    a = layout_of(n, k, bits, group_size)
    at_once = max(1, max_gemv_tokens(a, top_k)) if batch_invariant else tokens
    if tokens > at_once:
        layout = words, scale, zero_point, values, lanes, bits, group_size, batch_invariant
        parts = []
        for first in range(0, tokens, at_once):
            own = slice(first, first + at_once)
            weights = None if routing_weights is None else routing_weights[own]
            part = x[own], expert_ids[own], *layout, bias, weights, experts, n, k
            parts.append(triton_expert_linear(*part))
        return torch.cat(parts)
    w = PackedWeight(words, scale, zero_point, values, lanes, a)
    with launch.on_device_of(x):
        if batch_invariant:
            gpu = launch.gpu_at(x.get_device())
            config = invariant_config(a, gpu, affine=zero_point is not None)
        else:
            config = config_for(w, tokens, top_k, x.get_device())
        routing = route(expert_ids, experts, config, zeros=routing_weights is None)
        if routing_weights is not None:
            return _summed(x, w, routing, config, bias, routing_weights)
        y = expert_linear(x, w, routing, config, bias=bias)
    return y.to(x.dtype).view(tokens, top_k, n)


def config_for(
    w: PackedWeight, tokens: int, top_k: int, index: int, *, swiglu: bool = False
) -> ExpertConfig:
    """Returns the configuration of a product that need not be batch-invariant.

    Args:
        w: a stack of experts.
        tokens: tokens of a call.
        top_k: experts of a token.
        index: index of the GPU, -1 for the CPU.
        swiglu: whether outputs are the gates, then as many values that they multiply.
    """
    sizes = w.layout, tokens, top_k, len(w.words), launch.gpu_at(index)
    return expert_config(*sizes, affine=w.zero_point is not None, swiglu=swiglu)


def _summed(
    x: Tensor,
    w: PackedWeight,
    routing: Routing,
    config: ExpertConfig,
    bias: Tensor | None,
    weights: Tensor,
) -> Tensor:
    """Returns the weighted sum over the experts of each token, ``[tokens, n]``."""
    y = expert_linear(x, w, routing, config, bias=bias, weights=weights)
    return expert_reduce(y, routing, x.dtype)


def triton_expert_grad_x(
    grad_y: Tensor,  # [t, top_k, n, bf16 | fp16]
    expert_ids: Tensor,
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    values: Tensor,
    lanes: Tensor,
    bits: int,
    group_size: int,
    batch_invariant: bool,
    experts: int,
    n: int,
    k: int,
) -> Tensor:
    """Computes ``dy @ W_hat[expert_ids]``, ``[t, top_k, k, dtype of dy]``."""
    check_dtype("grad_y", grad_y)
    w = PackedWeight(words, scale, zero_point, values, lanes, layout_of(n, k, bits, group_size))
    with launch.on_device_of(grad_y):
        grad_x = expert_dgrad(grad_y.view(-1, n), w, expert_ids)
    return grad_x.to(grad_y.dtype).view(*expert_ids.shape, k)


def triton_expert_mlp(
    x: Tensor,  # [t, k, bf16 | fp16]
    expert_ids: Tensor,  # [t, top_k, int32 | int64]
    routing_weights: Tensor,  # [t, top_k, floating]
    gate_up: list[Tensor],  # words, scale, values, lanes, and zero points if there are any
    bias: Tensor | None,  # [experts, 2 * inner, dtype of x]
    bits: int,
    group_size: int,
    down: list[Tensor],
    down_bias: Tensor | None,  # [experts, n, dtype of x]
    down_bits: int,
    down_group_size: int,
    inner: int,
    n: int,
) -> Tensor:
    """Computes ``ExpertLayout.mlp``, ``[t, n]``, with SwiGLU in the first product."""
    check_dtype("x", x)
    tokens, top_k = expert_ids.shape
    experts, dtype = len(gate_up[0]), x.dtype
    if tokens * top_k == 0:
        return x.new_zeros(tokens, n)
    first = _stack_of(gate_up, layout_of(2 * inner, x.shape[1], bits, group_size))
    second = _stack_of(down, layout_of(n, inner, down_bits, down_group_size))
    x, expert_ids = x.contiguous(), expert_ids.contiguous()
    with launch.on_device_of(x):
        first_config = config_for(first, tokens, top_k, x.get_device(), swiglu=True)
        second_config = config_for(second, tokens, top_k, x.get_device())
        # The second product has no use for rows of no expert: nothing adds them.
        routing = route(expert_ids, experts, first_config, zeros=False)
        y = expert_linear(x, first, routing, first_config, bias=bias, swiglu=True)
        if (second_config.rows, second_config.is_sorted) != (
            first_config.rows,
            first_config.is_sorted,
        ):
            routing = route(expert_ids, experts, second_config, zeros=False)
        rows = y.to(dtype).view(tokens, top_k, inner)
        weights = routing_weights.contiguous()
        return _summed(rows, second, routing, second_config, down_bias, weights)


def _stack_of(tensors: list[Tensor], layout: PackedLayout) -> PackedWeight:
    words, scale, values, lanes, *zeros = tensors
    return PackedWeight(words, scale, zeros[0] if zeros else None, values, lanes, layout)


def _fake_expert_mlp(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty((x.shape[0], args[-1]))


_library = Library("fdk_cuda", "FRAGMENT")
# CPU tensors are for Triton's interpreter; otherwise the backend refuses them.
_DISPATCH_KEYS = ("CUDA", "CPU") if launch.INTERPRETED else ("CUDA",)
triton_expert_linear_op = define_expert_op(
    _library,
    "triton_expert_linear",
    layout=(
        "Tensor words, Tensor scale, Tensor? zero_point, Tensor values, Tensor lanes, int bits, "
        "int group_size, bool batch_invariant"
    ),
    forward=triton_expert_linear,
    grad_x=triton_expert_grad_x,
    dispatch_keys=_DISPATCH_KEYS,
)
triton_expert_mlp_op = define_op(
    _library,
    "triton_expert_mlp(Tensor x, Tensor expert_ids, Tensor routing_weights, Tensor[] gate_up, "
    "Tensor? bias, int bits, int group_size, Tensor[] down, Tensor? down_bias, int down_bits, "
    "int down_group_size, int inner, int n) -> Tensor",
    run=triton_expert_mlp,
    fake=_fake_expert_mlp,
    dispatch_keys=_DISPATCH_KEYS,
)

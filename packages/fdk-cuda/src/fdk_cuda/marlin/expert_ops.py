"""Ops of a stack of experts in the Marlin layout: products with gradients, and the MLP.

Sorting, gathering and sums over experts are those of the Triton kernels.
"""

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from fdk_cuda.marlin.grouped_product import grouped_product
from fdk_cuda.marlin.heuristics_experts import (
    MAX_WHOLE_TILES,
    ExpertPlan,
    most_pairs,
    plan_experts,
    tile_rows,
)
from fdk_cuda.marlin.heuristics_hopper import GroupedPlan, plan_grouped
from fdk_cuda.marlin.instantiations import Variant, shared_kernel, small_m_experts_program
from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.marlin.ops import dequantise, padded
from fdk_cuda.marlin.runtime import SMALL_EXPERTS_FIELDS, device_limits
from fdk_cuda.nvrtc import Launch
from fdk_cuda.triton.configs.experts import ExpertConfig
from fdk_cuda.triton.expert_launch import Routing, expert_reduce, gather, grouped_dgrad, route
from fdk_cuda.triton.launch import on_device_of
from fdk_formats.expert_ops import define_expert_op
from fdk_formats.format import Format
from fdk_formats.ops import define_op

OCTET = 8  # rows of a half of the outputs in turns


def is_interleaved(n: int) -> bool:
    """Returns whether octets of rows are of the first and of the second half of the outputs.

    Gates and what they multiply are then in the same lane. Halves must be whole octets.
    """
    return n % (2 * OCTET) == 0


def stack_geometry(format: Format, n: int, k: int) -> Geometry:
    """Returns the layout of an expert: as of one weight, but codes of grids are looked up."""
    whole = Geometry.of(format, n, k)
    return Geometry(
        *(whole.bits, n, k, whole.group_size, whole.scale_dtype),
        *(whole.has_zero_point, whole.whole_zero_point),
    )


class ExpertStack(NamedTuple):
    """A stack as the kernels read it.

    Attributes:
        packed: ``[experts, *geometry.shape, uint8]``.
        codebook: ``[experts or 1, 2^bits, dtype of x]``.
        format: the format, as text.
        n, k: outputs and inputs of an expert.
    """

    packed: Tensor
    codebook: Tensor
    format: str
    n: int
    k: int

    @property
    def geometry(self) -> Geometry:
        """Layout of an expert."""
        return _geometry(self.format, self.n, self.k)

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.packed)


@lru_cache(maxsize=1024)
def _geometry(format: str, n: int, k: int) -> Geometry:
    return stack_geometry(Format.parse(format), n, k)


def marlin_expert_linear(
    x: Tensor,  # [t, k, dtype] or [t, top_k, k]
    expert_ids: Tensor,  # [t, top_k, int32 | int64]
    packed: Tensor,  # [experts, *geometry.shape, uint8]
    codebook: Tensor,  # [experts or 1, 2^bits, dtype]
    format: str,
    bias: Tensor | None,  # [experts, n, dtype]
    routing_weights: Tensor | None,  # [t, top_k]
    experts: int,
    n: int,
    k: int,
) -> Tensor:
    """Computes ``x @ W_hat[expert_ids].T + bias``, see ``ExpertLayout.forward``."""
    _check_dtype("x", x, codebook)
    tokens, top_k = expert_ids.shape
    w = ExpertStack(packed, codebook, format, n, k)
    config = config_for(w, tokens, top_k, x)
    at_once = _most_tokens(config, w, top_k, x)
    if tokens > at_once:
        parts = []
        for first in range(0, tokens, at_once):
            own = slice(first, first + at_once)
            weights = None if routing_weights is None else routing_weights[own]
            part = x[own], expert_ids[own], packed, codebook, format, bias, weights, experts, n, k
            parts.append(marlin_expert_linear(*part))
        return torch.cat(parts)
    with on_device_of(x):
        routing = route(expert_ids, experts, config, zeros=routing_weights is None)
        rows = x.view(-1, k)
        if routing_weights is not None:
            return _summed(rows, w, routing, config, bias, routing_weights)
        y = _product(rows, w, routing, config, bias=bias, zeros=True)
    return y.view(tokens, top_k, n)


def marlin_expert_grad_x(
    grad_y: Tensor,  # [t, top_k, n, dtype]
    expert_ids: Tensor,
    packed: Tensor,
    codebook: Tensor,
    format: str,
    experts: int,
    n: int,
    k: int,
) -> Tensor:
    """Computes ``dy @ W_hat[expert_ids]``, ``[t, top_k, k, dtype of dy]``."""
    _check_dtype("grad_y", grad_y, codebook)
    rows = grad_y.view(-1, n)
    if is_interleaved(n):  # as rows of the weights are
        rows = rows.view(-1, 2, n // (2 * OCTET), OCTET).transpose(1, 2).reshape(-1, n)

    def weight_of(expert: int) -> Tensor:
        own_codebook = codebook[expert if len(codebook) > 1 else 0]
        return dequantise(packed[expert], own_codebook, format, n, k)

    with on_device_of(grad_y):
        grad_x = grouped_dgrad(rows, expert_ids, weight_of, experts, k)
    return grad_x.view(*expert_ids.shape, k)


def marlin_expert_mlp(
    x: Tensor,  # [t, k, dtype]
    expert_ids: Tensor,  # [t, top_k, int32 | int64]
    routing_weights: Tensor,  # [t, top_k, floating]
    packed: Tensor,  # gate and up
    codebook: Tensor,
    format: str,
    bias: Tensor | None,  # [experts, 2 * inner, dtype]
    down_packed: Tensor,
    down_codebook: Tensor,
    down_format: str,
    down_bias: Tensor | None,  # [experts, n, dtype]
    inner: int,
    n: int,
) -> Tensor:
    """Computes ``ExpertLayout.mlp``, ``[t, n]``, with SwiGLU in the first product."""
    _check_dtype("x", x, codebook)
    tokens, top_k = expert_ids.shape
    if tokens * top_k == 0:
        return x.new_zeros(tokens, n)
    first = ExpertStack(packed, codebook, format, 2 * inner, x.shape[1])
    second = ExpertStack(down_packed, down_codebook, down_format, n, inner)
    stacks = first, second
    configs = [config_for(w, tokens, top_k, x) for w in stacks]
    at_once = min(_most_tokens(*pair, top_k, x) for pair in zip(configs, stacks, strict=True))
    if tokens > at_once:
        gate_up = packed, codebook, format, bias
        down = down_packed, down_codebook, down_format, down_bias
        parts = [tensor.split(at_once) for tensor in (x, expert_ids, routing_weights)]
        return torch.cat(
            [
                marlin_expert_mlp(own_x, ids, weights, *gate_up, *down, inner, n)
                for own_x, ids, weights in zip(*parts, strict=True)
            ]
        )
    x, expert_ids = x.contiguous(), expert_ids.contiguous()
    bias = None if bias is None else bias.contiguous()
    down_bias = None if down_bias is None else down_bias.contiguous()
    routing_weights = routing_weights.contiguous()
    with on_device_of(x):
        both_many = all(config.is_wgmma for config in configs)
        # The second product has no use for rows of no expert: nothing adds them.
        routing = route(expert_ids, first.experts, configs[0], zeros=False)
        y = _product(x, first, routing, configs[0], bias=bias, swiglu=True, sorted_y=both_many)
        if configs[0].rows != configs[1].rows:
            routing = route(expert_ids, first.experts, configs[1], zeros=False)
        return _summed(
            *(y, second, routing, configs[1], down_bias, routing_weights),
            sorted_x=both_many,
            early=not any(config.is_wgmma for config in configs),
        )


def _fake_expert_mlp(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty((x.shape[0], args[-1]))


def _summed(
    x: Tensor,
    w: ExpertStack,
    routing: Routing,
    config: ExpertConfig,
    bias: Tensor | None,
    weights: Tensor,
    *,
    sorted_x: bool = False,
    early: bool = False,
) -> Tensor:
    """Returns the weighted sum over the experts of each token, ``[tokens, n]``."""
    options = {"sorted_x": sorted_x, "early": early}
    y = _product(x, w, routing, config, bias=bias, wide=True, **options)
    return expert_reduce(y, routing, x.dtype, weights)


def _product(
    x: Tensor,
    w: ExpertStack,
    routing: Routing,
    config: ExpertConfig,
    *,
    bias: Tensor | None,
    swiglu: bool = False,
    zeros: bool = False,
    wide: bool = False,
    sorted_x: bool = False,
    sorted_y: bool = False,
    early: bool = False,
) -> Tensor:
    """Computes ``x @ W_hat[expert].T + bias[expert]`` for every pair, ``[pairs, n]``.

    Args:
        x: ``[rows, k]``, a row for one pair or for the neighbouring pairs of a token.
        w: the stack.
        routing: the experts of the pairs.
        config: the kernel.
        bias: ``[experts, n]`` or None.
        swiglu: whether the first half of the outputs are gates of the second.
        zeros: whether rows of pairs of no expert are zeros; otherwise they may stay unwritten.
        wide: whether few rows are float32.
        sorted_x, sorted_y: with many rows, whether rows are in the order of experts.
        early: with few rows, whether the kernel launched last is the first product of these pairs,
            likewise with few rows.
    """
    if isinstance(config.kernel, GroupedPlan):
        return grouped_product(
            *(x if sorted_x else gather(x, routing), w.packed, w.codebook, w.geometry, routing),
            config.kernel,
            bias=bias,
            swiglu=swiglu,
            zeros=zeros,
            sorted_y=sorted_y,
            interleaved=is_interleaved(w.n),
        )
    assert isinstance(config.kernel, ExpertPlan)
    options = {"swiglu": swiglu, "zeros": zeros, "wide": wide, "early": early}
    return few_rows(x, w, routing.ids, config.kernel, bias=bias, **options)


def few_rows(
    x: Tensor,
    w: ExpertStack,
    ids: Tensor,
    plan: ExpertPlan,
    *,
    bias: Tensor | None = None,
    swiglu: bool = False,
    zeros: bool = True,
    wide: bool = False,
    early: bool = False,
) -> Tensor:
    """Computes a product by small_m_experts.cu; see ``_product``.

    Args:
        x: ``[rows, k]``.
        w: the stack.
        ids: experts of the pairs, int32 or int64, contiguous.
        plan: how the product is cut.
        bias, swiglu, zeros, wide, early: see ``_product``.
    """
    geometry, pairs, index = w.geometry, ids.numel(), x.get_device()
    sharing = pairs // len(x)
    padded_x = padded(x, geometry.padded_k)
    width = w.n // 2 if swiglu else w.n
    out = x.new_empty((pairs, width), dtype=torch.float32 if wide else x.dtype)
    grid = min(device_limits(index).sm_count, pairs * plan.n_units)
    launch = _few_rows_launch(geometry, x.dtype, plan, grid, index)
    launch(
        *(w.packed.data_ptr(), w.codebook.data_ptr(), padded_x.data_ptr()),
        0 if bias is None else bias.data_ptr(),
        *(out.data_ptr(), ids.data_ptr()),
        *few_rows_fields(
            *(w, plan, x.dtype, pairs, sharing),
            long_ids=ids.dtype == torch.int64,
            zeros=zeros,
            swiglu=swiglu,
            wide=wide,
            # A copy of x comes between the products.
            early=early and padded_x is x,
        ),
    )
    return out


def few_rows_fields(
    w: ExpertStack,
    plan: ExpertPlan,
    dtype: torch.dtype,
    pairs: int,
    sharing: int,
    *,
    long_ids: bool,
    zeros: bool,
    swiglu: bool,
    wide: bool,
    early: bool,
) -> tuple[int, ...]:
    """Returns the fields of small_m_experts.cu's Params after the pointers."""
    g = w.geometry
    codebook_step = w.codebook.stride(0) if len(w.codebook) > 1 else 0
    return (
        *(g.n, g.padded_k, w.experts, pairs, plan.n_units),
        *(plan.rows, sharing, plan.split, plan.buffers, codebook_step),
        *map(int, (long_ids, zeros, is_interleaved(g.n), swiglu, wide, early)),
        *Variant.of(g, dtype).constants,
    )


@lru_cache(maxsize=1024)
def _few_rows_launch(
    geometry: Geometry, dtype: torch.dtype, plan: ExpertPlan, grid: int, index: int
) -> Launch:
    """Loads small_m_experts.cu, compiling it if needed."""
    return Launch(
        shared_kernel(small_m_experts_program(Variant.of(geometry, dtype), plan.shape)),
        index,
        fields=SMALL_EXPERTS_FIELDS,
        grid=grid,
        threads=32 * plan.shape.warps,
        shared_bytes=plan.shared_bytes,
        overlap=True,
    )


def config_for(w: ExpertStack, tokens: int, top_k: int, x: Tensor) -> ExpertConfig:
    """Returns which kernel computes a product with all tokens, and how."""
    return _config(w.geometry, x.dtype, tokens, top_k, w.experts, x.get_device())


@lru_cache(maxsize=4096)  # tokens is any number
def _config(
    geometry: Geometry, dtype: torch.dtype, tokens: int, top_k: int, experts: int, index: int
) -> ExpertConfig:
    device, pairs = device_limits(index), tokens * top_k
    rows = tile_rows(tokens, top_k, experts)
    if rows is None:
        grouped = plan_grouped(geometry, pairs, experts, device)
        return ExpertConfig(grouped, grouped.shape.tile_m)
    plan = plan_experts(geometry, dtype, pairs, experts, rows, device)
    return ExpertConfig(plan, rows, is_sorted=False)  # the kernel itself sorts


def _most_tokens(config: ExpertConfig, w: ExpertStack, top_k: int, x: Tensor) -> int:
    """Returns how many tokens a call may have."""
    if config.is_wgmma:
        return sys.maxsize
    tiles = MAX_WHOLE_TILES * device_limits(x.get_device()).sm_count
    return max(1, min(tiles, most_pairs(w.experts)) // top_k)


def _check_dtype(name: str, tensor: Tensor, codebook: Tensor) -> None:
    if tensor.dtype != codebook.dtype:
        raise TypeError(
            f"marlin_expert_linear: {name} must be {codebook.dtype}, got {tensor.dtype}"
        )


_library = Library("fdk_cuda", "FRAGMENT")
marlin_expert_linear_op = define_expert_op(
    _library,
    "marlin_expert_linear",
    layout="Tensor packed, Tensor codebook, str format",
    forward=marlin_expert_linear,
    grad_x=marlin_expert_grad_x,
    dispatch_keys=("CUDA",),
)
marlin_expert_mlp_op = define_op(
    _library,
    "marlin_expert_mlp(Tensor x, Tensor expert_ids, Tensor routing_weights, Tensor packed, "
    "Tensor codebook, str format, Tensor? bias, Tensor down_packed, Tensor down_codebook, "
    "str down_format, Tensor? down_bias, int inner, int n) -> Tensor",
    run=marlin_expert_mlp,
    fake=_fake_expert_mlp,
    dispatch_keys=("CUDA",),
)

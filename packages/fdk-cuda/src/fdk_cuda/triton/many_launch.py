"""Launches of ``many_kernel``, by itself or in clusters of two programs, and of its gradient."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.errors import TritonError  # type: ignore[import-untyped]

from fdk_cuda.triton.configs import MANY_OUTPUTS, MANY_WARPS, ManyConfig, ManyTransposedConfig
from fdk_cuda.triton.configs.dgrad import many_transposed_programs
from fdk_cuda.triton.configs.gemm import MANY_FUSED_BITS, last_round
from fdk_cuda.triton.packed_weight import Weight
from fdk_cuda.triton.permute_reduce import HAS_GLUON, add_parts, gpu_at, permute
from fdk_cuda.triton.remembered import Launch, are_aligned, prepared, remembered

if HAS_GLUON:
    from triton.experimental.gluon.nvidia.hopper import (  # type: ignore[import-untyped]
        TensorDescriptor,
    )

    from fdk_cuda.triton.kernels.dgrad_wgmma import many_transposed_kernel
    from fdk_cuda.triton.kernels.gemm_wgmma import many_kernel
    from fdk_cuda.triton.kernels.tma_pipeline import shared_layout

# Kinds of product for which this release of Triton, or this machine, could not make a kernel.
_not_made: set[tuple[object, ...]] = set()


def many(x: Tensor, w: Weight, bias: Tensor | None, config: ManyConfig) -> Tensor | None:
    """``x @ W_hat.T + bias``, block_m rows of x a program, on compute capability 9.0.

    None, with a warning, where the kernel cannot be made: Gluon is experimental. Without clusters
    where only they cannot be had.
    """
    permuted, out = permute(x, w), x.new_empty((x.shape[0], w.arrangement.n))
    first = last_round(x.shape[0], w.arrangement.n, config, gpu_at(x.get_device()))
    if first is None:
        return _many(permuted, w, bias, config, out)
    pair = replace(config, split_k=2, cluster=2)
    for part, own in ((slice(0, first), config), (slice(first, None), pair)):
        own_bias = None if bias is None else bias[part]
        if _many(permuted, w.outputs(part), own_bias, own, out[:, part]) is None:
            return None
    return out


def _many(
    x: Tensor, w: Weight, bias: Tensor | None, config: ManyConfig, out: Tensor
) -> Tensor | None:
    """``many`` of x as ``permute`` leaves it, into ``out``, which may be some columns of y."""
    a, m = w.arrangement, x.shape[0]
    has_bias = bias is not None and config.parts == 1
    kind = (x.dtype, has_bias, config.block_m, config.cluster, config.parts > 1, *w.key)
    if kind in _not_made:
        if config.cluster == 1:
            return None
        return _many(x, w, bias, replace(config, cluster=1), out)
    blocks_m = triton.cdiv(m, config.block_m)
    target = out
    if config.parts > 1:  # Whole blocks: what lies outside of x is 0, and not added.
        shape = config.parts * blocks_m * config.block_m, a.n
        target = x.new_empty(shape, dtype=torch.float32)
    others = (*w.tensors, bias if bias is not None and has_bias else x)
    arguments = (
        _descriptor(x, [config.block_m, 64]),
        *others,
        _descriptor(target, [config.block_m // config.cluster, MANY_OUTPUTS]),
    )
    device, key = x.get_device(), ("many", m, has_bias, config, x.dtype, *w.key)
    run = remembered(device, key) if are_aligned(others) else None
    if run is None:
        try:
            run = _made(key, w, config, arguments, blocks_m, m, x.dtype, has_bias)
        except (TritonError, RuntimeError) as error:
            _not_made.add(kind)
            if config.cluster == 1:
                _warn("many_kernel", config, error)
            return _many(x, w, bias, config, out)
    run((arguments[0], *(tensor.data_ptr() for tensor in others), arguments[-1]), device)
    if config.parts > 1:
        y = out if out.is_contiguous() else x.new_empty((m, a.n))
        add_parts(target.view(config.parts, -1, a.n), bias, y)
        if y is not out:  # Only where clusters cannot be had.
            out.copy_(y)
    return out


def _made(
    key: tuple[object, ...],
    w: Weight,
    config: ManyConfig,
    arguments: Sequence[Any],
    blocks_m: int,
    m: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> Launch:
    """The launch of a kernel that Triton compiles, and loads, where it has not."""
    a = w.arrangement
    constants = w.constants(dtype) | {
        "HAS_BIAS": has_bias,
        "BLOCK_M": config.block_m,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
    }
    constants |= w.fused(MANY_FUSED_BITS)
    sizes = m, a.n, a.k_tiles, a.groups, config.split_k
    grid = (triton.cdiv(a.n, MANY_OUTPUTS) * blocks_m * config.parts,)
    options = {"num_warps": MANY_WARPS, "launch_pdl": True}
    return prepared(key, many_kernel, grid, arguments, sizes, constants, config.cluster, **options)


def many_transposed(grad_y: Tensor, w: Weight, config: ManyTransposedConfig) -> Tensor | None:
    """``dy @ W_hat``, block_m rows of dy a program, on compute capability 9.0.

    None, with a warning, where the kernel cannot be made.
    """
    a, m = w.arrangement, grad_y.shape[0]
    kind = (
        *("transposed", grad_y.dtype, config.block_m, config.tiles),
        *(config.split_n > 1, *w.key),
    )
    if kind in _not_made:
        return None
    out = grad_y.new_empty((m, a.k))
    target = out
    if config.split_n > 1:
        target = grad_y.new_empty((config.split_n, m, a.k), dtype=torch.float32)
    others = (*w.tensors, target)
    # TMA wants an aligned address, which a part of a larger tensor may not have.
    rows = grad_y if are_aligned((grad_y,)) else grad_y.clone()
    descriptor = _descriptor(rows, [config.block_m, 64])
    device, key = grad_y.get_device(), ("many dy", m, config, grad_y.dtype, *w.key)
    run = remembered(device, key) if are_aligned(others) else None
    if run is None:
        constants = w.constants(grad_y.dtype) | {
            "BLOCK_M": config.block_m,
            "STAGES": config.stages,
            "COUNT": config.positions,
            "ROUND": config.tiles,
        }
        grid = many_transposed_programs(m, a, config), config.split_n
        sizes = m, a.n, a.k, a.k_tiles, a.groups
        arguments = (descriptor, *others)
        options = {"num_warps": MANY_WARPS, "launch_pdl": True}
        try:
            run = prepared(
                key, many_transposed_kernel, grid, arguments, sizes, constants, 1, **options
            )
        except (TritonError, RuntimeError) as error:
            _not_made.add(kind)
            _warn("many_transposed_kernel", config, error)
            return None
    run((descriptor, *(tensor.data_ptr() for tensor in others)), device)
    if config.split_n > 1:
        add_parts(target, None, out)
    return out


def _warn(kernel: str, config: object, error: Exception) -> None:
    what = f"Triton {triton.__version__} cannot make {kernel} for {config}"
    warnings.warn(f"{what}: {type(error).__name__}: {error}", stacklevel=3)


def _descriptor(tensor: Tensor, block: list[int]) -> Any:
    """A matrix as TMA copies it, in blocks."""
    layout = shared_layout(8 * tensor.element_size())
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)

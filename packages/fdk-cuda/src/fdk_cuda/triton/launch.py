"""Launches of the Triton kernels over one arranged weight."""

from dataclasses import replace
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from fdk_cuda.triton.configs import (
    DequantiseConfig,
    GemmConfig,
    ManyConfig,
    ManyTransposedConfig,
    SmallConfig,
    TransposedConfig,
)
from fdk_cuda.triton.configs.gemm import GEMM_FUSED_BITS, dequantise_config, takes_table
from fdk_cuda.triton.kernels.dequantise import dequantise_kernel
from fdk_cuda.triton.kernels.dgrad import transposed_kernel
from fdk_cuda.triton.kernels.dgrad_tiles import is_in_layout
from fdk_cuda.triton.kernels.gemm import gemm_kernel
from fdk_cuda.triton.kernels.gemv import small_kernel
from fdk_cuda.triton.layout import POSITIONS
from fdk_cuda.triton.many_launch import many, many_transposed
from fdk_cuda.triton.packed_weight import Weight as Weight
from fdk_cuda.triton.permute_reduce import add_parts, can_overlap, limit, pdl, permute
from fdk_cuda.triton.permute_reduce import gpu_at as gpu_at
from fdk_cuda.triton.remembered import INTERPRETED as INTERPRETED
from fdk_cuda.triton.remembered import Launch, launch, relaunch, remembered
from fdk_cuda.triton.remembered import is_elsewhere as is_elsewhere
from fdk_cuda.triton.remembered import on_device_of as on_device_of

# None: dequantise and cuBLAS.
Config = SmallConfig | GemmConfig | ManyConfig | None
GradientConfig = TransposedConfig | ManyTransposedConfig | None


# Kinds of weight and configuration for which ``transposed_kernel`` is not right.
_not_in_layout: set[tuple[object, ...]] = set()


def linear(x: Tensor, w: Weight, bias: Tensor | None, config: Config) -> Tensor:
    """``x @ W_hat.T + bias`` by the kernel that a configuration belongs to."""
    if isinstance(config, SmallConfig):
        return small(x, w, bias, config)
    if isinstance(config, GemmConfig):
        return gemm(x, w, bias, config)
    if isinstance(config, ManyConfig):
        y = many(x, w, bias, config)
        return linear(x, w, bias, None) if y is None else y
    return torch.nn.functional.linear(x, dequantise(w, x.dtype), bias)


def new_output(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The interpreter leaves the rounding to torch."""
    return like.new_empty(shape, dtype=torch.float32) if INTERPRETED else like.new_empty(shape)


def small(x: Tensor, w: Weight, bias: Tensor | None, config: SmallConfig) -> Tensor:
    """``x @ W_hat.T + bias``, 8 or 16 rows of x a program."""
    a, m = w.arrangement, x.shape[0]
    out = new_output((m, a.n), x)
    tensors = (x, *w.tensors, x if bias is None else bias, out)
    key = _small_key(m, x.dtype, bias is None, config, w)
    if not relaunch(key, tensors):
        m_tiles = 1 if m <= 8 else 2
        is_able = can_overlap(x.get_device())
        overlap = is_able and config.overlap
        constants = w.constants(x.dtype) | {
            "HAS_BIAS": bias is not None,
            "N_TILES": config.n_tiles,
            "M_TILES": m_tiles,
            "WARPS": config.warps,
            "AHEAD": config.ahead,
            "FETCH": config.fetch if is_able else 0,
            "OVERLAP": overlap,
            "MINUS": config.minus and w.has_exact_zeros(x.dtype),
        }
        grid = (triton.cdiv(a.n_tiles, config.n_tiles), triton.cdiv(m, 8 * m_tiles))
        sizes = (m, a.n, a.k, a.k_tiles, a.groups)
        options = {"num_warps": config.warps, **pdl(overlap), **limit(config.registers)}
        launch(key, small_kernel, grid, tensors, sizes, constants, **options)
    return out.to(x.dtype) if INTERPRETED else out


def launched_small(
    device: int, m: int, dtype: torch.dtype, no_bias: bool, config: SmallConfig, w: Weight
) -> Launch | None:
    """What ``small`` has launched for m rows, if it has."""
    return remembered(device, _small_key(m, dtype, no_bias, config, w))


def _small_key(
    m: int, dtype: torch.dtype, no_bias: bool, c: SmallConfig, w: Weight
) -> tuple[object, ...]:
    # Field by field: a configuration takes longer to hash.
    chosen = c.n_tiles, c.warps, c.ahead, c.fetch, c.overlap, c.registers, c.minus
    return (m, dtype, no_bias, *chosen, *w.key)


def gemm(x: Tensor, w: Weight, bias: Tensor | None, config: GemmConfig) -> Tensor:
    """``x @ W_hat.T + bias``, block_m rows of x a program."""
    a, m = w.arrangement, x.shape[0]
    permuted = permute(x, w)
    split = config.split_k > 1
    out = new_output((m, a.n), x)
    target = permuted.new_empty((config.split_k, m, a.n), dtype=torch.float32) if split else out
    has_bias = bias is not None and not split
    tensors = (permuted, *w.tensors, bias if bias is not None else x, target)
    key = ("gemm", m, x.dtype, has_bias, config, *w.key)
    if not relaunch(key, tensors):
        constants = w.constants(x.dtype) | {
            "HAS_BIAS": has_bias,
            "R": config.tiles,
            "WARPS": config.warps,
            "BLOCK_M": config.block_m,
            "GROUP_M": 4,
            "STAGES": config.stages,
            "TABLE": takes_table(
                config, a.bits, a.padded_group, gpu_at(x.get_device()).shared_bytes
            ),
        }
        if gpu_at(x.get_device()).measured_on is not None:
            constants |= w.fused(GEMM_FUSED_BITS)
        blocks_n = triton.cdiv(a.n_tiles, config.tiles * config.warps)
        grid = (blocks_n * triton.cdiv(m, config.block_m), config.split_k)
        options = {"num_warps": config.warps, "num_stages": config.stages}
        launch(key, gemm_kernel, grid, tensors, (m, a.n, a.k_tiles, a.groups), constants, **options)
    if split:
        add_parts(target, bias, out)
    return out.to(x.dtype) if INTERPRETED else out


def linear_transposed(grad_y: Tensor, w: Weight, config: GradientConfig) -> Tensor:
    """``dy @ W_hat`` by the kernel that a configuration belongs to."""
    if isinstance(config, TransposedConfig):
        return transposed(grad_y, w, config)
    if isinstance(config, ManyTransposedConfig):
        grad_x = many_transposed(grad_y, w, config)
        return linear_transposed(grad_y, w, None) if grad_x is None else grad_x
    return grad_y @ dequantise(w, grad_y.dtype)


def transposed(grad_y: Tensor, w: Weight, config: TransposedConfig) -> Tensor:
    """``dy @ W_hat``, 8 * m_tiles rows of dy a program.

    Of formats whose codes Triton would transpose in a wrong layout, by ``dequantise`` and cuBLAS.
    """
    a, m = w.arrangement, grad_y.shape[0]
    kind = (grad_y.dtype, replace(config, split_n=1), *w.key)
    if kind in _not_in_layout:
        return grad_y @ dequantise(w, grad_y.dtype)
    split = config.split_n > 1
    out = new_output((m, a.k), grad_y)
    target = grad_y.new_empty((config.split_n, m, a.k), dtype=torch.float32) if split else out
    tensors = (grad_y, *w.tensors, target)
    key = ("transposed", m, grad_y.dtype, config, *w.key)
    if not relaunch(key, tensors):
        count = min(config.positions, POSITIONS[a.bits])
        overlap = config.overlap and can_overlap(grad_y.get_device())
        constants = w.constants(grad_y.dtype) | {
            "COUNT": count,
            "R": config.tiles,
            "M_TILES": config.m_tiles,
            "WARPS": config.warps,
            "AHEAD": config.ahead,
            "TABLE": config.table,
            "OVERLAP": overlap,
        }
        blocks_k = a.k_tiles * (POSITIONS[a.bits] // count)
        grid = (blocks_k, triton.cdiv(m, 8 * config.m_tiles), config.split_n)
        sizes = (m, a.n, a.k, a.k_tiles, a.groups)
        arguments = tensors, sizes, constants, _transposes_in_layout
        options = {"num_warps": config.warps, **pdl(overlap)}
        if not launch(key, transposed_kernel, grid, *arguments, **options):
            _not_in_layout.add(kind)
            return grad_y @ dequantise(w, grad_y.dtype)
    if split:
        add_parts(target, None, out)
    return out.to(grad_y.dtype) if INTERPRETED else out


def _transposes_in_layout(compiled: Any) -> bool:
    """Also not where Triton has kept no text of the layouts that it chose."""
    return is_in_layout(compiled.asm.get("ttgir", ""))


def dequantise(w: Weight, dtype: torch.dtype, config: DequantiseConfig | None = None) -> Tensor:
    """``W_hat :: [n, k]``, the bits that ``QuantisedTensor.dequantise`` gives."""
    a = w.arrangement
    shape = a.n, a.k
    out = w.words.new_empty(shape, dtype=torch.float32 if INTERPRETED else dtype)
    tensors = (*w.tensors, out)
    key = ("dequantise", dtype, config, *w.key)
    if not relaunch(key, tensors):
        c = config or dequantise_config(a.bits, affine=w.zero_point is not None)
        constants = w.constants(dtype) | {"WARPS": c.warps, "AHEAD": c.ahead, "TABLE": c.table}
        grid = (triton.cdiv(a.n_tiles, c.rounds), triton.cdiv(a.k_tiles, c.warps))
        sizes = (a.n, a.k, a.k_tiles, a.groups, c.rounds)
        launch(key, dequantise_kernel, grid, tensors, sizes, constants, num_warps=c.warps)
    return out.to(dtype)

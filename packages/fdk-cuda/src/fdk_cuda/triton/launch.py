"""Launches of the Triton kernels over one arranged weight."""

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from fdk_cuda.triton.arrangement import POSITIONS
from fdk_cuda.triton.configs import (
    H200,
    MANY_OUTPUTS,
    MANY_WARPS,
    GemmConfig,
    Gpu,
    ManyConfig,
    SmallConfig,
    TransposedConfig,
    gpu_of,
    takes_table,
)
from fdk_cuda.triton.dequantise import dequantise_kernel
from fdk_cuda.triton.gemm import gemm_kernel, permute_kernel, reduce_kernel
from fdk_cuda.triton.remembered import INTERPRETED as INTERPRETED
from fdk_cuda.triton.remembered import Launch, launch, relaunch, remembered
from fdk_cuda.triton.remembered import is_elsewhere as is_elsewhere
from fdk_cuda.triton.remembered import on_device_of as on_device_of
from fdk_cuda.triton.small import small_kernel
from fdk_cuda.triton.transposed import is_in_layout, transposed_kernel
from fdk_cuda.triton.weight import Weight as Weight

try:
    from triton.experimental.gluon.nvidia.hopper import (  # type: ignore[import-untyped]
        TensorDescriptor,
    )

    from fdk_cuda.triton.many import many_kernel, shared_layout

    HAS_GLUON = True
except (ImportError, AttributeError):  # Gluon is experimental: a later Triton may name it anew
    HAS_GLUON = False

PERMUTE_BLOCK = 1024
REDUCE_BLOCK = 1024
# None: dequantise and cuBLAS.
Config = SmallConfig | GemmConfig | ManyConfig | None


# Kinds of weight and configuration for which ``transposed_kernel`` is not right.
_not_in_layout: set[tuple[object, ...]] = set()


@cache
def gpu_at(index: int) -> Gpu:
    """What decides about configurations on a device; -1 is the CPU, of the interpreter."""
    gpu = H200 if index < 0 else gpu_of(torch.cuda.get_device_capability(index))
    if HAS_GLUON and not INTERPRETED:
        return gpu
    return replace(gpu, limits=replace(gpu.limits, many_m=0))


@cache
def can_overlap(index: int) -> bool:
    """Whether a device overlaps kernels and fetches to the L2; the interpreter does neither."""
    return index >= 0 and gpu_at(index).can_overlap


def linear(x: Tensor, w: Weight, bias: Tensor | None, config: Config) -> Tensor:
    """``x @ W_hat.T + bias`` by the kernel that a configuration belongs to."""
    if isinstance(config, SmallConfig):
        return small(x, w, bias, config)
    if isinstance(config, GemmConfig):
        return gemm(x, w, bias, config)
    if isinstance(config, ManyConfig):
        return many(x, w, bias, config)
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
        }
        grid = (triton.cdiv(a.n_tiles, config.n_tiles), triton.cdiv(m, 8 * m_tiles))
        sizes = (m, a.n, a.k, a.k_tiles, a.groups)
        options = {"num_warps": config.warps, **_pdl(overlap)}
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
    return (m, dtype, no_bias, c.n_tiles, c.warps, c.ahead, c.fetch, c.overlap, *w.key)


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
        blocks_n = triton.cdiv(a.n_tiles, config.tiles * config.warps)
        grid = (blocks_n * triton.cdiv(m, config.block_m), config.split_k)
        options = {"num_warps": config.warps, "num_stages": config.stages}
        launch(key, gemm_kernel, grid, tensors, (m, a.n, a.k_tiles, a.groups), constants, **options)
    if split:
        add_parts(target, bias, out)
    return out.to(x.dtype) if INTERPRETED else out


# Kinds of product for which this release of Triton could not compile ``many_kernel``.
_not_compiled: set[tuple[object, ...]] = set()


def many(x: Tensor, w: Weight, bias: Tensor | None, config: ManyConfig) -> Tensor:
    """``x @ W_hat.T + bias``, block_m rows of x a program, on compute capability 9.0.

    By ``dequantise`` and cuBLAS, with a warning, where Triton cannot compile it.
    """
    a, m = w.arrangement, x.shape[0]
    split = config.split_k > 1
    has_bias = bias is not None and not split
    kind = (x.dtype, has_bias, config.block_m, split, *w.key)
    if kind in _not_compiled:
        return linear(x, w, bias, None)
    permuted = permute(x, w)
    out = x.new_empty((m, a.n))
    blocks_m = triton.cdiv(m, config.block_m)
    target = out
    if split:  # Whole blocks: what lies outside of x is 0, and not added.
        shape = config.split_k, blocks_m * config.block_m, a.n
        target = x.new_empty(shape, dtype=torch.float32)
    constants = w.constants(x.dtype) | {
        "HAS_BIAS": has_bias,
        "BLOCK_M": config.block_m,
        "STAGES": config.stages,
    }
    names = many_kernel.arg_names
    constants = {name: constants[name] for name in names if name in constants}
    x_blocks = _descriptor(permuted, [config.block_m, 64])
    blocks = _descriptor(target.view(-1, a.n), [config.block_m, MANY_OUTPUTS])
    tensors = (x_blocks, *w.tensors, bias if has_bias else x, blocks)
    sizes = m, a.n, a.k_tiles, a.groups
    grid = (triton.cdiv(a.n, MANY_OUTPUTS) * blocks_m, config.split_k)
    try:
        many_kernel[grid](*tensors, *sizes, **constants, num_warps=MANY_WARPS, launch_pdl=True)
    except triton.CompilationError as error:
        _not_compiled.add(kind)
        reason = f"Triton {triton.__version__} cannot compile many_kernel: {error}"
        warnings.warn(reason, stacklevel=2)
        return linear(x, w, bias, None)
    if split:
        add_parts(target, bias, out)
    return out


def _descriptor(tensor: Tensor, block: list[int]) -> Any:
    """A matrix as TMA copies it, in blocks."""
    layout = shared_layout(8 * tensor.element_size())
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def permute(x: Tensor, w: Weight) -> Tensor:
    """x with its columns in the order of ``gemm_kernel``."""
    a, m = w.arrangement, x.shape[0]
    width = a.k_tiles * a.tile_k
    permuted = x.new_empty((m, width))
    key = ("permute", m, x.dtype, a)
    if not relaunch(key, (x, permuted)):
        overlap = can_overlap(x.get_device())
        constants = w.constants(x.dtype) | {"BLOCK": PERMUTE_BLOCK, "OVERLAP": overlap}
        grid = (m, triton.cdiv(width, PERMUTE_BLOCK))
        sizes = (a.k, width, a.groups)
        launch(key, permute_kernel, grid, (x, permuted), sizes, constants, **_pdl(overlap))
    return permuted


def _pdl(overlap: bool) -> dict[str, int]:
    """The option of a launch that may come before the last kernel ends."""
    return {"launch_pdl": True} if overlap else {}


def add_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The sum of ``parts :: [count, rows, n, float32]``, and the bias, into ``out :: [m, n]``.

    Of a part, the first m rows are added.
    """
    tensors = (parts, out if bias is None else bias, out)
    key = ("reduce", *parts.shape, out.shape[0], out.dtype, bias is None)
    if not relaunch(key, tensors):
        overlap = can_overlap(out.get_device())
        # Of few sums, a program for each processor at least.
        block = REDUCE_BLOCK if out.numel() >= 256 * REDUCE_BLOCK else REDUCE_BLOCK // 8
        constants = {
            "SPLIT_K": len(parts),
            "HAS_BIAS": bias is not None,
            "BLOCK": block,
            "OVERLAP": overlap,
        }
        sizes = (out.numel(), parts.stride(0), out.shape[1])
        grid = (triton.cdiv(out.numel(), block),)
        launch(key, reduce_kernel, grid, tensors, sizes, constants, **_pdl(overlap))


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
            "STAGES": config.stages,
            "TABLE": config.table,
            "OVERLAP": overlap,
        }
        blocks_k = triton.cdiv(a.k_tiles, config.warps) * (POSITIONS[a.bits] // count)
        grid = (blocks_k, triton.cdiv(m, 8 * config.m_tiles), config.split_n)
        sizes = (m, a.n, a.k, a.k_tiles, a.groups)
        arguments = tensors, sizes, constants, _transposes_in_layout
        options = {"num_warps": config.warps, **_pdl(overlap)}
        if not launch(key, transposed_kernel, grid, *arguments, **options):
            _not_in_layout.add(kind)
            return grad_y @ dequantise(w, grad_y.dtype)
    if split:
        add_parts(target, None, out)
    return out.to(grad_y.dtype) if INTERPRETED else out


def _transposes_in_layout(compiled: Any) -> bool:
    """Also not where Triton has kept no text of the layouts that it chose."""
    return is_in_layout(compiled.asm.get("ttgir", ""))


def dequantise(w: Weight, dtype: torch.dtype) -> Tensor:
    """``W_hat :: [n, k]``, the bits that ``QuantisedTensor.dequantise`` gives."""
    a = w.arrangement
    shape = a.n, a.k
    out = w.words.new_empty(shape, dtype=torch.float32 if INTERPRETED else dtype)
    tensors = (*w.tensors, out)
    key = ("dequantise", dtype, *w.key)
    if not relaunch(key, tensors):
        tiles, warps = 1, 4
        constants = w.constants(dtype) | {"R": tiles, "WARPS": warps}
        grid = (triton.cdiv(a.n_tiles, tiles), triton.cdiv(a.k_tiles, warps))
        sizes = (a.n, a.k, a.k_tiles, a.groups)
        launch(key, dequantise_kernel, grid, tensors, sizes, constants, num_warps=warps)
    return out.to(dtype)

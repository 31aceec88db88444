"""Launches of the Triton kernels over one packed weight."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.errors import TritonError  # type: ignore[import-untyped]

from fdk_cuda.triton.compiled_launch import INTERPRETED as INTERPRETED
from fdk_cuda.triton.compiled_launch import (
    CompiledLaunch,
    are_aligned,
    compile_and_launch,
    compile_launch,
    find_compiled,
    launch_compiled,
)
from fdk_cuda.triton.compiled_launch import is_on_other_gpu as is_on_other_gpu
from fdk_cuda.triton.compiled_launch import on_device_of as on_device_of
from fdk_cuda.triton.configs import Config, GradConfig
from fdk_cuda.triton.configs.dgrad import DgradConfig, DgradWgmmaConfig, dgrad_wgmma_programs
from fdk_cuda.triton.configs.gemm import (
    GEMM_FUSED_BITS,
    GEMM_WGMMA_FUSED_BITS,
    DequantiseConfig,
    GemmConfig,
    GemmWgmmaConfig,
    dequantise_config,
    last_wave,
    takes_table,
)
from fdk_cuda.triton.configs.gemv import GemvConfig
from fdk_cuda.triton.configs.gpus import H200, WGMMA_TILE_N, WGMMA_WARPS, Gpu, gpu_of
from fdk_cuda.triton.kernels.dequantise import dequantise_kernel
from fdk_cuda.triton.kernels.dgrad import dgrad_kernel, is_in_layout
from fdk_cuda.triton.kernels.gemm import gemm_kernel
from fdk_cuda.triton.kernels.gemv import gemv_kernel
from fdk_cuda.triton.kernels.permute_reduce import permute_kernel, reduce_kernel
from fdk_cuda.triton.layout import POSITIONS
from fdk_cuda.triton.packed_weight import PackedWeight as PackedWeight

try:
    from triton.experimental.gluon.nvidia.hopper import (  # type: ignore[import-untyped]
        TensorDescriptor,
    )

    from fdk_cuda.triton.kernels.dgrad_wgmma import dgrad_wgmma_kernel
    from fdk_cuda.triton.kernels.gemm_wgmma import gemm_wgmma_kernel
    from fdk_cuda.triton.kernels.tma_pipeline import shared_layout

    HAS_GLUON = True
except (ImportError, AttributeError):  # Gluon is experimental: a later Triton may rename things
    HAS_GLUON = False

PERMUTE_BLOCK = 1024
REDUCE_BLOCK = 1024

# Kernels that cannot be used with a kind of weight and configuration: Triton chose a layout in
# which ``dgrad_kernel`` is wrong, or could not compile or load a Gluon kernel.
_not_in_layout: set[tuple[object, ...]] = set()
_not_made: set[tuple[object, ...]] = set()


@cache
def gpu_at(index: int) -> Gpu:
    """Returns the configuration data of a device; -1 is the CPU, for Triton's interpreter."""
    gpu = H200 if index < 0 else gpu_of(torch.cuda.get_device_capability(index))
    if HAS_GLUON and not INTERPRETED:
        return gpu
    return replace(gpu, limits=replace(gpu.limits, gemm_wgmma_m=0, dgrad_wgmma_m=0))


@cache
def can_overlap(index: int) -> bool:
    """Returns whether a device has programmatic dependent launch and bulk prefetch to L2."""
    return index >= 0 and gpu_at(index).can_overlap


def linear(x: Tensor, w: PackedWeight, bias: Tensor | None, config: Config) -> Tensor:
    """Computes ``x @ W_hat.T + bias`` with the kernel of a configuration."""
    if isinstance(config, GemvConfig):
        return gemv(x, w, bias, config)
    if isinstance(config, GemmConfig):
        return gemm(x, w, bias, config)
    if isinstance(config, GemmWgmmaConfig):
        y = gemm_wgmma(x, w, bias, config)
        return linear(x, w, bias, None) if y is None else y
    return torch.nn.functional.linear(x, dequantise(w, x.dtype), bias)


def linear_dgrad(grad_y: Tensor, w: PackedWeight, config: GradConfig) -> Tensor:
    """Computes ``dy @ W_hat`` with the kernel of a configuration."""
    if isinstance(config, DgradConfig):
        return dgrad(grad_y, w, config)
    if isinstance(config, DgradWgmmaConfig):
        grad_x = dgrad_wgmma(grad_y, w, config)
        return linear_dgrad(grad_y, w, None) if grad_x is None else grad_x
    return grad_y @ dequantise(w, grad_y.dtype)


def gemv(x: Tensor, w: PackedWeight, bias: Tensor | None, config: GemvConfig) -> Tensor:
    """Computes ``x @ W_hat.T + bias``, 8 or 16 rows of x a program."""
    a, m = w.layout, x.shape[0]
    out = new_output((m, a.n), x)
    tensors = (x, *w.tensors, x if bias is None else bias, out)
    key = _gemv_key(m, x.dtype, bias is None, config, w)
    if not launch_compiled(key, tensors):
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
        compile_and_launch(key, gemv_kernel, grid, tensors, sizes, constants, **options)
    return _rounded(out, x)


def launched_gemv(
    device: int, m: int, dtype: torch.dtype, no_bias: bool, config: GemvConfig, w: PackedWeight
) -> CompiledLaunch | None:
    """Returns the launch that ``gemv`` cached for m rows, if there is one."""
    return find_compiled(device, _gemv_key(m, dtype, no_bias, config, w))


def _gemv_key(
    m: int, dtype: torch.dtype, no_bias: bool, c: GemvConfig, w: PackedWeight
) -> tuple[object, ...]:
    # Field by field: hashing a dataclass takes longer.
    chosen = c.n_tiles, c.warps, c.ahead, c.fetch, c.overlap, c.registers, c.minus
    return (m, dtype, no_bias, *chosen, *w.key)


def gemm(x: Tensor, w: PackedWeight, bias: Tensor | None, config: GemmConfig) -> Tensor:
    """Computes ``x @ W_hat.T + bias``, block_m rows of x a program."""
    a, m, gpu = w.layout, x.shape[0], gpu_at(x.get_device())
    permuted = permute(x, w)
    split = config.split_k > 1
    out = new_output((m, a.n), x)
    target = permuted.new_empty((config.split_k, m, a.n), dtype=torch.float32) if split else out
    has_bias = bias is not None and not split
    tensors = (permuted, *w.tensors, bias if bias is not None else x, target)
    key = ("gemm", m, x.dtype, has_bias, config, *w.key)
    if not launch_compiled(key, tensors):
        constants = w.constants(x.dtype) | {
            "HAS_BIAS": has_bias,
            "N_TILES": config.n_tiles,
            "WARPS": config.warps,
            "BLOCK_M": config.block_m,
            "GROUP_M": 4,
            "STAGES": config.stages,
            "TABLE": takes_table(config, a.bits, a.padded_group, gpu.shared_bytes),
        }
        if gpu.is_measured:
            constants |= w.fused(GEMM_FUSED_BITS)
        blocks_n = triton.cdiv(a.n_tiles, config.n_tiles * config.warps)
        grid = (blocks_n * triton.cdiv(m, config.block_m), config.split_k)
        options = {"num_warps": config.warps, "num_stages": config.stages}
        compile_and_launch(
            key, gemm_kernel, grid, tensors, (m, a.n, a.k_tiles, a.groups), constants, **options
        )
    if split:
        split_k_reduce(target, bias, out)
    return _rounded(out, x)


def gemm_wgmma(
    x: Tensor, w: PackedWeight, bias: Tensor | None, config: GemmWgmmaConfig
) -> Tensor | None:
    """Computes ``x @ W_hat.T + bias`` by wgmma, block_m rows of x a program (Hopper).

    Returns:
        y; None, with a warning, where Triton cannot make the kernel. If only clusters are
        unavailable, the kernel runs without them.
    """
    permuted, out = permute(x, w), x.new_empty((x.shape[0], w.layout.n))
    first = last_wave(x.shape[0], w.layout.n, config, gpu_at(x.get_device()))
    if first is None:
        return _gemm_wgmma(permuted, w, bias, config, out)
    pair = replace(config, split_k=2, cluster=2)
    for outputs, own in ((slice(0, first), config), (slice(first, None), pair)):
        own_bias = None if bias is None else bias[outputs]
        if _gemm_wgmma(permuted, w.outputs(outputs), own_bias, own, out[:, outputs]) is None:
            return None
    return out


def _gemm_wgmma(
    x: Tensor, w: PackedWeight, bias: Tensor | None, config: GemmWgmmaConfig, out: Tensor
) -> Tensor | None:
    """Computes y for permuted x into ``out``, which may be a slice of the columns of y."""
    a, m = w.layout, x.shape[0]
    has_bias = bias is not None and config.splits == 1
    kind = (x.dtype, has_bias, config.block_m, config.cluster, config.splits > 1, *w.key)
    if kind in _not_made:
        if config.cluster == 1:
            return None
        return _gemm_wgmma(x, w, bias, replace(config, cluster=1), out)
    blocks_m = triton.cdiv(m, config.block_m)
    target = out
    if config.splits > 1:  # Whole blocks; split_k_reduce skips the rows past m.
        shape = config.splits * blocks_m * config.block_m, a.n
        target = x.new_empty(shape, dtype=torch.float32)
    tensors = (*w.tensors, bias if bias is not None and has_bias else x)
    store_rows = config.block_m // config.cluster

    def make(key: tuple[object, ...], arguments: tuple[Any, ...]) -> CompiledLaunch:
        constants = w.constants(x.dtype) | {
            "HAS_BIAS": has_bias,
            "BLOCK_M": config.block_m,
            "STAGES": config.stages,
            "CLUSTER": config.cluster,
        }
        constants |= w.fused(GEMM_WGMMA_FUSED_BITS)
        sizes = m, a.n, a.k_tiles, a.groups, config.split_k
        grid = (triton.cdiv(a.n, WGMMA_TILE_N) * blocks_m * config.splits,)
        return _compile(
            key, gemm_wgmma_kernel, grid, arguments, sizes, constants, cluster=config.cluster
        )

    key = ("gemm_wgmma", m, has_bias, config, x.dtype, *w.key)
    load, store = _descriptor(x, config.block_m, 64), _descriptor(target, store_rows, WGMMA_TILE_N)
    if not _run_wgmma(
        key, kind, load, tensors, (store,), make, config if config.cluster == 1 else None
    ):
        return _gemm_wgmma(x, w, bias, config, out)
    if config.splits > 1:
        y = out if out.is_contiguous() else x.new_empty((m, a.n))
        split_k_reduce(target.view(config.splits, -1, a.n), bias, y)
        if y is not out:  # A slice of y, without clusters.
            out.copy_(y)
    return out


def dgrad(grad_y: Tensor, w: PackedWeight, config: DgradConfig) -> Tensor:
    """Computes ``dy @ W_hat``, 8 * m_tiles rows of dy a program.

    Dequantises and calls cuBLAS where Triton would transpose codes in the wrong layout.
    """
    a, m = w.layout, grad_y.shape[0]
    kind = (grad_y.dtype, replace(config, split_n=1), *w.key)
    if kind in _not_in_layout:
        return grad_y @ dequantise(w, grad_y.dtype)
    split = config.split_n > 1
    out = new_output((m, a.k), grad_y)
    target = grad_y.new_empty((config.split_n, m, a.k), dtype=torch.float32) if split else out
    tensors = (grad_y, *w.tensors, target)
    key = ("dgrad", m, grad_y.dtype, config, *w.key)
    if not launch_compiled(key, tensors):
        count = min(config.positions, POSITIONS[a.bits])
        overlap = config.overlap and can_overlap(grad_y.get_device())
        constants = w.constants(grad_y.dtype) | {
            "COUNT": count,
            "N_TILES": config.n_tiles,
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
        if not compile_and_launch(key, dgrad_kernel, grid, *arguments, **options):
            _not_in_layout.add(kind)
            return grad_y @ dequantise(w, grad_y.dtype)
    if split:
        split_k_reduce(target, None, out)
    return _rounded(out, grad_y)


def _transposes_in_layout(compiled: Any) -> bool:
    """Returns whether codes are transposed correctly; False if Triton kept no layout text."""
    return is_in_layout(compiled.asm.get("ttgir", ""))


def dgrad_wgmma(grad_y: Tensor, w: PackedWeight, config: DgradWgmmaConfig) -> Tensor | None:
    """Computes ``dy @ W_hat`` by wgmma, block_m rows of dy a program (Hopper).

    Returns:
        dx; None, with a warning, where Triton cannot make the kernel.
    """
    a, m = w.layout, grad_y.shape[0]
    split = config.split_n > 1
    kind = ("dgrad", grad_y.dtype, config.block_m, config.n_tiles, split, *w.key)
    if kind in _not_made:
        return None
    out = target = grad_y.new_empty((m, a.k))
    if split:
        target = grad_y.new_empty((config.split_n, m, a.k), dtype=torch.float32)

    def make(key: tuple[object, ...], arguments: tuple[Any, ...]) -> CompiledLaunch:
        constants = w.constants(grad_y.dtype) | {
            "BLOCK_M": config.block_m,
            "STAGES": config.stages,
            "COUNT": config.positions,
            "ROUND": config.n_tiles,
        }
        grid = dgrad_wgmma_programs(a, m, config), config.split_n
        sizes = m, a.n, a.k, a.k_tiles, a.groups
        return _compile(key, dgrad_wgmma_kernel, grid, arguments, sizes, constants)

    # TMA needs an aligned address, which a view of a larger tensor may not have.
    rows = grad_y if are_aligned((grad_y,)) else grad_y.clone()
    key = ("dgrad_wgmma", m, config, grad_y.dtype, *w.key)
    load = _descriptor(rows, config.block_m, 64)
    if not _run_wgmma(key, kind, load, (*w.tensors, target), (), make, config):
        return None
    if split:
        split_k_reduce(target, None, out)
    return out


def _compile(
    key: tuple[object, ...],
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    sizes: tuple[int, ...],
    constants: dict[str, Any],
    cluster: int = 1,
) -> CompiledLaunch:
    """Compiles a Gluon kernel."""
    options = {"num_warps": WGMMA_WARPS, "launch_pdl": True}
    return compile_launch(key, kernel, grid, arguments, sizes, constants, cluster, **options)


def _run_wgmma(
    key: tuple[object, ...],
    kind: tuple[object, ...],
    load: Any,
    tensors: tuple[Tensor, ...],
    stores: tuple[Any, ...],
    make: Callable[[tuple[object, ...], tuple[Any, ...]], CompiledLaunch],
    reported: object | None,
) -> bool:
    """Launches a Gluon kernel; returns False and adds ``kind`` to ``_not_made`` if that fails.

    Args:
        key: key of the cached launch.
        kind: key under which a failure is recorded.
        load: TMA descriptor of x or dy.
        tensors: arguments that the kernel gets as addresses.
        stores: TMA descriptors of the results.
        make: compiles the kernel for ``(load, *tensors, *stores)``.
        reported: the configuration that the warning of a failure names; None for no warning.
    """
    device = tensors[0].get_device()
    run = find_compiled(device, key) if are_aligned(tensors) else None
    if run is None:
        try:
            run = make(key, (load, *tensors, *stores))
        except (TritonError, RuntimeError) as error:
            _not_made.add(kind)
            if reported is not None:
                what = f"Triton {triton.__version__} cannot make {key[0]}_kernel for {reported}"
                warnings.warn(f"{what}: {type(error).__name__}: {error}", stacklevel=4)
            return False
    run((load, *(tensor.data_ptr() for tensor in tensors), *stores), device)
    return True


def _descriptor(tensor: Tensor, rows: int, columns: int) -> Any:
    """Returns the TMA descriptor of a matrix, copied in blocks of ``[rows, columns]``."""
    layout = shared_layout(8 * tensor.element_size())
    shape, strides = list(tensor.shape), list(tensor.stride())
    return TensorDescriptor(tensor, shape, strides, [rows, columns], layout)


def dequantise(
    w: PackedWeight, dtype: torch.dtype, config: DequantiseConfig | None = None
) -> Tensor:
    """Computes ``W_hat :: [n, k]``, bit for bit as ``QuantisedTensor.dequantise``."""
    a = w.layout
    out = w.words.new_empty((a.n, a.k), dtype=torch.float32 if INTERPRETED else dtype)
    tensors = (*w.tensors, out)
    key = ("dequantise", dtype, config, *w.key)
    if not launch_compiled(key, tensors):
        c = config or dequantise_config(a.bits, affine=w.zero_point is not None)
        constants = w.constants(dtype) | {"WARPS": c.warps, "AHEAD": c.ahead, "TABLE": c.table}
        grid = (triton.cdiv(a.n_tiles, c.rounds), triton.cdiv(a.k_tiles, c.warps))
        sizes = (a.n, a.k, a.k_tiles, a.groups, c.rounds)
        compile_and_launch(
            key, dequantise_kernel, grid, tensors, sizes, constants, num_warps=c.warps
        )
    return out.to(dtype)


def permute(x: Tensor, w: PackedWeight) -> Tensor:
    """Returns x with its columns in the order in which the GEMM kernels read them."""
    a, m = w.layout, x.shape[0]
    width = a.k_tiles * a.tile_k
    permuted = x.new_empty((m, width))
    key = ("permute", m, x.dtype, a)
    if not launch_compiled(key, (x, permuted)):
        overlap = can_overlap(x.get_device())
        constants = w.constants(x.dtype) | {"BLOCK": PERMUTE_BLOCK, "OVERLAP": overlap}
        grid = (m, triton.cdiv(width, PERMUTE_BLOCK))
        sizes = (a.k, width, a.groups)
        compile_and_launch(
            key, permute_kernel, grid, (x, permuted), sizes, constants, **pdl(overlap)
        )
    return permuted


def split_k_reduce(partial: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Adds partial sums, and the bias, into ``out :: [m, n]``.

    Args:
        partial: ``[splits, rows, n, float32]``, of which the first m rows are added.
        bias: ``[n]`` or None.
        out: the result.
    """
    tensors = (partial, out if bias is None else bias, out)
    key = ("reduce", *partial.shape, out.shape[0], out.dtype, bias is None)
    if not launch_compiled(key, tensors):
        overlap = can_overlap(out.get_device())
        # Small results take smaller blocks, to occupy every processor.
        block = REDUCE_BLOCK if out.numel() >= 256 * REDUCE_BLOCK else REDUCE_BLOCK // 8
        constants = {
            "SPLIT_K": len(partial),
            "HAS_BIAS": bias is not None,
            "BLOCK": block,
            "OVERLAP": overlap,
        }
        sizes = (out.numel(), partial.stride(0), out.shape[1])
        grid = (triton.cdiv(out.numel(), block),)
        compile_and_launch(key, reduce_kernel, grid, tensors, sizes, constants, **pdl(overlap))


def pdl(overlap: bool) -> dict[str, int]:
    """Returns the launch option of programmatic dependent launch."""
    return {"launch_pdl": True} if overlap else {}


def limit(registers: int) -> dict[str, int]:
    """Returns the compile option that limits the registers of a thread; 0 is no limit."""
    return {"maxnreg": registers} if registers else {}


def new_output(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Allocates a result; float32 in the interpreter, which truncates where a GPU rounds."""
    return like.new_empty(shape, dtype=torch.float32) if INTERPRETED else like.new_empty(shape)


def _rounded(out: Tensor, like: Tensor) -> Tensor:
    """Rounds a result of ``new_output`` in the interpreter."""
    return out.to(like.dtype) if INTERPRETED else out

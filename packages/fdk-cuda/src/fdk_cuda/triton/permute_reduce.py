"""What runs before and behind a product of many rows: x permuted, parts of k added up."""

from dataclasses import replace
from functools import cache

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from fdk_cuda.triton.configs import H200, Gpu, gpu_of
from fdk_cuda.triton.kernels.gemm import permute_kernel, reduce_kernel
from fdk_cuda.triton.packed_weight import Weight
from fdk_cuda.triton.remembered import INTERPRETED, launch, relaunch

try:
    import fdk_cuda.triton.kernels.dgrad_wgmma
    import fdk_cuda.triton.kernels.gemm_wgmma  # noqa: F401

    HAS_GLUON = True
except (ImportError, AttributeError):  # Gluon is experimental: a later Triton may name it anew
    HAS_GLUON = False

PERMUTE_BLOCK = 1024
REDUCE_BLOCK = 1024


@cache
def gpu_at(index: int) -> Gpu:
    """What decides about configurations on a device; -1 is the CPU, of the interpreter."""
    gpu = H200 if index < 0 else gpu_of(torch.cuda.get_device_capability(index))
    if HAS_GLUON and not INTERPRETED:
        return gpu
    return replace(gpu, limits=replace(gpu.limits, many_m=0, many_transposed_m=0))


@cache
def can_overlap(index: int) -> bool:
    """Whether a device overlaps kernels and fetches to the L2; the interpreter does neither."""
    return index >= 0 and gpu_at(index).can_overlap


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
        launch(key, permute_kernel, grid, (x, permuted), sizes, constants, **pdl(overlap))
    return permuted


def pdl(overlap: bool) -> dict[str, int]:
    """The option of a launch that may come before the last kernel ends."""
    return {"launch_pdl": True} if overlap else {}


def limit(registers: int) -> dict[str, int]:
    """The option of a kernel whose threads have at most so many registers."""
    return {"maxnreg": registers} if registers else {}


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
        launch(key, reduce_kernel, grid, tensors, sizes, constants, **pdl(overlap))

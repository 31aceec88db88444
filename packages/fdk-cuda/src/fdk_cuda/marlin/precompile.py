"""Compilation ahead of first use."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from fdk_cuda.gpu import gpu_index
from fdk_cuda.marlin.dgrad import dgrad_shapes
from fdk_cuda.marlin.heuristics_hopper import hopper_shapes, plan_hopper_invariant
from fdk_cuda.marlin.heuristics_small_m import MAX_M, plan_small
from fdk_cuda.marlin.instantiations import (
    Variant,
    dequantise_program,
    hopper_dgrad_program,
    hopper_program,
    repack_program,
    small_m_program,
    split_k_reduce_program,
)
from fdk_cuda.marlin.layout import Geometry, has_grid, unsupported_reason
from fdk_cuda.marlin.ops import DTYPES, small_m_limit
from fdk_cuda.marlin.runtime import device_limits
from fdk_cuda.nvrtc import Program, architecture, cached_cubin
from fdk_cuda.precompile_args import Layer, check_activations, checked_layers
from fdk_formats.format import Format


def precompile(
    layers: Iterable[Layer],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int | None = None,
    batch_invariant: bool = False,
    gradient: bool = False,
) -> int:
    """Compiles every kernel that layers of the Marlin backends need, for any m, into the cache.

    Args:
        layers: format, n and k of each.
        dtype: dtype of the activations.
        device: the GPU, by default the current one.
        batch_invariant: True for layers of batch-invariant backends, which need fewer kernels.
        gradient: also compile the kernels of the gradient, on Hopper.

    Returns:
        The number of kernels, including those that were compiled before.

    Raises:
        CompilerMissingError: NVRTC is missing.
        RuntimeError: torch finds no GPU.
        TypeError, ValueError: Marlin does not support the activations or a layer.

    Example:
        >>> fdk_cuda.precompile([("int4-g64", 4096, 4096)], dtype=torch.bfloat16)  # doctest: +SKIP
    """
    check_activations("precompile", dtype, DTYPES)
    kernel_layers = list(_kernel_formats(checked_layers("precompile", layers)))
    index = gpu_index("precompile", device)
    arch = architecture(torch.cuda.get_device_capability(index))
    limits = device_limits(index)
    programs: set[Program] = set()
    for format, n, k in kernel_layers:
        geometry = Geometry.of(format, n, k)
        variant = Variant.of(geometry, dtype)
        programs |= {dequantise_program(variant), repack_program(geometry)}
        if not (batch_invariant and limits.is_hopper):
            most = small_m_limit(str(format), n, k, index)
            for m in [MAX_M] if batch_invariant else range(1, most + 1):
                programs.add(small_m_program(variant, plan_small(geometry, dtype, m, limits).shape))
        if limits.is_hopper:
            shapes = hopper_shapes(geometry, limits)
            if batch_invariant:
                shapes = [plan_hopper_invariant(geometry, 1, limits).shape]
            for shape in shapes:
                programs.add(hopper_program(variant, shape))
                if shape.cluster == 1:
                    programs.add(split_k_reduce_program(dtype, shape))
            for shape in dgrad_shapes(geometry, limits) if gradient else ():
                programs.add(hopper_dgrad_program(variant, shape))
                programs.add(split_k_reduce_program(dtype, shape))
    for program in programs:
        cached_cubin(program, arch)
    return len(programs)


def _kernel_formats(
    layers: Iterable[tuple[Format, int, int]],
) -> Iterator[tuple[Format, int, int]]:
    """Yields each layer with every format that its kernels may be compiled for.

    The format depends on the values of the weight, see ``backend.py``.
    """
    for format, n, k in layers:
        if reason := unsupported_reason(format, k):
            raise ValueError(
                f"precompile: Marlin does not support {format} [n={n}, k={k}]: {reason}; "
                "Triton, which may, compiles at first use"
            )
        codebooks = [format.codebook]
        if has_grid(format):
            codebooks.append("custom")
        if format.bits == 1 and not format.is_affine:
            codebooks = ["binary", "custom"]
        for codebook in codebooks:
            yield replace(format, codebook=codebook), n, k

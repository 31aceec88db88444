"""Compiling ahead of first use."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from fdk_cuda.gpu import gpu_index
from fdk_cuda.marlin.dgrad import backward_shapes
from fdk_cuda.marlin.heuristics_hopper import hopper_shapes, plan_hopper_invariant
from fdk_cuda.marlin.heuristics_small_m import MAX_ROWS, plan_small
from fdk_cuda.marlin.instantiations import (
    Variant,
    dequantise_program,
    hopper_backward_program,
    hopper_program,
    layout_program,
    small_m_program,
    sum_splits_program,
)
from fdk_cuda.marlin.layout import Geometry, has_grid, why_not
from fdk_cuda.marlin.ops import DTYPES, few_rows
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
    """Compiles, into the cache on disk, all that layers of the Marlin backends need at any m.

    Args:
        layers: format, n and k of each.
        dtype: of the activations.
        device: the GPU; the current one by default.
        batch_invariant: for layers that were packed so, which take fewer kernels.
        gradient: also what the gradient takes beside them, on Hopper.

    Returns:
        How many kernels there are; those that were compiled before cost nothing.

    Raises:
        CompilerMissingError: where NVRTC is missing.
        RuntimeError: where torch finds no GPU.
        TypeError, ValueError: for activations or a layer that Marlin does not take.
    """
    check_activations("precompile", dtype, DTYPES)
    told = list(_as_kernels_are_told(checked_layers("precompile", layers)))
    index = gpu_index("precompile", device)
    arch = architecture(torch.cuda.get_device_capability(index))
    limits = device_limits(index)
    programs: set[Program] = set()
    for format, n, k in told:
        geometry = Geometry.of(format, n, k)
        variant = Variant.of(geometry, dtype)
        programs |= {dequantise_program(variant), layout_program(geometry)}
        if not (batch_invariant and limits.is_hopper):
            few = few_rows(str(format), n, k, index)
            for m in [MAX_ROWS] if batch_invariant else range(1, few + 1):
                programs.add(small_m_program(variant, plan_small(geometry, dtype, m, limits).shape))
        if limits.is_hopper:
            shapes = hopper_shapes(geometry, limits)
            if batch_invariant:
                shapes = [plan_hopper_invariant(geometry, 1, limits).shape]
            for shape in shapes:
                programs.add(hopper_program(variant, shape))
                if shape.cluster == 1:
                    programs.add(sum_splits_program(dtype, shape))
            for shape in backward_shapes(geometry, limits) if gradient else ():
                programs.add(hopper_backward_program(variant, shape))
                programs.add(sum_splits_program(dtype, shape))
    for program in programs:
        cached_cubin(program, arch)
    return len(programs)


def _as_kernels_are_told(
    layers: Iterable[tuple[Format, int, int]],
) -> Iterator[tuple[Format, int, int]]:
    """Layers by what their layouts may come to be, which the weight decides (``backend.py``)."""
    for format, n, k in layers:
        if reason := why_not(format, k):
            raise ValueError(
                f"precompile: Marlin does not take {format} [n={n}, k={k}]: {reason}; "
                "Triton, which may, compiles at first use"
            )
        codebooks = [format.codebook]
        if has_grid(format):
            codebooks.append("custom")
        if format.bits == 1 and not format.is_affine:
            codebooks = ["binary", "custom"]
        for codebook in codebooks:
            yield replace(format, codebook=codebook), n, k

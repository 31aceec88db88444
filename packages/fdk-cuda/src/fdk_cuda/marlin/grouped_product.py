"""Grouped GEMM by wgmma on Hopper, for many rows per expert: hopper_gemm.cu over a stack."""

from functools import lru_cache

import torch
from torch import Tensor

from fdk_cuda.marlin.heuristics_hopper import GROUP_M_TILES, GroupedPlan
from fdk_cuda.marlin.instantiations import Variant, hopper_program, shared_kernel
from fdk_cuda.marlin.layout import BLOCK_K, BLOCK_N, Geometry
from fdk_cuda.marlin.runtime import GROUPED_FIELDS, device_limits
from fdk_cuda.nvrtc import Launch, swizzled_map
from fdk_cuda.triton.expert_launch import Routing


def grouped_product(
    x: Tensor,
    packed: Tensor,
    codebook: Tensor,
    geometry: Geometry,
    routing: Routing,
    plan: GroupedPlan,
    *,
    bias: Tensor | None,
    swiglu: bool,
    zeros: bool,
    sorted_y: bool,
    interleaved: bool,
) -> Tensor:
    """Computes ``x @ W_hat[expert].T + bias[expert]`` for every pair.

    Args:
        x: ``[pairs, k]``, in the order of the experts, as ``gather`` returns it.
        packed: ``[experts, *geometry.shape, uint8]``.
        codebook: ``[experts or 1, 2^bits, dtype of x]``, contiguous in the second dimension.
        geometry: of the weight of an expert.
        routing: the experts of the pairs, with the rows of tiles of the plan.
        plan: how the product is cut.
        bias: ``[experts, n, dtype of x]`` or None.
        swiglu: whether the first half of the outputs are gates of the second.
        zeros: whether rows of pairs of no expert are zeros; otherwise they stay unwritten.
        sorted_y: whether the result is in the order of x; else in the order of the pairs.
        interleaved: whether octets of rows are of the first and of the second half of the outputs
            in turns. With ``swiglu`` they always are.

    Returns:
        ``[pairs, n]``, or ``[pairs, n / 2]``, in the dtype of x.
    """
    pairs, index = routing.ids.numel(), x.get_device()
    width = geometry.n // 2 if swiglu else geometry.n
    out = x.new_zeros((pairs, width)) if zeros else x.new_empty((pairs, width))
    most = plan.n_tiles * routing.max_tiles
    grid = min(most, device_limits(index).sm_count)
    box_rows = min(plan.shape.tile_m, pairs)
    _product(geometry, x.dtype, plan, swiglu, interleaved, grid, index)(
        swizzled_map(x.data_ptr(), pairs, x.shape[1], box_rows, x.dtype, index),
        packed.data_ptr(),
        codebook.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        0,  # no partial sums
        *(geometry.n, pairs),
        geometry.padded_k // (BLOCK_K * plan.shape.k_blocks),
        geometry.padded_n // BLOCK_N,
        *(plan.n_tiles, routing.max_tiles, GROUP_M_TILES),
        1,  # splits
        most,  # whole tiles: at least those that there are
        box_rows,
        routing.tiles.data_ptr(),
        0 if sorted_y else routing.order.data_ptr(),
        routing.max_tiles,
        codebook.stride(0) if len(codebook) > 1 else 0,
    )
    return out


@lru_cache(maxsize=1024)
def _product(
    geometry: Geometry,
    dtype: torch.dtype,
    plan: GroupedPlan,
    swiglu: bool,
    interleaved: bool,
    grid: int,
    index: int,
) -> Launch:
    """Loads hopper_gemm.cu for stacks, compiling it if needed."""
    variant = Variant.of(geometry, dtype)
    options = {"swiglu": swiglu, "interleaved": interleaved}
    program = hopper_program(variant, plan.shape, experts=True, **options)
    # Without PDL: all that it reads was written just before.
    return Launch(
        shared_kernel(program),
        index,
        fields=GROUPED_FIELDS,
        grid=grid,
        threads=plan.shape.threads,
        shared_bytes=plan.shared_bytes,
    )

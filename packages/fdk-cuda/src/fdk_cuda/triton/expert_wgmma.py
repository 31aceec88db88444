"""Grouped GEMM by wgmma on Hopper, for many rows per expert: hopper_gemm.cu over a stack.

The stack is kept once, in the Triton layout, which the kernels for few rows read. A call repacks it
to the Marlin layout, in memory that is free again after the product. That moves every packed byte
twice, which is little beside the arithmetic of many rows.
"""

from functools import lru_cache

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from fdk_cuda.marlin.heuristics_hopper import GROUP_M_TILES, GroupedPlan, plan_grouped
from fdk_cuda.marlin.instantiations import (
    Variant,
    hopper_program,
    repack_stack_program,
    shared_kernel,
)
from fdk_cuda.marlin.layout import BLOCK_K, BLOCK_N, Geometry
from fdk_cuda.marlin.repack import REPACK_STACK_FIELDS
from fdk_cuda.marlin.runtime import GROUPED_FIELDS, device_limits
from fdk_cuda.nvrtc import Launch, swizzled_map, unavailable_reason
from fdk_cuda.triton.compiled_launch import INTERPRETED, compile_and_launch, launch_compiled
from fdk_cuda.triton.configs.experts import ExpertConfig
from fdk_cuda.triton.expert_launch import Routing
from fdk_cuda.triton.kernels.decode import DTYPES
from fdk_cuda.triton.kernels.expert_gather import expert_gather_kernel
from fdk_cuda.triton.launch import can_overlap, pdl
from fdk_cuda.triton.packed_weight import PackedWeight
from fdk_formats.scales import decode_scale

# Mean rows of an expert from which stacks are repacked (H200, 4 bits, MLP in microseconds, Triton
# and this): 48 rows, DeepSeek-V2-Lite 346, 368; 128, Mixtral 1363, 1214; 256, Qwen3-30B-A3B
# 1378, 1015.
MIN_ROWS = 64
REPACK_WARPS = 4  # of a thread block of repack_stack.cu
# Rows of an octet, and columns of 16 bytes of x.
OCTET, COLUMN_MULTIPLE = 8, 8
GATHER_BLOCK = 1024


def wgmma_config(w: PackedWeight, pairs: int, index: int) -> ExpertConfig | None:
    """Returns the configuration of the grouped GEMM, or None where a Triton kernel computes it.

    Args:
        w: a stack of experts.
        pairs: rows of x.
        index: index of the GPU, -1 for the CPU.
    """
    experts = len(w.words)
    if INTERPRETED or pairs < MIN_ROWS * experts or not _is_hopper(index):
        return None
    geometry = stack_geometry(w)
    return None if geometry is None else _config(geometry, pairs, experts, index)


@lru_cache(maxsize=4096)  # pairs is any number
def _config(geometry: Geometry, pairs: int, experts: int, index: int) -> ExpertConfig:
    plan = plan_grouped(geometry, pairs, experts, device_limits(index))
    return ExpertConfig(plan, plan.shape.tile_m)


def _is_hopper(index: int) -> bool:
    return device_limits(index).is_hopper and unavailable_reason() is None


def stack_geometry(w: PackedWeight) -> Geometry | None:
    """Returns the Marlin layout of an expert, or None for groups that it does not have."""
    a, zero = w.layout, w.zero_point
    if a.group_size % (BLOCK_K // 2) and a.groups > 1:
        return None
    scale = torch.bfloat16 if w.scale.dtype == torch.uint8 else w.scale.dtype
    has_zero = zero is not None, zero is not None and zero.dtype == torch.uint8
    return Geometry(a.bits, a.n, a.k, a.group_size, scale, *has_zero)


def expert_wgmma(
    x: Tensor,
    w: PackedWeight,
    routing: Routing,
    plan: GroupedPlan,
    *,
    bias: Tensor | None = None,
    swiglu: bool = False,
    zeros: bool = False,
    sorted_x: bool = False,
    sorted_y: bool = False,
) -> Tensor:
    """Computes ``x @ W_hat[expert].T + bias[expert]`` for every pair.

    Args:
        x: ``[rows, k]``, a row for one pair or for the neighbouring pairs of a token.
        w: a stack of experts.
        routing: the experts of the pairs, with the rows of tiles of the plan.
        plan: how the product is cut.
        bias: ``[experts, n, dtype of x]`` or None.
        swiglu: whether the first half of the outputs are gates of the second.
        zeros: whether rows of pairs of no expert are zeros; otherwise they stay unwritten.
        sorted_x: whether x has a row of each pair, in the order of their experts.
        sorted_y: whether the result is in that order too; else in the order of the pairs.

    Returns:
        ``[pairs, n]``, or ``[pairs, n / 2]``, in the dtype of x.
    """
    geometry = stack_geometry(w)
    assert geometry is not None
    if not sorted_x:
        x = gather(x, routing)
    packed = repack_stack(w, geometry, gates=swiglu)
    values = w.values[:, DTYPES.index(x.dtype)]
    return grouped_product(
        *(x, packed, values, geometry, routing, plan),
        bias=bias,
        swiglu=swiglu,
        zeros=zeros,
        sorted_y=sorted_y,
    )


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
    interleaved: bool = False,
) -> Tensor:
    """Computes ``expert_wgmma`` from a stack in the Marlin layout.

    Args:
        x: ``[pairs, k]``, in the order of the experts.
        packed: ``[experts, *geometry.shape, uint8]``.
        codebook: ``[experts or 1, 2^bits, dtype of x]``, contiguous in the second dimension.
        geometry: of the weight of an expert.
        routing, plan, bias, swiglu, zeros, sorted_y: see ``expert_wgmma``.
        interleaved: whether octets of rows are of the first and of the second half of the outputs
            in turns. With ``swiglu`` they always are.
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


def repack_stack(w: PackedWeight, geometry: Geometry, *, gates: bool) -> Tensor:
    """Returns a stack in the Marlin layout, ``[experts, *geometry.shape, uint8]``.

    Args:
        w: the stack.
        geometry: of an expert, see ``stack_geometry``.
        gates: whether to put rows g of the gates and of what they multiply, in turns, into rows g
            and g + 8 of a fragment.
    """
    experts = len(w.words)
    packed = w.words.new_empty((experts, *geometry.shape), dtype=torch.uint8)
    scale = w.scale
    if scale.dtype == torch.uint8:
        scale = decode_scale(scale).to(geometry.scale_dtype)
    zero_point = scale if w.zero_point is None else w.zero_point.to(scale.dtype)
    fields = repack_fields(w, geometry, gates=gates)
    launch = _repack(geometry, -(-fields[0] // REPACK_WARPS), packed.get_device())
    launch(w.words.data_ptr(), scale.data_ptr(), zero_point.data_ptr(), packed.data_ptr(), *fields)
    return packed


def repack_fields(w: PackedWeight, geometry: Geometry, *, gates: bool) -> tuple[int, ...]:
    """Returns the fields of repack_stack.cu's Params after the pointers."""
    a = w.layout
    n_blocks, k_blocks, _ = geometry.shape
    warps = len(w.words) * n_blocks * -(-k_blocks // (a.tile_k // BLOCK_K))
    gate_octets = a.n // 2 // OCTET if gates else 0
    return (
        *(warps, a.n_tiles, a.k_tiles, a.groups),
        *(geometry.repeats, n_blocks, k_blocks, gate_octets),
    )


@lru_cache(maxsize=1024)
def _repack(geometry: Geometry, grid: int, index: int) -> Launch:
    return Launch(
        shared_kernel(repack_stack_program(geometry)),
        index,
        fields=REPACK_STACK_FIELDS,
        grid=grid,
        threads=32 * REPACK_WARPS,
        shared_bytes=0,
    )


def gather(x: Tensor, routing: Routing) -> Tensor:
    """Returns the rows of x of all pairs, sorted by expert, padded to whole 16 bytes.

    Args:
        x: ``[rows, k]``, a row for one pair or for the neighbouring pairs of a token.
        routing: the experts of the pairs.
    """
    pairs, k = routing.ids.numel(), x.shape[1]
    width = -(-k // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    out = x.new_empty((pairs, width))
    sharing = pairs // len(x)
    tensors = (x, routing.order, out)
    key = ("expert_gather", pairs, sharing, k, x.dtype)
    if not launch_compiled(key, tensors):
        overlap = can_overlap(x.get_device())
        constants = {"BLOCK": GATHER_BLOCK, "OVERLAP": overlap}
        grid = (pairs, triton.cdiv(width, GATHER_BLOCK))
        sizes = (k, width, sharing)
        compile_and_launch(
            key, expert_gather_kernel, grid, tensors, sizes, constants, **pdl(overlap)
        )
    return out

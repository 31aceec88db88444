"""Launches of the Marlin kernels: a plan, made ready once for each kind of call, then run."""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from fdk_cuda.marlin.heuristics_hopper import (
    GROUP_TILES,
    HopperPlan,
    plan_hopper,
    plan_hopper_invariant,
)
from fdk_cuda.marlin.heuristics_small_m import MAX_ROWS, Device, SmallPlan, plan_small
from fdk_cuda.marlin.instantiations import (
    TABLE_BYTES,
    Variant,
    dequantise_kernel,
    dequantise_warps,
    hopper_kernel,
    small_m_kernel,
    sum_splits_kernel,
)
from fdk_cuda.marlin.layout import BLOCK_COLUMNS, BLOCK_ROWS, Geometry
from fdk_cuda.nvrtc import Kernel, Launch, swizzled_map
from fdk_formats.format import Format

# The notation of ``struct`` for each kernel's Params.
SMALL_FIELDS, DEQUANTISE_FIELDS = "5P10i5I", "3P4i5I"
HOPPER_FIELDS, SUM_FIELDS = "128s5P10i", "3P8i"
SUM_THREADS, SUM_VALUES = 256, 4
# dequantise.cu: up to so many blocks of 32 x 64 a processor has two blocks of threads, else one
# (H200, 16 warps, one and two: 4 bits, 4096 x 4096 11.4 and 11.1 us, 8192 x 8192 46.9 and 49.0).
SHORT_DEQUANTISE_BLOCKS = 64


@cache
def device_limits(index: int) -> Device:
    """What plans need to know of a GPU."""
    properties = torch.cuda.get_device_properties(index)
    return Device(
        processors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        has_clusters=properties.major >= 9,
        is_hopper=properties.major == 9,
    )


def small_launch(variant: Variant, plan: SmallPlan, device: int, *, overlap: bool = True) -> Launch:
    """Loads small_m.cu for a plan, compiling it where it has not been."""
    kernel = small_m_kernel(variant, plan.shape)
    return Launch(
        kernel,
        device,
        fields=SMALL_FIELDS,
        grid=plan.grid,
        threads=32 * plan.shape.warps,
        shared_bytes=plan.shared_bytes,
        cluster=plan.split,
        overlap=overlap and device_limits(device).has_clusters,
    )


def small_fields(variant: Variant, plan: SmallPlan, geometry: Geometry, m: int) -> tuple[int, ...]:
    """The fields of small_m.cu's Params after the pointers."""
    sizes = (geometry.n, geometry.columns, m)
    passes = plan.passes, plan.whole_passes, plan.rounds
    cut = plan.stored_columns, geometry.rows // BLOCK_ROWS, *passes
    return *sizes, *cut, plan.log_share, plan.sum_buffers, *variant.constants


@dataclass(frozen=True)
class HopperRunner:
    """A plan, ready to run.

    Attributes:
        plan: how the product is cut.
        box_rows: rows of x or dy in a tile, which a copy brings.
        product: launches hopper_gemm.cu or hopper_backward.cu.
        fields: of its Params, after the pointers.
        sum: launches sum_splits.cu, where the plan has parts.
        sum_fields: likewise.
    """

    plan: HopperPlan
    box_rows: int
    product: Launch
    fields: tuple[int, ...]
    sum: Launch | None
    sum_fields: tuple[int, ...]


def plan_runner(
    plan: HopperPlan,
    kernel: Kernel,
    notation: str,
    dtype: torch.dtype,
    device: int,
    *,
    sizes: tuple[int, int],
    blocks: tuple[int, int],
    overlap: bool = True,
) -> HopperRunner:
    """Loads the kernels of a plan in one direction, compiling them where they have not been.

    Args:
        plan: in that direction.
        kernel: of the product.
        notation: of ``struct``, for its Params.
        dtype: of the activations.
        device: index of the GPU.
        sizes: columns and rows of the result.
        blocks: the two fields of Params between sizes and tiles: steps, and blocks of the weight.
        overlap: whether kernels may start before the previous one has ended.
    """
    shape = plan.shape
    product = Launch(
        kernel,
        device,
        fields=notation,
        grid=plan.grid,
        threads=shape.threads,
        shared_bytes=plan.shared_bytes,
        cluster=shape.cluster,
        overlap=overlap,
    )
    tiles = plan.row_tiles, plan.column_tiles, min(GROUP_TILES, plan.column_tiles)
    cut = *tiles, plan.splits, plan.whole_tiles
    box_rows = plan.box_rows(sizes[1])
    total = None
    if plan.parts > 0:
        values = plan.parts // plan.splits * shape.columns * shape.rows
        total = Launch(
            sum_splits_kernel(dtype, shape),
            device,
            fields=SUM_FIELDS,
            grid=values // (SUM_THREADS * SUM_VALUES),
            threads=SUM_THREADS,
            shared_bytes=0,
            overlap=overlap,
        )
    fields = *sizes, *blocks, *cut, box_rows
    return HopperRunner(plan, box_rows, product, fields, total, (*sizes, *cut, box_rows))


def hopper_runner(
    geometry: Geometry,
    dtype: torch.dtype,
    m: int,
    plan: HopperPlan,
    device: int,
    *,
    overlap: bool = True,
) -> HopperRunner:
    """Loads the kernels of a forward's plan, compiling them where they have not been."""
    kernel = hopper_kernel(Variant.of(geometry, dtype), plan.shape)
    steps = geometry.columns // (BLOCK_COLUMNS * plan.shape.k_blocks)
    return plan_runner(
        plan,
        kernel,
        HOPPER_FIELDS,
        dtype,
        device,
        sizes=(geometry.n, m),
        blocks=(steps, geometry.rows // BLOCK_ROWS),
        overlap=overlap,
    )


# m is any number of tokens here: the least used ones go.
@lru_cache(maxsize=4096)
def hopper_runner_for(
    format: str, dtype: torch.dtype, n: int, k: int, device: int, batch_invariant: bool, m: int
) -> HopperRunner:
    """What runs m rows of x on Hopper."""
    geometry = Geometry.of(Format.parse(format), n, k)
    planned = plan_hopper_invariant if batch_invariant else plan_hopper
    return hopper_runner(geometry, dtype, m, planned(geometry, m, device_limits(device)), device)


@cache
def small_launch_for(
    format: str, dtype: torch.dtype, m: int, n: int, k: int, device: int, batch_invariant: bool
) -> tuple[Launch, tuple[int, ...]]:
    """What runs m rows of x, up to ``MAX_ROWS``, and the fields after its pointers."""
    geometry = Geometry.of(Format.parse(format), n, k)
    variant = Variant.of(geometry, dtype)
    # Tile, warps and cluster decide in which order a row of y is summed: one plan for every m.
    planned_m = MAX_ROWS if batch_invariant else m
    plan = plan_small(geometry, dtype, planned_m, device_limits(device))
    return small_launch(variant, plan, device), small_fields(variant, plan, geometry, m)


@cache
def dequantise_launch_for(
    format: str, dtype: torch.dtype, n: int, k: int, device: int
) -> tuple[Launch, tuple[int, ...]]:
    """What dequantises a layout, and the fields after its pointers."""
    geometry = Geometry.of(Format.parse(format), n, k)
    variant = Variant.of(geometry, dtype)
    limits = device_limits(device)
    blocks, warps = geometry.shape[0] * geometry.shape[1], dequantise_warps(variant)
    # At 1 bit a warp takes one block and is gone; otherwise there are as few warps as can be, for
    # each block of threads makes a table. See docs/kernels/marlin.md.
    grid, shared = -(-blocks // warps), 0
    if variant.bits > 1:
        is_short = blocks <= SHORT_DEQUANTISE_BLOCKS * limits.processors
        fitting = limits.shared_bytes // (TABLE_BYTES + 1024)
        grid = min(grid, limits.processors * (2 if is_short and fitting >= 2 else 1))
        shared = TABLE_BYTES
    launch = Launch(
        dequantise_kernel(variant),
        device,
        fields=DEQUANTISE_FIELDS,
        grid=grid,
        threads=32 * warps,
        shared_bytes=shared,
        overlap=limits.has_clusters,
    )
    return launch, (n, k, geometry.columns, blocks, *variant.constants)


def run_hopper(
    runner: HopperRunner, x: Tensor, packed: Tensor, codebook: Tensor, bias: Tensor | None, n: int
) -> Tensor:
    """y by one plan, from x with rows of a multiple of 16 bytes."""
    bias_pointer = 0 if bias is None else bias.data_ptr()
    pointers = packed.data_ptr(), codebook.data_ptr(), bias_pointer
    return run_plan(runner, x, pointers, n, bias_pointer=bias_pointer)


def run_plan(
    runner: HopperRunner,
    operand: Tensor,
    pointers: tuple[int, ...],
    width: int,
    *,
    bias_pointer: int = 0,
) -> Tensor:
    """The product [m, width] of one direction.

    Args:
        runner: of that direction.
        operand: x or dy, [m, ...], with rows of a multiple of 16 bytes.
        pointers: the fields of Params between the map of the operand and the result.
        width: columns of the result.
        bias_pointer: what sum_splits.cu adds; 0 for nothing.
    """
    plan, shape = runner.plan, runner.plan.shape
    m = operand.shape[0]
    out = operand.new_empty((m, width))
    parts = out  # not used
    if plan.parts > 0:
        parts = operand.new_empty(plan.parts * shape.columns * shape.rows, dtype=torch.float32)
    runner.product(
        swizzled_map(
            operand.data_ptr(),
            m,
            operand.shape[1],
            runner.box_rows,
            operand.dtype,
            operand.get_device(),
        ),
        *pointers,
        out.data_ptr(),
        parts.data_ptr(),
        *runner.fields,
    )
    if runner.sum is not None:
        runner.sum(parts.data_ptr(), bias_pointer, out.data_ptr(), *runner.sum_fields)
    return out

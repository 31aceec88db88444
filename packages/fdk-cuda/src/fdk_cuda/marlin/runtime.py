"""Launches of the Marlin kernels: each plan is turned into a launch once."""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from fdk_cuda.marlin.heuristics_hopper import (
    GROUP_M_TILES,
    HopperPlan,
    plan_hopper,
    plan_hopper_invariant,
)
from fdk_cuda.marlin.heuristics_small_m import MAX_M, Device, SmallPlan, plan_small
from fdk_cuda.marlin.instantiations import (
    TABLE_BYTES,
    Variant,
    dequantise_program,
    dequantise_warps,
    hopper_program,
    shared_kernel,
    small_m_program,
    split_k_reduce_program,
)
from fdk_cuda.marlin.layout import BLOCK_K, BLOCK_N, Geometry
from fdk_cuda.nvrtc import Kernel, Launch, swizzled_map
from fdk_formats.format import Format

# Fields of each kernel's Params, in the notation of ``struct``.
SMALL_FIELDS, DEQUANTISE_FIELDS = "5P10i5I", "3P4i5I"
HOPPER_FIELDS, SUM_FIELDS = "128s5P10i", "3P8i"
# hopper_gemm.cu with EXPERTS has more.
GROUPED_FIELDS = HOPPER_FIELDS + "2P2i"
SMALL_EXPERTS_FIELDS = "6P16i5I"
SUM_THREADS, SUM_VALUES = 256, 4
# dequantise.cu: two thread blocks per SM up to this many blocks of 32 x 64 weights per SM, else one
# (H200, 4 bits, one and two: 4096 x 4096 11.4 and 11.1 us, 8192 x 8192 46.9 and 49.0).
SHORT_DEQUANTISE_BLOCKS = 64


@cache
def device_limits(index: int) -> Device:
    """Returns the properties of a GPU that plans depend on."""
    properties = torch.cuda.get_device_properties(index)
    return Device(
        sm_count=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        has_clusters=properties.major >= 9,
        is_hopper=properties.major == 9,
    )


def small_launch(variant: Variant, plan: SmallPlan, device: int, *, overlap: bool = True) -> Launch:
    """Loads the kernel of a small-m plan, compiling it if needed."""
    kernel = shared_kernel(small_m_program(variant, plan.shape))
    return Launch(
        kernel,
        device,
        fields=SMALL_FIELDS,
        grid=plan.grid,
        threads=32 * plan.shape.warps,
        shared_bytes=plan.shared_bytes,
        cluster=plan.cluster,
        overlap=overlap and device_limits(device).has_clusters,
    )


def small_fields(variant: Variant, plan: SmallPlan, geometry: Geometry, m: int) -> tuple[int, ...]:
    """Returns the fields of small_m.cu's Params after the pointers."""
    sizes = (geometry.n, geometry.padded_k, m)
    passes = plan.passes, plan.whole_passes, plan.rounds
    cut = plan.stored_m, geometry.padded_n // BLOCK_N, *passes
    return *sizes, *cut, plan.log_share, plan.sum_buffers, *variant.constants


@dataclass(frozen=True)
class HopperRunner:
    """A Hopper plan with its kernels loaded.

    Attributes:
        plan: how the product is cut.
        box_rows: rows of x or dy in a tile, the box of a tensor copy.
        product: launches hopper_gemm.cu or hopper_dgrad.cu.
        fields: fields of the Params, after the pointers.
        sum: launches split_k_reduce.cu, or None where no tile is split.
        sum_fields: fields of the Params, after the pointers.
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
    """Loads the kernels of a plan, forward or dgrad, compiling them if needed.

    Args:
        plan: how the product is cut.
        kernel: kernel of the product.
        notation: format of the Params, for ``struct``.
        dtype: dtype of the activations.
        device: index of the GPU.
        sizes: outputs (columns of the result) and m.
        blocks: the two fields of Params between sizes and tiles: steps, and blocks of the weight.
        overlap: whether to launch with PDL.
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
    tiles = plan.n_tiles, plan.m_tiles, min(GROUP_M_TILES, plan.m_tiles)
    cut = *tiles, plan.splits, plan.whole_tiles
    box_rows = plan.box_rows(sizes[1])
    total = None
    if plan.partial_tiles > 0:
        values = plan.partial_tiles // plan.splits * shape.tile_m * shape.tile_n
        total = Launch(
            shared_kernel(split_k_reduce_program(dtype, shape)),
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
    """Loads the kernels of a forward plan, compiling them if needed."""
    kernel = shared_kernel(hopper_program(Variant.of(geometry, dtype), plan.shape))
    steps = geometry.padded_k // (BLOCK_K * plan.shape.k_blocks)
    return plan_runner(
        plan,
        kernel,
        HOPPER_FIELDS,
        dtype,
        device,
        sizes=(geometry.n, m),
        blocks=(steps, geometry.padded_n // BLOCK_N),
        overlap=overlap,
    )


# m is any number of tokens: the least recently used entries go.
@lru_cache(maxsize=4096)
def hopper_runner_for(
    format: str, dtype: torch.dtype, n: int, k: int, device: int, batch_invariant: bool, m: int
) -> HopperRunner:
    """Returns the runner for m rows of x on Hopper."""
    geometry = Geometry.of(Format.parse(format), n, k)
    planned = plan_hopper_invariant if batch_invariant else plan_hopper
    return hopper_runner(geometry, dtype, m, planned(geometry, m, device_limits(device)), device)


@cache
def small_launch_for(
    format: str, dtype: torch.dtype, m: int, n: int, k: int, device: int, batch_invariant: bool
) -> tuple[Launch, tuple[int, ...]]:
    """Returns the launch for m rows of x, up to ``MAX_M``, and the fields after its pointers."""
    geometry = Geometry.of(Format.parse(format), n, k)
    variant = Variant.of(geometry, dtype)
    # Tile, warps and cluster decide the order of a sum: batch-invariant needs one plan for every m.
    planned_m = MAX_M if batch_invariant else m
    plan = plan_small(geometry, dtype, planned_m, device_limits(device))
    return small_launch(variant, plan, device), small_fields(variant, plan, geometry, m)


@cache
def dequantise_launch_for(
    format: str, dtype: torch.dtype, n: int, k: int, device: int
) -> tuple[Launch, tuple[int, ...]]:
    """Returns the launch that dequantises a layout, and the fields after its pointers."""
    geometry = Geometry.of(Format.parse(format), n, k)
    variant = Variant.of(geometry, dtype)
    limits = device_limits(device)
    blocks, warps = geometry.shape[0] * geometry.shape[1], dequantise_warps(variant)
    # At 1 bit a warp takes one block and ends. Otherwise there are as few thread blocks as
    # possible, because each builds a table.
    grid, shared = -(-blocks // warps), 0
    if variant.bits > 1:
        is_short = blocks <= SHORT_DEQUANTISE_BLOCKS * limits.sm_count
        fitting = limits.shared_bytes // (TABLE_BYTES + 1024)
        grid = min(grid, limits.sm_count * (2 if is_short and fitting >= 2 else 1))
        shared = TABLE_BYTES
    launch = Launch(
        shared_kernel(dequantise_program(variant)),
        device,
        fields=DEQUANTISE_FIELDS,
        grid=grid,
        threads=32 * warps,
        shared_bytes=shared,
        overlap=limits.has_clusters,
    )
    return launch, (n, k, geometry.padded_k, blocks, *variant.constants)


def run_hopper(
    runner: HopperRunner, x: Tensor, packed: Tensor, codebook: Tensor, bias: Tensor | None, n: int
) -> Tensor:
    """Computes y by one plan, from x whose rows are a multiple of 16 bytes."""
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
    """Computes a product ``[m, width, dtype]``, forward or dgrad.

    Args:
        runner: runner of that product.
        operand: x or dy, [m, ...], whose rows are a multiple of 16 bytes.
        pointers: the fields of Params between the tensor map of the operand and the result.
        width: columns of the result.
        bias_pointer: address of the bias for split_k_reduce.cu, or 0.
    """
    plan, shape = runner.plan, runner.plan.shape
    m = operand.shape[0]
    out = operand.new_empty((m, width))
    partial = out  # not used
    if plan.partial_tiles > 0:
        partial = operand.new_empty(
            plan.partial_tiles * shape.tile_m * shape.tile_n, dtype=torch.float32
        )
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
        partial.data_ptr(),
        *runner.fields,
    )
    if runner.sum is not None:
        runner.sum(partial.data_ptr(), bias_pointer, out.data_ptr(), *runner.sum_fields)
    return out

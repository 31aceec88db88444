"""``dy @ W_hat`` on Hopper from packed bytes: how it is cut, when it is taken, its launch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fdk_cuda.marlin.hopper import (
    CLUSTERS,
    GROUP_TILES,
    MAX_SPLITS,
    MAX_STAGES,
    MIN_STAGES,
    HopperPlan,
    _shared_bytes,
    hopper_cost,
    plan_of,
)
from fdk_cuda.marlin.launches import (
    SUM_FIELDS,
    SUM_THREADS,
    SUM_VALUES,
    HopperRunner,
    device_limits,
)
from fdk_cuda.marlin.layout import BLOCK_COLUMNS, Geometry
from fdk_cuda.marlin.plan import Device
from fdk_cuda.marlin.programs import (
    HopperShape,
    Variant,
    hopper_backward_kernel,
    sum_splits_kernel,
)
from fdk_cuda.nvrtc import Launch, swizzled_map
from fdk_formats.format import Format

# The notation of ``struct`` for hopper_backward.cu's Params.
BACKWARD_FIELDS = "128s4P9i"
# Rows of dy in a tile; a tile has two groups of consumers, 64 columns of the weight each.
TILE_COLUMNS = (64, 128, 192, 256)
STEP_ROWS = 64


def backward_plan(geometry: Geometry, m: int, device: Device) -> HopperPlan:
    """The plan for m rows of dy."""
    turned = _turned(geometry)
    plans = backward_plans(geometry, m, device)
    return min(plans, key=lambda plan: hopper_cost(turned, plan))


def backward_plans(geometry: Geometry, m: int, device: Device) -> Iterator[HopperPlan]:
    """Every plan that makes sense."""
    for shape in backward_shapes(geometry, device):
        for splits in range(1, MAX_SPLITS + 1):
            if plan := plan_of(_turned(geometry), m, device, shape, splits):
                yield plan


def backward_shapes(geometry: Geometry, device: Device) -> list[HopperShape]:
    """Every tile that a plan may take, each with as many stages as fit."""
    shapes = []
    for columns in TILE_COLUMNS:
        for cluster in CLUSTERS:
            empty = HopperShape(columns, consumers=2, k_blocks=1, stages=0, cluster=cluster)
            fixed = _shared_bytes(geometry, empty)
            stage = _shared_bytes(geometry, replace(empty, stages=1)) - fixed
            stages = min(MAX_STAGES, (device.shared_bytes - fixed) // stage)
            if stages >= MIN_STAGES:
                shapes.append(replace(empty, stages=stages))
    return shapes


def _turned(geometry: Geometry) -> Geometry:
    """The geometry as plans count it: columns of the weight are rows of a tile.

    A block has the same bytes, and its groups end where they did.
    """
    size = BLOCK_COLUMNS if geometry.per_row == 1 else BLOCK_COLUMNS // 2
    return replace(geometry, n=geometry.columns, k=geometry.rows, group_size=size)


def backward_runner(
    geometry: Geometry,
    dtype: torch.dtype,
    m: int,
    plan: HopperPlan,
    device: int,
    *,
    overlap: bool = True,
) -> HopperRunner:
    """Loads the kernels of a plan, compiling them where they have not been."""
    variant, shape = Variant.of(geometry, dtype), plan.shape
    product = Launch(
        hopper_backward_kernel(variant, shape),
        device,
        fields=BACKWARD_FIELDS,
        grid=plan.grid,
        threads=shape.threads,
        shared_bytes=plan.shared_bytes,
        cluster=shape.cluster,
        overlap=overlap,
    )
    tiles = plan.row_tiles, plan.column_tiles, min(GROUP_TILES, plan.column_tiles)
    cut = *tiles, plan.splits, plan.whole_tiles
    blocks = geometry.rows // STEP_ROWS, geometry.columns // BLOCK_COLUMNS
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
    sizes = geometry.k, m
    return HopperRunner(plan, product, (*sizes, *blocks, *cut), total, (*sizes, *cut))


# m is any number of tokens here: the least used ones go.
@lru_cache(maxsize=4096)
def backward_runner_for(
    format: str, dtype: torch.dtype, n: int, k: int, device: int, m: int
) -> HopperRunner:
    """What runs m rows of dy."""
    geometry = Geometry.of(Format.parse(format), n, k)
    plan = backward_plan(geometry, m, device_limits(device))
    return backward_runner(geometry, dtype, m, plan, device)


def run_backward(
    runner: HopperRunner, dy: Tensor, packed: Tensor, codebook: Tensor, k: int
) -> Tensor:
    """dx by one plan, from dy with rows of a multiple of 16 bytes."""
    plan, shape = runner.plan, runner.plan.shape
    m = dy.shape[0]
    dx = dy.new_empty((m, k))
    parts = dx  # not used
    if plan.parts > 0:
        parts = dy.new_empty(plan.parts * shape.columns * shape.rows, dtype=torch.float32)
    runner.product(
        swizzled_map(dy.data_ptr(), m, dy.shape[1], shape.columns, dy.dtype),
        packed.data_ptr(),
        codebook.data_ptr(),
        dx.data_ptr(),
        parts.data_ptr(),
        *runner.fields,
    )
    if runner.sum is not None:
        runner.sum(parts.data_ptr(), 0, dx.data_ptr(), *runner.sum_fields)
    return dx

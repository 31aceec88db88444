"""``dy @ W_hat`` on Hopper from packed bytes: how it is cut, when it is taken, its launch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fdk_cuda.marlin.heuristics_hopper import (
    MAX_SPLITS,
    HopperPlan,
    hopper_cost,
    plan_of,
    shapes_of_tiles,
)
from fdk_cuda.marlin.heuristics_small_m import Device
from fdk_cuda.marlin.instantiations import HopperShape, Variant, hopper_backward_kernel
from fdk_cuda.marlin.layout import BLOCK_COLUMNS, Geometry
from fdk_cuda.marlin.runtime import HopperRunner, device_limits, plan_runner, run_plan
from fdk_formats.format import Format

# The notation of ``struct`` for hopper_backward.cu's Params.
BACKWARD_FIELDS = "128s4P10i"
# As hopper.STEP_COST, by rows of dy in a tile, which has two groups of consumers, 64 columns of the
# weight each: least squares over 1030 timed plans. In 120 cases the plan that comes out first took
# 0.04 % more than the fastest on average, 3 % at most; by the forward's costs 2.9 % and 36 % (2
# bits, 8192 x 8192, 768 rows: 202 us instead of 148), for its narrow tiles have a table there.
STEP_COST = {
    (64, 2, 1): {1: 0.353, 2: 0.387, 3: 0.430, 4: 0.341, 5: 0.361, 6: 0.428, 7: 0.428, 8: 0.428},
    (128, 2, 1): {1: 0.461, 2: 0.491, 3: 0.530, 4: 0.487, 5: 0.520, 6: 0.553, 7: 0.553, 8: 0.553},
    (192, 2, 1): {1: 0.569, 2: 0.600, 3: 0.630, 4: 0.621, 5: 0.655, 6: 0.689, 7: 0.689, 8: 0.689},
    (256, 2, 1): {1: 0.684, 2: 0.708, 3: 0.754, 4: 0.751, 5: 0.792, 6: 0.833, 7: 0.833, 8: 0.833},
}
TILES = tuple((*tile, 1) for tile in STEP_COST)
STEP_ROWS = 64
# Up to so many bits, codebooks lie in registers; affine formats have none.
MAX_BITS_WITHOUT_TABLE = 3


def backward_plan(geometry: Geometry, m: int, device: Device) -> HopperPlan:
    """The plan for m rows of dy."""
    turned = _turned(geometry)
    plans = backward_plans(geometry, m, device)
    return min(plans, key=lambda plan: hopper_cost(turned, plan, device, STEP_COST))


def backward_plans(geometry: Geometry, m: int, device: Device) -> Iterator[HopperPlan]:
    """Every plan that makes sense."""
    for shape in backward_shapes(geometry, device):
        for splits in range(1, MAX_SPLITS + 1):
            if plan := plan_of(_turned(geometry), m, device, shape, splits):
                yield plan


def backward_shapes(geometry: Geometry, device: Device) -> list[HopperShape]:
    """Every shape that a plan may take, each with as many stages as fit."""
    return shapes_of_tiles(geometry, device, TILES, lambda geometry, _: _has_table(geometry))


def _has_table(geometry: Geometry) -> bool:
    return geometry.bits > MAX_BITS_WITHOUT_TABLE and (geometry.has_table or geometry.bits == 5)


def _turned(geometry: Geometry) -> Geometry:
    """The geometry as plans count it: columns of the weight are rows of a tile.

    A block has the same bytes, and its groups end where they did.
    """
    size = BLOCK_COLUMNS if geometry.per_row == 1 else BLOCK_COLUMNS // 2
    return replace(geometry, n=geometry.columns, k=geometry.rows, group_size=size)


def backward_runner(
    geometry: Geometry, dtype: torch.dtype, m: int, plan: HopperPlan, device: int
) -> HopperRunner:
    """Loads the kernels of a plan, compiling them where they have not been."""
    kernel = hopper_backward_kernel(Variant.of(geometry, dtype), plan.shape)
    blocks = geometry.rows // STEP_ROWS, geometry.columns // BLOCK_COLUMNS
    return plan_runner(
        plan, kernel, BACKWARD_FIELDS, dtype, device, sizes=(geometry.k, m), blocks=blocks
    )


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
    return run_plan(runner, dy, (packed.data_ptr(), codebook.data_ptr()), k)

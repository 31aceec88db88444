"""Gradient with respect to x on Hopper, from the packed weight: plan and launch dx = dy @ W_hat.

Plans are those of ``heuristics_hopper`` for the transposed weight: outputs of the product are
the layer's inputs k, and it sums over n.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fdk_cuda.marlin.cost_model import DGRAD_STEP_COST
from fdk_cuda.marlin.heuristics_hopper import (
    MAX_SPLITS,
    HopperPlan,
    hopper_cost,
    plan_of,
    shapes_of_tiles,
)
from fdk_cuda.marlin.heuristics_small_m import Device
from fdk_cuda.marlin.instantiations import HopperShape, Variant, hopper_dgrad_program, shared_kernel
from fdk_cuda.marlin.layout import BLOCK_K, Geometry
from fdk_cuda.marlin.runtime import HopperRunner, device_limits, plan_runner, run_plan
from fdk_formats.format import Format

# Fields of hopper_dgrad.cu's Params, in the notation of ``struct``.
DGRAD_FIELDS = "128s4P10i"
# Rows of the weight in a step.
STEP_ROWS = 64
# Codebooks of up to this many bits stay in registers; affine formats have none.
MAX_BITS_WITHOUT_TABLE = 3


def dgrad_plan(geometry: Geometry, m: int, device: Device) -> HopperPlan:
    """Returns the plan for m rows of dy."""
    transposed = _transposed(geometry)
    plans = dgrad_plans(geometry, m, device)
    return min(plans, key=lambda plan: hopper_cost(transposed, plan, device, DGRAD_STEP_COST))


def dgrad_plans(geometry: Geometry, m: int, device: Device) -> Iterator[HopperPlan]:
    """Yields every plan worth considering."""
    for shape in dgrad_shapes(geometry, device):
        for splits in range(1, MAX_SPLITS + 1):
            if plan := plan_of(_transposed(geometry), m, device, shape, splits):
                yield plan


def dgrad_shapes(geometry: Geometry, device: Device) -> list[HopperShape]:
    """Returns every tile that fits, each with as many stages as fit."""
    tiles = [(tile, 1) for tile in DGRAD_STEP_COST]
    return shapes_of_tiles(geometry, device, tiles, lambda geometry, _: _has_table(geometry))


def _has_table(geometry: Geometry) -> bool:
    return geometry.bits > MAX_BITS_WITHOUT_TABLE and (geometry.has_table or geometry.bits == 5)


def _transposed(geometry: Geometry) -> Geometry:
    """Returns the geometry as plans count it: n and k exchanged, blocks of the same bytes."""
    size = BLOCK_K if geometry.per_row == 1 else BLOCK_K // 2
    return replace(geometry, n=geometry.padded_k, k=geometry.padded_n, group_size=size)


def dgrad_runner(
    geometry: Geometry, dtype: torch.dtype, m: int, plan: HopperPlan, device: int
) -> HopperRunner:
    """Loads the kernels of a plan, compiling them if needed."""
    kernel = shared_kernel(hopper_dgrad_program(Variant.of(geometry, dtype), plan.shape))
    blocks = geometry.padded_n // STEP_ROWS, geometry.padded_k // BLOCK_K
    return plan_runner(
        plan, kernel, DGRAD_FIELDS, dtype, device, sizes=(geometry.k, m), blocks=blocks
    )


# m is any number of tokens: the least recently used entries go.
@lru_cache(maxsize=4096)
def dgrad_runner_for(
    format: str, dtype: torch.dtype, n: int, k: int, device: int, m: int
) -> HopperRunner:
    """Returns the runner for m rows of dy."""
    geometry = Geometry.of(Format.parse(format), n, k)
    plan = dgrad_plan(geometry, m, device_limits(device))
    return dgrad_runner(geometry, dtype, m, plan, device)


def run_dgrad(runner: HopperRunner, dy: Tensor, packed: Tensor, codebook: Tensor, k: int) -> Tensor:
    """Returns ``dx :: [m, k, dtype]`` from dy whose rows are a multiple of 16 bytes."""
    return run_plan(runner, dy, (packed.data_ptr(), codebook.data_ptr()), k)

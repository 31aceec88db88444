"""Plans for many rows of x on Hopper: tile, stages, cluster and split-K, chosen by a cost model."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from fdk_cuda.marlin import cost_model
from fdk_cuda.marlin.cost_model import SIGNS, STEP_COST, Costs, HopperTile
from fdk_cuda.marlin.heuristics_small_m import FITTING_SHARE, Device
from fdk_cuda.marlin.instantiations import TABLE_BYTES, HopperShape
from fdk_cuda.marlin.layout import BLOCK_K, BLOCK_N, Geometry
from fdk_cuda.marlin.tuned_overrides import hopper_plan_m, is_tuned

# A stage holds 128 inputs of the weight up to this tile_m, else 64.
LONG_STAGE_TILE_M = 128
# Up to this tile_m, shared memory has time for a lookup table at 1 and 2 bits.
NARROW_TILE_M = 128
# Above this tile_m, two consumers that share outputs would spill without a cluster (1 bit: 16
# bytes).
MAX_PAIRED_TILE_M = 32
# Only 30 clusters of 4 fit, and their plans were 8 to 20 % slower than the best.
CLUSTERS = (1, 2)
MIN_STAGES, MAX_STAGES = 3, 8
BARRIER_BYTES = 16
# Fewest steps of 64 inputs in a split: shorter ones cost more than they gain.
MIN_STEPS = 4
MAX_SPLITS = 8
# Above this tile_m, or with more than two consumers, stacks of 5 to 7 bits may spill: a tile of a
# stack takes a few registers more (5 bits, 192 rows: 24 bytes).
MAX_SPLIT_TILE_M = 160
# Tiles along m that are computed one after another, so that their weights come from the L2.
GROUP_M_TILES = 4
# At every m a batch-invariant product uses the plan that is best for INVARIANT_M rows. It processes
# at most MAX_INVARIANT_M rows at a time, which bounds the memory for partial tiles (n = k = 8192:
# 64 MiB).
INVARIANT_M, MAX_INVARIANT_M = 64, 1024


@dataclass(frozen=True)
class HopperPlan:
    """A way to run hopper_gemm.cu or hopper_dgrad.cu.

    Attributes:
        shape: shape of the instantiation.
        n_tiles, m_tiles: tiles along outputs and along rows of x or dy.
        whole_tiles: tiles that are not split along the summed dimension.
        splits: parts of each split tile, which split_k_reduce.cu adds up.
        grid: thread blocks.
        shared_bytes: shared memory of a thread block.
    """

    shape: HopperShape
    n_tiles: int
    m_tiles: int
    whole_tiles: int
    splits: int
    grid: int
    shared_bytes: int

    @property
    def partial_tiles(self) -> int:
        """Total number of parts of split tiles."""
        return (self.n_tiles * self.m_tiles - self.whole_tiles) * self.splits

    def box_rows(self, m: int) -> int:
        """Returns the rows of x or dy in a tile, as even as possible: the box of a tensor copy.

        A copy fills missing rows with zeros, which takes as long as copying them.
        """
        return -(-m // self.m_tiles)


def plan_hopper(geometry: Geometry, m: int, device: Device) -> HopperPlan:
    """Returns the plan for m rows of x."""
    if is_tuned(is_hopper=device.is_hopper, sm_count=device.sm_count):
        m = hopper_plan_m(geometry, m)
    plans = hopper_plans(geometry, m, device)
    return min(plans, key=lambda plan: hopper_cost(geometry, plan, device))


def plan_hopper_invariant(geometry: Geometry, m: int, device: Device) -> HopperPlan:
    """Returns a plan for m rows of x in which no row of y depends on m.

    A value of y is a sum over the steps of each split, in order, then over the splits, in order. So
    all tiles have the same splits, and tile and splits are the same for every m. Clusters are not
    used: each takes one tile, which limits m.
    """
    best = min(
        (
            plan
            for plan in hopper_plans(geometry, INVARIANT_M, device)
            if plan.shape.cluster == 1 and (plan.splits == 1 or plan.whole_tiles == 0)
        ),
        key=lambda plan: hopper_cost(geometry, plan, device),
    )
    shape, splits = best.shape, best.splits
    m_tiles = -(-m // shape.tile_m)
    tiles = best.n_tiles * m_tiles
    return replace(
        best,
        m_tiles=m_tiles,
        whole_tiles=tiles if splits == 1 else 0,
        grid=min(tiles * splits, device.sm_count),
    )


def hopper_plans(geometry: Geometry, m: int, device: Device) -> Iterator[HopperPlan]:
    """Yields every plan worth considering."""
    for shape in hopper_shapes(geometry, device):
        for splits in range(1, MAX_SPLITS + 1):
            if plan := plan_of(geometry, m, device, shape, splits):
                yield plan


@dataclass(frozen=True)
class GroupedPlan:
    """A way to run hopper_gemm.cu for a stack of experts.

    Attributes:
        shape: shape of the instantiation.
        n_tiles: tiles along the outputs of an expert.
        shared_bytes: shared memory of a thread block.
    """

    shape: HopperShape
    n_tiles: int
    shared_bytes: int


def plan_grouped(geometry: Geometry, pairs: int, experts: int, device: Device) -> GroupedPlan:
    """Returns the plan for rows of x that are spread evenly over the experts of a stack.

    Args:
        geometry: of the weight of an expert.
        pairs: rows of x.
        experts: experts of the stack.
        device: the GPU.
    """
    hit = min(pairs, experts)
    steps = geometry.padded_k // BLOCK_K

    def cost(plan: GroupedPlan) -> float:
        shape = plan.shape
        # The last tile of an expert is half full on average.
        m_tiles = max(hit, pairs / shape.tile_m + hit / 2)
        rounds = math.ceil(plan.n_tiles * m_tiles / device.sm_count)
        tile = HopperTile(shape.tile_m, shape.consumers, shape.k_groups)
        return rounds * steps * STEP_COST[tile][geometry.bits]

    return min(grouped_plans(geometry, device), key=cost)


def grouped_plans(geometry: Geometry, device: Device) -> Iterator[GroupedPlan]:
    """Yields every plan for a stack: no clusters, K groups or splits."""
    is_split = geometry.bits in (5, 6, 7)
    for shape in hopper_shapes(geometry, device):
        if is_split and (shape.tile_m > MAX_SPLIT_TILE_M or shape.consumers > 2):
            continue
        if (shape.cluster, shape.k_groups) == (1, 1):
            yield GroupedPlan(shape, _n_tiles(geometry, shape), _shared_bytes(geometry, shape))


def _n_tiles(geometry: Geometry, shape: HopperShape) -> int:
    return -(-geometry.padded_n // shape.tile_n)


def has_table(geometry: Geometry, tile_m: int) -> bool:
    """Returns whether hopper_gemm.cu looks codes up: affine codes and grids of 8 bits are computed.

    1 and 2 bits are looked up where tiles are narrow and one instruction scales a pair, except for
    signs. Where scales have another dtype than activations, which a plan does not know, the table
    is allocated but not used.
    """
    if geometry.bits > 2:
        return geometry.bits <= 5 or geometry.has_table
    narrow = tile_m <= NARROW_TILE_M and not geometry.has_zero_point
    return narrow and not geometry.has_signs and geometry.scale_dtype != torch.float32


def hopper_shapes(geometry: Geometry, device: Device) -> list[HopperShape]:
    """Returns every tile of hopper_gemm.cu that fits, each with as many stages as fit."""
    tiles = {tile: 2 if tile.tile_m <= LONG_STAGE_TILE_M else 1 for tile in STEP_COST}
    shapes = shapes_of_tiles(geometry, device, tiles.items(), has_table)
    return [shape for shape in shapes if not _would_spill(geometry, shape)]


def _would_spill(geometry: Geometry, shape: HopperShape) -> bool:
    """Returns True for 6 and 7 bits with float32 scales, or two scales to a row, in some tiles."""
    if geometry.bits not in (6, 7):
        return False
    if geometry.per_row == 1 and geometry.scale_dtype != torch.float32:
        return False
    is_widest = (shape.tile_m, shape.cluster, shape.has_table) == (256, 1, True)
    return (shape.consumers == 4 and shape.k_groups == 1) or (geometry.bits == 7 and is_widest)


def shapes_of_tiles(
    geometry: Geometry,
    device: Device,
    tiles: Iterable[tuple[HopperTile, int]],
    has_table: Callable[[Geometry, int], bool],
) -> list[HopperShape]:
    """Returns the tiles that fit, each with as many stages as fit.

    Args:
        geometry: of the weight, for either direction: only bits and bytes of a block matter.
        device: the GPU; its shared memory limits the tiles.
        tiles: each with the most blocks of 64 in a stage.
        has_table: whether codes are looked up with a given tile_m.
    """
    shapes = []
    for (tile, most), cluster in itertools.product(tiles, CLUSTERS):
        tile_m, consumers, k_groups = tile
        if k_groups > 1 and cluster == 1 and tile_m > MAX_PAIRED_TILE_M:
            continue
        looks_up = has_table(geometry, tile_m)
        for k_blocks in range(most, k_groups - 1, -1):
            empty = HopperShape(tile_m, consumers, k_blocks, 0, cluster, looks_up, k_groups)
            fixed = _shared_bytes(geometry, empty)
            stage = _shared_bytes(geometry, replace(empty, stages=1)) - fixed
            stages = min(MAX_STAGES, (device.shared_bytes - fixed) // stage)
            if tile_m % (16 * cluster) == 0 and stages >= MIN_STAGES:
                shapes.append(replace(empty, stages=stages))
                break
    return shapes


def plan_of(
    geometry: Geometry, m: int, device: Device, shape: HopperShape, splits: int
) -> HopperPlan | None:
    """Returns the plan of one tile and number of splits, or None if it has no use.

    With one split, all tiles are whole. With more, those tiles are split that would be the last for
    some thread blocks while others have none.
    """
    n_tiles, m_tiles = _n_tiles(geometry, shape), -(-m // shape.tile_m)
    clusters = int(device.sm_count * FITTING_SHARE[shape.cluster]) // shape.cluster
    tiles, steps = n_tiles * m_tiles, geometry.padded_k // BLOCK_K
    whole = tiles if splits == 1 else tiles // clusters * clusters
    parts = (tiles - whole) * splits
    if splits > 1 and (shape.cluster > 1 or not 0 < parts <= clusters):
        return None
    ways = splits * shape.cluster
    if (shape.cluster > 1 and tiles > clusters) or (ways > 1 and steps < ways * MIN_STEPS):
        return None
    return HopperPlan(
        shape,
        n_tiles,
        m_tiles,
        whole,
        splits,
        grid=min(whole + parts, clusters) * shape.cluster,
        shared_bytes=_shared_bytes(geometry, shape),
    )


def hopper_cost(
    geometry: Geometry,
    plan: HopperPlan,
    device: Device,
    step_cost: Mapping[HopperTile, Costs] = STEP_COST,
) -> float:
    """Returns the cost model's microseconds for a plan, beyond what every plan takes."""
    shape = plan.shape
    tile_mib = shape.tile_n * shape.tile_m * 4 / 2**20
    all_steps = geometry.padded_k // BLOCK_K
    steps = -(-plan.whole_tiles * shape.cluster // plan.grid) * all_steps / shape.cluster
    free_share = cost_model.MAX_SM_SHARE_WITHOUT_PENALTY
    excess = max(0.0, plan.grid / device.sm_count - free_share)
    time = cost_model.FULL_GPU_PENALTY * excess / (1 - free_share)
    if plan.partial_tiles > 0:
        steps += -(-all_steps // plan.splits)
        time += cost_model.SPLIT_COST + cost_model.SPLIT_MIB_COST * plan.partial_tiles * tile_mib
    if shape.cluster > 1:
        sent = tile_mib * (shape.cluster - 1) / shape.cluster
        time += cost_model.HOPPER_CLUSTER_COST + cost_model.SENT_MIB_COST * sent
    costs = step_cost[HopperTile(shape.tile_m, shape.consumers, shape.k_groups)]
    by_signs = geometry.has_signs and geometry.scale_dtype != torch.float32
    kind = SIGNS if by_signs and SIGNS in costs else geometry.bits
    return time + steps * costs[kind]


def _shared_bytes(geometry: Geometry, shape: HopperShape) -> int:
    table = TABLE_BYTES if shape.has_table else 0
    weights = shape.tile_n // BLOCK_N * geometry.shape[2]
    stage = shape.k_blocks * (shape.tile_m * BLOCK_K * 2 + weights) + BARRIER_BYTES
    # Rows of y staged for the store. At 3 or more bits, except 5, they fit between table entries.
    in_table = shape.has_table and geometry.bits not in (1, 2, 5) and shape.k_groups == 1
    piece = 0 if in_table else (32 if shape.tile_m // shape.cluster % 32 == 0 else 16) * 64 * 2
    dsmem_barrier = BARRIER_BYTES if shape.cluster > 1 else 0
    return table + shape.stages * stage + shape.consumers * piece + dsmem_barrier

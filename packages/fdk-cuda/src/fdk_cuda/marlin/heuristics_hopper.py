"""How a product with many rows of x is cut on Hopper: tiles, stages, parts of the columns."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from fdk_cuda.marlin.heuristics_small_m import FITTING_SHARE, Device
from fdk_cuda.marlin.instantiations import TABLE_BYTES, HopperShape
from fdk_cuda.marlin.layout import BLOCK_COLUMNS, BLOCK_ROWS, Geometry
from fdk_cuda.marlin.tuned_overrides import TIMED_PROCESSORS

# Up to so many, a stage holds 128 columns of the weight.
LONG_STAGE_COLUMNS = 128
# Up to so many, the shared memory has time for a table at 1 and 2 bits.
NARROW_COLUMNS = 128
# With more, two groups to 64 rows of a block without a cluster want more registers than there are
# (1 bit: 16 bytes of spills).
MAX_LONE_PAIRED_COLUMNS = 32
# Of 4, only 30 fit, and their plans were 8 to 20 % behind the best.
CLUSTERS = (1, 2)
MIN_STAGES, MAX_STAGES = 3, 8
BARRIER_BYTES = 16
# A part of the columns has at least so many steps of 64: shorter ones cost more than they share.
MIN_STEPS = 4
MAX_SPLITS = 8
# Tiles of columns that are taken together, so that their weights are read from the L2.
GROUP_TILES = 4
# A batch-invariant product is cut as is best for so many rows of x, whatever m is; and takes so
# many at a time at most, which bounds the memory for parts (n = k = 8192: 64 MiB, 97 at 3 bits).
INVARIANT_ROWS, MAX_INVARIANT_ROWS = 64, 1024

# What a step of 64 columns costs a block in microseconds, by columns of the tile, groups of
# consumers and those that share rows, and by bits: least squares over 1025 timed plans (H200,
# docs/kernels/hopper-gemm.md), with more weight on the fast ones. In 134 cases the plan that comes
# out first took 0.4 % more than the fastest on average, 10 % at most. Other chips differ by a
# factor; what counts is the order. (256 columns at 2 bits: 0.705 by the fit, whose plan for 512
# rows of 8192 x 8192 took 94.0 us; by this one 92.7. 64 columns at 1 bit: two groups had 0.248
# before its bytes took two rotations side by side, 6144 x 4096 10.4 -> 10.2 us; then 0.238, and
# pairs 0.239, whose plan for 64 rows of 21504 x 6144 took 37.7 us; by these 36.7; and three groups
# 0.366 before a look-up was of 8 bytes: 38.0 -> 36.4 us there; 128256 x 4096 131.4 so, and 131.5 by
# four groups.) Tiles of 160 became faster since: see docs/kernels/hopper-gemm.md, and TIMED_ROWS.
# Those of 5 to 7 bits put first what was fastest on an H100 among 250 timed plans.
STEP_COST = {
    (32, 2, 1): {1: 0.188, 2: 0.173, 3: 0.248, 4: 0.193, 5: 0.261, 6: 0.313, 7: 0.322, 8: 0.313},
    (32, 4, 2): {1: 0.180, 2: 0.185, 3: 0.230, 4: 0.190, 5: 0.255, 6: 0.319, 7: 0.319, 8: 0.319},
    (32, 3, 1): {1: 0.276, 2: 0.256, 3: 0.359, 4: 0.281, 5: 0.400, 6: 0.518, 7: 0.518, 8: 0.518},
    (32, 4, 1): {1: 0.371, 2: 0.337, 3: 0.525, 4: 0.378, 5: 0.556, 6: 0.734, 7: 0.734, 8: 0.734},
    (64, 2, 1): {1: 0.242, 2: 0.229, 3: 0.305, 4: 0.251, 5: 0.297, 6: 0.342, 7: 0.376, 8: 0.342},
    (64, 4, 2): {1: 0.243, 2: 0.239, 3: 0.281, 4: 0.237, 5: 0.295, 6: 0.353, 7: 0.364, 8: 0.353},
    (64, 3, 1): {1: 0.350, 2: 0.336, 3: 0.430, 4: 0.365, 5: 0.450, 6: 0.535, 7: 0.535, 8: 0.535},
    (64, 4, 1): {1: 0.479, 2: 0.464, 3: 0.577, 4: 0.493, 5: 0.630, 6: 0.767, 7: 0.767, 8: 0.767},
    (96, 2, 1): {1: 0.297, 2: 0.276, 3: 0.347, 4: 0.306, 5: 0.362, 6: 0.418, 7: 0.443, 8: 0.418},
    (96, 3, 1): {1: 0.452, 2: 0.425, 3: 0.499, 4: 0.465, 5: 0.543, 6: 0.620, 7: 0.620, 8: 0.620},
    (128, 2, 1): {1: 0.361, 2: 0.347, 3: 0.416, 4: 0.401, 5: 0.450, 6: 0.499, 7: 0.499, 8: 0.499},
    (128, 3, 1): {1: 0.547, 2: 0.522, 3: 0.594, 4: 0.578, 5: 0.650, 6: 0.722, 7: 0.722, 8: 0.722},
    (160, 2, 1): {1: 0.469, 2: 0.457, 3: 0.520, 4: 0.469, 5: 0.521, 6: 0.572, 7: 0.572, 8: 0.572},
    (192, 2, 1): {1: 0.522, 2: 0.528, 3: 0.586, 4: 0.538, 5: 0.593, 6: 0.647, 7: 0.647, 8: 0.647},
    (224, 2, 1): {1: 0.608, 2: 0.610, 3: 0.642, 4: 0.627, 5: 0.675, 6: 0.722, 7: 0.722, 8: 0.722},
    (256, 2, 1): {1: 0.686, 2: 0.684, 3: 0.723, 4: 0.720, 5: 0.765, 6: 0.809, 7: 0.809, 8: 0.809},
}
# Of 1 bit by signs: what 2 bits take. The plan that comes out first so was the fastest of three, or
# level with it, in all 17 cases that were timed (32 to 256 rows, docs/kernels/hopper-gemm.md). They
# are meant for scales of the activations' dtype, which a plan does not know: others go by masks.
SIGNS = 0
STEP_COST = {tile: costs | {SIGNS: costs[2]} for tile, costs in STEP_COST.items()}
# Rows of x, by bits and the weight's rows and columns, that take the plan of one row more than the
# last of them: it takes any fewer, and the one that costs least by the above was slower than that
# (H200, rows at ef6a9f7: three tiles of 96 rows and two of 160, with 288 and 289 rows: 8192 x
# 8192, 1 bit 65.7 us and 60.7, 4 bits 67.2 and 64.8, 28672 x 8192, 1 bit 227.9 and 215.0; with the
# plan of 289 these 288 take 61.9, 66.0 and 212.7, rows.jsonl at 57ef800). Any Hopper of as many
# processors does so. (Signs too, which were not timed there.)
TIMED_ROWS = {
    (1, 8192, 8192): range(257, 289),
    (4, 8192, 8192): range(257, 289),
    (1, 28672, 8192): range(257, 289),
}
# Columns, groups of consumers, those that share rows and blocks of 64 in a stage of the forward's
# tiles.
TILES = tuple((*tile, 2 if tile[0] <= LONG_STAGE_COLUMNS else 1) for tile in STEP_COST)
# Of a second kernel that adds parts, and of each MiB of theirs; of meeting in a cluster, and of
# each MiB that a block sends.
SPLIT_COST, SPLIT_MIB_COST = 2.61, 0.27
CLUSTER_COST, SENT_MIB_COST = 0.86, 23.2
# Of blocks on all processors, where the next kernel finds no room to start in; up to a share of
# them there is none (4096 x 4096, 17 rows, 1 bit, 128 x 32: 96 blocks 7.5 us, 128 blocks 8.0).
CROWD_COST, FREE_SHARE = 1.2, 0.75


@dataclass(frozen=True)
class HopperPlan:
    """One way to run hopper_gemm.cu or hopper_backward.cu.

    Attributes:
        shape: of the instantiation.
        row_tiles, column_tiles: of the weight's rows and of x; of its columns and of dy backward.
        whole_tiles: that blocks, or clusters, take without parts.
        splits: parts of what is summed over in the others, whose sums sum_splits.cu adds.
        grid: blocks of threads.
        shared_bytes: of a block.
    """

    shape: HopperShape
    row_tiles: int
    column_tiles: int
    whole_tiles: int
    splits: int
    grid: int
    shared_bytes: int

    @property
    def parts(self) -> int:
        """Parts of tiles, in all."""
        return (self.row_tiles * self.column_tiles - self.whole_tiles) * self.splits

    def box_rows(self, m: int) -> int:
        """Of m rows of x or dy those in a tile, which a copy brings: as even as can be.

        Rows that a copy lacks are filled with zeros, and take as long.
        """
        return -(-m // self.column_tiles)


def plan_hopper(geometry: Geometry, m: int, device: Device) -> HopperPlan:
    """The plan for m rows of x."""
    timed = TIMED_ROWS.get((geometry.bits, geometry.rows, geometry.columns), range(0))
    if m in timed and device.processors == TIMED_PROCESSORS and not geometry.has_zero_point:
        m = timed.stop
    plans = hopper_plans(geometry, m, device)
    return min(plans, key=lambda plan: hopper_cost(geometry, plan, device))


def plan_hopper_invariant(geometry: Geometry, m: int, device: Device) -> HopperPlan:
    """A plan for m rows of x in which none of them depends on m.

    An element of y is a sum over the steps of 64 columns of each part, in their order, and then
    over the parts, in theirs. So every tile is cut in the same parts, and shape and parts are the
    same for every m. Blocks of a cluster take one tile, which limits m: there are none.
    """
    best = min(
        (
            plan
            for plan in hopper_plans(geometry, INVARIANT_ROWS, device)
            if plan.shape.cluster == 1 and (plan.splits == 1 or plan.whole_tiles == 0)
        ),
        key=lambda plan: hopper_cost(geometry, plan, device),
    )
    shape, splits = best.shape, best.splits
    column_tiles = -(-m // shape.columns)
    tiles = best.row_tiles * column_tiles
    return replace(
        best,
        column_tiles=column_tiles,
        whole_tiles=tiles if splits == 1 else 0,
        grid=min(tiles * splits, device.processors),
    )


def hopper_plans(geometry: Geometry, m: int, device: Device) -> Iterator[HopperPlan]:
    """Every plan that makes sense."""
    for shape in hopper_shapes(geometry, device):
        for splits in range(1, MAX_SPLITS + 1):
            if plan := plan_of(geometry, m, device, shape, splits):
                yield plan


def has_table(geometry: Geometry, columns: int) -> bool:
    """Whether a tile of the forward looks codes up: affine ones and grids of 8 bits are computed.

    Those of 1 and 2 bits are looked up where tiles are narrow and a look-up is scaled by one
    instruction for a pair, but signs. (Nor is it where scales have another dtype than activations,
    which a plan does not know: the table is then not used.)
    """
    if geometry.bits > 2:
        return geometry.bits <= 5 or geometry.has_table
    narrow = columns <= NARROW_COLUMNS and not geometry.has_zero_point
    return narrow and not geometry.has_signs and geometry.scale_dtype != torch.float32


def hopper_shapes(geometry: Geometry, device: Device) -> list[HopperShape]:
    """Every shape that a forward's plan may take, each with as many stages as fit."""
    shapes = shapes_of_tiles(geometry, device, TILES, has_table)
    return [shape for shape in shapes if not _is_crowded(geometry, shape)]


def _is_crowded(geometry: Geometry, shape: HopperShape) -> bool:
    """Whether it would spill: 6 and 7 bits, with scales of float32 or two to a row."""
    if geometry.bits not in (6, 7):
        return False
    if geometry.per_row == 1 and geometry.scale_dtype != torch.float32:
        return False
    is_widest = (shape.columns, shape.cluster, shape.has_table) == (256, 1, True)
    return (shape.consumers == 4 and shape.k_groups == 1) or (geometry.bits == 7 and is_widest)


def shapes_of_tiles(
    geometry: Geometry,
    device: Device,
    tiles: Iterable[tuple[int, int, int, int]],
    has_table: Callable[[Geometry, int], bool],
) -> list[HopperShape]:
    """Every shape of some tiles that fits, each with as many stages as do.

    Args:
        geometry: of the weight, in either direction: only bits and bytes of a block count.
        device: that it has to fit.
        tiles: columns, consumers, k_groups and k_blocks at most of each.
        has_table: whether a tile of so many columns looks codes up.
    """
    shapes = []
    for (columns, consumers, k_groups, most), cluster in itertools.product(tiles, CLUSTERS):
        if k_groups > 1 and cluster == 1 and columns > MAX_LONE_PAIRED_COLUMNS:
            continue
        looks_up = has_table(geometry, columns)
        for k_blocks in range(most, k_groups - 1, -1):
            empty = HopperShape(columns, consumers, k_blocks, 0, cluster, looks_up, k_groups)
            fixed = _shared_bytes(geometry, empty)
            stage = _shared_bytes(geometry, replace(empty, stages=1)) - fixed
            stages = min(MAX_STAGES, (device.shared_bytes - fixed) // stage)
            if columns % (16 * cluster) == 0 and stages >= MIN_STAGES:
                shapes.append(replace(empty, stages=stages))
                break
    return shapes


def plan_of(
    geometry: Geometry, m: int, device: Device, shape: HopperShape, splits: int
) -> HopperPlan | None:
    """The plan of one shape, or None where it makes no sense.

    With one part all tiles are whole. With more, those are split that would be the last for some
    blocks while others have none.
    """
    row_tiles, column_tiles = -(-geometry.rows // shape.rows), -(-m // shape.columns)
    clusters = int(device.processors * FITTING_SHARE[shape.cluster]) // shape.cluster
    tiles, steps = row_tiles * column_tiles, geometry.columns // BLOCK_COLUMNS
    whole = tiles if splits == 1 else tiles // clusters * clusters
    parts = (tiles - whole) * splits
    if splits > 1 and (shape.cluster > 1 or not 0 < parts <= clusters):
        return None
    ways = splits * shape.cluster
    if (shape.cluster > 1 and tiles > clusters) or (ways > 1 and steps < ways * MIN_STEPS):
        return None
    return HopperPlan(
        shape,
        row_tiles,
        column_tiles,
        whole,
        splits,
        grid=min(whole + parts, clusters) * shape.cluster,
        shared_bytes=_shared_bytes(geometry, shape),
    )


def hopper_cost(
    geometry: Geometry,
    plan: HopperPlan,
    device: Device,
    step_cost: dict[tuple[int, int, int], dict[int, float]] = STEP_COST,
) -> float:
    """About how many microseconds a plan takes beyond what every plan does."""
    shape = plan.shape
    tile_mib = shape.rows * shape.columns * 4 / 2**20
    all_steps = geometry.columns // BLOCK_COLUMNS
    steps = -(-plan.whole_tiles * shape.cluster // plan.grid) * all_steps / shape.cluster
    crowd = plan.grid / device.processors - FREE_SHARE
    time = CROWD_COST * max(0.0, crowd) / (1 - FREE_SHARE)
    if plan.parts > 0:
        steps += -(-all_steps // plan.splits)
        time += SPLIT_COST + SPLIT_MIB_COST * plan.parts * tile_mib
    if shape.cluster > 1:
        sent = tile_mib * (shape.cluster - 1) / shape.cluster
        time += CLUSTER_COST + SENT_MIB_COST * sent
    costs = step_cost[shape.columns, shape.consumers, shape.k_groups]
    by_signs = geometry.has_signs and geometry.scale_dtype != torch.float32
    kind = SIGNS if by_signs and SIGNS in costs else geometry.bits
    return time + steps * costs[kind]


def _shared_bytes(geometry: Geometry, shape: HopperShape) -> int:
    table = TABLE_BYTES if shape.has_table else 0
    weights = shape.rows // BLOCK_ROWS * geometry.shape[2]
    stage = shape.k_blocks * (shape.columns * BLOCK_COLUMNS * 2 + weights) + BARRIER_BYTES
    # A group's columns on their way out; at 3 bits and more, but 5, they lie between the table's
    # entries.
    in_table = shape.has_table and geometry.bits not in (1, 2, 5) and shape.k_groups == 1
    piece = 0 if in_table else (32 if shape.columns // shape.cluster % 32 == 0 else 16) * 64 * 2
    mail = BARRIER_BYTES if shape.cluster > 1 else 0
    return table + shape.stages * stage + shape.consumers * piece + mail

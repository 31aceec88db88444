"""How a product with many rows of x is cut on Hopper: tiles, stages, parts of the columns."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from fdk_cuda.marlin.layout import BLOCK_COLUMNS, BLOCK_ROWS, Geometry
from fdk_cuda.marlin.plan import FITTING_SHARE, Device
from fdk_cuda.marlin.programs import TABLE_BYTES, HopperShape

# Up to so many, a stage holds 128 columns of the weight.
LONG_STAGE_COLUMNS = 128
# Up to so many, the shared memory has time for a table at 1 and 2 bits.
NARROW_COLUMNS = 128
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
# many at a time at most, which bounds the memory for parts (128 MiB where n = k = 8192).
INVARIANT_ROWS, MAX_INVARIANT_ROWS = 64, 1024

# What a step of 64 columns costs a block in microseconds, by columns of the tile and groups of
# consumers, and by bits: least squares over 1085 timed plans (H200, docs/kernels/hopper.md), with
# more weight on the fast ones. In 164 cases the plan that comes out first took 0.2 % more than the
# fastest on average, 8 % at most. Other chips differ by a factor; what counts is the order.
STEP_COST = {
    (32, 2): {1: 0.207, 2: 0.193, 3: 0.256, 4: 0.206, 8: 0.306},
    (32, 4): {1: 0.375, 2: 0.359, 3: 0.440, 4: 0.376, 8: 0.589},
    (64, 2): {1: 0.249, 2: 0.240, 3: 0.305, 4: 0.250, 8: 0.352},
    (64, 4): {1: 0.468, 2: 0.437, 3: 0.531, 4: 0.473, 8: 0.678},
    (96, 2): {1: 0.301, 2: 0.286, 3: 0.355, 4: 0.313, 8: 0.418},
    (128, 2): {1: 0.360, 2: 0.342, 3: 0.408, 4: 0.395, 8: 0.480},
    (160, 2): {1: 0.453, 2: 0.436, 3: 0.489, 4: 0.459, 8: 0.553},
    (192, 2): {1: 0.518, 2: 0.497, 3: 0.550, 4: 0.532, 8: 0.619},
    (224, 2): {1: 0.582, 2: 0.564, 3: 0.605, 4: 0.603, 8: 0.681},
    (256, 2): {1: 0.655, 2: 0.659, 3: 0.683, 4: 0.685, 8: 0.763},
}
# Columns, groups of consumers and blocks of 64 in a stage of the forward's tiles.
TILES = tuple((*tile, 2 if tile[0] <= LONG_STAGE_COLUMNS else 1) for tile in STEP_COST)
# Of a second kernel that adds parts, and of each MiB of theirs; of meeting in a cluster, and of
# each MiB that a block sends.
SPLIT_COST, SPLIT_MIB_COST = 2.75, 0.39
CLUSTER_COST, SENT_MIB_COST = 1.35, 48.0


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


def plan_hopper(geometry: Geometry, m: int, device: Device) -> HopperPlan:
    """The plan for m rows of x."""
    return min(hopper_plans(geometry, m, device), key=lambda plan: hopper_cost(geometry, plan))


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
        key=lambda plan: hopper_cost(geometry, plan),
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
    """Whether a tile of the forward looks codes up: affine codes of 8 bits are computed.

    Those of 1 and 2 bits are looked up where tiles are narrow and a look-up is scaled by one
    instruction for a pair. (Nor is it where scales have another dtype than activations, which a
    plan does not know: the table is then not used.)
    """
    if geometry.bits > 2:
        return geometry.bits < 8 or not geometry.has_zero_point
    narrow = columns <= NARROW_COLUMNS and not geometry.has_zero_point
    return narrow and geometry.scale_dtype != torch.float32


def hopper_shapes(
    geometry: Geometry,
    device: Device,
    tiles: Iterable[tuple[int, int, int]] = TILES,
    has_table: Callable[[Geometry, int], bool] = has_table,
) -> list[HopperShape]:
    """Every shape that a plan may take, each with as many stages as fit.

    Args:
        geometry: of the weight, in either direction: only bits and bytes of a block count.
        device: that it has to fit.
        tiles: columns, consumers and k_blocks at most of each; the forward's by default.
        has_table: whether a tile of so many columns looks codes up.
    """
    shapes = []
    for (columns, consumers, most), cluster in itertools.product(tiles, CLUSTERS):
        looks_up = has_table(geometry, columns)
        for k_blocks in range(most, 0, -1):
            empty = HopperShape(columns, consumers, k_blocks, 0, cluster, looks_up)
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


def hopper_cost(geometry: Geometry, plan: HopperPlan) -> float:
    """About how many microseconds a plan takes beyond what every plan does."""
    shape = plan.shape
    tile_mib = shape.rows * shape.columns * 4 / 2**20
    all_steps = geometry.columns // BLOCK_COLUMNS
    steps = -(-plan.whole_tiles * shape.cluster // plan.grid) * all_steps / shape.cluster
    time = 0.0
    if plan.parts > 0:
        steps += -(-all_steps // plan.splits)
        time += SPLIT_COST + SPLIT_MIB_COST * plan.parts * tile_mib
    if shape.cluster > 1:
        sent = tile_mib * (shape.cluster - 1) / shape.cluster
        time += CLUSTER_COST + SENT_MIB_COST * sent
    return time + steps * STEP_COST[shape.columns, shape.consumers][geometry.bits]


def _shared_bytes(geometry: Geometry, shape: HopperShape) -> int:
    table = TABLE_BYTES if shape.has_table else 0
    weights = shape.rows // BLOCK_ROWS * geometry.shape[2]
    stage = shape.k_blocks * (shape.columns * BLOCK_COLUMNS * 2 + weights) + BARRIER_BYTES
    piece = (32 if shape.columns // shape.cluster % 32 == 0 else 16) * 64 * 2
    return table + shape.stages * stage + shape.consumers * piece

"""How a product with many rows of x is cut on Hopper: tiles, stages, parts of the columns."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fdk_cuda.marlin.layout import BLOCK_COLUMNS, BLOCK_ROWS, Geometry
from fdk_cuda.marlin.plan import FITTING_SHARE, Device
from fdk_cuda.marlin.programs import TABLE_BYTES, HopperShape

# Up to so many, a stage holds 128 columns of the weight.
LONG_STAGE_COLUMNS = 128
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
# consumers, and by bits: least squares over 2027 timed plans (H200, docs/kernels/hopper.md), with
# more weight on the fast ones. In 104 cases the plan that comes out first took 0.3 % more than the
# fastest on average, 6 % at most. Other chips differ by a factor; what counts is the order.
STEP_COST = {
    (32, 2): {1: 0.268, 2: 0.241, 3: 0.299, 4: 0.246, 8: 0.356},
    (32, 4): {1: 0.489, 2: 0.437, 3: 0.500, 4: 0.396, 8: 0.630},
    (64, 2): {1: 0.289, 2: 0.271, 3: 0.326, 4: 0.274, 8: 0.383},
    (64, 4): {1: 0.566, 2: 0.518, 3: 0.562, 4: 0.470, 8: 0.688},
    (96, 2): {1: 0.341, 2: 0.326, 3: 0.386, 4: 0.324, 8: 0.437},
    (128, 2): {1: 0.383, 2: 0.367, 3: 0.431, 4: 0.400, 8: 0.486},
    (160, 2): {1: 0.461, 2: 0.435, 3: 0.507, 4: 0.470, 8: 0.563},
    (192, 2): {1: 0.538, 2: 0.503, 3: 0.583, 4: 0.546, 8: 0.640},
    (224, 2): {1: 0.597, 2: 0.585, 3: 0.643, 4: 0.632, 8: 0.713},
    (256, 2): {1: 0.655, 2: 0.666, 3: 0.702, 4: 0.717, 8: 0.786},
}
# Columns, groups of consumers and blocks of 64 in a stage of the forward's tiles.
TILES = tuple((*tile, 2 if tile[0] <= LONG_STAGE_COLUMNS else 1) for tile in STEP_COST)
# Of a second kernel that adds parts, and of each MiB of theirs; of meeting in a cluster, and of
# each MiB that a block sends.
SPLIT_COST, SPLIT_MIB_COST = 2.7, 0.44
CLUSTER_COST, SENT_MIB_COST = 1.4, 32.0


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


def hopper_shapes(
    geometry: Geometry, device: Device, tiles: Iterable[tuple[int, int, int]] = TILES
) -> list[HopperShape]:
    """Every shape that a plan may take, each with as many stages as fit.

    Args:
        geometry: of the weight, in either direction: only bits and bytes of a block count.
        device: that it has to fit.
        tiles: columns, consumers and k_blocks of each; those of the forward by default.
    """
    shapes = []
    for (columns, consumers, k_blocks), cluster in itertools.product(tiles, CLUSTERS):
        empty = HopperShape(columns, consumers, k_blocks, 0, cluster)
        fixed = _shared_bytes(geometry, empty)
        stage = _shared_bytes(geometry, replace(empty, stages=1)) - fixed
        stages = min(MAX_STAGES, (device.shared_bytes - fixed) // stage)
        if columns % (16 * cluster) == 0 and stages >= MIN_STAGES:
            shapes.append(replace(empty, stages=stages))
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
    table = TABLE_BYTES if geometry.bits > 2 else 0
    weights = shape.rows // BLOCK_ROWS * geometry.shape[2]
    stage = shape.k_blocks * (shape.columns * BLOCK_COLUMNS * 2 + weights) + BARRIER_BYTES
    piece = (32 if shape.columns // shape.cluster % 32 == 0 else 16) * 64 * 2
    return table + shape.stages * stage + shape.consumers * piece

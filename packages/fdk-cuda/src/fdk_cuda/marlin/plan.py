"""How a product with few rows of x is cut: tiles, warps, clusters, shared memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from fdk_cuda.marlin.layout import BLOCK_COLUMNS, Geometry
from fdk_cuda.marlin.programs import TABLE_BYTES, TileShape

# Rows of x that one launch takes at most, and up to which a warp takes 32 rows rather than 64.
MAX_ROWS = 16
MAX_ROWS_NARROW = 4
STAGES, BARRIER_BYTES, MAIL_BARRIER_BYTES = 2, 16, 16
WARP_COUNTS = (16, 12, 8, 6, 4)
# Blocks of a cluster, and the share of the processors that clusters of that size can fill (H200:
# 66 clusters of 2 fit, 30 of 4).
FITTING_SHARE = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.84}


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU."""

    processors: int
    shared_bytes: int
    has_clusters: bool


@dataclass(frozen=True)
class SmallPlan:
    """One way to run small_m.cu.

    Attributes:
        shape: of the instantiation.
        split: blocks of a cluster, which share the columns of a tile.
        tiles: of the weight.
        grid: blocks of threads.
        passes: tiles that the busiest block takes.
        rounds: stages of a tile that the busiest warp takes.
        stored_columns: of the partial sums.
        sum_buffers: of the partial sums, 0 where they lie over the ring.
        shared_bytes: of a block.
    """

    shape: TileShape
    split: int
    tiles: int
    grid: int
    passes: int
    rounds: int
    stored_columns: int
    sum_buffers: int
    shared_bytes: int

    @property
    def log_share(self) -> int:
        """Binary logarithm of the values of a tile that a block finishes."""
        share = self.shape.rows * self.stored_columns // self.split
        assert share.bit_count() == 1
        return share.bit_length() - 1

    @property
    def cost(self) -> float:
        """Stages of 32 x 128 weights that the busiest warp takes, and what comes on top."""
        return self.passes * (self.rounds * self.shape.stage_blocks / 2 + 0.1 * (self.split > 1))


def plan_small(geometry: Geometry, m: int, device: Device) -> SmallPlan:
    """The plan for ``x :: [m, k]`` with m up to ``MAX_ROWS``."""
    assert 1 <= m <= MAX_ROWS
    return min(_plans(geometry, m, device), key=lambda plan: plan.cost)


def _plans(geometry: Geometry, m: int, device: Device) -> Iterator[SmallPlan]:
    fragments, column_tiles = (2 if m <= MAX_ROWS_NARROW else 4), (1 if m <= 8 else 2)
    splits = [split for split in FITTING_SHARE if device.has_clusters or split == 1]
    for row_groups in (1,) if m <= MAX_ROWS_NARROW else (1, 2):
        for split in splits:
            for warps in WARP_COUNTS:
                shape = TileShape(fragments, 4 // fragments, row_groups, column_tiles, warps)
                if plan := _plan(geometry, m, device, shape, split):
                    yield plan
                    break


def _plan(
    geometry: Geometry, m: int, device: Device, shape: TileShape, split: int
) -> SmallPlan | None:
    """The plan of one shape and split, or None where it does not fit."""
    stored = next(count for count in (1, 2, 4, 8, 16) if count >= m)
    clusters = int(device.processors * FITTING_SHARE[split]) // split
    stages = geometry.columns // (BLOCK_COLUMNS * shape.k_blocks)
    if shape.warps > most_warps(geometry, shape) or geometry.rows % shape.rows or clusters == 0:
        return None
    tiles = geometry.rows // shape.rows
    passes = -(-tiles // clusters)
    ring = shape.warps * STAGES * shape.stage_blocks * geometry.shape[2]
    sums = shape.warps * (16 * shape.fragments + 4) * stored * 4
    mail = MAIL_BARRIER_BYTES + (2 * shape.rows * stored * 4 if split > 1 else 0)
    fixed = TABLE_BYTES + ring + shape.warps * STAGES * BARRIER_BYTES + mail
    for buffers in (2, 1) if passes > 1 else (0 if sums <= ring else 1,):
        if (shared := fixed + buffers * sums) <= device.shared_bytes:
            return SmallPlan(
                shape=shape,
                split=split,
                tiles=tiles,
                grid=min(tiles, clusters) * split,
                passes=passes,
                rounds=-(-stages // (shape.warps // shape.row_groups * split)),
                stored_columns=stored,
                sum_buffers=buffers,
                shared_bytes=shared,
            )
    return None


def most_warps(geometry: Geometry, shape: TileShape) -> int:
    """Warps that find enough registers: 16 leave 128 to a thread, 12 leave 168."""
    return 12 if shape.column_tiles == 2 or (geometry.bits == 8 and geometry.per_row == 2) else 16

"""How a product with few rows of x is cut: tiles, warps, clusters, shared memory."""

from dataclasses import dataclass

from fdk_cuda.marlin.layout import BLOCK_COLUMNS, Geometry
from fdk_cuda.marlin.programs import TABLE_BYTES

# Rows of x that one launch takes at most, and up to which tiles of 32 rows are faster than 64.
MAX_ROWS = 16
MAX_ROWS_NARROW = 4
STAGES, STAGE_BLOCKS, BARRIER_BYTES, MAIL_BARRIER_BYTES = 2, 2, 16, 16
WARP_COUNTS = (16, 12, 8, 6, 4)
SPLITS = (1, 2, 4, 8)
# What a cluster costs beyond its share of the work, in thousandths of a tile's time per block.
# Blocks of larger clusters do not all fit the processor groups of the chip.
FITTING_SHARE = {1: 1.0, 2: 1.0, 4: 0.9, 8: 0.84}


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
        tile_fragments, column_tiles, warps: of the instantiation.
        split: blocks of a cluster, which share the columns of a tile.
        tiles: of the weight.
        grid: blocks of threads.
        passes: tiles that the busiest block takes.
        rounds: stages of a tile that the busiest warp takes.
        stored_columns: of the partial sums.
        log_share: binary logarithm of the values of a tile that a block finishes.
        sum_buffers: of the partial sums, 0 where they lie over the ring.
        shared_bytes: of a block.
    """

    tile_fragments: int
    column_tiles: int
    warps: int
    split: int
    tiles: int
    grid: int
    passes: int
    rounds: int
    stored_columns: int
    log_share: int
    sum_buffers: int
    shared_bytes: int


def plan_small(geometry: Geometry, m: int, device: Device) -> SmallPlan:
    """The plan for ``x :: [m, k]`` with m up to ``MAX_ROWS``."""
    assert 1 <= m <= MAX_ROWS
    fragments = 2 if m <= MAX_ROWS_NARROW else 4
    column_tiles = 1 if m <= 8 else 2
    stored = next(count for count in (1, 2, 4, 8, 16) if count >= m)
    tiles = geometry.rows // (16 * fragments)
    stages = geometry.columns // (BLOCK_COLUMNS * STAGE_BLOCKS * 2 // fragments)
    split = _split(tiles, stages, device)
    grid = min(tiles, device.processors // split) * split
    passes = -(-tiles * split // grid)
    values = 16 * fragments * stored  # of a tile of y
    for warps in WARP_COUNTS:
        if warps > _most_warps(geometry, column_tiles):
            continue
        ring = warps * STAGES * STAGE_BLOCKS * geometry.shape[2]
        sums = warps * (16 * fragments + 4) * stored * 4
        mail = MAIL_BARRIER_BYTES + (2 * values * 4 if split > 1 else 0)
        fixed = TABLE_BYTES + ring + warps * STAGES * BARRIER_BYTES + mail
        wanted = 2 if passes > 1 else 0 if sums <= ring else 1
        for buffers in (wanted, 1):
            if (shared := fixed + buffers * sums) <= device.shared_bytes:
                return SmallPlan(
                    tile_fragments=fragments,
                    column_tiles=column_tiles,
                    warps=warps,
                    split=split,
                    tiles=tiles,
                    grid=grid,
                    passes=passes,
                    rounds=-(-stages // (warps * split)),
                    stored_columns=stored,
                    log_share=(values // split).bit_length() - 1,
                    sum_buffers=buffers,
                    shared_bytes=shared,
                )
    raise AssertionError(f"no plan for {geometry} with m={m} on {device}")


def _most_warps(geometry: Geometry, column_tiles: int) -> int:
    """Warps that find enough registers: 16 leave 128 to a thread, 12 leave 168."""
    return 12 if column_tiles == 2 or (geometry.bits == 8 and geometry.per_row == 2) else 16


def _split(tiles: int, stages: int, device: Device) -> int:
    """Blocks of a cluster: the split with which the busiest block has the least to do."""
    if not device.has_clusters:
        return 1

    def load(split: int) -> float:
        clusters = int(device.processors * FITTING_SHARE[split]) // split
        return -(-tiles // clusters) * -(-stages // split) + 0.02 * stages * (split > 1)

    fitting = [split for split in SPLITS if device.processors >= split and stages >= split]
    return min(fitting, key=load)

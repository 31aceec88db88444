"""How a product with few rows of x is cut: tiles, warps, clusters, shared memory."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fdk_cuda.marlin.layout import BLOCK_COLUMNS, Geometry
from fdk_cuda.marlin.programs import TABLE_BYTES, TileShape, Variant

# Rows of x that one launch takes at most.
MAX_ROWS = 16
STAGES, BARRIER_BYTES, MAIL_BARRIER_BYTES = 2, 16, 16
WARP_COUNTS = (16, 12, 8, 4, 2)
# Blocks of a cluster, and the share of the processors that clusters of that size can fill (H200:
# 66 clusters of 2 fit, 30 of 4).
FITTING_SHARE = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.84}

# What a block of 32 x 64 weights costs a processor, in microseconds (H200, docs/kernels/marlin.md),
# by fragments and blocks of columns that a warp takes at a time, and by bits. Other chips differ by
# a factor; what counts is which plan comes first.
NARROW_COST = {
    (2, 2): {1: 0.0252, 2: 0.0273, 3: 0.0287, 4: 0.0299, 8: 0.0573},
    (4, 1): {1: 0.0218, 2: 0.0260, 3: 0.0295, 4: 0.0315, 8: 0.0580},
    (4, 2): {1: 0.0177, 2: 0.0218, 3: 0.0257, 4: 0.0310, 8: 0.0580},
}
# With two tiles of columns, by groups of rows: a second group finds x in the L1.
WIDE_COST = {1: 0.0463, 2: 0.0411}
# Of each tile that a block takes; of sharing tiles in a cluster, by tiles of columns, and of each.
PASS_COST = 0.3
CLUSTER_COST, CLUSTER_PASS_COST = {1: 0.4, 2: 1.4}, 0.25
# More than this in flight when a kernel starts makes its first weights late, by so much a KiB.
EASY_START_KIB, START_COST = 50, 0.016
# Few warps hide less latency in a long loop, and little in flight does not fill the memory. Fitted
# to the plans timed in docs/kernels/marlin.md.
WARPS_FACTOR = {16: 1.0, 12: 1.0, 8: 1.05, 4: 1.4, 2: 2.0}
LONG_LOOP = 8
LITTLE_IN_FLIGHT_KIB = {1: 13, 2: 18, 3: 23, 4: 28, 8: 76}
LITTLE_IN_FLIGHT_FACTOR = 1.15


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU."""

    processors: int
    shared_bytes: int
    has_clusters: bool
    is_hopper: bool = False


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


def plan_small(geometry: Geometry, dtype: torch.dtype, m: int, device: Device) -> SmallPlan:
    """The plan for ``x :: [m, k, dtype]`` with m up to ``MAX_ROWS``."""
    assert 1 <= m <= MAX_ROWS
    plans = _plans(geometry, Variant.of(geometry, dtype), m, device)
    return min(plans, key=lambda plan: cost(geometry, plan))


def cost(geometry: Geometry, plan: SmallPlan) -> float:
    """About how many microseconds a plan takes beyond what every plan does."""
    shape = plan.shape
    blocks = plan.passes * plan.rounds * shape.stage_blocks * shape.warps
    if shape.column_tiles == 1:
        time = blocks * NARROW_COST[shape.fragments, shape.k_blocks][geometry.bits]
    else:
        time = blocks * WIDE_COST[shape.row_groups]
    if shape.warps < 8 or plan.passes * plan.rounds > LONG_LOOP:
        time *= WARPS_FACTOR[shape.warps]
    in_flight = shape.warps * STAGES * shape.stage_blocks * geometry.shape[2] / 1024
    if shape.column_tiles == 1 and in_flight < LITTLE_IN_FLIGHT_KIB[geometry.bits]:
        time *= LITTLE_IN_FLIGHT_FACTOR
    time += PASS_COST * plan.passes
    if plan.split > 1:
        time += CLUSTER_COST[shape.column_tiles] + CLUSTER_PASS_COST * plan.passes
    return time + START_COST * max(0.0, in_flight - EASY_START_KIB)


def _plans(geometry: Geometry, variant: Variant, m: int, device: Device) -> Iterator[SmallPlan]:
    column_tiles = 1 if m <= 8 else 2
    pieces = NARROW_COST if column_tiles == 1 else [(4, 1)]
    splits = [split for split in FITTING_SHARE if device.has_clusters or split == 1]
    for (fragments, k_blocks), row_groups, warps, split in itertools.product(
        pieces, (1, 2), WARP_COUNTS, splits
    ):
        shape = TileShape(fragments, k_blocks, row_groups, column_tiles, warps)
        if warps <= most_warps(variant, shape) and (
            plan := plan_of_shape(geometry, m, device, shape, split)
        ):
            yield plan


def plan_of_shape(
    geometry: Geometry, m: int, device: Device, shape: TileShape, split: int
) -> SmallPlan | None:
    """The plan of one shape and split, or None where it does not fit."""
    stored = next(count for count in (1, 2, 4, 8, 16) if count >= m)
    clusters = int(device.processors * FITTING_SHARE[split]) // split
    stages = geometry.columns // (BLOCK_COLUMNS * shape.k_blocks)
    if geometry.rows % shape.rows or clusters == 0:
        return None
    tiles = geometry.rows // shape.rows
    passes = -(-tiles // clusters)
    ring = shape.warps * STAGES * shape.stage_blocks * geometry.shape[2]
    sums = shape.warps * (16 * shape.fragments + 4) * stored * 4
    mail = MAIL_BARRIER_BYTES + (2 * shape.rows * stored * 4 if split > 1 else 0)
    fixed = TABLE_BYTES + ring + shape.warps * STAGES * BARRIER_BYTES + mail
    for buffers in (2, 1) if passes > 1 else (0 if sums <= ring else 1,):
        # More than half of a processor's: when a kernel starts while the one before still runs, two
        # of its blocks must not meet on a processor and leave another without (H200, 2 bits,
        # 8192 x 8192, m = 1: 14.2 us with 100 KiB, 8.9 with 114).
        alone = device.shared_bytes // 2 + 1024
        if (shared := max(alone, fixed + buffers * sums)) <= device.shared_bytes:
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


def most_warps(variant: Variant, shape: TileShape) -> int:
    """Warps that find enough registers: 16 leave 128 to a thread, 12 leave 168, 8 leave 255.

    test_marlin_kernels.py holds every instantiation to no spills at all.
    """
    bits = variant.bits
    heavy = variant.affine or variant.per_row == 2 or variant.scale_dtype == torch.float32
    if shape.column_tiles == 2:
        return 8 if variant.per_row == 2 else 16 if bits in (2, 3) and not heavy else 12
    if shape.stage_blocks == 4:
        fits = bits in (2, 3, 8) or (bits == 1 and variant.dtype == torch.bfloat16)
        return 8 if variant.per_row == 2 else 16 if fits and not heavy else 12
    if bits == 8:
        return 12 if heavy else 16
    return 12 if variant.per_row == 2 and bits <= 2 else 16

"""How a product with few rows of x is cut: tiles, warps, clusters, shared memory."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fdk_cuda.marlin import cost_model
from fdk_cuda.marlin.instantiations import (
    DIGITS_BYTES,
    PLANES_BYTES,
    TABLE_BYTES,
    TileShape,
    Variant,
)
from fdk_cuda.marlin.layout import BLOCK_COLUMNS, BLOCK_ROWS, Geometry
from fdk_cuda.marlin.tuned_overrides import TIMED_FEW_ROWS, TIMED_PLANS, TIMED_PROCESSORS

# Rows of x that one launch takes at most.
MAX_ROWS = 16
# Up to so many fill one tile of columns of operand B.
NARROW_ROWS = 8
# Up to so many lie in every other column of it.
SPREAD_ROWS = 4
STAGES, BARRIER_BYTES, MAIL_BARRIER_BYTES = 2, 16, 16
WARP_COUNTS = (16, 12, 8, 4, 2)
# Blocks of a cluster, and the share of the processors that clusters of that size can fill (H200:
# 66 clusters of 2 fit, 30 of 4).
FITTING_SHARE = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.84}
# Of digits.cu; more are slower.
DIGITS_WARPS = 8
# Of planes.cu: fragments, and blocks of columns.
PLANES_CUTS = (
    *((2, k_blocks) for k_blocks in (2, 4, 8)),
    *((4, k_blocks) for k_blocks in (2, 4, 8, 12)),
    *((8, k_blocks) for k_blocks in (2, 3, 4, 6)),
)
PLANES_WARPS = (8, 12)
# Blocks of 32 rows of the lone short tile that it may take too.
PLANES_SHORT_BLOCKS = 3
# Bits at which weights with zero points take 16 warps on compute capability 9.0, by tiles of
# columns; 8.0 and 12.0 would spill 4 to 64 bytes (H200, 3 bits, 28672 x 8192, m = 1: 34.6 us ->
# 31.4). At 2 bits there is room too, and nothing gained.
HOPPER_ZERO_POINT_BITS = {1: (1, 3), 2: (3,)}


@dataclass(frozen=True)
class Device:
    """What a plan needs to know of a GPU."""

    processors: int
    shared_bytes: int
    has_clusters: bool
    is_hopper: bool = False


@dataclass(frozen=True)
class SmallPlan:
    """One way to run small_m.cu, digits.cu or planes.cu.

    Attributes:
        shape: of the instantiation.
        split: blocks of a cluster, which share the columns of a tile.
        grid: blocks of threads.
        passes: tiles that the busiest block takes.
        whole_passes: of them, the first ones, whose tiles are not short.
        rounds: stages of a tile that the busiest warp takes.
        stored_columns: of the partial sums.
        sum_buffers: of the partial sums, 0 where they lie over the ring.
        shared_bytes: of a block.
    """

    shape: TileShape
    split: int
    grid: int
    passes: int
    whole_passes: int
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
    def row_blocks(self) -> int:
        """Blocks of 32 rows that a group of warps takes, in all passes."""
        short = (self.passes - self.whole_passes) * self.shape.short_blocks
        return self.whole_passes * self.shape.fragments // 2 + short


def plan_small(geometry: Geometry, dtype: torch.dtype, m: int, device: Device) -> SmallPlan:
    """The plan for ``x :: [m, k, dtype]`` with m up to ``MAX_ROWS``."""
    assert 1 <= m <= MAX_ROWS
    variant = Variant.of(geometry, dtype)
    plans = list(small_plans(geometry, variant, m, device))
    # 1 bit with more rows was timed where weights are scaled.
    is_timed = m <= NARROW_ROWS or geometry.bits > 1 or variant.scales_weights
    if is_timed and device.is_hopper and device.processors == TIMED_PROCESSORS:
        timed = timed_cut(geometry, m)
        # Of one row, none is of digits.cu, whose shapes are planes.cu's too.
        others = [p for p in plans if m > 1 or not p.shape.digit_rows or p.shape.by_planes]
        plans = [plan for plan in others if _cut(plan) == timed] or plans
    return min(plans, key=lambda plan: cost(geometry, plan))


def timed_cut(geometry: Geometry, m: int) -> tuple[int, ...] | None:
    """What was timed for so many rows of x, as ``TIMED_PLANS`` tells it, or None."""
    g, size = geometry, (geometry.bits, geometry.rows, geometry.columns)
    if m == 1 and not g.has_zero_point and size in TIMED_PLANS:
        return TIMED_PLANS[size]
    most = next(rows for rows in (1, SPREAD_ROWS, NARROW_ROWS, MAX_ROWS) if m <= rows)
    return TIMED_FEW_ROWS.get((g.has_zero_point, most, *size))


def _cut(plan: SmallPlan) -> tuple[int, ...]:
    shape = plan.shape
    return shape.fragments, shape.k_blocks, shape.row_groups, shape.warps, plan.split


def cost(geometry: Geometry, plan: SmallPlan) -> float:
    """About how many microseconds a plan takes beyond what every plan does."""
    shape = plan.shape
    blocks = plan.row_blocks * plan.rounds * shape.k_blocks * shape.warps
    if shape.by_planes:
        stage_blocks = (
            shape.stage_blocks if plan.whole_passes else shape.short_blocks * shape.k_blocks
        )
        time = blocks * (cost_model.PLANES_BLOCK_COST + cost_model.PLANES_STAGE_COST / stage_blocks)
        time += cost_model.PLANES_COST * geometry.columns / plan.split
        time += cost_model.PLANES_START_COST + cost_model.PLANES_PASS_COST * (plan.passes - 1)
        return time + (cost_model.PLANES_CLUSTER_COST if plan.split > 1 else 0)
    if rows := shape.digit_rows:
        block_cost = cost_model.DIGITS_BLOCK_COST[geometry.bits][shape.fragments, shape.k_blocks]
        time = blocks * block_cost * cost_model.DIGITS_ROWS_FACTOR[rows]
        time += cost_model.DIGITS_COST[rows] * geometry.columns / plan.split
    elif shape.column_tiles == 1:
        of_shapes = cost_model.SPREAD_COST if shape.is_spread else cost_model.NARROW_COST
        block_cost = of_shapes[shape.fragments, shape.k_blocks][geometry.bits]
        time = cost_model.TABLE_COST + blocks * block_cost
    else:
        of_wide = cost_model.SCALED_COST if shape.scales_weights else cost_model.WIDE_COST
        pieces = shape.fragments, shape.k_blocks, shape.row_groups
        time = cost_model.TABLE_COST + blocks * of_wide[pieces][geometry.bits]
    if shape.warps < 8 or plan.passes * plan.rounds > cost_model.LONG_LOOP:
        time *= cost_model.WARPS_FACTOR[shape.warps]
    in_flight = shape.warps * STAGES * shape.stage_blocks * geometry.shape[2] / 1024
    little = cost_model.LITTLE_IN_FLIGHT_KIB[geometry.bits]
    if shape.digit_rows and plan.passes * plan.rounds > 2 * cost_model.LONG_LOOP:
        little = cost_model.LITTLE_OF_DIGITS_KIB
    if shape.column_tiles == 1 and in_flight < little:
        time *= cost_model.LITTLE_IN_FLIGHT_FACTOR
    time += cost_model.PASS_COST * plan.passes
    if plan.split > 1:
        time += cost_model.CLUSTER_COST[shape.column_tiles]
        time += cost_model.CLUSTER_PASS_COST[shape.column_tiles] * plan.passes
    return time + cost_model.START_COST * max(0.0, in_flight - cost_model.EASY_START_KIB)


def small_plans(
    geometry: Geometry, variant: Variant, m: int, device: Device
) -> Iterator[SmallPlan]:
    """Every plan that fits."""
    splits = [split for split in FITTING_SHARE if device.has_clusters or split == 1]
    for shape, split in itertools.product(small_shapes(variant, m, device), splits):
        if plan := plan_of_shape(geometry, m, device, shape, split):
            yield plan


def small_shapes(variant: Variant, m: int, device: Device) -> Iterator[TileShape]:
    """Shapes of tile whose instantiations find enough registers.

    With short tiles are only those of planes.cu that have no others.
    """
    column_tiles = 1 if m <= NARROW_ROWS else 2
    is_spread = m <= SPREAD_ROWS
    scales_weights = column_tiles == 2 and variant.scales_weights and device.is_hopper
    pieces = list((cost_model.SCALED_COST if scales_weights else cost_model.WIDE_COST).items())
    if column_tiles == 1:
        of_shapes = cost_model.SPREAD_COST if is_spread else cost_model.NARROW_COST
        pieces = [
            ((*key, groups), by_bits) for key, by_bits in of_shapes.items() for groups in (1, 2)
        ]
    for (key, by_bits), warps in itertools.product(pieces, WARP_COUNTS):
        shape = TileShape(
            *key, column_tiles, warps, is_spread=is_spread, scales_weights=scales_weights
        )
        # Eight fragments are for eight warps and more: with fewer, 12.0 would spill.
        fits = warps <= most_warps(variant, shape, device) and (shape.fragments < 8 or warps >= 8)
        if variant.bits in by_bits and fits:
            yield shape
    # The fewest rows that suffice.
    if rows := next((rows for rows in variant.digit_rows if rows >= m), 0):
        for fragments, k_blocks in cost_model.DIGITS_BLOCK_COST[variant.bits]:
            yield TileShape(fragments, k_blocks, 1, 1, DIGITS_WARPS, digit_rows=rows)
    if m == 1 and variant.has_planes and device.is_hopper:
        cuts = itertools.product(PLANES_CUTS, PLANES_WARPS)
        for (fragments, k_blocks), warps in cuts:
            shape = TileShape(fragments, k_blocks, 1, 1, warps, digit_rows=1, by_planes=True)
            yield shape
            if fragments // 2 > PLANES_SHORT_BLOCKS:
                yield replace(shape, short_blocks=PLANES_SHORT_BLOCKS)


def plan_of_shape(
    geometry: Geometry, m: int, device: Device, shape: TileShape, split: int
) -> SmallPlan | None:
    """The plan of one shape and split, or None where it does not fit.

    Where the tiles of the last pass would leave processors without one, they are made short. Where
    the shape has short tiles already, they are all, and there is one pass.
    """
    stored = next(count for count in (1, 2, 4, 8, 16) if count >= m)
    clusters = int(device.processors * FITTING_SHARE[split]) // split
    stage_columns = BLOCK_COLUMNS * shape.k_blocks
    if geometry.rows < shape.rows or geometry.columns % stage_columns or clusters == 0:
        return None
    # In blocks of 32 rows, of each group of warps.
    rows, tile = geometry.rows // BLOCK_ROWS // shape.row_groups, shape.fragments // 2
    if geometry.rows % (BLOCK_ROWS * shape.row_groups):
        return None
    whole_passes, left = divmod(rows, tile * clusters)
    short = -(-left // clusters)
    if shape.short_blocks:
        tile = shape.short_blocks
        if rows % tile or rows > tile * clusters:
            return None
        whole_passes = 0
    elif whole_passes > 0 and 0 < short < tile:
        shape = replace(shape, short_blocks=short)
    elif rows % tile:
        return None
    else:
        whole_passes += short > 0
    passes = whole_passes + (shape.short_blocks > 0)
    stages = geometry.columns // stage_columns
    rounds = -(-stages // (shape.warps // shape.row_groups * split))
    ring = shape.warps * STAGES * shape.stage_blocks * geometry.shape[2]
    sums = shape.warps * (16 * shape.fragments + 4) * stored * 4
    mail = MAIL_BARRIER_BYTES + (2 * shape.rows * stored * 4 if split > 1 else 0)
    table = TABLE_BYTES
    if rows_of_x := shape.digit_rows:
        each = PLANES_BYTES if shape.by_planes else DIGITS_BYTES[geometry.bits, rows_of_x]
        table = shape.warps * rounds * shape.k_blocks * each
    fixed = table + ring + shape.warps * STAGES * BARRIER_BYTES + mail
    for buffers in (2, 1) if passes > 1 else (0 if sums <= ring else 1,):
        # More than half of a processor's: when a kernel starts while the one before still runs, two
        # of its blocks must not meet on a processor and leave another without (H200, 2 bits,
        # 8192 x 8192, m = 1: 14.2 us with 100 KiB, 9.2 with 114).
        alone = device.shared_bytes // 2 + 1024
        if (shared := max(alone, fixed + buffers * sums)) <= device.shared_bytes:
            return SmallPlan(
                shape=shape,
                split=split,
                grid=(clusters if passes > 1 else rows // tile) * split,
                passes=passes,
                whole_passes=whole_passes,
                rounds=rounds,
                stored_columns=stored,
                sum_buffers=buffers,
                shared_bytes=shared,
            )
    return None


def most_warps(variant: Variant, shape: TileShape, device: Device) -> int:
    """Warps that find enough registers: 16 leave 128 to a thread, 12 leave 168, 8 leave 255.

    test_marlin_kernels.py holds every instantiation to no spills at all.
    """
    bits = variant.bits
    heavy = variant.per_row == 2 or variant.scale_dtype == torch.float32
    if shape.is_spread and device.is_hopper and variant.per_row == 1 and shape.stage_blocks <= 4:
        return 16
    if shape.scales_weights:
        return 12 if shape.fragments == 8 else 16
    if shape.fragments == 8 or (shape.column_tiles == 2 and shape.k_blocks == 2):
        # From 5 bits on what was timed: codebooks on Hopper.
        is_timed = bits <= 4 or (device.is_hopper and not variant.affine)
        return 8 if not heavy and (shape.column_tiles == 1 or is_timed) else 0
    # Two tiles of columns or four blocks leave zero points no room in 128 registers, but for some
    # widths on Hopper.
    roomy = HOPPER_ZERO_POINT_BITS[shape.column_tiles] if device.is_hopper else ()
    tight = heavy or (variant.affine and bits not in roomy)
    if shape.column_tiles == 2:
        return 8 if variant.per_row == 2 else 16 if bits in (2, 3) and not tight else 12
    if shape.stage_blocks == 4:
        fits = bits in (2, 3, 5, 6, 7, 8) or (bits == 1 and variant.dtype == torch.bfloat16)
        return 8 if variant.per_row == 2 else 16 if fits and not tight else 12
    # Codebooks of bf16, 64 x 64 a warp: in short tiles 12.0, and it alone, would spill 4 bytes.
    if bits == 1 and variant.dtype == torch.bfloat16 and not variant.affine:
        is_lone = shape.fragments == 4 and shape.row_groups == 1
        if is_lone and device.has_clusters and not device.is_hopper:
            return 12
    if bits > 4:
        return 12 if heavy else 16
    return 12 if variant.per_row == 2 and bits <= 2 else 16

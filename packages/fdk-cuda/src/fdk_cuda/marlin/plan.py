"""How a product with few rows of x is cut: tiles, warps, clusters, shared memory."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fdk_cuda.marlin.layout import BLOCK_COLUMNS, BLOCK_ROWS, Geometry
from fdk_cuda.marlin.programs import DIGITS_BYTES, PLANES_BYTES, TABLE_BYTES, TileShape, Variant
from fdk_cuda.marlin.timed import TIMED_FEW_ROWS

# Rows of x that one launch takes at most.
MAX_ROWS = 16
# Up to so many, they lie in every other column of operand B.
SPREAD_ROWS = 4
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
    (4, 1): {1: 0.0218, 2: 0.0260, 3: 0.0295, 4: 0.0315, 8: 0.0590},
    (4, 2): {1: 0.0205, 2: 0.0230, 3: 0.0257, 4: 0.0310, 8: 0.0580},
    (8, 2): {1: 0.0190, 2: 0.0195},
}
# The same with up to 4 rows of x: least squares over 1078 timed plans (H200, five shapes and the
# layers of two models, codebooks and affine weights, 1 and 4 rows), then what in 94 cases puts the
# fastest first. Those that it does not, by over 1.5 %, are ``TIMED_FEW_ROWS``.
SPREAD_COST = {
    (2, 2): {1: 0.0235, 2: 0.0279, 3: 0.0347, 4: 0.0350, 8: 0.0578},
    (4, 1): {1: 0.0236, 2: 0.0287, 3: 0.0330, 4: 0.0350, 8: 0.0637},
    (4, 2): {1: 0.0205, 2: 0.0268, 3: 0.0298, 4: 0.0295, 8: 0.0552},
    (8, 1): {1: 0.0210, 2: 0.0266, 3: 0.0311, 4: 0.0339, 8: 0.0550},
    (8, 2): {1: 0.0190, 2: 0.0208, 3: 0.0249, 4: 0.0274, 8: 0.0570},
}
# And of digits.cu by bits, for one row of x, and for four by so much more; more warps are slower.
# Of turning a column of x into digits.
DIGITS_BLOCK_COST = {
    1: {
        **{(2, 2): 0.0195, (2, 4): 0.0190, (4, 2): 0.0163},
        **{(4, 4): 0.0150, (8, 2): 0.0160, (8, 4): 0.0150},
    },
    2: {
        **{(2, 2): 0.0289, (2, 4): 0.0250, (4, 2): 0.0234},
        **{(4, 4): 0.0192, (8, 2): 0.0199, (8, 4): 0.0170},
    },
}
DIGITS_ROWS_FACTOR = {1: 1.0, 4: 1.1}
DIGITS_WARPS = 8
DIGITS_COST = {1: 6e-5, 4: 40e-5}
# Of the table, which digits.cu does without.
TABLE_COST = 1.0
# Of planes.cu, fitted to 67 plans of 9 shapes (H200, docs/kernels/marlin.md): of a block, and of a
# stage, shared by its blocks; of turning a column of x into planes, of any plan beyond one of
# digits.cu, of each pass after the first, and of a cluster.
PLANES_BLOCK_COST, PLANES_STAGE_COST, PLANES_COST = 0.0095, 0.011, 20e-5
PLANES_START_COST, PLANES_PASS_COST, PLANES_CLUSTER_COST = 0.26, 0.48, 0.7
# Fragments, and blocks of columns.
PLANES_CUTS = (
    *((2, k_blocks) for k_blocks in (2, 4, 8)),
    *((4, k_blocks) for k_blocks in (2, 4, 8, 12)),
    *((8, k_blocks) for k_blocks in (2, 3, 4, 6)),
)
PLANES_WARPS = (8, 12)
# Blocks of 32 rows of the lone short tile that it may take too.
PLANES_SHORT_BLOCKS = 3
# With two tiles of columns, by the same, by groups of rows (a second group finds x in the L1) and
# by bits.
WIDE_COST = {
    (4, 1, 1): {1: 0.0410, 2: 0.0440, 3: 0.0490, 4: 0.0490, 8: 0.0800},
    (4, 1, 2): {1: 0.0370, 2: 0.0390, 3: 0.0440, 4: 0.0470, 8: 0.0740},
    (4, 2, 1): {1: 0.0410},
    (8, 1, 1): {1: 0.0380, 2: 0.0420, 3: 0.0460, 4: 0.0470},
}
# Of each tile that a block takes; of sharing tiles in a cluster, by tiles of columns, and of each.
PASS_COST = 0.3
CLUSTER_COST, CLUSTER_PASS_COST = {1: 0.4, 2: 0.45}, {1: 0.25, 2: 1.2}
# More than this in flight when a kernel starts makes its first weights late, by so much a KiB.
EASY_START_KIB, START_COST = 50, 0.016
# Few warps hide less latency in a long loop, and little in flight does not fill the memory. Fitted
# to the plans timed in docs/kernels/marlin.md.
WARPS_FACTOR = {16: 1.0, 12: 1.0, 8: 1.05, 4: 1.4, 2: 2.0}
LONG_LOOP = 8
# digits.cu in a long loop waits for memory with so little (1 bit, 6144 x 21504, m = 1, in pairs:
# 14.42 us with 20 KiB, 12.48 with 40).
LITTLE_OF_DIGITS_KIB = 24
LITTLE_IN_FLIGHT_KIB = {1: 13, 2: 18, 3: 23, 4: 28, 8: 76}
LITTLE_IN_FLIGHT_FACTOR = 1.15

# One row, codebooks, H200: timed in decoding steps (docs/benchmarks.md), where the kernels before
# and after overlap with the product; `cost` puts other plans first. 4096 x 14336 at 1 bit was timed
# alone: in a step 64 x 512 weights a warp take 1.2 us less. Any Hopper of as many
# processors takes them, as an H100 SXM. By bits, rows and columns: fragments, blocks of columns,
# groups of rows and warps of the shape, and the split.
TIMED_PROCESSORS = 132
TIMED_PLANS = {
    (1, 6144, 4096): (4, 8, 1, 8, 1),
    (1, 4096, 4096): (4, 8, 1, 8, 1),
    (1, 4096, 14336): (4, 4, 1, 8, 2),
    (1, 8192, 6144): (4, 4, 1, 8, 1),
    (1, 6144, 21504): (8, 2, 1, 12, 2),
    (4, 3072, 3072): (2, 2, 1, 16, 1),
    (4, 22528, 3072): (2, 2, 2, 16, 1),
    (4, 3072, 11264): (2, 2, 1, 16, 1),
    (4, 28672, 4096): (2, 2, 1, 16, 1),
    (4, 6144, 6144): (2, 2, 2, 12, 1),
    (4, 43008, 6144): (4, 2, 1, 12, 1),
}
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
    """One way to run small_m.cu or digits.cu.

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
    plans = list(_plans(geometry, Variant.of(geometry, dtype), m, device))
    if m <= SPREAD_ROWS and device.is_hopper and device.processors == TIMED_PROCESSORS:
        timed = timed_cut(geometry, m)
        # Of one row, none is of digits.cu, whose shapes are planes.cu's too.
        others = [p for p in plans if m > 1 or not p.shape.digit_rows or p.shape.by_planes]
        plans = [plan for plan in others if _cut(plan) == timed] or plans
    return min(plans, key=lambda plan: cost(geometry, plan))


def timed_cut(geometry: Geometry, m: int) -> tuple[int, ...] | None:
    """What was timed for up to ``SPREAD_ROWS`` rows of x, as ``TIMED_PLANS`` tells it, or None."""
    g, size = geometry, (geometry.bits, geometry.rows, geometry.columns)
    if m == 1 and not g.has_zero_point and size in TIMED_PLANS:
        return TIMED_PLANS[size]
    return TIMED_FEW_ROWS.get((g.has_zero_point, 1 if m == 1 else SPREAD_ROWS, *size))


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
        time = blocks * (PLANES_BLOCK_COST + PLANES_STAGE_COST / stage_blocks)
        time += PLANES_COST * geometry.columns / plan.split
        time += PLANES_START_COST + PLANES_PASS_COST * (plan.passes - 1)
        return time + (PLANES_CLUSTER_COST if plan.split > 1 else 0)
    if rows := shape.digit_rows:
        block_cost = DIGITS_BLOCK_COST[geometry.bits][shape.fragments, shape.k_blocks]
        time = blocks * block_cost * DIGITS_ROWS_FACTOR[rows]
        time += DIGITS_COST[rows] * geometry.columns / plan.split
    elif shape.column_tiles == 1:
        costs = SPREAD_COST if shape.is_spread else NARROW_COST
        time = TABLE_COST + blocks * costs[shape.fragments, shape.k_blocks][geometry.bits]
    else:
        pieces = shape.fragments, shape.k_blocks, shape.row_groups
        time = TABLE_COST + blocks * WIDE_COST[pieces][geometry.bits]
    if shape.warps < 8 or plan.passes * plan.rounds > LONG_LOOP:
        time *= WARPS_FACTOR[shape.warps]
    in_flight = shape.warps * STAGES * shape.stage_blocks * geometry.shape[2] / 1024
    little = LITTLE_IN_FLIGHT_KIB[geometry.bits]
    if shape.digit_rows and plan.passes * plan.rounds > 2 * LONG_LOOP:
        little = LITTLE_OF_DIGITS_KIB
    if shape.column_tiles == 1 and in_flight < little:
        time *= LITTLE_IN_FLIGHT_FACTOR
    time += PASS_COST * plan.passes
    if plan.split > 1:
        time += CLUSTER_COST[shape.column_tiles]
        time += CLUSTER_PASS_COST[shape.column_tiles] * plan.passes
    return time + START_COST * max(0.0, in_flight - EASY_START_KIB)


def _plans(geometry: Geometry, variant: Variant, m: int, device: Device) -> Iterator[SmallPlan]:
    splits = [split for split in FITTING_SHARE if device.has_clusters or split == 1]
    for shape, split in itertools.product(small_shapes(variant, m, device), splits):
        if plan := plan_of_shape(geometry, m, device, shape, split):
            yield plan


def small_shapes(variant: Variant, m: int, device: Device) -> Iterator[TileShape]:
    """Shapes of tile whose instantiations find enough registers.

    With short tiles are only those of planes.cu that have no others.
    """
    column_tiles = 1 if m <= 8 else 2
    is_spread = m <= SPREAD_ROWS
    pieces = list(WIDE_COST.items())
    if column_tiles == 1:
        costs = SPREAD_COST if is_spread else NARROW_COST
        pieces = [((*key, groups), cost) for key, cost in costs.items() for groups in (1, 2)]
    for (key, cost), warps in itertools.product(pieces, WARP_COUNTS):
        shape = TileShape(*key, column_tiles, warps, is_spread=is_spread)
        # Eight fragments are for eight warps and more: with fewer, 12.0 would spill.
        fits = warps <= most_warps(variant, shape, device) and (shape.fragments < 8 or warps >= 8)
        if variant.bits in cost and fits:
            yield shape
    # The fewest rows that suffice.
    if rows := next((rows for rows in variant.digit_rows if rows >= m), 0):
        for fragments, k_blocks in DIGITS_BLOCK_COST[variant.bits]:
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
    if shape.fragments == 8 or (shape.column_tiles == 2 and shape.k_blocks == 2):
        return 0 if heavy else 8
    # Two tiles of columns or four blocks leave zero points no room in 128 registers, but for some
    # widths on Hopper.
    roomy = HOPPER_ZERO_POINT_BITS[shape.column_tiles] if device.is_hopper else ()
    tight = heavy or (variant.affine and bits not in roomy)
    if shape.column_tiles == 2:
        return 8 if variant.per_row == 2 else 16 if bits in (2, 3) and not tight else 12
    if shape.stage_blocks == 4:
        fits = bits in (2, 3, 8) or (bits == 1 and variant.dtype == torch.bfloat16)
        return 8 if variant.per_row == 2 else 16 if fits and not tight else 12
    # Codebooks of bf16, 64 x 64 a warp: in short tiles 12.0, and it alone, would spill 4 bytes.
    if bits == 1 and variant.dtype == torch.bfloat16 and not variant.affine:
        is_lone = shape.fragments == 4 and shape.row_groups == 1
        if is_lone and device.has_clusters and not device.is_hopper:
            return 12
    if bits == 8:
        return 12 if heavy else 16
    return 12 if variant.per_row == 2 and bits <= 2 else 16

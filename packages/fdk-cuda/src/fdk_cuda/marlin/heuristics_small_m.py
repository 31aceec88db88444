"""Plans for few rows of x: tile, warps, cluster and shared memory, chosen by a cost model."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fdk_cuda.marlin import cost_model
from fdk_cuda.marlin.instantiations import (
    BITPLANE_BYTES,
    LIMB_BYTES,
    TABLE_BYTES,
    TileShape,
    Variant,
)
from fdk_cuda.marlin.layout import BLOCK_K, BLOCK_N, Geometry
from fdk_cuda.marlin.tuned_overrides import SmallMCut, is_tuned, small_m_override

# Most rows of x in a launch; most in one tile of operand B; most that fit its even columns.
MAX_M, NARROW_M, SPREAD_M = 16, 8, 4
STAGES, BARRIER_BYTES, DSMEM_BARRIER_BYTES = 2, 16, 16
WARP_COUNTS = (16, 12, 8, 4, 2)
# Thread blocks of a cluster, and the share of the SMs that clusters of that size can fill: of 132
# SMs (H200), 66 clusters of 2 and 30 of 4.
FITTING_SHARE = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.84}
# gemv_int8_limbs.cu: more warps are slower.
LIMB_WARPS = 8
# gemv_bitplane.cu: fragments and blocks of 64 inputs of a warp.
BITPLANE_CUTS = (
    *((2, k_blocks) for k_blocks in (2, 4, 8)),
    *((4, k_blocks) for k_blocks in (2, 4, 8, 12)),
    *((8, k_blocks) for k_blocks in (2, 3, 4, 6)),
)
BITPLANE_WARPS = (8, 12)
# Blocks of 32 outputs in the short tile that gemv_bitplane.cu may use for the whole weight.
BITPLANE_SHORT_BLOCKS = 3
# Bits at which 16 warps have enough registers for zero points on compute capability 9.0, by tiles
# of 8 rows of x; 8.0 and 12.0 would spill (H200, 3 bits, 28672 x 8192, m = 1: 34.6 us -> 31.4).
HOPPER_ZERO_POINT_BITS = {1: (1, 3), 2: (3,)}


@dataclass(frozen=True)
class Device:
    """Properties of a GPU that plans depend on.

    Attributes:
        sm_count: streaming multiprocessors.
        shared_bytes: most shared memory of a thread block.
        has_clusters: True from compute capability 9.0 on.
        is_hopper: True for compute capability 9.x.
    """

    sm_count: int
    shared_bytes: int
    has_clusters: bool
    is_hopper: bool = False


@dataclass(frozen=True)
class SmallPlan:
    """A way to run small_m.cu, gemv_int8_limbs.cu or gemv_bitplane.cu.

    Attributes:
        shape: shape of the instantiation.
        cluster: thread blocks of a cluster, which share the inputs of a tile.
        grid: thread blocks.
        passes: tiles of the busiest thread block.
        whole_passes: number of passes before the short tiles.
        rounds: stages per tile of the busiest warp.
        stored_m: rows of x in the partial sums.
        sum_buffers: buffers of partial sums, 0 where they overwrite the pipeline.
        shared_bytes: shared memory of a thread block.
    """

    shape: TileShape
    cluster: int
    grid: int
    passes: int
    whole_passes: int
    rounds: int
    stored_m: int
    sum_buffers: int
    shared_bytes: int

    @property
    def log_share(self) -> int:
        """Binary logarithm of the values of a tile that a thread block finishes."""
        share = self.shape.tile_n * self.stored_m // self.cluster
        assert share.bit_count() == 1
        return share.bit_length() - 1

    @property
    def n_blocks(self) -> int:
        """Blocks of 32 outputs that a group of warps takes, in all passes."""
        short = (self.passes - self.whole_passes) * self.shape.short_blocks
        return self.whole_passes * self.shape.fragments // 2 + short

    @property
    def cut(self) -> SmallMCut:
        """Fields by which overrides select a plan."""
        shape = self.shape
        return SmallMCut(shape.fragments, shape.k_blocks, shape.n_groups, shape.warps, self.cluster)


def plan_small(geometry: Geometry, dtype: torch.dtype, m: int, device: Device) -> SmallPlan:
    """Returns the plan for ``x :: [m, k, dtype]`` with m up to ``MAX_M``."""
    assert 1 <= m <= MAX_M
    variant = Variant.of(geometry, dtype)
    plans = list(small_plans(geometry, variant, m, device))
    # 1 bit with more rows was tuned where weights are scaled only.
    has_overrides = m <= NARROW_M or geometry.bits > 1 or variant.scales_weights
    if has_overrides and is_tuned(is_hopper=device.is_hopper, sm_count=device.sm_count):
        tuned = small_m_override(geometry, m)
        # For one row an override never means gemv_int8_limbs.cu, which has some of the same cuts.
        others = [p for p in plans if m > 1 or not p.shape.limb_rows or p.shape.is_bitplane]
        plans = [plan for plan in others if plan.cut == tuned] or plans
    return min(plans, key=lambda plan: small_m_cost(geometry, plan))


def small_m_cost(geometry: Geometry, plan: SmallPlan) -> float:
    """Returns the cost model's microseconds for a plan, beyond what every plan takes."""
    shape = plan.shape
    blocks = plan.n_blocks * plan.rounds * shape.k_blocks * shape.warps
    if shape.is_bitplane:
        stage_blocks = (
            shape.stage_blocks if plan.whole_passes else shape.short_blocks * shape.k_blocks
        )
        stage_cost = cost_model.BITPLANE_STAGE_COST / stage_blocks
        time = blocks * (cost_model.BITPLANE_BLOCK_COST + stage_cost)
        time += cost_model.BITPLANE_COST * geometry.padded_k / plan.cluster
        time += cost_model.BITPLANE_START_COST + cost_model.BITPLANE_PASS_COST * (plan.passes - 1)
        return time + (cost_model.BITPLANE_CLUSTER_COST if plan.cluster > 1 else 0)
    if rows := shape.limb_rows:
        tile = cost_model.WarpTile(shape.fragments, shape.k_blocks)
        block_cost = cost_model.LIMB_BLOCK_COST[geometry.bits][tile]
        time = blocks * block_cost * cost_model.LIMB_ROWS_FACTOR[rows]
        time += cost_model.LIMB_COST[rows] * geometry.padded_k / plan.cluster
    elif shape.m_tiles == 1:
        narrow = cost_model.SPREAD_COST if shape.is_spread else cost_model.NARROW_COST
        block_cost = narrow[cost_model.WarpTile(shape.fragments, shape.k_blocks)][geometry.bits]
        time = cost_model.TABLE_COST + blocks * block_cost
    else:
        wide = cost_model.SCALED_COST if shape.scales_weights else cost_model.WIDE_COST
        wide_tile = cost_model.WideTile(shape.fragments, shape.k_blocks, shape.n_groups)
        time = cost_model.TABLE_COST + blocks * wide[wide_tile][geometry.bits]
    if shape.warps < 8 or plan.passes * plan.rounds > cost_model.LONG_LOOP:
        time *= cost_model.WARPS_FACTOR[shape.warps]
    in_flight = shape.warps * STAGES * shape.stage_blocks * geometry.shape[2] / 1024
    least = cost_model.MIN_KIB_IN_FLIGHT[geometry.bits]
    if shape.limb_rows and plan.passes * plan.rounds > 2 * cost_model.LONG_LOOP:
        least = cost_model.MIN_LIMB_KIB_IN_FLIGHT
    if shape.m_tiles == 1 and in_flight < least:
        time *= cost_model.UNSATURATED_FACTOR
    time += cost_model.PASS_COST * plan.passes
    if plan.cluster > 1:
        time += cost_model.CLUSTER_COST[shape.m_tiles]
        time += cost_model.CLUSTER_PASS_COST[shape.m_tiles] * plan.passes
    return time + cost_model.START_COST * max(0.0, in_flight - cost_model.EASY_START_KIB)


def small_plans(
    geometry: Geometry, variant: Variant, m: int, device: Device
) -> Iterator[SmallPlan]:
    """Yields every plan that fits."""
    clusters = [size for size in FITTING_SHARE if device.has_clusters or size == 1]
    for shape, cluster in itertools.product(small_shapes(variant, m, device), clusters):
        if plan := plan_of_shape(geometry, m, device, shape, cluster):
            yield plan


def small_shapes(variant: Variant, m: int, device: Device) -> Iterator[TileShape]:
    """Yields the tiles whose instantiations have enough registers.

    ``plan_of_shape`` adds short tiles; only those of gemv_bitplane.cu that are used alone are here.
    """
    m_tiles = 1 if m <= NARROW_M else 2
    is_spread = m <= SPREAD_M
    scales_weights = m_tiles == 2 and variant.scales_weights and device.is_hopper
    wide = cost_model.SCALED_COST if scales_weights else cost_model.WIDE_COST
    narrow = cost_model.SPREAD_COST if is_spread else cost_model.NARROW_COST
    tiles: list[tuple[tuple[int, int, int], cost_model.Costs]] = list(wide.items())
    if m_tiles == 1:
        tiles = [((*tile, groups), costs) for tile, costs in narrow.items() for groups in (1, 2)]
    for (tile, costs), warps in itertools.product(tiles, WARP_COUNTS):
        shape = TileShape(*tile, m_tiles, warps, is_spread=is_spread, scales_weights=scales_weights)
        # Eight fragments need eight warps or more: with fewer, 12.0 would spill.
        fits = warps <= most_warps(variant, shape, device) and (shape.fragments < 8 or warps >= 8)
        if variant.bits in costs and fits:
            yield shape
    # The instantiation for the fewest rows that suffice.
    if rows := next((rows for rows in variant.limb_rows if rows >= m), 0):
        for fragments, k_blocks in cost_model.LIMB_BLOCK_COST[variant.bits]:
            yield TileShape(fragments, k_blocks, 1, 1, LIMB_WARPS, limb_rows=rows)
    if m == 1 and variant.has_bitplanes and device.is_hopper:
        cuts = itertools.product(BITPLANE_CUTS, BITPLANE_WARPS)
        for (fragments, k_blocks), warps in cuts:
            shape = TileShape(fragments, k_blocks, 1, 1, warps, limb_rows=1, is_bitplane=True)
            yield shape
            if fragments // 2 > BITPLANE_SHORT_BLOCKS:
                yield replace(shape, short_blocks=BITPLANE_SHORT_BLOCKS)


def plan_of_shape(
    geometry: Geometry, m: int, device: Device, shape: TileShape, cluster: int
) -> SmallPlan | None:
    """Returns the plan of one tile and cluster size, or None where it does not fit.

    Where tiles of the last pass would leave SMs idle, they are made short. A shape that has short
    tiles already uses no others, in one pass.
    """
    stored_m = next(count for count in (1, 2, 4, 8, 16) if count >= m)
    clusters = int(device.sm_count * FITTING_SHARE[cluster]) // cluster
    stage_k = BLOCK_K * shape.k_blocks
    if geometry.padded_n < shape.tile_n or geometry.padded_k % stage_k or clusters == 0:
        return None
    # In blocks of 32 outputs, for each group of warps.
    n_blocks, tile = geometry.padded_n // BLOCK_N // shape.n_groups, shape.fragments // 2
    if geometry.padded_n % (BLOCK_N * shape.n_groups):
        return None
    whole_passes, left = divmod(n_blocks, tile * clusters)
    short = -(-left // clusters)
    if shape.short_blocks:
        tile = shape.short_blocks
        if n_blocks % tile or n_blocks > tile * clusters:
            return None
        whole_passes = 0
    elif whole_passes > 0 and 0 < short < tile:
        shape = replace(shape, short_blocks=short)
    elif n_blocks % tile:
        return None
    else:
        whole_passes += short > 0
    passes = whole_passes + (shape.short_blocks > 0)
    stages = geometry.padded_k // stage_k
    rounds = -(-stages // (shape.warps // shape.n_groups * cluster))
    pipeline = shape.warps * STAGES * shape.stage_blocks * geometry.shape[2]
    sums = shape.warps * (16 * shape.fragments + 4) * stored_m * 4
    dsmem = DSMEM_BARRIER_BYTES + (2 * shape.tile_n * stored_m * 4 if cluster > 1 else 0)
    table = TABLE_BYTES
    if limb_rows := shape.limb_rows:
        each = BITPLANE_BYTES if shape.is_bitplane else LIMB_BYTES[geometry.bits, limb_rows]
        table = shape.warps * rounds * shape.k_blocks * each
    fixed = table + pipeline + shape.warps * STAGES * BARRIER_BYTES + dsmem
    for buffers in (2, 1) if passes > 1 else (0 if sums <= pipeline else 1,):
        # More than half of an SM's: two thread blocks of a kernel that starts while the previous
        # one still runs must not share an SM and leave another idle (H200, 2 bits, 8192 x 8192,
        # m = 1: 14.2 us with 100 KiB, 9.2 with 114).
        alone = device.shared_bytes // 2 + 1024
        if (shared := max(alone, fixed + buffers * sums)) <= device.shared_bytes:
            return SmallPlan(
                shape=shape,
                cluster=cluster,
                grid=(clusters if passes > 1 else n_blocks // tile) * cluster,
                passes=passes,
                whole_passes=whole_passes,
                rounds=rounds,
                stored_m=stored_m,
                sum_buffers=buffers,
                shared_bytes=shared,
            )
    return None


def most_warps(variant: Variant, shape: TileShape, device: Device) -> int:
    """Returns how many warps get enough registers: 16 leave 128 to a thread, 12 168, 8 255.

    The rules are measured: test_instantiations.py checks that no instantiation spills.
    """
    bits = variant.bits
    heavy = variant.per_row == 2 or variant.scale_dtype == torch.float32
    if shape.is_spread and device.is_hopper and variant.per_row == 1 and shape.stage_blocks <= 4:
        return 16
    if shape.scales_weights:
        return 12 if shape.fragments == 8 else 16
    if shape.fragments == 8 or (shape.m_tiles == 2 and shape.k_blocks == 2):
        # From 5 bits on, only the tuned case: codebooks on Hopper.
        is_tuned_kind = bits <= 4 or (device.is_hopper and not variant.affine)
        return 8 if not heavy and (shape.m_tiles == 1 or is_tuned_kind) else 0
    # Two tiles of rows, or four blocks, leave zero points too few of 128 registers, except for
    # some widths on Hopper.
    roomy = HOPPER_ZERO_POINT_BITS[shape.m_tiles] if device.is_hopper else ()
    tight = heavy or (variant.affine and bits not in roomy)
    if shape.m_tiles == 2:
        return 8 if variant.per_row == 2 else 16 if bits in (2, 3) and not tight else 12
    if shape.stage_blocks == 4:
        fits = bits in (2, 3, 5, 6, 7, 8) or (bits == 1 and variant.dtype == torch.bfloat16)
        return 8 if variant.per_row == 2 else 16 if fits and not tight else 12
    # bf16 codebooks, 64 x 64 weights a warp: 12.0 alone would spill 4 bytes in short tiles.
    if bits == 1 and variant.dtype == torch.bfloat16 and not variant.affine:
        is_lone = shape.fragments == 4 and shape.n_groups == 1
        if is_lone and device.has_clusters and not device.is_hopper:
            return 12
    if bits > 4:
        return 12 if heavy else 16
    return 12 if variant.per_row == 2 and bits <= 2 else 16

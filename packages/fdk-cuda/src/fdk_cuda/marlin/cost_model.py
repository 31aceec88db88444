"""Cost models: microseconds that a plan is expected to take, as tables of measured constants.

Only the order of plans matters, so one table serves all GPUs: other chips differ by a factor. The
constants are from an H200, those of 5 to 7 bits from an H100; docs/design/marlin.md and
docs/design/hopper.md have the fits. ``heuristics_small_m.small_m_cost`` and
``heuristics_hopper.hopper_cost`` add them up.
"""

from typing import NamedTuple


class WarpTile(NamedTuple):
    """Tile that a warp processes per step: fragments of 16 outputs, blocks of 64 inputs."""

    fragments: int
    k_blocks: int


class WideTile(NamedTuple):
    """Tile of a warp with 9 to 16 rows of x, and the groups of warps along n."""

    fragments: int
    k_blocks: int
    n_groups: int


class HopperTile(NamedTuple):
    """Shape of a Hopper tile: rows of x (or dy), consumers, and consumers that share outputs."""

    tile_m: int
    consumers: int
    k_groups: int


Costs = dict[int, float]


def _by_bits(*costs: float) -> Costs:
    """Returns a dict of the costs of 1, 2, ... bits."""
    return dict(enumerate(costs, 1))


# small_m.cu, us per block of 32 x 64 weights. With 5 to 8 rows of x:
NARROW_COST: dict[WarpTile, Costs] = {
    WarpTile(2, 2): _by_bits(0.0252, 0.0273, 0.0287, 0.0299, 0.0349, 0.0573, 0.0556, 0.0573),
    WarpTile(4, 1): _by_bits(0.0218, 0.0260, 0.0295, 0.0315, 0.0362, 0.0590, 0.0590, 0.0590),
    WarpTile(4, 2): _by_bits(0.0205, 0.0230, 0.0257, 0.0310, 0.0445, 0.0580, 0.0580, 0.0580),
    WarpTile(8, 2): {1: 0.0190, 2: 0.0195},
}
# With up to 4 rows: least squares over 1078 timed plans, adjusted so that the fastest comes first
# in 94 cases. Exceptions above 1.5 % are overrides.
SPREAD_COST: dict[WarpTile, Costs] = {
    WarpTile(2, 2): _by_bits(0.0235, 0.0279, 0.0347, 0.0350, 0.0418, 0.0491, 0.0491, 0.0578),
    WarpTile(4, 1): _by_bits(0.0236, 0.0287, 0.0330, 0.0350, 0.0494, 0.0637, 0.0637, 0.0637),
    WarpTile(4, 2): _by_bits(0.0205, 0.0268, 0.0298, 0.0295, 0.0423, 0.0552, 0.0552, 0.0552),
    WarpTile(8, 1): _by_bits(0.0210, 0.0266, 0.0311, 0.0339, 0.0445, 0.0517, 0.0550, 0.0550),
    WarpTile(8, 2): _by_bits(0.0190, 0.0208, 0.0249, 0.0274, 0.0422, 0.0570, 0.0570, 0.0570),
}
# Higher than any other: chosen by overrides only.
OVERRIDE_ONLY = 1.0
# With 9 to 16 rows. A second group of warps finds x in the L1.
WIDE_COST: dict[WideTile, Costs] = {
    WideTile(4, 1, 1): _by_bits(0.0410, 0.0440, 0.0490, 0.0490, 0.0645, 0.0800, 0.0776, 0.0800),
    WideTile(4, 1, 2): _by_bits(0.0370, 0.0390, 0.0440, 0.0470, 0.0605, 0.0784, 0.0740, 0.0740),
    WideTile(4, 2, 1): {1: 0.0410},
    WideTile(8, 1, 1): {1: 0.0380, 2: 0.0420, 3: 0.0460, 4: 0.0470, 5: OVERRIDE_ONLY},
    WideTile(8, 1, 2): {5: OVERRIDE_ONLY, 6: OVERRIDE_ONLY},
}
# With 9 to 16 rows, where weights are scaled instead of sums.
SCALED_COST: dict[WideTile, Costs] = {
    WideTile(4, 2, 1): {1: 0.0255},
    WideTile(4, 2, 2): {1: 0.0240},
    WideTile(8, 2, 2): {1: 0.0208},
}
# Building the lookup table.
TABLE_COST = 1.0

# gemv_int8_limbs.cu: us per block with one row of x by bits, the factor for rows of x, and us per
# input for converting x to limbs. It has no table.
LIMB_BLOCK_COST: dict[int, dict[WarpTile, float]] = {
    1: {
        WarpTile(2, 2): 0.0195,
        WarpTile(2, 4): 0.0190,
        WarpTile(4, 2): 0.0163,
        WarpTile(4, 4): 0.0150,
        WarpTile(8, 2): 0.0160,
        WarpTile(8, 4): 0.0150,
    },
    2: {
        WarpTile(2, 2): 0.0289,
        WarpTile(2, 4): 0.0250,
        WarpTile(4, 2): 0.0234,
        WarpTile(4, 4): 0.0192,
        WarpTile(8, 2): 0.0199,
        WarpTile(8, 4): 0.0170,
    },
}
LIMB_ROWS_FACTOR = {1: 1.0, 4: 1.1}
LIMB_COST = {1: 6e-5, 4: 40e-5}

# gemv_bitplane.cu, fitted to 67 plans of 9 shapes: us per block, per stage (shared by its blocks),
# and per input for converting x; then a constant, each pass after the first, and a cluster.
BITPLANE_BLOCK_COST, BITPLANE_STAGE_COST, BITPLANE_COST = 0.0095, 0.011, 20e-5
BITPLANE_START_COST, BITPLANE_PASS_COST, BITPLANE_CLUSTER_COST = 0.26, 0.48, 0.7

# Each pass of small_m.cu and gemv_int8_limbs.cu; a cluster, and each of its passes, by tiles of
# 8 rows of x.
PASS_COST = 0.3
CLUSTER_COST, CLUSTER_PASS_COST = {1: 0.4, 2: 0.45}, {1: 0.25, 2: 1.2}
# More bytes in flight than this when a kernel starts delay its first weights: us per KiB above.
EASY_START_KIB, START_COST = 50, 0.016
# Few warps hide less latency in a long loop (stages of the busiest warp).
WARPS_FACTOR = {16: 1.0, 12: 1.0, 8: 1.05, 4: 1.4, 2: 2.0}
LONG_LOOP = 8
# KiB in flight, by bits, below which memory bandwidth is not saturated, and the factor that this
# costs. In a long loop gemv_int8_limbs.cu needs more (1 bit, 6144 x 21504: 14.4 us with 20 KiB,
# 12.5 with 40).
MIN_KIB_IN_FLIGHT = {1: 13, 2: 18, 3: 23, 4: 28, 5: 52, 6: 60, 7: 68, 8: 76}
MIN_LIMB_KIB_IN_FLIGHT = 24
UNSATURATED_FACTOR = 1.15

# Key of 1 bit by signs in the tables below.
SIGNS = 0


def _with_signs(costs: Costs) -> Costs:
    """Adds signs, which cost as much as 2 bits: right or level in all 17 cases timed."""
    return costs | {SIGNS: costs[2]}


# hopper_gemm.cu, us per step of 64 inputs: least squares over 1025 timed plans, with more weight on
# the fast ones. In 134 cases the plan chosen took 0.4 % more than the fastest on average, 10 % at
# most. Four entries were then corrected by hand (docs/design/hopper.md).
STEP_COST: dict[HopperTile, Costs] = {
    HopperTile(*tile): _with_signs(_by_bits(*costs))
    for tile, costs in {
        (32, 2, 1): (0.188, 0.173, 0.248, 0.193, 0.261, 0.313, 0.322, 0.313),
        (32, 4, 2): (0.180, 0.185, 0.230, 0.190, 0.255, 0.319, 0.319, 0.319),
        (32, 3, 1): (0.276, 0.256, 0.359, 0.281, 0.400, 0.518, 0.518, 0.518),
        (32, 4, 1): (0.371, 0.337, 0.525, 0.378, 0.556, 0.734, 0.734, 0.734),
        (64, 2, 1): (0.242, 0.229, 0.305, 0.251, 0.297, 0.342, 0.376, 0.342),
        (64, 4, 2): (0.243, 0.239, 0.281, 0.237, 0.295, 0.353, 0.364, 0.353),
        (64, 3, 1): (0.350, 0.336, 0.430, 0.365, 0.450, 0.535, 0.535, 0.535),
        (64, 4, 1): (0.479, 0.464, 0.577, 0.493, 0.630, 0.767, 0.767, 0.767),
        (96, 2, 1): (0.297, 0.276, 0.347, 0.306, 0.362, 0.418, 0.443, 0.418),
        (96, 3, 1): (0.452, 0.425, 0.499, 0.465, 0.543, 0.620, 0.620, 0.620),
        (128, 2, 1): (0.361, 0.347, 0.416, 0.401, 0.450, 0.499, 0.499, 0.499),
        (128, 3, 1): (0.547, 0.522, 0.594, 0.578, 0.650, 0.722, 0.722, 0.722),
        (160, 2, 1): (0.469, 0.457, 0.520, 0.469, 0.521, 0.572, 0.572, 0.572),
        (192, 2, 1): (0.522, 0.528, 0.586, 0.538, 0.593, 0.647, 0.647, 0.647),
        (224, 2, 1): (0.608, 0.610, 0.642, 0.627, 0.675, 0.722, 0.722, 0.722),
        (256, 2, 1): (0.686, 0.684, 0.723, 0.720, 0.765, 0.809, 0.809, 0.809),
    }.items()
}
# hopper_dgrad.cu, us per step of 64 rows of the weight: least squares over 1030 timed plans. In 120
# cases the plan chosen took 0.04 % more than the fastest on average, 3 % at most.
DGRAD_STEP_COST: dict[HopperTile, Costs] = {
    HopperTile(*tile): _by_bits(*costs)
    for tile, costs in {
        (64, 2, 1): (0.353, 0.387, 0.430, 0.341, 0.361, 0.428, 0.428, 0.428),
        (128, 2, 1): (0.461, 0.491, 0.530, 0.487, 0.520, 0.553, 0.553, 0.553),
        (192, 2, 1): (0.569, 0.600, 0.630, 0.621, 0.655, 0.689, 0.689, 0.689),
        (256, 2, 1): (0.684, 0.708, 0.754, 0.751, 0.792, 0.833, 0.833, 0.833),
    }.items()
}
# The kernel that adds partial tiles, and each MiB of them; a cluster, and each MiB that a thread
# block sends in it.
SPLIT_COST, SPLIT_MIB_COST = 2.61, 0.27
HOPPER_CLUSTER_COST, SENT_MIB_COST = 0.86, 23.2
# Thread blocks on every SM leave the next kernel no room to start. The penalty in us for a grid of
# that size, and the share of the SMs up to which there is none.
FULL_GPU_PENALTY, MAX_SM_SHARE_WITHOUT_PENALTY = 1.2, 0.75

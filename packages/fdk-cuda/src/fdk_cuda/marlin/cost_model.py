"""What the parts of a product with few rows of x cost, as timed: what plans are compared by.

Microseconds of an H200 (docs/kernels/marlin.md), those of 5 to 7 bits so that they put first what
was fastest on an H100 among 460 timed plans. Other chips differ by a factor; what counts is which
plan comes first. ``plan.cost`` adds them up.
"""


def _by_bits(*costs: float) -> dict[int, float]:
    """Of 1 bit, 2 and so on."""
    return dict(enumerate(costs, 1))


# Of a block of 32 x 64 weights, by fragments and blocks of columns that a warp takes at a time, and
# by bits: with 5 to 8 rows of x.
NARROW_COST = {
    (2, 2): _by_bits(0.0252, 0.0273, 0.0287, 0.0299, 0.0349, 0.0573, 0.0556, 0.0573),
    (4, 1): _by_bits(0.0218, 0.0260, 0.0295, 0.0315, 0.0362, 0.0590, 0.0590, 0.0590),
    (4, 2): _by_bits(0.0205, 0.0230, 0.0257, 0.0310, 0.0445, 0.0580, 0.0580, 0.0580),
    (8, 2): {1: 0.0190, 2: 0.0195},
}
# The same with up to 4 rows of x: least squares over 1078 timed plans (H200, five shapes and the
# layers of two models, codebooks and affine weights, 1 and 4 rows), then what in 94 cases puts the
# fastest first. Those that it does not, by over 1.5 %, are ``TIMED_FEW_ROWS``.
SPREAD_COST = {
    (2, 2): _by_bits(0.0235, 0.0279, 0.0347, 0.0350, 0.0418, 0.0491, 0.0491, 0.0578),
    (4, 1): _by_bits(0.0236, 0.0287, 0.0330, 0.0350, 0.0494, 0.0637, 0.0637, 0.0637),
    (4, 2): _by_bits(0.0205, 0.0268, 0.0298, 0.0295, 0.0423, 0.0552, 0.0552, 0.0552),
    (8, 1): _by_bits(0.0210, 0.0266, 0.0311, 0.0339, 0.0445, 0.0517, 0.0550, 0.0550),
    (8, 2): _by_bits(0.0190, 0.0208, 0.0249, 0.0274, 0.0422, 0.0570, 0.0570, 0.0570),
}
# And of digits.cu by bits, for one row of x, and for four by so much more.
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
# Of turning a column of x into digits.
DIGITS_COST = {1: 6e-5, 4: 40e-5}
# Of the table, which digits.cu does without.
TABLE_COST = 1.0
# Of planes.cu, fitted to 67 plans of 9 shapes (H200, docs/kernels/marlin.md): of a block, and of a
# stage, shared by its blocks; of turning a column of x into planes, of any plan beyond one of
# digits.cu, of each pass after the first, and of a cluster.
PLANES_BLOCK_COST, PLANES_STAGE_COST, PLANES_COST = 0.0095, 0.011, 20e-5
PLANES_START_COST, PLANES_PASS_COST, PLANES_CLUSTER_COST = 0.26, 0.48, 0.7
# Dearer than any other: faster at a size or two of ``TIMED_FEW_ROWS``, and slower at smaller ones.
ONLY_TIMED = 1.0
# With two tiles of columns, by the same, by groups of rows (a second group finds x in the L1) and
# by bits.
WIDE_COST = {
    (4, 1, 1): _by_bits(0.0410, 0.0440, 0.0490, 0.0490, 0.0645, 0.0800, 0.0776, 0.0800),
    (4, 1, 2): _by_bits(0.0370, 0.0390, 0.0440, 0.0470, 0.0605, 0.0784, 0.0740, 0.0740),
    (4, 2, 1): {1: 0.0410},
    (8, 1, 1): {1: 0.0380, 2: 0.0420, 3: 0.0460, 4: 0.0470, 5: ONLY_TIMED},
    (8, 1, 2): {5: ONLY_TIMED, 6: ONLY_TIMED},
}
# 1 bit where weights are scaled, not sums: by these the plan that costs least was within 2 % of the
# fastest in 18 of 23 cases (H100, 16 rows of x, 12 sizes, codebooks and signs).
SCALED_COST = {(4, 2, 1): {1: 0.0255}, (4, 2, 2): {1: 0.0240}, (8, 2, 2): {1: 0.0208}}
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
LITTLE_IN_FLIGHT_KIB = {1: 13, 2: 18, 3: 23, 4: 28, 5: 52, 6: 60, 7: 68, 8: 76}
LITTLE_IN_FLIGHT_FACTOR = 1.15

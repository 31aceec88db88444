"""Plans for few rows of x that were timed, where the model of costs puts slower ones first.

On an H200, those of 16 rows on an H100 SXM. Any Hopper of as many processors takes them. A plan is
told by fragments, blocks of columns, groups of rows and warps of its shape, and by its split.
"""

TIMED_PROCESSORS = 132
# One row, codebooks, in decoding steps (docs/kernels/models.md), where the kernels before and after
# overlap with the product. 4096 x 14336 at 1 bit was timed alone: in a step 64 x 512 weights a warp
# take 1.2 us less. By bits, rows and columns.
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
# bf16, groups of 64, bf16 scales, integer zero points: replays in turns, back to back
# (docs/kernels/marlin.md). Each took at least 1.5 % less than what ``plan.cost`` puts first, 2 % of
# 16 rows. By whether there are zero points, 1 row of x, 4 for 2 to 4 or 16 for 9 to 16, bits, rows
# and columns.
TIMED_FEW_ROWS = {
    (False, 1, 2, 8192, 8192): (4, 2, 1, 16, 1),
    (False, 4, 1, 4096, 14336): (4, 2, 1, 12, 2),
    (False, 4, 2, 8192, 8192): (4, 2, 1, 16, 1),
    (False, 4, 2, 28672, 8192): (4, 2, 1, 16, 1),
    (False, 4, 3, 4096, 4096): (4, 2, 1, 8, 2),
    (False, 4, 4, 14336, 4096): (4, 1, 2, 16, 1),
    (False, 4, 8, 4096, 14336): (2, 2, 1, 8, 1),
    (False, 4, 8, 14336, 4096): (4, 2, 1, 8, 2),
    (True, 1, 3, 8192, 8192): (4, 1, 1, 16, 1),
    (True, 1, 3, 28672, 8192): (8, 1, 1, 16, 1),
    (True, 1, 4, 14336, 4096): (4, 1, 2, 16, 1),
    (True, 1, 4, 28672, 8192): (8, 1, 1, 16, 1),
    (True, 1, 8, 4096, 14336): (2, 2, 1, 8, 1),
    (True, 1, 8, 28672, 8192): (8, 1, 1, 8, 2),
    (True, 4, 1, 4096, 14336): (4, 2, 1, 12, 2),
    (True, 4, 1, 28672, 8192): (4, 4, 1, 8, 1),
    (True, 4, 2, 8192, 8192): (4, 2, 1, 16, 1),
    (True, 4, 2, 14336, 4096): (8, 1, 1, 16, 1),
    (True, 4, 3, 8192, 8192): (4, 1, 1, 16, 1),
    (True, 4, 3, 14336, 4096): (4, 1, 2, 16, 1),
    (True, 4, 3, 28672, 8192): (8, 1, 1, 16, 1),
    (True, 4, 4, 4096, 4096): (2, 2, 1, 12, 1),
    (True, 4, 4, 14336, 4096): (4, 1, 2, 16, 1),
    (True, 4, 8, 4096, 14336): (2, 2, 1, 8, 1),
    (True, 4, 8, 14336, 4096): (4, 1, 2, 16, 1),
    (False, 16, 1, 4096, 4096): (4, 2, 1, 8, 2),
    (False, 16, 1, 6144, 21504): (4, 2, 1, 16, 2),
    (False, 16, 1, 128256, 4096): (8, 2, 2, 12, 1),
    (False, 16, 3, 21504, 6144): (4, 1, 1, 12, 1),
    (False, 16, 3, 43008, 6144): (8, 1, 1, 8, 1),
    (False, 16, 4, 6144, 21504): (8, 1, 1, 8, 2),
    (False, 16, 5, 14336, 4096): (8, 1, 1, 8, 1),
    (False, 16, 5, 28672, 8192): (8, 1, 2, 8, 1),
    (False, 16, 6, 6144, 4096): (4, 1, 1, 12, 1),
    (False, 16, 6, 6144, 6144): (4, 1, 1, 12, 1),
    (False, 16, 6, 21504, 6144): (4, 1, 1, 8, 1),
    (False, 16, 6, 28672, 8192): (8, 1, 2, 8, 1),
    (False, 16, 7, 6144, 6144): (4, 1, 1, 12, 1),
    (False, 16, 7, 6144, 21504): (4, 1, 1, 12, 1),
    (False, 16, 7, 8192, 6144): (4, 1, 1, 8, 1),
    (False, 16, 7, 21504, 6144): (4, 1, 1, 8, 1),
    (False, 16, 8, 6144, 6144): (4, 1, 1, 8, 1),
    (False, 16, 8, 21504, 6144): (4, 1, 1, 8, 1),
}

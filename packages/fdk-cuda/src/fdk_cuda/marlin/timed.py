"""Plans for 1 to 4 rows of x that were timed, where the model of costs puts slower ones first.

H200, bf16, groups of 64, bf16 scales, integer zero points; replays in turns, back to back
(docs/kernels/marlin.md). Each took at least 1.5 % less than what `plan.cost` puts first.
"""

# By whether there are zero points, 1 row or 4 for more, bits, rows and columns of the weight:
# fragments, blocks of columns, groups of rows and warps of the shape, and the split.
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
}

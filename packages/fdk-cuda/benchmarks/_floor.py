"""The least time that a product can take on an H200: what every benchmark here compares with."""

import bisect

# Reading so many MiB once takes so many microseconds (H200).
READ_MIB = (0, 1, 2, 4, 8, 16, 32, 64, 128)
READ_TIME = (2.06, 2.36, 2.66, 3.03, 3.91, 5.67, 9.23, 16.6, 31.2)
FLOPS_PER_MICROSECOND = 793e6


def product_floor(m: int, n: int, k: int, size: float) -> float:
    """Microseconds: the larger of reading ``size`` bytes and of the arithmetic at cuBLAS's rate."""
    return max(read_floor(size), 2 * m * n * k / FLOPS_PER_MICROSECOND)


def read_floor(size: float) -> float:
    """Microseconds to read ``size`` bytes once, between the points of the table."""
    mib = size / (1 << 20)
    i = min(max(1, bisect.bisect_left(READ_MIB, mib)), len(READ_MIB) - 1)
    share = (mib - READ_MIB[i - 1]) / (READ_MIB[i] - READ_MIB[i - 1])
    return READ_TIME[i - 1] + share * (READ_TIME[i] - READ_TIME[i - 1])

"""Configurations for many rows of x, and which kernel takes them: as ``small_configs``."""

from dataclasses import replace

from fdk_cuda.triton.configs import (
    MANY_OUTPUTS,
    UNASKED_BYTES,
    DequantiseConfig,
    GemmConfig,
    Gpu,
    ManyConfig,
)
from fdk_cuda.triton.layout import POSITIONS, TABLE_BYTES, TILE_N, UNITS, Arrangement

# Their words leave no registers for the sums of 256 rows: 8 and 336 bytes of stack.
WORDY_BITS = (5, 7)
# Affine weights by one multiply-add, by which kernel. H200, 8192 x 8192: many_kernel, m = 256 and
# 512, 2 bits 60.9 -> 57.7 and 114.6 -> 108.5 us, 4 bits 59.8 -> 58.2 and 109.6 -> 104.7, 6 bits
# 73.3 -> 71.0 and 125.7 -> 122.4; gemm_kernel, m = 64, 4 bits 37.6 -> 35.9, 6 bits 44.5 -> 41.2,
# but 2 bits 38.4 and 38.6. At 3, 5, 7 and 8 bits between 0.96 and 1.08 of the time.
MANY_FUSED_BITS = (2, 4, 6)
GEMM_FUSED_BITS = (4, 6)
GEMM_CONFIGS = (
    GemmConfig(tiles=1, warps=4, block_m=32),
    # H200, 4 bits, m = 64, 8192 x 8192: 34.7 us, 30.2 with a table, cuBLAS 38.5.
    GemmConfig(tiles=1, warps=8, block_m=64),
    GemmConfig(tiles=1, warps=8, block_m=128),
)


def gemm_config(n: int, m: int, bits: int, k_tiles: int, gpu: Gpu) -> GemmConfig:
    """For a product of m rows and n outputs."""
    config = next(c for c in GEMM_CONFIGS if m <= c.block_m or c is GEMM_CONFIGS[-1])
    if bits == 8:
        # Its tiles are short: with a fourth there is room for a table (``takes_table``).
        config = replace(config, stages=4)
    if gpu.measured_on is None:
        # Without stack (Triton 3.7.1): 128 rows of x took 48 bytes at 4 bits for sm_80 and sm_120,
        # 64 of 3 bits 16 for sm_100, of affine 6 bits, and of 7 bits by eight warps, 16 for sm_80,
        # of 2 bits 24 for sm_86 and sm_89; four warps of affine 3 bits 8 for sm_120. One choice
        # for all of these GPUs, as nothing was timed there.
        warps, most = {3: 8, 7: 4}.get(bits, config.warps), 32 if bits in (2, 3, 6) else 64
        config = replace(config, warps=warps, block_m=min(config.block_m, most))
    config = fit(config, bits, gpu.shared_bytes)
    block_n = TILE_N * config.tiles * config.warps
    programs = -(-n // block_n) * -(-m // config.block_m)
    # One program of 128 rows fills a processor (8192 x 8192, 4 bits, m = 128: k in two 48.3 us, in
    # four 53.1), two of fewer rows do, but of 64 rows only at 4 and 8 bits (m = 64, k in two and in
    # four: 4 bits 31.6 and 28.6, 8 bits 40.7 and 37.6; 3 bits 35.3 and 38.1, 6 bits 38.2 and 42.1).
    fills = config.block_m >= 128 or (config.block_m == 64 and bits not in (4, 8))
    enough = gpu.enough_programs // (2 if fills else 1)
    split_k = 1
    # Parts of 1024 columns at least: 4096 x 4096, 4 bits, m = 64, k in eight 13.3 us, in four 12.8.
    columns = k_tiles * UNITS * POSITIONS[bits]
    while programs * split_k < enough and split_k < 8 and columns >= 2048 * split_k:
        split_k *= 2
    return replace(config, split_k=split_k)


def stage_bytes(config: GemmConfig, bits: int) -> tuple[int, int]:
    """Of words and of x that a stage of ``gemm_kernel`` holds: a whole tile of k."""
    tile_k = UNITS * POSITIONS[bits]
    block_n = TILE_N * config.tiles * config.warps
    return tile_k * bits // 8 * block_n, 2 * tile_k * config.block_m


def takes_table(config: GemmConfig, bits: int, group: int, shared: int) -> bool:
    """Whether ``gemm_kernel`` may fill a table in shared memory, of which Triton does not know.

    Triton asks for more than a program gets unasked as soon as its own buffers need it, and then
    for all: with buffers just below that there would be no room. Groups of 16 bring so many scales
    to a stage that these leave none (affine, 1 bit, k = 48: 204800 bytes without the table).
    """
    if bits not in TABLE_BYTES or group < 32:
        return False
    words, x = stage_bytes(config, bits)
    least = config.stages * x + (config.stages - 1) * words
    most = (words + x) * config.stages * 6 // 5
    return least > UNASKED_BYTES and most + TABLE_BYTES[bits] <= shared


def fit(config: GemmConfig, bits: int, shared: int) -> GemmConfig:
    """The configuration with fewer stages, then fewer rows, until its buffers fit."""
    # A fifth for scales and the rest.
    stage = sum(stage_bytes(config, bits)) * 6 // 5
    stages = min(config.stages, shared // stage)
    if stages < 2 and config.block_m > 16:
        return fit(replace(config, block_m=config.block_m // 2), bits, shared)
    return replace(config, stages=max(1, stages))


def fits_many(a: Arrangement) -> bool:
    """Whether ``many_kernel`` takes a weight: one scale a step, rows of y where TMA may store."""
    return a.n % 8 == 0 and (a.groups == 1 or a.padded_group % 64 == 0)


def serves_many(a: Arrangement, m: int, gpu: Gpu, *, affine: bool = False) -> bool:
    """Whether ``many_kernel`` takes a product, and beats what else there is."""
    if not 32 < m <= _many_rows(a.bits, gpu, affine=affine) or not fits_many(a):
        return False
    size = a.n * a.k
    if m > 64:
        # H200, m = 256, 4096 x 4096: 4 bits 22.6 us, dequantised 25.1; wider codes are slower by
        # half. 8192 x 8192, 1 to 8 bits, 52 to 107 where it is 90 to 156.
        is_quick = a.bits <= 4 or (m <= 128 and a.bits in WORDY_BITS)
        return size >= (1 << 24 if is_quick else 1 << 25)
    if a.bits in WORDY_BITS:  # They leave gemm_kernel no registers: m = 64, 43.4 and 54.5 us for
        return size >= 1 << 24  # 51.4 and 177 (8192 x 8192).
    if a.bits == 3 and not affine:
        return False  # 28672 x 8192 143.7, gemm_kernel 115.1; 8192 x 8192 39.4 and 35.3.
    # Where two programs a processor have work: H200, m = 64, 4 bits, 14336 x 4096 27.0 us and 28672
    # x 8192 87.1, by gemm_kernel 32.1 and 94.9; but 8192 x 8192 29.7 and 28.6. There 1 and 2 bits
    # take 25.3 and 26.2 for 30.5 and 27.0, affine 1, 3 and 8 bits 36.3, 39.7 and 46.5 for 42.6,
    # 45.9 and 48.9. Since affine 1 bit takes two values and 2 bits one multiply-add: 28.9 and 36.6
    # for 40.3 and 38.4.
    if size >= 1 << 26 and a.bits in ((1, 2, 3, 8) if affine else (1, 2)):
        return True
    return size >= 1 << 25 and 4 * -(-a.n // MANY_OUTPUTS) >= 3 * gpu.processors


def _many_rows(bits: int, gpu: Gpu, *, affine: bool) -> int:
    """Up to which m ``many_kernel`` beats dequantising."""
    # H200, 8192 x 8192, many_kernel and dequantised, 512 rows: 5 bits 184.6 and 152.8 us, affine
    # 193.2 and 145.5, 7 bits 214.5 and 151.9, affine 4 bits 118.2 and 143.0, 6 and 8 bits 120.9 and
    # 144.1, 131.3 and 151.4. 1024 rows: 258.2 and 238.8, 273.2 and 247.6, affine 1 to 4 bits 234 to
    # 264 and 225 to 245; 4 bits 217.0 and 236.2, 3 bits 227.3 and 234.0.
    # Affine 1 and 2 bits, 1024 rows, since: 214.6 and 226.5, 234.5 and 246.5.
    if bits in WORDY_BITS:
        return min(gpu.limits.many_m, 256)
    is_quick = bits <= (2 if affine else 4)
    return gpu.limits.many_m if is_quick else min(gpu.limits.many_m, 512)


def many_config(
    n: int, m: int, bits: int, k_tiles: int, gpu: Gpu, *, affine: bool = False
) -> ManyConfig:
    """For a product of m rows and n outputs."""
    block_m = 64 if m <= 64 else 128 if m <= 128 or bits in WORDY_BITS else 256
    programs = -(-n // MANY_OUTPUTS) * -(-m // block_m)
    # A processor holds two programs of 64 rows; one where a thread has more than 128 registers.
    is_wide = bits in (3, *WORDY_BITS)
    room = gpu.processors * (2 if block_m == 64 and not is_wide else 1)
    split_k = 1
    while 2 * programs * split_k <= room and split_k < 8 and k_tiles >= 4 * split_k:
        split_k *= 2
    # Two parts of k are a cluster: H200, 8192 x 8192, 4 bits, m = 256, 61.1 us -> 56.9.
    # Not so at 1, 2 and 8 bits of affine formats with 64 rows: 8 bits 46.5, in clusters 53.4, 2
    # bits 36.6 and 37.3; 1 bit 28.9 in four parts, in one cluster of two 41.3.
    pairs = 1 if affine and bits in (1, 2, 8) and block_m == 64 else 2
    return ManyConfig(block_m, split_k, min(split_k, pairs))


def last_round(m: int, n: int, config: ManyConfig, gpu: Gpu) -> int | None:
    """The output from which programs are the last of several rounds, and half of one at most.

    Of these, pairs may share k, and the round is over in half of its time.
    """
    blocks_m = -(-m // config.block_m)
    blocks_n = -(-n // MANY_OUTPUTS)
    first = blocks_n * blocks_m // gpu.processors * gpu.processors // blocks_m
    last = (blocks_n - first) * blocks_m
    # Of 64 rows a processor holds two programs.
    is_one_round = config.block_m <= 64 or config.split_k > 1 or first == 0
    if is_one_round or not 0 < 2 * last <= gpu.processors:
        return None
    return first * MANY_OUTPUTS


def dequantise_config(bits: int, *, affine: bool) -> DequantiseConfig:
    """For a whole weight."""
    # H200, 8192 x 8192, with a table and without: 6 bits 55.8 and 104.9 us, 7 65.2 and 113.9 (194.0
    # with one tile and 1944 bytes of stack), 8 58.7 and 82.7. At 1 to 5 bits eight tiles are no
    # quicker than one, 48.3 and 55.8 at 4: fewer programs are done at different times.
    if bits >= 6 and not affine:
        return DequantiseConfig(rounds=8, ahead=True, table=True)
    # Affine formats of long tiles have 248 to 376 bytes of stack without the loop (Triton 3.7.1).
    return DequantiseConfig(ahead=affine and bits in (1, 3, 5, 7))

"""Configurations of ``dy @ W_hat``, and which kernel takes it: as ``configs``, of gradients."""

from dataclasses import replace

from fdk_cuda.triton.configs import (
    MANY_WARPS,
    Gpu,
    ManyTransposedConfig,
    TransposedConfig,
)
from fdk_cuda.triton.configs.gemm import fits_many
from fdk_cuda.triton.layout import POSITIONS, TABLE_BYTES, TILE_N, UNITS, Arrangement

# The next three are for up to 8, 16 and 32 rows. H200, 8192 x 8192, m = 1, microseconds with four
# warps and with eight: 1 bit 16.6 and 15.8, 4 bits 15.7 both, 6 bits 25.8 and 23.6; but 2 bits
# 14.5 and 15.0. With more rows than 8 the sums leave no registers for words of the next tiles:
# m = 16, 2 bits 21.7, with them 22.1, 4 bits 23.1 and 24.0.
TRANSPOSED_CONFIGS = (
    TransposedConfig(tiles=1, warps=8, m_tiles=1, overlap=True),
    TransposedConfig(tiles=1, warps=4, m_tiles=2, ahead=0, overlap=True),
    TransposedConfig(tiles=1, warps=4, m_tiles=4, ahead=0, overlap=True),
)
# Shorter ones give a lane more scales, too many for what `_wide_gradient` takes registers for.
WIDE_SEGMENT = 64


def transposed_config(
    m: int, bits: int, n_tiles: int, k_tiles: int, gpu: Gpu, *, affine: bool = False, segment: int
) -> TransposedConfig:
    """For ``dy @ W_hat`` of m rows; ``segment`` is that of the arrangement."""
    config = next(
        c for c in TRANSPOSED_CONFIGS if m <= 8 * c.m_tiles or c is TRANSPOSED_CONFIGS[-1]
    )
    # At 1 bit arithmetic alone is as quick (H200, 8192 x 8192, m = 1, with a table 16.6 us, 15.8).
    config = replace(config, table=bits in TABLE_BYTES and bits != 1)
    if bits in (2, 8):  # A program of 8 bits has half as many positions, too few for eight warps.
        config = replace(config, warps=4)
    if gpu.measured_on is None and not affine and m <= 8 and bits in (2, 5):
        # With 4 and 8 warps, as on 9.0, 8 bytes of stack for sm_86 and sm_89 (Triton 3.7.1).
        config = replace(config, warps=8 if bits == 2 else 4)
    # Affine formats with 16 rows then have 8 bytes of stack: 1 bit for sm_120, 4 and 8 for sm_86
    # and sm_89 (Triton 3.7.1).
    gains = affine and bits in (1, 2, 4, 8) and gpu.measured_on is not None
    if m <= 16 and (gains or (bits == 8 and not affine)):
        # H200, 8192 x 8192, affine 1 bit, m = 16, one round ahead and two: 25.8 us and 24.1.
        config = replace(config, ahead=2 if gains and bits == 1 and m > 8 else 1)
    if m > 16 and affine and bits == 7:
        # With four warps, each with two sums to hand over, 24 bytes of spills (Triton 3.7.1); with
        # eight 8 for sm_80.
        config = replace(config, warps=8) if gpu.measured_on else replace(config, m_tiles=2)
    if gpu.measured_on is not None and segment >= WIDE_SEGMENT:
        config = _wide_gradient(config, m, bits, n_tiles * k_tiles, affine=affine)
    parts = -(-POSITIONS[bits] // config.positions)
    programs = k_tiles * parts * -(-m // (8 * config.m_tiles))
    # So many warps to a processor. H200, 8192 x 8192, m = 16, of twice as many: 3 bits 32.6 us ->
    # 31.1, 6 bits 38.3 -> 35.7, 7 bits 41.7 -> 39.8, and half as many, affine, 4 bits 28.9 -> 27.0.
    enough = gpu.enough_programs * (8 if m <= 16 else 4)
    if config.positions > 8:
        enough //= 2  # Their sums take as many registers again.
    if 8 < m <= 16 and bits in (3, 5, 6, 7):
        enough *= 2
    elif 8 < m <= 16 and affine and bits != 8:
        enough //= 2
    split_n = 1
    # Until a part is too short.
    while programs * config.warps * split_n < enough and n_tiles >= 16 * split_n:
        split_n *= 2
    return replace(config, split_n=split_n)


def _wide_gradient(
    c: TransposedConfig, m: int, bits: int, tiles: int, *, affine: bool
) -> TransposedConfig:
    """Of a weight in so many tiles, where that is 2^26 and more, and with more than 32 rows all."""
    if m <= 32 and tiles * TILE_N * UNITS * POSITIONS[bits] < 1 << 26:
        return c
    # H200, 8192 x 8192, m = 1, by programs of 8, 16 and 32 positions: 1 bit 15.3, 14.4 and 14.3
    # us, 3 bits 22.9, 20.3 and 17.9, affine 24.9, 23.9 and 20.8, 5 bits 25.5, 24.3 and 28.1,
    # affine 22.9, 21.1 and 24.6, 7 bits 29.6, 28.8 and 33.1; but affine 1 bit 16.4, 18.6 and
    # 16.9, 7 bits 28.1, 29.2 and 31.6, and 6 bits 24.9 and 25.4.
    # With one round ahead 3 bits take 16.5, affine ones 20.8 still without. m = 16, 3 bits: by
    # programs of 8 positions 31.5, of 16 28.0.
    if m <= 8 and bits == 3:
        return replace(c, positions=32, ahead=0 if affine else 1)
    # Codebooks of 1, 2 and 5 bits with a round ahead besides 20.4 -> 19.0, 21.5 -> 19.4 and
    # 37.3 -> 31.9; with 6 bits it is 33.6 for 34.7 by affine ones.
    if 8 < m <= 16 and bits in (1, 2, 3, 5) and not affine:
        return replace(c, positions=16, ahead=0 if bits == 3 else 1)
    if m <= 8 and bits == 1 and not affine:
        return replace(c, positions=32, ahead=1)
    if m <= 8 and bits == 5:
        return replace(c, positions=16, ahead=1)
    # Words two rounds ahead, in turns: 7 bits, m = 1, 29.0 -> 27.4, affine 4 bits, m = 16, 27.1
    # -> 24.8; but 4 bits, m = 1, 15.5 -> 16.6, 6 bits 25.5 -> 28.4, affine 2 bits, m = 16, 23.0
    # -> 24.0.
    if m <= 8 and bits == 7 and not affine:
        return replace(c, positions=16, ahead=2)
    if 8 < m <= 16 and bits == 4 and affine:
        return replace(c, ahead=2)
    # m = 32, words ahead: 36.1 -> 29.9, affine 38.2 -> 29.5.
    if 16 < m <= 32 and bits == 4:
        return replace(c, ahead=1)
    # Words ahead, four warps and eight: m = 32, 3 bits 41.3 -> 37.2 and 37.5, 5 bits 47.6 ->
    # 41.4 and 39.0, 6 bits 44.1 -> 38.4 and 36.8; m = 64, 3 bits 73.1 -> 67.3 and 64.2, affine
    # 78.1 -> 71.8 and 69.7, 5 bits 84.1 -> 75.1 and 69.0, 6 bits 77.3 -> 70.0 and 66.7, 7 bits
    # 86.1 -> 80.5 and 72.2, affine 92.7 (eight warps, nothing ahead) -> 77.7 and 74.7. Affine 5
    # and 6 bits have 24 bytes of stack so (Triton 3.7.1), and without scales ahead none, but
    # take 82.4 and 78.2 for 77.6 and 75.3.
    if m > 16 and _gains_by_eight_warps(bits, affine=affine):
        return replace(c, ahead=1, warps=8)
    return c


def _gains_by_eight_warps(bits: int, *, affine: bool) -> bool:
    """Of the widths of several words a unit, with more than 16 rows."""
    return bits in (3, 7) or (bits in (5, 6) and not affine)


def serves_transposed(m: int, a: Arrangement, gpu: Gpu, *, affine: bool = False) -> bool:
    """Whether ``transposed_kernel`` beats dequantise and cuBLAS."""
    # H200, 4 bits: m = 16, 8192 x 8192 30 us against 81, 4096 x 4096 12.5 against 20; m = 64, 70
    # against 84 and 25 against 20. What is smaller was not timed.
    size = a.n * a.k
    if size < 1 << 22:
        return False
    limit, least = gpu.limits.transposed_m, 1 << 26
    is_wide = gpu.measured_on is not None and a.segment >= WIDE_SEGMENT
    if is_wide and _gains_by_eight_warps(a.bits, affine=affine):
        # m = 64, and dequantised: 3 bits, 4096 x 4096 21.7 us and 23.4, 14336 x 4096 58.7 and 87.0,
        # 5 bits, 4096 x 14336 69.9 and 90.9; 8192 x 8192, each of these widths, 64 to 77 and 87 to
        # 105. 6 and 7 bits and affine ones of fewer weights than that were not timed.
        least = 1 << 24 if a.bits == 3 and not affine else 1 << 25
    elif gpu.measured_on is None and affine and a.bits == 7:
        # Eight warps and 32 rows a program, which serve an H200, spill elsewhere.
        return m <= limit // 2
    return m <= (limit if size >= least else limit // 2)


def many_transposed_config(
    m: int, a: Arrangement, gpu: Gpu, *, affine: bool = False
) -> ManyTransposedConfig:
    """For ``dy @ W_hat`` of m rows."""
    # H200, 8192 x 8192, microseconds, one tile decoded ahead and two. Up to 128 rows: 1 bit 59.7
    # and 49.5, 2 bits 47.4 and 49.1, 4 bits 55.3 and 56.7, 8 bits 61.7 and 63.5; affine 1 bit 67.4
    # and 58.4, 2 bits 64.9 and 62.7, 4 bits 66.9 and 66.1, 8 bits 73.6 and 67.9. Up to 256: 1 bit
    # 91.2 and 77.7, 2 bits 88.6 and 99.1, but 81.4 as two times 128, 4 bits 98.1 and 87.1, 8 bits
    # 107.0 and 92.4; affine ones likewise.
    if m <= 64:
        config = ManyTransposedConfig(64)
    elif m <= 128 or (a.bits == 2 and not affine):
        config = ManyTransposedConfig(128, tiles=2 if affine or a.bits == 1 else 1)
    else:
        config = ManyTransposedConfig(256, tiles=2)
    programs = many_transposed_programs(m, a, config)
    split_n = 1
    # Parts of 384 outputs and more. H200, m = 64, 8 and 16 parts: 4096 x 4096, 1 bit 18.2 and 21.0
    # us, 4 bits 19.6 and 21.9; 6144 x 4096, affine 4 bits 33.8 and 28.5.
    while 2 * programs * split_n <= gpu.processors and a.n >= 768 * split_n:
        split_n *= 2
    return replace(config, split_n=split_n)


def many_transposed_programs(m: int, a: Arrangement, config: ManyTransposedConfig) -> int:
    """Of each part of n."""
    parts = a.k_tiles * (POSITIONS[a.bits] // config.positions)
    return -(-parts // MANY_WARPS) * -(-m // config.block_m)


def serves_many_transposed(a: Arrangement, m: int, gpu: Gpu, *, affine: bool = False) -> bool:
    """Whether ``many_transposed_kernel`` takes a product, and beats what else there is."""
    # H200, 8192 x 8192, 4 bits: m = 64 39.1 us, by transposed_kernel 62.1; m = 128 55.3, and
    # dequantised 85.2; m = 256 87.1 and 98.9; m = 512 152.1 and 133.8.
    # 4096 x 4096, 1 and 4 bits: m = 64 18.2 and 18.8 us, by transposed_kernel 19.8 and 20.2; m =
    # 128 22.9 and 23.3, dequantised 26.8 and 26.1; m = 256 28.2 and 29.3, 28.2 and 27.2; 4 bits,
    # 4096 x 14336 and 14336 x 4096, m = 256 77.7 and 78.2, dequantised 88.4 and 91.6.
    # 6144 x 4096, m = 256 38.6 and 41.5. Affine ones: 4096 x 4096, 4 bits, m = 64 25.2 and 22.9,
    # m = 128 26.1 and 27.1; 6144 x 4096 28.5 and 35.9, 32.5 and 38.9, m = 256 45.0 and 44.1; 8192
    # x 8192, 1 bit, m = 256 100.0 and 94.7.
    least = 1 << 24 if m <= 128 and not affine else 3 << 23
    most = 128 if affine and a.bits == 1 else gpu.limits.many_transposed_m
    return (
        32 < m <= min(most, gpu.limits.many_transposed_m)
        and a.words == 1
        and a.n * a.k >= least
        and fits_many(a)
    )

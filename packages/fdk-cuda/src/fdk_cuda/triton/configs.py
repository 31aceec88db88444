"""Configurations of the Triton kernels: data by GPU, width and size, with no kernel in sight."""

from dataclasses import dataclass, replace

from fdk_cuda.triton.arrangement import POSITIONS, TILE_N, UNITS


@dataclass(frozen=True)
class SmallConfig:
    """Of ``small_kernel``: 16 * n_tiles outputs a program, k shared between its warps."""

    n_tiles: int
    warps: int
    prefetch: bool = True
    stages: int = 1


@dataclass(frozen=True)
class GemmConfig:
    """Of ``gemm_kernel``: 16 * tiles * warps outputs and block_m rows a program."""

    tiles: int
    warps: int
    block_m: int
    split_k: int = 1
    stages: int = 3


@dataclass(frozen=True)
class TransposedConfig:
    """Of ``transposed_kernel``: 8 * m_tiles rows and some positions of a tile a program.

    A warp has a tile of its own along k; split_n programs share n.
    """

    tiles: int
    warps: int
    m_tiles: int
    split_n: int = 1
    stages: int = 1
    positions: int = 8


@dataclass(frozen=True)
class Limits:
    """Up to which m each kernel serves; above the last of its direction, dequantise and cuBLAS."""

    small_m: int = 16
    gemm_m: int = 128
    # Off: right only in a layout that Triton chooses (test_transposition_is_in_its_layout).
    transposed_m: int = 0


# Measured on one H200 (132 SMs); other GPUs start from the same until somebody tunes them.
SMALL_CONFIGS = (
    SmallConfig(n_tiles=1, warps=8),
    SmallConfig(n_tiles=2, warps=4),
    SmallConfig(n_tiles=2, warps=8),
)
GEMM_CONFIGS = (
    GemmConfig(tiles=1, warps=4, block_m=32),
    # H200, 8192 x 8192, 4 bits, m = 64: 4 warps 35.8 us, 8 warps and k in four 34.6 us.
    GemmConfig(tiles=1, warps=8, block_m=64),
    GemmConfig(tiles=1, warps=8, block_m=128),
)
# H200, 8192 x 8192, 4 bits: two tiles and three stages took 25.7, 30.4 and 74 us at m = 1, 16, 64;
# these take 24.2, 30.0 and 70.
TRANSPOSED_CONFIGS = (
    TransposedConfig(tiles=1, warps=2, m_tiles=1),
    TransposedConfig(tiles=1, warps=2, m_tiles=2),
    TransposedConfig(tiles=1, warps=4, m_tiles=4),
)
LIMITS = Limits()
# Programs that fill the machine with some to spare.
ENOUGH_PROGRAMS = 256


def small_config(n: int, m: int, bits: int) -> SmallConfig:
    """For ``n`` outputs; the same for every m that a batch-invariant call may meet."""
    # Few outputs: the more warps share k (H200, 4096 x 4096, 4 bits, m = 1: 9.5 us -> 7.9 us).
    # Many: more outputs share each piece of x (28672 x 8192: 59.3 us -> 57.1 us).
    if n <= 4096 or (m <= 8 and bits >= 3 and n <= 8192):
        return SMALL_CONFIGS[0] if m <= 8 else SMALL_CONFIGS[2]
    return SMALL_CONFIGS[1]


def gemm_config(n: int, m: int, bits: int, k_tiles: int, shared: int) -> GemmConfig:
    """For a product of m rows and n outputs, with ``shared`` bytes of shared memory a program."""
    config = next(c for c in GEMM_CONFIGS if m <= c.block_m or c is GEMM_CONFIGS[-1])
    config = fit(config, bits, shared)
    block_n = TILE_N * config.tiles * config.warps
    programs = -(-n // block_n) * -(-m // config.block_m)
    split_k = 1
    while programs * split_k < ENOUGH_PROGRAMS and split_k < 8 and k_tiles >= 4 * split_k:
        split_k *= 2
    return replace(config, split_k=split_k)


def transposed_config(m: int, bits: int, n_tiles: int, k_tiles: int) -> TransposedConfig:
    """For ``dy @ W_hat`` of m rows."""
    config = next(
        c for c in TRANSPOSED_CONFIGS if m <= 8 * c.m_tiles or c is TRANSPOSED_CONFIGS[-1]
    )
    parts = -(-POSITIONS[bits] // config.positions)
    rows = 8 * config.m_tiles
    warps = config.warps * -(-k_tiles // config.warps) * parts * -(-m // rows)
    enough = 8 * ENOUGH_PROGRAMS if m <= 16 else 4 * ENOUGH_PROGRAMS
    split_n = 1
    # Until a part is too short, or the parts themselves are much to write.
    while warps * split_n < enough and n_tiles >= 16 * split_n and min(m, rows) * split_n < 512:
        split_n *= 2
    return replace(config, split_n=split_n)


def serves_transposed(m: int, n: int, k: int) -> bool:
    """Whether ``transposed_kernel`` beats dequantise and cuBLAS."""
    # H200, 4 bits, m = 64: 8192 x 8192 70 us against 84, 4096 x 4096 25 against 20.
    limit = LIMITS.transposed_m if n * k >= 1 << 26 else LIMITS.transposed_m // 2
    return m <= limit


def fit(config: GemmConfig, bits: int, shared: int) -> GemmConfig:
    """The configuration with fewer stages, then fewer rows, until its buffers fit."""
    tile_k = UNITS * POSITIONS[bits]
    block_n = TILE_N * config.tiles * config.warps
    # Words, x and a fifth for scales and the rest; a stage holds a whole tile of k.
    stage = (tile_k * bits // 8 * block_n + 2 * tile_k * config.block_m) * 6 // 5
    stages = min(config.stages, shared // stage)
    if stages < 2 and config.block_m > 16:
        return fit(replace(config, block_m=config.block_m // 2), bits, shared)
    return replace(config, stages=max(1, stages))

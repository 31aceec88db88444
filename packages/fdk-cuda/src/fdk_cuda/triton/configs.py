"""Configurations of the Triton kernels: data by GPU, width and size, with no kernel in sight.

``tune.tune_layers`` measures better ones for a GPU and a layer; these are what is used until then.
"""

from dataclasses import dataclass, replace

from fdk_cuda.triton.arrangement import POSITIONS, TILE_N, UNITS


@dataclass(frozen=True)
class SmallConfig:
    """Of ``small_kernel``: 16 * n_tiles outputs a program, k shared between its warps.

    A warp loads its words ``ahead`` tiles before it needs them, and the program has them brought to
    the L2 ``fetch`` rounds before. With ``overlap`` it starts before the last kernel ends. The last
    two are for compute capability 9.0 and later, and do nothing elsewhere.
    """

    n_tiles: int
    warps: int
    ahead: int = 1
    fetch: int = 0
    overlap: bool = False


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
    transposed_m: int = 64


# Microseconds at 8192 x 8192 on an H200, 2026-11-22, by default; in brackets, before that
# day's changes.
# m = 1: 4 bits 19.6 (20.5), 5 29.4 (28.9), 6 23.3, 8 23.6.
ONE_TILE = SmallConfig(n_tiles=1, warps=8)
TWO_TILES = SmallConfig(n_tiles=2, warps=4)
TWO_TILES_8_WARPS = SmallConfig(n_tiles=2, warps=8)
# m = 1: 7 bits 29.0 (111.9); m = 16: 5 38.5 (45.0), 6 34.9, 7 43.1 (155.3).
NOTHING_AHEAD = SmallConfig(n_tiles=1, warps=8, ahead=0, fetch=2)
# Not timed since a sweep of that day, before the last changes to addresses and masks: without
# overlap and with it 3 bits took 16.8 and 14.2 at m = 1, 27.1 and 22.6 at m = 16.
ONE_TILE_OVERLAP = SmallConfig(n_tiles=1, warps=4, fetch=2, overlap=True)
# The same sweep: 1 bit, m = 16, 16.9 and 13.7.
TWO_TILES_OVERLAP = SmallConfig(n_tiles=2, warps=4, fetch=2, overlap=True)
# m = 16: 4 bits 28.0 (25.8), 8 29.8.
TWO_TILES_FETCHED = SmallConfig(n_tiles=2, warps=4, fetch=3)
SMALL_CONFIGS = (
    ONE_TILE,
    TWO_TILES,
    TWO_TILES_8_WARPS,
    NOTHING_AHEAD,
    ONE_TILE_OVERLAP,
    TWO_TILES_OVERLAP,
    TWO_TILES_FETCHED,
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


@dataclass(frozen=True)
class Gpu:
    """What decides about configurations on the GPUs of one compute capability.

    Attributes:
        measured_on: the GPU that the numbers are measured on, or None: scaled by the number of
            processors from those of the H200, and not timed.
        shared_bytes: of shared memory that a program may take.
        processors: of the largest such GPU.
        can_overlap: whether kernels overlap and fetch to the L2: compute capability 9.0 or later.
        limits: up to which m each kernel serves.
    """

    measured_on: str | None
    shared_bytes: int
    processors: int
    can_overlap: bool = True
    limits: Limits = Limits()

    @property
    def few_outputs(self) -> int:
        """Up to so many outputs, the more warps share k."""
        # H200, 4096 x 4096, 4 bits, m = 1: 9.5 us -> 7.9 us.
        return 4096 * self.processors // H200_PROCESSORS // TILE_N * TILE_N

    @property
    def enough_programs(self) -> int:
        """Programs that fill the machine with some to spare: 256 on an H200."""
        return 256 * self.processors // H200_PROCESSORS


H200_PROCESSORS = 132
GPUS = {
    (8, 0): Gpu(None, 163 << 10, 108, can_overlap=False),  # A100
    (8, 6): Gpu(None, 99 << 10, 84, can_overlap=False),  # RTX 3090, A40
    (8, 9): Gpu(None, 99 << 10, 142, can_overlap=False),  # L40S, RTX 4090
    (9, 0): Gpu("NVIDIA H200", 227 << 10, H200_PROCESSORS),
    (10, 0): Gpu(None, 227 << 10, 148),  # B200
    (12, 0): Gpu(None, 99 << 10, 188),  # RTX PRO 6000, RTX 5090
}
H200 = GPUS[9, 0]


def gpu_of(capability: tuple[int, int]) -> Gpu:
    """The data for a compute capability: its own, or the nearest before it."""
    known = [own for own in GPUS if own <= capability]
    return GPUS[max(known)] if known else GPUS[min(GPUS)]


def small_config(n: int, m: int, bits: int, gpu: Gpu) -> SmallConfig:
    """For ``n`` outputs; the same for every m that a batch-invariant call may meet."""
    few = n <= gpu.few_outputs
    # One tile for 7 bits, and for 5 and 6 with 16 columns of x, where two take 16 and 32 bytes of
    # stack at 7 bits (sm_80, sm_90; Triton 3.7.1), 8 and 0 at 5, none at 6.
    if bits == 7 or (bits in (5, 6) and m > 8):
        return NOTHING_AHEAD
    if bits in (5, 6) or (bits == 3 and few):
        return ONE_TILE
    if bits == 3 and (m > 8 or n <= 2 * gpu.few_outputs):
        return ONE_TILE_OVERLAP
    if few:
        return ONE_TILE if m <= 8 else TWO_TILES_8_WARPS
    if m > 8:
        return TWO_TILES_OVERLAP if bits == 1 else TWO_TILES_FETCHED
    # Many outputs share each piece of x (28672 x 8192: 59.3 us -> 57.1 us).
    return ONE_TILE if bits >= 2 and n <= 2 * gpu.few_outputs else TWO_TILES


def as_run(config: SmallConfig, gpu: Gpu) -> SmallConfig:
    """The configuration without what a GPU leaves aside."""
    return config if gpu.can_overlap else replace(config, fetch=0, overlap=False)


def gemm_config(n: int, m: int, bits: int, k_tiles: int, gpu: Gpu) -> GemmConfig:
    """For a product of m rows and n outputs."""
    config = next(c for c in GEMM_CONFIGS if m <= c.block_m or c is GEMM_CONFIGS[-1])
    config = fit(config, bits, gpu.shared_bytes)
    block_n = TILE_N * config.tiles * config.warps
    programs = -(-n // block_n) * -(-m // config.block_m)
    split_k = 1
    while programs * split_k < gpu.enough_programs and split_k < 8 and k_tiles >= 4 * split_k:
        split_k *= 2
    return replace(config, split_k=split_k)


def transposed_config(m: int, bits: int, n_tiles: int, k_tiles: int, gpu: Gpu) -> TransposedConfig:
    """For ``dy @ W_hat`` of m rows."""
    config = next(
        c for c in TRANSPOSED_CONFIGS if m <= 8 * c.m_tiles or c is TRANSPOSED_CONFIGS[-1]
    )
    parts = -(-POSITIONS[bits] // config.positions)
    rows = 8 * config.m_tiles
    warps = config.warps * -(-k_tiles // config.warps) * parts * -(-m // rows)
    enough = gpu.enough_programs * (8 if m <= 16 else 4)
    split_n = 1
    # Until a part is too short, or the parts themselves are much to write.
    while warps * split_n < enough and n_tiles >= 16 * split_n and min(m, rows) * split_n < 512:
        split_n *= 2
    return replace(config, split_n=split_n)


def serves_transposed(m: int, n: int, k: int, gpu: Gpu) -> bool:
    """Whether ``transposed_kernel`` beats dequantise and cuBLAS."""
    # H200, 4 bits: m = 16, 8192 x 8192 30 us against 81, 4096 x 4096 12.5 against 20; m = 64, 70
    # against 84 and 25 against 20. What is smaller was not timed.
    if n * k < 1 << 22:
        return False
    limit = gpu.limits.transposed_m
    return m <= (limit if n * k >= 1 << 26 else limit // 2)


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

"""Configurations of the GEMM kernels and of ``dequantise_kernel``.

``gemm.json`` and ``dequantise.json`` are tables. The functions that choose splits, and between
kernels, are cost models: their constants were fitted to times of an H200.
"""

from dataclasses import dataclass, replace

from fdk_cuda.triton.configs.gpus import STATIC_SMEM_BYTES, WGMMA_TILE_N, Gpu
from fdk_cuda.triton.configs.table import Table
from fdk_cuda.triton.layout import POSITIONS, TABLE_BYTES, TILE_N, UNITS, PackedLayout


@dataclass(frozen=True)
class GemmConfig:
    """Configuration of ``gemm_kernel``: 16 * n_tiles * warps outputs, block_m rows of x."""

    n_tiles: int
    warps: int
    block_m: int
    split_k: int = 1
    stages: int = 3


@dataclass(frozen=True)
class GemmWgmmaConfig:
    """Configuration of ``gemm_wgmma_kernel``: 128 outputs and block_m rows of x per program.

    Attributes:
        block_m: rows of x of a program: 64, 128 or 256.
        split_k: programs that share k.
        cluster: 2 where pairs of these add their sums within a cluster.
    """

    block_m: int
    split_k: int = 1
    cluster: int = 1

    @property
    def splits(self) -> int:
        """Partial sums that ``reduce_kernel`` adds."""
        return self.split_k // self.cluster

    @property
    def stages(self) -> int:
        """Stages of 64 columns of x: at most 192 KiB."""
        return 6 if self.block_m > 128 else 8


@dataclass(frozen=True)
class DequantiseConfig:
    """Configuration of ``dequantise_kernel``: each warp decodes one tile of k.

    Attributes:
        warps: warps of a program.
        rounds: tiles of n that a warp decodes one after the other.
        ahead: load the words of the next tile before storing one; needed for several rounds.
        table: fill a lookup table in shared memory.
    """

    warps: int = 4
    rounds: int = 1
    ahead: bool = False
    table: bool = False


GEMM_TABLE = Table("gemm", GemmConfig)
DEQUANTISE_TABLE = Table("dequantise", DequantiseConfig)
# The words of these widths take the registers that 256 rows of sums need.
WORDY_BITS = (5, 7)
# Affine widths that are scaled by one multiply-add. H200, 8192 x 8192: m = 256, 2 bits 60.9 -> 57.7
# us; other widths change by 4 % at most either way.
GEMM_WGMMA_FUSED_BITS = (2, 4, 6)
GEMM_FUSED_BITS = (4, 6)


def gemm_config(layout: PackedLayout, m: int, gpu: Gpu) -> GemmConfig:
    """Returns the configuration for m rows of x; ``split_k`` is a cost model."""
    bits = layout.bits
    rows = "17-32" if m <= 32 else "33-64" if m <= 64 else "65-"
    config = GEMM_TABLE.find(architecture=gpu.architecture, bits=bits, rows=rows)
    config = fit(config, bits, gpu.shared_bytes)
    block_n = TILE_N * config.n_tiles * config.warps
    programs = -(-layout.n // block_n) * -(-m // config.block_m)
    # One program of 128 rows occupies a processor, and one of 64 rows at most widths; otherwise
    # two are needed.
    fills = config.block_m >= 128 or (config.block_m == 64 and bits not in (4, 8))
    enough = gpu.enough_programs // (2 if fills else 1)
    split_k = 1
    # Splits of 1024 columns at least (H200, 4096 x 4096, 4 bits, m = 64: k in eight is slower than
    # in four).
    columns = layout.k_tiles * layout.tile_k
    while programs * split_k < enough and split_k < 8 and columns >= 2048 * split_k:
        split_k *= 2
    return replace(config, split_k=split_k)


def stage_bytes(config: GemmConfig, bits: int) -> tuple[int, int]:
    """Returns the bytes of words and of x in a stage of ``gemm_kernel``: one tile of k."""
    tile_k = UNITS * POSITIONS[bits]
    block_n = TILE_N * config.n_tiles * config.warps
    return tile_k * bits // 8 * block_n, 2 * tile_k * config.block_m


def takes_table(config: GemmConfig, bits: int, group: int, shared: int) -> bool:
    """Returns whether ``gemm_kernel`` has room for a lookup table, which Triton does not count.

    Triton asks for dynamic shared memory only if its own buffers exceed the static limit; below
    that there is no room for the table. With groups of 16 the scales of a stage leave none either.
    """
    if bits not in TABLE_BYTES or group < 32:
        return False
    words, x = stage_bytes(config, bits)
    least = config.stages * x + (config.stages - 1) * words
    most = (words + x) * config.stages * 6 // 5
    return least > STATIC_SMEM_BYTES and most + TABLE_BYTES[bits] <= shared


def fit(config: GemmConfig, bits: int, shared: int) -> GemmConfig:
    """Reduces stages, then rows, until the buffers fit into shared memory."""
    # A fifth more for scales.
    stage = sum(stage_bytes(config, bits)) * 6 // 5
    stages = min(config.stages, shared // stage)
    if stages < 2 and config.block_m > 16:
        return fit(replace(config, block_m=config.block_m // 2), bits, shared)
    return replace(config, stages=max(1, stages))


def fits_gemm_wgmma(layout: PackedLayout) -> bool:
    """Returns whether ``gemm_wgmma_kernel`` supports a weight: scales per step, TMA stores of y."""
    return layout.n % 8 == 0 and (layout.groups == 1 or layout.padded_group % 64 == 0)


def serves_gemm_wgmma(layout: PackedLayout, m: int, gpu: Gpu, *, affine: bool = False) -> bool:
    """Predicts whether ``gemm_wgmma_kernel`` is the fastest way for m rows (a cost model).

    Its constants come from an H200: 4096 x 4096 to 28672 x 8192, every width, against
    ``gemm_kernel`` up to 64 rows and against dequantising above.
    """
    n, bits = layout.n, layout.bits
    if not 32 < m <= _gemm_wgmma_rows(bits, gpu, affine=affine) or not fits_gemm_wgmma(layout):
        return False
    weights = n * layout.k
    if m > 64:
        is_quick = bits <= 4 or (m <= 128 and bits in WORDY_BITS)
        return weights >= (1 << 24 if is_quick else 1 << 25)
    if bits in WORDY_BITS:  # They spill in gemm_kernel: m = 64, 7 bits 54.5 us instead of 177.
        return weights >= 1 << 24
    if bits == 3 and not affine:
        return False
    if weights >= 1 << 26 and bits in ((1, 2, 3, 8) if affine else (1, 2)):
        return True
    # Otherwise only where every processor gets two programs.
    return weights >= 1 << 25 and 4 * -(-n // WGMMA_TILE_N) >= 3 * gpu.processors


def _gemm_wgmma_rows(bits: int, gpu: Gpu, *, affine: bool) -> int:
    """Returns the m up to which ``gemm_wgmma_kernel`` beats dequantising (a cost model)."""
    if bits in WORDY_BITS:
        return min(gpu.limits.gemm_wgmma_m, 256)
    is_quick = bits <= (2 if affine else 4)
    return gpu.limits.gemm_wgmma_m if is_quick else min(gpu.limits.gemm_wgmma_m, 512)


def gemm_wgmma_config(
    layout: PackedLayout, m: int, gpu: Gpu, *, affine: bool = False
) -> GemmWgmmaConfig:
    """Returns the configuration for m rows of x (a cost model of an H200)."""
    bits = layout.bits
    block_m = 64 if m <= 64 else 128 if m <= 128 or bits in WORDY_BITS else 256
    programs = -(-layout.n // WGMMA_TILE_N) * -(-m // block_m)
    # Two programs of 64 rows fit a processor, or one if a thread has more than 128 registers.
    is_wide = bits in (3, *WORDY_BITS)
    room = gpu.processors * (2 if block_m == 64 and not is_wide else 1)
    split_k = 1
    while 2 * programs * split_k <= room and split_k < 8 and layout.k_tiles >= 4 * split_k:
        split_k *= 2
    # Clusters of two: 8192 x 8192, 4 bits, m = 256, 61.1 -> 56.9 us. Not for affine formats of 1,
    # 2 and 8 bits with 64 rows, where they are slower.
    pairs = 1 if affine and bits in (1, 2, 8) and block_m == 64 else 2
    return GemmWgmmaConfig(block_m, split_k, min(split_k, pairs))


def last_wave(m: int, n: int, config: GemmWgmmaConfig, gpu: Gpu) -> int | None:
    """Returns the first output of the last wave of programs, if pairs should share its k.

    None where there is one wave, or where the last one occupies more than half of the processors.
    """
    blocks_m = -(-m // config.block_m)
    blocks_n = -(-n // WGMMA_TILE_N)
    first = blocks_n * blocks_m // gpu.processors * gpu.processors // blocks_m
    last = (blocks_n - first) * blocks_m
    # Two programs of 64 rows fit a processor.
    is_one_wave = config.block_m <= 64 or config.split_k > 1 or first == 0
    if is_one_wave or not 0 < 2 * last <= gpu.processors:
        return None
    return first * WGMMA_TILE_N


def dequantise_config(bits: int, *, affine: bool) -> DequantiseConfig:
    """Returns the configuration for a whole weight."""
    return DEQUANTISE_TABLE.find(bits=bits, affine=affine)

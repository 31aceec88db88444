"""Configurations of ``dy @ W_hat``: the backward product.

``dgrad.json`` is a table. The functions that choose splits of n, and between kernels, are cost
models: their constants were fitted to times of an H200.
"""

from dataclasses import dataclass, replace

from fdk_cuda.triton.configs.gemm import fits_gemm_wgmma
from fdk_cuda.triton.configs.gpus import WGMMA_WARPS, Gpu
from fdk_cuda.triton.configs.table import Table
from fdk_cuda.triton.layout import POSITIONS, PackedLayout

# With shorter segments a lane has too many scales for the registers of a wide configuration.
WIDE_SEGMENT = 64


@dataclass(frozen=True)
class DgradConfig:
    """Configuration of ``dgrad_kernel``: 8 * m_tiles rows of dy per program.

    Attributes:
        n_tiles: tiles of 16 outputs that a warp multiplies at once.
        warps: warps of a program, which share n.
        m_tiles: tiles of 8 rows of dy.
        split_n: programs that share n.
        ahead: rounds that a warp loads words ahead.
        positions: positions of a tile of k that a program computes.
        table: fill a lookup table in shared memory.
        overlap: start before the previous kernel ends (compute capability 9.0).
    """

    n_tiles: int
    warps: int
    m_tiles: int
    split_n: int = 1
    ahead: int = 1
    positions: int = 8
    table: bool = False
    overlap: bool = False


@dataclass(frozen=True)
class DgradWgmmaConfig:
    """Configuration of ``dgrad_wgmma_kernel``: block_m rows of dy per program.

    Attributes:
        block_m: rows of dy of a program: 64, 128 or 256.
        split_n: programs that share n.
        n_tiles: tiles of 16 outputs that are decoded while products of as many run.
    """

    block_m: int = 64
    split_n: int = 1
    n_tiles: int = 1

    @property
    def positions(self) -> int:
        """Positions of a warp: as many as the sums leave registers for."""
        return 256 // self.block_m

    @property
    def stages(self) -> int:
        """Stages of 64 columns of dy: at most 128 KiB."""
        return 6 if self.block_m < 256 else 4


DGRAD_TABLE = Table("dgrad", DgradConfig)


def dgrad_config(layout: PackedLayout, m: int, gpu: Gpu, *, affine: bool = False) -> DgradConfig:
    """Returns the configuration for m rows of dy; ``split_n`` is a cost model."""
    bits, tiles = layout.bits, layout.n_tiles * layout.k_tiles
    # Rows with ``wide`` need large weights, but not for more than 32 rows of dy.
    is_large = m > 32 or tiles * 16 * layout.tile_k >= 1 << 26
    config = DGRAD_TABLE.find(
        architecture=gpu.architecture,
        bits=bits,
        affine=affine,
        rows="1-8" if m <= 8 else "9-16" if m <= 16 else "17-32" if m <= 32 else "33-",
        wide=layout.segment >= WIDE_SEGMENT and is_large,
    )
    blocks_k = layout.k_tiles * -(-POSITIONS[bits] // config.positions)
    programs = blocks_k * -(-m // (8 * config.m_tiles))
    # Warps that occupy the GPU.
    enough = gpu.enough_programs * (8 if m <= 16 else 4)
    if config.positions > 8:
        enough //= 2  # Their sums take twice the registers.
    if 8 < m <= 16 and bits in (3, 5, 6, 7):
        enough *= 2
    elif 8 < m <= 16 and affine and bits != 8:
        enough //= 2
    split_n = 1
    while programs * config.warps * split_n < enough and layout.n_tiles >= 16 * split_n:
        split_n *= 2
    return replace(config, split_n=split_n)


def serves_dgrad(layout: PackedLayout, m: int, gpu: Gpu, *, affine: bool = False) -> bool:
    """Predicts whether ``dgrad_kernel`` beats dequantise and cuBLAS (a cost model of an H200)."""
    weights, bits = layout.n * layout.k, layout.bits
    if weights < 1 << 22:  # Smaller ones were not timed.
        return False
    limit, least = gpu.limits.dgrad_m, 1 << 26
    if gpu.is_measured and layout.segment >= WIDE_SEGMENT:
        # With 33 or more rows, eight warps make these faster, so smaller weights gain too.
        if bits in (3, 7) or (bits in (5, 6) and not affine):
            least = 1 << 24 if bits == 3 and not affine else 1 << 25
    elif not gpu.is_measured and affine and bits == 7:
        # Eight warps and 32 rows a program, which serve an H200, spill elsewhere.
        return m <= limit // 2
    return m <= (limit if weights >= least else limit // 2)


def dgrad_wgmma_config(
    layout: PackedLayout, m: int, gpu: Gpu, *, affine: bool = False
) -> DgradWgmmaConfig:
    """Returns the configuration for m rows of dy (a cost model of an H200)."""
    # 8192 x 8192, one tile decoded ahead and two: m = 128, 1 bit 59.7 and 49.5 us, 4 bits 55.3 and
    # 56.7; m = 256, 2 bits 88.6 and 99.1, but 81.4 as two blocks of 128.
    if m <= 64:
        config = DgradWgmmaConfig(64)
    elif m <= 128 or (layout.bits == 2 and not affine):
        config = DgradWgmmaConfig(128, n_tiles=2 if affine or layout.bits == 1 else 1)
    else:
        config = DgradWgmmaConfig(256, n_tiles=2)
    programs = dgrad_wgmma_programs(layout, m, config)
    split_n = 1
    # Splits of 384 outputs at least.
    while 2 * programs * split_n <= gpu.processors and layout.n >= 768 * split_n:
        split_n *= 2
    return replace(config, split_n=split_n)


def dgrad_wgmma_programs(layout: PackedLayout, m: int, config: DgradWgmmaConfig) -> int:
    """Returns the programs per split of n."""
    parts = layout.k_tiles * (POSITIONS[layout.bits] // config.positions)
    return -(-parts // WGMMA_WARPS) * -(-m // config.block_m)


def serves_dgrad_wgmma(layout: PackedLayout, m: int, gpu: Gpu, *, affine: bool = False) -> bool:
    """Predicts whether ``dgrad_wgmma_kernel`` is the fastest way (a cost model of an H200).

    It decodes formats of one word a unit. 8192 x 8192, 4 bits: m = 64 39.1 us instead of 62.1,
    m = 256 87.1 and dequantised 98.9, m = 512 152.1 and 133.8.
    """
    least = 1 << 24 if m <= 128 and not affine else 3 << 23
    most = gpu.limits.dgrad_wgmma_m
    if affine and layout.bits == 1:
        most = min(most, 128)
    return (
        32 < m <= most
        and layout.words == 1
        and layout.n * layout.k >= least
        and fits_gemm_wgmma(layout)
    )

"""Configurations of the products with a stack of experts, from the tables of one weight.

``gemv.json`` and ``gemm.json`` were timed for one weight. For stacks nothing was timed yet: which
kernel runs, and its rows per tile, follow from the mean number of rows of an expert.
"""

from dataclasses import dataclass, replace

from fdk_cuda.marlin.heuristics_experts import ExpertPlan
from fdk_cuda.marlin.heuristics_hopper import GroupedPlan
from fdk_cuda.triton.configs.gemm import WORDY_BITS, GemmConfig, fit, gemm_config
from fdk_cuda.triton.configs.gemv import MAX_OFFSET, GemvConfig, as_run, gemv_config
from fdk_cuda.triton.configs.gpus import Gpu
from fdk_cuda.triton.kernels.ptx_smem import fits_gemv, table_bytes
from fdk_cuda.triton.layout import TILE_N, PackedLayout

# Mean rows of an expert up to which tiles of 8 and of 16 rows are used. Tokens spread unevenly, so
# tiles are twice the mean, and most experts need one tile, which reads their weights once.
ROWS_8 = 4
ROWS_16 = 8
# Pairs are not sorted where at most one in this many experts is hit: few share an expert then, as
# in vLLM. The tokens of one row hit different experts.
SPARSE = 4
MAX_GEMV_TILES = 65535  # along the second dimension of the grid


@dataclass(frozen=True)
class ExpertConfig:
    """Configuration of a product with a stack of experts.

    Attributes:
        kernel: configuration of ``expert_gemv_kernel`` or ``expert_gemm_kernel``; in the Marlin
            layout the plan of ``hopper_gemm.cu`` or of ``small_m_experts.cu``.
        rows: pairs of a tile at most: 8 or 16, 1 or 8 in ``small_m_experts.cu``, or the rows of a
            tile of the GEMM.
        is_sorted: whether ``route`` sorts pairs by expert. Otherwise each is a tile, but for
            ``small_m_experts.cu``, which sorts by itself.
    """

    kernel: GemvConfig | GemmConfig | GroupedPlan | ExpertPlan
    rows: int
    is_sorted: bool = True

    @property
    def is_wgmma(self) -> bool:
        """True for many rows in the Marlin layout, see ``grouped_product``."""
        return isinstance(self.kernel, GroupedPlan)

    def max_tiles(self, pairs: int, experts: int) -> int:
        """Returns an upper bound on the tiles, whatever the experts of the pairs are."""
        if not self.is_sorted:
            return pairs
        # A tile of each expert, and of the pairs of none, may be incomplete.
        return min(pairs, (pairs + min(pairs, experts + 1) * (self.rows - 1)) // self.rows)


def expert_config(
    layout: PackedLayout,
    tokens: int,
    top_k: int,
    experts: int,
    gpu: Gpu,
    *,
    affine: bool = False,
    swiglu: bool = False,
) -> ExpertConfig:
    """Returns the configuration for ``tokens * top_k`` pairs.

    Args:
        layout: sizes of one expert.
        tokens: tokens of a call.
        top_k: experts of a token.
        experts: experts of the stack.
        gpu: the GPU.
        affine: whether the format has zero points.
        swiglu: whether outputs are the gates, then as many values that they multiply.
    """
    pairs = tokens * top_k
    mean = -(-pairs // experts)
    if mean <= ROWS_16 and tokens <= max_gemv_tokens(layout, top_k):
        # 16 rows of gates and of what they multiply would spill at 3 bits.
        rows = 8 if mean <= ROWS_8 or (swiglu and layout.bits == 3) else 16
        # The experts hit are computed at once.
        outputs = replace(layout, n=layout.n * min(experts, pairs))
        gemv = as_run(gemv_config(outputs, rows, gpu, affine=affine), gpu)
        if swiglu:
            gemv = gemv_of_two(gemv, rows, layout.bits, affine=affine)
        return ExpertConfig(gemv, rows, is_sorted=tokens > 1 and SPARSE * pairs > experts)
    gemm = replace(gemm_config(layout, 2 * mean, gpu), split_k=1)
    if swiglu:
        # Twice the outputs of a warp take the registers of half the rows; 64 would spill at 2 bits.
        half = min(gemm.block_m // 2, 32 if layout.bits == 2 else 64)
        gemm = replace(gemm, n_tiles=2, block_m=max(16, half))
        gemm = fit(gemm, layout.bits, gpu.shared_bytes)
    return ExpertConfig(gemm, gemm.block_m)


def invariant_config(layout: PackedLayout, gpu: Gpu, *, affine: bool = False) -> ExpertConfig:
    """Returns the configuration of batch-invariant calls, whatever their number of tokens."""
    return ExpertConfig(as_run(gemv_config(layout, 16, gpu, affine=affine), gpu), 16)


def max_gemv_tokens(layout: PackedLayout, top_k: int) -> int:
    """Returns the tokens up to which offsets and tiles of ``expert_gemv_kernel`` are in range."""
    return min(MAX_GEMV_TILES, MAX_OFFSET // max(layout.n, layout.k)) // top_k


def gemv_of_two(config: GemvConfig, rows: int, bits: int, *, affine: bool) -> GemvConfig:
    """Returns a configuration with two tiles of outputs, the gates and what they multiply."""
    if config.n_tiles == 2:
        return config
    config = replace(config, n_tiles=2, ahead=0, registers=0)
    table = table_bytes(bits, affine)
    while config.warps > 4 and not fits_gemv(2, rows // 8, config.warps, table):
        config = replace(config, warps=config.warps // 2)
    return config


def fits_swiglu(layout: PackedLayout) -> bool:
    """Returns whether a product can multiply its outputs by gates.

    Gates are in other tiles of outputs than what they multiply. Two tiles would spill at 5 and 7
    bits.
    """
    return layout.n % (2 * TILE_N) == 0 and layout.bits not in WORDY_BITS

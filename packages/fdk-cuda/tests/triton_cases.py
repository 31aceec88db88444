"""Weights, formats and configurations for the tests of the Triton kernels."""

import torch

from fdk_cuda.triton import TritonLayout
from fdk_cuda.triton.configs import DgradConfig, GemmConfig
from fdk_cuda.triton.packed_weight import PackedWeight
from fdk_formats.tensor import QuantisedTensor

DTYPES = (torch.bfloat16, torch.float16)
FORMATS = [(codebook, bits) for codebook in ("custom", "affine") for bits in range(1, 9)]
# One configuration per number of rows.
GEMM_CONFIGS = (
    GemmConfig(n_tiles=1, warps=4, block_m=32),
    GemmConfig(n_tiles=1, warps=8, block_m=64),
    GemmConfig(n_tiles=1, warps=8, block_m=128),
)
DGRAD_CONFIGS = (
    DgradConfig(n_tiles=1, warps=8, m_tiles=1, overlap=True),
    DgradConfig(n_tiles=1, warps=4, m_tiles=2, ahead=0, overlap=True),
    DgradConfig(n_tiles=1, warps=4, m_tiles=4, ahead=0, overlap=True),
)


def packed_weight(q: QuantisedTensor) -> PackedWeight:
    """Packs a weight as the kernels read it."""
    return TritonLayout(q)._weight()


def one_hot(rows: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows with a single 1, whose product is rows of the weight."""
    return torch.nn.functional.one_hot(rows.cuda(), width).to(dtype)

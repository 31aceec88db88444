"""Launches of the Triton kernels over one arranged weight."""

import os
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_cuda.triton.arrangement import POSITIONS, Arrangement
from fdk_cuda.triton.configs import GemmConfig, SmallConfig
from fdk_cuda.triton.decode import DTYPES, SHUFFLE_BITS
from fdk_cuda.triton.dequantise import dequantise_kernel
from fdk_cuda.triton.gemm import gemm_kernel, permute_kernel, reduce_kernel
from fdk_cuda.triton.small import small_kernel

TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Triton reads the same variable when a kernel is defined. The interpreter takes no assembly, and
# truncates where a GPU rounds to bf16: there products are float32, and torch rounds the result.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PERMUTE_BLOCK = 1024
REDUCE_BLOCK = 1024


@dataclass(frozen=True)
class Weight:
    """The tensors of a layout and the sizes that go with them."""

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    values: Tensor
    lanes: Tensor
    arrangement: Arrangement

    @cached_property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments that every kernel takes."""
        a = self.arrangement
        return {
            "BITS": a.bits,
            "WORDS": a.words,
            "POSITIONS": POSITIONS[a.bits],
            "PADDED_GROUP": a.padded_group,
            "SEGMENT": a.segment,
            "ONE_GROUP": a.groups == 1,
            "AFFINE": self.zero_point is not None,
            "SHUFFLE": a.bits in SHUFFLE_BITS and not INTERPRETED,
        }

    @property
    def group(self) -> int:
        """Columns of a group that hold weights; one group needs no more than the end of k."""
        a = self.arrangement
        return a.padded_group if a.groups == 1 else a.group_size

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The first arguments of every kernel after x."""
        which = DTYPES.index(dtype)
        zero = self.scale if self.zero_point is None else self.zero_point
        return self.words, self.scale, zero, self.values[which], self.lanes[which]


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take."""
    if INTERPRETED:
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def dot_dtypes(dtype: torch.dtype) -> dict[str, Any]:
    """The dtype of x, and the one its products are taken in."""
    x_dtype = TL_DTYPES[dtype]
    return {"X_DTYPE": x_dtype, "DOT_DTYPE": tl.float32 if INTERPRETED else x_dtype}


def new_output(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where a kernel writes, see ``INTERPRETED``."""
    return torch.empty(shape, dtype=torch.float32 if INTERPRETED else dtype, device=device)


def small(x: Tensor, w: Weight, bias: Tensor | None, config: SmallConfig) -> Tensor:
    """``x @ W_hat.T + bias``, 8 or 16 rows of x a program."""
    a = w.arrangement
    m = x.shape[0]
    m_tiles = 1 if m <= 8 else 2
    out = new_output((m, a.n), x.dtype, x.device)
    grid = (triton.cdiv(a.n_tiles, config.n_tiles), triton.cdiv(m, 8 * m_tiles))
    small_kernel[grid](
        x,
        *w.tensors(x.dtype),
        x if bias is None else bias,
        out,
        m,
        a.n,
        a.k,
        a.k_tiles,
        a.groups,
        **w.constants,
        **dot_dtypes(x.dtype),
        GROUP=w.group,
        PAIRED=a.paired,
        HAS_BIAS=bias is not None,
        N_TILES=config.n_tiles,
        M_TILES=m_tiles,
        WARPS=config.warps,
        PREFETCH=config.prefetch,
        num_warps=config.warps,
    )
    return out.to(x.dtype)


def gemm(x: Tensor, w: Weight, bias: Tensor | None, config: GemmConfig) -> Tensor:
    """``x @ W_hat.T + bias``, block_m rows of x a program."""
    a = w.arrangement
    m, width = x.shape[0], a.k_tiles * a.tile_k
    permuted = torch.empty((m, width), dtype=x.dtype, device=x.device)
    permute_kernel[(m, triton.cdiv(width, PERMUTE_BLOCK))](
        x,
        permuted,
        a.k,
        width,
        a.groups,
        GROUP=w.group,
        PADDED_GROUP=a.padded_group,
        PAIRED=a.paired,
        BLOCK=PERMUTE_BLOCK,
    )
    out = new_output((m, a.n), x.dtype, x.device)
    target, target_bias = out, bias
    if config.split_k > 1:
        target_bias = None
        target = torch.empty((config.split_k, m, a.n), dtype=torch.float32, device=x.device)
    blocks_n = triton.cdiv(a.n_tiles, config.tiles * config.warps)
    gemm_kernel[(blocks_n * triton.cdiv(m, config.block_m), config.split_k)](
        permuted,
        *w.tensors(x.dtype),
        x if target_bias is None else target_bias,
        target,
        m,
        a.n,
        a.k_tiles,
        a.groups,
        **w.constants,
        **dot_dtypes(x.dtype),
        HAS_BIAS=target_bias is not None,
        R=config.tiles,
        WARPS=config.warps,
        BLOCK_M=config.block_m,
        GROUP_M=4,
        SPLIT_K=config.split_k,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if config.split_k > 1:
        reduce_kernel[(triton.cdiv(m * a.n, REDUCE_BLOCK),)](
            target,
            x if bias is None else bias,
            out,
            m * a.n,
            a.n,
            SPLIT_K=config.split_k,
            HAS_BIAS=bias is not None,
            BLOCK=REDUCE_BLOCK,
        )
    return out.to(x.dtype)


def dequantise(w: Weight, dtype: torch.dtype) -> Tensor:
    """``W_hat :: [n, k]``, the bits that ``QuantisedTensor.dequantise`` gives."""
    a = w.arrangement
    out = new_output((a.n, a.k), dtype, w.words.device)
    tiles, warps = 1, 4
    dequantise_kernel[(triton.cdiv(a.n_tiles, tiles), triton.cdiv(a.k_tiles, warps))](
        *w.tensors(dtype),
        out,
        a.n,
        a.k,
        a.k_tiles,
        a.groups,
        **w.constants,
        **dot_dtypes(dtype),
        GROUP=w.group,
        PAIRED=a.paired,
        R=tiles,
        WARPS=warps,
        num_warps=warps,
    )
    return out.to(dtype)

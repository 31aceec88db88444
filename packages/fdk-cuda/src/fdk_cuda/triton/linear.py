"""The op of the Triton kernels: y = x @ W_hat.T + bias over arranged codes, and its gradient."""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdk_cuda.triton.arrangement import POSITIONS, Arrangement
from fdk_cuda.triton.decode import DTYPES, SHUFFLE_BITS
from fdk_cuda.triton.small import small_kernel

TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Triton reads the same variable when a kernel is defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_small(x, words, scale, zero_point, values, lanes, bits, group_size, bias, n, k,
              n_tiles=1, warps=8, prefetch=True):
    a = Arrangement(n, k, bits, group_size)
    m = x.shape[0]
    m_tiles = 1 if m <= 8 else 2
    # The interpreter truncates to bf16: there torch rounds.
    out = torch.empty((m, n), dtype=torch.float32 if INTERPRETED else x.dtype, device=x.device)
    which = DTYPES.index(x.dtype)
    affine = zero_point is not None
    dtype = TL_DTYPES[x.dtype]
    grid = (triton.cdiv(a.n_tiles, n_tiles), triton.cdiv(m, 8 * m_tiles))
    small_kernel[grid](
        x, words, scale, zero_point if affine else scale, values[which], lanes[which],
        x if bias is None else bias, out, m, n, k, a.k_tiles, a.groups,
        BITS=bits, WORDS=a.words, POSITIONS=POSITIONS[bits],
        GROUP=group_size if a.groups > 1 else a.padded_group, PADDED_GROUP=a.padded_group, SEGMENT=a.segment,
        ONE_GROUP=a.groups == 1, PAIRED=a.paired, AFFINE=affine, HAS_BIAS=bias is not None, SHUFFLE=bits in SHUFFLE_BITS and not INTERPRETED,
        X_DTYPE=dtype, DOT_DTYPE=tl.float32 if INTERPRETED else dtype,
        N_TILES=n_tiles, M_TILES=m_tiles, WARPS=warps, PREFETCH=prefetch, num_warps=warps,
    )
    return out.to(x.dtype)

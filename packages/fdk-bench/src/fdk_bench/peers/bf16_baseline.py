# mypy: ignore-errors
"""y = x @ W.T with 16-bit weights in plain Triton: the baseline of quantised kernels."""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Triton reads this variable too when kernels are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GEMV_CONFIG = {"BLOCK_N": 8, "BLOCK_K": 1024}
# Configurations by the largest m that each serves; the last also serves every larger m.
GEMM_CONFIGS = {
    16: {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "warps": 4, "stages": 5},
    64: {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "warps": 4, "stages": 4},
    128: {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "warps": 8, "stages": 4},
    256: {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "warps": 8, "stages": 3},
}


# x    :: [k, dtype]
# w    :: [n, k, dtype]
# bias :: [n, dtype]
# out  :: [n, dtype]
@triton.jit
def gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute BLOCK_N outputs per program; every warp reads whole rows in turn."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    at = row.to(tl.int64)[:, None] * k
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, k, BLOCK_K):
        live = first + column < k
        w = tl.load(
            w_ptr + at + (first + column)[None, :],
            mask=(row < n)[:, None] & live[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_ptr + first + column, mask=live, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < n)


# x    :: [m, k, dtype]
# w    :: [n, k, dtype]
# bias :: [n, dtype]
# out  :: [m, n, dtype]
@triton.jit(do_not_specialize=["m"])
def plain_gemm_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Compute a tile of the output per program; GROUP_M blocks of rows share columns in L2."""
    blocks_m, blocks_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    first_m = pid // (GROUP_M * blocks_n) * GROUP_M
    size_m = min(blocks_m - first_m, GROUP_M)
    row = (first_m + pid % (GROUP_M * blocks_n) % size_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = pid % (GROUP_M * blocks_n) // size_m * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_at = row.to(tl.int64)[:, None] * k + inner[None, :]
    w_at = column.to(tl.int64)[None, :] * k + inner[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, k, BLOCK_K):
        live = first + inner < k
        mask = (row < m)[:, None] & live[None, :]
        x = tl.load(x_ptr + x_at + first, mask=mask, other=0.0).to(DOT_DTYPE)
        mask = (column < n)[None, :] & live[:, None]
        w = tl.load(w_ptr + w_at + first, mask=mask, other=0.0).to(DOT_DTYPE)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    live = (row < m)[:, None] & (column < n)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=live)


def gemv(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ w.T + bias`` as ``[n]``.

    Args:
        x: ``[k]``, bf16 or fp16, contiguous, as all arguments.
        w: ``[n, k]``.
        bias: ``[n]`` or None.
    """
    n, k = w.shape
    out = _new_output((n,), x)
    gemv_kernel[(triton.cdiv(n, GEMV_CONFIG["BLOCK_N"]),)](
        x, w, x if bias is None else bias, out, n, k, bias is not None, **GEMV_CONFIG, **_options(8)
    )
    return out.to(x.dtype)


def gemm(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ w.T + bias`` as ``[m, n]``.

    Args:
        x: ``[m, k]``, bf16 or fp16, contiguous, as all arguments; m of at least 1.
        w: ``[n, k]``.
        bias: ``[n]`` or None.
    """
    (m, k), n = x.shape, w.shape[0]
    config = next((c for limit, c in GEMM_CONFIGS.items() if m <= limit), GEMM_CONFIGS[256])
    blocks = {name: size for name, size in config.items() if name.startswith("BLOCK")}
    out = _new_output((m, n), x)
    plain_gemm_kernel[(triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"]),)](
        x,
        w,
        x if bias is None else bias,
        out,
        m,
        n,
        k,
        HAS_BIAS=bias is not None,
        DOT_DTYPE=tl.float32 if INTERPRETED else TL_DTYPES[x.dtype],
        GROUP_M=8,
        **blocks,
        **_options(config["warps"], num_stages=config["stages"]),
    )
    return out.to(x.dtype)


def _new_output(shape: tuple[int, ...], x: Tensor) -> Tensor:
    # The interpreter does not round to bf16; torch does.
    return x.new_empty(shape, dtype=torch.float32 if INTERPRETED else x.dtype)


def _options(warps: int, **more: int) -> dict[str, int | bool]:
    # Fused multiply-adds are asked for by name: Triton 3.10 is to make none by default.
    return {"num_warps": warps, "enable_fp_fusion": True, **more}

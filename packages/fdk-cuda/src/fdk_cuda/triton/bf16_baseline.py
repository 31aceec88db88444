# mypy: ignore-errors
"""y = x @ W.T with weights of 16 bits: the baselines that quantised kernels are held against."""

import triton
import triton.language as tl
from torch import Tensor

from fdk_cuda.triton.launch import new_output
from fdk_cuda.triton.packed_weight import TL_DTYPES
from fdk_cuda.triton.remembered import INTERPRETED, launch, on_device_of, relaunch

GEMV_CONFIG = {"BLOCK_N": 8, "BLOCK_K": 1024}
# By the largest m that each serves, the last for every m above.
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
    """A program computes BLOCK_N outputs; every warp reads whole rows in turn."""
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
    """A program computes a tile of the output; GROUP_M blocks of rows share columns in L2."""
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
    """``x @ w.T + bias`` for ``x :: [k]``, ``w :: [n, k]``, bf16 or fp16: ``[n]``.

    Raises:
        TypeError, ValueError: for dtypes and shapes that are not as above.
    """
    _check("gemv", x, w, bias, dimensions=1)
    n, k = w.shape
    out = new_output((n,), x)
    tensors = (x, w, x if bias is None else bias, out)
    key = ("gemv", x.dtype, bias is None, n, k)
    with on_device_of(x):
        if relaunch(key, tensors):
            return out
        constants = GEMV_CONFIG | {"HAS_BIAS": bias is not None}
        grid = (triton.cdiv(n, GEMV_CONFIG["BLOCK_N"]),)
        launch(key, gemv_kernel, grid, tensors, (n, k), constants, num_warps=8)
    return out.to(x.dtype) if INTERPRETED else out


def gemm(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias`` for ``x :: [m, k]``, ``w :: [n, k]``, bf16 or fp16: ``[m, n]``.

    Raises:
        TypeError, ValueError: for dtypes and shapes that are not as above.
    """
    _check("gemm", x, w, bias, dimensions=2)
    (m, k), n = x.shape, w.shape[0]
    config = next((c for limit, c in GEMM_CONFIGS.items() if m <= limit), GEMM_CONFIGS[256])
    out = new_output((m, n), x)
    if m == 0:
        return out.to(x.dtype)
    tensors = (x, w, x if bias is None else bias, out)
    key = ("plain gemm", m, x.dtype, bias is None, n, k)
    with on_device_of(x):
        if relaunch(key, tensors):
            return out
        dot_dtype = tl.float32 if INTERPRETED else TL_DTYPES[x.dtype]
        constants = config | {"HAS_BIAS": bias is not None, "DOT_DTYPE": dot_dtype, "GROUP_M": 8}
        grid = (triton.cdiv(m, config["BLOCK_M"]) * triton.cdiv(n, config["BLOCK_N"]),)
        options = {"num_warps": config["warps"], "num_stages": config["stages"]}
        launch(key, plain_gemm_kernel, grid, tensors, (m, n, k), constants, **options)
    return out.to(x.dtype) if INTERPRETED else out


def _check(name: str, x: Tensor, w: Tensor, bias: Tensor | None, *, dimensions: int) -> None:
    if x.dtype not in TL_DTYPES or w.dtype != x.dtype:
        wanted = " or ".join(map(str, TL_DTYPES))
        raise TypeError(f"{name}: x and w must both be {wanted}, got {x.dtype} and {w.dtype}")
    if w.ndim != 2 or x.ndim != dimensions or x.shape[-1] != w.shape[1]:
        rows = "m, " * (dimensions - 1)
        raise ValueError(
            f"{name}: x must be [{rows}k] and w [n, k], got {list(x.shape)} and {list(w.shape)}"
        )
    if bias is not None and (bias.shape != w.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(
            f"{name}: bias must be {x.dtype} [{w.shape[0]}], got {bias.dtype} {list(bias.shape)}"
        )
    for what, tensor in (("x", x), ("w", w), ("bias", bias)):
        if tensor is not None and not (tensor.is_contiguous() and tensor.device == x.device):
            raise ValueError(
                f"{name}: {what} must be contiguous and on {x.device}, the device of x"
            )

"""A Triton GEMV for 16-bit weights: a program has all of its weights in flight at once.

It starts before the previous kernel has ended (see ``pdl``).
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_transformers.decode.pdl import launch_options

LOADED = 8  # values per load: 16 bytes
WARPS, WARPS_LONG = 4, 8
PROGRAM_VALUES = 16384  # values of W that a program of few warps holds in registers
MOST_ROWS = 8
LONGEST_ROW = 2 * PROGRAM_VALUES


# x      :: [1, K, dtype]
# weight :: [n, K, dtype]
# out    :: [1, n, dtype]
@triton.jit  # type: ignore[untyped-decorator]
def gemv_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    x,
    weight,
    out,
    n,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK)
    inside = (rows < n)[:, None]
    at = weight + rows.to(tl.int64)[:, None] * K + channels[None, :]
    # No kernel writes the weights, so they are read while the previous one still runs.
    W = ()
    for start in tl.static_range(0, K, BLOCK):
        live = inside & (start + channels < K)[None, :]
        part = tl.load(at + start, mask=live, other=0.0, eviction_policy="evict_first")
        W += (part,)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, K, BLOCK):
        part = tl.load(x + start + channels, mask=start + channels < K, other=0.0)
        sums += W[start // BLOCK].to(tl.float32) * part.to(tl.float32)[None, :]
    y = tl.sum(sums, axis=1)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < n)


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether ``gemv`` supports them: one row of 16 bits on a GPU, at most 32768 columns."""
    k = weight.shape[1]
    is_row = x.is_cuda and x.numel() == k and x.dtype == weight.dtype and x.dtype.itemsize == 2
    return is_row and 0 < k <= LONGEST_ROW and k % LOADED == 0 and weight.is_contiguous()


def gemv(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``x @ W.T`` for one row of x.

    The kernel reads W before the previous one has ended, so W must have been written before that.
    28672 x 4096 with a cold W takes 52.8 us on an H200, cuBLAS 56.0; 4096 x 4096 9.3 and 12.7.

    Args:
        x: ``[..., k]``, one row, contiguous.
        weight: ``[n, k]``.
        out: ``[..., n]``, contiguous, to write to; None for a new tensor.

    Returns:
        ``[..., n]``.
    """
    n, k = weight.shape
    is_long = k > PROGRAM_VALUES
    warps = WARPS_LONG if is_long else WARPS
    fitting = 1 if is_long else PROGRAM_VALUES // k
    rows = min(MOST_ROWS, 1 << fitting.bit_length() - 1)
    if out is None:
        out = x.new_empty(*x.shape[:-1], n)
    gemv_kernel[(triton.cdiv(n, rows),)](
        x,
        weight,
        out,
        n,
        K=k,
        ROWS=rows,
        BLOCK=min(triton.next_power_of_2(k), 32 * LOADED * warps),
        num_warps=warps,
        **launch_options(x),
    )
    return out

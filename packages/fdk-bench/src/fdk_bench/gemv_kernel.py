"""A Triton kernel for a linear layer in 16 bits and one row of x: all of W on its way at once.

``fdk_cuda.triton.bf16_baseline.gemv`` is another, a baseline for any k and with a bias. This one
starts before the kernel ahead has ended, and is there without fdk-cuda.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn.functional import linear

from fdk_bench.launches import launch_options

LOADED = 8  # values of a load: 16 bytes
WARPS, MANY_WARPS = 4, 8
PROGRAM_VALUES = 16384  # of W, that a program of few warps has in registers
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
    # Weights are nobody's output: they are read while the kernel ahead still runs.
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
    """Whether ``gemv`` takes them: one row of 16-bit values on a GPU, of at most 32768 columns."""
    k = weight.shape[1]
    is_row = x.is_cuda and x.numel() == k and x.dtype == weight.dtype and x.dtype.itemsize == 2
    return is_row and 0 < k <= LONGEST_ROW and k % LOADED == 0 and weight.is_contiguous()


def gemv(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ W.T``, ``[..., n]``, for one row of x.

    The kernel reads W before the one ahead has ended: what wrote W must have.

    us on an H200, W cold, beside cuBLAS: 5120 x 3072 9.2 (10.3), 22528 x 3072 32.2 (34.5), 3072 x
    11264 17.4 (22.6), 4096 x 4096 9.3 (12.7), 28672 x 4096 52.8 (56.0), 4096 x 14336 28.2 (31.3),
    43008 x 6144 116.4 (124.4), 6144 x 21504 59.2 (65.3). Other rows and warps: 3072 x 3072 5.2
    with 8 rows, 6.3 with 2, 5.5 as here; with more values a program, 3072 x 11264 20.3 and 6144 x
    21504 70.2; else within 5 %, and a step of 8 blocks of 4b within 1 %.

    x      :: [..., k]      of one row, contiguous
    weight :: [n, k]
    """
    n, k = weight.shape
    is_long = k > PROGRAM_VALUES
    warps = MANY_WARPS if is_long else WARPS
    fitting = 1 if is_long else PROGRAM_VALUES // k
    rows = min(MOST_ROWS, 1 << fitting.bit_length() - 1)
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


class RowLinear(torch.nn.Linear):
    """A linear layer, one row of x by ``gemv`` where there is no bias, all else by torch."""

    def forward(self, x: Tensor) -> Tensor:
        """``x :: [..., k]``."""
        if self.bias is None and takes(x, self.weight):
            return gemv(x.contiguous(), self.weight)
        return linear(x, self.weight, self.bias)

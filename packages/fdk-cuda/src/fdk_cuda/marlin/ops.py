"""The torch op over the Marlin layout: which kernel runs for which m, and the gradient."""

from functools import cache, partial

import torch
from torch import Tensor
from torch.library import Library

from fdk_cuda.launch_cache import ALIGNMENT
from fdk_cuda.marlin.dgrad import backward_runner_for, run_backward
from fdk_cuda.marlin.heuristics_hopper import MAX_INVARIANT_ROWS
from fdk_cuda.marlin.heuristics_small_m import MAX_ROWS
from fdk_cuda.marlin.layout import BLOCK_COLUMNS, BLOCK_ROWS, has_grid
from fdk_cuda.marlin.runtime import (
    dequantise_launch_for,
    device_limits,
    hopper_runner_for,
    run_hopper,
    small_launch_for,
)
from fdk_formats.format import Format
from fdk_formats.ops import define_linear_op

DTYPES = (torch.bfloat16, torch.float16)
# Above this many rows, dequantise and cuBLAS; up to it, the small-m kernel for 16 rows at a time.
# H200, 4 bits, 28672 x 8192: 289 us against 298 with 96 rows, 388 against 303 with 128.
MAX_FUSED_ROWS = 96
# The same on Hopper for codebooks of 256 values, whose look-ups take longer than the tensor cores:
# 8192 x 8192: 209 us against 246 with 1024 rows, 418 against 436 with 2048, 826 against 801 with
# 4096; the same at four other shapes (docs/kernels/hopper-gemm.md). And for 6 and 7 bits, affine
# ones too: 1.12 to 1.17 of cuBLAS's time with 1024 rows (H100), above not timed. Others are faster
# fused up to 8192 rows at least. Affine codes of 8 bits have no limit either, but were timed up to
# 4096 rows only: 812 us against 850.
MAX_HOPPER_ROWS = 2048
# From so few rows on, weights of 8 bits and at least so many of them go by it too. H200, 16 rows,
# by small_m.cu and by it: computed codes 28672 x 8192 87.2 and 69.2 us, 8192 x 8192 23.6 and 20.6,
# 14336 x 4096 23.7 and 19.9, 4096 x 4096 8.8 and 10.7; looked up 80.2 and 74.3, 21.7 and 21.8, 21.2
# and 21.0, 8.2 and 10.4. With 9 rows much the same. Other widths lose.
MIN_HOPPER_ROWS, MIN_COMPUTED_WEIGHTS, MIN_LOOKED_UP_WEIGHTS = 9, 7 << 23, 1 << 27
# And of the gradient, on Hopper. 8192 x 8192 with 2048 rows, at 1, 2, 3 and 4 bits and affine ones
# of 8: 357, 388, 406, 402 and 426 us against 389, 404, 411, 414 and 436; with 4096 rows, 2 and 3
# bits: 854 and 829 against 827 and 793. Codebooks of 256 values have a lower limit: with 1024 rows
# 223 against 244, with 1536 343 against 344 and slower at three shapes of five, with 2048 424
# against 411. With 1024 rows of 8192 x 8192 6 and 7 bits take 1.26 and 1.36 of cuBLAS's time, and
# cuBLAS and dequantising together 1.27 (H100); 5 bits 1.16, above not timed.
MAX_BACKWARD_ROWS = {5: 1024, 6: 768, 7: 768}
MAX_LOOKED_UP_BACKWARD_ROWS, MAX_OTHER_BACKWARD_ROWS = 1024, 2048


def marlin_linear(
    x: Tensor,  # [m, k, dtype]
    packed: Tensor,  # see layout.py
    codebook: Tensor,  # [2^bits, dtype]
    format: str,
    batch_invariant: bool,
    bias: Tensor | None,  # [n, dtype]
    n: int,
    k: int,
) -> Tensor:
    """``x @ W_hat.T + bias``, ``[m, n, dtype]``.

    ``format`` is that of ``MarlinLayout``, by which kernels may compute what codes stand for: of 1
    bit ``binary`` where the codebook is -c and c and else ``custom``, of 8 bits ``int`` only where
    it is that grid and no code is the second of 127.
    """
    _check_dtype("marlin_linear", "x", x, codebook)
    kernel = kernel_for(
        x.shape[0],
        is_hopper=device_limits(x.device.index).is_hopper,
        few_rows=few_rows(format, n, k, x.device.index),
        decodes_slowly=decodes_slowly(format),
        batch_invariant=batch_invariant,
    )
    if kernel == "dequantise":
        return torch.nn.functional.linear(x, dequantise(packed, codebook, format, n, k), bias)
    linear = hopper_linear if kernel == "hopper" else small_linear
    return linear(x, packed, codebook, format, bias, n, k, batch_invariant)


@cache
def few_rows(format: str, n: int, k: int, device: int) -> int:
    """The most rows of x that one launch of the small-m kernel takes, where it is the one to."""
    least = MIN_LOOKED_UP_WEIGHTS if decodes_slowly(format) else MIN_COMPUTED_WEIGHTS
    is_large = Format.parse(format).bits == 8 and n * k >= least
    return MIN_HOPPER_ROWS - 1 if is_large and device_limits(device).is_hopper else MAX_ROWS


def kernel_for(
    m: int, *, is_hopper: bool, few_rows: int, decodes_slowly: bool, batch_invariant: bool
) -> str:
    """``small``, ``hopper`` or ``dequantise`` (and cuBLAS).

    Args:
        m: rows of x.
        is_hopper: what the GPU is.
        few_rows: up to which the small-m kernel is the one, on Hopper.
        decodes_slowly: see the function.
        batch_invariant: whether a row of y may depend on m.
    """
    if batch_invariant:
        # One for every m: each sums in an order of its own.
        return "hopper" if is_hopper else "small"
    if not is_hopper:
        return "small" if m <= MAX_FUSED_ROWS else "dequantise"
    if m <= few_rows:
        return "small"
    return "dequantise" if decodes_slowly and m > MAX_HOPPER_ROWS else "hopper"


@cache
def decodes_slowly(format: str) -> bool:
    """Whether decoding takes longer than the tensor cores do with many rows.

    So it is from 6 bits on, where codes are looked up one by one or put together, but for codes of
    8 bits that are computed.
    """
    parsed = Format.parse(format)
    is_computed = parsed.is_affine or has_grid(parsed)
    return parsed.bits in (6, 7) or (parsed.bits == 8 and not is_computed)


def small_linear(
    x: Tensor,
    packed: Tensor,
    codebook: Tensor,
    format: str,
    bias: Tensor | None,
    n: int,
    k: int,
    batch_invariant: bool = False,
) -> Tensor:
    """``marlin_linear`` through small_m.cu, 16 rows of x at a time."""
    device, m = x.device.index, x.shape[0]
    y = x.new_empty((m, n))
    x = _padded(x, packed.shape[1] * BLOCK_COLUMNS)
    bias_pointer = 0 if bias is None else bias.data_ptr()
    weight = packed.data_ptr(), codebook.data_ptr()
    x_pointer, y_pointer = x.data_ptr(), y.data_ptr()
    x_step, y_step = MAX_ROWS * x.stride(0) * x.element_size(), MAX_ROWS * n * y.element_size()
    while m > 0:
        rows = min(m, MAX_ROWS)
        launch, fields = small_launch_for(format, x.dtype, rows, n, k, device, batch_invariant)
        launch(*weight, x_pointer, bias_pointer, y_pointer, *fields)
        x_pointer, y_pointer, m = x_pointer + x_step, y_pointer + y_step, m - MAX_ROWS
    return y


def hopper_linear(
    x: Tensor,
    packed: Tensor,
    codebook: Tensor,
    format: str,
    bias: Tensor | None,
    n: int,
    k: int,
    batch_invariant: bool = False,
) -> Tensor:
    """``marlin_linear`` through hopper_gemm.cu."""
    # The copy engine wants rows of a multiple of 16 bytes.
    x = _padded(x, k if k % 8 == 0 else packed.shape[1] * BLOCK_COLUMNS)
    runner_for = partial(hopper_runner_for, format, x.dtype, n, k, x.device.index, batch_invariant)
    m = x.shape[0]
    if not batch_invariant or m <= MAX_INVARIANT_ROWS:
        return run_hopper(runner_for(m), x, packed, codebook, bias, n)
    parts = x.split(MAX_INVARIANT_ROWS)
    return torch.cat([run_hopper(runner_for(len(p)), p, packed, codebook, bias, n) for p in parts])


def marlin_grad_x(
    grad_y: Tensor,  # [m, n, dtype]
    packed: Tensor,
    codebook: Tensor,
    format: str,
    batch_invariant: bool,  # of the forward only: here the order of a sum depends on m
    n: int,
    k: int,
) -> Tensor:
    """``dy @ W_hat``, ``[m, k, dtype]``."""
    _check_dtype("the gradient of marlin_linear", "grad_y", grad_y, codebook)
    limits = device_limits(grad_y.device.index)
    if limits.is_hopper and grad_y.shape[0] <= max_backward_rows(format):
        return hopper_grad_x(grad_y, packed, codebook, format, n, k)
    return grad_y @ dequantise(packed, codebook, format, n, k)


@cache
def max_backward_rows(format: str) -> int:
    """The most rows of dy whose gradient comes from the packed bytes, on Hopper."""
    is_looked_up = decodes_slowly(format)
    other = MAX_LOOKED_UP_BACKWARD_ROWS if is_looked_up else MAX_OTHER_BACKWARD_ROWS
    return MAX_BACKWARD_ROWS.get(Format.parse(format).bits, other)


def hopper_grad_x(
    grad_y: Tensor, packed: Tensor, codebook: Tensor, format: str, n: int, k: int
) -> Tensor:
    """``marlin_grad_x`` through hopper_backward.cu."""
    # The copy engine wants rows of a multiple of 16 bytes.
    dy = _padded(grad_y, n if n % 8 == 0 else packed.shape[0] * BLOCK_ROWS)
    runner = backward_runner_for(format, dy.dtype, n, k, dy.device.index, dy.shape[0])
    return run_backward(runner, dy, packed, codebook, k)


def dequantise(packed: Tensor, codebook: Tensor, format: str, n: int, k: int) -> Tensor:
    """``W_hat :: [n, k]`` in the codebook's dtype, from a weight in the Marlin layout."""
    out = codebook.new_empty((n, k))
    if n == 0:
        return out
    launch, fields = dequantise_launch_for(format, codebook.dtype, n, k, packed.device.index)
    launch(packed.data_ptr(), codebook.data_ptr(), out.data_ptr(), *fields)
    return out


def _check_dtype(op: str, name: str, tensor: Tensor, codebook: Tensor) -> None:
    if tensor.dtype != codebook.dtype:
        raise TypeError(f"{op}: {name} must be {codebook.dtype}, got {tensor.dtype}")


def _padded(x: Tensor, columns: int) -> Tensor:
    """x with rows that the kernel's 16-byte loads can take."""
    if x.shape[1] != columns:
        return torch.nn.functional.pad(x, (0, columns - x.shape[1]))
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


_library = Library("fdk_cuda", "FRAGMENT")
linear_op = define_linear_op(
    _library,
    "marlin_linear",
    layout="Tensor packed, Tensor codebook, str format, bool batch_invariant",
    forward=marlin_linear,
    grad_x=marlin_grad_x,
    dispatch_keys=("CUDA",),
)

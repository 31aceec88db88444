"""The torch op of the Marlin layout: dispatch by the number of rows of x, and the gradient."""

from functools import cache, partial

import torch
from torch import Tensor
from torch.library import Library

from fdk_cuda.launch_cache import ALIGNMENT
from fdk_cuda.marlin.dgrad import dgrad_runner_for, run_dgrad
from fdk_cuda.marlin.heuristics_hopper import MAX_INVARIANT_M
from fdk_cuda.marlin.heuristics_small_m import MAX_M
from fdk_cuda.marlin.layout import BLOCK_K, BLOCK_N, has_grid
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
# Crossovers between kernels, measured; docs/design/marlin.md and hopper.md have the tables.
#
# On GPUs other than Hopper: small_m.cu up to this many rows, 16 at a time; dequantise + cuBLAS
# above (H200, 4 bits, 28672 x 8192: 289 us against 298 with 96 rows, 388 against 303 with 128).
MAX_FUSED_ROWS = 96
# On Hopper, formats that decode slowly: hopper_gemm.cu up to this many rows; dequantise + cuBLAS
# above (8192 x 8192, 256 values: 418 us against 436 with 2048 rows, 826 against 801 with 4096).
MAX_HOPPER_ROWS = 2048
# On Hopper, 8 bits: hopper_gemm.cu for MIN_HOPPER_ROWS or more rows if the weight has at least
# MIN_COMPUTED_WEIGHTS elements (codes computed) or MIN_LOOKED_UP_WEIGHTS (codes looked up). With 16
# rows, computed: 28672 x 8192 87.2 us -> 69.2, but 4096 x 4096 8.8 -> 10.7.
MIN_HOPPER_ROWS, MIN_COMPUTED_WEIGHTS, MIN_LOOKED_UP_WEIGHTS = 9, 7 << 23, 1 << 27
# On Hopper, the most rows of dy for hopper_dgrad.cu: by bits; for other formats that decode slowly;
# for the rest.
MAX_DGRAD_ROWS = {5: 1024, 6: 768, 7: 768}
MAX_LOOKED_UP_DGRAD_ROWS, MAX_OTHER_DGRAD_ROWS = 1024, 2048


def marlin_linear(
    x: Tensor,  # [m, k, dtype]
    packed: Tensor,  # [padded_n / 32, padded_k / 64, block bytes, uint8], see layout.py
    codebook: Tensor,  # [2^bits, dtype]
    format: str,
    batch_invariant: bool,
    bias: Tensor | None,  # [n, dtype]
    n: int,
    k: int,
) -> Tensor:
    """Computes ``x @ W_hat.T + bias``, ``[m, n, dtype]``.

    ``format`` is the one that kernels are compiled for (``_kernel_format`` in backend.py), not
    necessarily that of the weight: 1 bit is ``binary`` where the codebook is -c and c, 8 bits are
    ``int`` only where no code repeats the value 127.
    """
    _check_dtype("marlin_linear", "x", x, codebook)
    kernel = kernel_for(
        x.shape[0],
        is_hopper=device_limits(x.device.index).is_hopper,
        small_m_limit=small_m_limit(format, n, k, x.device.index),
        decodes_slowly=decodes_slowly(format),
        batch_invariant=batch_invariant,
    )
    if kernel == "dequantise":
        return torch.nn.functional.linear(x, dequantise(packed, codebook, format, n, k), bias)
    linear = hopper_linear if kernel == "hopper_gemm" else small_linear
    return linear(x, packed, codebook, format, bias, n, k, batch_invariant)


@cache
def small_m_limit(format: str, n: int, k: int, device: int) -> int:
    """Returns the most rows of x for small_m.cu, on Hopper: 8 for large weights of 8 bits."""
    least = MIN_LOOKED_UP_WEIGHTS if decodes_slowly(format) else MIN_COMPUTED_WEIGHTS
    is_large = Format.parse(format).bits == 8 and n * k >= least
    return MIN_HOPPER_ROWS - 1 if is_large and device_limits(device).is_hopper else MAX_M


def kernel_for(
    m: int, *, is_hopper: bool, small_m_limit: int, decodes_slowly: bool, batch_invariant: bool
) -> str:
    """Returns the kernel: ``small_m``, ``hopper_gemm`` or ``dequantise`` (+ cuBLAS).

    Args:
        m: rows of x.
        is_hopper: whether the GPU is a Hopper.
        small_m_limit: most rows for small_m on Hopper, see ``small_m_limit``.
        decodes_slowly: see ``decodes_slowly``.
        batch_invariant: whether a row of y must not depend on m.
    """
    if batch_invariant:
        # One kernel for every m: each sums in its own order.
        return "hopper_gemm" if is_hopper else "small_m"
    if not is_hopper:
        return "small_m" if m <= MAX_FUSED_ROWS else "dequantise"
    if m <= small_m_limit:
        return "small_m"
    return "dequantise" if decodes_slowly and m > MAX_HOPPER_ROWS else "hopper_gemm"


@cache
def decodes_slowly(format: str) -> bool:
    """Returns True where decoding is slower than the tensor cores with many rows.

    These are 6 and 7 bits, and 8 bits unless codes are computed: codes are assembled or looked up
    one by one.
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
    """Computes ``marlin_linear`` by small_m.cu, 16 rows of x at a time."""
    device, m = x.device.index, x.shape[0]
    y = x.new_empty((m, n))
    x = padded(x, packed.shape[1] * BLOCK_K)
    bias_pointer = 0 if bias is None else bias.data_ptr()
    weight = packed.data_ptr(), codebook.data_ptr()
    x_pointer, y_pointer = x.data_ptr(), y.data_ptr()
    x_step, y_step = MAX_M * x.stride(0) * x.element_size(), MAX_M * n * y.element_size()
    while m > 0:
        rows = min(m, MAX_M)
        launch, fields = small_launch_for(format, x.dtype, rows, n, k, device, batch_invariant)
        launch(*weight, x_pointer, bias_pointer, y_pointer, *fields)
        x_pointer, y_pointer, m = x_pointer + x_step, y_pointer + y_step, m - MAX_M
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
    """Computes ``marlin_linear`` by hopper_gemm.cu."""
    # Tensor copies need rows of a multiple of 16 bytes.
    x = padded(x, k if k % 8 == 0 else packed.shape[1] * BLOCK_K)
    runner_for = partial(hopper_runner_for, format, x.dtype, n, k, x.device.index, batch_invariant)
    m = x.shape[0]
    if not batch_invariant or m <= MAX_INVARIANT_M:
        return run_hopper(runner_for(m), x, packed, codebook, bias, n)
    chunks = x.split(MAX_INVARIANT_M)
    y = [run_hopper(runner_for(len(c)), c, packed, codebook, bias, n) for c in chunks]
    return torch.cat(y)


def marlin_grad_x(
    grad_y: Tensor,  # [m, n, dtype]
    packed: Tensor,
    codebook: Tensor,
    format: str,
    batch_invariant: bool,  # ignored: the order of sums in the gradient depends on m
    n: int,
    k: int,
) -> Tensor:
    """Computes ``dy @ W_hat``, ``[m, k, dtype]``."""
    _check_dtype("the gradient of marlin_linear", "grad_y", grad_y, codebook)
    limits = device_limits(grad_y.device.index)
    if limits.is_hopper and grad_y.shape[0] <= max_dgrad_rows(format):
        return hopper_grad_x(grad_y, packed, codebook, format, n, k)
    return grad_y @ dequantise(packed, codebook, format, n, k)


@cache
def max_dgrad_rows(format: str) -> int:
    """Returns the most rows of dy for hopper_dgrad.cu, on Hopper."""
    is_looked_up = decodes_slowly(format)
    other = MAX_LOOKED_UP_DGRAD_ROWS if is_looked_up else MAX_OTHER_DGRAD_ROWS
    return MAX_DGRAD_ROWS.get(Format.parse(format).bits, other)


def hopper_grad_x(
    grad_y: Tensor, packed: Tensor, codebook: Tensor, format: str, n: int, k: int
) -> Tensor:
    """Computes ``marlin_grad_x`` by hopper_dgrad.cu."""
    # Tensor copies need rows of a multiple of 16 bytes.
    dy = padded(grad_y, n if n % 8 == 0 else packed.shape[0] * BLOCK_N)
    runner = dgrad_runner_for(format, dy.dtype, n, k, dy.device.index, dy.shape[0])
    return run_dgrad(runner, dy, packed, codebook, k)


def dequantise(packed: Tensor, codebook: Tensor, format: str, n: int, k: int) -> Tensor:
    """Returns ``W_hat :: [n, k]`` in the codebook's dtype, from a weight in the Marlin layout."""
    out = codebook.new_empty((n, k))
    if n == 0:
        return out
    launch, fields = dequantise_launch_for(format, codebook.dtype, n, k, packed.device.index)
    launch(packed.data_ptr(), codebook.data_ptr(), out.data_ptr(), *fields)
    return out


def _check_dtype(op: str, name: str, tensor: Tensor, codebook: Tensor) -> None:
    if tensor.dtype != codebook.dtype:
        raise TypeError(f"{op}: {name} must be {codebook.dtype}, got {tensor.dtype}")


def padded(x: Tensor, width: int) -> Tensor:
    """Returns x padded to a width, and aligned for 16-byte loads."""
    if x.shape[1] != width:
        return torch.nn.functional.pad(x, (0, width - x.shape[1]))
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

"""The op of the Triton kernels, with its gradient: dispatch on m happens here."""

from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from fdk_cuda.triton import autotune, launch
from fdk_cuda.triton.configs import Gpu
from fdk_cuda.triton.configs.dgrad import (
    many_transposed_config,
    serves_many_transposed,
    serves_transposed,
    transposed_config,
)
from fdk_cuda.triton.configs.gemv import small_config
from fdk_cuda.triton.kernels.decode import DTYPES
from fdk_cuda.triton.layout import Arrangement
from fdk_formats.ops import define_linear_op

# Rows that a batch-invariant call pretends to have, so that every m gets the same configuration.
INVARIANT_M = 16
MAX_OFFSET = (1 << 31) - 1  # within x and y of ``small_kernel``
MAX_ROWS = 8 * 65535  # of ``small_kernel``: 65535 programs along m, of 8 rows or 16


def triton_linear(
    x: Tensor,  # [m, k, bf16 | fp16]
    words: Tensor,  # see arrangement.py
    scale: Tensor,
    zero_point: Tensor | None,
    values: Tensor,  # see decode.lookup_tables
    lanes: Tensor,
    bits: int,
    group_size: int,
    batch_invariant: bool,
    bias: Tensor | None,  # [n, dtype of x]
    n: int,
    k: int,
) -> Tensor:
    """``x @ W_hat.T + bias``, ``[m, n, dtype of x]``."""
    check_dtype("x", x)
    if launch.is_elsewhere(x):
        with launch.on_device_of(x):
            layout = words, scale, zero_point, values, lanes, bits, group_size, batch_invariant
            return triton_linear(x, *layout, bias, n, k)
    a = arrangement_of(n, k, bits, group_size)
    w = launch.Weight(words, scale, zero_point, values, lanes, a)
    m = x.shape[0]
    if batch_invariant:
        config = small_config(
            n, INVARIANT_M, bits, launch.gpu_at(x.get_device()), affine=zero_point is not None
        )
        rows = max(1, min(MAX_OFFSET // max(n, k), MAX_ROWS))
        if m <= rows:
            return launch.small(x, w, bias, config)
        return torch.cat([launch.small(part, w, bias, config) for part in x.split(rows)])
    return launch.linear(x, w, bias, autotune.choose(w, m, x.dtype, x.get_device()))


def triton_grad_x(
    grad_y: Tensor,  # [m, n, bf16 | fp16]
    words: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    values: Tensor,
    lanes: Tensor,
    bits: int,
    group_size: int,
    batch_invariant: bool,
    n: int,
    k: int,
) -> Tensor:
    """``dy @ W_hat``, ``[m, k, dtype of dy]``."""
    check_dtype("grad_y", grad_y)
    a = arrangement_of(n, k, bits, group_size)
    w = launch.Weight(words, scale, zero_point, values, lanes, a)
    m = grad_y.shape[0]
    with launch.on_device_of(grad_y):
        gpu, affine = launch.gpu_at(grad_y.get_device()), zero_point is not None
        config = gradient_config(a, m, gpu, affine=affine)
        return launch.linear_transposed(grad_y, w, config)


def gradient_config(
    a: Arrangement, m: int, gpu: Gpu, *, affine: bool = False
) -> launch.GradientConfig:
    """For ``dy @ W_hat`` of m rows; None is to dequantise."""
    if serves_many_transposed(a, m, gpu, affine=affine):
        return many_transposed_config(m, a, gpu, affine=affine)
    if serves_transposed(m, a, gpu, affine=affine):
        sizes = m, a.bits, a.n_tiles, a.k_tiles, gpu
        return transposed_config(*sizes, affine=affine, segment=a.segment)
    return None


@cache
def arrangement_of(n: int, k: int, bits: int, group_size: int) -> Arrangement:
    """One object a kind of weight: quick to compare."""
    return Arrangement(n, k, bits, group_size)


def check_dtype(name: str, tensor: Tensor) -> None:
    """Of the activations."""
    if tensor.dtype not in DTYPES:
        wanted = " or ".join(map(str, DTYPES))
        raise TypeError(f"triton_linear: {name} must be {wanted}, got {tensor.dtype}")


_library = Library("fdk_cuda", "FRAGMENT")
triton_linear_op = define_linear_op(
    _library,
    "triton_linear",
    layout=(
        "Tensor words, Tensor scale, Tensor? zero_point, Tensor values, Tensor lanes, int bits, "
        "int group_size, bool batch_invariant"
    ),
    forward=triton_linear,
    grad_x=triton_grad_x,
    # The CPU is for Triton's interpreter; the backend takes no CPU tensors otherwise.
    dispatch_keys=("CUDA", "CPU") if launch.INTERPRETED else ("CUDA",),
)

"""The ``fdk_cuda::triton_linear`` op with its gradient, and its dispatch on m."""

from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from fdk_cuda.triton import autotune, launch
from fdk_cuda.triton.configs import grad_config
from fdk_cuda.triton.configs.gemv import MAX_OFFSET, gemv_config
from fdk_cuda.triton.kernels.decode import DTYPES
from fdk_cuda.triton.layout import PackedLayout
from fdk_cuda.triton.packed_weight import PackedWeight
from fdk_formats.ops import define_linear_op

# Batch-invariant calls use the configuration of this many rows, whatever m is.
INVARIANT_M = 16
MAX_ROWS = 8 * 65535  # limit of ``gemv_kernel``: 65535 programs along m, of 8 or 16 rows


def triton_linear(
    x: Tensor,  # [m, k, bf16 | fp16]
    words: Tensor,  # see layout.py
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
    """Computes ``x @ W_hat.T + bias``, ``[m, n, dtype of x]``."""
    check_dtype("x", x)
    if launch.is_on_other_gpu(x):
        with launch.on_device_of(x):
            layout = words, scale, zero_point, values, lanes, bits, group_size, batch_invariant
            return triton_linear(x, *layout, bias, n, k)
    a = layout_of(n, k, bits, group_size)
    w = PackedWeight(words, scale, zero_point, values, lanes, a)
    m = x.shape[0]
    if batch_invariant:
        gpu = launch.gpu_at(x.get_device())
        config = gemv_config(a, INVARIANT_M, gpu, affine=zero_point is not None)
        rows = max(1, min(MAX_OFFSET // max(n, k), MAX_ROWS))
        if m <= rows:
            return launch.gemv(x, w, bias, config)
        return torch.cat([launch.gemv(part, w, bias, config) for part in x.split(rows)])
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
    """Computes ``dy @ W_hat``, ``[m, k, dtype of dy]``."""
    check_dtype("grad_y", grad_y)
    a = layout_of(n, k, bits, group_size)
    w = PackedWeight(words, scale, zero_point, values, lanes, a)
    with launch.on_device_of(grad_y):
        gpu = launch.gpu_at(grad_y.get_device())
        config = grad_config(a, grad_y.shape[0], gpu, affine=zero_point is not None)
        return launch.linear_dgrad(grad_y, w, config)


@cache
def layout_of(n: int, k: int, bits: int, group_size: int) -> PackedLayout:
    """Returns one object per layout, so that comparing is quick."""
    return PackedLayout(n, k, bits, group_size)


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raises TypeError for activations that are neither bf16 nor fp16."""
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
    # CPU tensors are for Triton's interpreter; otherwise the backend refuses them.
    dispatch_keys=("CUDA", "CPU") if launch.INTERPRETED else ("CUDA",),
)

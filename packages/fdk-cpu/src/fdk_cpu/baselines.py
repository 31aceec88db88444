"""What the kernels are measured against: products with plain weights, and memory itself.

No product records a gradient.
"""

import torch
from torch import Tensor

from fdk_cpu import _native
from fdk_cpu.arguments import FLOAT_NAMES, bytes_of
from fdk_cpu.checks import check_placed
from fdk_cpu.memory import copy_memory as copy
from fdk_cpu.memory import read_sum as read_sum
from fdk_cpu.runtime import num_threads
from fdk_formats.torch_internals import in_dispatch_mode

__all__ = ["copy", "gemm", "gemv", "read_sum"]

DTYPES = (torch.bfloat16, torch.float32)


def gemv(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for one row of x: one pass over the weight, summed in float32.

    Args:
        x: ``[k]`` or ``[1, k]``, bfloat16 or float32.
        weight: ``[n, k]``, of the dtype of x.

    Returns:
        ``[n]`` or ``[1, n]``, of the dtype of x.

    Raises:
        ValueError: for other shapes, tensors that are not contiguous, or not on the CPU.
        TypeError: for another dtype, or two, and what is no tensor.
    """
    _check_tensors("gemv", x, weight)
    if x.dim() not in (1, 2) or (x.dim() == 2 and len(x) != 1):
        raise ValueError(f"gemv: x must be [k] or [1, k], got {list(x.shape)}")
    y = _product("gemv", x.view(1, -1) if x.dim() == 1 else x, weight)
    return y.view(-1) if x.dim() == 1 else y


def gemm(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for any m: panels of x times blocks of the weight, summed in float32.

    Args:
        x: ``[m, k]``, bfloat16 or float32.
        weight: ``[n, k]``, of the dtype of x.

    Returns:
        ``[m, n]``, of the dtype of x.

    Raises:
        ValueError: for other shapes, tensors that are not contiguous, or not on the CPU.
        TypeError: for another dtype, or two, and what is no tensor.
    """
    _check_tensors("gemm", x, weight)
    if x.dim() != 2:
        raise ValueError(f"gemm: x must be [m, k], got {list(x.shape)}")
    return _product("gemm", x, weight)


def _check_tensors(caller: str, x: Tensor, weight: Tensor) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{caller}: {name} must be a tensor, got {type(tensor).__name__}")


def _product(caller: str, x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise TypeError(
            f"{caller}: x and weight must both be bfloat16 or float32, "
            f"got {x.dtype} and {weight.dtype}"
        )
    m, k = x.shape
    if weight.ndim != 2 or weight.shape[1] != k:
        raise ValueError(f"{caller}: weight must be [n, {k}], got {list(weight.shape)}")
    n = len(weight)
    for name, tensor in (("x", x), ("weight", weight)):
        check_placed(caller, name, tensor)
    if in_dispatch_mode():
        raise TypeError(f"{caller}: needs values, and cannot be traced")
    x, weight = x.resolve_neg(), weight.resolve_neg()
    y = x.new_empty((m, n))
    dtype, out = FLOAT_NAMES[x.dtype], bytes_of(y)
    _native.plain_linear(
        caller == "gemv", dtype, bytes_of(x), m, bytes_of(weight), n, k, out, num_threads()
    )
    return y

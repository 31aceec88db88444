"""Products with weights that are not quantised: the baseline of the quantised kernels.

They record no gradient.
"""

import torch
from torch import Tensor
from torch.nn import Parameter

from fdk_cpu import _native
from fdk_cpu.native_args import FLOAT_NAMES, bytes_of, check_contiguous_cpu
from fdk_cpu.runtime import num_threads
from fdk_formats.torch_internals import in_dispatch_mode

__all__ = ["gemm", "gemv"]

DTYPES = (torch.bfloat16, torch.float32)


def gemv(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight.T`` for one row of x, summed in float32.

    Args:
        x: ``[k]`` or ``[1, k]``, bfloat16 or float32.
        weight: ``[n, k]``, of the dtype of x.

    Returns:
        ``[n]`` or ``[1, n]``, of the dtype of x.

    Raises:
        ValueError: for other shapes, and for tensors that are not contiguous or not on the CPU.
        TypeError: for another dtype, two different ones, and anything but a plain tensor.
    """
    _check_tensors("gemv", x, weight)
    if x.dim() not in (1, 2) or (x.dim() == 2 and len(x) != 1):
        raise ValueError(f"gemv: x must be [k] or [1, k], got {list(x.shape)}")
    y = _product("gemv", x.view(1, -1) if x.dim() == 1 else x, weight)
    return y.view(-1) if x.dim() == 1 else y


def gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight.T`` for any number of rows, summed in float32.

    Args:
        x: ``[m, k]``, bfloat16 or float32.
        weight: ``[n, k]``, of the dtype of x.

    Returns:
        ``[m, n]``, of the dtype of x.

    Raises:
        ValueError: for other shapes, and for tensors that are not contiguous or not on the CPU.
        TypeError: for another dtype, two different ones, and anything but a plain tensor.
    """
    _check_tensors("gemm", x, weight)
    if x.dim() != 2:
        raise ValueError(f"gemm: x must be [m, k], got {list(x.shape)}")
    return _product("gemm", x, weight)


def _check_tensors(caller: str, x: Tensor, weight: Tensor) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        # A subclass may have no memory, as the fake tensors of torch.compile.
        if type(tensor) not in (Tensor, Parameter):
            kind = type(tensor).__name__
            raise TypeError(f"{caller}: {name} must be a plain tensor, got {kind}")


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
        check_contiguous_cpu(caller, name, tensor)
    if in_dispatch_mode():
        raise TypeError(f"{caller}: needs values, and cannot be traced")
    x, weight = x.resolve_neg(), weight.resolve_neg()
    y = x.new_empty((m, n))
    dtype, out = FLOAT_NAMES[x.dtype], bytes_of(y)
    _native.dense_linear(
        caller == "gemv", dtype, bytes_of(x), m, bytes_of(weight), n, k, out, num_threads()
    )
    return y

"""The op of the Triton kernels, with its gradient: dispatch on m happens here."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.library import Library

from fdk_cuda.triton import launch
from fdk_cuda.triton.arrangement import Arrangement
from fdk_cuda.triton.configs import LIMITS, gemm_config, small_config
from fdk_cuda.triton.decode import DTYPES
from fdk_formats.ops import define_linear_op

# Rows that a batch-invariant call pretends to have, so that every m gets the same configuration.
INVARIANT_M = 16


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
    arrangement = Arrangement(n, k, bits, group_size)
    w = launch.Weight(words, scale, zero_point, values, lanes, arrangement)
    m = x.shape[0]
    with on_device_of(x):
        if batch_invariant:
            return launch.small(x, w, bias, small_config(n, INVARIANT_M, bits))
        if m <= LIMITS.small_m:
            return launch.small(x, w, bias, small_config(n, m, bits))
        if m <= LIMITS.gemm_m:
            shared = launch.shared_memory(x.device)
            config = gemm_config(n, m, bits, arrangement.k_tiles, shared)
            return launch.gemm(x, w, bias, config)
        return torch.nn.functional.linear(x, launch.dequantise(w, x.dtype), bias)


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
    arrangement = Arrangement(n, k, bits, group_size)
    w = launch.Weight(words, scale, zero_point, values, lanes, arrangement)
    with on_device_of(grad_y):
        return grad_y @ launch.dequantise(w, grad_y.dtype)


def check_dtype(name: str, tensor: Tensor) -> None:
    """Of the activations."""
    if tensor.dtype not in DTYPES:
        wanted = " or ".join(map(str, DTYPES))
        raise TypeError(f"triton_linear: {name} must be {wanted}, got {tensor.dtype}")


def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device; entering its own costs time, and is rarely needed."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


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

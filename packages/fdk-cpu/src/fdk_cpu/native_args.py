"""Passes tensors to the native module: a dtype by its name, memory by its address and size."""

import torch
from torch import Tensor

FLOAT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

Bytes = tuple[int, int]  # address and size


def bytes_of(tensor: Tensor | None) -> Bytes:
    """Return the address and size in bytes of a contiguous CPU tensor, or (0, 0) for None."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.nbytes)


def check_contiguous_cpu(caller: str, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous and on the CPU."""
    if not (tensor.is_contiguous() and tensor.is_cpu):
        raise ValueError(
            f"{caller}: {name} must be contiguous and on the CPU, "
            f"got strides {list(tensor.stride())} on {tensor.device}"
        )

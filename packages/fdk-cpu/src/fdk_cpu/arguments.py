"""How the native code is told of a tensor: by the name of its dtype, and by where its bytes are."""

import torch
from torch import Tensor

FLOAT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def bytes_of(tensor: Tensor | None) -> tuple[int, int]:
    """Address and size in bytes; 0 and 0 for no tensor. It must be contiguous and on the CPU."""
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.nbytes)

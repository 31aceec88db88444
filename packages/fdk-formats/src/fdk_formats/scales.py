"""Scales: one per group of weights, and the few bytes each is stored in."""

import torch
from torch import Tensor

SCALE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e8m0": torch.uint8,
}


def decode_scale(scale: Tensor) -> Tensor:
    """The values of stored scales (or float zero points), float32.

    A uint8 scale is e8m0: the exponent field of a float32, so byte e is 2^(e - 127) and byte 0
    is an exact zero (where the OCP microscaling format has 2^-127: an all-zero group needs one).
    """
    if scale.dtype == torch.uint8:
        return (scale.to(torch.int32) << 23).view(torch.float32)
    return scale.to(torch.float32)

"""Tensors of torchao's HQQ prototype (fused asymmetric dequantise GEMM): two inputs per byte."""

import torch
from torch import Tensor

from fdk_formats.readers.conversion import affine_weight, check_float, check_tensor
from fdk_formats.tensor import QuantisedTensor

BITS = 4
SIGNED_OFFSET = 8  # makes -8 to 7 the codes 0 to 15


def read_dequant_gemm(packed_w: Tensor, scales: Tensor, zeros: Tensor) -> QuantisedTensor:
    """Reads a weight of ``pack_2xint4(W_q.T)``: ``W_hat = (code - zero) * scale``.

    int8 holds signed codes, as in that kernel. Codes and zero points are then shifted by 8, in
    float32 if the dtype of the zero points would round the sum.

    Args:
        packed_w: ``[k/2, n]`` in uint8 or int8, row 2p in the low nibbles, row 2p + 1 in the high.
        scales: ``[k/G, n]`` in bf16, fp16 or fp32.
        zeros: likewise.

    Raises:
        TypeError: if a tensor has another dtype.
        ValueError: if a shape does not fit, or float32 would round a shifted zero point.
    """
    where = "dequantise GEMM: "
    packed = check_tensor(where + "packed_w", packed_w, torch.uint8, torch.int8, shape=(None, None))
    k, n = 2 * packed.shape[0], packed.shape[1]
    scales = check_float(where + "scales", scales, shape=(None, n))
    groups = len(scales)
    zeros = check_float(where + "zeros", zeros, shape=(groups, n))
    if groups == 0 or k == 0 or k % groups:
        raise ValueError(f"{where}scales must divide the k={k} rows of codes, got {groups}")
    nibbles = packed.view(torch.uint8)
    codes = torch.stack([nibbles & 0xF, nibbles >> 4], dim=1).view(k, n)
    if packed.dtype == torch.int8:
        codes = codes ^ SIGNED_OFFSET  # two's complement plus 8, modulo 16
        zeros = _add_offset(where, zeros)
    return affine_weight(
        "dequantise GEMM",
        codes.T,
        bits=BITS,
        group_size=k // groups,
        scale=scales.T,
        zero_point=zeros.T,
    )


def _add_offset(where: str, zeros: Tensor) -> Tensor:
    exact = zeros.to(torch.float64) + SIGNED_OFFSET
    for dtype in (zeros.dtype, torch.float32):
        moved = exact.to(dtype)
        if torch.equal(moved.to(torch.float64), exact):
            return moved
    raise ValueError(
        f"{where}signed codes need zeros + {SIGNED_OFFSET}, which float32 does not hold for "
        f"{int((exact.float() != exact).sum())} of them"
    )

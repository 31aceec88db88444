"""Tensors of the fused asymmetric dequantise GEMM (torchao's HQQ prototype): pairs of rows of k."""

import torch
from torch import Tensor

from fdk_formats.readers.conversion import affine_weight, check_float, check_tensor
from fdk_formats.tensor import QuantisedTensor

BITS = 4
SIGNED_OFFSET = 8  # makes -8 to 7 the codes 0 to 15


def read_dequant_gemm(packed_w: Tensor, scales: Tensor, zeros: Tensor) -> QuantisedTensor:
    """One weight as ``pack_2xint4(W_q.T)`` stores it: ``W_hat = (code - zero) * scale``.

        packed_w :: [k/2, n, uint8 | int8]   row 2p in the low nibbles, row 2p + 1 in the high ones
        scales   :: [k/G, n, bf16 | fp16 | fp32]
        zeros    :: [k/G, n, bf16 | fp16 | fp32]

    As that kernel has it, int8 holds signed codes: they become unsigned by adding 8, and so does
    the zero point, exactly (in float32 where the zero's own dtype would round the sum).

    Raises:
        TypeError, ValueError: for dtypes and shapes that are not as above, and for a zero point
            whose sum with 8 float32 does not hold.
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

"""Tensors of torchao's HQQ prototype against its documented row interleaving."""

import pytest
import torch

from fdk_formats.format import Format
from fdk_formats.readers import read_dequant_gemm

K, N, G = 96, 10, 32


def make(signed, dtype=torch.float16, whole=False):
    """Returns codes ``[k, n]``, and their packing: rows 2p and 2p + 1 in one byte."""
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (K, N)) if signed else torch.randint(16, (K, N))
    packed = torch.empty(K // 2, N, dtype=torch.uint8)
    for p in range(K // 2):
        packed[p] = (codes[2 * p] % 16 + 16 * (codes[2 * p + 1] % 16)).to(torch.uint8)
    zeros = torch.rand(K // G, N) * 16 - (8 if signed else 0)
    zeros = (zeros.round() if whole else zeros).to(dtype)
    scales = (torch.rand(K // G, N) + 0.1).to(dtype)
    return codes, packed.view(torch.int8) if signed else packed, scales, zeros


def dequantise(codes, scales, zeros):
    """Computes the kernel's formula in float32, ``[n, k]``."""
    groups = torch.arange(K) // G
    return ((codes.float() - zeros.float()[groups]) * scales.float()[groups]).T


@pytest.mark.parametrize("signed", [True, False], ids=["s4", "u4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("whole", [True, False])
def test_read(signed, dtype, whole):
    codes, packed, scales, zeros = make(signed, dtype, whole)
    weight = read_dequant_gemm(packed, scales, zeros)
    assert weight.shape == (N, K)
    wanted = dequantise(codes, scales, zeros)
    assert torch.equal(weight.dequantise(), wanted)
    assert torch.equal(weight.dequantise(torch.bfloat16), wanted.to(torch.bfloat16))


def test_signed_zero_points_stay_exact():
    """Integer zeros plus 8 fit bf16; others become float32, with their scales."""
    codes, packed, scales, zeros = make(True, torch.bfloat16, whole=True)
    assert read_dequant_gemm(packed, scales, zeros).format == Format.parse("affine4-g32")
    zeros[0, 0] = 0.3
    weight = read_dequant_gemm(packed, scales, zeros)
    assert weight.format == Format.parse("affine4-g32-fp32")
    assert torch.equal(weight.dequantise(), dequantise(codes, scales, zeros))


def test_read_by_hand():
    """The documented example: rows 0 1 2 3 and 4 5 6 7 become nibbles 0|4, 1|5, 2|6, 3|7."""
    pair = torch.tensor([[0x40, 0x51, 0x62, 0x73]], dtype=torch.uint8)
    packed = pair.repeat(8, 1)
    weight = read_dequant_gemm(packed, torch.ones(1, 4), torch.zeros(1, 4))
    assert weight.codes()[:, :2].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    signed = (packed ^ 0x88).view(torch.int8)  # 0 and 4 become -8 and -4
    weight = read_dequant_gemm(signed, torch.ones(1, 4), torch.zeros(1, 4))
    assert weight.dequantise()[:, :2].tolist() == [[-8, -4], [-7, -3], [-6, -2], [-5, -1]]


def test_zero_point_that_float32_cannot_shift():
    _, packed, scales, zeros = make(True, torch.float32)
    zeros[0, 0] = 1e-9
    with pytest.raises(ValueError, match=r"zeros \+ 8, which float32 does not hold for [1-9]"):
        read_dequant_gemm(packed, scales, zeros)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(48, 10)}, r"packed_w must be .*uint8 or .*int8, got torch\.float32"),
        ({1: torch.ones(3, 9)}, r"scales must be \[any, 10\], got \[3, 9\]"),
        ({2: torch.ones(2, 10)}, r"zeros must be \[3, 10\], got \[2, 10\]"),
        ({1: torch.ones(7, 10), 2: torch.ones(7, 10)}, "divide the k=96 rows of codes, got 7"),
        ({1: torch.full((3, 10), torch.nan)}, "dequantise GEMM: scale must be finite, got 30"),
    ],
)
def test_bad_tensors(change, message):
    _, *tensors = make(False)
    changed = [change.get(i, tensor) for i, tensor in enumerate(tensors)]
    with pytest.raises((TypeError, ValueError), match=message):
        read_dequant_gemm(*changed)

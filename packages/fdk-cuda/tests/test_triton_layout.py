"""Packing and unpacking codes and scales for the Triton kernels."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fdk_cuda.triton.layout import (
    PackedLayout,
    pack_codes,
    pack_scale,
    unpack_codes,
    unpack_scale,
)


@pytest.mark.parametrize("n", [0, 37])
@pytest.mark.parametrize("group_size", [24, 64, 192])
@pytest.mark.parametrize("bits", range(1, 9))
def test_there_and_back(bits: int, group_size: int, n: int) -> None:
    """Covers a weight without outputs too."""
    generator = torch.Generator().manual_seed(bits)
    a = PackedLayout(n, 192, bits, group_size)
    codes = torch.randint(1 << bits, (n, 192), dtype=torch.uint8, generator=generator)
    words = pack_codes(codes, a)
    assert words.shape == a.words_shape
    assert torch.equal(unpack_codes(words, a), codes)
    scale = torch.rand(n, a.groups, generator=generator)
    assert torch.equal(unpack_scale(pack_scale(scale, a), a), scale)

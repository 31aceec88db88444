"""Random quantised weights of any size, made where they are used and in no more time than that."""

import torch

from fdk_formats import Format, QuantisedTensor, quantise
from fdk_formats.scales import decode_scale

# Rows of a normal weight that a named codebook is taken from.
SAMPLE_ROWS = 4


def random_weight(
    format: Format, n: int, k: int, device: torch.device | str, *, seed: int = 0
) -> QuantisedTensor:
    """A weight ``[n, k]`` of random codes, scales and zero points, with the codebook of its format.

    The time of a kernel does not depend on codes, so none is searched: a [28672, 8192] weight
    takes milliseconds on a GPU. Products have about the size of x. Any k that the format takes.
    """
    generator = torch.Generator(device).manual_seed(seed)
    width = (k * format.bits + 7) // 8
    groups, levels = k // format.group_size_for(k), 1 << format.bits
    packed = torch.randint(256, (n, width), dtype=torch.uint8, device=device, generator=generator)
    if spare := width * 8 - k * format.bits:  # the last byte of a row ends in zeros
        packed[:, -1] &= 0xFF << spare & 0xFF
    codebook = zero_point = None
    if format.is_affine:
        zero = torch.rand(n, groups, device=device, generator=generator) * (levels - 1)
        zero_point = zero.round().to(format.stored_zero_point_dtype)
        largest = levels / 2
    else:
        codebook = _codebook(format, k, seed).to(device)
        largest = float(codebook.abs().max())
    scale = 0.5 + torch.rand(n, groups, device=device, generator=generator)
    scale /= largest * k**0.5
    if format.scale_dtype == "e8m0":
        scale = 127 + scale.log2().round()
    scale = scale.to(format.stored_scale_dtype)
    return QuantisedTensor(format, (n, k), packed, scale, codebook, zero_point)


def _codebook(format: Format, k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if format.codebook == "custom":
        return torch.randn(1 << format.bits, generator=generator).sort().values
    codebook = quantise(torch.randn(SAMPLE_ROWS, k, generator=generator), format).codebook
    assert codebook is not None
    return codebook


def exact_weight(q: QuantisedTensor, dtype: torch.dtype, oracle: torch.dtype) -> torch.Tensor:
    """``q.dequantise(dtype)`` without its last rounding, as ``oracle`` (float32 or float64).

    The codebook is rounded to ``dtype``: that is what every kernel is given.
    """
    codes = q.codes().view(q.shape[0], -1, q.group_size)
    if q.codebook is not None:
        values = q.codebook.to(dtype).to(oracle)[codes.to(torch.int32)]
    else:
        assert q.zero_point is not None
        values = codes.to(oracle) - q.zero_point[..., None].to(oracle)
    values *= decode_scale(q.scale)[..., None].to(oracle)
    return values.view(q.shape)

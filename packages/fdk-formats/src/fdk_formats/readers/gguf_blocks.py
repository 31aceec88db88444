"""The blocks of GGUF's tensor types, and the format that each becomes.

A block holds 32 or 256 weights, one or more groups of G. Where ggml computes ``scale * value`` with
one table of values per type, a format of ours holds the same values exactly. Where it computes
``scale * q - minimum``, the zero point ``minimum / scale`` is rounded to float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fdk_formats.codebooks import named_codebook
from fdk_formats.format import Format
from fdk_formats.packing import pack, packed_width, rows_per_chunk
from fdk_formats.scales import decode_scale
from fdk_formats.tensor import MAX_ZERO_POINT, QuantisedTensor

# The table of IQ4_NL and IQ4_XS, from ggml-common.h.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Decoded(NamedTuple):
    """Blocks taken apart.

    Attributes:
        codes: ``[blocks, weights, uint8]``.
        scale: ``[blocks, weights/G]`` in the format's scale dtype.
        minimum: likewise, subtracted from ``code * scale``; None for types with a table.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None


@dataclass(frozen=True)
class BlockType:
    """A tensor type of GGUF that a format holds.

    Attributes:
        weights: weights in a block.
        nbytes: bytes of a block.
        format: the format of the result.
        decode: takes ``[blocks, nbytes, uint8]`` apart.
    """

    weights: int
    nbytes: int
    format: Format
    decode: Callable[[Tensor], Decoded]

    @property
    def is_exact(self) -> bool:
        """True where the format holds ggml's values exactly."""
        return not self.format.is_affine

    def table(self) -> Tensor | None:
        """Returns the values of the codes, ``[2^bits, float32]``; None for affine formats."""
        if self.format.is_affine:
            return None
        if self.format.needs_codebook:
            return torch.tensor(IQ4_VALUES, dtype=torch.float32)
        return named_codebook(self.format, self.weights).tensor()

    def quantised(self, data: Tensor, n: int, k: int) -> QuantisedTensor:
        """Converts the bytes of a weight.

        Args:
            data: ``[n * k / weights * nbytes, uint8]``.
            n: outputs.
            k: inputs, a multiple of ``weights``.

        Raises:
            ValueError: if a scale or minimum is not finite.
        """
        format = self.format
        groups = (n, k // format.group_size_for(k))
        packed = torch.empty((n, packed_width(format.bits, k)), dtype=torch.uint8)
        scale = torch.empty(groups, dtype=format.stored_scale_dtype)
        zero = torch.empty(groups, dtype=torch.float32) if format.is_affine else None
        for rows, decoded in self._chunks(data, n, k):
            codes, scales = decoded.codes, decoded.scale
            if zero is not None:
                codes, scales, zeros = _affine(decoded)
                zero[rows] = zeros.view(-1, groups[1])
            packed[rows] = pack(codes.view(-1, k), format.bits)
            scale[rows] = scales.view(-1, groups[1])
        weight = QuantisedTensor(
            format, (n, k), packed, scale, codebook=self.table(), zero_point=zero
        )
        weight.check_values("GGUF")
        return weight

    def dequantised(self, data: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
        """Computes ggml's values in float32 and rounds them to ``dtype``: ``[n, k]``."""
        out = torch.empty((n, k), dtype=dtype)
        table = self.table()
        for rows, (codes, scale, minimum) in self._chunks(data, n, k):
            values = codes.float() if table is None else table[codes.to(torch.int32)]
            scale = decode_scale(scale)
            values = values.view(*scale.shape, -1) * scale[..., None]
            if minimum is not None:
                values -= minimum[..., None]
            out[rows] = values.view(-1, k).to(dtype)
        return out

    def _chunks(self, data: Tensor, n: int, k: int) -> Iterator[tuple[slice, Decoded]]:
        rows = data.view(n, -1)
        step = rows_per_chunk(data.device, k)
        for start in range(0, n, step):
            chunk = slice(start, start + step)
            yield chunk, self.decode(rows[chunk].reshape(-1, self.nbytes))


def _affine(decoded: Decoded) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes, scale and zero point of ``(code - zero) * scale = code * scale - minimum``."""
    codes, scale, minimum = decoded
    assert minimum is not None
    # Without a scale every weight of the group is -minimum, which is (0 - 1) * minimum.
    flat = scale == 0
    scale = torch.where(flat, minimum, scale)
    zero = torch.where(flat, 1.0, minimum / torch.where(flat, 1.0, scale))
    # A zero point beyond the valid range has a scale below the float32 spacing of the minimum. The
    # scale is made as large as that, which moves a weight by no more than half of it.
    far = zero.abs() > MAX_ZERO_POINT
    zero = zero.clamp(-MAX_ZERO_POINT, MAX_ZERO_POINT)
    wider = torch.where(far, minimum / zero, scale)
    values = (
        codes.view(*scale.shape, -1) * torch.where(far, scale / wider, (~flat).float())[..., None]
    )
    return values.round().to(torch.uint8), wider, zero


def _bits(data: Tensor, bits: int, run: int) -> Tensor:
    """Unpacks runs of bytes: the low bits of each byte of a run, then the next bits of each.

    Args:
        data: ``[blocks, bytes, uint8]``.
        bits: width of a code: 1, 2 or 4.
        run: bytes in a run.

    Returns:
        ``[blocks, bytes * 8 / bits, uint8]``.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    runs = data.reshape(len(data), -1, 1, run)
    return (runs >> shifts & (1 << bits) - 1).flatten(1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Returns the float16 at a byte of each block, ``[blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _signed(data: Tensor) -> Tensor:
    """Reads bytes as int8, in float32."""
    return data.contiguous().view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Decoded:
    return Decoded(_bits(blocks[:, 2:], 4, 16), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Decoded:
    minimum = -_half(blocks, 2).float()
    return Decoded(_bits(blocks[:, 4:], 4, 16), _half(blocks, 0).float(), minimum)


def _q5_0(blocks: Tensor) -> Decoded:
    high = _bits(blocks[:, 2:6], 1, 1)
    return Decoded(_bits(blocks[:, 6:], 4, 16) | high << 4, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Decoded:
    high = _bits(blocks[:, 4:8], 1, 1)
    codes = _bits(blocks[:, 8:], 4, 16) | high << 4
    return Decoded(codes, _half(blocks, 0).float(), -_half(blocks, 2).float())


def _q8_0(blocks: Tensor) -> Decoded:
    return Decoded(blocks[:, 2:] ^ 128, _half(blocks, 0))  # -128 to 127 become 0 to 255


def _q2_k(blocks: Tensor) -> Decoded:
    scales, minima = (_bits(blocks[:, :16], 4, 1).view(-1, 16, 2).float()).unbind(-1)
    codes = _bits(blocks[:, 16:80], 2, 32)
    return Decoded(codes, _half(blocks, 80).float() * scales, _half(blocks, 82).float() * minima)


def _q3_k(blocks: Tensor) -> Decoded:
    codes = _bits(blocks[:, 32:96], 2, 32) | _bits(blocks[:, :32], 1, 32) << 2
    scales = _bits(blocks[:, 96:104], 4, 8) | _bits(blocks[:, 104:108], 2, 4) << 4
    return Decoded(codes, _half(blocks, 108).float() * (scales.float() - 32))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and minima of the 8 groups of a Q4_K or Q5_K block, each ``[blocks, 8]``.

    Bytes 4 to 15 hold 8 scales and 8 minima of 6 bits. The first four of each are the low 6 bits of
    a byte; the last four have their low 4 bits in the last 4 bytes and their high 2 bits above the
    first four.
    """
    scale, minimum, low = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([scale & 63, low & 15 | scale >> 6 << 4], dim=1)
    minima = torch.cat([minimum & 63, low >> 4 | minimum >> 6 << 4], dim=1)
    return _half(blocks, 0).float() * scales, _half(blocks, 2).float() * minima


def _q4_k(blocks: Tensor) -> Decoded:
    return Decoded(_bits(blocks[:, 16:], 4, 32), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> Decoded:
    codes = _bits(blocks[:, 48:], 4, 32) | _bits(blocks[:, 16:48], 1, 32) << 4
    return Decoded(codes, *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> Decoded:
    codes = _bits(blocks[:, :128], 4, 64) | _bits(blocks[:, 128:192], 2, 32) << 4
    return Decoded(codes, _half(blocks, 208).float() * _signed(blocks[:, 192:208]))


def _iq4_xs(blocks: Tensor) -> Decoded:
    scales = _bits(blocks[:, 4:8], 4, 1) | _bits(blocks[:, 2:4], 2, 1) << 4
    return Decoded(_bits(blocks[:, 8:], 4, 16), _half(blocks, 0).float() * (scales.float() - 32))


def _mxfp4(blocks: Tensor) -> Decoded:
    exponents, codes = blocks[:, :1], _bits(blocks[:, 1:], 4, 16)
    # Byte 0 is 2^-127 there and 0 here; byte 255 overflows float32 in both.
    lost = ((exponents == 0) & (codes & 7 != 0).any(1, keepdim=True)).sum()
    if lost:
        raise ValueError(f"GGUF: {int(lost)} MXFP4 scales are 2^-127, which e8m0 has as 0 here")
    # A sign and a magnitude in ascending order of value: 15 is -6, 8 is -0, 0 is 0, 7 is 6.
    return Decoded(torch.where(codes > 7, 15 - codes, codes + 8), exponents)


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, Format.parse("int4-g32-signmax-fp16"), _q4_0),
    "Q4_1": BlockType(32, 20, Format.parse("affine4-g32-fp32"), _q4_1),
    "Q5_0": BlockType(32, 22, Format.parse("int5-g32-signmax-fp16"), _q5_0),
    "Q5_1": BlockType(32, 24, Format.parse("affine5-g32-fp32"), _q5_1),
    "Q8_0": BlockType(32, 34, Format.parse("int8-g32-signmax-fp16"), _q8_0),
    "Q2_K": BlockType(256, 84, Format.parse("affine2-g16-fp32"), _q2_k),
    "Q3_K": BlockType(256, 110, Format.parse("int3-g16-signmax-fp32"), _q3_k),
    "Q4_K": BlockType(256, 144, Format.parse("affine4-g32-fp32"), _q4_k),
    "Q5_K": BlockType(256, 176, Format.parse("affine5-g32-fp32"), _q5_k),
    "Q6_K": BlockType(256, 210, Format.parse("int6-g16-signmax-fp32"), _q6_k),
    "IQ4_NL": BlockType(32, 18, Format.parse("custom4-g32-signmax-fp16"), _q4_0),
    "IQ4_XS": BlockType(256, 136, Format.parse("custom4-g32-signmax-fp32"), _iq4_xs),
    "MXFP4": BlockType(32, 17, Format.parse("fp4-g32-e8m0"), _mxfp4),
}

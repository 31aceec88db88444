"""Scales: one per group of weights, and the few bytes each is stored in."""

import torch
from torch import Tensor

SCALE_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e8m0": torch.uint8,
}
# The mantissa field of sqrt(2) as a float32: above it a value is nearer, in log, to the next power.
SQRT2_MANTISSA = 0x3504F3


def decode_scale(scale: Tensor) -> Tensor:
    """The values of stored scales (or float zero points), float32.

    A uint8 scale is e8m0: the exponent field of a float32, so byte e is 2^(e - 127) and byte 0
    is an exact zero (where the OCP microscaling format has 2^-127: an all-zero group needs one).
    """
    if scale.dtype == torch.uint8:
        return (scale.to(torch.int32) << 23).view(torch.float32)
    return scale.to(torch.float32)


def encode_scale(scale: Tensor, scale_dtype: str, *, round_up: bool = False) -> Tensor:
    """Stores float32 scales as ``scale_dtype``; ``decode_scale`` gives the rounded values.

    bf16 and fp16 round to nearest, ties to even. e8m0 rounds to the power of two that is nearest
    in log, or to the next one up with ``round_up`` (then nothing that the scale covers is
    clipped); what is smaller than 2^-126 and not zero becomes 2^-126.

    Raises:
        ValueError: where a scale is too large for its dtype, or negative for e8m0.
    """
    assert scale.dtype == torch.float32
    if scale_dtype == "e8m0":
        stored, over = _encode_e8m0(scale, round_up)
    else:
        stored = scale.to(SCALE_DTYPES[scale_dtype])
        over = ~torch.isfinite(stored)
    if over.any():
        raise ValueError(
            f"scale: {scale_dtype} holds up to {largest_scale(scale_dtype):g}, "
            f"got {scale[over][0].item():g}"
        )
    return stored


def largest_scale(scale_dtype: str) -> float:
    """The largest scale that a dtype holds."""
    return 2.0**127 if scale_dtype == "e8m0" else torch.finfo(SCALE_DTYPES[scale_dtype]).max


def _encode_e8m0(scale: Tensor, round_up: bool) -> tuple[Tensor, Tensor]:
    if (scale < 0).any():
        raise ValueError(f"scale: e8m0 holds no sign, got {scale.min().item():g}")
    word = scale.view(torch.int32)
    exponent, mantissa = word >> 23, word & 0x7FFFFF
    exponent = exponent + (mantissa > (0 if round_up else SQRT2_MANTISSA))
    exponent = torch.where(scale > 0, exponent.clamp(min=1), 0)
    return exponent.to(torch.uint8), exponent > 254


def statistic(groups: Tensor, rule: str) -> Tensor:
    """The statistic of each group, float32 ``[...]`` of float32 ``groups :: [..., G]``.

    ``absmax``: the largest magnitude. ``signmax``: the value of largest magnitude, sign and all,
    the positive one of a tie. ``absmean`` and ``rms``: the mean magnitude and the root of the mean
    square, summed in float64 and rounded to float32 once at the end. Another order of the sum
    (other threads, another device) can change that one bit at most, and only where float64 itself
    rounds: for float32 weights, or magnitudes in a group that lie many powers of two apart.
    """
    if rule == "absmax":
        return groups.abs().amax(-1)
    if rule == "signmax":
        lo, hi = groups.amin(-1), groups.amax(-1)
        return torch.where(hi >= -lo, hi, lo)
    size = groups.shape[-1]
    if rule == "absmean":
        return (groups.abs().sum(-1, dtype=torch.float64) / size).to(torch.float32)
    assert rule == "rms"
    return (groups.to(torch.float64).square().sum(-1) / size).sqrt().to(torch.float32)


def divide(value: Tensor, by: Tensor) -> Tensor:
    """The float32 quotient of two tensors that broadcast, zero where the divisor is zero."""
    return value / torch.where(by == 0, torch.inf, by)

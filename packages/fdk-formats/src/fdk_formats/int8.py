"""8-bit activations (``activations="int8"``): x and the codebook rounded to integers.

This is the definition that every backend with int8 activations follows:

    x_hat[j]    = x_code[j] * x_scale[block of j]         x_code in -127 to 127
    W_hat[i, j] = (level[code[i, j]] - offset) * step * scale[i, j // G]       (codebook)
    W_hat[i, j] = (code[i, j] - zero_point[i, j // G]) * scale[i, j // G]      (affine: as ever)
    y = x_hat @ W_hat.T, from integer products x_code * level summed within a group and a block

A block is 128 positions of a row of x, each group padded with zeros to 16, 32, 64 or a multiple of
128 positions (so that no group of up to 128 straddles two blocks); its scale is its largest
magnitude / 127, and halves round to even. A block with NaN or infinity makes its row of y NaN. One
of nothing but magnitudes below 2^-120 counts as zero.

The error is that of rounding: 0.64 % (normalised RMSE) of normal x where the values of the codebook
are multiples of a common step (affine, ``int``, ``uniform``, ``fp4``, any of 1 bit), 0.65 to 0.86 %
elsewhere. An outlier in a block costs each other position of it up to 1/254 of the outlier.
docs/int8.md has the measured table.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from fdk_formats.tensor import QuantisedTensor

BLOCK = 128
LARGEST_CODE = 127
# Blocks whose largest magnitude is less count as zero: 127 over it must stay finite in float32.
SMALLEST_BLOCK = 2.0**-120


@dataclass(frozen=True)
class Int8Table:
    """The values of a codebook as ``(level - offset) * step``.

        levels :: [2^bits, int8]

    Up to 7 bits a level is at least -127: then -level is an int8 too.
    """

    levels: Tensor
    step: float
    offset: float

    @property
    def values(self) -> Tensor:
        """What the codebook is rounded to, ``[2^bits, float32]``."""
        return ((self.levels.to(torch.float64) - self.offset) * self.step).to(torch.float32)


def int8_table(codebook: Tensor) -> Int8Table:
    """The best of the tables that cut the range of a codebook in 128 to 254 steps (8 bits: 255).

    Levels are the steps nearest to the values; step and offset then fit them best (least squares),
    so that the errors of the entries cancel: a mean error would grow with the mean of x, not with
    its spread. That halves the error of one scale of largest magnitude / 127 (NF4, normal weights:
    0.59 to 0.33 %), and any equidistant values come out exact, for 2^b - 1 has a multiple in range.
    """
    values = codebook.detach().to(torch.float64)
    low, high = values.aminmax()
    if not (high - low).isfinite():
        return Int8Table(torch.zeros_like(values, dtype=torch.int8), float("nan"), 0.0)
    if low == high:
        return Int8Table(torch.zeros_like(values, dtype=torch.int8), 1.0, -low.item())
    most = 255 if len(values) == 256 else 254
    counts = torch.arange(128, most + 1, device=values.device)[:, None]  # [tables, 1]
    levels = ((values - low) / (high - low) * counts).round() - (counts + 1) // 2
    centred = levels - levels.mean(1, keepdim=True)
    steps = (centred * (values - values.mean())).sum(1) / centred.square().sum(1)
    errors = (centred * steps[:, None] - (values - values.mean())).square().sum(1)
    best = int(errors.argmin())
    step = steps[best].item()
    offset = levels[best].mean().item() - values.mean().item() / step
    return Int8Table(levels[best].to(torch.int8), step, offset)


def round_activations(x: Tensor, group_size: int) -> Tensor:
    """``x_hat :: [m, k]`` of ``x :: [m, k]``, float32 or, of a float64 x, float64."""
    m, k = x.shape
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    padded = padded_group(group_size)
    rows = pad(wide.unflatten(1, (-1, group_size)), (0, padded - group_size)).flatten(1)
    blocks = pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    # torch has `127 / largest` as its reciprocal times 127: another rounding, and of bf16 x, where
    # halves of the largest are common, another code in 4.5 % of the rows.
    codes = (blocks * (torch.full_like(largest, LARGEST_CODE) / largest)).round()
    # Zero codes times an infinite scale, or NaN, are NaN.
    codes = torch.where(largest >= SMALLEST_BLOCK, codes, 0)
    rounded = (codes * (largest / LARGEST_CODE)).flatten(1)[:, : rows.shape[1]]
    groups: Tensor = rounded.unflatten(1, (-1, padded))[..., :group_size]
    return groups.reshape(m, k)


def padded_group(group_size: int) -> int:
    """The positions that a group takes among the blocks of x."""
    if group_size > BLOCK:
        return -(-group_size // BLOCK) * BLOCK
    return max(16, 1 << (group_size - 1).bit_length())


def int8_linear(x: Tensor, q: QuantisedTensor, bias: Tensor | None = None) -> Tensor:
    """``x_hat @ W_hat.T + bias :: [m, n]`` in the dtype of x, rounded once.

    x    :: [m, k]
    bias :: [n] or None
    """
    x_hat = round_activations(x, q.group_size)
    if q.codebook is not None:
        q = replace(q, codebook=int8_table(q.codebook).values)
    wide_bias = None if bias is None else bias.to(x_hat.dtype)
    return linear(x_hat, q.dequantise(x_hat.dtype), wide_bias).to(x.dtype)

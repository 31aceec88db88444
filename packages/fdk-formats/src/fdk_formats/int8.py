"""8-bit activations (``activations="int8"``): x and the codebook rounded to integers.

The definition that every backend with int8 activations follows:

    x_hat[j]    = x_code[j] * x_scale[block of j]         x_code in -127 to 127
    W_hat[i, j] = (level[code[i, j]] - offset) * step * scale[i, j // G]       (codebook)
    W_hat[i, j] = (code[i, j] - zero_point[i, j // G]) * scale[i, j // G]      (affine)
    y = x_hat @ W_hat.T, from integer products x_code * level summed within a group and a block

A block is 128 positions of a row of x. Each group is padded with zeros to 16, 32, 64 or a multiple
of 128 positions, so that no group of up to 128 straddles two blocks. The scale of a block is its
largest magnitude / 127; halves round to even. NaN or infinity in a block makes its row of y NaN. A
block whose magnitudes are all below 2^-120 counts as zero.

With a rotated format x is rotated, in its own dtype, before it is rounded.

docs/guide/int8.md has the measured errors.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from fdk_formats.rotation import rotate
from fdk_formats.tensor import QuantisedTensor

BLOCK = 128
LARGEST_CODE = 127
# Smaller blocks count as zero, because 127 / largest must stay finite in float32.
SMALLEST_BLOCK = 2.0**-120


@dataclass(frozen=True)
class Int8Table:
    """The values of a codebook as ``(level - offset) * step``.

    Attributes:
        levels: ``[2^bits, int8]``; up to 7 bits at least -127, so that -level is an int8 too.
        step: distance of two levels.
        offset: level of the value 0, not rounded.
    """

    levels: Tensor
    step: float
    offset: float

    @property
    def values(self) -> Tensor:
        """The rounded codebook, ``[2^bits, float32]``."""
        return ((self.levels.to(torch.float64) - self.offset) * self.step).to(torch.float32)


def int8_table(codebook: Tensor) -> Int8Table:
    """Rounds a codebook to integer levels.

    Divides its range into 128 to 254 steps (255 at 8 bits), rounds the values to steps, fits step
    and offset by least squares and keeps the best. The errors of the entries then have mean zero,
    so that the error of y does not grow with the mean of x. Equidistant values are exact. For NF4
    and normal weights the error is 0.33 %, instead of 0.59 % with a scale of largest / 127.

    Args:
        codebook: ``[2^bits]``, floating.
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
    """Rounds ``x :: [m, k]`` to 8 bits per block; returns ``x_hat`` in float32 (or float64)."""
    m, k = x.shape
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    padded = padded_group(group_size)
    rows = pad(wide.unflatten(1, (-1, group_size)), (0, padded - group_size)).flatten(1)
    blocks = pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    # torch computes `127 / largest` as 127 times the reciprocal, which rounds differently: 4.5 % of
    # the rows of bf16 x, where halves are common, get another code. A tensor of 127s avoids that.
    codes = (blocks * (torch.full_like(largest, LARGEST_CODE) / largest)).round()
    # 0 * infinity and 0 * NaN are NaN, so rows that are not finite stay NaN.
    codes = torch.where(largest >= SMALLEST_BLOCK, codes, 0)
    rounded = (codes * (largest / LARGEST_CODE)).flatten(1)[:, : rows.shape[1]]
    groups: Tensor = rounded.unflatten(1, (-1, padded))[..., :group_size]
    return groups.reshape(m, k)


def padded_group(group_size: int) -> int:
    """Returns the positions that a group occupies in the blocks of x."""
    if group_size > BLOCK:
        return -(-group_size // BLOCK) * BLOCK
    return max(16, 1 << (group_size - 1).bit_length())


def int8_linear(x: Tensor, q: QuantisedTensor, bias: Tensor | None = None) -> Tensor:
    """Computes ``x_hat @ W_hat.T + bias``, rounded once to the dtype of x.

    Args:
        x: ``[m, k]``, floating.
        q: the weight ``[n, k]``.
        bias: ``[n]`` or None.

    Returns:
        ``[m, n]``.
    """
    if q.format.rotation is not None:
        x, q = rotate(x), q.unrotated
    x_hat = round_activations(x, q.group_size)
    if q.codebook is not None:
        q = replace(q, codebook=int8_table(q.codebook).values)
    wide_bias = None if bias is None else bias.to(x_hat.dtype)
    return linear(x_hat, q.dequantise(x_hat.dtype), wide_bias).to(x.dtype)

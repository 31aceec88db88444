"""References for the Marlin kernels, used by tests, benchmarks and sanitize_gpu.py."""

import torch
from torch import Tensor

from fdk_cuda.marlin.instantiations import TileShape
from fdk_formats.scales import decode_scale
from fdk_formats.tensor import QuantisedTensor


def multiplied_weight(q: QuantisedTensor, dtype: torch.dtype, shape: TileShape | None) -> Tensor:
    """Returns the ``W :: [n, k, float64]`` by which a kernel multiplies x; only its sums round.

    Args:
        q: the weight.
        dtype: dtype of the activations, to which the codebook is rounded.
        shape: shape of a small-m plan, which scales sums unless it says otherwise; None for other
            kernels, all of which multiply the dequantised weight.
    """
    if shape is None or shape.scales_weights:
        return q.dequantise(dtype).double()
    return exact_weight(q, dtype)


def exact_weight(q: QuantisedTensor, dtype: torch.dtype) -> Tensor:
    """Returns ``W :: [n, k, float64]`` before products with scales are rounded to ``dtype``."""
    codes = q.codes().view(*q.scale.shape, -1)  # [n, k / G, G]
    if q.zero_point is not None:
        values = codes.double() - q.zero_point.double()[..., None]
    else:
        assert q.codebook is not None
        values = q.codebook.to(dtype).double()[codes.int()]
    return (values * decode_scale(q.scale).double()[..., None]).view(q.shape)

"""fake_quantise: what a quantised weight will be, differentiable, for training with it."""

from typing import Any

import torch
from torch import Tensor

from fdk_formats.format import Format
from fdk_formats.quantise import quantise
from fdk_formats.scales import decode_scale
from fdk_formats.tensor import QuantisedTensor


def fake_quantise(
    weight: Tensor,
    format: Format | str,
    codebook: Tensor | None = None,
    *,
    importance: Tensor | None = None,
) -> Tensor:
    """``quantise(weight, format).dequantise(weight.dtype)``, with a straight-through gradient.

    The gradient passes to ``weight`` unchanged (Bengio et al., 2013), and to ``codebook`` where
    one is given and asks for it: each entry receives the sum of ``grad * scale`` over its weights.

    Args:
        weight: ``[n, k]``.
        format: see ``quantise``; scales follow the weight at each call.
        codebook: ``[2^bits]``, for ``kmeans`` and ``custom`` formats; need not be sorted. Without
            one, ``kmeans`` is fitted anew at each call.
        importance: see ``quantise``.

    Raises:
        TypeError: for a weight or a codebook that is no tensor; the rest is as for ``quantise``.
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"fake_quantise: weight must be a tensor, got {type(weight).__name__}")
    if codebook is not None and not isinstance(codebook, Tensor):
        raise TypeError(f"fake_quantise: codebook must be a tensor, got {type(codebook).__name__}")
    table = None if codebook is None else codebook.sort().values
    result: Tensor = _FakeQuantise.apply(  # type: ignore[no-untyped-call]
        weight, table, Format.parse(format), importance
    )
    return result


class _FakeQuantise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        codebook: Tensor | None,
        format: Format,
        importance: Tensor | None,
    ) -> Tensor:
        table = None if codebook is None else codebook.detach().to(torch.float32)
        q: QuantisedTensor = quantise(
            weight.detach(), format, importance=importance, codebook=table
        )
        ctx.q = q if codebook is not None and codebook.requires_grad else None
        ctx.codebook_dtype = None if codebook is None else codebook.dtype
        return q.dequantise(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_codebook = None
        if ctx.q is not None:
            q: QuantisedTensor = ctx.q
            scaled = grad.reshape(q.shape[0], -1, q.group_size) * decode_scale(q.scale)[..., None]
            sums = torch.zeros(1 << q.format.bits, dtype=torch.float32, device=grad.device)
            sums.index_add_(0, q.codes().view(-1).to(torch.int32), scaled.reshape(-1).float())
            grad_codebook = sums.to(ctx.codebook_dtype)
        return grad, grad_codebook, None, None

"""Quantisation-aware training: ``fake_quantise``, differentiable."""

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from fdk_formats.format import Format
from fdk_formats.ops import define_op
from fdk_formats.packing import CODES_PER_CHUNK, packed_width, unpack
from fdk_formats.quantise import quantise
from fdk_formats.scales import check_codebook, check_weight, decode_scale
from fdk_formats.tensor import QuantisedTensor


def fake_quantise(
    weight: Tensor,
    format: Format | str,
    codebook: Tensor | None = None,
    *,
    importance: Tensor | None = None,
) -> Tensor:
    """Quantises and dequantises a weight, with a straight-through gradient.

    The value is ``quantise(weight, format).dequantise(weight.dtype)``. The gradient passes to the
    weight unchanged (Bengio et al. 2013) and, if the codebook requires one, to the codebook: an
    entry receives the sum of ``grad * scale`` over its weights. It is one torch op, so that
    ``torch.compile`` and ``torch.export`` do not trace into it. A weight on meta gives one on meta.

    Args:
        weight: ``[n, k]``, floating.
        format: see ``quantise``. Scales are chosen anew at each call.
        codebook: ``[2^bits]`` for ``kmeans`` and ``custom`` formats, in any order. Without one,
            ``kmeans`` fits one at each call.
        importance: see ``quantise``.

    Returns:
        ``W_hat :: [n, k]`` in the dtype of the weight.

    Raises:
        TypeError: if an argument is not a tensor.
        ValueError: see ``quantise``.

    Example:
        >>> y = x @ fake_quantise(layer.weight, "int4-g64").T
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"fake_quantise: weight must be a tensor, got {type(weight).__name__}")
    if codebook is not None and not isinstance(codebook, Tensor):
        raise TypeError(f"fake_quantise: codebook must be a tensor, got {type(codebook).__name__}")
    if importance is not None and not isinstance(importance, Tensor):
        got = type(importance).__name__
        raise TypeError(f"fake_quantise: importance must be a tensor, got {got}")
    table = None if codebook is None else codebook.sort().values
    result: Tensor = _op(weight, table, importance, str(Format.parse(format)))[0]
    return result


# W_hat :: [n, k, dtype of weight]; packed and scale of a QuantisedTensor, for the gradient of the
# codebook.
Outputs = tuple[Tensor, Tensor, Tensor]


def _run(
    weight: Tensor,  # [n, k, floating]
    codebook: Tensor | None,  # [2^bits], ascending
    importance: Tensor | None,
    format: str,
) -> Outputs:
    table = None if codebook is None else codebook.to(torch.float32)
    q = quantise(weight, format, importance, codebook=table)
    return q.dequantise(weight.dtype), q.packed, q.scale


def _fake(
    weight: Tensor, codebook: Tensor | None, importance: Tensor | None, format: str
) -> Outputs:
    wanted = Format.parse(format)
    check_weight(weight)
    check_codebook(None if codebook is None else codebook.to(torch.float32), wanted)
    n, k = weight.shape
    groups = k // wanted.group_size_for(k)
    return (
        weight.new_empty((n, k)),
        weight.new_empty((n, packed_width(wanted.bits, k)), dtype=torch.uint8),
        weight.new_empty((n, groups), dtype=wanted.stored_scale_dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    _, codebook, _, ctx.format = inputs
    _, packed, scale = output
    ctx.mark_non_differentiable(packed, scale)
    if ctx.needs_input_grad[1]:
        ctx.save_for_backward(packed, scale)
        ctx.codebook_dtype, ctx.codebook_device = codebook.dtype, codebook.device


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grad_codebook = None
    if ctx.needs_input_grad[1]:
        sums = _grad_op(grad, *ctx.saved_tensors, ctx.format)
        grad_codebook = sums.to(ctx.codebook_device, ctx.codebook_dtype)
    return grad, grad_codebook, None, None


def _run_grad(
    grad: Tensor,  # [n, k, floating]
    packed: Tensor,
    scale: Tensor,
    format: str,
) -> Tensor:
    """Sums ``grad * scale`` over the weights of each code: ``[2^bits, float32]``."""
    bits = Format.parse(format).bits
    n, k = grad.shape
    sums = grad.new_zeros(1 << bits, dtype=torch.float32)
    step = max(1, CODES_PER_CHUNK // k)
    for start in range(0, n, step):
        rows = slice(start, start + step)
        codes = unpack(packed[rows], bits, k).view(-1).to(torch.int32)
        groups = grad[rows].reshape(*scale[rows].shape, -1)  # [rows, k/G, G]
        scaled = groups.to(torch.float32) * decode_scale(scale[rows])[..., None]
        sums.index_add_(0, codes, scaled.reshape(-1))
    return sums


def _fake_grad(grad: Tensor, packed: Tensor, scale: Tensor, format: str) -> Tensor:
    return grad.new_empty(1 << Format.parse(format).bits, dtype=torch.float32)


def _setup_grad_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, packed, scale, ctx.format = inputs
    ctx.save_for_backward(packed, scale)
    ctx.shape, ctx.dtype = tuple(grad.shape), grad.dtype


def _backward_grad(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
    """Gives each weight the gradient of its code's sum, times its scale."""
    packed, scale = ctx.saved_tensors
    format = Format.parse(ctx.format)
    q = QuantisedTensor(format, ctx.shape, packed, scale, codebook=grad_sums)
    return q.dequantise().to(ctx.dtype), None, None, None


_library = Library("fdk_formats", "FRAGMENT")
_op = define_op(
    _library,
    "fake_quantise(Tensor weight, Tensor? codebook, Tensor? importance, str format)"
    " -> (Tensor W_hat, Tensor packed, Tensor scale)",
    run=_run,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_grad_op = define_op(
    _library,
    "fake_quantise_grad_codebook(Tensor grad, Tensor packed, Tensor scale, str format) -> Tensor",
    run=_run_grad,
    fake=_fake_grad,
    backward=_backward_grad,
    setup_context=_setup_grad_context,
)

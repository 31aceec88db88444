"""Quantisation-aware training: ``fake_quantise``, differentiable."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from fdk_formats.format import Format
from fdk_formats.ops import define_op
from fdk_formats.packing import rows_per_chunk
from fdk_formats.quantise import check_stack_arguments, checked_codebook, of_expert
from fdk_formats.rotation import rotate
from fdk_formats.scales import (
    CACHED_CHUNK,
    Grid,
    GroupedWeight,
    check_codebook,
    check_weight,
    checked_importance,
    decode_scale,
)


def fake_quantise(
    weight: Tensor,
    format: Format | str,
    codebook: Tensor | None = None,
    *,
    importance: Tensor | None = None,
    scale_log2: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Quantises and dequantises a weight, with a straight-through gradient.

    The value is that of ``quantise`` with the same arguments, dequantised. The gradient passes to
    the weight unchanged (Bengio et al. 2013). If they require one, it also passes to

    - the codebook: an entry receives the sum of ``grad * scale`` over its weights;
    - ``scale_log2``: a scale receives the sum of ``grad * (W_hat - w) / scale`` over its weights,
      without the ``- w`` of weights beyond the ends of the codebook (LSQ, Esser et al. 2020).

    It is one torch op, so that ``torch.compile`` and ``torch.export`` do not trace into it. A
    weight on meta gives one on meta. ``prepare_qat`` makes layers of it.

    On a GPU no value is read on the way, so that the host runs ahead of the device: a weight that
    is not finite gives values that are not. That needs a codebook, for ``kmeans``.

    Args:
        weight: ``[n, k]``, or a stack of experts ``[experts, n, k]``; floating.
        format: see ``quantise``. Scales are chosen anew at each call.
        codebook: ``[2^bits]`` for ``kmeans`` and ``custom`` formats, in any order; of a stack also
            ``[experts, 2^bits]``. Without one, ``kmeans`` fits one at each call, for each expert.
        importance: see ``quantise``, of a stack ``quantise_stack``.
        scale_log2: see ``quantise``; of a stack ``[experts, n, k/G]``.
        dtype: dtype of the result; that of the weight by default.

    Returns:
        ``W_hat``, of the weight's shape.

    Raises:
        TypeError: if an argument is not a tensor.
        ValueError: see ``quantise``; for values that are not finite on a CPU only.

    Example:
        >>> y = x @ fake_quantise(layer.weight, "int4-g64").T
    """
    given = {"codebook": codebook, "importance": importance, "scale_log2": scale_log2}
    if not isinstance(weight, Tensor):
        raise TypeError(f"fake_quantise: weight must be a tensor, got {type(weight).__name__}")
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            got = type(value).__name__
            raise TypeError(f"fake_quantise: {name} must be a tensor, got {got}")
    wanted, parsed = weight.dtype if dtype is None else dtype, Format.parse(format)
    if weight.ndim == 3:
        return _of_stack(weight, parsed, codebook, importance, scale_log2, wanted)
    if parsed.rotation is not None:
        check_weight(weight)
        parsed.group_size_for(weight.shape[1])
        if importance is not None:
            importance, _ = checked_importance(importance, weight, parsed)
        W_hat = fake_quantise(
            rotate(weight.to(torch.float32)),
            parsed.unrotated,
            codebook,
            importance=importance,
            scale_log2=scale_log2,
            dtype=wanted,
        )
        return rotate(W_hat, inverse=True)
    table = None if codebook is None else codebook.sort().values
    result: Tensor = _op(weight, table, scale_log2, importance, str(parsed), wanted)[0]
    return result


def _of_stack(
    weight: Tensor,
    format: Format,
    codebook: Tensor | None,
    importance: Tensor | None,
    scale_log2: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    experts, n, k = weight.shape
    given = codebook, importance, scale_log2
    check_stack_arguments("fake_quantise", weight.shape, format, *given)
    if importance is not None and importance.ndim == 2:
        importance = importance[:, None].expand(experts, n, k)
    if (codebook is None and format.is_fitted) or (codebook is not None and codebook.ndim == 2):
        made = [
            fake_quantise(
                weight[expert],
                format,
                of_expert(codebook, expert),
                importance=of_expert(importance, expert),
                scale_log2=of_expert(scale_log2, expert),
                dtype=dtype,
            )
            for expert in range(experts)
        ]
        return torch.stack(made)
    # One codebook or none: the rows of all experts are those of one weight.
    if scale_log2 is not None:
        scale_log2 = scale_log2.flatten(0, 1)
    if importance is not None and importance.ndim == 3:
        importance = importance.flatten(0, 1)
    W_hat = fake_quantise(
        weight.flatten(0, 1),
        format,
        codebook,
        importance=importance,
        scale_log2=scale_log2,
        dtype=dtype,
    )
    return W_hat.view(experts, n, k)


# W_hat :: [n, k, dtype], and what the gradients of codebook and scales need:
# codes :: [n, k, uint8], scale as stored, and the codebook or zero points of the ``Grid``.
Outputs = tuple[Tensor, Tensor, Tensor, Tensor]


def _run(
    weight: Tensor,  # [n, k, floating]
    codebook: Tensor | None,  # [2^bits], ascending
    scale_log2: Tensor | None,  # [n, k/G]
    importance: Tensor | None,
    format: str,
    dtype: torch.dtype,
) -> Outputs:
    wanted = Format.parse(format)
    # Reading values would make the host wait for a device at every layer of every step.
    reads_values = weight.device.type == "cpu"
    grouped = GroupedWeight.of(weight, wanted, importance, is_checked=reads_values)
    table = checked_codebook(codebook, wanted, weight, reads_values=reads_values)
    grid = grouped.fit(table, scale_log2=scale_log2)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    W_hat = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for chunk in grouped.cached_chunks():
        found, values = grid.round(chunk, dtype)
        if len(found) == len(weight):  # the only chunk: not copied
            codes, W_hat = found, values
        else:
            codes[chunk.rows], W_hat[chunk.rows] = found, values
    points = grid.zero_point if grid.codebook is None else grid.codebook
    assert points is not None
    # An op may not return its argument, which a given codebook may be.
    return W_hat, codes, grid.scale, points if codebook is None else points.clone()


def _fake(
    weight: Tensor,
    codebook: Tensor | None,
    scale_log2: Tensor | None,
    importance: Tensor | None,
    format: str,
    dtype: torch.dtype,
) -> Outputs:
    wanted = Format.parse(format)
    check_weight(weight)
    check_codebook(None if codebook is None else codebook.to(torch.float32), wanted)
    n, k = weight.shape
    scale = weight.new_empty((n, k // wanted.group_size_for(k)), dtype=wanted.stored_scale_dtype)
    points = (
        torch.empty_like(scale, dtype=wanted.stored_zero_point_dtype)
        if wanted.is_affine
        else weight.new_empty(1 << wanted.bits, dtype=torch.float32)
    )
    codes = weight.new_empty((n, k), dtype=torch.uint8)
    return weight.new_empty((n, k), dtype=dtype), codes, scale, points


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    weight, codebook, scale_log2, _, ctx.format, _ = inputs
    _, codes, scale, points = output
    ctx.mark_non_differentiable(codes, scale, points)
    ctx.dtypes = [None if t is None else t.dtype for t in (weight, codebook, scale_log2)]
    ctx.codebook_device = None if codebook is None else codebook.device
    _, needs_codebook, needs_scale, *_ = ctx.needs_input_grad
    if needs_scale:
        ctx.save_for_backward(codes, scale, points, weight)
    elif needs_codebook:
        ctx.save_for_backward(codes, scale)


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    needs_weight, needs_codebook, needs_scale, *_rest = ctx.needs_input_grad
    weight_dtype, codebook_dtype, scale_dtype = ctx.dtypes
    grad_codebook = grad_scale = None
    saved = ctx.saved_tensors  # once: activation checkpointing computes them at each access
    if needs_codebook:
        sums = _grad_codebook_op(grad, *saved[:2], ctx.format)
        grad_codebook = sums.to(ctx.codebook_device, codebook_dtype)
    if needs_scale:
        grad_scale = _grad_scale_op(grad, *saved, ctx.format).to(scale_dtype)
    grad_weight = grad.to(weight_dtype) if needs_weight else None
    return grad_weight, grad_codebook, grad_scale, None, None, None


def _run_grad_codebook(
    grad: Tensor,  # [n, k, floating]
    codes: Tensor,  # [n, k, uint8]
    scale: Tensor,
    format: str,
) -> Tensor:
    """Sums ``grad * scale`` over the weights of each code: ``[2^bits, float32]``."""
    count = 1 << Format.parse(format).bits
    if grad.device.type != "cpu":
        # Row by row first: all weights at once would queue for 2^bits addresses.
        scaled = grad.reshape(*scale.shape, -1).to(torch.float32) * decode_scale(scale)[..., None]
        by_row = scaled.new_zeros((len(grad), count))
        return by_row.scatter_add_(1, codes.to(torch.int64), scaled.view(grad.shape)).sum(0)
    sums = grad.new_zeros(count, dtype=torch.float32)
    for rows in _row_chunks(grad):
        groups = grad[rows].reshape(*scale[rows].shape, -1)  # [rows, k/G, G]
        scaled = groups.to(torch.float32) * decode_scale(scale[rows])[..., None]
        sums.index_add_(0, codes[rows].reshape(-1).to(torch.int32), scaled.reshape(-1))
    return sums


def _row_chunks(matrix: Tensor) -> list[slice]:
    n, k = matrix.shape
    step = rows_per_chunk(matrix.device, k, CACHED_CHUNK)
    return [slice(start, start + step) for start in range(0, n, step)]


def _fake_grad_codebook(grad: Tensor, codes: Tensor, scale: Tensor, format: str) -> Tensor:
    return grad.new_empty(1 << Format.parse(format).bits, dtype=torch.float32)


def _setup_grad_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, codes, scale, _ = inputs
    ctx.save_for_backward(codes, scale)
    ctx.dtype = grad.dtype


def _backward_grad(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
    """Gives each weight the gradient of its code's sum, times its scale."""
    codes, scale = ctx.saved_tensors
    scales = decode_scale(scale)[..., None]
    values = grad_sums.index_select(0, codes.reshape(-1).to(torch.int32))
    scaled = values.view(*scale.shape, -1) * scales
    return scaled.reshape(codes.shape).to(ctx.dtype), None, None, None


def _run_grad_scale(
    grad: Tensor,  # [n, k, floating]
    codes: Tensor,  # [n, k, uint8]
    scale: Tensor,  # [n, k/G]
    points: Tensor,
    weight: Tensor,  # [n, k]
    format: str,
) -> Tensor:
    """Computes the gradient of log2 of each scale, ``[n, k/G, float32]``."""
    wanted = Format.parse(format)
    codebook, zero_point = (None, points) if wanted.is_affine else (points, None)
    grid = Grid(wanted, scale, codebook, zero_point)
    result = torch.empty(scale.shape, dtype=torch.float32, device=scale.device)
    for rows in _row_chunks(grad):
        shape = *scale[rows].shape, -1
        ends = torch.stack([_end(grid, rows, code) for code in (0, (1 << wanted.bits) - 1)])
        low, high = ends.amin(0)[..., None], ends.amax(0)[..., None]
        value = weight[rows].to(torch.float32, copy=True).view(shape)
        change = grid.decode(codes[rows], rows, torch.float32).view(shape)
        change -= value.mul_((value >= low).logical_and_(value <= high))
        result[rows] = change.mul_(grad[rows].to(torch.float32).view(shape)).sum(-1)
    return result.mul_(math.log(2))


def _end(grid: Grid, rows: slice, code: int) -> Tensor:
    """Returns the value of one code in each group, ``[rows, k/G]``."""
    scale = decode_scale(grid.scale[rows])
    if grid.codebook is not None:
        return scale * grid.codebook[code]
    assert grid.zero_point is not None
    return scale * (code - grid.zero_point[rows].to(torch.float32))


def _fake_grad_scale(
    grad: Tensor, codes: Tensor, scale: Tensor, points: Tensor, weight: Tensor, format: str
) -> Tensor:
    return torch.empty_like(scale, dtype=torch.float32)


_library = Library("fdk_formats", "FRAGMENT")
_op = define_op(
    _library,
    "fake_quantise(Tensor weight, Tensor? codebook, Tensor? scale_log2, Tensor? importance,"
    " str format, ScalarType dtype)"
    " -> (Tensor W_hat, Tensor codes, Tensor scale, Tensor points)",
    run=_run,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_grad_codebook_op = define_op(
    _library,
    "fake_quantise_grad_codebook(Tensor grad, Tensor codes, Tensor scale, str format) -> Tensor",
    run=_run_grad_codebook,
    fake=_fake_grad_codebook,
    backward=_backward_grad,
    setup_context=_setup_grad_context,
)
_grad_scale_op = define_op(
    _library,
    "fake_quantise_grad_scale(Tensor grad, Tensor codes, Tensor scale, Tensor points,"
    " Tensor weight, str format) -> Tensor",
    run=_run_grad_scale,
    fake=_fake_grad_scale,
)

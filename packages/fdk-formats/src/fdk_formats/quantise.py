"""Quantising one weight: fit scales and codebook, encode, pack."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fdk_formats.compensate import Hessian, compensate
from fdk_formats.format import Format
from fdk_formats.packing import pack, packed_width
from fdk_formats.rotation import rotate
from fdk_formats.scales import Chunk, GroupedWeight, check_codebook, check_weight
from fdk_formats.tensor import QuantisedStack, QuantisedTensor


def quantise(
    weight: Tensor,
    format: Format | str,
    importance: Tensor | None = None,
    *,
    codebook: Tensor | None = None,
    weight_by_scale: bool = True,
    hessian: Hessian | Tensor | None = None,
    scale_log2: Tensor | None = None,
) -> QuantisedTensor:
    """Quantises a weight to the nearest values of a format, or for the least error of its outputs.

    A codebook format divides each group's statistic by the codebook's unit and rounds that to the
    scale dtype. With ``v = w / scale`` in float32, a code is the number of midpoints between
    distinct neighbouring codebook entries that are below v: ties go to the lower code, and the
    higher one of two equal entries is never used. An affine format is described at
    ``GroupedWeight.fit``. A group of zeros has scale 0 and dequantises to exact zeros.

    Args:
        weight: ``[n, k]``, floating, on any device. A chunk of rows at a time is held in float32.
        format: what to store, for example ``"kmeans4-g64"``.
        importance: ``[k]`` or ``[n, k]``, not negative: the weight of each squared error, such as
            a diagonal Fisher or the second moments of the inputs. Only ``kmeans`` and ``search``
            use it; other formats have nothing to choose. A rotated format uses its mean over each
            block of the rotation: that of rotated inputs if inputs are uncorrelated. A ``hessian``
            knows how they are correlated.
        codebook: ``[2^bits]`` ascending values in units of the scale: required for ``custom``,
            optional for ``kmeans`` (one fitted earlier, for training with a frozen codebook).
        weight_by_scale: True for a k-means that minimises the error of the weight; False for that
            of weight over scale, in which every group counts the same. ``search`` keeps the fit of
            least error of the weight either way.
        hessian: ``[k, k]``, the mean of ``x x^T`` over inputs x of the layer, or a ``Hessian`` that
            several weights of one input share. Scales are then searched, and codes chosen for the
            least mean square error of ``x @ W_hat.T`` (see ``compensate``): a code need not be the
            nearest. It replaces ``importance``. Of a given codebook only the values are used.
        scale_log2: ``[n, k/G]``, log2 of a factor on each scale of the rule, such as training
            learned (see ``prepare_qat``). Then no scale is searched for.

    Returns:
        The codes, scales and codebook or zero points, on the device of the weight.

    Raises:
        ValueError: if weight, importance or codebook do not fit the format or are not finite, a
            scale overflows its dtype, or the weight is on meta.
        TypeError: if an argument is not a tensor or has the wrong dtype.

    Example:
        >>> q = quantise(torch.randn(16, 128), "nf4-g64")
        >>> q.dequantise().shape
        torch.Size([16, 128])
    """
    format = Format.parse(format)
    if hessian is not None:
        if importance is not None:
            raise ValueError("quantise: wanted importance or hessian, got both")
        hessian = _checked_hessian(hessian, weight)
        if format.rotation is not None:
            format.group_size_for(weight.shape[1])
            weight = weight.detach()
            rotated = rotate(weight.to(torch.float32))
            Chunk(slice(0, len(weight)), rotated, None, unrotated=weight).check_finite(rotated)
            q = quantise(
                rotated,
                format.unrotated,
                codebook=codebook,
                weight_by_scale=weight_by_scale,
                hessian=hessian.rotated,
                scale_log2=scale_log2,
            )
            return replace(q, format=format)
        importance = hessian.diagonal
    grouped = GroupedWeight.of(weight, format, importance)
    grid = grouped.fit(
        checked_codebook(codebook, format, weight),
        weight_by_scale=weight_by_scale,
        search=hessian is not None,
        scale_log2=scale_log2,
    )
    n, k = weight.shape
    if hessian is not None:
        result = compensate(weight.detach().to(torch.float32), grid, hessian)
        grid, packed = result.grid, pack(result.codes, format.bits)
    else:
        packed = weight.new_empty((n, packed_width(format.bits, k)), dtype=torch.uint8)
        for chunk in grouped.chunks():
            packed[chunk.rows] = pack(grid.encode(chunk), format.bits)
    return QuantisedTensor(format, (n, k), packed, grid.scale, grid.codebook, grid.zero_point)


def check_stack_arguments(
    caller: str,
    shape: Sequence[int],
    format: Format,
    codebook: Tensor | None,
    importance: Tensor | None,
    scale_log2: Tensor | None = None,
) -> None:
    """Raises ValueError, which names the caller, if an argument does not fit the stack."""
    experts, n, k = shape
    if scale_log2 is not None:
        groups = [experts, n, k // format.group_size_for(k)]
        if list(scale_log2.shape) != groups:
            got = list(scale_log2.shape)
            raise ValueError(f"{caller}: scale_log2 must be {groups}, got {got}")
    wanted = (k,), (experts, k), (experts, n, k)
    if importance is not None and importance.shape not in wanted:
        raise ValueError(
            f"{caller}: importance must be [{k}], [{experts}, {k}] or [{experts}, {n}, {k}], "
            f"got {list(importance.shape)}"
        )
    if codebook is not None and codebook.ndim == 2 and len(codebook) != experts:
        raise ValueError(
            f"{caller}: codebook must be [{1 << format.bits}] or [{experts}, {1 << format.bits}], "
            f"got {list(codebook.shape)}"
        )


def of_expert(tensor: Tensor | None, expert: int) -> Tensor | None:
    """Returns an expert's own part of a tensor; all of one that experts share."""
    return tensor if tensor is None or tensor.ndim == 1 else tensor[expert]


def quantise_stack(
    weight: Tensor,
    format: Format | str,
    importance: Tensor | None = None,
    *,
    codebook: Tensor | None = None,
    shared_codebook: bool = False,
    hessians: Sequence[Hessian | Tensor | None] | None = None,
    weight_by_scale: bool = True,
    scale_log2: Tensor | None = None,
) -> QuantisedStack:
    """Quantises the experts of a mixture, each as ``quantise`` does.

    Args:
        weight: ``[experts, n, k]``, floating, on any device.
        format: what to store, for example ``"kmeans4-g64"``.
        importance: ``[k]`` for all experts, ``[experts, k]`` or ``[experts, n, k]``; see
            ``quantise``.
        codebook: ``[2^bits]`` for all experts, or ``[experts, 2^bits]``; see ``quantise``.
        shared_codebook: True to fit one codebook to all experts; by default each gets its own.
        hessians: one for each expert, None for an expert whose inputs were not seen; see
            ``quantise``. They replace ``importance``.
        weight_by_scale: see ``quantise``.
        scale_log2: ``[experts, n, k/G]``, see ``quantise``.

    Raises:
        ValueError: see ``quantise``; or if an argument does not fit the number of experts.
        TypeError: see ``quantise``.

    Example:
        >>> stack = quantise_stack(torch.randn(8, 16, 128), "nf4-g64")
        >>> stack.codebook.shape
        torch.Size([1, 16])
    """
    format = Format.parse(format)
    if not isinstance(weight, Tensor):
        raise TypeError(f"quantise_stack: weight must be a tensor, got {type(weight).__name__}")
    if weight.ndim != 3 or len(weight) == 0:
        raise ValueError(
            f"quantise_stack: weight must be [experts, n, k], got {list(weight.shape)}"
        )
    experts, n, k = weight.shape
    if hessians is not None and (len(hessians) != experts or importance is not None):
        raise ValueError(
            f"quantise_stack: wanted {experts} hessians and no importance, got {len(hessians)}"
            f"{'' if importance is None else ' and importance'}"
        )
    given = codebook, importance, scale_log2
    check_stack_arguments("quantise_stack", weight.shape, format, *given)
    if codebook is None and shared_codebook and format.is_fitted:
        rows = None
        if importance is not None:
            own = importance[:, None] if importance.ndim == 2 else importance
            rows = own.expand(experts, n, k).reshape(-1, k)
        flat = weight.reshape(-1, k)
        codebook = fit_codebook(flat, format, rows, weight_by_scale=weight_by_scale)

    return QuantisedStack.of(
        [
            quantise(
                weight[expert],
                format,
                of_expert(importance, expert),
                codebook=of_expert(codebook, expert),
                weight_by_scale=weight_by_scale,
                hessian=None if hessians is None else hessians[expert],
                scale_log2=of_expert(scale_log2, expert),
            )
            for expert in range(experts)
        ]
    )


def fit_codebook(
    weight: Tensor,
    format: Format | str,
    importance: Tensor | None = None,
    *,
    weight_by_scale: bool = True,
) -> Tensor:
    """Fits the codebook that ``quantise`` would use, without quantising.

    To train with a frozen codebook, pass it on: ``quantise(weight, format, codebook=...)``.

    Args:
        weight: see ``quantise``, as for the other arguments and errors.
        format: a codebook format; a named codebook is returned as it is.
        importance: see ``quantise``.
        weight_by_scale: see ``quantise``.

    Returns:
        ``[2^bits, float32]``, ascending.

    Raises:
        ValueError: for an affine format, which has no codebook.
    """
    format = Format.parse(format)
    grouped = GroupedWeight.of(weight, format, importance)
    if format.is_affine:
        raise ValueError(f"fit_codebook: {format} has no codebook")
    check_codebook(None, format)
    codebook = grouped.fit(weight_by_scale=weight_by_scale).codebook
    assert codebook is not None
    return codebook


def checked_codebook(
    codebook: Tensor | None, format: Format, weight: Tensor, *, reads_values: bool = True
) -> Tensor | None:
    """Returns the caller's codebook as float32 on the weight's device, checked."""
    check_codebook(codebook, format)
    if codebook is None:
        return None
    codebook = codebook.detach().to(weight.device, torch.float32)
    if not reads_values:
        return codebook
    if not torch.isfinite(codebook).all() or (codebook.diff() < 0).any():
        raise ValueError(
            f"quantise: codebook must be finite and ascending, got {codebook.tolist()[:8]}..."
        )
    return codebook


def _checked_hessian(hessian: Hessian | Tensor, weight: Tensor) -> Hessian:
    check_weight(weight)
    hessian = hessian if isinstance(hessian, Hessian) else Hessian(hessian)
    if len(hessian.matrix) != weight.shape[1]:
        raise ValueError(
            f"quantise: hessian must be [{weight.shape[1]}, {weight.shape[1]}], "
            f"got {list(hessian.matrix.shape)}"
        )
    return hessian.to(weight.device)

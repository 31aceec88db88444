"""Quantising a weight: scales from its groups, a codebook, and the nearest code of every weight."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fdk_formats.affine import quantise_affine
from fdk_formats.codebooks import TABLES, named_codebook
from fdk_formats.encode import Nearest
from fdk_formats.format import Format
from fdk_formats.groups import GroupedWeight, check_finite, group_weight
from fdk_formats.histogram import weighted_points
from fdk_formats.kmeans import mirrored, optimal_centroids
from fdk_formats.packing import pack, packed_width
from fdk_formats.scales import SCALE_DTYPES, decode_scale, divide, encode_scale, statistic
from fdk_formats.search import search_scales
from fdk_formats.tensor import QuantisedTensor

# With `search` and `kmeans`, how often at most scales and codebook are fitted to each other.
SEARCH_ROUNDS = 3


def quantise(
    weight: Tensor,
    format: Format | str,
    importance: Tensor | None = None,
    *,
    codebook: Tensor | None = None,
    weight_by_scale: bool = True,
) -> QuantisedTensor:
    """Quantises ``weight :: [n, k, floating]`` to the nearest values of a format.

    The scale of a group is its statistic over the unit of the codebook, rounded to the format's
    scale dtype; with ``v = w / scale``, one float32 division by the rounded scale, the code is the
    number of midpoints ``(c[j] + c) / 2`` (float32; c is the next entry that is greater than c[j])
    below v, so that a tie goes to the lower code, and never to the higher one of equal entries. A
    group of zeros has scale 0 and comes back as exact zeros.

    Args:
        weight: on any device; a chunk of it at a time is held in float32.
        format: what to store, for example ``"kmeans4-g64"``.
        importance: ``[k]`` or ``[n, k]``, not negative: how much the squared error of a weight
            counts (a diagonal Fisher, or the second moments of the inputs). The k-means and
            ``search`` use it; the other formats leave no choice to weigh.
        codebook: ``[2^b]`` ascending values in units of the scale: that of ``custom``, or one
            fitted before for ``kmeans`` (frozen during training).
        weight_by_scale: whether the k-means minimises the error of the weight itself, or, if
            False, that of weight over scale, in which every group counts the same.
            Of several fits ``search`` keeps the one of least error of the weight itself.

    Raises:
        ValueError: where weight, importance or codebook do not fit the format or are not finite,
            or a scale overflows its dtype, or where the weight is on meta.
        TypeError: for tensors of a wrong dtype, and what is no tensor.
    """
    format = Format.parse(format)
    source = group_weight(weight, format, importance)
    given = _check_codebook(codebook, format, source)
    if format.is_affine:
        return quantise_affine(source, format)
    fitted, scale = _fit(source, format, given, weight_by_scale)
    return QuantisedTensor(
        format=format,
        shape=(weight.shape[0], weight.shape[1]),
        packed=_pack_nearest(source, format, fitted, scale),
        scale=scale,
        codebook=fitted,
    )


def fit_codebook(
    weight: Tensor,
    format: Format | str,
    importance: Tensor | None = None,
    *,
    weight_by_scale: bool = True,
) -> Tensor:
    """The codebook ``[2^b, float32]`` that ``quantise`` would use: fitted for ``kmeans``.

    Arguments and errors are those of ``quantise``. To train with a frozen codebook, hand it back:
    ``quantise(weight, format, codebook=...)``.
    """
    format = Format.parse(format)
    source = group_weight(weight, format, importance)
    if format.is_affine:
        raise ValueError(f"fit_codebook: {format} has no codebook")
    return _fit(source, format, _check_codebook(None, format, source), weight_by_scale)[0]


def _check_codebook(
    codebook: Tensor | None, format: Format, source: GroupedWeight
) -> Tensor | None:
    """The caller's codebook as float32, checked against the format."""
    check_fits(codebook, format)
    if codebook is None:
        return None
    codebook = codebook.detach().to(source.weight.device, torch.float32)
    if not torch.isfinite(codebook).all() or (codebook.diff() < 0).any():
        raise ValueError(
            f"quantise: codebook must be finite and ascending, got {codebook.tolist()[:8]}..."
        )
    return codebook


def check_fits(codebook: Tensor | None, format: Format) -> None:
    """Raises TypeError or ValueError for a codebook, or none, that a format does not take.

    Values are not looked at: there may be none, on meta.
    """
    if codebook is None:
        if format.codebook == "custom":
            raise ValueError(f"quantise: {format} needs codebook=, {1 << format.bits} values")
        return
    if format.codebook not in ("custom", "kmeans"):
        raise ValueError(f"quantise: {format} takes no codebook, only custom and kmeans do")
    if not isinstance(codebook, Tensor) or not codebook.dtype.is_floating_point:
        got = codebook.dtype if isinstance(codebook, Tensor) else type(codebook).__name__
        raise TypeError(f"quantise: codebook must be a floating tensor, got {got}")
    if tuple(codebook.shape) != (1 << format.bits,):
        raise ValueError(
            f"quantise: codebook of {format} must be [{1 << format.bits}], "
            f"got {list(codebook.shape)}"
        )


def _fit(
    source: GroupedWeight, format: Format, codebook: Tensor | None, weight_by_scale: bool
) -> tuple[Tensor, Tensor]:
    """The codebook and the stored scales ``[n, k/G]``."""
    searching = format.scale_rule == "search"
    unit = 1.0
    fitted = codebook is None and format.codebook == "kmeans"
    if codebook is None and not fitted:
        named = named_codebook(format, source.weight.shape[1])
        codebook, unit = named.tensor(source.weight.device), named.unit
    scale = _statistic_scales(source, format, unit)
    if fitted and searching:
        return _fit_searching(source, format, scale, weight_by_scale)
    if fitted:
        codebook = _fit_kmeans(source, format, scale, weight_by_scale)
    assert codebook is not None
    if searching:
        scale, _ = search_scales(source, format, codebook, unit, scale)
    return codebook, scale


def _fit_searching(
    source: GroupedWeight, format: Format, start: Tensor, weight_by_scale: bool
) -> tuple[Tensor, Tensor]:
    """Codebook and scales fitted to each other, the best pair of all that were met.

    The uniform grid is one of the two codebooks to begin with: a k-means at the scales of ``start``
    and then a search is in some cases worse than a search for the grid (by up to 1.4 %).
    """

    def searched(codebook: Tensor, scale: Tensor) -> tuple[float, Tensor, Tensor]:
        found, error = search_scales(source, format, codebook, 1.0, scale)
        return error, codebook, found

    uniform = torch.tensor(TABLES["uniform"](format.bits), dtype=torch.float32, device=start.device)
    first = _fit_kmeans(source, format, start, weight_by_scale)
    error, codebook, scale = min(
        searched(first, start), searched(uniform, start), key=lambda fit: fit[0]
    )
    for _ in range(SEARCH_ROUNDS):
        refitted = searched(_fit_kmeans(source, format, scale, weight_by_scale), scale)
        if refitted[0] >= error:
            break
        error, codebook, scale = refitted
    return codebook, scale


def _statistic_scales(source: GroupedWeight, format: Format, unit: float) -> Tensor:
    """Scales from each group alone; ``search`` starts from the largest magnitude."""
    rule = "absmax" if format.scale_rule == "search" else str(format.scale_rule)
    dtype = SCALE_DTYPES[format.scale_dtype]
    scale = torch.empty(source.shape, dtype=dtype, device=source.weight.device)
    for chunk in source.chunks():
        value = statistic(chunk.groups, rule)
        check_finite(chunk, value)
        scale[chunk.rows] = encode_scale(
            value / unit, format.scale_dtype, round_up=rule == "absmax"
        )
    return scale


def _fit_kmeans(
    source: GroupedWeight, format: Format, scale: Tensor, weight_by_scale: bool
) -> Tensor:
    """The k-means codebook of weight over scale, on the device of the weight."""

    def samples() -> Iterator[tuple[Tensor, Tensor]]:
        for chunk in source.chunks():
            decoded = decode_scale(scale[chunk.rows])
            mass = decoded.to(torch.float64).square() if weight_by_scale else decoded != 0
            mass = mass.to(torch.float64)[..., None].expand(chunk.groups.shape)
            if chunk.importance is not None:
                mass = mass * chunk.importance
            yield divide(chunk.groups, decoded[..., None]), mass.contiguous()

    peak = max((value.abs().max().item() for value, _ in samples()), default=0.0)
    guess = np.array(TABLES["uniform"](format.bits))
    points = weighted_points(samples, peak)
    centroids = optimal_centroids(points, 1 << format.bits, guess)
    if format.bits == 1:
        centroids = mirrored(points, centroids)
    return torch.from_numpy(centroids.astype(np.float32)).to(scale.device)


def _pack_nearest(source: GroupedWeight, format: Format, codebook: Tensor, scale: Tensor) -> Tensor:
    n, k = source.weight.shape
    nearest = Nearest(codebook)
    packed = torch.empty(
        (n, packed_width(format.bits, k)), dtype=torch.uint8, device=source.weight.device
    )
    for chunk in source.chunks():
        value = divide(chunk.groups, decode_scale(scale[chunk.rows])[..., None])
        packed[chunk.rows] = pack(nearest.codes(value).flatten(1), format.bits)
    return packed

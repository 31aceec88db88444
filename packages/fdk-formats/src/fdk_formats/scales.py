"""Scales: how the value that a group of weights shares is chosen and stored.

``GroupedWeight`` is a weight cut into groups of G neighbours along k. It owns the rules of its
format: ``fit`` chooses the scale of every group and the zero points or the codebook that go with
them. The result is a ``Grid``, which encodes the weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fdk_formats.codebooks import named_codebook, uniform_values
from fdk_formats.encode import CodebookEncoder, affine_codes, divide, weighted_sum
from fdk_formats.format import SCALE_DTYPES, Format
from fdk_formats.kmeans import Samples, fit_centroids, refit_centroids
from fdk_formats.packing import rows_per_chunk
from fdk_formats.rotation import rotate, rotated_importance
from fdk_formats.rounding import rounding_kernels_for

# The mantissa bits of sqrt(2) in float32: a larger mantissa is nearer, in log, to the next power.
SQRT2_MANTISSA = 0x3504F3

# ``search`` tries scales that map a little more than the largest magnitude to the end of the grid,
# down to CLIP times the rms (the optimum at 1 bit), then refits by least squares.
CANDIDATES = 8
WIDEN = 1.1
CLIP = 0.7
CODEBOOK_REFITS = 2
AFFINE_REFITS = 4
# ``search`` with k-means refits scales and codebook in turn, at most this often.
ROUNDS = 3
# They do so on about this many weights, rows at equal distances; then once on all of them.
SAMPLE = 1 << 16
# Weights in work at once on a CPU: what is computed of them then stays in the L2 cache.
CACHED_CHUNK = 1 << 16

# The largest float zero point. A group far from zero, or of one value, gets a wider scale instead:
# beyond 2^8 a bf16 zero point cannot resolve one code.
ZERO_POINT_LIMITS = {"bf16": 2.0**8, "e8m0": 2.0**8, "fp16": 2.0**8, "fp32": 2.0**16}


# Storage


def decode_scale(scale: Tensor) -> Tensor:
    """Decodes stored scales, or float zero points, to float32.

    A uint8 scale is e8m0, the exponent field of a float32: byte e is 2^(e - 127). Byte 0 is an
    exact zero, which an all-zero group needs; the OCP microscaling format has 2^-127 there.
    """
    if scale.dtype == torch.uint8:
        return (scale.to(torch.int32) << 23).view(torch.float32)
    return scale.to(torch.float32)


def decode(
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Computes the values of codes; see ``QuantisedTensor.dequantise``.

    Args:
        codes: ``[rows, k/G, G, uint8]``.
        scale: as stored, ``[rows, k/G]``.
        codebook: ``[2^bits, float32]``, or None for an affine format.
        zero_point: as stored, ``[rows, k/G]``, for an affine format.
        dtype: of the result.

    Returns:
        ``[rows, k, dtype]``.
    """
    if codebook is not None:
        table = codebook.to(dtype).to(torch.float32)
        values = table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
    else:
        assert zero_point is not None
        values = codes.to(torch.float32).sub_(zero_point.to(torch.float32)[..., None])
    return values.mul_(decode_scale(scale)[..., None]).flatten(1).to(dtype)


def encode_scale(
    scale: Tensor, scale_dtype: str, *, round_up: bool = False, is_checked: bool = True
) -> Tensor:
    """Encodes float32 scales as ``scale_dtype``; ``decode_scale`` gives the rounded values.

    Args:
        scale: any shape, float32.
        scale_dtype: ``bf16``, ``fp16`` and ``fp32`` round to nearest, ties to even. ``e8m0``
            rounds to the power of two that is nearest in log; nonzero scales below 2^-126 become
            2^-126.
        round_up: with ``e8m0``, round to the next power of two, so that no weight is clipped.
        is_checked: False to store one that is not finite where a scale is NaN or too large.

    Returns:
        The stored scales in ``SCALE_DTYPES[scale_dtype]``.

    Raises:
        ValueError: if a scale is too large for its dtype, or negative for e8m0.
    """
    assert scale.dtype == torch.float32
    is_e8m0 = scale_dtype == "e8m0"
    if is_e8m0 and is_checked and (scale < 0).any():
        raise ValueError(f"scale: e8m0 holds no sign, got {scale.min().item():g}")
    stored = _encode_e8m0(scale, round_up) if is_e8m0 else scale.to(SCALE_DTYPES[scale_dtype])
    if not is_checked:
        return stored
    overflows = stored == 255 if is_e8m0 else ~torch.isfinite(stored)
    if overflows.any():
        raise ValueError(
            f"scale: {scale_dtype} holds up to {largest_scale(scale_dtype):g}, "
            f"got {scale[overflows][0].item():g}"
        )
    return stored


def _encode_e8m0(scale: Tensor, round_up: bool) -> Tensor:
    """Returns exponents, uint8; 255 for NaN and for a scale that is too large."""
    word = scale.view(torch.int32)
    exponent, mantissa = word >> 23, word & 0x7FFFFF
    exponent = exponent + (mantissa > (0 if round_up else SQRT2_MANTISSA))
    return torch.where(scale == 0, 0, exponent.clamp(1, 255)).to(torch.uint8)


def largest_scale(scale_dtype: str) -> float:
    """Returns the largest scale that a dtype holds."""
    return 2.0**127 if scale_dtype == "e8m0" else torch.finfo(SCALE_DTYPES[scale_dtype]).max


# Statistics


def statistic(groups: Tensor, rule: str) -> Tensor:
    """Computes the statistic of each group that a scale rule names.

    ``absmax`` is the largest magnitude. ``signmax`` is the value of largest magnitude with its
    sign, the positive one of a tie. ``absmean`` and ``rms`` are the mean magnitude and the root
    mean square, summed in float64 and rounded once: another order of the sum (other threads,
    another device) changes the last bit at most, and only where float64 itself rounds.

    Args:
        groups: ``[..., G, float32]``.
        rule: ``absmax``, ``signmax``, ``absmean`` or ``rms``.

    Returns:
        ``[..., float32]``.
    """
    if rule == "absmax":
        if groups.device.type != "cpu":
            return groups.abs().amax(-1)
        # Without a copy of the magnitudes; abs of the result, because -0 is not 0.
        return torch.maximum(-groups.amin(-1), groups.amax(-1)).abs()
    if rule == "signmax":
        lo, hi = groups.amin(-1), groups.amax(-1)
        return torch.where(hi >= -lo, hi, lo)
    size = groups.shape[-1]
    if rule == "absmean":
        return (groups.abs().sum(-1, dtype=torch.float64) / size).to(torch.float32)
    assert rule == "rms"
    return (groups.to(torch.float64).square().sum(-1) / size).sqrt().to(torch.float32)


def _clip_candidates(groups: Tensor, bits: int) -> list[Tensor]:
    """Returns a geometric series of magnitudes to map to the end of the grid, per group.

    More bits clip less: the series ends at the square root of its range at 4 bits.
    """
    top, low = statistic(groups, "absmax") * WIDEN, statistic(groups, "rms") * CLIP
    top = top.clamp(max=torch.finfo(torch.float32).max)
    ratio = divide(low, top) ** min(1.0, 2 / bits)
    return [top * ratio ** (i / (CANDIDATES - 1)) for i in range(CANDIDATES)]


# The weight


@dataclass(frozen=True)
class Chunk:
    """Some rows of a weight.

    Attributes:
        rows: their place in the weight.
        groups: ``[rows, k/G, G, float32]``.
        importance: ``[1 or rows, k/G, G, float64]``, or None for all ones.
        is_checked: whether ``check_finite`` reads values.
        unrotated: the rows as they were given, ``[rows, k]``, if they were rotated.
    """

    rows: slice
    groups: Tensor
    importance: Tensor | None
    is_checked: bool = True
    unrotated: Tensor | None = None

    def check_finite(self, per_group: Tensor) -> None:
        """Raises ValueError naming the first NaN or infinity, if a statistic of a group shows one.

        Args:
            per_group: a statistic that any NaN or infinity in the group reaches, ``[rows, k/G]``.
        """
        if not self.is_checked or torch.isfinite(per_group).all():
            return
        flat = self.groups.flatten(1)  # [rows, k]
        if self.unrotated is not None and not torch.isfinite(self.unrotated).all():
            flat = self.unrotated  # a rotation spreads what is not finite, and may overflow
        row, column = (~torch.isfinite(flat)).nonzero()[0].tolist()
        raise ValueError(
            f"quantise: weight must be finite in float32, got {flat[row, column].item()} "
            f"at row {self.rows.start + row}, column {column}"
        )


@dataclass(frozen=True)
class GroupedWeight:
    """A checked weight ``[n, k]`` in groups that share a scale.

    The weight of a rotated format is rotated where its chunks are made; its importance is that of
    the rotated one.

    Only one chunk of rows at a time is converted to float32, so that the extra memory of
    quantising does not grow with the weight. Made by ``GroupedWeight.of``.
    """

    weight: Tensor
    format: Format
    group_size: int
    importance: Tensor | None = None
    # Chunks divide by it: squared gradients would underflow float32.
    importance_peak: float = 1.0
    is_checked: bool = True

    @classmethod
    def of(
        cls,
        weight: Tensor,
        format: Format,
        importance: Tensor | None = None,
        *,
        is_checked: bool = True,
    ) -> "GroupedWeight":
        """Checks a weight and its importance against a format.

        Args:
            weight: ``[n, k]``.
            format: its format.
            importance: see ``quantise``.
            is_checked: False to let ``fit`` go on with a weight or scales that are not finite,
                which give values that are not finite. Checks wait for the device of the weight.

        Raises:
            ValueError: if the weight is not ``[n, k]``, k does not fit the group size or the
                weight is on meta; if the importance has another shape or device, is negative or
                is zero everywhere.
            TypeError: if either is not a tensor of real numbers, or the weight not floating.
        """
        check_weight(weight)
        if weight.is_meta:
            raise ValueError("quantise: weight needs values, got a tensor on meta")
        weight = weight.detach()
        group_size = format.group_size_for(weight.shape[1])
        if importance is None:
            return cls(weight, format, group_size, is_checked=is_checked)
        if not isinstance(importance, Tensor):
            got = type(importance).__name__
            raise TypeError(f"quantise: importance must be a tensor, got {got}")
        importance, peak = checked_importance(importance.detach(), weight, format)
        return cls(weight, format, group_size, importance, peak, is_checked)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and groups in a row: the shape of the scales."""
        n, k = self.weight.shape
        return n, k // self.group_size

    def chunks(self, on_cpu: int | None = None) -> Iterator[Chunk]:
        """Yields the rows in order; see ``rows_per_chunk``."""
        n, k = self.weight.shape
        step = rows_per_chunk(self.weight.device, k, on_cpu)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            own, unrotated = self.weight[rows], None
            if self.format.rotation is not None:
                own, unrotated = rotate(own.to(torch.float32)), own
            groups, importance = self._grouped(own), self._importance_of(rows)
            yield Chunk(rows, groups, importance, self.is_checked, unrotated)

    def _importance_of(self, rows: slice) -> Tensor | None:
        if self.importance is None:
            return None
        part = self.importance[rows] if self.importance.ndim == 2 else self.importance[None]
        return self._grouped(part.to(torch.float64) / self.importance_peak)

    def _grouped(self, rows: Tensor) -> Tensor:
        return rows.to(torch.float32).contiguous().view(len(rows), -1, self.group_size)

    def fit(
        self,
        codebook: Tensor | None = None,
        *,
        weight_by_scale: bool = True,
        search: bool = False,
        scale_log2: Tensor | None = None,
    ) -> "Grid":
        """Chooses scales and zero points or codebook, by the format's scale rule.

        Args:
            codebook: ``[2^bits, float32]`` to use as it is, for ``custom`` and ``kmeans``.
            weight_by_scale: see ``quantise``.
            search: search for scales whatever the rule, from those that it gives.
            scale_log2: see ``quantise``; the rule ``search`` is then not searched for.

        Raises:
            ValueError: if the weight is not finite, or a scale overflows its dtype.
        """
        factor = self._factor(scale_log2)
        is_searched = search or (self.format.scale_rule == "search" and factor is None)
        if self.format.is_affine:
            return self._fit_affine(is_searched, factor)
        unit = 1.0
        if codebook is None and not self.format.is_fitted:
            named = named_codebook(self.format, self.weight.shape[1])
            codebook, unit = named.tensor(self.weight.device), named.unit
        scale = self._statistic_scales(unit, factor)
        if codebook is None and is_searched:
            codebook, scale = self._search_codebook(scale, weight_by_scale)
        elif codebook is None:
            codebook = self._kmeans(scale, weight_by_scale)
        elif is_searched:
            scale, _ = self._search_scales(codebook, unit, scale)
        return Grid(self.format, scale, codebook=codebook)

    def refit(self, codebook: Tensor, scale_log2: Tensor | None = None) -> Tensor:
        """Refits a k-means codebook from where it is, for scales by the rule.

        Args:
            codebook: ``[2^bits, float32]``, ascending.
            scale_log2: see ``quantise``.

        Returns:
            ``[2^bits, float32]``, ascending.
        """
        grid = self.fit(codebook, scale_log2=scale_log2)
        return self._refit(codebook, grid.scale, True)

    def searched_log2(self, codebook: Tensor | None) -> Tensor:
        """Searches for scales; returns log2 of each over that of the rule: ``[n, k/G, float32]``.

        Args:
            codebook: see ``fit``; not fitted here.
        """
        rule = self.fit(codebook, scale_log2=torch.zeros(self.shape, device=self.weight.device))
        found = decode_scale(self.fit(codebook, search=True).scale)
        ratio = divide(found, decode_scale(rule.scale))
        return torch.where(ratio > 0, ratio.log2(), 0.0)

    def _factor(self, scale_log2: Tensor | None) -> Tensor | None:
        if scale_log2 is None:
            return None
        if tuple(scale_log2.shape) != self.shape or scale_log2.device != self.weight.device:
            raise ValueError(
                f"quantise: scale_log2 must be {list(self.shape)} on {self.weight.device}, "
                f"got {list(scale_log2.shape)} on {scale_log2.device}"
            )
        return scale_log2.detach().to(torch.float32).exp2()

    def _statistic_scales(self, unit: float, factor: Tensor | None) -> Tensor:
        """Computes scales from each group's statistic; ``search`` starts from the absmax."""
        rule = "absmax" if self.format.scale_rule == "search" else str(self.format.scale_rule)
        stored = self.format.stored_scale_dtype
        scale = torch.empty(self.shape, dtype=stored, device=self.weight.device)
        for chunk in self.cached_chunks():
            value = statistic(chunk.groups, rule)
            chunk.check_finite(value)
            value = value / unit
            if factor is not None:
                value = value * factor[chunk.rows]
            scale[chunk.rows] = encode_scale(
                value,
                self.format.scale_dtype,
                round_up=rule == "absmax",
                is_checked=self.is_checked,
            )
        return scale

    def _kmeans(self, scale: Tensor, weight_by_scale: bool) -> Tensor:
        """Fits a codebook to weight over scale; see ``kmeans.fit_centroids``."""
        samples = self._samples(scale, weight_by_scale)
        return fit_centroids(samples, uniform_values(self.format.bits)).to(scale.device)

    def _refit(self, codebook: Tensor, scale: Tensor, weight_by_scale: bool) -> Tensor:
        """Refits a codebook from where it is; see ``kmeans.refit_centroids``."""
        samples = self._samples(scale, weight_by_scale)
        return refit_centroids(samples, codebook).to(codebook.device)

    def _samples(self, scale: Tensor, weight_by_scale: bool) -> Samples:
        """Returns what yields weight over scale, and the mass of each in a k-means."""

        def samples() -> Iterator[tuple[Tensor, Tensor]]:
            for chunk in self.chunks():
                decoded = decode_scale(scale[chunk.rows])
                mass = decoded.to(torch.float64).square() if weight_by_scale else decoded != 0
                mass = mass.to(torch.float64)[..., None].expand(chunk.groups.shape)
                if chunk.importance is not None:
                    mass = mass * chunk.importance
                yield divide(chunk.groups, decoded[..., None]), mass.contiguous()

        return samples

    def _search_scales(
        self, codebook: Tensor, unit: float, start: Tensor, *, only_refit: bool = False
    ) -> tuple[Tensor, float]:
        """Lowers the squared error of scales, group by group; returns them and the error left.

        Each group tries a geometric series of scales (unless ``only_refit``), then the
        least-squares scale for the codes of the best so far, a few times. A candidate is rounded
        to its stored dtype before it is judged. The error is summed over the whole weight,
        weighted by importance.
        """
        best, encoder, error = start.clone(), CodebookEncoder(codebook), 0.0
        for chunk in self.cached_chunks():
            fit = _CodebookFit(chunk, self.format, encoder)
            best[chunk.rows], group_errors = fit.search(start[chunk.rows], unit, only_refit)
            error += fit.absolute(group_errors)
        return best, error

    def cached_chunks(self) -> Iterator[Chunk]:
        """Yields the rows in order, as many as fit in the cache of a CPU at a time."""
        device = self.weight.device
        # Kernels make no temporaries.
        is_cached = device.type == "cpu" and (
            self.format.is_affine or rounding_kernels_for(device, 1 << self.format.bits) is None
        )
        return self.chunks(CACHED_CHUNK if is_cached else None)

    def _search_codebook(self, start: Tensor, weight_by_scale: bool) -> tuple[Tensor, Tensor]:
        """Fits codebook and scales to each other; returns the pair of least error.

        The uniform grid is tried too: a k-means at the starting scales followed by a search can be
        worse than a search for the uniform grid, by up to 1.4 % of the error.
        """
        stride = max(1, self.weight.numel() // SAMPLE)
        sample = self._every(stride)
        codebook, scale = sample._alternate(start[::stride], weight_by_scale)
        if stride == 1:
            return codebook, scale
        scale, error = self._search_scales(codebook, 1.0, start)
        refitted = self._refit(codebook, scale, weight_by_scale)
        better, refitted_error = self._search_scales(refitted, 1.0, scale, only_refit=True)
        return (refitted, better) if refitted_error < error else (codebook, scale)

    def _every(self, stride: int) -> "GroupedWeight":
        """Returns every stride-th row."""
        importance = self.importance
        if importance is not None and importance.ndim == 2:
            importance = importance[::stride]
        return replace(self, weight=self.weight[::stride], importance=importance)

    def _alternate(self, start: Tensor, weight_by_scale: bool) -> tuple[Tensor, Tensor]:
        values = uniform_values(self.format.bits)
        uniform = torch.tensor(values, dtype=torch.float32, device=start.device)
        codebook = self._kmeans(start, weight_by_scale)
        scale, error = self._search_scales(codebook, 1.0, start)
        other, other_error = self._search_scales(uniform, 1.0, start)
        if other_error < error:
            codebook, scale, error = uniform, other, other_error
        for _ in range(ROUNDS):
            refitted = self._refit(codebook, scale, weight_by_scale)
            better, refitted_error = self._search_scales(refitted, 1.0, scale, only_refit=True)
            if refitted_error >= error:
                break
            codebook, scale, error = refitted, better, refitted_error
        return codebook, scale

    def _fit_affine(self, search: bool, factor: Tensor | None) -> "Grid":
        """Chooses scale and zero point of each group from its range.

        ``minmax``: scale = (hi - lo) / (2^b - 1), rounded to its dtype; zero point = -lo / scale,
        rounded to its own. Integer zero points need a range that includes zero and widen it. Float
        zero points, as in HQQ (Badri and Shaji 2023), use the range as it is. ``search`` also
        tries narrower ranges and least-squares refits, and keeps the best.
        """
        device = self.weight.device
        scale = torch.empty(self.shape, dtype=self.format.stored_scale_dtype, device=device)
        zero = torch.empty(self.shape, dtype=self.format.stored_zero_point_dtype, device=device)
        for chunk in self.chunks():
            fit = _AffineFit(chunk, self.format)
            if factor is not None:
                fit.narrow(factor[chunk.rows])
            grid = fit.search() if search else fit.minmax()
            scale[chunk.rows], zero[chunk.rows] = grid
        return Grid(self.format, scale, zero_point=zero)


@dataclass(frozen=True)
class Grid:
    """The values that the codes of a weight stand for.

    scale      :: [n, k/G, stored dtype]           see ``decode_scale``
    codebook   :: [2^bits, float32] or None        codebook formats
    zero_point :: [n, k/G, stored dtype] or None   affine formats
    """

    format: Format
    scale: Tensor
    codebook: Tensor | None = None
    zero_point: Tensor | None = None

    def encode(self, chunk: Chunk) -> Tensor:
        """Returns the codes of some rows of the weight, ``[rows, k, uint8]``."""
        scale = decode_scale(self.scale[chunk.rows])
        if self.zero_point is None:
            codes = self._encoder.codes(divide(chunk.groups, scale[..., None]))
        else:
            zero = self.zero_point[chunk.rows].to(torch.float32)
            codes = affine_codes(chunk.groups, scale, zero, self.format.bits)
        return codes.flatten(1)

    def round(self, chunk: Chunk, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Encodes and decodes some rows: codes ``[rows, k, uint8]`` and values, in ``dtype``."""
        if self.codebook is None:
            codes = self.encode(chunk)
            return codes, self.decode(codes, chunk.rows, dtype)
        codes, values = self._encoder.round(
            chunk.groups, decode_scale(self.scale[chunk.rows]), dtype
        )
        return codes.flatten(1), values.flatten(1).to(dtype)

    def decode(self, codes: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """Returns the values of the codes of some rows, ``[rows, k, dtype]``."""
        zero = None if self.zero_point is None else self.zero_point[rows]
        grouped = codes.view(*self.scale[rows].shape, -1)
        return decode(grouped, self.scale[rows], self.codebook, zero, dtype)

    @cached_property
    def _encoder(self) -> CodebookEncoder:
        assert self.codebook is not None
        return CodebookEncoder(self.codebook)


def check_weight(weight: Tensor) -> None:
    """Raises TypeError or ValueError unless ``weight`` is floating ``[n, k]``; reads no values."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"quantise: weight must be a tensor, got {type(weight).__name__}")
    if not weight.dtype.is_floating_point:
        raise TypeError(f"quantise: weight must be floating, got {weight.dtype}")
    if weight.ndim != 2:
        raise ValueError(f"quantise: weight must be [n, k], got {list(weight.shape)}")


def check_codebook(codebook: Tensor | None, format: Format) -> None:
    """Raises TypeError or ValueError if a format does not accept a codebook, or needs one.

    Reads no values: a codebook on meta has none.
    """
    if codebook is None:
        if format.needs_codebook:
            raise ValueError(f"quantise: {format} needs codebook=, {1 << format.bits} values")
        return
    if not format.accepts_codebook:
        raise ValueError(f"quantise: {format} takes no codebook, only custom and kmeans do")
    if not isinstance(codebook, Tensor) or not codebook.dtype.is_floating_point:
        got = codebook.dtype if isinstance(codebook, Tensor) else type(codebook).__name__
        raise TypeError(f"quantise: codebook must be a floating tensor, got {got}")
    if tuple(codebook.shape) != (1 << format.bits,):
        raise ValueError(
            f"quantise: codebook of {format} must be [{1 << format.bits}], "
            f"got {list(codebook.shape)}"
        )


def checked_importance(importance: Tensor, weight: Tensor, format: Format) -> tuple[Tensor, float]:
    """Checks an importance, and returns that of the weight as it is stored, with its largest value.

    Args:
        importance: ``[k]`` or ``[n, k]``.
        weight: ``[n, k]``.
        format: format of the weight; the importance of rotated weights is another one.

    Raises:
        ValueError: see ``GroupedWeight.of``.
        TypeError: see ``GroupedWeight.of``.
    """
    n, k = weight.shape
    if tuple(importance.shape) not in ((k,), (n, k)):
        raise ValueError(
            f"quantise: importance must be [{k}] or [{n}, {k}], got {list(importance.shape)}"
        )
    if importance.device != weight.device:
        raise ValueError(
            f"quantise: importance must be on {weight.device}, got {importance.device}"
        )
    if importance.dtype.is_complex or importance.dtype == torch.bool:
        raise TypeError(f"quantise: importance must be real numbers, got {importance.dtype}")
    if importance.numel() == 0:
        return importance, 1.0
    lo, hi = (value.item() for value in torch.aminmax(importance))
    if not (lo >= 0 and hi < torch.inf):  # false for NaN too
        raise ValueError(
            f"quantise: importance must be finite and not negative, got {lo:g} to {hi:g}"
        )
    if hi == 0:
        raise ValueError("quantise: importance must be positive somewhere, got all zeros")
    if format.rotation is not None:
        importance = rotated_importance(importance)
        hi = importance.max().item()
    return importance, float(hi)


# Fits to the groups of one chunk. Values and errors are relative to each group's largest magnitude,
# so that squares neither overflow nor underflow float32.


class _CodebookFit:
    """Scales of least squared error for a codebook."""

    def __init__(self, chunk: Chunk, format: Format, encoder: CodebookEncoder) -> None:
        self.groups, self.importance = chunk.groups, chunk.importance
        if self.importance is not None:
            self.importance = self.importance.to(torch.float32)
        self.scale_dtype, self.bits, self.encoder = format.scale_dtype, format.bits, encoder
        self.peak = statistic(chunk.groups, "absmax")
        self.value = divide(chunk.groups, self.peak[..., None])

    def search(self, start: Tensor, unit: float, only_refit: bool) -> tuple[Tensor, Tensor]:
        """Returns the best stored scales found, ``start`` included, and their errors."""
        best, error = start, self._error(start)
        # With signed scales the statistic chose the sign; the unit is negative for `int`.
        sign = torch.where(decode_scale(start) < 0, -1.0, 1.0) / abs(unit)
        for candidate in [] if only_refit else _clip_candidates(self.groups, self.bits):
            best, error = self._better(candidate * sign, best, error)
        for _ in range(CODEBOOK_REFITS):
            best, error = self._better(self._least_squares(best), best, error)
        return best, error

    def absolute(self, error: Tensor) -> float:
        """Sums the groups' errors, no longer relative, in numpy: its order has no threads."""
        square = self.peak.to(torch.float64).square()
        return float((error * square).cpu().numpy().sum())

    def _better(self, scale: Tensor, best: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        limit = largest_scale(self.scale_dtype)
        low = 0.0 if self.scale_dtype == "e8m0" else -limit
        stored = encode_scale(scale.clamp(low, limit), self.scale_dtype)
        found = self._error(stored)
        is_better = found < error
        return torch.where(is_better, stored, best), torch.where(is_better, found, error)

    def _error(self, stored: Tensor) -> Tensor:
        return self.encoder.squared_errors(self.value, self._ratio(stored), self.importance)

    def _least_squares(self, stored: Tensor) -> Tensor:
        """Returns the scale of least error for the codes that ``stored`` gives."""
        ratio = self.encoder.least_squares(self.value, self._ratio(stored), self.importance)
        return ratio * self.peak

    def _ratio(self, stored: Tensor) -> Tensor:
        """Returns scales relative to the peak."""
        return divide(decode_scale(stored), self.peak)


_AffineGrid = tuple[Tensor, Tensor]  # stored scale and zero point, each [rows, k/G]


class _AffineFit:
    """Scales and zero points of least squared error."""

    def __init__(self, chunk: Chunk, format: Format) -> None:
        self.groups, self.importance, self.format = chunk.groups, chunk.importance, format
        self.is_checked = chunk.is_checked
        self.top = (1 << format.bits) - 1
        self.lo, self.hi = chunk.groups.amin(-1), chunk.groups.amax(-1)
        self.peak = torch.maximum(-self.lo, self.hi)
        chunk.check_finite(self.peak)

    def narrow(self, factor: Tensor) -> None:
        """Multiplies each range by a factor."""
        self.lo, self.hi = self.lo * factor, self.hi * factor

    def minmax(self) -> _AffineGrid:
        """Returns the grid over the whole range."""
        return self._grid(self.lo, self.hi)

    def search(self) -> _AffineGrid:
        """Returns the grid of least squared error that was found."""
        self.value = divide(self.groups, self.peak[..., None])
        mean = weighted_sum(self.value, None) / self.value.shape[-1] * self.peak
        best = self.minmax()
        error = self._error(best)
        half = torch.maximum(self.hi - mean, mean - self.lo)
        for reach in _clip_candidates(self.groups - mean[..., None], self.format.bits):
            share = divide(reach, half)
            lo, hi = mean + (self.lo - mean) * share, mean + (self.hi - mean) * share
            best, error = self._better(self._grid(lo, hi, clipping=True), best, error)
        for _ in range(AFFINE_REFITS):
            best, error = self._better(self._least_squares(best), best, error)
        return best

    def _grid(self, lo: Tensor, hi: Tensor, clipping: bool = False) -> _AffineGrid:
        if self.format.has_integer_zero_point:
            lo, hi = lo.clamp(max=0), hi.clamp(min=0)
        scale = (hi - lo) / self.top
        if not self.format.has_integer_zero_point:
            limit = ZERO_POINT_LIMITS[self.format.scale_dtype]
            scale = torch.maximum(scale, torch.maximum(-lo, hi) / limit)
        if clipping:
            scale = scale.clamp(max=largest_scale(self.format.scale_dtype))
        stored = encode_scale(
            scale,
            self.format.scale_dtype,
            round_up=not clipping,
            is_checked=self.is_checked,
        )
        zero = divide(-lo, decode_scale(stored))
        if self.format.has_integer_zero_point:
            zero = zero.round().clamp(0, self.top)
        return stored, zero.to(self.format.stored_zero_point_dtype)

    def _better(
        self, grid: _AffineGrid, best: _AffineGrid, error: Tensor
    ) -> tuple[_AffineGrid, Tensor]:
        found = self._error(grid)
        is_better = found < error
        scale, zero = (torch.where(is_better, a, b) for a, b in zip(grid, best, strict=True))
        return (scale, zero), torch.where(is_better, found, error)

    def _least_squares(self, grid: _AffineGrid) -> _AffineGrid:
        """Returns the grid of least error for the codes that ``grid`` gives."""
        _, _, codes = self._codes(grid)
        weight = self._sum(torch.ones_like(codes))
        centre, mean = divide(self._sum(codes), weight), divide(self._sum(self.value), weight)
        ratio = self._slope(codes, centre, mean)
        if self.format.has_integer_zero_point:
            zero = (centre - divide(mean, ratio)).round().clamp(0, self.top)
            ratio = self._slope(codes, zero, torch.zeros_like(zero))
        limit = largest_scale(self.format.scale_dtype)
        stored = encode_scale((ratio * self.peak).clamp(0, limit), self.format.scale_dtype)
        if not self.format.has_integer_zero_point:
            limit = ZERO_POINT_LIMITS[self.format.scale_dtype]
            ratio = divide(decode_scale(stored), self.peak)
            zero = (centre - divide(mean, ratio)).clamp(-limit, limit)
        return stored, zero.to(self.format.stored_zero_point_dtype)

    def _slope(self, codes: Tensor, centre: Tensor, mean: Tensor) -> Tensor:
        """Returns the least-squares slope of values over codes, through (centre, mean)."""
        offset = codes - centre[..., None]
        product = self._sum(offset * (self.value - mean[..., None]))
        return divide(product, self._sum(offset.square_()))

    def _error(self, grid: _AffineGrid) -> Tensor:
        ratio, zero, codes = self._codes(grid)
        return self._sum((self.value - (codes - zero[..., None]) * ratio[..., None]).square_())

    def _codes(self, grid: _AffineGrid) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scales relative to the peak, zero points and codes of a grid, all float32."""
        scale, zero = grid
        ratio, zero = divide(decode_scale(scale), self.peak), zero.to(torch.float32)
        codes = affine_codes(self.value, ratio, zero, self.format.bits)
        return ratio, zero, codes.to(torch.float32)

    def _sum(self, values: Tensor) -> Tensor:
        return weighted_sum(values, self.importance)

"""Named codebooks: the 2^b values of a code, in units of the group's statistic."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from fdk_formats.device_constants import constant_on
from fdk_formats.format import Format
from fdk_formats.torch_internals import is_traced

# Trained weights resemble Student-t with 5 degrees of freedom (Dotzel et al. 2024, SF4).
STUDENT_DOF = 5
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# sqrt(2 ln(G / pi)), the expected maximum of a block, holds for large G. Only whole rows can be
# shorter than this; they use the maximum of a block of this size.
MIN_BLOCK = 16


@dataclass(frozen=True)
class Codebook:
    """A table of values, and the value that the statistic of a group maps to.

    Attributes:
        values: 2^b values, ascending; an entry may repeat.
        unit: the divisor in scale = statistic / unit. With ``absmax`` and ``signmax``, the weight
            of largest magnitude divided by the unrounded scale is the unit.
    """

    values: tuple[float, ...]
    unit: float

    def tensor(self, device: torch.device | None = None) -> Tensor:
        """Returns the table, ``[2^b, float32]``."""
        if device is None or device.type == "cpu" or is_traced():
            return torch.tensor(self.values, dtype=torch.float32, device=device)
        return constant_on(device, self.values).clone()


@cache
def named_codebook(format: Format, k: int) -> Codebook:
    """Returns the table of a format whose codebook is fixed.

    The width determines most tables. ``int`` also depends on whether the scale rule is ``signmax``,
    the cube-root-density tables on the scale rule and the group size.

    Args:
        format: a format with a named codebook.
        k: weights in a row, for formats whose group is the whole row.

    Raises:
        ValueError: for ``kmeans``, ``custom`` and ``affine``, which have no fixed table.
    """
    bits, name = format.bits, format.codebook
    if name == "int":
        return _int(bits, full_range=format.has_signed_scale)
    if name == "fp":
        return Codebook(tuple(0.0 - v for v in reversed(E2M1)) + E2M1, unit=6.0)
    if name.startswith("crd_"):
        density = DENSITIES[name.removeprefix("crd_")]
        if format.scale_rule in ("rms", "absmean"):
            return Codebook(_crd_statistic(density, bits, str(format.scale_rule)), unit=1.0)
        return Codebook(_crd_block(density, bits, format.group_size_for(k)), unit=1.0)
    if name in TABLES:
        return Codebook(TABLES[name](bits), unit=1.0)
    raise ValueError(f"{format}: {name} has no fixed codebook")


def _int(bits: int, full_range: bool) -> Codebook:
    """Returns the integers -g to g with g twice, or all 2^b integers for a signed scale."""
    half = 1 << (bits - 1)
    if full_range:
        return Codebook(tuple(float(v) for v in range(-half, half)), unit=float(-half))
    if bits == 1:
        return Codebook((-1.0, 1.0), unit=1.0)
    values = [*range(1 - half, half), half - 1]
    return Codebook(tuple(float(v) for v in values), unit=float(half - 1))


def uniform_values(bits: int) -> tuple[float, ...]:
    """Returns 2^b equally spaced values from -1 to 1."""
    top = (1 << bits) - 1
    return tuple((2 * i - top) / top for i in range(1 << bits))


def _quantile_float(quantile: Callable[[float], float], bits: int) -> tuple[float, ...]:
    """Computes quantiles of a distribution, normalised to [-1, 1], with an exact zero.

    2^(b-1) positive and 2^(b-1) - 1 negative values, evenly spaced in probability on each side,
    the outermost at 1 - (1/2^(b+1) + 1/(2^(b+1) - 2)) / 2 (Dettmers et al. 2023, QLoRA, eq. 4 and
    the code released with it). At 4 bits and for the normal distribution this is NF4.
    """
    if bits == 1:
        return (-1.0, 1.0)
    half = 1 << (bits - 1)
    outer = 1 - (1 / (4 * half) + 1 / (4 * half - 2)) / 2

    def side(count: int) -> list[float]:
        return [quantile(outer + (0.5 - outer) * i / count) for i in range(count)]

    positive, negative = side(half), side(half - 1)
    values = [-v for v in negative] + [0.0] + positive[::-1]
    return tuple(v / positive[0] for v in values)


# NF4 as published (QLoRA, appendix E, https://arxiv.org/abs/2305.14314) and used everywhere, by the
# blockwise ops too. These float32 results differ from our float64 construction in the last digits.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def _normal_float(bits: int) -> tuple[float, ...]:
    return NF4 if bits == 4 else _quantile_float(NormalDist().inv_cdf, bits)


def _student_float(bits: int) -> tuple[float, ...]:
    return _quantile_float(student_quantile, bits)


TABLES: dict[str, Callable[[int], tuple[float, ...]]] = {
    "uniform": uniform_values,
    "nf": _normal_float,
    "sf": _student_float,
    "ternary": lambda bits: (-1.0, 0.0, 1.0, 1.0),
    "binary": lambda bits: (-1.0, 1.0),
}


@dataclass(frozen=True)
class Density:
    """A distribution of rms 1 and its cube-root density.

    An optimal codebook of many values has the density p(x)^(1/3) (Panter and Dite 1951). For these
    families that is a wider member of the same family, or one in closed form.

    Attributes:
        cdf: distribution function of the cube-root density.
        quantile: the inverse of ``cdf``.
        absmean: E|x| of the distribution itself.
        absmax: a typical maximum of |x| over G values of it, as a function of G.
    """

    cdf: Callable[[float], float]
    quantile: Callable[[float], float]
    absmean: float
    absmax: Callable[[int], float]


def _crd_statistic(density: Density, bits: int, rule: str) -> tuple[float, ...]:
    """Returns quantiles at i / (2^b + 1), in units of the rms or of the mean magnitude."""
    count = 1 << bits
    unit = 1.0 if rule == "rms" else density.absmean
    upper = [density.quantile(i / (count + 1)) / unit for i in range(count // 2 + 1, count + 1)]
    return _mirrored(upper)


def _crd_block(density: Density, bits: int, group_size: int) -> tuple[float, ...]:
    """Returns quantiles of the density truncated at the maximum of a block, scaled to 1."""
    count = 1 << bits
    top = density.absmax(max(group_size, MIN_BLOCK))
    inside = 2 * density.cdf(top) - 1
    share = [(2 * i - (count - 1)) / (count - 1) for i in range(count // 2, count)]
    upper = [density.quantile(0.5 + 0.5 * inside * s) / top for s in share]
    return _mirrored([*upper[:-1], 1.0])


def _mirrored(upper: list[float]) -> tuple[float, ...]:
    assert all(a < b for a, b in pairwise(upper))
    return (*(-v for v in reversed(upper)), *upper)


def student_cdf(t: float) -> float:
    """Evaluates the distribution function of Student-t with 5 degrees of freedom.

    It has a closed form, as for every odd number (Abramowitz and Stegun 26.7.3).
    """
    theta = math.atan(t / math.sqrt(STUDENT_DOF))
    sine, cosine = math.sin(theta), math.cos(theta)
    return 0.5 + (theta + sine * cosine * (1 + 2 / 3 * cosine * cosine)) / math.pi


def student_quantile(p: float) -> float:
    """Inverts ``student_cdf`` by bisection to the last bit, for p in (0, 1)."""
    if p < 0.5:
        return -student_quantile(1 - p)
    lo, hi = 0.0, 1.0
    while student_cdf(hi) < p:
        lo, hi = hi, 2 * hi
    while lo < (mid := (lo + hi) / 2) < hi:
        lo, hi = (mid, hi) if student_cdf(mid) < p else (lo, mid)
    return lo


def _laplace_cdf(scale: float) -> Callable[[float], float]:
    return lambda x: 1 - math.exp(-x / scale) / 2 if x >= 0 else math.exp(x / scale) / 2


def _laplace_quantile(scale: float) -> Callable[[float], float]:
    return lambda p: -scale * math.log(2 - 2 * p) if p >= 0.5 else scale * math.log(2 * p)


_STUDENT_RMS = math.sqrt(STUDENT_DOF / (STUDENT_DOF - 2))


@cache
def _student_absmax(group_size: int) -> float:
    """Returns the mean of the maximum of G values, whose distribution is P(|t| < m)^G.

    The mean beats the median: at G = 64 and 4 bits the relative error of a million values is 0.1021
    instead of 0.1029.
    """
    count = 256
    levels = ((i + 0.5) / count for i in range(count))
    maxima = (student_quantile((1 + level ** (1 / group_size)) / 2) for level in levels)
    return sum(maxima) / count / _STUDENT_RMS


# The cube root of a normal density is one sqrt(3) times as wide, that of a Laplace density three
# times. That of Student-t with 5 degrees of freedom, (1 + t^2/5)^-3, is a Cauchy density of scale
# sqrt(5), or sqrt(3) in units of the rms. The maxima of normal and Laplace values are from Orr et
# al. 2025, Optimal Formats for Weight Quantisation.
DENSITIES = {
    "normal": Density(
        cdf=NormalDist(sigma=math.sqrt(3)).cdf,
        quantile=NormalDist(sigma=math.sqrt(3)).inv_cdf,
        absmean=math.sqrt(2 / math.pi),
        absmax=lambda size: math.sqrt(2 * math.log(size / math.pi)),
    ),
    "laplace": Density(
        cdf=_laplace_cdf(3 / math.sqrt(2)),
        quantile=_laplace_quantile(3 / math.sqrt(2)),
        absmean=1 / math.sqrt(2),
        absmax=lambda size: (0.5772156649015329 + math.log(size)) / math.sqrt(2),
    ),
    "student": Density(
        cdf=lambda x: 0.5 + math.atan(x / math.sqrt(3)) / math.pi,
        quantile=lambda p: math.sqrt(3) * math.tan(math.pi * (p - 0.5)),
        absmean=4 * math.sqrt(STUDENT_DOF) / (3 * math.pi) / _STUDENT_RMS,
        absmax=_student_absmax,
    ),
}

"""Named codebooks against values by hand and scipy's quantiles."""

import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy import stats

from fdk_formats.codebooks import named_codebook, student_cdf, student_quantile
from fdk_formats.format import CODEBOOK_BITS, Format

FIXED = [
    f"{name}{bits}"
    for name, widths in CODEBOOK_BITS.items()
    if name not in ("kmeans", "custom", "affine")
    for bits in widths
]
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip


def table(text, k=256):
    return list(named_codebook(Format.parse(text), k).values)


@pytest.mark.parametrize("rule", ["absmax", "absmean", "rms", "signmax", "search"])
@pytest.mark.parametrize("name", FIXED)
def test_named_codebook_is_ascending(name, rule):
    format = Format.parse(f"{name}-g64-{rule}")
    values = named_codebook(format, 64).tensor()
    assert values.dtype == torch.float32
    assert values.shape == (1 << format.bits,)
    assert torch.isfinite(values).all()
    assert (values.diff() >= 0).all()
    assert torch.unique(values).numel() >= (1 << format.bits) - 1


@pytest.mark.parametrize(
    ("text", "values", "unit"),
    [
        ("int1-g64-absmax", [-1, 1], 1),
        ("int2-g64", [-1, 0, 1, 1], 1),
        ("int3-g64", [-3, -2, -1, 0, 1, 2, 3, 3], 3),
        ("int1-g64-signmax", [-1, 0], -1),
        ("int3-g64-signmax", [-4, -3, -2, -1, 0, 1, 2, 3], -4),
        ("uniform1-g64", [-1, 1], 1),
        ("uniform2-g64", [-1, -1 / 3, 1 / 3, 1], 1),
        ("ternary2-g64", [-1, 0, 1, 1], 1),
        ("binary1-g64", [-1, 1], 1),
        ("nf1-g64", [-1, 1], 1),
        ("nf4-g64", NF4, 1),
        ("fp4-g64", [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0, 0.5, 1, 1.5, 2, 3, 4, 6], 6),
    ],
)
def test_named_codebook_values(text, values, unit):
    codebook = named_codebook(Format.parse(text), 64)
    assert list(codebook.values) == values
    assert codebook.unit == unit
    assert not any(math.copysign(1, v) < 0 for v in codebook.values if v == 0)


def quantile_float(distribution, bits):
    """Builds NF4 as its authors do, at any width."""
    half = 2 ** (bits - 1)
    outer = 1 - (1 / (4 * half) + 1 / (4 * half - 2)) / 2
    positive = distribution.ppf(np.linspace(outer, 0.5, half + 1)[:-1])
    negative = -distribution.ppf(np.linspace(outer, 0.5, half)[:-1])
    values = np.sort(np.concatenate([positive, [0], negative]))
    return values / values.max()


@pytest.mark.parametrize("bits", range(2, 9))
def test_normal_and_student_float(bits):
    atol = 1e-6 if bits == 4 else 1e-12  # NF4 was published from float32 quantiles
    assert_allclose(table(f"nf{bits}-g64"), quantile_float(stats.norm, bits), atol=atol)
    assert_allclose(table(f"sf{bits}-g64"), quantile_float(stats.t(5), bits), atol=1e-12)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("group_size", [16, 64, 256])
def test_cube_root_density_of_a_block(bits, group_size):
    p = np.linspace(0, 1, 2**bits)
    s = math.sqrt(3) / math.sqrt(2 * math.log(group_size / math.pi))
    normal = stats.truncnorm(-1 / s, 1 / s, scale=s).ppf(p)
    assert_allclose(table(f"crd_normal{bits}-g{group_size}-absmax"), normal, atol=1e-12)
    laplace = stats.laplace(scale=3 / (0.5772156649015329 + math.log(group_size)))
    lo, hi = laplace.cdf([-1, 1])
    wanted = laplace.ppf(lo + (hi - lo) * p)
    assert_allclose(table(f"crd_laplace{bits}-g{group_size}-absmax"), wanted, atol=1e-12)
    tail = np.linspace(0, 1, 20001)[1:-1]
    mean_max = np.trapezoid(stats.t(5).ppf((1 + tail ** (1 / group_size)) / 2), tail)
    student = stats.cauchy(scale=math.sqrt(5) / mean_max)
    lo, hi = student.cdf([-1, 1])
    wanted = student.ppf(lo + (hi - lo) * p)
    assert_allclose(table(f"crd_student{bits}-g{group_size}-absmax"), wanted, atol=2e-3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_cube_root_density_of_a_statistic(bits):
    p = np.linspace(0, 1, 2**bits + 2)[1:-1]
    families = {
        "normal": (stats.norm, stats.norm(scale=math.sqrt(3))),
        "laplace": (stats.laplace, stats.laplace(scale=3 / math.sqrt(2))),
        "student": (stats.t(5), stats.t((5 - 2) / 3, scale=math.sqrt(3))),
    }
    for name, (density, cube_root) in families.items():
        absmean = 2 * density.expect(lambda x: x, lb=0) / density.std()
        assert_allclose(table(f"crd_{name}{bits}-g64-rms"), cube_root.ppf(p), rtol=1e-10)
        values = table(f"crd_{name}{bits}-g64-absmean")
        assert_allclose(values, cube_root.ppf(p) / absmean, rtol=1e-7)


def test_cube_root_density_follows_the_row():
    assert table("crd_normal4-row-absmax", k=256) == table("crd_normal4-g256-absmax")
    # The formula has no value for whole rows of 3 weights or fewer.
    assert table("crd_normal4-row-absmax", k=2) == table("crd_normal4-g16-absmax")


def test_student_distribution():
    x = np.linspace(-40, 40, 333)
    assert_allclose([student_cdf(v) for v in x], stats.t(5).cdf(x), rtol=1e-9, atol=1e-15)
    p = np.concatenate([np.linspace(0, 1, 101)[1:-1], [1e-6, 1 - 1e-6]])
    assert_allclose([student_quantile(v) for v in p], stats.t(5).ppf(p), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("text", ["kmeans4-g64", "custom3-g64", "affine4-g64"])
def test_named_codebook_refuses_fitted_ones(text):
    with pytest.raises(ValueError, match="has no fixed codebook"):
        named_codebook(Format.parse(text), 64)

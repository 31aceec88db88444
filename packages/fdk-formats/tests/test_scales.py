"""Statistics, stored scales, and affine scales and zero points."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdk_formats import Format
from fdk_formats.encode import affine_codes, divide
from fdk_formats.quantise import quantise
from fdk_formats.scales import decode_scale, encode_scale, largest_scale, statistic


@pytest.mark.parametrize(
    ("rule", "values", "wanted"),
    [
        ("absmax", [1.0, -3.0, 2.0, 0.0], 3.0),
        ("signmax", [1.0, -3.0, 2.0, 0.0], -3.0),
        ("signmax", [-3.0, 1.0, 3.0, 0.0], 3.0),  # a tie is positive
        ("absmean", [1.0, -3.0, 2.0, 0.0], 1.5),
        ("rms", [1.0, -1.0, 7.0, 7.0], 5.0),
        ("rms", [0.0, 0.0, 0.0, 0.0], 0.0),
        ("absmean", [3e38, 3e38, 3e38, 3e38], 3e38),  # the sum overflows float32
        ("rms", [1e-30, 1e-30, 1e-30, 1e-30], 1e-30),  # the squares underflow it
    ],
)
def test_statistic(rule, values, wanted):
    groups = torch.tensor(values).view(1, 1, 4)
    assert torch.equal(statistic(groups, rule), torch.tensor([[wanted]]))


@pytest.mark.parametrize("rule", ["absmax", "signmax", "absmean", "rms"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_statistic_shows_nan_and_infinity(rule, bad):
    groups = torch.tensor([[1.0, bad], [1.0, 2.0]])
    assert torch.isfinite(statistic(groups, rule)).tolist() == [False, True]


@pytest.mark.parametrize(
    ("value", "nearest", "up"),
    [
        (0.0, 0, 0),
        (1.0, 127, 127),
        (1.4142135, 127, 128),  # the float32 below sqrt(2), and the one above
        (1.4142137, 128, 128),
        (2.0, 128, 128),
        (0.5000001, 126, 127),
        (3e-39, 1, 1),  # subnormal
        (1e-45, 1, 1),
        (2.0**-126, 1, 1),
        (2.0**127, 254, 254),
    ],
)
def test_encode_e8m0(value, nearest, up):
    scale = torch.tensor([value])
    assert encode_scale(scale, "e8m0").tolist() == [nearest]
    assert encode_scale(scale, "e8m0", round_up=True).tolist() == [up]


@given(st.integers(0x00800000, 0x7E800000))
def test_encode_e8m0_against_logarithms(word):
    scale = torch.tensor([word], dtype=torch.int32).view(torch.float32)
    exact = math.log2(scale.item())
    assert decode_scale(encode_scale(scale, "e8m0")).item() == 2.0 ** round(exact)
    up = decode_scale(encode_scale(scale, "e8m0", round_up=True)).item()
    assert up / 2 < scale.item() <= up


def test_encode_scale_rounds_to_even():
    scale = torch.tensor([1 + 1 / 256, 1 + 3 / 256])  # half way between two bf16
    assert encode_scale(scale, "bf16").tolist() == [1.0, 1 + 4 / 256]
    assert encode_scale(scale, "fp16").tolist() == scale.tolist()
    assert encode_scale(scale / 3, "fp32").tolist() == (scale / 3).tolist()


@pytest.mark.parametrize(
    ("dtype", "value", "limit"),
    [
        ("fp16", 65520.0, "65504"),
        ("bf16", 3.4e38, "3.38953e"),
        ("e8m0", 2.0**127 * 1.5, "1.70141e"),
        ("fp32", math.inf, "3.40282e"),
    ],
)
def test_encode_scale_overflow(dtype, value, limit):
    with pytest.raises(ValueError, match=f"{dtype} holds up to {limit}.* got"):
        encode_scale(torch.tensor([1.0, value]), dtype)
    largest = torch.tensor([largest_scale(dtype)])
    assert decode_scale(encode_scale(largest, dtype)).equal(largest)


def test_encode_e8m0_refuses_a_sign():
    with pytest.raises(ValueError, match="holds no sign, got -2"):
        encode_scale(torch.tensor([1.0, -2.0]), "e8m0")


def test_decode_e8m0():
    stored = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)
    assert decode_scale(stored).tolist() == [0.0, 2.0**-126, 1.0, 2.0**127]


def test_divide():
    value, by = torch.tensor([1.0, -2.0, 0.0, 3.0]), torch.tensor([4.0, 0.0, 0.0, -2.0])
    assert divide(value, by).tolist() == [0.25, 0.0, 0.0, -1.5]


KINDS = ["", "-zint"]


def normal(n, k, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def group_errors(weight, q):
    error = (q.dequantise().double() - weight.double()).square()
    return error.view(len(weight), -1, q.group_size).sum(-1)


def test_affine_by_hand():
    # Range -1 to 2 at 2 bits: scale 1, zero point 1. Ties go down.
    weight = torch.tensor([[-1.0, 2, 0, 1, 0.5, 0.51, -0.5, -0.49, 1.5, 1.51, *[0] * 6]])
    for kind in KINDS:
        q = quantise(weight, f"affine2-g16-fp32{kind}")
        assert q.scale.tolist() == [[1.0]]
        assert q.zero_point.tolist() == [[1]]
        assert q.codes().tolist() == [[0, 3, 1, 2, 1, 2, 0, 1, 2, 3, *[1] * 6]]


def test_affine_of_one_sign():
    # Range 1 to 4: a float zero point uses it as it is, an integer one extends it to 0.
    weight = torch.linspace(1, 4, 16)[None]
    q = quantise(weight, "affine2-g16-fp32")
    assert (q.scale.item(), q.zero_point.item()) == (1.0, -1.0)
    q = quantise(weight, "affine2-g16-fp32-zint")
    assert (q.scale.item(), q.zero_point.item()) == (pytest.approx(4 / 3), 0)
    q = quantise(-weight, "affine2-g16-fp32-zint")
    assert (q.scale.item(), q.zero_point.item()) == (pytest.approx(4 / 3), 3)


def test_affine_codes_match_distances():
    groups = torch.arange(-40, 41)[None] / 8
    scale, zero = torch.tensor([0.5]), torch.tensor([2.25])
    codes = affine_codes(groups, scale, zero, 3)[0]
    grid = (torch.arange(8) - 2.25) * 0.5
    for value, code in zip(groups[0], codes.tolist(), strict=True):
        distance = (grid - value).abs()
        assert code == distance.argmin()  # argmin returns the lower code of a tie


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "e8m0"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_affine_codes_match_numpy(bits, dtype, kind):
    weight = normal(31, 96, seed=bits) + 0.5
    for rule in ("minmax", "search"):
        q = quantise(weight, f"affine{bits}-g32-{rule}-{dtype}{kind}")
        scale = decode_scale(q.scale).numpy()[..., None]
        zero = q.zero_point.float().numpy()[..., None]
        v = weight.numpy().reshape(31, 3, 32) / scale + zero
        codes = np.clip(np.ceil(v - np.float32(0.5)), 0, 2**bits - 1)
        assert np.array_equal(q.codes().numpy().reshape(31, 3, 32), codes)
        if kind:
            assert q.zero_point.dtype == torch.uint8
            assert int(q.zero_point.max()) < 1 << bits


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_affine_error_is_half_a_step(bits, kind):
    weight = normal(64, 64, seed=bits)
    q = quantise(weight, f"affine{bits}-g32-fp32{kind}")
    step = q.scale.repeat_interleave(32, 1)
    # An integer zero point shifts the grid by up to half a step, which adds to errors at the ends.
    most = 1.0 if kind else 0.5
    assert ((q.dequantise() - weight).abs() <= most * step * 1.001).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "e8m0"])
def test_affine_search_beats_minmax(bits, kind, dtype):
    weight = normal(64, 256, seed=bits)
    found = group_errors(weight, quantise(weight, f"affine{bits}-g64-search-{dtype}{kind}"))
    plain = group_errors(weight, quantise(weight, f"affine{bits}-g64-{dtype}{kind}"))
    assert (found <= plain * (1 + 1e-4)).all()
    assert found.sum() < (0.99 if dtype == "bf16" else 1.0) * plain.sum()


def test_affine_search_weighs_by_importance():
    weight = normal(64, 128)
    importance = torch.rand(64, 128, generator=torch.Generator().manual_seed(3)) ** 8
    for kind in KINDS:
        plain, weighed = (
            quantise(weight, f"affine3-g32-search{kind}", importance=i) for i in (None, importance)
        )
        errors = [((q.dequantise() - weight).square() * importance).sum() for q in (plain, weighed)]
        assert errors[1] < 0.98 * errors[0]


def test_affine_search_with_no_importance_in_a_group():
    weight, importance = normal(4, 64), torch.ones(4, 64)
    importance[2, :32] = 0
    for kind in KINDS:
        q = quantise(weight, f"affine3-g32-search{kind}", importance=importance)
        assert torch.isfinite(q.dequantise()).all()


@pytest.mark.parametrize("rule", ["minmax", "search"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "e8m0"])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_affine_of_constant_groups(bits, dtype, kind, rule):
    values = torch.tensor([0.0, 0.5, -0.5, 1.0, -3.0, 0.3, -0.07])
    weight = values[:, None].expand(7, 16)
    q = quantise(weight, f"affine{bits}-g16-{rule}-{dtype}{kind}")
    out = q.dequantise()
    assert (out[0] == 0).all()
    assert (decode_scale(q.scale)[0] == 0).all()
    # bf16 scales and zero points are exact to 2^-9. A power-of-two scale with an integer zero point
    # represents only powers of two times a code.
    most = 1.0 if dtype == "e8m0" and kind else 2.0**-8
    assert ((out - weight).abs() <= most * weight.abs() + 1e-30).all()
    if not kind and dtype == "bf16":
        assert torch.equal(out[1:5], weight[1:5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["minmax", "search"])
def test_affine_of_tiny_and_huge_groups(rule, kind):
    weight = torch.zeros(4, 32)
    weight[0] = 1e-45
    weight[1, ::2] = -1e-40
    weight[2] = normal(1, 32)[0].clamp(-1, 1) * 1e38
    weight[3] = 1e20 + normal(1, 32)[0] * 1e14  # nearly constant
    out = quantise(weight, f"affine4-g16-{rule}{kind}").dequantise()
    assert torch.isfinite(out).all()
    assert ((out - weight)[:2].abs() <= 1e-37).all()
    assert ((out - weight)[2].abs() <= 1e37).all()
    assert ((out - weight)[3].abs() <= 1e20 * 2**-8).all()


def test_affine_overflow_and_bad_weights():
    weight = normal(2, 32)
    weight[1, 3] = math.nan
    with pytest.raises(ValueError, match="got nan at row 1, column 3"):
        quantise(weight, "affine4-g16")
    wide = torch.tensor([[3e38, -3e38] * 8])
    with pytest.raises(ValueError, match="bf16 holds up to"):
        quantise(wide, "affine4-g16")
    with pytest.raises(ValueError, match="fp16 holds up to 65504"):
        quantise(wide, "affine4-g16-fp16-search")


def test_affine_zero_points_of_a_power_of_two_are_bf16():
    q = quantise(normal(2, 32), Format("affine", 4, 16, scale_dtype="e8m0"))
    assert (q.scale.dtype, q.zero_point.dtype) == (torch.uint8, torch.bfloat16)

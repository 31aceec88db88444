"""Affine formats: scales and zero points of a range."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fdk_formats import Format, QuantisedTensor
from fdk_formats.encode import affine_codes
from fdk_formats.quantise import quantise
from fdk_formats.scales import decode_scale

KINDS = ["", "-zint"]


def normal(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def group_errors(weight: Tensor, q: QuantisedTensor) -> Tensor:
    error = (q.dequantise().double() - weight.double()).square()
    return error.view(len(weight), -1, q.group_size).sum(-1)


def test_affine_by_hand() -> None:
    # Range -1 to 2 at 2 bits: scale 1, zero point 1. Half way goes down.
    weight = torch.tensor([[-1.0, 2, 0, 1, 0.5, 0.51, -0.5, -0.49, 1.5, 1.51, *[0] * 6]])
    for kind in KINDS:
        q = quantise(weight, f"affine2-g16-fp32{kind}")
        assert q.scale.tolist() == [[1.0]]
        assert q.zero_point is not None
        assert q.zero_point.tolist() == [[1]]
        assert q.codes().tolist() == [[0, 3, 1, 2, 1, 2, 0, 1, 2, 3, *[1] * 6]]


def test_affine_of_one_sign() -> None:
    # Range 1 to 4: a float zero point takes it as it is, an integer one starts it at 0.
    weight = torch.linspace(1, 4, 16)[None]
    q = quantise(weight, "affine2-g16-fp32")
    assert q.zero_point is not None
    assert (q.scale.item(), q.zero_point.item()) == (1.0, -1.0)
    q = quantise(weight, "affine2-g16-fp32-zint")
    assert q.zero_point is not None
    assert (q.scale.item(), q.zero_point.item()) == (pytest.approx(4 / 3), 0)
    q = quantise(-weight, "affine2-g16-fp32-zint")
    assert q.zero_point is not None
    assert (q.scale.item(), q.zero_point.item()) == (pytest.approx(4 / 3), 3)


def test_affine_codes_match_distances() -> None:
    groups = torch.arange(-40, 41)[None] / 8
    scale, zero = torch.tensor([0.5]), torch.tensor([2.25])
    codes = affine_codes(groups, scale, zero, 3)[0]
    grid = (torch.arange(8) - 2.25) * 0.5
    for value, code in zip(groups[0], codes.tolist(), strict=True):
        distance = (grid - value).abs()
        assert code == distance.argmin()  # the first of a tie is the lower code


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "e8m0"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_affine_codes_match_numpy(bits: int, dtype: str, kind: str) -> None:
    weight = normal(31, 96, seed=bits) + 0.5
    for rule in ("minmax", "search"):
        q = quantise(weight, f"affine{bits}-g32-{rule}-{dtype}{kind}")
        assert q.zero_point is not None
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
def test_affine_error_is_half_a_step(bits: int, kind: str) -> None:
    weight = normal(64, 64, seed=bits)
    q = quantise(weight, f"affine{bits}-g32-fp32{kind}")
    step = q.scale.repeat_interleave(32, 1)
    assert q.zero_point is not None
    # An integer zero point shifts the grid by up to half a step, so the ends lose that much more.
    most = 1.0 if kind else 0.5
    assert ((q.dequantise() - weight).abs() <= most * step * 1.001).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "e8m0"])
def test_affine_search_beats_minmax(bits: int, kind: str, dtype: str) -> None:
    weight = normal(64, 256, seed=bits)
    found = group_errors(weight, quantise(weight, f"affine{bits}-g64-search-{dtype}{kind}"))
    plain = group_errors(weight, quantise(weight, f"affine{bits}-g64-{dtype}{kind}"))
    assert (found <= plain * (1 + 1e-4)).all()
    assert found.sum() < (0.99 if dtype == "bf16" else 1.0) * plain.sum()


def test_affine_search_weighs_by_importance() -> None:
    weight = normal(64, 128)
    importance = torch.rand(64, 128, generator=torch.Generator().manual_seed(3)) ** 8
    for kind in KINDS:
        plain, weighed = (
            quantise(weight, f"affine3-g32-search{kind}", importance=i) for i in (None, importance)
        )
        errors = [((q.dequantise() - weight).square() * importance).sum() for q in (plain, weighed)]
        assert errors[1] < 0.98 * errors[0]


def test_affine_search_with_no_importance_in_a_group() -> None:
    weight, importance = normal(4, 64), torch.ones(4, 64)
    importance[2, :32] = 0
    for kind in KINDS:
        q = quantise(weight, f"affine3-g32-search{kind}", importance=importance)
        assert torch.isfinite(q.dequantise()).all()


@pytest.mark.parametrize("rule", ["minmax", "search"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "e8m0"])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_affine_of_constant_groups(bits: int, dtype: str, kind: str, rule: str) -> None:
    values = torch.tensor([0.0, 0.5, -0.5, 1.0, -3.0, 0.3, -0.07])
    weight = values[:, None].expand(7, 16)
    q = quantise(weight, f"affine{bits}-g16-{rule}-{dtype}{kind}")
    out = q.dequantise()
    assert (out[0] == 0).all()
    assert (decode_scale(q.scale)[0] == 0).all()
    # A bf16 scale or zero point is right to 2^-9; a power of two with an integer zero point gives
    # only a power of two times a code, at 1 bit the next one up.
    most = 1.0 if dtype == "e8m0" and kind else 2.0**-8
    assert ((out - weight).abs() <= most * weight.abs() + 1e-30).all()
    if not kind and dtype == "bf16":
        assert torch.equal(out[1:5], weight[1:5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["minmax", "search"])
def test_affine_of_tiny_and_huge_groups(rule: str, kind: str) -> None:
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


def test_affine_overflow_and_bad_weights() -> None:
    weight = normal(2, 32)
    weight[1, 3] = math.nan
    with pytest.raises(ValueError, match="got nan at row 1, column 3"):
        quantise(weight, "affine4-g16")
    wide = torch.tensor([[3e38, -3e38] * 8])
    with pytest.raises(ValueError, match="bf16 holds up to"):
        quantise(wide, "affine4-g16")
    with pytest.raises(ValueError, match="fp16 holds up to 65504"):
        quantise(wide, "affine4-g16-fp16-search")


def test_affine_zero_points_of_a_power_of_two_are_bf16() -> None:
    q = quantise(normal(2, 32), Format("affine", 4, 16, scale_dtype="e8m0"))
    assert q.zero_point is not None
    assert (q.scale.dtype, q.zero_point.dtype) == (torch.uint8, torch.bfloat16)

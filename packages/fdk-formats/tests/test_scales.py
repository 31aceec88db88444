"""Statistics of groups, and scales as they are stored."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdk_formats.encode import divide
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
def test_statistic(rule: str, values: list[float], wanted: float) -> None:
    groups = torch.tensor(values).view(1, 1, 4)
    assert torch.equal(statistic(groups, rule), torch.tensor([[wanted]]))


@pytest.mark.parametrize("rule", ["absmax", "signmax", "absmean", "rms"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_statistic_shows_what_is_not_finite(rule: str, bad: float) -> None:
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
def test_encode_e8m0(value: float, nearest: int, up: int) -> None:
    scale = torch.tensor([value])
    assert encode_scale(scale, "e8m0").tolist() == [nearest]
    assert encode_scale(scale, "e8m0", round_up=True).tolist() == [up]


@given(st.integers(0x00800000, 0x7E800000))
def test_encode_e8m0_against_logarithms(word: int) -> None:
    scale = torch.tensor([word], dtype=torch.int32).view(torch.float32)
    exact = math.log2(scale.item())
    assert decode_scale(encode_scale(scale, "e8m0")).item() == 2.0 ** round(exact)
    up = decode_scale(encode_scale(scale, "e8m0", round_up=True)).item()
    assert up / 2 < scale.item() <= up


def test_encode_scale_rounds_to_even() -> None:
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
def test_encode_scale_overflow(dtype: str, value: float, limit: str) -> None:
    with pytest.raises(ValueError, match=f"{dtype} holds up to {limit}.* got"):
        encode_scale(torch.tensor([1.0, value]), dtype)
    largest = torch.tensor([largest_scale(dtype)])
    assert decode_scale(encode_scale(largest, dtype)).equal(largest)


def test_encode_e8m0_refuses_a_sign() -> None:
    with pytest.raises(ValueError, match="holds no sign, got -2"):
        encode_scale(torch.tensor([1.0, -2.0]), "e8m0")


def test_decode_e8m0() -> None:
    stored = torch.tensor([0, 1, 127, 254], dtype=torch.uint8)
    assert decode_scale(stored).tolist() == [0.0, 2.0**-126, 1.0, 2.0**127]


def test_divide() -> None:
    value, by = torch.tensor([1.0, -2.0, 0.0, 3.0]), torch.tensor([4.0, 0.0, 0.0, -2.0])
    assert divide(value, by).tolist() == [0.25, 0.0, 0.0, -1.5]

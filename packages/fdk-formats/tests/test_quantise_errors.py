"""What quantise refuses, and how it says so."""

import math

import pytest
import torch
from torch import Tensor

from fdk_formats import scales
from fdk_formats.quantise import quantise


def normal(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("format", "table", "error", "message"),
    [
        ("custom2-g16", None, ValueError, "needs codebook=, 4 values"),
        ("nf4-g16", [0.0] * 16, ValueError, "nf4-g16 takes no codebook"),
        ("affine4-g16", [0.0] * 16, ValueError, "affine4-g16 takes no codebook"),
        ("custom2-g16", [0.0, 1.0], ValueError, r"must be \[4\], got \[2\]"),
        ("custom2-g16", [], ValueError, r"must be \[4\], got \[0\]"),
        ("kmeans1-g16", [1.0, 0.0], ValueError, "finite and ascending"),
        ("kmeans1-g16", [1.0, math.nan], ValueError, "finite and ascending"),
        ("kmeans1-g16", [0, 1], TypeError, "floating tensor, got torch.int64"),
    ],
)
def test_codebook_is_checked(
    format: str, table: list[float] | None, error: type[Exception], message: str
) -> None:
    given_table = None if table is None else torch.tensor(table)
    with pytest.raises(error, match=message):
        quantise(normal(2, 32), format, codebook=given_table)
    with pytest.raises(TypeError, match="floating tensor, got list"):
        quantise(normal(2, 32), "custom1-g16", codebook=[0.0, 1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        ([[1.0] * 32], TypeError, "must be a tensor, got list"),
        (torch.ones(2, 32, dtype=torch.int32), TypeError, "must be floating, got torch.int32"),
        (torch.ones(32), ValueError, r"must be \[n, k\], got \[32\]"),
        (torch.ones(2, 24), ValueError, "multiple of 16, got k=24"),
        (torch.ones(2, 0), ValueError, "multiple of 16, got k=0"),
    ],
)
def test_weight_is_checked(weight: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantise(weight, "nf4-g16")


@pytest.mark.parametrize("format", ["kmeans4-g16", "int1-g16", "nf4-g16-search", "affine4-g16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weight_must_be_finite(format: str, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "CODES_PER_CHUNK", 96)  # three rows: the place is in a later chunk
    weight = normal(7, 32)
    weight[5, 17] = weight[5, 30] = bad
    with pytest.raises(ValueError, match=f"finite.*, got {bad} at row 5, column 17"):
        quantise(weight, format)


def test_weight_must_fit_float32() -> None:
    weight = torch.full((2, 16), 1e300, dtype=torch.float64)
    with pytest.raises(ValueError, match="finite in float32, got inf at row 0, column 0"):
        quantise(weight, "nf4-g16")
    with pytest.raises(ValueError, match="fp16 holds up to 65504, got 1e"):
        quantise(torch.full((2, 16), 1e6), "nf4-g16-fp16")


@pytest.mark.parametrize(
    ("importance", "error", "message"),
    [
        (torch.ones(31), ValueError, r"must be \[32\] or \[2, 32\], got \[31\]"),
        (torch.ones(32, 2), ValueError, r"must be \[32\] or \[2, 32\], got \[32, 2\]"),
        (-torch.ones(32), ValueError, "finite and not negative, got -1 to -1"),
        (torch.full((32,), math.nan), ValueError, "finite and not negative, got nan"),
        (torch.full((32,), math.inf), ValueError, "finite and not negative, got inf"),
        (torch.zeros(2, 32), ValueError, "positive somewhere"),
        (torch.ones(32, dtype=torch.bool), TypeError, "real numbers, got torch.bool"),
    ],
)
def test_importance_is_checked(importance: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantise(normal(2, 32), "kmeans4-g16", importance=importance)

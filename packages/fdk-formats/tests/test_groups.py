"""What quantise and fit_codebook check of a weight and its importance before any arithmetic."""

from collections.abc import Callable

import pytest
import torch

from fdk_formats import fit_codebook, quantise

both = pytest.mark.parametrize("function", [quantise, fit_codebook])


@both
@pytest.mark.parametrize("format", ["kmeans4-g16", "int4-g16"])
def test_weight_on_meta(function: Callable[..., object], format: str) -> None:
    with pytest.raises(ValueError, match="weight needs values, got a tensor on meta"):
        function(torch.empty(4, 32, device="meta"), format)


@both
def test_importance_that_is_no_tensor(function: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="importance must be a tensor, got list"):
        function(torch.ones(2, 16), "kmeans2-g16", importance=[1.0] * 16)


@both
def test_importance_on_meta(function: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="importance must be on cpu, got meta"):
        function(torch.ones(2, 16), "kmeans2-g16", torch.ones(16, device="meta"))


def test_importance_is_the_third_argument() -> None:
    weight = torch.tensor([[0.0, 0.25, 0.5, 1.0] * 8])
    importance = torch.tensor([1.0, 1.0, 9.0, 1.0] * 8)
    table = fit_codebook(weight, "kmeans1-row-fp32-absmax", importance)
    # By hand: {0, 0.25} and {0.5, 1.0}, whose mean is (9 * 0.5 + 1) / 10.
    assert table.tolist() == pytest.approx([0.125, 0.55])
    q = quantise(weight, "kmeans1-row-fp32-absmax", importance)
    assert q.codebook is not None
    assert torch.equal(q.codebook, table)


def test_rows_of_no_weights() -> None:
    with pytest.raises(ValueError, match="int4-row: k must be at least 1, got k=0"):
        quantise(torch.empty(4, 0), "int4-row")

import pytest
import torch

from fdk_formats import model_report, quantise, relative_error


def test_relative_error_checks_what_it_gets() -> None:
    weight = torch.ones(1, 32)
    with pytest.raises(TypeError, match="relative_error: weight must be a tensor, got NoneType"):
        relative_error(None, quantise(weight, "nf4-g16"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="relative_error: q must be a QuantisedTensor, got Tensor"):
        relative_error(weight, weight)  # type: ignore[arg-type]


def test_model_report_wants_a_module() -> None:
    with pytest.raises(TypeError, match=r"model_report: model must be an nn\.Module, got NoneType"):
        model_report(None)  # type: ignore[arg-type]

"""The package as installed or on PYTHONPATH: backends, metadata, messages without a GPU."""

import importlib
from importlib import metadata
from pathlib import Path

import pytest
import torch

import fdk_cuda
from fdk_formats import Format, Problem, all_backends, unsupported_reasons


def test_registers_its_backends():
    assert {"triton", "marlin", "marlin-lut"} <= all_backends().keys()


def test_requires_fdk_formats():
    try:
        requirements = metadata.requires("fdk-cuda") or []
    except metadata.PackageNotFoundError:
        pytest.skip("runs from PYTHONPATH: no metadata of fdk-cuda is installed")
    assert any(line.replace(" ", "").startswith("fdk-formats<0.2,>=0.1") for line in requirements)


def test_types_are_shipped():
    assert (Path(fdk_cuda.__file__).parent / "py.typed").is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said where there is no GPU")
def test_without_a_gpu_every_backend_says_so():
    problem = Problem(Format.parse("int4-g64"), 64, 64, torch.bfloat16, torch.device("cuda"))
    reasons = unsupported_reasons(problem)
    for name in ("marlin", "marlin-lut", "triton"):
        assert "GPU" in str(reasons[name]) or "CUDA" in str(reasons[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said where there is no GPU")
def test_every_reason_is_said_at_once():
    format, device = Format.parse("affine4-g48"), torch.device("cuda")
    reasons = unsupported_reasons(Problem(format, 64, 96, torch.float64, device, "int8"))
    for name in {"marlin", "marlin-lut", "triton"} & reasons.keys():
        said = str(reasons[name]).split("; ")
        assert said[0] == "has no int8 activations"
        assert any("got torch.float64" in reason for reason in said)
        assert "GPU" in said[-1] or "CUDA" in said[-1]
    assert "needs a codebook, got an affine format" in str(reasons["marlin-lut"])
    for name in ("marlin", "marlin-lut"):
        assert "needs groups of a multiple of 32 or whole rows, got 48" in str(reasons[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said where there is no GPU")
@pytest.mark.parametrize("device", [None, "cuda", 0])
def test_without_a_gpu_nothing_is_compiled(device):
    layers = [("int4-g64", 64, 64)]
    with pytest.raises(RuntimeError, match=r"precompile: needs an NVIDIA GPU .* torch finds none"):
        fdk_cuda.precompile(layers, device=device)
    pytest.importorskip("triton")
    tune_layers = importlib.import_module("fdk_cuda.triton").tune_layers
    with pytest.raises(RuntimeError, match=r"tune_layers: needs an NVIDIA GPU .* torch finds none"):
        tune_layers(layers, device=device)


def test_auto_prefers_marlin_to_triton():
    problem = Problem(Format.parse("nf4-g64"), 64, 128, torch.bfloat16, torch.device("cuda", 0))
    names = [name for name in ("reference", "triton", "marlin-lut") if name in all_backends()]
    priorities = [all_backends()[name].priority(problem) for name in names]
    assert priorities == sorted(set(priorities))

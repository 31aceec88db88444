"""What is said of layers that cannot be made ready, where there is no GPU too."""

import pytest
import torch

from fdk_cuda.gpu import unsupported_gpu
from fdk_cuda.precompile_args import check_activations, checked_layers
from fdk_formats.format import Format


def test_layers_without_outputs_are_left_out():
    layers = [("int4-g64", 0, 64), ["int4-g64", 3, 64], (Format("nf", 4, 32), 1, 32)]
    assert checked_layers("caller", layers) == [
        (Format("int", 4, 64), 3, 64),
        (Format("nf", 4, 32), 1, 32),
    ]


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (("int4-g64", -1, 64), ValueError, "caller: n of int4-g64 must be at least 0, got -1"),
        (("int4-g64", 8, -64), ValueError, "int4-g64: k must be a positive .* of 64, got k=-64"),
        (("int4-g64", 0, 96), ValueError, "int4-g64: k must be a positive .* of 64, got k=96"),
        (("int4-g64", 8.0, 64), TypeError, "n and k of int4-g64 must be int, got 8.0 and 64"),
        (("int4-g64", 8), TypeError, r"a layer must be \(format, n, k\), got \('int4-g64', 8\)"),
        ("int4-g64", TypeError, r"a layer must be \(format, n, k\), got 'int4-g64'"),
        ((4, 8, 64), TypeError, "wanted a string or a Format, got int"),
    ],
)
def test_bad_layers(layer, error, message):
    with pytest.raises(error, match=message):
        checked_layers("caller", [layer])


def test_other_activations():
    check_activations("caller", torch.float16, (torch.bfloat16, torch.float16))
    with pytest.raises(TypeError, match=r"caller: dtype must be torch\.bfloat16, got torch\.int8"):
        check_activations("caller", torch.int8, (torch.bfloat16,))


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((8, 0), None, None),
        ((12, 0), None, None),
        ((7, 5), None, "needs compute capability 8.0 or later, got 7.5"),
        ((9, 4), "6.4", "needs an NVIDIA GPU, got one of AMD"),
    ],
)
def test_gpus(capability, hip, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert unsupported_gpu(torch.device("cuda")) == reason
    assert unsupported_gpu(torch.device("cpu")) == "needs an NVIDIA GPU, got cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds none on this machine" in str(unsupported_gpu(torch.device("cuda")))

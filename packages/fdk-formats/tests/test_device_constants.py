"""Constants on a device outlive what rules the thread that asks for them first."""

import threading

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fdk_formats.device_constants import constant_on

CPU = torch.device("cpu")


def test_values_and_one_copy():
    found = constant_on(CPU, (1.0, -2.5))
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0, -2.5]
    assert constant_on(CPU, (1.0, -2.5)) is found
    assert constant_on(CPU, (1.0, -2.5), torch.float64).dtype == torch.float64


def test_neither_inference_nor_tracing_spoils_them():
    with torch.inference_mode(), FakeTensorMode(), torch.device("meta"):
        found = constant_on(CPU, (3.0, 4.0))
    assert type(found) is torch.Tensor
    assert not found.is_inference()
    assert found.device == CPU
    assert found.tolist() == [3.0, 4.0]


def test_another_thread_makes_them(monkeypatch):
    makers = []
    make = torch.tensor
    monkeypatch.setattr(
        torch, "tensor", lambda *a, **k: makers.append(threading.get_ident()) or make(*a, **k)
    )
    constant_on(CPU, (5.0, 6.0))
    assert len(makers) == 1
    assert makers[0] != threading.get_ident()

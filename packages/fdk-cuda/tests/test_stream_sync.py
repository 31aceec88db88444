"""Layouts synchronise when packed, moved or copied; fake tensors stand in for a GPU."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fdk_cuda.marlin import MarlinLayout
from fdk_cuda.stream_sync import SyncedLayout
from fdk_formats import Format
from fdk_formats.testing import random_quantised

MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda module: module.to("cuda:1"),
    "cuda": lambda module: module.cuda(1),
    "of-a-parent": lambda module: nn.Sequential(nn.Sequential(module)).to("cuda:1"),
}


@pytest.fixture(params=["marlin", "triton"])
def pack(request: pytest.FixtureRequest) -> Callable[[str], SyncedLayout]:
    """Packs a weight of a format by a backend."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")

    def packed(format: str) -> SyncedLayout:
        q = random_quantised(Format.parse(format), 64, 128, seed=0)
        if request.param == "marlin":
            return MarlinLayout(q, torch.bfloat16)
        from fdk_cuda.triton import TritonLayout

        return TritonLayout(q)

    return packed


@pytest.fixture
def synchronised_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Records the devices that are synchronised."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", devices.append)
    return devices


@pytest.fixture
def synchronised(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the buffers that exist at each synchronisation."""
    names: list[list[str]] = []

    def synchronise(layout: SyncedLayout) -> None:
        names.append([name for name, _ in layout.named_buffers()])

    monkeypatch.setattr(SyncedLayout, "synchronise", synchronise)
    return names


@pytest.mark.parametrize("format", ["nf4-g64", "affine4-g64"])
def test_packing_and_copying_end_with_a_synchronisation(
    pack: Callable[[str], SyncedLayout], format: str, synchronised: list[list[str]]
) -> None:
    """Every tensor of the layout exists before the synchronisation."""
    layout = pack(format)
    whole = [name for name, _ in layout.named_buffers()]
    assert whole
    assert synchronised == [whole]
    copy.deepcopy(layout)
    assert synchronised == [whole, whole]


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moves_synchronise(
    pack: Callable[[str], SyncedLayout],
    move: Callable[[nn.Module], nn.Module],
    synchronised_devices: list[torch.device],
) -> None:
    layout = pack("nf4-g64")
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(layout)
    assert {buffer.device for buffer in layout.buffers()} == {torch.device("cuda", 1)}
    assert synchronised_devices == [torch.device("cuda", 1)]


def test_the_cpu_is_not_synchronised(
    pack: Callable[[str], SyncedLayout], synchronised_devices: list[torch.device]
) -> None:
    layout = pack("affine4-g64").to("cpu")
    assert isinstance(layout, SyncedLayout)
    assert not synchronised_devices

"""A weight is waited for when it is packed, moved or copied; fake tensors stand for a GPU's."""

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
def waited_for(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were waited for."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", devices.append)
    return devices


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the buffers that were there, of every wait."""
    names: list[list[str]] = []

    def synchronise(layout: SyncedLayout) -> None:
        names.append([name for name, _ in layout.named_buffers()])

    monkeypatch.setattr(SyncedLayout, "synchronise", synchronise)
    return names


@pytest.mark.parametrize("format", ["nf4-g64", "affine4-g64"])
def test_packing_and_copying_end_with_the_wait(
    pack: Callable[[str], SyncedLayout], format: str, settled: list[list[str]]
) -> None:
    """Every tensor of the layout is there by then."""
    layout = pack(format)
    whole = [name for name, _ in layout.named_buffers()]
    assert whole
    assert settled == [whole]
    copy.deepcopy(layout)
    assert settled == [whole, whole]


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moves_are_waited_for(
    pack: Callable[[str], SyncedLayout],
    move: Callable[[nn.Module], nn.Module],
    waited_for: list[torch.device],
) -> None:
    layout = pack("nf4-g64")
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(layout)
    assert {buffer.device for buffer in layout.buffers()} == {torch.device("cuda", 1)}
    assert waited_for == [torch.device("cuda", 1)]


def test_nothing_is_waited_for_on_the_cpu(
    pack: Callable[[str], SyncedLayout], waited_for: list[torch.device]
) -> None:
    layout = pack("affine4-g64").to("cpu")
    assert isinstance(layout, SyncedLayout)
    assert not waited_for

"""Calls of the Triton backend made ready, with a launch that only looks."""

import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fdk_cuda.triton import TritonLayout, autotune, remembered
from fdk_cuda.triton import ready as ready_module
from fdk_cuda.triton.configs import H200, GemvConfig
from fdk_cuda.triton.ready import ReadyCall, ReadyCalls
from fdk_formats.format import Format
from fdk_formats.testing import random_quantised

N, K = 96, 128
HERE = -1  # the device index of tensors on the CPU
X = torch.zeros(2, K, dtype=torch.bfloat16)
BIAS = torch.zeros(N, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: HERE, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)


def layout(format: str = "nf4-g64") -> TritonLayout:
    return TritonLayout(random_quantised(Format.parse(format), N, K, seed=0))


def launched(seen: list[tuple[object, ...]]) -> remembered.Launch:
    kernel = SimpleNamespace(
        run=lambda *arguments: seen.append(arguments), function=5, packed_metadata=None
    )
    return remembered.Launch(kernel, (3,), ("rest",))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("format", ["nf4-g64", "affine4-g64"])
@pytest.mark.parametrize("batch", [(1,), (2, 3), ()])
def test_ready_call(batch: tuple[int, ...], format: str, has_bias: bool) -> None:
    """The kernel gets the addresses of small's tensors, in their order."""
    seen: list[tuple[object, ...]] = []
    own, x = layout(format), torch.zeros(*batch, K, dtype=torch.bfloat16)
    bias = BIAS if has_bias else None
    w = own._weight()
    call = ReadyCall(x, w, launched(seen), has_bias)
    y = call(x, bias, own._buffers)
    assert y is not None
    assert (y.shape, y.dtype) == ((*batch, N), x.dtype)
    tensors = (x, *w.tensors, BIAS if has_bias else x, y)
    assert seen == [
        (3, 1, 1, 7, 5, None, None, None, None, *(t.data_ptr() for t in tensors), "rest")
    ]


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (X.half(), None),
        (torch.zeros(K, 2, dtype=torch.bfloat16).T, None),
        (torch.zeros(2 * K + 1, dtype=torch.bfloat16)[1:].view(2, K), None),
        (X, BIAS),  # the kernel is the one without
    ],
)
def test_what_is_left_to_the_op(x: torch.Tensor, bias: torch.Tensor | None) -> None:
    seen: list[tuple[object, ...]] = []
    own = layout()
    call = ReadyCall(X, own._weight(), launched(seen), False)
    assert call(x, bias, own._buffers) is None
    with_bias = ReadyCall(X, own._weight(), launched(seen), True)
    shifted = torch.zeros(N + 1, dtype=torch.bfloat16)[1:]
    for other in (None, shifted, BIAS.float(), BIAS[None]):
        assert with_bias(X, other, own._buffers) is None
    assert not seen


@pytest.mark.parametrize("change", [{"scale": torch.float16}, {"zero_point": torch.float16}])
def test_buffers_of_another_dtype(change: dict[str, torch.dtype]) -> None:
    """As ``layer.half()`` makes them: the kernel was compiled for what was packed."""
    seen: list[tuple[object, ...]] = []
    own = layout("affine4-g64")
    call = ReadyCall(X, own._weight(), launched(seen), False)
    ((name, dtype),) = change.items()
    other = own._buffers | {name: own._buffers[name].to(dtype)}
    assert call(X, None, other) is None
    assert call(X, None, own._buffers | {"zero_point": None}) is None
    assert not seen


@pytest.mark.parametrize("format", ["nf4-g64", "affine4-g64"])
def test_again(format: str) -> None:
    """By one check of x; buffers are asked for their address, and for their dtype at the same."""
    seen: list[tuple[object, ...]] = []
    own = layout(format)
    call = ReadyCall(X, own._weight(), launched(seen), False)
    assert call.again(X, None, own._buffers) is None
    assert call(X, None, own._buffers) is not None
    for name, tensor in own.named_buffers():
        tensor.data = tensor.data.clone()
        y = call.again(X, None, own._buffers)
        assert y is not None
        addresses = [t.data_ptr() for t in (X, *own._weight().tensors, X, y)]
        assert list(seen[-1][9:-1]) == addresses
        if name in ("scale", "zero_point"):
            kept = tensor.data
            tensor.data = kept.view(torch.float16)
            assert call.again(X, None, own._buffers) is None
            tensor.data = kept
    count = len(seen)
    own.words.data = torch.zeros(own.words.numel() + 1, dtype=torch.int32)[1:]
    assert call.again(X, None, own._buffers) is None  # not aligned
    assert call(X, None, own._buffers) is None
    assert len(seen) == count


def test_buffers_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are at another address, then."""
    seen: list[tuple[object, ...]] = []
    own = layout()
    call = ReadyCall(X, own._weight(), launched(seen), False)
    assert call(X, None, own._buffers) is not None
    words = own.words.clone()
    monkeypatch.setattr(words, "get_device", lambda: HERE + 1, raising=False)
    own.words = words
    assert call.again(X, None, own._buffers) is None
    assert len(seen) == 1


def test_zero_points_that_come_or_go() -> None:
    seen: list[tuple[object, ...]] = []
    own, affine = layout(), layout("affine4-g64")
    call = ReadyCall(X, own._weight(), launched(seen), False)
    assert call(X, None, own._buffers) is not None
    assert call.again(X, None, own._buffers | {"zero_point": affine.zero_point}) is None
    assert call.again(X, None, own._buffers) is not None
    assert len(seen) == 2


def test_measuring_makes_calls_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []
    own = layout()
    call = ReadyCall(X, own._weight(), launched(seen), False)
    assert call(X, None, own._buffers) is not None
    monkeypatch.setattr(autotune, "times_measured", autotune.times_measured + 1)
    assert call.is_stale()
    assert call.again(X, None, own._buffers) is None
    assert call(X, None, own._buffers) is None
    assert len(seen) == 1


def test_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the small kernel has launched, by the shape of x, until something is measured."""
    own, calls, made = layout(), ReadyCalls(), launched([])
    config = GemvConfig(n_tiles=1, warps=8)
    w = own._weight()
    calls.keep(X, w, None)
    assert calls.get(X) is None  # not on a GPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(autotune, "choose", lambda w, m, dtype, device: config)
    monkeypatch.setattr(ready_module, "launched_gemv", lambda *key: None)
    calls.keep(X, w, None)
    assert calls.get(X) is None  # nothing launched
    monkeypatch.setattr(ready_module, "launched_gemv", lambda *key: made)
    for x in (X[:0], torch.zeros(H200.limits.gemv_m + 1, K, dtype=X.dtype)):
        calls.keep(x, w, None)
        assert calls.get(x) is None
    calls.keep(X, w, None)
    kept = calls.get(X)
    assert kept is not None
    calls.keep(X, w, None)
    assert calls.get(X) is kept
    monkeypatch.setattr(autotune, "times_measured", autotune.times_measured + 1)
    calls.keep(X, w, None)
    assert calls.get(X) not in (None, kept)

    def measured_meanwhile(*key: object) -> remembered.Launch:
        monkeypatch.setattr(autotune, "times_measured", autotune.times_measured + 1)
        return made

    monkeypatch.setattr(ready_module, "launched_gemv", measured_meanwhile)
    calls.keep(X[:1], w, None)
    assert calls.get(X[:1]) is None
    assert copy.deepcopy(calls).get(X) is None
    assert type(copy.deepcopy(calls)) is ReadyCalls

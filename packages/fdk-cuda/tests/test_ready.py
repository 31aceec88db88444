"""What a launch hands to the driver, and calls made ready: with a driver that only looks."""

import copy
import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest
import torch

from fdk_cuda.marlin import ready
from fdk_cuda.nvrtc import Launch
from fdk_cuda.nvrtc import launch as launch_module
from fdk_formats.testing import poisoned

N, K, FORMAT = 96, 128, "nf4-g64"
FIELDS = "5P2if"
HERE = -1  # the device index of tensors on the CPU
DONE = SimpleNamespace(value=0)


@pytest.fixture
def launched(monkeypatch):
    """The fields of every launch, as the driver would read them."""
    seen = []

    def launch(config, function, address, extra):
        (params,) = struct.unpack("@P", ctypes.string_at(address, 8))
        size = struct.calcsize(f"@P{FIELDS}") - 8
        seen.append(struct.unpack(f"@{FIELDS}", ctypes.string_at(params, size)))
        return (DONE,)

    driver = SimpleNamespace(
        cuLaunchKernelEx=launch,
        CUresult=SimpleNamespace(CUDA_SUCCESS=DONE, CUDA_ERROR_INVALID_CONTEXT=201),
        CUlaunchConfig=SimpleNamespace,
        CUstream=lambda stream: stream,
    )
    monkeypatch.setattr(launch_module, "cuda", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: HERE, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return seen


def make_launch():
    kernel = SimpleNamespace(load=lambda device: None, entry="kernel")
    return Launch(kernel, HERE, fields=FIELDS, grid=1, threads=32, shared_bytes=0)


def test_bound_launch_gives_the_same_fields(launched):
    launch = make_launch()
    bound = launch.bound(6, 7, 0.5)
    for first in (1, 2):
        launch(first, 20, 30, 40, 50, 6, 7, 0.5)
        bound(first, 20, 30, 40, 50)
        assert launched[-1] == launched[-2] == (first, 20, 30, 40, 50, 6, 7, 0.5)


def test_threads_do_not_share_arguments(launched):
    bound = make_launch().bound(6, 7, 0.5)
    buffers = []

    def call(value):
        bound(value, value, value, value, value)
        buffers.append(bound._local.kept)

    for value in range(3):
        thread = threading.Thread(target=call, args=(value,))
        thread.start()
        thread.join()
    assert len({address for _, address in buffers}) == 3
    assert [fields[:5] for fields in launched] == [(value,) * 5 for value in range(3)]


def empty_strided(size, strides, dtype):
    return torch.empty_strided(size, strides, dtype=dtype)


@pytest.fixture
def made(launched, monkeypatch):
    """Makes calls for tensors on the CPU, with the device index that they have."""

    def launch_for(format, dtype, m, n, k, device, batch_invariant):
        return make_launch(), (m, n, 0.0)

    monkeypatch.setattr(ready, "small_launch_for", launch_for)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", empty_strided)
    return lambda x: ready.ReadyCall(FORMAT, x, N)


TENSORS = {
    "packed": torch.zeros(8, dtype=torch.uint8),
    "codebook": torch.zeros(16, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("batch", [(1,), (2, 3), ()])
def test_ready_call(made, launched, batch):
    x, bias = torch.zeros(*batch, K, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.bfloat16)
    y = made(x)(x, bias, TENSORS)
    assert y.shape == (*batch, N)
    assert y.dtype == x.dtype
    addresses = [t.data_ptr() for t in (TENSORS["packed"], TENSORS["codebook"], x, bias, y)]
    assert launched == [(*addresses, x.numel() // K, N, 0.0)]
    made(x)(x, None, TENSORS)
    assert launched[-1][3] == 0


def test_memory_of_deterministic_torch_is_filled(made):
    """So that an output which no kernel has written is seen."""
    call = made(X)
    with poisoned():
        assert call(X, None, TENSORS).isnan().all()


def test_ready_call_without_the_memory_of_inductor(made, launched, monkeypatch):
    """No version of torch promises its function."""
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda")
    y = made(X)(X, None, TENSORS)
    assert (y.shape, y.dtype) == ((2, N), X.dtype)
    assert launched[-1][4] == y.data_ptr()


def test_ready_call_leaves_other_devices_to_the_op(made, launched, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: HERE + 1)
    call = made(X)
    assert call(X, None, TENSORS) is None
    assert not launched


BIAS = torch.zeros(N, dtype=torch.bfloat16)
X = torch.zeros(2, K, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "bias", "tensors"),
    [
        (X.half(), None, TENSORS),
        (torch.zeros(K, 2, dtype=torch.bfloat16).T, None, TENSORS),
        (torch.zeros(2 * K + 1, dtype=torch.bfloat16)[1:].view(2, K), None, TENSORS),
        (X, BIAS.float(), TENSORS),
        (X, BIAS[1:], TENSORS),
        (X, BIAS[None], TENSORS),
        (X, BIAS[:1].expand(N), TENSORS),
        (X, BIAS, TENSORS | {"codebook": torch.zeros(16, dtype=torch.float16)}),
    ],
)
def test_ready_call_leaves_other_calls_to_the_op(made, launched, x, bias, tensors):
    assert made(X)(x, bias, tensors) is None
    assert not launched


def test_ready_calls_keep_what_the_kernel_takes(made, monkeypatch):
    calls = ready.ReadyCalls()
    calls.keep(X, FORMAT, K, N)
    assert calls.get(X) is None  # not on a GPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for x, columns in ((X[:0], K), (torch.zeros(17, K), K), (X, K + 32)):
        calls.keep(x, FORMAT, columns, N)
        assert calls.get(x) is None
    calls.keep(X, FORMAT, K, N)
    kept = calls.get(X)
    assert kept is not None
    calls.keep(torch.zeros(K, 2, dtype=X.dtype).T, FORMAT, K, N)
    assert calls.get(X) is kept
    calls.keep(X.half(), FORMAT, K, N)
    assert calls.get(X) is not kept
    assert copy.deepcopy(calls).get(X) is None
    for rows in range(2 * ready.MAX_KEPT):
        calls.keep(torch.zeros(1, *[1] * (rows % 60), 1 + rows % 16, K), FORMAT, K, N)
    assert len(calls._calls) <= ready.MAX_KEPT

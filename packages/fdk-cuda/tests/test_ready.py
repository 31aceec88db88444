"""What a launch hands to the driver, and calls made ready: with a driver that only looks."""

import copy
import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode

from fdk_cuda.marlin import MarlinLayout, ready
from fdk_cuda.nvrtc import Launch
from fdk_cuda.nvrtc import launch as launch_module
from fdk_formats import ops
from fdk_formats.format import Format
from fdk_formats.testing import poisoned, random_quantised

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


@pytest.mark.parametrize("bias", [None, BIAS])
def test_again(made, launched, bias):
    """x, bias and buffers of other memory are taken by one check, and launched with."""
    call, tensors = made(X), {name: tensor.clone() for name, tensor in TENSORS.items()}
    assert call.again(X, bias, TENSORS) is None  # nothing was taken yet
    assert call(X, bias, TENSORS) is not None
    other_bias = None if bias is None else bias.clone()
    for x in (X, X.clone()):
        y = call.again(x, other_bias, tensors)
        addresses = [t.data_ptr() for t in (tensors["packed"], tensors["codebook"], x)]
        bias_address = 0 if bias is None else other_bias.data_ptr()
        assert launched[-1][:5] == (*addresses, bias_address, y.data_ptr())
        tensors["codebook"].data = tensors["codebook"].data.clone()
    assert call.again(X, BIAS if bias is None else None, TENSORS) is None
    assert len(launched) == 3


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (X.half(), BIAS),
        (X[:1], BIAS),
        (torch.zeros(K, 2, dtype=torch.bfloat16).T, BIAS),
        (torch.zeros(2 * K + 1, dtype=torch.bfloat16)[1:].view(2, K), BIAS),
        (X.clone().requires_grad_(), BIAS),
        (X, BIAS.half()),
        (X, BIAS[1:]),
        (X, BIAS[:1].expand(N)),
        (X, torch._neg_view(BIAS)),
        (X, BIAS.clone().requires_grad_()),
    ],
)
def test_again_leaves_others(made, launched, x, bias):
    call = made(X)
    assert call(X, BIAS, TENSORS) is not None
    assert call.again(x, bias, TENSORS) is None
    assert len(launched) == 1


def test_again_with_a_bias_that_trains(made):
    """Its gradient is asked for wherever torch records one."""
    call, bias = made(X), BIAS.clone().requires_grad_()
    with torch.no_grad():
        assert call(X, bias, TENSORS) is not None
        assert call.again(X, bias, TENSORS) is not None
    assert call.again(X, bias, TENSORS) is None


def test_x_that_trains_is_looked_at_anew(made):
    call, x = made(X), X.clone().requires_grad_()
    with torch.no_grad():
        assert call(x, None, TENSORS) is not None
    assert call.again(x, None, TENSORS) is None


@pytest.mark.parametrize(
    "watch",
    [
        FakeTensorMode,
        BaseTorchFunctionMode,
        forward_ad.dual_level,
        torch.autograd.profiler.profile,
    ],
    ids=["dispatch mode", "function mode", "forward mode", "profiler"],
)
def test_again_leaves_what_torch_watches(made, launched, watch):
    call = made(X)
    assert call(X, None, TENSORS) is not None
    with watch():
        assert call.again(X, None, TENSORS) is None
    assert call.again(X, None, TENSORS) is not None
    assert len(launched) == 2


def test_again_in_inference_mode(made):
    """What was taken outside is looked at once more inside, then not again."""
    call = made(X)
    assert call(X, None, TENSORS) is not None
    with torch.inference_mode():
        x = X + 1
        assert call.again(x, None, TENSORS) is None
        assert call(x, None, TENSORS) is not None
        assert call.again(x, None, TENSORS) is not None


def test_buffers_are_looked_at_in_every_call(made, launched, monkeypatch):
    """Another dtype may come at the same address, another device only at another."""
    call, tensors = made(X), {name: tensor.clone() for name, tensor in TENSORS.items()}
    assert call(X, None, tensors) is not None
    tensors["codebook"].data = tensors["codebook"].data.view(torch.float16)
    assert call.again(X, None, tensors) is None
    elsewhere = TENSORS | {"packed": torch.zeros(8, dtype=torch.uint8)}
    monkeypatch.setattr(elsewhere["packed"], "get_device", lambda: HERE + 1, raising=False)
    assert call.again(X, None, elsewhere) is None
    assert call.again(X, None, TENSORS) is not None
    assert len(launched) == 2


def test_again_follows_the_current_device(made, launched, monkeypatch):
    device = [HERE]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device[0])
    call = made(X)
    assert call(X, None, TENSORS) is not None
    device[0] += 1
    assert call.again(X, None, TENSORS) is None
    assert len(launched) == 1


def test_without_the_check_of_torch_compile(made, launched, monkeypatch):
    """No version of torch promises it."""
    monkeypatch.setattr(ops, "_guards", lambda: None)
    call = made(X)
    for _ in range(2):
        assert call.again(X, None, TENSORS) is None
        assert call(X, None, TENSORS) is not None


def test_layout_takes_the_call_of_its_last_shape(made, launched, monkeypatch):
    """Then torch is not asked about x, and nothing is looked up."""
    layout = MarlinLayout(random_quantised(Format.parse(FORMAT), N, K, seed=0), X.dtype)
    one, two = X[:1], X
    for x in (one, two):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            layout._ready.keep(x, FORMAT, K, N)
        assert layout(x).shape == (len(x), N)
    assert layout._ready.again == layout._ready.get(two).again
    assert layout(one).shape == (1, N)
    assert layout._ready.again == layout._ready.get(one).again
    monkeypatch.setattr(ops, "_watched", lambda x, bias: pytest.fail("asked"))
    monkeypatch.setattr(ready.ReadyCalls, "__call__", lambda *args: pytest.fail("looked up"))
    assert layout(one).shape == (1, N)
    layout.packed = layout.packed.clone()
    assert layout(one).shape == (1, N)
    assert launched[-1][0] == layout.packed.data_ptr()
    assert len(launched) == 5


def test_torch_compile_traces_the_op():
    """No ready call comes into its graph, also of a layout that has one."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return lambda *args: (torch.zeros(2, N),)

    layout = MarlinLayout(random_quantised(Format.parse(FORMAT), N, K, seed=0), X.dtype)
    layout._ready.again = lambda x, bias, tensors: pytest.fail("traced")
    torch.compile(layout, backend=keep, fullgraph=True)(X)
    (graph,) = graphs
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == ["fdk_cuda.marlin_linear.default"]


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

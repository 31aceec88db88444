"""Cached launches on the CPU: a stand-in for each kernel records the addresses that it gets."""

import copy
import ctypes
import math
import struct
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from fdk_cuda import launch_cache
from fdk_cuda.launch_cache import MAX_LAUNCHES
from fdk_cuda.marlin import MarlinLayout
from fdk_cuda.marlin import backend as marlin_backend
from fdk_cuda.marlin.heuristics_small_m import MAX_M
from fdk_cuda.nvrtc import Launch
from fdk_cuda.nvrtc import launch as nvrtc_launch
from fdk_cuda.triton import TritonLayout, autotune
from fdk_cuda.triton import backend as triton_backend
from fdk_cuda.triton.compiled_launch import CompiledLaunch
from fdk_cuda.triton.configs import H200
from fdk_cuda.triton.configs.gemv import gemv_config
from fdk_cuda.triton.layout import PackedLayout
from fdk_formats import torch_internals
from fdk_formats.format import Format
from fdk_formats.testing import poisoned, random_quantised

N, K = 96, 128
CPU = -1  # device index of tensors on the CPU
FIELDS = "5P2if"
X = torch.zeros(2, K, dtype=torch.bfloat16)
BIAS = torch.zeros(N, dtype=torch.bfloat16)
GEMV = gemv_config(PackedLayout(N, K, 4, 64), 1, H200)
SUCCESS = SimpleNamespace(value=0)


def nvrtc_launch_of(kernel: str = "kernel") -> Launch:
    kernel_: Any = SimpleNamespace(load=lambda device: None, entry=kernel)
    return Launch(kernel_, CPU, fields=FIELDS, grid=1, threads=32, shared_bytes=0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The fields of every struct that a launch passes to the driver."""
    seen = []

    def launch(config: Any, function: Any, address: int, extra: Any) -> tuple[Any]:
        (params,) = struct.unpack("@P", ctypes.string_at(address, 8))
        size = struct.calcsize(f"@P{FIELDS}") - 8
        seen.append(struct.unpack(f"@{FIELDS}", ctypes.string_at(params, size)))
        return (SUCCESS,)

    driver = SimpleNamespace(
        cuLaunchKernelEx=launch,
        CUresult=SimpleNamespace(CUDA_SUCCESS=SUCCESS, CUDA_ERROR_INVALID_CONTEXT=201),
        CUlaunchConfig=SimpleNamespace,
        CUstream=lambda stream: stream,
    )
    monkeypatch.setattr(nvrtc_launch, "cuda", lambda: driver)
    monkeypatch.setattr(torch_internals, "current_raw_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU)
    return seen


def test_bound_launch_passes_the_same_fields(launches: list[tuple[Any, ...]]) -> None:
    launch = nvrtc_launch_of()
    bound = launch.bound(6, 7, 0.5)
    for first in (1, 2):
        launch(first, 20, 30, 40, 50, 6, 7, 0.5)
        bound(first, 20, 30, 40, 50)
        assert launches[-1] == launches[-2] == (first, 20, 30, 40, 50, 6, 7, 0.5)


def test_threads_do_not_share_arguments(launches: list[tuple[Any, ...]]) -> None:
    bound = nvrtc_launch_of().bound(6, 7, 0.5)
    buffers = []

    def call(value: int) -> None:
        bound(value, value, value, value, value)
        buffers.append(bound._local.kept)

    for value in range(3):
        thread = threading.Thread(target=call, args=(value,))
        thread.start()
        thread.join()
    assert len({address for _, address in buffers}) == 3
    assert [fields[:5] for fields in launches] == [(value,) * 5 for value in range(3)]


@dataclass
class Setup:
    """A layout whose op returns zeros and whose kernel does nothing.

    Attributes:
        layout: layout of one of the backends.
        launches: arguments of every launch, from the first address on.
        op_calls: the x of every call of the op.
    """

    layout: Any
    launches: list[tuple[Any, ...]]
    op_calls: list[Tensor] = field(default_factory=list)

    def op(self, x: Tensor, *args: Any) -> Tensor:
        self.op_calls.append(x)
        return torch.zeros(*x.shape[:-1], N, dtype=x.dtype)

    def launched(self, x: Tensor = X, bias: Tensor | None = None) -> bool:
        """Calls the layout; returns True for a launch with the right addresses and no op."""
        launches, op_calls = len(self.launches), len(self.op_calls)
        y = self.layout(x, bias)
        assert (y.shape, y.dtype) == ((*x.shape[:-1], N), x.dtype)
        new = self.launches[launches:]
        if len(self.op_calls) > op_calls:
            assert new == []
            return False
        addresses = self.addresses(x, bias, y)
        assert [arguments[: len(addresses)] for arguments in new] == [addresses]
        return True

    def addresses(self, x: Tensor, bias: Tensor | None, y: Tensor) -> tuple[int, ...]:
        own = self.layout
        if isinstance(own, MarlinLayout):
            tensors = [own.packed, own.codebook, x, bias, y]
        else:
            tensors = [x, *own._weight().tensors, x if bias is None else bias, y]
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


MARLIN, TRITON, TRITON_AFFINE = "marlin nf4-g64", "triton nf4-g64", "triton affine4-g64"
ONLY_TRITON = pytest.mark.parametrize("setup", [TRITON, TRITON_AFFINE], indirect=True)


@pytest.fixture(params=[MARLIN, TRITON, TRITON_AFFINE])
def setup(
    request: pytest.FixtureRequest,
    launches: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> Setup:
    backend, format = request.param.split()
    q = random_quantised(Format.parse(format), N, K, seed=0)
    own = Setup(MarlinLayout(q, X.dtype) if backend == "marlin" else TritonLayout(q), launches)
    # The grid, the stream, the kernel with its metadata and hooks, then the addresses.
    kernel = SimpleNamespace(
        run=lambda *arguments: launches.append(arguments[9:]), function=5, packed_metadata=None
    )
    compiled = CompiledLaunch(kernel, (3,), ())
    for module, name, stand_in in (
        (marlin_backend, "linear_op", own.op),
        (marlin_backend, "small_launch_for", lambda f, d, m, *_: (nvrtc_launch_of(), (m, N, 0.0))),
        (triton_backend, "triton_linear_op", own.op),
        (triton_backend, "launched_gemv", lambda *_: compiled),
        (autotune, "choose", lambda *_: GEMV),
        (launch_cache, "current_device", lambda: CPU),
        (Tensor, "is_cuda", True),
    ):
        monkeypatch.setattr(module, name, stand_in)
    return own


@pytest.mark.parametrize("bias", [None, BIAS], ids=["no bias", "bias"])
@pytest.mark.parametrize("batch", [(1,), (2, 3), ()])
def test_second_call_is_launched(setup: Setup, batch: tuple[int, ...], bias: Tensor | None) -> None:
    x = torch.zeros(*batch, K, dtype=X.dtype)
    assert not setup.launched(x, bias)
    other_bias = None if bias is None else bias.clone()
    for again in (x, x.clone(), x.clone()):
        assert setup.launched(again, other_bias)
    if isinstance(setup.layout, MarlinLayout):
        assert setup.launches[-1][5:] == (x.numel() // K, N, 0.0)


def test_each_shape_has_its_launch(setup: Setup) -> None:
    for x in (X[:1], X, X[None]):
        assert not setup.launched(x)
        assert not setup.launched(x, BIAS)
    for x in (X, X[:1], X[None]):
        assert setup.launched(x)
        assert setup.launched(x, BIAS)
    assert not setup.launched(X.half())


def aside(shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor whose address is a multiple of 2 and not of 16."""
    return torch.zeros(1 + math.prod(shape), dtype=X.dtype)[1:].view(shape)


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (X.half(), BIAS.half()),
        (torch.zeros(K, 2, dtype=X.dtype).T, BIAS),
        (aside((2, K)), BIAS),
        (X.clone().requires_grad_(), BIAS),
        (X, None),
        (X, BIAS.float()),
        (X, BIAS[1:]),
        (X, BIAS[None]),
        (X, BIAS[:1].expand(N)),
        (X, aside((N,))),
        (X, torch._neg_view(BIAS)),
        (X, BIAS.clone().requires_grad_()),
    ],
)
def test_other_calls_go_to_the_op(setup: Setup, x: Tensor, bias: Tensor | None) -> None:
    setup.launched(X, BIAS)
    assert not setup.launched(x, bias)
    assert setup.launched(X, BIAS)


def test_a_bias_that_trains_is_launched_without_gradients(setup: Setup) -> None:
    bias = torch.nn.Parameter(BIAS)
    with torch.no_grad():
        assert [setup.launched(X, bias) for _ in range(2)] == [False, True]
    assert not setup.launched(X, bias)


def test_calls_that_are_not_plain_go_to_the_op(setup: Setup) -> None:
    setup.launched()
    with torch.autograd.profiler.profile():
        assert not setup.launched()
    with torch.inference_mode():
        assert setup.launched(X + 1)
    assert setup.launched()


def test_current_device(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.launched()
    monkeypatch.setattr(launch_cache, "current_device", lambda: CPU + 1)
    assert not setup.launched()


def test_output_of_deterministic_torch_is_filled(setup: Setup) -> None:
    """Deterministic torch fills y with NaN, so an element that no kernel wrote shows."""
    setup.launched()
    with poisoned():
        assert setup.layout(X).isnan().all()
    assert len(setup.op_calls) == 1


def test_cached_launch_keeps_no_memory(setup: Setup) -> None:
    setup.launched()
    (cached,) = setup.layout._launches._launches.values()
    assert cached.y.untyped_storage().nbytes() == 0


def test_buffers_may_be_replaced(setup: Setup) -> None:
    """Tensors may be replaced by ``.data`` or as attributes; ``launched`` checks the addresses."""
    setup.launched()
    for name, buffer in setup.layout.named_buffers():
        buffer.data = buffer.data.clone()
        assert setup.launched()
        setattr(setup.layout, name, buffer.clone())
        assert setup.launched()


def test_buffers_that_are_not_aligned(setup: Setup) -> None:
    setup.launched()
    name, buffer = next(setup.layout.named_buffers())
    other = torch.zeros(buffer.numel() + 1, dtype=buffer.dtype)[1:].view(buffer.shape)
    setattr(setup.layout, name, other)
    assert not setup.launched()
    setattr(setup.layout, name, buffer)
    assert setup.launched()


@pytest.mark.parametrize(
    ("setup", "name"),
    [
        (MARLIN, "codebook"),
        (TRITON, "scale"),
        (TRITON_AFFINE, "scale"),
        (TRITON_AFFINE, "zero_point"),
    ],
    indirect=["setup"],
)
def test_buffers_of_another_dtype(setup: Setup, name: str) -> None:
    """``layer.half()`` does this; the kernel was compiled for the packed dtypes."""
    buffer = getattr(setup.layout, name)
    setup.launched()
    kept = buffer.data
    buffer.data = kept.view(torch.float16) if kept.element_size() == 2 else kept.half()
    assert not setup.launched()
    buffer.data = kept
    assert setup.launched()


@ONLY_TRITON
def test_zero_points_that_come_or_go(setup: Setup) -> None:
    setup.launched()
    own = setup.layout
    own.zero_point = own.scale.clone() if own.zero_point is None else None
    assert not setup.launched()


def test_buffers_on_another_device(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.launched()
    name, buffer = next(setup.layout.named_buffers())
    other = buffer.clone()
    monkeypatch.setattr(other, "get_device", lambda: CPU + 1, raising=False)
    setattr(setup.layout, name, other)
    assert not setup.launched()


def test_calls_that_are_not_cached(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls without rows, with more than the kernel's, or not on a GPU are not cached."""
    limit = MAX_M if isinstance(setup.layout, MarlinLayout) else H200.limits.gemv_m
    for x in (X[:0], torch.zeros(limit + 1, K, dtype=X.dtype)):
        assert [setup.launched(x) for _ in range(2)] == [False] * 2
    assert [setup.launched(X[:1].expand(limit, K).clone()) for _ in range(2)] == [False, True]
    monkeypatch.setattr(Tensor, "is_cuda", False)
    assert [setup.launched() for _ in range(2)] == [False] * 2


def test_inputs_that_marlin_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    q = random_quantised(Format.parse("int4-g32"), N, 96, seed=0)
    layout = MarlinLayout(q, X.dtype)
    assert layout._prepare_launch(torch.zeros(1, 96, dtype=X.dtype), None) is None


@ONLY_TRITON
def test_tuning(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuning may choose another configuration, even in another thread during preparation."""
    setup.launched()
    tuned = triton_backend.launched_gemv
    monkeypatch.setattr(autotune, "times_measured", autotune.times_measured + 1)
    assert [setup.launched() for _ in range(2)] == [False, True]

    def tune_meanwhile(*key: object) -> object:
        monkeypatch.setattr(autotune, "times_measured", autotune.times_measured + 1)
        return tuned(*key)

    monkeypatch.setattr(triton_backend, "launched_gemv", tune_meanwhile)
    assert [setup.launched(X[:1]) for _ in range(3)] == [False] * 3


@ONLY_TRITON
def test_other_kernels_of_triton(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch is cached if the kernel was not launched or another kernel is configured."""
    with monkeypatch.context() as patch:
        patch.setattr(triton_backend, "launched_gemv", lambda *_: None)
        assert [setup.launched() for _ in range(2)] == [False] * 2
    monkeypatch.setattr(autotune, "choose", lambda *_: None)
    assert [setup.launched() for _ in range(2)] == [False] * 2


def test_batch_invariant_layouts_cache_nothing(setup: Setup) -> None:
    setup.layout.batch_invariant = True
    assert [setup.launched() for _ in range(2)] == [False] * 2
    assert len(setup.layout._launches) == 0


def test_size_and_copies(setup: Setup) -> None:
    for dims in range(2 * MAX_LAUNCHES):
        shape = *[1] * (dims % 60), 1 + dims % 16, K
        setup.launched(torch.zeros(shape, dtype=X.dtype))
        assert 0 < len(setup.layout._launches) <= MAX_LAUNCHES
    assert len(copy.deepcopy(setup.layout._launches)) == 0


def test_torch_compile_traces_the_op() -> None:
    """The graph holds no cached launch, even if the layout has some."""
    graphs = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lambda *args: (torch.zeros(2, N),)

    layout = MarlinLayout(random_quantised(Format.parse("nf4-g64"), N, K, seed=0), X.dtype)
    layout._launches.launch = lambda *_: pytest.fail("traced")  # type: ignore[method-assign]
    torch.compile(layout, backend=keep, fullgraph=True)(X)
    (graph,) = graphs
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == ["fdk_cuda.marlin_linear.default"]
